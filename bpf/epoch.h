/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a queue keeps of an epoch: who took a share of it, and at its end the next share.
 *
 * One CPU at a time changes it (ep_enter). Nobody waits: who finds another one there leaves the
 * epoch as it is, and the next packet asks again. So whoever is counted is counted in one epoch and
 * once, a share is computed from one epoch's numbers, and no stale share is written over a new one.
 * A program always runs to its end, so nobody stays inside.
 *
 * Outside of it packets add to `aside_ns`, which the end of an epoch exchanges: what comes later
 * counts for the next, and nothing is lost. `flooded` and `newcomers` are hints for one epoch; one
 * that is lost at its end is one packet, or connection, that counts a little earlier. `rtt_ns` is
 * smoothed, so a lost sample is one of many.
 */
#ifndef TG_EPOCH_H
#define TG_EPOCH_H

#include "fair_share.h"
#include "intf.h"
#include "unpaced.h"

/* Whether this CPU may change what is kept of the epoch; then it must call ep_leave. */
static inline __attribute__((always_inline)) int ep_enter(struct tg_queue *queue)
{
	return !__sync_val_compare_and_swap(&queue->entered, 0, 1);
}

static inline __attribute__((always_inline)) void ep_leave(struct tg_queue *queue)
{
	/* An exchange: all that was written before it is seen by who enters next. */
	__sync_lock_test_and_set(&queue->entered, 0);
}

/*
 * Counts a flow in this epoch, if it is not yet, and makes room for it if it is new: *seen is the
 * last epoch in which it was counted. A new flow has zero there, so epochs are numbered from one.
 * Returns whether it was counted now.
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
		/* Who has only been silent for a while is no newcomer. */
		if (queue->flows > queue->flows_before &&
		    !(before && epoch - before <= FS_KNOWN_EPOCHS))
			queue->share = fs_join(queue->share, queue->flows);
	}
	ep_leave(queue);
	return before != epoch;
}

/*
 * Counts a packet of a flow: what it takes is set aside until that is half of a share, and then it
 * is counted. `*sent` and `*seen` are its socket's, or its cell's. So many flows that want
 * little leave no more than that to the others, and a flow that comes and goes counts by what it
 * takes and not by being seen. One that took half of a share when it last sent is counted at once,
 * and so is a new one if `newcomers_count`: flows that begin together would each take less than
 * half of a share that was computed without them, and none would be counted.
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
	takes = up_takes(sent, epoch, bytes, cost, fair_ns, &aside_ns);
	if (counted == epoch || (expected && ep_count_flow(queue, seen)))
		return;
	if (takes)
		ep_count_flow(queue, seen);
	if (aside_ns)
		__sync_fetch_and_add(&queue->aside_ns, aside_ns);
}

/*
 * A flow that cannot be paced has taken what it earns in `ahead_ns` from now on: it counts until
 * then, as a link of the flow's share would still be busy with it. Otherwise flows that send in
 * bursts, in some epochs much and in the others nothing, would each have a share of those alone
 * that do so in the same epoch. `*until` is its cell's.
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

/* Whether a flow counts in this epoch by what it took in an earlier one. */
static inline __attribute__((always_inline)) int ep_stays(const struct tg_queue *queue, __u32 until)
{
	return until - (queue->epoch + 1) < TG_STAYS;
}

/*
 * Counts a class among those that are active in this epoch of its parent: what it weighs and what
 * is guaranteed to it. *seen is the last epoch in which it was, numbered from one. Returns whether
 * it was counted now.
 */
static inline __attribute__((always_inline)) int
ep_count_class(struct tg_queue *parent, __u32 *seen, const struct cl_class *class)
{
	struct fs_sharers sharers;
	int counts;

	if (*(volatile __u32 *)seen == *(volatile __u32 *)&parent->epoch + 1 || !ep_enter(parent))
		return 0;
	counts = *(volatile __u32 *)seen != parent->epoch + 1;
	if (counts) {
		*seen = parent->epoch + 1;
		parent->flows++;
		parent->weight += class->weight;
		parent->reserved_bit_s += class->guarantee_bit_s;
		if (!parent->lightest || class->weight < parent->lightest)
			parent->lightest = class->weight;
		if ((parent->weight > parent->weight_before ||
		     parent->reserved_bit_s > parent->reserved_before_bit_s) &&
		    parent->rate_bit_s) {
			sharers.count = parent->flows;
			sharers.weight = fs_greater(parent->weight, parent->weight_before);
			sharers.lightest = class->weight;
			sharers.reserved = fs_part(
			    fs_greater(parent->reserved_bit_s, parent->reserved_before_bit_s),
			    parent->rate_bit_s);
			parent->share = fs_make_room(parent->share, &sharers);
		}
	}
	ep_leave(parent);
	return counts;
}

/*
 * Who took a share of the epoch that ends: children if there were any, or flows. What was set
 * aside counts as reserved. A flow gives back what was set aside for it in the same epoch; should
 * the two fall into different ones, less than nothing is set aside in the second.
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

	/* One that was silent for one epoch may only have been unlucky. */
	fs_flows(sharers, fs_greater(queue->flows, queue->flows_before));
	queue->flows_before = queue->flows;
	/* Of the next epoch: packets of this one have counted in it. */
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
 * Closes the epoch when it has lasted long enough; one CPU does, and hears 1. `burst_bytes` is what
 * a flow sends at once. What was charged is how far the finish time moved less what it skipped: two
 * words, of which a packet may have changed one so far (vq_charge). It then counts in the next
 * epoch, or is taken back there.
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
 * The rate has changed since the last packet: what the queue is behind stays as many bytes, and its
 * epoch as many bursts. What is little at one rate would keep all out for seconds at another. While
 * another CPU is at the epoch it is left to the next packet.
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
			/* It is no charge of this epoch. */
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
