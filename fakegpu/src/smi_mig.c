/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-smi mig: profiles and instances, listed, created and destroyed.
 */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "smi.h"

struct mig_options {
	enum {
		NOTHING,
		LIST_GI_PROFILES,
		LIST_GI,
		LIST_CI_PROFILES,
		LIST_CI,
		CREATE_GI,
		CREATE_CI,
		DESTROY_GI,
		DESTROY_CI
	} verb;
	const char *profiles; /* of -cgi and -cci */
	const char *gi, *ci; /* -gi and -ci: lists of ids */
	int with_compute; /* -C */
};

/* 1 when `id` stands in the comma separated list, or there is none. */
static int chosen(const char *list, unsigned int id)
{
	char text[12];
	if (list == NULL)
		return 1;
	snprintf(text, sizeof(text), "%u", id);
	for (const char *at = list; *at != '\0';) {
		size_t length = strcspn(at, ",");
		if (length == strlen(text) && strncmp(at, text, length) == 0)
			return 1;
		at += length + (at[length] == ',');
	}
	return 0;
}

/* A profile of a card with its name; older drivers do not tell that, then it is "MIG <slices>g.<GB>gb". */
static int gi_profile(nvmlDevice_t device, unsigned int number, nvmlGpuInstanceProfileInfo_v2_t *info)
{
	nvmlGpuInstanceProfileInfo_t old;
	info->version = nvmlGpuInstanceProfileInfo_v2;
	nvmlReturn_t result = NVML(DeviceGetGpuInstanceProfileInfoV, device, number, info);
	if (result == NVML_ERROR_FUNCTION_NOT_FOUND &&
	    (result = NVML(DeviceGetGpuInstanceProfileInfo, device, number, &old)) == NVML_SUCCESS) {
		info->id = old.id;
		info->sliceCount = old.sliceCount;
		info->instanceCount = old.instanceCount;
		info->multiprocessorCount = old.multiprocessorCount;
		info->copyEngineCount = old.copyEngineCount;
		info->decoderCount = old.decoderCount;
		info->encoderCount = old.encoderCount;
		info->memorySizeMB = old.memorySizeMB;
		snprintf(info->name, sizeof(info->name), "MIG %ug.%llugb", old.sliceCount,
			 (old.memorySizeMB + 512) / 1024);
	}
	return result == NVML_SUCCESS;
}

static int list_gi_profiles(const struct smi_device *one)
{
	int any = 0;
	for (unsigned int number = 0; number < NVML_GPU_INSTANCE_PROFILE_COUNT; number++) {
		nvmlGpuInstanceProfileInfo_v2_t info;
		unsigned int room = 0;
		if (!gi_profile(one->handle, number, &info))
			continue;
		NVML(DeviceGetGpuInstanceRemainingCapacity, one->handle, info.id, &room);
		printf("|%4u  %-20s %4u    %2u/%-2u  %10.2f       %s  %6u %5u %5u   |\n", one->index,
		       info.name, info.id, room, info.instanceCount, (double)info.memorySizeMB / 1024.0, "No",
		       info.multiprocessorCount, info.decoderCount, info.encoderCount);
		any = 1;
	}
	return any;
}

/* ---- walks -------------------------------------------------------------------------------------------- */

typedef int (*gi_visit)(const struct smi_device *, nvmlGpuInstance_t, const nvmlGpuInstanceInfo_t *,
			const nvmlGpuInstanceProfileInfo_v2_t *, const struct mig_options *);

