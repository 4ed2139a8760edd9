/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The flow of a packet, as a hash. */
#ifndef TG_FLOW_H
#define TG_FLOW_H

#include "common/headers.h"
#include "common/sample.h"

/* Random, so that nobody outside can choose flows that share a set. */
const volatile __u64 flow_seed = 0;

/*
 * Whether the first four bytes of a transport header (ports, or an SPI) identify flows between two
 * hosts.
 */
static __always_inline int fl_has_ports(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP ||
	       protocol == IPPROTO_DCCP || protocol == IPPROTO_UDPLITE || protocol == IPPROTO_ESP;
}

static __always_inline __u64 fl_mix_ipv6(__u64 hash, const struct ipv6hdr *ip)
{
	const __u32 *from = ip->saddr.in6_u.u6_addr32, *to = ip->daddr.in6_u.u6_addr32;

	for (int i = 0; i < 4; i += 2)
		hash = sm_mix(hash, (__u64)from[i] << 32 | from[i + 1]);
	for (int i = 0; i < 4; i += 2)
		hash = sm_mix(hash, (__u64)to[i] << 32 | to[i + 1]);
	return hash;
}

/*
 * The hash of a packet's flow: addresses, transport, and ports or the SPI of ESP. Only the first
 * fragment of a packet has ports, so all fragments between two hosts are one flow.
 */
static __always_inline __u64 fl_hash(void *ctx, tg_loader load, __u32 start, __be16 type)
{
	__u64 hash = sm_mix(flow_seed, type);
	__u32 offset, ports = 0;
	__u8 protocol = 0;
	int fragment = 0;

	if (type == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (load(ctx, start, 0, &ip, sizeof(ip)))
			return sm_flow(hash);
		hash = sm_mix(hash, (__u64)ip.saddr << 32 | ip.daddr);
		fragment = (ip.frag_off & bpf_htons(TG_FRAGMENT)) != 0;
		protocol = ip.protocol;
		offset = ip.ihl * 4;
	} else if (type == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (load(ctx, start, 0, &ip, sizeof(ip)))
			return sm_flow(hash);
		hash = fl_mix_ipv6(hash, &ip);
		protocol = ip.nexthdr;
		offset = sizeof(ip);
		fragment = tg_walk_extensions(ctx, load, start, &offset, &protocol);
	} else {
		return sm_flow(hash);
	}
	/* Fragments of a flow may have different next headers. */
	if (fragment)
		return sm_flow(hash);
	if (fl_has_ports(protocol))
		load(ctx, start, offset, &ports, sizeof(ports));
	return sm_flow(sm_mix(hash, (__u64)protocol << 32 | ports));
}

/*
 * The same for a packet whose headers up to the ports are in linear memory and have no options, as
 * in most packets. 0: use fl_hash.
 */
static __always_inline __u64 fl_hash_at_hand(void *data, void *end, __be16 type)
{
	__u64 hash = sm_mix(flow_seed, type);

	if (type == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data;
		__u32 *ports = (__u32 *)(ip + 1);

		if ((void *)(ports + 1) > end || ip->ihl * 4 != sizeof(*ip) ||
		    (ip->frag_off & bpf_htons(TG_FRAGMENT)) || !fl_has_ports(ip->protocol))
			return 0;
		hash = sm_mix(hash, (__u64)ip->saddr << 32 | ip->daddr);
		return sm_flow(sm_mix(hash, (__u64)ip->protocol << 32 | *ports));
	}
	if (type == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data;
		__u32 *ports = (__u32 *)(ip + 1);

		if ((void *)(ports + 1) > end || !fl_has_ports(ip->nexthdr))
			return 0;
		hash = fl_mix_ipv6(hash, ip);
		return sm_flow(sm_mix(hash, (__u64)ip->nexthdr << 32 | *ports));
	}
	return 0;
}

#endif
