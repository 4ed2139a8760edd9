/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The sharers of a queue of schemes `nrm` and `pace` in an epoch: flows that take half of a share,
 * the part that is set aside for the others, and the children of a limit.
 *
 * Packets add to `aside_ns` without entering (common/epoch.h); the end of an epoch exchanges it.
 * Later packets count for the next epoch, and nothing is lost. `flooded` and `newcomers` are
 * hints for one epoch; if one is lost at its end, one packet, or connection, counts a little
 * earlier. `rtt_ns` is smoothed, so a lost sample does no harm.
 */
#ifndef TG_NRM_EPOCH_H
#define TG_NRM_EPOCH_H

#include "common/epoch.h"
#include "common/verifier.h"
#include "nrm/intf.h"
#include "nrm/unpaced.h"

/*
 * Counts a flow in this epoch, if it is not counted yet, and lowers the share if it is new. *seen
 * is the last epoch in which it counts. It is zero for a new flow, so epochs are numbered from
 * one. Returns whether it was counted now.
 */
VF_ONCE int ep_count_flow(struct tg_queue *queue, __u32 *seen)
{
	__u32 epoch, before;

	if (!queue || !seen)
		return 0;
	before = *(volatile __u32 *)seen;
	if (before - (*(volatile __u32 *)&queue->epoch + 1) < TG_STAYS || !ep_enter(queue))
		return 0;
	epoch = queue->epoch + 1;
	before = *(volatile __u32 *)seen;
	if (before - epoch >= TG_STAYS) {
		*seen = epoch;
		queue->flows++;
		/* A flow that was only silent for a while is not new. */
		if (queue->flows > queue->flows_before &&
		    !(before && epoch - before <= FS_KNOWN_EPOCHS))
			queue->share = fs_join(queue->share, queue->flows);
	}
	ep_leave(queue);
	return before - epoch >= TG_STAYS;
}

/*
 * A flow has taken what it earns in the next `ahead_ns`. It counts until then, as a link of the
 * flow's share would still be busy with it. Otherwise flows that send in bursts would share only
 * with flows that send in the same epoch. `*until` is the last epoch in which it counts.
 */
VF_ONCE int ep_stay(struct tg_nrm_queue *queue, __u32 *until, __u64 ahead_ns)
{
	__u32 epoch, last, counts;
	__u64 ahead;

	if (!queue || !until)
		return 0;
	ahead = ahead_ns / (fs_max(queue->common.epoch_us, 1) * 1000ULL);
	if (!ahead || !ep_enter(&queue->common))
		return 0;
	epoch = queue->common.epoch + 1;
	last = epoch + fs_min(ahead, TG_STAYS - 1);
	counts = *until - epoch < TG_STAYS ? *until : epoch;
	for (__u32 i = 0; i < TG_STAYS && counts != last && last - counts < TG_STAYS; i++)
		queue->stays[++counts % TG_STAYS]++;
	*until = counts;
	ep_leave(&queue->common);
	return 0;
}

/*
 * Counts a packet of a flow. What the flow takes is set aside until that is half of a share; then
 * the flow is counted. `*sent` and `*seen` belong to its socket, or its cell. So many flows that
 * want little leave the rest to the others, and a flow counts by what it takes, not by being seen.
 * A flow that took half of a share when it last sent is counted at once. So is a new one if
 * `newcomers_count`: otherwise flows that begin together would each take less than half of a share
 * that was computed without them, and none would count. One that sends more at once than its share
 * of two epochs counts until that is paid for; `*seen` is then an epoch to come.
 */
