/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Limits inside limits, on the maps. The kernel runs the programs of a socket's cgroups innermost
 * first. So a child sees each packet before its parent does, and knows the parent's queues.
 * - It counts itself among the parent's active children, and takes its current rate from the
 *   parent's share.
 * - It claims the socket. Traffic that reaches the parent unclaimed belongs to no child, and is a
 *   class beside them.
 */
#ifndef TG_TREE_H
#define TG_TREE_H

#include <bpf/bpf_helpers.h>

#include "nrm/epoch.h"
#include "common/fair_share.h"
#include "nrm/intf.h"
#include "common/maps.h"
#include "nrm/queues.h"

/*
 * Whether limits can be inside this one. In none of those that end with a process: the verifier
 * then leaves out what is for these.
 */
const volatile __u8 can_be_parent = 1;
/* Whether the limit has a parent; without one the parent's maps do not exist. */
const volatile __u8 has_parent = 0;
/* The slot of the parent, which may be in a pool. */
const volatile __u32 parent_slot = 0;

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
	__type(value, struct tg_nrm_queue);
} queues_of_limit_above SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tg_socket);
} sockets_of_limit_above SEC(".maps");

/* Whether the limit has active children. */
static __always_inline int tg_is_parent(const struct tg_nrm_queue *queue, __u64 now)
{
	return can_be_parent && (__s64)(queue->children_until_ns - now) > 0;
}

/* Whether a child of the limit has the socket. */
static __always_inline int tg_is_claimed(const struct tg_socket *ours, __u64 now)
{
	return ours && ours->claimed_ns && (__s64)(now - ours->claimed_ns) < (__s64)TG_CHILDREN_NS;
}

/* Claims a socket from the parent, which there is; its programs run after these. */
static __always_inline void tg_claim(struct bpf_sock *sk, __u64 now)
{
	struct tg_socket *theirs;

	if (!sk)
		return;
	theirs = bpf_sk_storage_get(&sockets_of_limit_above, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (theirs)
		theirs->claimed_ns = now;
}

/* The rate that the limit may use now. */
static __always_inline __u64 tg_rate(const struct tg_limit *l, const struct tg_nrm_queue *queue,
				     enum tg_direction direction)
{
	return has_parent && queue->cost_now ? queue->rate_bit_s : l->rate_bit_s[direction];
}

/* The class of a child, or without one that of unclaimed traffic. */
static __always_inline struct cl_class tg_class(const struct cl_class *child)
{
	struct cl_class class = {.weight = FS_WEIGHT};

	if (child) {
		class.weight = child->weight;
		class.guarantee_bit_s = child->guarantee_bit_s;
	}
	return class;
}

/* Counts what a class takes in this epoch of its parent. */
__noinline int tg_use_class(struct tg_nrm_queue *parent, struct tg_nrm_queue *queue,
			    const struct cl_class *child, __u32 bytes)
{
	struct cl_class class = tg_class(child);

	if (parent && queue)
		ep_use_class(parent, queue, &class, bytes);
	return 0;
}

/*
 * Sets the class's rate until its next epoch ends, from the parent's share. Other CPUs may see the
 * new rate a moment before the new cost, so bursts and pacing rates need not match the thresholds
 * for that moment.
 */
__noinline int tg_follow(const struct tg_nrm_queue *parent, struct tg_nrm_queue *queue,
			 const struct cl_class *child, __u64 ceiling_bit_s)
{
	struct cl_class class = tg_class(child);
	__u64 rate, share;

	if (!parent || !queue || !parent->rate_bit_s)
		return 0;
	share = parent->common.share ? parent->common.share : FS_TARGET;
	rate = cl_rate(&class, ceiling_bit_s, parent->rate_bit_s, share);
	queue->rate_bit_s = rate;
	queue->cost_now = cl_cost(rate);
	return 0;
}

/* The virtual queue of a class at its present rate. */
__noinline int tg_config_now(const struct tg_nrm_queue *queue, const struct vq_conf *ceiling,
			     const struct cl_class *class, struct vq_conf *now)
{
	if (queue && ceiling && class && now)
		cl_config_at(ceiling, class, *(volatile __u64 *)&queue->cost_now, now);
	return 0;
}

/*
 * The end of a class's epoch, reported to its parent: it has a child, and its loop is as slow as
 * this. The effect of another share shows after the child's next epoch and a round trip.
 */
static __always_inline void tg_report(struct tg_nrm_queue *parent, const struct tg_nrm_queue *queue,
				      __u64 now)
{
	__u64 delay = 2000ULL * queue->common.epoch_us + queue->rtt_ns;

	parent->children_until_ns = now + TG_CHILDREN_NS;
	parent->rtt_ns += fs_min(delay, FS_MAX_EPOCH_NS) / 16 - parent->rtt_ns / 16;
}

#endif
