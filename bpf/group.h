/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a group of hosts has one of its limits do besides: drop packets at random, and count the
 * bytes of flows (sample.h). A limit that is in no group pays for one look at `group_of_limit`.
 *
 * Counters of flows are two buffers for each direction and CPU: packets fill the one that user
 * space has named, while it reads and clears the other. They are made when a group first asks, so a
 * limit that is in none has no memory for them.
 */
#ifndef TG_GROUP_H
#define TG_GROUP_H

#include "headers.h"
#include "intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct tg_group);
} group_of_limit SEC(".maps");

struct gr_buffers {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_BUFFERS);
	__type(key, __u32);
	/* Of a type that stands nowhere else in a map's description clang writes the name alone. */
	__uint(value_size, sizeof(struct sm_counts));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__array(values, struct gr_buffers);
} samples_of_limit SEC(".maps");

/* Random, so that nobody can tell which flows share a set. */
const volatile __u64 flow_seed = 0;

/* What tells the flows of two hosts apart: the first four bytes of a transport, if it has ports. */
static __always_inline int gr_has_ports(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP ||
	       protocol == IPPROTO_DCCP || protocol == IPPROTO_UDPLITE || protocol == IPPROTO_ESP;
}

/*
 * The hash of a packet's flow: addresses, transport, and ports or the SPI of ESP. The ports of a
 * fragment are in the first alone, so all fragments between two hosts are one flow.
 */
static __always_inline __u64 gr_hash(void *ctx, tg_loader load, __u32 start, __be16 type)
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
		for (int i = 0; i < 4; i += 2)
			hash = sm_mix(hash, (__u64)ip.saddr.in6_u.u6_addr32[i] << 32 |
						ip.saddr.in6_u.u6_addr32[i + 1]);
		for (int i = 0; i < 4; i += 2)
			hash = sm_mix(hash, (__u64)ip.daddr.in6_u.u6_addr32[i] << 32 |
						ip.daddr.in6_u.u6_addr32[i + 1]);
		protocol = ip.nexthdr;
		offset = sizeof(ip);
		fragment = tg_walk_extensions(ctx, load, start, &offset, &protocol);
	} else {
		return sm_flow(hash);
	}
	/* Fragments of a flow may differ in what follows their header. */
	if (fragment)
		return sm_flow(hash);
	if (gr_has_ports(protocol))
		load(ctx, start, offset, &ports, sizeof(ports));
	return sm_flow(sm_mix(hash, (__u64)protocol << 32 | ports));
}

/* Counts the bytes of a packet with its flow. A function of its own: see tg_parse. */
__noinline int gr_count(__u32 direction, __u32 buffer, __u64 flow, __u32 bytes)
{
	struct sm_counts *counts;
	struct sm_cell *set;
	void *buffers;
	__u32 way;

	buffers = bpf_map_lookup_elem(&samples_of_limit, &direction);
	if (!buffers)
		return 0;
	counts = bpf_map_lookup_elem(buffers, &buffer);
	if (!counts)
		return 0;
	set = counts->set[flow >> SM_SET_SHIFT];
	way = sm_add(set, flow, bytes);
	if (way < SM_WAYS)
		sm_replace(&set[way], flow, bytes, bpf_get_prandom_u32());
	return 0;
}

/* Whether a packet is dropped at random. */
static __always_inline int gr_drops(const struct tg_group *group)
{
	return group->drop && sm_drops(group->drop, bpf_get_prandom_u32());
}

#endif
