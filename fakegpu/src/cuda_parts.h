/* SPDX-License-Identifier: Apache-2.0
 *
 * What the parts of libcuda offer to each other beside cuda_core.h: small things that need no header of their
 * own.
 */
#ifndef FAKEGPU_CUDA_PARTS_H
#define FAKEGPU_CUDA_PARTS_H

#include "cuda_core.h"

/* cuda_core.c: as cuDriverGetVersion tells it. */
int cu_driver_version(void);

/* cuda_visible.c: the devices of CUDA_VISIBLE_DEVICES; NULL when there are none. */
struct cu_device *cu_visible_devices(int *count);

/* cuda_attribute.c: a CUdevice_attribute; 0 for what the device does not have. */
int cu_attribute(const struct cu_device *device, int attribute);

/* cuda_context.c: makes one (needs cu_lock not held), and takes everything down that is in it. */
CUresult cu_context_make(struct cu_device *device, unsigned int flags, unsigned int api_version,
			 struct CUctx_st **context);
void cu_context_end(struct CUctx_st *context);

/* cuda_host_function.c */
void cu_callbacks_run(void);
void cu_callbacks_forget(void);

/* cuda_ipc.c: takes away the bytes of another process's memory. Needs cu_lock. */
void cu_ipc_unmap(struct cu_alloc *alloc);

/* What a forked child must not go on with. */
void cu_space_forget(void);
void cu_vmm_forget(void);
void cu_host_forget(void);
void cu_event_forget(void);
void cu_capture_forget(void);
void cu_primary_forget(void);
void cu_object_forget(void);

/* cuda_space.c: reserves the address space of the visible devices. */
int cu_space_open(void);

/* cuda_duration.c */
void cu_duration_read_environment(void);

#endif
