/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps that every limit has, whatever its scheme: its settings and its queues.
 *
 * A map that libbpf reuses gets the kernel's name for it. The skeletons then do not find it, unless
 * that name is 15 letters long and ours begins with it. So the maps that a child shares with its
 * parent (tree.h) have their first 15 letters in common.
 */
#ifndef TG_MAPS_H
#define TG_MAPS_H

#include <bpf/bpf_helpers.h>

#include "common/intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_LIMITS);
	__type(key, __u32);
	__type(value, struct tg_limit);
} limit SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_QUEUES);
	__type(key, __u32);
	__type(value, struct tg_queue);
} queues_of_limit SEC(".maps");

/*
 * The limit that is in force, before its leases. An update of a map is not atomic, so user space
 * writes the copy that is not in force, and then the one word that names it. A packet sees the old
 * settings or the new, never half of both, also if the writer dies. Only a packet that is processed
 * while two updates follow each other may see half of the second.
 */
static __always_inline struct tg_limit *tg_limit_now(__u32 *key)
{
	struct tg_limit *l;

	*key = 0;
	l = bpf_map_lookup_elem(&limit, key);
	if (!l || !l->copy)
		return l;
	*key = TG_COPY;
	return bpf_map_lookup_elem(&limit, key);
}

/*
 * The limit that is in force for a direction. A rate that a group lends to a host has an end. The
 * group gives it to others then, even if no daemon is there to lower the limit.
 */
static __always_inline struct tg_limit *tg_limit_of(enum tg_direction direction)
{
	__u32 key;
	struct tg_limit *l = tg_limit_now(&key);

	if (!l || !l->until_ns[direction] || bpf_ktime_get_boot_ns() < l->until_ns[direction])
		return l;
	key += 1 + direction;
	return bpf_map_lookup_elem(&limit, &key);
}

#endif
