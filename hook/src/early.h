/* SPDX-License-Identifier: Apache-2.0
 *
 * Where variables lie. What every start writes stands together, in the page that the loader has written
 * already: another page costs a program a fault at its start and the same again at its end. The linker sorts
 * by these names (hook/build.mk).
 */
#ifndef ALIQUOT_EARLY_H
#define ALIQUOT_EARLY_H

/* Small ones: all of them together have three kilobytes. */
#define AQ_EARLY __attribute__((section(".bss.0")))
/* Large ones of which the beginning is used, in this order. */
#define AQ_EARLY_LISTING __attribute__((section(".bss.1")))
#define AQ_EARLY_SHARES  __attribute__((section(".bss.2")))
#define AQ_EARLY_CARDS   __attribute__((section(".bss.3")))

#endif
