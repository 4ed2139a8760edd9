/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The epochs of a queue: who took a share of one, and at its end the next share.
 *
 * One CPU at a time changes the epoch (ep_enter). Nobody waits: a CPU that finds another one there
 * leaves the epoch as it is, and the next packet tries again. So each flow is counted once, in one
 * epoch. A share is computed from the numbers of one epoch, and no stale share overwrites a new
 * one. A program always runs to its end, so the epoch is always left.
 *
 * Packets add to `aside_ns` without entering; the end of an epoch exchanges it. What comes later
 * counts for the next epoch, and nothing is lost. `flooded` and `newcomers` are hints for one
 * epoch; if one is lost at its end, one packet, or connection, counts a little earlier. `rtt_ns` is
 * smoothed, so a lost sample does no harm.
 */
#ifndef TG_EPOCH_H
#define TG_EPOCH_H

#include "common/fair_share.h"
#include "common/intf.h"
#include "common/unpaced.h"

/* Whether this CPU may change the epoch; then it must call ep_leave. */
static inline __attribute__((always_inline)) int ep_enter(struct tg_queue *queue)
{
	return !__sync_val_compare_and_swap(&queue->entered, 0, 1);
}

static inline __attribute__((always_inline)) void ep_leave(struct tg_queue *queue)
{
	/* An exchange: the next CPU that enters sees all that was written before. */
	__sync_lock_test_and_set(&queue->entered, 0);
}

/*
 * Counts a flow in this epoch, if it is not counted yet, and makes room for it if it is new. *seen
 * is the last epoch in which it was counted. It is zero for a new flow, so epochs are numbered from
 * one. Returns whether it was counted now.
 */
static inline __attribute__((always_inline)) int ep_count_flow(struct tg_queue *queue, __u32 *seen)
{
	__u32 epoch, before = *(volatile __u32 *)seen;

	if (before == *(volatile __u32 *)&queue->epoch + 1 || !ep_enter(queue))
		return 0;
	epoch = queue->epoch + 1;
	before = *(volatile __u32 *)seen;
	if (before != epoch) {
		*seen = epoch;
		queue->flows++;
		/* A flow that was only silent for a while is not new. */
		if (queue->flows > queue->flows_before &&
		    !(before && epoch - before <= FS_KNOWN_EPOCHS))
			queue->share = fs_join(queue->share, queue->flows);
	}
	ep_leave(queue);
	return before != epoch;
}

/*
 * Counts a packet of a flow. What the flow takes is set aside until that is half of a share; then
 * the flow is counted. `*sent` and `*seen` belong to its socket, or its cell. So many flows that
 * want little leave the rest to the others, and a flow counts by what it takes, not by being seen.
 * A flow that took half of a share when it last sent is counted at once. So is a new one if
 * `newcomers_count`: otherwise flows that begin together would each take less than half of a share
 * that was computed without them, and none would count.
 */
static inline __attribute__((always_inline)) void ep_use(struct tg_queue *queue, __u64 *sent,
							 __u32 *seen, __u32 bytes, __u64 cost,
							 int newcomers_count)
{
	__u32 epoch = *(volatile __u32 *)&queue->epoch + 1;
	__u64 share = *(volatile __u32 *)&queue->share, fair_ns;
	__u32 counted = *(volatile __u32 *)seen;
	int expected = bytes > VQ_SMALL_BYTES && ((!counted && newcomers_count) ||
						  up_took_much(*(volatile __u64 *)sent, epoch));
	__s64 aside_ns;
	int takes;

	fair_ns = up_fair_ns(share ? share : FS_TARGET, queue->epoch_us * 1000ULL);
	takes = up_takes(sent, epoch, bytes, UP_FRAME_BYTES, cost, fair_ns, &aside_ns);
	if (counted == epoch || (expected && ep_count_flow(queue, seen)))
		return;
	if (takes)
		ep_count_flow(queue, seen);
	if (aside_ns)
		__sync_fetch_and_add(&queue->aside_ns, aside_ns);
}

/*
 * An unpaced flow has taken what it earns in the next `ahead_ns`. It counts until then, as a link
 * of the flow's share would still be busy with it. Otherwise flows that send in bursts would share
 * only with flows that send in the same epoch. `*until` belongs to its cell.
 */
static inline __attribute__((always_inline)) void ep_stay(struct tg_queue *queue, __u32 *until,
							  __u64 ahead_ns)
{
	__u64 ahead = ahead_ns / (fs_max(queue->epoch_us, 1) * 1000ULL);
	__u32 epoch, last, counts;

	if (!ahead || !ep_enter(queue))
		return;
	epoch = queue->epoch + 1;
	last = epoch + fs_min(ahead, TG_STAYS - 1);
	counts = *until - epoch < TG_STAYS ? *until : epoch;
	for (__u32 i = 0; i < TG_STAYS && counts != last && last - counts < TG_STAYS; i++)
		queue->stays[++counts % TG_STAYS]++;
	*until = counts;
	ep_leave(queue);
}

