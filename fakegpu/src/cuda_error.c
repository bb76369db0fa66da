/* SPDX-License-Identifier: Apache-2.0
 *
 * Names and texts of the driver's results.
 */
#include "cuda_core.h"

#define ROW(name, text) {CUDA_##name, "CUDA_" #name, text}

static const struct row {
	CUresult code;
	const char *name, *text;
} rows[] = {
    ROW(SUCCESS, "no error"),
    ROW(ERROR_INVALID_VALUE, "invalid argument"),
    ROW(ERROR_OUT_OF_MEMORY, "out of memory"),
    ROW(ERROR_NOT_INITIALIZED, "initialization error"),
    ROW(ERROR_DEINITIALIZED, "driver shutting down"),
    ROW(ERROR_PROFILER_DISABLED, "profiler disabled while using external profiling tool"),
    ROW(ERROR_PROFILER_NOT_INITIALIZED, "profiler not initialized"),
    ROW(ERROR_PROFILER_ALREADY_STARTED, "profiler already started"),
    ROW(ERROR_PROFILER_ALREADY_STOPPED, "profiler already stopped"),
    ROW(ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
    ROW(ERROR_CALL_REQUIRES_NEWER_DRIVER, "API call requires a newer CUDA driver"),
    ROW(ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable"),
    ROW(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ROW(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ROW(ERROR_DEVICE_NOT_LICENSED, "device doesn't have valid Grid license"),
    ROW(ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ROW(ERROR_INVALID_CONTEXT, "invalid device context"),
    ROW(ERROR_CONTEXT_ALREADY_CURRENT, "context already current"),
    ROW(ERROR_MAP_FAILED, "mapping of buffer object failed"),
    ROW(ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
    ROW(ERROR_ARRAY_IS_MAPPED, "array is mapped"),
    ROW(ERROR_ALREADY_MAPPED, "resource already mapped"),
    ROW(ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ROW(ERROR_ALREADY_ACQUIRED, "resource already acquired"),
    ROW(ERROR_NOT_MAPPED, "resource not mapped"),
    ROW(ERROR_NOT_MAPPED_AS_ARRAY, "resource not mapped as array"),
    ROW(ERROR_NOT_MAPPED_AS_POINTER, "resource not mapped as pointer"),
    ROW(ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ROW(ERROR_UNSUPPORTED_LIMIT, "limit is not supported on this architecture"),
    ROW(ERROR_CONTEXT_ALREADY_IN_USE, "exclusive-thread device already in use by a different thread"),
    ROW(ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    ROW(ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    ROW(ERROR_INVALID_GRAPHICS_CONTEXT, "invalid OpenGL or DirectX context"),
    ROW(ERROR_NVLINK_UNCORRECTABLE, "uncorrectable NVLink error detected during the execution"),
    ROW(ERROR_JIT_COMPILER_NOT_FOUND, "PTX JIT compiler library not found"),
    ROW(ERROR_UNSUPPORTED_PTX_VERSION, "the provided PTX was compiled with an unsupported toolchain."),
    ROW(ERROR_JIT_COMPILATION_DISABLED, "PTX JIT compilation was disabled"),
    ROW(ERROR_UNSUPPORTED_EXEC_AFFINITY, "the provided execution affinity is not supported"),
    ROW(ERROR_CONTAINED, "Invalid resource, see other errors"),
    ROW(ERROR_INVALID_SOURCE, "device kernel image is invalid"),
    ROW(ERROR_FILE_NOT_FOUND, "file not found"),
    ROW(ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, "shared object symbol not found"),
    ROW(ERROR_SHARED_OBJECT_INIT_FAILED, "shared object initialization failed"),
    ROW(ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ROW(ERROR_INVALID_HANDLE, "invalid resource handle"),
    ROW(ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ROW(ERROR_LOSSY_QUERY, "attempted introspection would be semantically lossy"),
    ROW(ERROR_NOT_FOUND, "named symbol not found"),
    ROW(ERROR_NOT_READY, "device not ready"),
    ROW(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ROW(ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ROW(ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    ROW(ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, "launch uses incompatible texturing mode"),
    ROW(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    ROW(ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    ROW(ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process"),
    ROW(ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ROW(ERROR_ASSERT, "device-side assert triggered"),
    ROW(ERROR_TOO_MANY_PEERS, "peer mapping resources exhausted"),
    ROW(ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ROW(ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ROW(ERROR_HARDWARE_STACK_ERROR, "hardware stack error"),
    ROW(ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered"),
    ROW(ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    ROW(ERROR_INVALID_ADDRESS_SPACE, "operation not supported on global/shared address space"),
    ROW(ERROR_INVALID_PC, "invalid program counter"),
    ROW(ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ROW(ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch"),
    ROW(ERROR_NOT_PERMITTED, "operation not permitted"),
    ROW(ERROR_NOT_SUPPORTED, "operation not supported"),
    ROW(ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    ROW(ERROR_SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver / cuda driver combination"),
    ROW(ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "forward compatibility was attempted on non supported HW"),
    ROW(ERROR_MPS_CONNECTION_FAILED,
	"MPS client failed to connect to the MPS control daemon or the MPS server"),
    ROW(ERROR_MPS_RPC_FAILURE, "the remote procedural call between the MPS server and the MPS client failed"),
    ROW(ERROR_MPS_SERVER_NOT_READY, "MPS server is not ready to accept new MPS client requests"),
    ROW(ERROR_MPS_MAX_CLIENTS_REACHED,
	"the hardware resources required to create MPS client have been exhausted"),
    ROW(ERROR_MPS_MAX_CONNECTIONS_REACHED,
	"the hardware resources required to support device connections have been exhausted"),
    ROW(ERROR_MPS_CLIENT_TERMINATED, "the MPS client has been terminated by the server"),
    ROW(ERROR_CDP_NOT_SUPPORTED, "a kernel launch uses dynamic parallelism, which is not supported here"),
    ROW(ERROR_CDP_VERSION_MISMATCH,
	"a kernel launch contains an unsupported mix of dynamic parallelism versions"),
    ROW(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ROW(ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ROW(ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    ROW(ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    ROW(ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ROW(ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    ROW(ERROR_STREAM_CAPTURE_IMPLICIT,
	"operation would make the legacy stream depend on a capturing blocking stream"),
    ROW(ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    ROW(ERROR_STREAM_CAPTURE_WRONG_THREAD,
	"attempt to terminate a thread-local capture sequence from another thread"),
    ROW(ERROR_TIMEOUT, "wait operation timed out"),
    ROW(ERROR_GRAPH_EXEC_UPDATE_FAILURE, "the graph update was not performed because it included changes "
					 "which violated constraints specific to instantiated graph update"),
    ROW(ERROR_EXTERNAL_DEVICE, "an async error has occurred in external entity outside of CUDA"),
    ROW(ERROR_INVALID_CLUSTER_SIZE, "a kernel launch error has occurred due to cluster misconfiguration"),
    ROW(ERROR_FUNCTION_NOT_LOADED, "the function handle is not loaded"),
    ROW(ERROR_INVALID_RESOURCE_TYPE,
	"one or more resources passed in are not valid resource types for the operation"),
    ROW(ERROR_INVALID_RESOURCE_CONFIGURATION,
	"one or more resources are insufficient or non-applicable for the operation"),
    ROW(ERROR_UNKNOWN, "unknown error"),
};

static const struct row *find(CUresult error)
{
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
		if (rows[i].code == error)
			return &rows[i];
	return NULL;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **pStr)
{
	FG_CALL(__func__, "error=%d", (int)error);
	const struct row *row = find(error);

	CU_NEEDS(pStr != NULL);
	*pStr = row != NULL ? row->name : NULL;
	return row != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **pStr)
{
	FG_CALL(__func__, "error=%d", (int)error);
	const struct row *row = find(error);

	CU_NEEDS(pStr != NULL);
	*pStr = row != NULL ? row->text : NULL;
	return row != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
