/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a program can learn of its packet: headers, transport, exact length on the wire. */
#ifndef TG_PACKET_H
#define TG_PACKET_H

#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Offset and value of the byte of the TCP header whose upper half is its length in words. */
#define TG_TCP_DOFF_OFFSET 12
#define TG_UDP_BYTES	   8

struct tg_headers {
	/* IP and transport header. */
	__u32 bytes;
	__u8 protocol;
};

/* Reads from the IP header on, wherever the program's packet starts. */
static __always_inline long tg_load(struct __sk_buff *skb, __u32 offset, void *to, __u32 bytes)
{
	return bpf_skb_load_bytes_relative(skb, offset, to, bytes, BPF_HDR_START_NET);
}

/*
 * Reads the headers. Unknown transports count as header-less. A function of its own, as all with
 * many branches that are not static: the kernel's verifier looks at each once, whoever calls.
 */
__noinline int tg_parse(struct __sk_buff *skb, struct tg_headers *headers)
{
	__u32 offset = 0;
	__u8 protocol = 0;

	if (!headers)
		return 0;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (!tg_load(skb, 0, &ip, sizeof(ip))) {
			offset = ip.ihl * 4;
			protocol = ip.protocol;
		}
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (!tg_load(skb, 0, &ip, sizeof(ip))) {
			offset = sizeof(ip);
			protocol = ip.nexthdr;
		}
		for (int i = 0; i < TG_MAX_EXTENSION_HEADERS; i++) {
			/* next header, length in units of 8 bytes beyond the first */
			__u8 ext[2];

			if (protocol != IPPROTO_HOPOPTS && protocol != IPPROTO_ROUTING &&
			    protocol != IPPROTO_DSTOPTS && protocol != IPPROTO_FRAGMENT)
				break;
			if (tg_load(skb, offset, ext, sizeof(ext)))
				break;
			offset += protocol == IPPROTO_FRAGMENT ? 8 : (ext[1] + 1) * 8;
			protocol = ext[0];
		}
	}
	if (protocol == IPPROTO_TCP) {
		__u8 doff = 0;

		if (!tg_load(skb, offset + TG_TCP_DOFF_OFFSET, &doff, sizeof(doff)))
			offset += (doff >> 4) * 4;
	} else if (protocol == IPPROTO_UDP) {
		offset += TG_UDP_BYTES;
	}
	headers->bytes = offset;
	headers->protocol = protocol;
	return 0;
}

/*
 * Bytes on the wire of a packet of `bytes` with its link header. One that the device will cut into
 * segments counts the headers that each of them will carry.
 */
static __always_inline __u32 tg_frame_bytes(struct __sk_buff *skb, __u32 bytes)
{
	__u32 segments = skb->gso_segs;
	__u32 size = skb->gso_size;
	struct tg_headers headers;

	if (!size)
		return bytes;
	tg_parse(skb, &headers);
	headers.bytes += TG_LINK_HEADER_BYTES;
	if (!segments && bytes > headers.bytes)
		segments = (bytes - headers.bytes + size - 1) / size;
	if (segments < 1)
		segments = 1;
	return bytes + (segments - 1) * headers.bytes;
}

/* The same where the packet starts at its IP header. */
static __always_inline __u32 tg_wire_bytes(struct __sk_buff *skb)
{
	return tg_frame_bytes(skb, skb->len + TG_LINK_HEADER_BYTES);
}

#endif
