/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Limits inside limits, on the maps. The kernel runs the programs of a socket's cgroups innermost
 * first, so a child meets each packet before its parent does, and knows the parent's queues.
 * - It counts itself among the parent's active children, and takes from the parent's share what
 *   it may use now.
 * - It claims the socket: traffic that the parent sees and no child has claimed belongs to none,
 *   and is a class of its own beside them.
 */
#ifndef TG_TREE_H
#define TG_TREE_H

#include <bpf/bpf_helpers.h>

#include "fair_share.h"
#include "intf.h"
#include "maps.h"

/* Whether the limit has a parent; without one the parent's maps do not exist. */
const volatile __u8 has_parent = 0;

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tg_socket);
} sockets_of_limit SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_QUEUES);
	__type(key, __u32);
	__type(value, struct tg_queue);
} queues_of_limit_above SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tg_socket);
} sockets_of_limit_above SEC(".maps");

/* Whether the limit has children that use it. */
static __always_inline int tg_is_parent(const struct tg_queue *queue, __u64 now)
{
	return (__s64)(queue->children_until_ns - now) > 0;
}

/* Whether a child of the limit has the socket. */
static __always_inline int tg_is_claimed(const struct tg_socket *ours, __u64 now)
{
	return ours && ours->claimed_ns && (__s64)(now - ours->claimed_ns) < (__s64)TG_CHILDREN_NS;
}

/* The rate that the limit may use now. */
static __always_inline __u64 tg_rate(const struct tg_limit *l, const struct tg_queue *queue,
				     enum tg_direction direction)
{
	return queue->now.cost ? queue->rate_bit_s : l->rate_bit_s[direction];
}

/* Counts a class among those that are active in this epoch of its parent. */
static __always_inline void tg_count_class(struct tg_queue *parent, struct tg_queue *queue,
					   const struct cl_class *class)
{
	__u64 guarantee = class->guarantee_bit_s, reserved = parent->reserved_bit_s;
	__u32 counted = queue->counted_epoch, epoch = parent->epoch + 1;
	struct fs_sharers sharers;
	__u32 weight;

	/* A new queue has been counted in none: epochs are numbered from one here. */
	if (counted == epoch ||
	    __sync_val_compare_and_swap(&queue->counted_epoch, counted, epoch) != counted)
		return;
	sharers.count = __sync_fetch_and_add(&parent->flows, 1) + 1;
	weight = __sync_fetch_and_add(&parent->weight, class->weight) + class->weight;
	if (guarantee)
		reserved = __sync_fetch_and_add(&parent->reserved_bit_s, guarantee) + guarantee;
	if (!parent->lightest || class->weight < parent->lightest)
		parent->lightest = class->weight;
	if ((weight <= parent->weight_before && reserved <= parent->reserved_before_bit_s) ||
	    !parent->rate_bit_s)
		return;
	sharers.weight = fs_max(weight, parent->weight_before);
	sharers.lightest = class->weight;
	sharers.reserved = fs_max(reserved, parent->reserved_before_bit_s);
	sharers.reserved = fs_min(sharers.reserved, 1ULL << 37) * FS_ONE / parent->rate_bit_s;
	parent->share = fs_make_room(parent->share, &sharers);
}

/* Takes from the parent's share what the class may use until its next epoch ends. */
static __always_inline void tg_follow(struct tg_queue *parent, struct tg_queue *queue,
				      const struct vq_conf *ceiling, const struct cl_class *class,
				      __u64 ceiling_bit_s)
{
	__u64 rate, share;

	if (!parent->rate_bit_s)
		return;
	share = parent->share ? parent->share : FS_TARGET;
	rate = cl_rate(class, ceiling_bit_s, parent->rate_bit_s, share);
	cl_config_at(ceiling, class, rate, &queue->now);
	queue->rate_bit_s = rate;
}

/*
 * The end of a class's epoch, seen from its parent: it has a child, whose loop is as slow as this.
 * What the child does with another share is seen after its next epoch and a round trip.
 */
static __always_inline void tg_report(struct tg_queue *parent, const struct tg_queue *queue,
				      __u64 now)
{
	__u64 delay = 2000ULL * queue->epoch_us + queue->rtt_ns;

	parent->children_until_ns = now + TG_CHILDREN_NS;
	parent->rtt_ns += fs_min(delay, FS_MAX_EPOCH_NS) / 16 - parent->rtt_ns / 16;
}

#endif