/* Whether a flow counts in this epoch because of what it took in an earlier one. */
static inline __attribute__((always_inline)) int ep_stays(const struct tg_queue *queue, __u32 until)
{
	return until - (queue->epoch + 1) < TG_STAYS;
}

/*
 * Counts a class among the active children in this epoch of its parent, with its weight and
 * guarantee, and makes room for it if it wants that. *seen is the last epoch in which it was
 * counted, numbered from one. Returns whether it was counted now.
 */
static inline __attribute__((always_inline)) int
ep_count_class(struct tg_queue *parent, __u32 *seen, const struct cl_class *class, int wants_room)
{
	__u32 epoch, before = *(volatile __u32 *)seen;
	struct fs_sharers sharers;

	if ((before == *(volatile __u32 *)&parent->epoch + 1 && !wants_room) || !ep_enter(parent))
		return 0;
	epoch = parent->epoch + 1;
	before = *(volatile __u32 *)seen;
	if (before != epoch) {
		*seen = epoch;
		parent->flows++;
		parent->weight += class->weight;
		parent->reserved_bit_s += class->guarantee_bit_s;
		if (!parent->lightest || class->weight < parent->lightest)
			parent->lightest = class->weight;
	}
	if (wants_room && parent->rate_bit_s &&
	    (parent->weight > parent->weight_before ||
	     parent->reserved_bit_s > parent->reserved_before_bit_s)) {
		sharers.count = parent->flows;
		sharers.weight = fs_greater(parent->weight, parent->weight_before);
		sharers.lightest = class->weight;
		sharers.reserved =
		    fs_part(fs_greater(parent->reserved_bit_s, parent->reserved_before_bit_s),
			    parent->rate_bit_s);
		parent->share = fs_make_room(parent->share, &sharers);
	}
	ep_leave(parent);
	return before != epoch;
}

/*
 * Counts a packet of a class. A class counts in each epoch in which it sends. Room is made for it
 * at once if it is new, or if it comes back and took half of its part when it last sent. One that
 * only sends a datagram now and then has room made when it takes half of its part: otherwise each
 * of these datagrams would take a share from its siblings.
 */
static inline __attribute__((always_inline)) void ep_use_class(struct tg_queue *parent,
							       struct tg_queue *queue,
							       const struct cl_class *class,
							       __u32 bytes)
{
	__u32 epoch = *(volatile __u32 *)&parent->epoch + 1;
	__u32 counted = *(volatile __u32 *)&queue->counted_epoch;
	__u32 busy = *(volatile __u32 *)&queue->busy_epoch;
	__u32 last = *(volatile __u64 *)&queue->sent >> 32;
	__u64 share = *(volatile __u32 *)&parent->share;
	/* One that was only silent for a while is not new, as with flows. */
	int is_known = counted && epoch - counted <= FS_KNOWN_EPOCHS;
	int was_busy = busy && last - busy <= FS_KNOWN_EPOCHS;
	int wants_room = !counted || (!is_known && was_busy);
	__u64 part = (share ? share : FS_TARGET) * class->weight / FS_WEIGHT;
	__s64 aside_ns;

	if (parent->rate_bit_s)
		part += fs_part(class->guarantee_bit_s, parent->rate_bit_s);
	part = up_fair_ns(part, parent->epoch_us * 1000ULL);
	if (up_takes(&queue->sent, epoch, bytes, 0, parent->cost, part, &aside_ns)) {
		wants_room |= !busy || epoch - busy > FS_KNOWN_EPOCHS;
		queue->busy_epoch = epoch;
	}
	ep_count_class(parent, &queue->counted_epoch, class, wants_room);
}

/*
 * Who took a share of the epoch that ends: children if there were any, else flows. What was set
 * aside counts as reserved. A flow gives back what was set aside for it in the same epoch. If the
 * two fall into different epochs, a negative amount is set aside in the second.
 */
static inline __attribute__((always_inline)) void ep_take_sharers(struct tg_queue *queue,
								  __u64 rate_bit_s,
								  __u64 elapsed_ns,
								  struct fs_sharers *sharers)
{
	__s64 set_aside = __sync_lock_test_and_set(&queue->aside_ns, 0);
	__u64 aside = fs_lesser(set_aside > 0 ? set_aside : 0, FS_MAX_CHARGED_NS) * FS_ONE /
		      fs_greater(elapsed_ns, 1);
	__u32 weight = fs_greater(queue->weight, queue->weight_before);
	__u16 *stays;

