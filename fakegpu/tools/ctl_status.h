/* SPDX-License-Identifier: Apache-2.0
 *
 * fakegpuctl status: the machine as JSON on standard output. The state must be open.
 */
#ifndef FAKEGPU_CTL_STATUS_H
#define FAKEGPU_CTL_STATUS_H

int ctl_status(void);

#endif
