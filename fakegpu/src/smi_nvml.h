/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-smi's way to NVML: whatever libnvidia-ml.so.1 the loader finds, opened at run time, function by
 * function. A function that the library lacks is NULL and its figure "N/A". So the tool shows what NVML says
 * in this very process, hooks included, on our library and on a real one alike; it knows nothing of the fake
 * driver.
 */
#ifndef FAKEGPU_SMI_NVML_H
#define FAKEGPU_SMI_NVML_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS 1
#include <nvml.h>
#include <stddef.h>

/* Every function that the tool calls, without "nvml". */
#define SMI_FUNCTIONS(F)                                  \
	F(Init_v2)                                        \
	F(Shutdown)                                       \
	F(ErrorString)                                    \
	F(SystemGetDriverVersion)                         \
	F(SystemGetNVMLVersion)                           \
	F(SystemGetCudaDriverVersion_v2)                  \
	F(SystemGetProcessName)                           \
	F(DeviceGetCount_v2)                              \
	F(DeviceGetHandleByIndex_v2)                      \
	F(DeviceGetHandleByUUID)                          \
	F(DeviceGetHandleByPciBusId_v2)                   \
	F(DeviceGetHandleBySerial)                        \
	F(DeviceGetName)                                  \
	F(DeviceGetBrand)                                 \
	F(DeviceGetArchitecture)                          \
	F(DeviceGetUUID)                                  \
	F(DeviceGetSerial)                                \
	F(DeviceGetIndex)                                 \
	F(DeviceGetMinorNumber)                           \
	F(DeviceGetVbiosVersion)                          \
	F(DeviceGetBoardPartNumber)                       \
	F(DeviceGetInforomImageVersion)                   \
	F(DeviceGetGspFirmwareVersion)                    \
	F(DeviceGetCudaComputeCapability)                 \
	F(DeviceGetPciInfo_v3)                            \
	F(DeviceGetMaxPcieLinkGeneration)                 \
	F(DeviceGetCurrPcieLinkGeneration)                \
	F(DeviceGetMaxPcieLinkWidth)                      \
	F(DeviceGetCurrPcieLinkWidth)                     \
	F(DeviceGetMemoryInfo)                            \
	F(DeviceGetMemoryInfo_v2)                         \
	F(DeviceGetBAR1MemoryInfo)                        \
	F(DeviceGetUtilizationRates)                      \
	F(DeviceGetEncoderUtilization)                    \
	F(DeviceGetDecoderUtilization)                    \
	F(DeviceGetTemperature)                           \
	F(DeviceGetTemperatureThreshold)                  \
	F(DeviceGetFanSpeed)                              \
	F(DeviceGetPowerUsage)                            \
	F(DeviceGetEnforcedPowerLimit)                    \
	F(DeviceGetPowerManagementLimit)                  \
	F(DeviceGetPowerManagementDefaultLimit)           \
	F(DeviceGetPowerManagementLimitConstraints)       \
	F(DeviceGetPerformanceState)                      \
	F(DeviceGetClockInfo)                             \
	F(DeviceGetMaxClockInfo)                          \
	F(DeviceGetApplicationsClock)                     \
	F(DeviceGetCurrentClocksThrottleReasons)          \
	F(DeviceGetPersistenceMode)                       \
	F(DeviceSetPersistenceMode)                       \
	F(DeviceGetComputeMode)                           \
	F(DeviceSetComputeMode)                           \
	F(DeviceGetDisplayActive)                         \
	F(DeviceGetDisplayMode)                           \
	F(DeviceGetAccountingMode)                        \
	F(DeviceSetAccountingMode)                        \
	F(DeviceGetEccMode)                               \
	F(DeviceSetEccMode)                               \
	F(DeviceGetTotalEccErrors)                        \
	F(DeviceGetRemappedRows)                          \
	F(DeviceSetPowerManagementLimit)                  \
	F(DeviceGetComputeRunningProcesses_v3)            \
	F(DeviceGetComputeRunningProcesses_v2)            \
	F(DeviceGetGraphicsRunningProcesses_v3)           \
	F(DeviceGetMPSComputeRunningProcesses_v3)         \
	F(DeviceGetTopologyCommonAncestor)                \
	F(DeviceGetCpuAffinity)                           \
	F(DeviceGetMemoryAffinity)                        \
	F(DeviceGetNvLinkState)                           \
	F(DeviceGetNvLinkRemotePciInfo_v2)                \
	F(DeviceGetNvLinkRemoteDeviceType)                \
	F(DeviceGetMigMode)                               \
	F(DeviceSetMigMode)                               \
	F(DeviceGetMaxMigDeviceCount)                     \
	F(DeviceGetMigDeviceHandleByIndex)                \
	F(DeviceGetGpuInstanceId)                         \
	F(DeviceGetComputeInstanceId)                     \
	F(DeviceGetAttributes_v2)                         \
	F(DeviceGetGpuInstanceProfileInfoV)               \
	F(DeviceGetGpuInstanceProfileInfo)                \
	F(DeviceGetGpuInstanceRemainingCapacity)          \
	F(DeviceGetGpuInstances)                          \
	F(DeviceGetGpuInstanceById)                       \
	F(DeviceCreateGpuInstance)                        \
	F(GpuInstanceGetInfo)                             \
	F(GpuInstanceDestroy)                             \
	F(GpuInstanceGetComputeInstanceProfileInfoV)      \
	F(GpuInstanceGetComputeInstanceRemainingCapacity) \
	F(GpuInstanceGetComputeInstances)                 \
	F(GpuInstanceCreateComputeInstance)               \
	F(ComputeInstanceGetInfo_v2)                      \
	F(ComputeInstanceDestroy)

/* Some are deprecated in the newest header; they are what drivers of every age have. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
struct smi_nvml {
#define SMI_MEMBER(name) __typeof__(nvml##name) *name;
	SMI_FUNCTIONS(SMI_MEMBER)
#undef SMI_MEMBER
};
#pragma GCC diagnostic pop
extern struct smi_nvml nvml;

/* Calls a function that may be missing; NVML_ERROR_FUNCTION_NOT_FOUND then. */
#define NVML(name, ...) (nvml.name != NULL ? nvml.name(__VA_ARGS__) : NVML_ERROR_FUNCTION_NOT_FOUND)

/* Opens the library and initialises it. On failure says why, as the real tool does, and returns its exit
 * status. */
int smi_open(void);
const char *smi_error(nvmlReturn_t result);

#endif