static inline __attribute__((always_inline)) void ep_use(struct tg_nrm_queue *queue, __u64 *sent,
							 __u32 *seen, __u32 bytes, __u64 cost,
							 int newcomers_count)
{
	__u32 epoch = *(volatile __u32 *)&queue->common.epoch + 1;
	__u64 share = *(volatile __u32 *)&queue->common.share, fair_ns;
	__u32 counted = *(volatile __u32 *)seen;
	int expected = bytes > VQ_SMALL_BYTES && ((!counted && newcomers_count) ||
						  up_took_much(*(volatile __u64 *)sent, epoch));
	__s64 aside_ns;
	__u64 time_ns, epochs;
	int takes;

	fair_ns = up_fair_ns(share ? share : FS_TARGET, queue->common.epoch_us * 1000ULL);
	takes = up_takes(sent, epoch, bytes, UP_FRAME_BYTES, cost, fair_ns, &aside_ns);
	if (counted - epoch >= TG_STAYS && !(expected && ep_count_flow(&queue->common, seen))) {
		if (takes)
			ep_count_flow(&queue->common, seen);
		if (aside_ns)
			__sync_fetch_and_add(&queue->aside_ns, aside_ns);
	}
	time_ns = vq_time_ns(bytes, cost);
	if (newcomers_count && time_ns >= 2 * fair_ns) {
		epochs = fs_min(time_ns / fs_max(fair_ns, 1), TG_STAYS);
		ep_stay(queue, seen, epochs * queue->common.epoch_us * 1000);
	}
}

/* Whether a flow counts in this epoch because of what it took in an earlier one. */
static inline __attribute__((always_inline)) int ep_stays(const struct tg_nrm_queue *queue,
							  __u32 until)
{
	return until - (queue->common.epoch + 1) < TG_STAYS;
}

/*
 * Counts a class among the active children in this epoch of its parent, with its weight and
 * guarantee, and lowers the share for it if asked. *seen is the last epoch in which it was
 * counted, numbered from one. Returns whether it was counted now.
 */
static inline __attribute__((always_inline)) int ep_count_class(struct tg_nrm_queue *parent,
								__u32 *seen,
								const struct cl_class *class,
								int wants_room)
{
	__u32 epoch, before = *(volatile __u32 *)seen;
	struct fs_sharers sharers;

	if ((before == *(volatile __u32 *)&parent->common.epoch + 1 && !wants_room) ||
	    !ep_enter(&parent->common))
		return 0;
	epoch = parent->common.epoch + 1;
	before = *(volatile __u32 *)seen;
	if (before != epoch) {
		*seen = epoch;
		parent->common.flows++;
		parent->weight += class->weight;
		parent->reserved_bit_s += class->guarantee_bit_s;
		if (!parent->lightest || class->weight < parent->lightest)
			parent->lightest = class->weight;
	}
	if (wants_room && parent->rate_bit_s &&
	    (parent->weight > parent->weight_before ||
	     parent->reserved_bit_s > parent->reserved_before_bit_s)) {
		sharers.count = parent->common.flows;
		sharers.weight = fs_greater(parent->weight, parent->weight_before);
		sharers.lightest = class->weight;
		sharers.reserved =
		    fs_part(fs_greater(parent->reserved_bit_s, parent->reserved_before_bit_s),
			    parent->rate_bit_s);
		parent->common.share = fs_make_room(parent->common.share, &sharers);
	}
	ep_leave(&parent->common);
	return before != epoch;
}

/*
 * Counts a packet of a class. A class counts in each epoch in which it sends. Room is made for it
 * at once if it is new, or if it comes back and took half of its part when it last sent. One that
 * only sends a datagram now and then has room made when it takes half of its part: otherwise each
 * of these datagrams would take a share from its siblings.
 */
