/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The additions of a group of hosts to one of its limits: random drops, and byte counts of flows
 * (sample.h). A limit in no group pays for one lookup in `group_of_limit`.
 *
 * Flow counters have two buffers for each direction and CPU. Packets fill the one that user space
 * has named; user space reads and clears the other. They are allocated when a group first asks, so
 * a limit in no group has no memory for them.
 */
#ifndef TG_GROUP_H
#define TG_GROUP_H

#include "common/flow.h"
#include "police/intf.h"

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
	/* Clang writes only the name of a type that is used nowhere else in a map's description. */
	__uint(value_size, sizeof(struct sm_counts));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__array(values, struct gr_buffers);
} samples_of_limit SEC(".maps");

/* Counts the bytes of a packet for its flow. A separate function: see tg_parse. */
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
