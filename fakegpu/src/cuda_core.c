/* SPDX-License-Identifier: Apache-2.0
 *
 * cuInit, versions, threads, and what fork does to all of it. See cuda_core.h.
 */
#include "cuda_core.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_parts.h"
#include "process.h"

struct cu_device *cu_devices;
int cu_device_count;
struct CUctx_st *cu_contexts;
pthread_mutex_t cu_mutex = PTHREAD_MUTEX_INITIALIZER;
int cu_ready;
uint32_t cu_generation = 1;
__thread struct cu_thread cu_thread_state;

static int refused; /* a child of a process that used CUDA, where the configuration refuses those */

CUresult cu_not_ready(void)
{
	return CUDA_ERROR_NOT_INITIALIZED;
}

struct cu_thread *cu_thread_reset(void)
{
	struct cu_thread *thread = &cu_thread_state;

	memset(thread, 0, sizeof *thread);
	thread->generation = cu_generation;
	thread->id = cu_next_id();
	return thread;
}

CUresult cu_context_trouble(struct CUctx_st *context)
{
	const struct fg_card *card = context->device->shared;

	if (__atomic_load_n(&cu_callbacks_waiting, __ATOMIC_RELAXED) != 0)
		cu_callbacks_run();
	if (context->epoch != __atomic_load_n(&card->poison_epoch, __ATOMIC_ACQUIRE)) {
		context->epoch = card->poison_epoch;
		context->sticky = card->poison_code;
	}
	return (CUresult)context->sticky;
}

int cu_seat(struct cu_device *device)
{
	if (__builtin_expect(device->seat < 0, 0))
		device->seat = fg_seat_claim(device->card, device->ci);
	return device->seat;
}

static void before_fork(void)
{
	pthread_mutex_lock(&cu_mutex);
}

static void after_fork_parent(void)
{
	pthread_mutex_unlock(&cu_mutex);
}

static void after_fork_child(void)
{
	/* Everything the parent made stays its own; the child's copies are forgotten, not released. */
	if (cu_ready && fg_state->driver.fork_refused)
		refused = 1;
	cu_ready = 0;
	cu_generation++;
	cu_devices = NULL;
	cu_device_count = 0;
	cu_contexts = NULL;
	cu_callbacks_forget();
	cu_space_forget();
	cu_vmm_forget();
	cu_host_forget();
	cu_event_forget();
	cu_capture_forget();
	cu_primary_forget();
	cu_object_forget();
	pthread_mutex_unlock(&cu_mutex);
}

/* Before anything is opened: a fork during the very first cuInit must find the handlers. */
__attribute__((constructor)) static void watch_fork(void)
{
	fg_process_watch_fork();
	pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

static CUresult open_driver(void)
{
	switch (fg_state_open()) {
	case FG_OPEN_OK:
		return CUDA_SUCCESS;
	case FG_OPEN_MISMATCH:
		return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
	case FG_OPEN_BAD_CONFIG:
	case FG_OPEN_NO_ACCESS:
		return CUDA_ERROR_SYSTEM_NOT_READY;
	case FG_OPEN_NO_CONFIG:
		break;
	}
	return CUDA_ERROR_NO_DEVICE;
}

static CUresult init_locked(void)
{
	if (cu_ready)
		return CUDA_SUCCESS;
	if (refused)
		return CUDA_ERROR_NOT_INITIALIZED;
	cu_devices = cu_visible_devices(&cu_device_count);
	if (cu_devices == NULL)
		return CUDA_ERROR_NO_DEVICE;
	if (fg_process_join(1) < 0 || cu_space_open() != 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	cu_duration_read_environment();
	__atomic_store_n(&cu_ready, 1, __ATOMIC_RELEASE);
	return CUDA_SUCCESS;
}

/* FAKEGPU_INNER_LOOKUP: as some drivers do, look a function of our own up through our own handle. Whoever
 * stands between programs and driver must not stand between the driver and itself. */
static CUresult look_inside(void)
{
	Dl_info self;
	void *handle, *found;

	if (getenv("FAKEGPU_INNER_LOOKUP") == NULL)
		return CUDA_SUCCESS;
	if (dladdr((void *)&cu_mutex, &self) == 0)
		return CUDA_ERROR_UNKNOWN;
	handle = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
	found = handle != NULL ? dlsym(handle, "cuDriverGetVersion") : NULL;
	if (handle != NULL)
		dlclose(handle);
	return found == (void *)cuDriverGetVersion ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult CUDAAPI cuInit(unsigned int Flags)
{
	CUresult result = open_driver();

	/* Not a word before: the log and the faults are found through the state. */
	FG_CALL(__func__, "Flags=%u", Flags);
	if (result != CUDA_SUCCESS)
		return result;
	CU_NEEDS(Flags == 0);
	if (cu_ready)
		return CUDA_SUCCESS;
	result = look_inside();
	if (result != CUDA_SUCCESS)
		return result;
	cu_lock();
	result = init_locked();
	cu_unlock();
	return result;
}

int cu_driver_version(void)
{
	/* An old flavour is as old as its symbols; the full one is what the configuration says. */
	int known = fg_state != NULL && __atomic_load_n(&fg_state->magic, __ATOMIC_ACQUIRE) == FG_STATE_MAGIC;

	if (!fake_flavour.hides_names && (known || fg_state_open() == FG_OPEN_OK) &&
	    fg_state->driver.cuda_version != 0)
		return (int)fg_state->driver.cuda_version;
	return fake_flavour.cuda_version;
}

CUresult CUDAAPI cuDriverGetVersion(int *driverVersion)
{
	fg_state_open();
	int version = cu_driver_version();

	FG_CALL(__func__, "driverVersion=%p", (void *)driverVersion);
	CU_NEEDS(driverVersion != NULL);
	*driverVersion = version;
	return CUDA_SUCCESS;
}

int fake_stub_cuda(const char *name)
{
	FG_CALL(name, "not implemented");
	return CUDA_ERROR_NOT_SUPPORTED;
}