static inline __attribute__((always_inline)) void ep_use_class(struct tg_nrm_queue *parent,
							       struct tg_nrm_queue *queue,
							       const struct cl_class *class,
							       __u32 bytes)
{
	__u32 epoch = *(volatile __u32 *)&parent->common.epoch + 1;
	__u32 counted = *(volatile __u32 *)&queue->counted_epoch;
	__u32 busy = *(volatile __u32 *)&queue->busy_epoch;
	__u32 last = *(volatile __u64 *)&queue->sent >> 32;
	__u64 share = *(volatile __u32 *)&parent->common.share;
	/* One that was only silent for a while is not new, as with flows. */
	int is_known = counted && epoch - counted <= FS_KNOWN_EPOCHS;
	int was_busy = busy && last - busy <= FS_KNOWN_EPOCHS;
	int wants_room = !counted || (!is_known && was_busy);
	__u64 part = (share ? share : FS_TARGET) * class->weight / FS_WEIGHT;
	__s64 aside_ns;

	if (parent->rate_bit_s)
		part += fs_part(class->guarantee_bit_s, parent->rate_bit_s);
	part = up_fair_ns(part, parent->common.epoch_us * 1000ULL);
	if (up_takes(&queue->sent, epoch, bytes, 0, parent->common.cost, part, &aside_ns)) {
		wants_room |= !busy || epoch - busy > FS_KNOWN_EPOCHS;
		queue->busy_epoch = epoch;
	}
	ep_count_class(parent, &queue->counted_epoch, class, wants_room);
}

/*
 * The sharers of the epoch that ends: children if there were any, else flows. The part that was set
 * aside counts as reserved. A flow gives back what was set aside for it in the same epoch. If the
 * two fall into different epochs, a negative amount is set aside in the second.
 */
static inline __attribute__((always_inline)) void ep_take_sharers(struct tg_nrm_queue *queue,
								  __u64 rate_bit_s,
								  __u64 elapsed_ns,
								  struct fs_sharers *sharers)
{
	__s64 set_aside = __sync_lock_test_and_set(&queue->aside_ns, 0);
	__u64 aside = fs_lesser(set_aside > 0 ? set_aside : 0, FS_MAX_CHARGED_NS) * FS_ONE /
		      fs_greater(elapsed_ns, 1);
	__u32 weight = fs_greater(queue->weight, queue->weight_before);
	__u16 *stays;

	ep_take_flows(&queue->common, sharers);
	/* For the next epoch: packets of this one have added to it. */
	stays = &queue->stays[(queue->common.epoch + 2) % TG_STAYS];
	queue->common.flows = *stays;
	*stays = 0;
	if (elapsed_ns / 1000 > (__u64)TG_STAYS * queue->common.epoch_us) {
		queue->common.flows = 0;
		__builtin_memset(queue->stays, 0, sizeof(queue->stays));
	}
	sharers->reserved = fs_greater(aside, queue->aside_before);
	queue->aside_before = aside;
	if (!weight)
		return;
	sharers->weight = weight;
	sharers->reserved =
	    fs_part(fs_greater(queue->reserved_bit_s, queue->reserved_before_bit_s), rate_bit_s);
	/* Zero means none. Less one, it wraps to more than any weight. */
	sharers->lightest =
	    (__u32)fs_lesser((__u32)(queue->lightest - 1), (__u32)(queue->lightest_before - 1)) + 1;
	queue->weight_before = queue->weight;
	queue->reserved_before_bit_s = queue->reserved_bit_s;
	queue->lightest_before = queue->lightest;
	queue->weight = 0;
	queue->reserved_bit_s = 0;
	queue->lightest = 0;
}

/* Ends the epoch when it has lasted long enough: returns 1 to one CPU (ep_end). */
static inline __attribute__((always_inline)) int ep_turn(struct tg_nrm_queue *queue, __u64 now,
							 __u64 backlog_ns, __u64 rtt_ns,
							 __u64 burst_ns, __u64 rate_bit_s)
{
	struct fs_epoch epoch;

	if (!ep_end(&queue->common, now, &epoch))
		return 0;
	epoch.burst_ns = burst_ns;
	epoch.backlog_ns = backlog_ns;
	epoch.rtt_ns = rtt_ns;
	ep_take_sharers(queue, rate_bit_s, epoch.elapsed_ns, &epoch.sharers);
	ep_next(&queue->common, &epoch);
	return 1;
}

#endif
