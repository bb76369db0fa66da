/* SPDX-License-Identifier: Apache-2.0 */
#include "smi_nvml.h"

#include <dlfcn.h>
#include <stdio.h>

struct smi_nvml nvml;

int smi_open(void)
{
	void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
	if (library == NULL) {
		printf(
		    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that "
		    "the "
		    "NVIDIA Display Driver is properly installed and present in your system.\n"
		    "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n");
		return NVML_ERROR_LIBRARY_NOT_FOUND;
	}
#define SMI_FIND(name) nvml.name = (__typeof__(nvml.name))dlsym(library, "nvml" #name);
	SMI_FUNCTIONS(SMI_FIND)
#undef SMI_FIND
	nvmlReturn_t result = NVML(Init_v2);
	if (result == NVML_ERROR_DRIVER_NOT_LOADED)
		printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make "
		       "sure that the "
		       "latest NVIDIA driver is installed and running.\n\n");
	else if (result != NVML_SUCCESS)
		printf("Failed to initialize NVML: %s\n", smi_error(result));
	return (int)result;
}

const char *smi_error(nvmlReturn_t result)
{
	return nvml.ErrorString != NULL ? nvml.ErrorString(result) : "Unknown Error";
}
