/* SPDX-License-Identifier: Apache-2.0
 *
 * See standalone.h. CUDA_DEVICE_MEMORY_LIMIT[_N], CUDA_DEVICE_SM_LIMIT[_N], GPU_CORE_UTILIZATION_POLICY,
 * CUDA_TASK_PRIORITY, CUDA_OVERSUBSCRIBE. 0, nothing, or what is no number: no limit, everywhere alike.
 *
 * The accounts of all cards lie in the file of HAMi's region, behind it (view.h), so that the processes of a
 * container find each other; where that cannot be had each process has an account of its own.
 */
#include "standalone.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/auxv.h>

#include "grants.h"
#include "lock.h"
#include "pages.h"
#include "process.h"
#include "resolve.h"
#include "view.h"

#define MOST_INDICES 16

struct limits {
	uint64_t memory[MOST_INDICES]; /* bytes; 0 = none */
	uint32_t cores[MOST_INDICES]; /* percent; 0 = none */
	uint32_t policy;
	uint32_t priority;
	uint32_t flags;
};

static struct limits limits;

/* A program that runs with another user's rights does not take limits from whoever started it; then there are
 * none, as in HAMi. */
static const char *variable(const char *name)
{
	return getauxval(AT_SECURE) ? NULL : getenv(name);
}

static const char *indexed(char *buffer, const char *name, int index)
{
	size_t length = strlen(name);
	memcpy(buffer, name, length);
	buffer[length++] = '_';
	if (index >= 10)
		buffer[length++] = (char)('0' + index / 10);
	buffer[length++] = (char)('0' + index % 10);
	buffer[length] = '\0';
	return variable(buffer);
}

/* A number with an optional suffix g, m or k of 1024; 0 for anything else. */
static uint64_t parse_size(const char *text)
{
	char *end;
	if (text == NULL || *text == '-')
		return 0;
	uint64_t value = strtoull(text, &end, 0);
	unsigned shift = 0;
	if (end == text)
		return 0;
	if (*end == 'g' || *end == 'G')
		shift = 30;
	else if (*end == 'm' || *end == 'M')
		shift = 20;
	else if (*end == 'k' || *end == 'K')
		shift = 10;
	if (shift)
		end++;
	if (*end != '\0' || value > UINT64_MAX >> shift)
		return 0;
	return value << shift;
}

static uint32_t parse_percent(const char *text)
{
	uint64_t value = parse_size(text);
	return value >= 1 && value <= 99 ? (uint32_t)value : 0;
}

static bool truth(const char *text)
{
	return text && (strcasecmp(text, "true") == 0 || strcmp(text, "1") == 0);
}

enum aq_mode aq_standalone_read(void)
{
	char name[64];
	uint64_t memory = parse_size(variable("CUDA_DEVICE_MEMORY_LIMIT"));
	uint32_t cores = parse_percent(variable("CUDA_DEVICE_SM_LIMIT"));
	const char *policy = variable("GPU_CORE_UTILIZATION_POLICY");
	const char *priority = variable("CUDA_TASK_PRIORITY");
	bool any = false;
	for (int i = 0; i < MOST_INDICES; i++) {
		const char *own = indexed(name, "CUDA_DEVICE_MEMORY_LIMIT", i);
		limits.memory[i] = own ? parse_size(own) : memory;
		own = indexed(name, "CUDA_DEVICE_SM_LIMIT", i);
		limits.cores[i] = own ? parse_percent(own) : cores;
		any = any || limits.memory[i] || limits.cores[i];
	}
	limits.policy = AQ_CORE_DEFAULT;
	if (policy && strcasecmp(policy, "force") == 0)
		limits.policy = AQ_CORE_FORCE;
	else if (policy && strcasecmp(policy, "disable") == 0)
		limits.policy = AQ_CORE_DISABLE;
	limits.priority = priority && strtol(priority, NULL, 0) == 0 ? 0 : 1;
	limits.flags = truth(variable("CUDA_OVERSUBSCRIBE")) ? AQ_GRANT_OVERSUBSCRIBE : 0;
	return any ? AQ_MODE_STANDALONE : AQ_MODE_OFF;
}

