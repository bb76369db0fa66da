/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory operations of streams. See cuda_memop.h.
 *
 * A write is done in the call. A wait looks at the word in the call, too: there is nothing that could wait in
 * the background, so a word that is not there yet is waited for here, for a minute at most.
 */
#include "cuda_memop.h"

#include <sched.h>
#include <string.h>

#include "cuda_graph.h"
#include "cuda_memory.h"
#include "cuda_parts.h"
#include "cuda_time.h"

#define LONGEST_NS 60000000000ull

static char *word_at(CUdeviceptr address, size_t width)
{
	struct cu_span span;

	if (address % width != 0 || cu_span_at(address, &span) != 0 || span.length < width) {
		cu_lock();
		int known = cu_registered_find((void *)(uintptr_t)address) != NULL;

		cu_unlock();
		return known && address % width == 0 ? (char *)(uintptr_t)address : NULL;
	}
	if (span.alloc != NULL)
		span.alloc->touched = 1;
	return span.bytes;
}

static int holds(uint64_t word, uint64_t value, unsigned int flags, size_t width)
{
	switch (flags & 3u) {
	case CU_STREAM_WAIT_VALUE_GEQ:
		return width == 4 ? (int32_t)((uint32_t)word - (uint32_t)value) >= 0
				  : (int64_t)(word - value) >= 0;
	case CU_STREAM_WAIT_VALUE_EQ:
		return word == value;
	case CU_STREAM_WAIT_VALUE_AND:
		return (word & value) != 0;
	default:
		return width == 4 ? (uint32_t)~(word | value) != 0 : ~(word | value) != 0;
	}
}

static CUresult wait_value(CUdeviceptr address, uint64_t value, unsigned int flags, size_t width)
{
	const char *at = word_at(address, width);
	uint64_t end = fg_now_ns() + LONGEST_NS;

	CU_NEEDS(at != NULL);
	for (;;) {
		uint64_t word = width == 4
				    ? __atomic_load_n((const uint32_t *)(const void *)at, __ATOMIC_ACQUIRE)
				    : __atomic_load_n((const uint64_t *)(const void *)at, __ATOMIC_ACQUIRE);

		if (holds(word, value, flags, width))
			return CUDA_SUCCESS;
		if (fg_now_ns() > end)
			return CUDA_ERROR_LAUNCH_TIMEOUT;
		sched_yield();
	}
}

static CUresult write_value(CUdeviceptr address, uint64_t value, size_t width)
{
	char *at = word_at(address, width);

	CU_NEEDS(at != NULL);
	if (width == 4)
		__atomic_store_n((uint32_t *)(void *)at, (uint32_t)value, __ATOMIC_RELEASE);
	else
		__atomic_store_n((uint64_t *)(void *)at, value, __ATOMIC_RELEASE);
	return CUDA_SUCCESS;
}

CUresult cu_memops_run(const CUstreamBatchMemOpParams *ops, unsigned int count)
{
	CUresult result = CUDA_SUCCESS;

	for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
		switch (ops[i].operation) {
		case CU_STREAM_MEM_OP_WAIT_VALUE_32:
			result = wait_value(ops[i].waitValue.address, ops[i].waitValue.value,
					    ops[i].waitValue.flags, 4);
			break;
		case CU_STREAM_MEM_OP_WAIT_VALUE_64:
			result = wait_value(ops[i].waitValue.address, ops[i].waitValue.value64,
					    ops[i].waitValue.flags, 8);
			break;
		case CU_STREAM_MEM_OP_WRITE_VALUE_32:
			result = write_value(ops[i].writeValue.address, ops[i].writeValue.value, 4);
			break;
		case CU_STREAM_MEM_OP_WRITE_VALUE_64:
			result = write_value(ops[i].writeValue.address, ops[i].writeValue.value64, 8);
			break;
		case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
		case CU_STREAM_MEM_OP_BARRIER:
			break;
		default:
			result = CUDA_ERROR_INVALID_VALUE;
		}
	return result;
}

static CUresult run(const char *name, int per_thread, CUstream hStream, unsigned int count,
		    CUstreamBatchMemOpParams *ops)
{
	CU_ENTER_AS(name, "stream=%p count=%u", (void *)hStream, count);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(count > 0 && count <= 256 && ops != NULL);
	if (stream->capture != NULL) {
		struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
						.u.ops = {context, count, ops, 0}};
		CUgraphNode made;

		return cu_capture_add(stream, &params, &made);
	}
	cu_stream_drain(stream);
	return cu_memops_run(ops, count);
}

static CUresult batch(const char *name, int per_thread, CUstream stream, unsigned int count,
		      CUstreamBatchMemOpParams *ops, unsigned int flags)
{
	CU_NEEDS(flags == 0);
	return run(name, per_thread, stream, count, ops);
}
CU_TWINS(cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz, batch,
	 (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags),
	 stream, count, paramArray, flags)
CU_TWINS(cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz, batch,
	 (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags),
	 stream, count, paramArray, flags)

static CUresult one(const char *name, int per_thread, CUstream stream, CUstreamBatchMemOpType type,
		    CUdeviceptr address, uint64_t value, unsigned int flags)
{
	CUstreamBatchMemOpParams op = {0};

	op.operation = type;
	if (type == CU_STREAM_MEM_OP_WAIT_VALUE_32 || type == CU_STREAM_MEM_OP_WAIT_VALUE_64) {
		op.waitValue.address = address;
		op.waitValue.value64 = value;
		op.waitValue.flags = flags;
	} else {
		op.writeValue.address = address;
		op.writeValue.value64 = value;
		op.writeValue.flags = flags;
	}
	return run(name, per_thread, stream, 1, &op);
}

#define VALUE_OP(name, twin, type, width)                                                                  \
	CU_TWINS(name, twin, one,                                                                          \
		 (CUstream stream, CUdeviceptr addr, cuuint##width##_t value, unsigned int flags), stream, \
		 type, addr, value, flags)

VALUE_OP(cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz, CU_STREAM_MEM_OP_WAIT_VALUE_32, 32)
VALUE_OP(cuStreamWaitValue32, cuStreamWaitValue32_ptsz, CU_STREAM_MEM_OP_WAIT_VALUE_32, 32)
VALUE_OP(cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz, CU_STREAM_MEM_OP_WAIT_VALUE_64, 64)
VALUE_OP(cuStreamWaitValue64, cuStreamWaitValue64_ptsz, CU_STREAM_MEM_OP_WAIT_VALUE_64, 64)
VALUE_OP(cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz, CU_STREAM_MEM_OP_WRITE_VALUE_32, 32)
VALUE_OP(cuStreamWriteValue32, cuStreamWriteValue32_ptsz, CU_STREAM_MEM_OP_WRITE_VALUE_32, 32)
VALUE_OP(cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz, CU_STREAM_MEM_OP_WRITE_VALUE_64, 64)
VALUE_OP(cuStreamWriteValue64, cuStreamWriteValue64_ptsz, CU_STREAM_MEM_OP_WRITE_VALUE_64, 64)