/* Calls `visit` for every GPU instance that -gi chooses; returns how many, -1 when one of them failed. */
static int each_gi(const struct smi_device *one, const struct mig_options *options, gi_visit visit)
{
	int count = 0;
	for (unsigned int number = 0; number < NVML_GPU_INSTANCE_PROFILE_COUNT; number++) {
		nvmlGpuInstanceProfileInfo_v2_t profile;
		nvmlGpuInstance_t list[32];
		unsigned int have = 0;
		if (!gi_profile(one->handle, number, &profile) || profile.instanceCount > 32 ||
		    NVML(DeviceGetGpuInstances, one->handle, profile.id, list, &have) != NVML_SUCCESS)
			continue;
		for (unsigned int i = 0; i < have; i++) {
			nvmlGpuInstanceInfo_t info;
			if (NVML(GpuInstanceGetInfo, list[i], &info) != NVML_SUCCESS ||
			    !chosen(options->gi, info.id))
				continue;
			if (visit(one, list[i], &info, &profile, options) < 0)
				return -1;
			count++;
		}
	}
	return count;
}

static int show_gi(const struct smi_device *one, nvmlGpuInstance_t gi, const nvmlGpuInstanceInfo_t *info,
		   const nvmlGpuInstanceProfileInfo_v2_t *profile, const struct mig_options *options)
{
	(void)gi;
	(void)options;
	printf("|%4u  %-20s %5u  %6u        %u:%u     |\n", one->index, profile->name, profile->id, info->id,
	       info->placement.start, info->placement.size);
	return 0;
}

static int ci_profile(nvmlGpuInstance_t gi, unsigned int number, nvmlComputeInstanceProfileInfo_v2_t *info)
{
	info->version = nvmlComputeInstanceProfileInfo_v2;
	return NVML(GpuInstanceGetComputeInstanceProfileInfoV, gi, number,
		    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, info) == NVML_SUCCESS;
}

static int show_ci_profiles(const struct smi_device *one, nvmlGpuInstance_t gi,
			    const nvmlGpuInstanceInfo_t *info, const nvmlGpuInstanceProfileInfo_v2_t *parent,
			    const struct mig_options *options)
{
	(void)options;
	for (unsigned int number = 0; number < NVML_COMPUTE_INSTANCE_PROFILE_COUNT; number++) {
		nvmlComputeInstanceProfileInfo_v2_t profile;
		unsigned int room = 0;
		if (!ci_profile(gi, number, &profile))
			continue;
		NVML(GpuInstanceGetComputeInstanceRemainingCapacity, gi, profile.id, &room);
		printf("|%4u  %4u  %-22s %4u%s    %u/%u  %8u      |\n", one->index, info->id, profile.name,
		       profile.id, profile.sliceCount == parent->sliceCount ? "*" : " ", room,
		       profile.instanceCount, profile.multiprocessorCount);
	}
	return 0;
}

typedef int (*ci_visit)(const struct smi_device *, const nvmlGpuInstanceInfo_t *, nvmlComputeInstance_t,
			const nvmlComputeInstanceInfo_t *, const nvmlComputeInstanceProfileInfo_v2_t *);

static int each_ci(const struct smi_device *one, nvmlGpuInstance_t gi, const nvmlGpuInstanceInfo_t *info,
		   const struct mig_options *options, ci_visit visit)
{
	for (unsigned int number = 0; number < NVML_COMPUTE_INSTANCE_PROFILE_COUNT; number++) {
		nvmlComputeInstanceProfileInfo_v2_t profile;
		nvmlComputeInstance_t list[32];
		unsigned int have = 0;
		if (!ci_profile(gi, number, &profile) ||
		    NVML(GpuInstanceGetComputeInstances, gi, profile.id, list, &have) != NVML_SUCCESS)
			continue;
		for (unsigned int i = 0; i < have; i++) {
			nvmlComputeInstanceInfo_t what;
			if (NVML(ComputeInstanceGetInfo_v2, list[i], &what) == NVML_SUCCESS &&
			    chosen(options->ci, what.id) && visit(one, info, list[i], &what, &profile) < 0)
				return -1;
		}
	}
	return 0;
}

static int found_ci; /* how many the walk met */

