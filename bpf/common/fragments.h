/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The length of an IP packet on the wire once it has been cut into fragments (RFC 791, RFC 8200): a
 * pure header over lengths. A test sends real ones.
 */
#ifndef TG_FRAGMENTS_H
#define TG_FRAGMENTS_H

#include <linux/types.h>

/* Fragment offsets count units of eight bytes. */
#define TG_FRAGMENT_UNIT 8
/* The extra header of each IPv6 fragment. */
#define TG_FRAGMENT_HEADER_BYTES 8
/* The smallest MTU of a path: Linux accepts no smaller one (ip_rt_min_pmtu). */
#define TG_MIN_MTU 552

/*
 * Bytes on the wire of an IP packet of `bytes` that is sent in packets of at most `mtu`. Each
 * fragment repeats `header` bytes of the packet, adds `extra`, and is in a frame whose header has
 * `link` bytes.
 */
static inline __attribute__((always_inline)) __u32
tg_fragmented_bytes(__u32 bytes, __u32 mtu, __u32 header, __u32 extra, __u32 link)
{
	__u32 room, count;

	if (bytes <= mtu || mtu < header + extra + TG_FRAGMENT_UNIT)
		return bytes + link;
	room = (mtu - header - extra) & ~(TG_FRAGMENT_UNIT - 1);
	count = (bytes - header + room - 1) / room;
	return bytes + (count - 1) * header + count * (extra + link);
}

#endif
