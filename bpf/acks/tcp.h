/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The TCP header of a packet, read and written: ports, numbers, flags, window, and the options of a
 * SYN. Only whole headers with possible values are read; all else is not TCP here.
 *
 * Written are one word, that of flags and window, and the checksum as the kernel does it. That is
 * right also if a device will complete it, if it has summed up the packet, or if segments were
 * merged.
 */
#ifndef TG_TCP_H
#define TG_TCP_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "acks/acks.h"
#include "common/intf.h"
#include "common/options.h"
#include "common/tcp_header.h"

struct tcp_packet {
	struct tcp_key key;
	/* The start of the TCP header, from the packet's start. */
	__u32 offset;
	/* Bytes behind the TCP header, by the length of IP. */
	__u32 payload;
	__u32 seq;
	__u32 ack;
	/* As on the wire, TCP_WORD_OFFSET. */
	__be32 word;
	__u16 flags;
	__u16 window;
	__u8 doff;
	/* The ECN bits of the IP header. */
	__u8 ecn;
};

/*
 * Copies bytes of the packet: directly if they are in linear memory, as headers nearly always are,
 * else with the kernel's help at twice the price.
 */
static __always_inline long tcp_load(struct __sk_buff *skb, __u32 offset, void *to, __u32 bytes)
{
	const __u8 *from = (const __u8 *)(long)skb->data + offset;

	if ((const void *)(from + bytes) > (const void *)(long)skb->data_end)
		return bpf_skb_load_bytes(skb, offset, to, bytes);
	__builtin_memcpy(to, from, bytes);
	return 0;
}

/*
 * Reads a packet whose IP header is at `link_bytes`; 0 if it is whole TCP. The sender is `own`, or
 * with `back` the receiver.
 */
static __always_inline int tcp_read(struct __sk_buff *skb, __u32 link_bytes, int back,
				    struct tcp_packet *packet)
{
	__u32 source[4] = {}, target[4] = {}, total, header;
	__be32 words[4];
	__u16 ports[2];
	__u32 offset = link_bytes;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (tcp_load(skb, offset, &ip, sizeof(ip)))
			return -1;
		header = ip.ihl * 4;
		if (ip.version != 4 || header < sizeof(ip) || ip.protocol != IPPROTO_TCP ||
		    ip.frag_off & bpf_htons(TG_FRAGMENT))
			return -1;
		source[2] = bpf_htonl(0xffff);
		source[3] = ip.saddr;
		target[2] = bpf_htonl(0xffff);
		target[3] = ip.daddr;
		packet->ecn = ip.tos & 3;
		total = bpf_ntohs(ip.tot_len);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (tcp_load(skb, offset, &ip, sizeof(ip)))
			return -1;
		if (ip.version != 6 || ip.nexthdr != IPPROTO_TCP)
			return -1;
		header = sizeof(ip);
		__builtin_memcpy(source, &ip.saddr, sizeof(source));
		__builtin_memcpy(target, &ip.daddr, sizeof(target));
		packet->ecn = ip.flow_lbl[0] >> 4 & 3;
		total = bpf_ntohs(ip.payload_len);
		if (total)
			total += sizeof(ip);
	} else {
		return -1;
	}
	/* IP does not give the length of an unsegmented packet of more than 64 KB. */
	if (!total)
		total = skb->len - link_bytes;
	if (total > skb->len - link_bytes)
		return -1;
	offset += header;
	/* ports, sequence number, acknowledgement number, flags and window */
	if (tcp_load(skb, offset, words, sizeof(words)))
		return -1;
	packet->offset = offset;
	packet->seq = bpf_ntohl(words[1]);
	packet->ack = bpf_ntohl(words[2]);
	packet->word = words[3];
	packet->flags = bpf_ntohl(words[3]) >> 16 & 0x1ff;
	packet->window = bpf_ntohl(words[3]) & 0xffff;
	packet->doff = bpf_ntohl(words[3]) >> 28;
	if (packet->doff * 4 < TCP_LEAST_BYTES || header + packet->doff * 4 > total)
		return -1;
	packet->payload = total - header - packet->doff * 4;
	__builtin_memcpy(ports, words, sizeof(ports));
	if (back) {
		__builtin_memcpy(packet->key.own, target, sizeof(target));
		__builtin_memcpy(packet->key.other, source, sizeof(source));
		packet->key.own_port = ports[1];
		packet->key.other_port = ports[0];
	} else {
		__builtin_memcpy(packet->key.own, source, sizeof(source));
		__builtin_memcpy(packet->key.other, target, sizeof(target));
		packet->key.own_port = ports[0];
		packet->key.other_port = ports[1];
	}
	return 0;
}

static long tcp_next_option(__u32 i, struct opt_walk *walk)
{
	return opt_next(walk);
}

/* Reads the options of a SYN. A separate function: the verifier checks it once. */
__noinline int tcp_read_syn(struct __sk_buff *skb, __u32 offset, __u32 doff, struct opt_syn *syn)
{
	struct opt_walk walk = {};
	/*
	 * With the four bytes before them: so never zero bytes, which the verifier could not
	 * exclude.
	 */
	__u32 size = (doff * 4 - TCP_LEAST_BYTES) % OPT_ROOM + TCP_BEFORE_OPTIONS;

	if (!syn || size > OPT_ROOM)
		return 0;
	if (!bpf_skb_load_bytes(skb, offset + TCP_LEAST_BYTES - TCP_BEFORE_OPTIONS, walk.options,
				size)) {
		walk.at = TCP_BEFORE_OPTIONS;
		walk.len = size;
		bpf_loop(OPT_MAX_BYTES, tcp_next_option, &walk, 0);
	}
	*syn = walk.syn;
	return 0;
}

/* Writes flags and window if they differ; 0 on success or if nothing had to be written. */
static __always_inline int tcp_write(struct __sk_buff *skb, const struct tcp_packet *packet,
				     __u16 flags, __u16 window)
{
	__be32 word = bpf_htonl((bpf_ntohl(packet->word) & 0xfe000000) |
				(__u32)(flags & 0x1ff) << 16 | window);
	long error;

	if (word == packet->word)
		return 0;
	error = bpf_skb_store_bytes(skb, packet->offset + TCP_WORD_OFFSET, &word, sizeof(word), 0);
	if (error)
		return error;
	return bpf_l4_csum_replace(skb, packet->offset + TCP_CHECK_OFFSET, packet->word, word,
				   sizeof(word));
}

#endif