static int show_one_ci(const struct smi_device *one, const nvmlGpuInstanceInfo_t *gi,
		       nvmlComputeInstance_t ci, const nvmlComputeInstanceInfo_t *info,
		       const nvmlComputeInstanceProfileInfo_v2_t *profile)
{
	(void)ci;
	found_ci++;
	printf("|%4u  %4u  %-22s %4u  %6u       %u:%u    |\n", one->index, gi->id, profile->name, profile->id,
	       info->id, info->placement.start, info->placement.size);
	return 0;
}

static int show_ci(const struct smi_device *one, nvmlGpuInstance_t gi, const nvmlGpuInstanceInfo_t *info,
		   const nvmlGpuInstanceProfileInfo_v2_t *profile, const struct mig_options *options)
{
	(void)profile;
	return each_ci(one, gi, info, options, show_one_ci);
}

/* ---- changes ------------------------------------------------------------------------------------------ */

static nvmlReturn_t failure; /* of the last change */

static int destroy_one_ci(const struct smi_device *one, const nvmlGpuInstanceInfo_t *gi,
			  nvmlComputeInstance_t ci, const nvmlComputeInstanceInfo_t *info,
			  const nvmlComputeInstanceProfileInfo_v2_t *profile)
{
	(void)profile;
	found_ci++;
	failure = NVML(ComputeInstanceDestroy, ci);
	if (failure == NVML_SUCCESS)
		printf("Successfully destroyed compute instance ID %2u from GPU %2u GPU instance ID %2u\n",
		       info->id, one->index, gi->id);
	else
		printf("Unable to destroy compute instance ID %2u from GPU %2u GPU instance ID %2u: %s\n",
		       info->id, one->index, gi->id, smi_error(failure));
	return failure == NVML_SUCCESS ? 0 : -1;
}

static int destroy_ci(const struct smi_device *one, nvmlGpuInstance_t gi, const nvmlGpuInstanceInfo_t *info,
		      const nvmlGpuInstanceProfileInfo_v2_t *profile, const struct mig_options *options)
{
	(void)profile;
	return each_ci(one, gi, info, options, destroy_one_ci);
}

static int destroy_gi(const struct smi_device *one, nvmlGpuInstance_t gi, const nvmlGpuInstanceInfo_t *info,
		      const nvmlGpuInstanceProfileInfo_v2_t *profile, const struct mig_options *options)
{
	(void)profile;
	(void)options;
	failure = NVML(GpuInstanceDestroy, gi);
	if (failure == NVML_SUCCESS)
		printf("Successfully destroyed GPU instance ID %2u from GPU %2u\n", info->id, one->index);
	else
		printf("Unable to destroy GPU instance ID %2u from GPU %2u: %s\n", info->id, one->index,
		       smi_error(failure));
	return failure == NVML_SUCCESS ? 0 : -1;
}

static int create_one_ci(const struct smi_device *one, nvmlGpuInstance_t gi,
			 const nvmlGpuInstanceInfo_t *info,
			 const nvmlComputeInstanceProfileInfo_v2_t *profile)
{
	nvmlComputeInstance_t ci;
	nvmlComputeInstanceInfo_t what = {0};
	failure = NVML(GpuInstanceCreateComputeInstance, gi, profile->id, &ci);
	if (failure != NVML_SUCCESS) {
		printf("Unable to create a compute instance on GPU %2u GPU instance ID %2u using profile %s "
		       "(ID %2u): %s\n",
		       one->index, info->id, profile->name, profile->id, smi_error(failure));
		return -1;
	}
	NVML(ComputeInstanceGetInfo_v2, ci, &what);
	printf("Successfully created compute instance ID %2u on GPU %2u GPU instance ID %2u using profile %s "
	       "(ID %2u)\n",
	       what.id, one->index, info->id, profile->name, profile->id);
	return 0;
}

/* "MIG 1g.5gb" is meant by 19, by 1g.5gb and by "MIG 1g.5gb". */
static int is_meant(const char *word, unsigned int id, const char *name)
{
	char *end;
	unsigned long number = strtoul(word, &end, 10);
	if (*word != '\0' && *end == '\0')
		return number == id;
	return strcmp(word, name) == 0 || (strncmp(name, "MIG ", 4) == 0 && strcmp(word, name + 4) == 0);
}