static void blank_usage(struct aq_usage_file *file)
{
	/* Every process writes the same values, the one that makes it valid last. */
	file->file_size = AQ_USAGE_FILE_SIZE;
	file->header_size = AQ_USAGE_HEADER_SIZE;
	file->slot_size = AQ_USAGE_SLOT_SIZE;
	file->slot_count = AQ_USAGE_SLOTS;
	file->major = AQ_REGION_MAJOR;
	file->minor = AQ_REGION_MINOR;
	__atomic_store_n(&file->magic, AQ_USAGE_MAGIC, __ATOMIC_RELEASE);
}

/* The account of card `index`: shared by the container, or else this process's own. */
static bool bind_account(struct aq_account *account, int index)
{
	struct aq_usage_file *file = aq_view_account((unsigned)index);
	if (file) {
		if (__atomic_load_n(&file->magic, __ATOMIC_ACQUIRE) == 0)
			blank_usage(file);
		if (aq_account_bind(account, file, AQ_USAGE_FILE_SIZE) == 0)
			return true;
	}
	file = aq_pages(AQ_USAGE_FILE_SIZE);
	if (file == NULL)
		return false;
	blank_usage(file);
	return aq_account_bind(account, file, AQ_USAGE_FILE_SIZE) == 0;
}

static int add(const CUuuid *uuid, int index)
{
	struct aq_share *share = &aq_shares[aq_share_count];
	if (aq_share_count == AQ_MAX_SHARES || aq_card_count == AQ_MAX_CARDS || index < 0 ||
	    index >= MOST_INDICES)
		return AQ_NO_CARD;
	*share = (struct aq_share){
	    .limit = limits.memory[index] ? limits.memory[index] >> AQ_UNIT_SHIFT : AQ_UNLIMITED,
	    .core_percent = limits.cores[index],
	    .core_policy = limits.policy,
	    .priority = limits.priority,
	    .flags = limits.flags,
	    .index = aq_share_count,
	    .standalone_index = index,
	};
	if (!bind_account(&share->account, index))
		return AQ_NO_CARD;
	aq_view_describe((unsigned)index, uuid, limits.memory[index], limits.cores[index], limits.priority);
	int card = aq_card_add(uuid, aq_share_count);
	if (card != AQ_NO_CARD)
		aq_share_count++;
	return card;
}

int aq_standalone_card(const CUuuid *uuid, int index)
{
	int card = aq_card_by_uuid(uuid);
	if (card != AQ_NO_CARD)
		return card;
	struct aq_process *process = aq_process();
	aq_lock(&process->deciding);
	card = aq_card_by_uuid(uuid);
	if (card == AQ_NO_CARD) {
		aq_view_open(true);
		card = add(uuid, index);
	}
	aq_unlock(&process->deciding);
	return card;
}

static void uuid_text(const CUuuid *uuid, char text[41])
{
	static const char digits[] = "0123456789abcdef";
	char *next = text;
	memcpy(next, "GPU-", 4);
	next += 4;
	for (unsigned i = 0; i < sizeof(uuid->bytes); i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			*next++ = '-';
		*next++ = digits[uuid->bytes[i] >> 4];
		*next++ = digits[uuid->bytes[i] & 15];
	}
	*next = '\0';
}

int aq_standalone_index(const CUuuid *uuid, int ordinal, int count)
{
	/* With one device, or the same limits for all, there is nothing to tell apart. */
	bool same = count == 1 && getenv("CUDA_VISIBLE_DEVICES") == NULL;
	unsigned index = (unsigned)ordinal;
	char text[41];
	nvmlDevice_t device;
	if (same || !aq_load_nvml() || REAL(nvmlInit_v2)() != NVML_SUCCESS)
		return ordinal;
	uuid_text(uuid, text);
	if (REAL(nvmlDeviceGetHandleByUUID)(text, &device) == NVML_SUCCESS &&
	    REAL(nvmlDeviceGetIndex)(device, &index) != NVML_SUCCESS)
		index = (unsigned)ordinal;
	REAL(nvmlShutdown)();
	return (int)index;
}