	/* A flow that was silent for one epoch may come back. */
	fs_flows(sharers, fs_greater(queue->flows, queue->flows_before));
	queue->flows_before = queue->flows;
	/* For the next epoch: packets of this one have added to it. */
	stays = &queue->stays[(queue->epoch + 2) % TG_STAYS];
	queue->flows = *stays;
	*stays = 0;
	if (elapsed_ns / 1000 > (__u64)TG_STAYS * queue->epoch_us) {
		queue->flows = 0;
		__builtin_memset(queue->stays, 0, sizeof(queue->stays));
	}
	sharers->reserved = fs_greater(aside, queue->aside_before);
	queue->aside_before = aside;
	if (!weight)
		return;
	sharers->weight = weight;
	sharers->reserved =
	    fs_part(fs_greater(queue->reserved_bit_s, queue->reserved_before_bit_s), rate_bit_s);
	sharers->lightest =
	    queue->lightest_before && (!queue->lightest || queue->lightest_before < queue->lightest)
		? queue->lightest_before
		: queue->lightest;
	queue->weight_before = queue->weight;
	queue->reserved_before_bit_s = queue->reserved_bit_s;
	queue->lightest_before = queue->lightest;
	queue->weight = 0;
	queue->reserved_bit_s = 0;
	queue->lightest = 0;
}

/* Whether the epoch that began at `start_ns` has lasted long enough. */
static inline __attribute__((always_inline)) int ep_is_over(const struct tg_queue *queue,
							    __u64 start_ns, __u64 now)
{
	return (__s64)(now - start_ns) >= (__s64)queue->epoch_us * 1000;
}

/*
 * Ends the epoch when it has lasted long enough. Only one CPU does so; it gets 1. `burst_bytes` is
 * what a flow sends at once. The charge is how far the finish time moved, less the idle time that
 * it skipped. These are two words, and a packet may have changed only one so far (vq_charge). It
 * then counts in the next epoch, or is taken back there.
 */
static inline __attribute__((always_inline)) int tg_turn_epoch(const struct vq_conf *conf,
							       struct tg_queue *queue, __u64 now,
							       __u64 backlog_ns, __u64 rtt_ns,
							       __u64 burst_bytes, __u64 rate_bit_s)
{
	__u64 start = *(volatile __u64 *)&queue->epoch_start_ns;
	struct fs_epoch epoch;
	__s64 charged;
	__u64 base;

	if (!ep_is_over(queue, start, now) || !ep_enter(queue))
		return 0;
	/* Another CPU may have ended it since. */
	if (*(volatile __u64 *)&queue->epoch_start_ns != start) {
		ep_leave(queue);
		return 0;
	}
	queue->epoch_start_ns = now;
	epoch.backlog_ns = backlog_ns;
	epoch.elapsed_ns = now - start;
	epoch.rtt_ns = rtt_ns;
	epoch.burst_ns = vq_time_ns(burst_bytes, conf->cost);
	base = *(volatile __u64 *)&queue->finish_ns - *(volatile __u64 *)&queue->skipped_ns;
	charged = base - queue->epoch_base_ns;
	epoch.charged_ns = charged > 0 ? charged : 0;
	queue->epoch_base_ns = base;
	ep_take_sharers(queue, rate_bit_s, epoch.elapsed_ns, &epoch.sharers);
	queue->share = fs_next(queue->share, &epoch);
	queue->epoch_us = fs_epoch_ns(fs_greater(queue->flows_before, 1), epoch.burst_ns) / 1000;
	queue->epoch++;
	ep_leave(queue);
	return 1;
}

/*
 * The rate has changed since the last packet. The backlog keeps its bytes, and the epoch its number
 * of bursts: a small backlog at one rate would block everything for seconds at another. While
 * another CPU changes the epoch, this is left to the next packet.
 */
static inline __attribute__((always_inline)) void ep_follow_rate(const struct vq_conf *conf,
								 struct tg_queue *queue, __u64 now)
{
	__u64 from, to, epoch_ns, moved;
	__s64 backlog;

	if (!ep_enter(queue))
		return;
	from = queue->cost;
	to = *(volatile __u64 *)&conf->cost;
	queue->cost = to;
	if (from && from != to) {
		epoch_ns = vq_scaled_ns(queue->epoch_us * 1000ULL, from, to);
		epoch_ns = fs_lesser(fs_greater(epoch_ns, FS_MIN_EPOCH_NS), FS_MAX_EPOCH_NS);
		if (queue->epoch_us)
			queue->epoch_us = epoch_ns / 1000;
		backlog = *(volatile __u64 *)&queue->finish_ns - now;
		if (backlog > 0) {
			moved = vq_rescaled_ns(backlog, from, to, conf->drop_ns) - backlog;
			/* This is not a charge of this epoch. */
			queue->epoch_base_ns += moved;
			__sync_fetch_and_add(&queue->finish_ns, moved);
		}
		backlog = *(volatile __u64 *)&queue->unpaced_finish_ns - now;
		if (backlog > 0) {
			moved = vq_rescaled_ns(backlog, from, to, conf->drop_ns) - backlog;
			__sync_fetch_and_add(&queue->unpaced_finish_ns, moved);
		}
	}
	ep_leave(queue);
}

#endif
