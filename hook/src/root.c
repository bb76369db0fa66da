/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a container finds its grants. Fixed at build time: whatever a tenant could set at run time would be a
 * way out. A test build (AQ_ROOT_PATCHABLE) has room for a path that the test writes into a copy of the file.
 */
#include "grants.h"

#ifdef AQ_ROOT_PATCHABLE
const char aq_root[256] = "@AQ_ROOT_PATCHABLE@/usr/local/vgpu";
#else
const char aq_root[] = "/usr/local/vgpu";
#endif
