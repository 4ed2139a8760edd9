/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The headers of a packet at any hook. The caller provides the function that loads its bytes. */
#ifndef TG_HEADERS_H
#define TG_HEADERS_H

#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "common/intf.h"

/* Offset and value of the byte of the TCP header whose upper half is its length in words. */
#define TG_TCP_DOFF_OFFSET 12
#define TG_UDP_BYTES	   8

struct tg_headers {
	/* IP and transport header. */
	__u32 bytes;
	__u8 protocol;
};

/* Loads bytes of a packet from the IP header at `start` on; 0 on success. */
typedef long (*tg_loader)(void *ctx, __u32 start, __u32 offset, void *to, __u32 bytes);

/* Skips IPv6 extension headers from `offset` and `protocol` on; 1 if the packet is a fragment. */
static __always_inline int tg_walk_extensions(void *ctx, tg_loader load, __u32 start, __u32 *offset,
					      __u8 *protocol)
{
	int fragment = 0;

	for (int i = 0; i < TG_MAX_EXTENSION_HEADERS; i++) {
		/* next header, length in units of 8 bytes beyond the first */
		__u8 ext[2];

		if (*protocol != IPPROTO_HOPOPTS && *protocol != IPPROTO_ROUTING &&
		    *protocol != IPPROTO_DSTOPTS && *protocol != IPPROTO_FRAGMENT)
			break;
		if (load(ctx, start, *offset, ext, sizeof(ext)))
			break;
		fragment |= *protocol == IPPROTO_FRAGMENT;
		*offset += *protocol == IPPROTO_FRAGMENT ? 8 : (ext[1] + 1) * 8;
		*protocol = ext[0];
	}
	return fragment;
}

/* Reads the headers. Unknown transports count as having no header. */
static __always_inline void tg_read_headers(void *ctx, tg_loader load, __u32 start, __be16 type,
					    struct tg_headers *headers)
{
	__u32 offset = 0;
	__u8 protocol = 0;

	if (type == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (!load(ctx, start, 0, &ip, sizeof(ip))) {
			offset = ip.ihl * 4;
			protocol = ip.protocol;
		}
	} else if (type == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (!load(ctx, start, 0, &ip, sizeof(ip))) {
			offset = sizeof(ip);
			protocol = ip.nexthdr;
		}
		tg_walk_extensions(ctx, load, start, &offset, &protocol);
	}
	if (protocol == IPPROTO_TCP) {
		__u8 doff = 0;

		if (!load(ctx, start, offset + TG_TCP_DOFF_OFFSET, &doff, sizeof(doff)))
			offset += (doff >> 4) * 4;
	} else if (protocol == IPPROTO_UDP) {
		offset += TG_UDP_BYTES;
	}
	headers->bytes = offset;
	headers->protocol = protocol;
}

/*
 * Bytes on the wire of a packet of `bytes`, with its link header, that will be cut into segments of
 * `size`. Counts the headers that each segment will carry. `segments` may be 0: not known.
 */
static __always_inline __u32 tg_segmented_bytes(__u32 bytes, __u32 segments, __u32 size,
						__u32 headers)
{
	if (!segments && size && bytes > headers)
		segments = (bytes - headers + size - 1) / size;
	if (segments < 1)
		segments = 1;
	return bytes + (segments - 1) * headers;
}

#endif
