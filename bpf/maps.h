/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps that every limit has, whatever its scheme: its settings and its queues.
 *
 * A map that libbpf reuses takes on the name that the kernel has of it, and the skeletons then know
 * it no more, unless that name is 15 letters long and ours begins with it. So the maps that a child
 * has in common with its parent (tree.h) share their first 15 letters.
 */
#ifndef TG_MAPS_H
#define TG_MAPS_H

#include <bpf/bpf_helpers.h>

#include "intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_LIMITS);
	__type(key, __u32);
	__type(value, struct tg_copies);
} limit SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_QUEUES);
	__type(key, __u32);
	__type(value, struct tg_queue);
} queues_of_limit SEC(".maps");

/*
 * A limit is in its map twice, and a word in the same value names the copy in force: one look-up
 * finds all three. An update of a map is no atomic step, so user space changes the copy that is not
 * in force, and then the word. It writes the bytes of the other copy, too, as they are. A packet
 * sees the old settings or the new, never half of both; so it does where the writer dies. Only a
 * packet that is under way while two updates follow each other may see half of the second. To wait
 * for such packets between the two takes an RCU grace period, some 15 ms, for each rate of a group.
 */
static __always_inline struct tg_limit *tg_limit_now(void)
{
	__u32 key = 0;
	struct tg_copies *copies = bpf_map_lookup_elem(&limit, &key);

	return copies ? &copies->copy[copies->in_force & 1] : 0;
}

/*
 * The limit, as it is in force for a direction. What a group lets a host have may have an end: who
 * lets it have that gives it to others then, whether a daemon is there to lower the limit or not.
 */
static __always_inline struct tg_limit *tg_limit_of(enum tg_direction direction)
{
	struct tg_copies *copies;
	struct tg_limit *l;
	__u32 key = 0;
	__u64 copy;

	copies = bpf_map_lookup_elem(&limit, &key);
	if (!copies)
		return 0;
	copy = copies->in_force & 1;
	l = &copies->copy[copy];
	if (!l->until_ns[direction] || bpf_ktime_get_boot_ns() < l->until_ns[direction])
		return l;
	key = 1 + direction;
	copies = bpf_map_lookup_elem(&limit, &key);
	return copies ? &copies->copy[copy] : 0;
}

#endif
