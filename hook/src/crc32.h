/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32 (IEEE 802.3, the one of zlib and Python's zlib.crc32), four bits a step: it runs over one kilobyte
 * when a grant changes, so a table of sixteen words is enough.
 */
#ifndef ALIQUOT_CRC32_H
#define ALIQUOT_CRC32_H

#include <stddef.h>
#include <stdint.h>

static inline uint32_t aq_crc32(const void *data, size_t size)
{
	static const uint32_t table[16] = {
	    0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
	    0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
	};
	const unsigned char *byte = data;
	uint32_t crc = UINT32_MAX;
	for (size_t i = 0; i < size; i++) {
		crc = (crc >> 4) ^ table[(crc ^ byte[i]) & 15u];
		crc = (crc >> 4) ^ table[(crc ^ (byte[i] >> 4)) & 15u];
	}
	return ~crc;
}

#endif