/* Without a list, the one that fills the GPU instance. */
static int create_ci(const struct smi_device *one, nvmlGpuInstance_t gi, const nvmlGpuInstanceInfo_t *info,
		     const nvmlGpuInstanceProfileInfo_v2_t *parent, const struct mig_options *options)
{
	char list[256];
	snprintf(list, sizeof(list), "%s",
		 options->profiles != NULL && options->verb == CREATE_CI ? options->profiles : "*");
	for (char *rest = list, *word; (word = strsep(&rest, ",")) != NULL;) {
		int done = 0;
		for (unsigned int number = 0; number < NVML_COMPUTE_INSTANCE_PROFILE_COUNT && !done;
		     number++) {
			nvmlComputeInstanceProfileInfo_v2_t profile;
			if (!ci_profile(gi, number, &profile))
				continue;
			if (strcmp(word, "*") == 0 ? profile.sliceCount != parent->sliceCount
						   : !is_meant(word, profile.id, profile.name))
				continue;
			done = 1;
			if (create_one_ci(one, gi, info, &profile) != 0)
				return -1;
		}
		if (!done) {
			printf("No compute instance profile \"%s\" on GPU %2u GPU instance ID %2u.\n", word,
			       one->index, info->id);
			failure = NVML_ERROR_NOT_FOUND;
			return -1;
		}
	}
	return 0;
}

static int create_one_gi(const struct smi_device *one, const nvmlGpuInstanceProfileInfo_v2_t *profile,
			 const struct mig_options *options)
{
	nvmlGpuInstance_t gi;
	nvmlGpuInstanceInfo_t info = {0};
	failure = NVML(DeviceCreateGpuInstance, one->handle, profile->id, &gi);
	if (failure != NVML_SUCCESS) {
		printf("Unable to create a GPU instance on GPU %2u using profile %s (ID %2u): %s\n",
		       one->index, profile->name, profile->id, smi_error(failure));
		return -1;
	}
	NVML(GpuInstanceGetInfo, gi, &info);
	printf("Successfully created GPU instance ID %2u on GPU %2u using profile %s (ID %2u)\n", info.id,
	       one->index, profile->name, profile->id);
	return options->with_compute ? create_ci(one, gi, &info, profile, options) : 0;
}

static int create_gi(const struct smi_device *one, const struct mig_options *options)
{
	char list[256];
	snprintf(list, sizeof(list), "%s", options->profiles);
	for (char *rest = list, *word; (word = strsep(&rest, ",")) != NULL;) {
		int done = 0;
		for (unsigned int number = 0; number < NVML_GPU_INSTANCE_PROFILE_COUNT && !done; number++) {
			nvmlGpuInstanceProfileInfo_v2_t profile;
			if (!gi_profile(one->handle, number, &profile) ||
			    !is_meant(word, profile.id, profile.name))
				continue;
			done = 1;
			if (create_one_gi(one, &profile, options) != 0)
				return -1;
		}
		if (!done) {
			printf("No GPU instance profile \"%s\" on GPU %2u.\n", word, one->index);
			failure = NVML_ERROR_NOT_FOUND;
			return -1;
		}
	}
	return 0;
}

/* ---- the command -------------------------------------------------------------------------------------- */

