/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The view that a program has of its packet: headers, transport, exact length on the wire. */
#ifndef TG_PACKET_H
#define TG_PACKET_H

#include "common/headers.h"

/* Reads from the IP header on, wherever the program's packet starts. */
static __always_inline long tg_load(struct __sk_buff *skb, __u32 offset, void *to, __u32 bytes)
{
	return bpf_skb_load_bytes_relative(skb, offset, to, bytes, BPF_HDR_START_NET);
}

/* The same for a reader of any packet whose start is known. */
static __always_inline long tg_load_from(void *skb, __u32 start, __u32 offset, void *to,
					 __u32 bytes)
{
	return tg_load(skb, offset, to, bytes);
}

/*
 * Reads the headers. A separate global function, like all with many branches: the kernel's verifier
 * checks each of these once, not once a call.
 */
__noinline int tg_parse(struct __sk_buff *skb, struct tg_headers *headers)
{
	if (!headers)
		return 0;
	tg_read_headers(skb, tg_load_from, 0, skb->protocol, headers);
	return 0;
}

/*
 * Bytes on the wire of a packet of `bytes` with its link header, which has `link_bytes`. If the
 * device will cut it into segments, the headers of each segment count.
 */
static __always_inline __u32 tg_bytes_on_link(struct __sk_buff *skb, __u32 bytes, __u32 link_bytes)
{
	struct tg_headers headers;

	if (!skb->gso_size)
		return bytes;
	tg_parse(skb, &headers);
	return tg_segmented_bytes(bytes, skb->gso_segs, skb->gso_size, headers.bytes + link_bytes);
}

/* The same with a link header of Ethernet. */
static __always_inline __u32 tg_frame_bytes(struct __sk_buff *skb, __u32 bytes)
{
	return tg_bytes_on_link(skb, bytes, TG_LINK_HEADER_BYTES);
}

#endif
