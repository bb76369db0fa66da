/* SPDX-License-Identifier: Apache-2.0
 *
 * User objects: things of the program that live as long as a graph needs them. The last reference calls the
 * program's destructor, in the call that drops it and without a lock held.
 */
#include <stdlib.h>

#include "cuda_graph.h"
#include "cuda_parts.h"

struct CUuserObject_st {
	struct cu_object object;
	CUhostFn destroy;
	void *data;
	unsigned int count;
	struct CUuserObject_st *next; /* waits to be destroyed */
};

static struct CUuserObject_st *pending;

static void drop(CUuserObject object, unsigned int count)
{
	object->count -= count < object->count ? count : object->count;
	if (object->count > 0)
		return;
	object->next = pending;
	pending = object;
}

void cu_user_objects_destroy_pending(void)
{
	for (;;) {
		cu_lock();
		struct CUuserObject_st *object = pending;

		if (object != NULL)
			pending = object->next;
		cu_unlock();
		if (object == NULL)
			return;
		object->destroy(object->data);
		cu_lock();
		cu_object_end(object);
		cu_unlock();
	}
}

void cu_user_references_end(struct cu_user_reference *list)
{
	while (list != NULL) {
		struct cu_user_reference *next = list->next;

		drop(list->object, list->count);
		free(list);
		list = next;
	}
}

struct cu_user_reference *cu_user_references_copy(const struct cu_user_reference *list)
{
	struct cu_user_reference *first = NULL;

	for (; list != NULL; list = list->next) {
		struct cu_user_reference *made = malloc(sizeof *made);

		if (made == NULL)
			break;
		*made = (struct cu_user_reference){first, list->object, list->count};
		made->object->count += made->count;
		first = made;
	}
	return first;
}

CUresult CUDAAPI cuUserObjectCreate(CUuserObject *object_out, void *ptr, CUhostFn destroy,
				    unsigned int initialRefcount, unsigned int flags)
{
	CU_ENTER("object=%p ptr=%p count=%u flags=%u", (void *)object_out, ptr, initialRefcount, flags);
	struct CUuserObject_st *object;

	CU_NEEDS(object_out != NULL && destroy != NULL && initialRefcount > 0 &&
		 initialRefcount <= INT32_MAX && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
	cu_lock();
	object = cu_object_make(CU_KIND_USER_OBJECT, sizeof *object);
	if (object != NULL) {
		object->destroy = destroy;
		object->data = ptr;
		object->count = initialRefcount;
	}
	cu_unlock();
	*object_out = object;
	return object != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuUserObjectRetain(CUuserObject object, unsigned int count)
{
	CU_ENTER("object=%p count=%u", (void *)object, count);
	CU_NEEDS(cu_is(object, CU_KIND_USER_OBJECT) && count > 0 && count <= INT32_MAX);
	cu_lock();
	object->count += count;
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuUserObjectRelease(CUuserObject object, unsigned int count)
{
	CU_ENTER("object=%p count=%u", (void *)object, count);
	CU_NEEDS(cu_is(object, CU_KIND_USER_OBJECT) && count > 0 && count <= object->count);
	cu_lock();
	drop(object, count);
	cu_unlock();
	cu_user_objects_destroy_pending();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count,
					 unsigned int flags)
{
	CU_ENTER("graph=%p object=%p count=%u flags=%u", (void *)graph, (void *)object, count, flags);
	struct cu_user_reference *made;

	CU_NEEDS(cu_is(graph, CU_KIND_GRAPH) && cu_is(object, CU_KIND_USER_OBJECT) && count > 0 &&
		 count <= INT32_MAX);
	CU_NEEDS(flags == 0 || flags == CU_GRAPH_USER_OBJECT_MOVE);
	made = malloc(sizeof *made);
	if (made == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	cu_lock();
	*made = (struct cu_user_reference){graph->user_objects, object, count};
	graph->user_objects = made;
	if (flags != CU_GRAPH_USER_OBJECT_MOVE)
		object->count += count;
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count)
{
	CU_ENTER("graph=%p object=%p count=%u", (void *)graph, (void *)object, count);
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	CU_NEEDS(cu_is(graph, CU_KIND_GRAPH) && cu_is(object, CU_KIND_USER_OBJECT) && count > 0);
	cu_lock();
	for (struct cu_user_reference **link = &graph->user_objects; *link != NULL; link = &(*link)->next) {
		struct cu_user_reference *reference = *link;

		if (reference->object != object || reference->count < count)
			continue;
		reference->count -= count;
		if (reference->count == 0) {
			*link = reference->next;
			free(reference);
		}
		drop(object, count);
		result = CUDA_SUCCESS;
		break;
	}
	cu_unlock();
	cu_user_objects_destroy_pending();
	return result;
}