static int read_options(int argc, char **argv, struct mig_options *options)
{
	static const struct {
		const char *letter, *word;
		int verb;
	} verbs[] = {
	    {"-lgip", "--list-gpu-instance-profiles", LIST_GI_PROFILES},
	    {"-lgi", "--list-gpu-instances", LIST_GI},
	    {"-lcip", "--list-compute-instance-profiles", LIST_CI_PROFILES},
	    {"-lci", "--list-compute-instances", LIST_CI},
	    {"-cgi", "--create-gpu-instance", CREATE_GI},
	    {"-cci", "--create-compute-instance", CREATE_CI},
	    {"-dgi", "--destroy-gpu-instance", DESTROY_GI},
	    {"-dci", "--destroy-compute-instance", DESTROY_CI},
	};
	for (int at = 0; at < argc; at++) {
		const char *argument = argv[at];
		int known = 0, has_value = at + 1 < argc && (argv[at + 1][0] != '-' ||
							     isdigit((unsigned char)argv[at + 1][1]));
		for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++)
			if (strcmp(argument, verbs[i].letter) == 0 || strcmp(argument, verbs[i].word) == 0) {
				options->verb = verbs[i].verb;
				known = 1;
				if ((verbs[i].verb == CREATE_GI || verbs[i].verb == CREATE_CI) && has_value)
					options->profiles = argv[++at];
			}
		if (known)
			continue;
		if (strcmp(argument, "-C") == 0 || strcmp(argument, "--default-compute-instance") == 0)
			options->with_compute = 1;
		else if (strcmp(argument, "-gi") == 0 && has_value)
			options->gi = argv[++at];
		else if (strcmp(argument, "-ci") == 0 && has_value)
			options->ci = argv[++at];
		else if (strcmp(argument, "-i") == 0 && has_value)
			at++; /* read before */
		else
			return -1;
	}
	return options->verb == NOTHING || (options->verb == CREATE_GI && options->profiles == NULL) ? -1 : 0;
}

static int one_device(const struct smi_device *one, const struct mig_options *options)
{
	switch (options->verb) {
	case LIST_GI_PROFILES:
		return list_gi_profiles(one);
	case LIST_GI:
		return each_gi(one, options, show_gi);
	case LIST_CI_PROFILES:
		return each_gi(one, options, show_ci_profiles);
	case LIST_CI:
		return each_gi(one, options, show_ci) < 0 ? -1 : found_ci;
	case CREATE_GI:
		return create_gi(one, options) < 0 ? -1 : 1;
	case CREATE_CI:
		return each_gi(one, options, create_ci);
	case DESTROY_GI:
		return each_gi(one, options, destroy_gi);
	case DESTROY_CI:
		return each_gi(one, options, destroy_ci) < 0 ? -1 : found_ci;
	case NOTHING:
	default:
		return 0;
	}
}

static const char *title(const struct mig_options *options)
{
	switch (options->verb) {
	case LIST_GI_PROFILES:
		return "| GPU   Name                   ID    Free/Max  Memory GiB   P2P    SM   DEC   ENC   "
		       "|\n";
	case LIST_GI:
		return "| GPU   Name              Profile ID  Instance ID  Placement |\n";
	case LIST_CI_PROFILES:
		return "| GPU   GI ID  Name               Profile ID  Free/Max  SM      |\n";
	case LIST_CI:
		return "| GPU   GI ID  Name               Profile ID  Instance ID  Placement |\n";
	default:
		return "";
	}
}

int smi_mig(const struct smi_devices *devices, int argc, char **argv)
{
	struct mig_options options = {.verb = NOTHING};
	int found = 0;
	if (read_options(argc, argv, &options) != 0) {
		printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n");
		return 2;
	}
	for (unsigned int i = 0; i < devices->count; i++) {
		unsigned int mode = 0, pending;
		const struct smi_device *one = &devices->device[i];
		if (one->state != NVML_SUCCESS ||
		    NVML(DeviceGetMigMode, one->handle, &mode, &pending) != NVML_SUCCESS ||
		    (!mode && options.verb != LIST_GI_PROFILES))
			continue;
		if (!found)
			printf("%s", title(&options));
		int count = one_device(one, &options);
		if (count < 0)
			return (int)failure;
		found += count;
	}
	if (found > 0)
		return 0;
	printf(options.verb == LIST_GI_PROFILES ? "No GPU supports MIG.\n"
	       : options.verb == LIST_GI        ? "No GPU instances found: Not Found\n"
						: "No MIG-enabled devices found.\n");
	return NVML_ERROR_NOT_FOUND;
}
