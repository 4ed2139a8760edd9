/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The epochs of a queue: when one ends, what it has seen, and the share in the next.
 *
 * One CPU at a time changes the epoch (ep_enter). Nobody waits: a CPU that finds another one there
 * leaves the epoch as it is, and the next packet tries again. So each flow is counted once, in one
 * epoch. A share is computed from the numbers of one epoch, and no stale share overwrites a new
 * one. A program always runs to its end, so the epoch is always left.
 */
#ifndef TG_EPOCH_H
#define TG_EPOCH_H

#include "common/fair_share.h"
#include "common/intf.h"

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

/* Whether the epoch that began at `start_ns` has lasted long enough. */
static inline __attribute__((always_inline)) int ep_is_over(const struct tg_queue *queue,
							    __u64 start_ns, __u64 now)
{
	return (__s64)(now - start_ns) >= (__s64)queue->epoch_us * 1000;
}

/*
 * Begins to end the epoch when it has lasted long enough. Only one CPU does so; it gets 1, and the
 * length and the charge of the epoch. It must add the rest (the sharers by ep_take_flows), and then
 * call ep_next. The charge is how far the finish time moved, less the idle time that it skipped.
 * These are two words, and a packet may have changed only one so far (vq_charge). It then counts in
 * the next epoch, or is taken back there.
 */
static inline __attribute__((always_inline)) int ep_end(struct tg_queue *queue, __u64 now,
							struct fs_epoch *epoch)
{
	__u64 start = *(volatile __u64 *)&queue->epoch_start_ns;
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
	epoch->elapsed_ns = now - start;
	base = *(volatile __u64 *)&queue->finish_ns - *(volatile __u64 *)&queue->skipped_ns;
	charged = base - queue->epoch_base_ns;
	epoch->charged_ns = charged > 0 ? charged : 0;
	queue->epoch_base_ns = base;
	return 1;
}

/* The flows of the epoch that ends. */
static inline __attribute__((always_inline)) void ep_take_flows(struct tg_queue *queue,
								struct fs_sharers *sharers)
{
	/* A flow that was silent for one epoch may come back. */
	fs_flows(sharers, fs_greater(queue->flows, queue->flows_before));
	queue->flows_before = queue->flows;
	queue->flows = 0;
}

/* The next epoch, and the share in it. */
static inline __attribute__((always_inline)) void ep_next(struct tg_queue *queue,
							  const struct fs_epoch *epoch)
{
	queue->share = fs_next(queue->share, epoch);
	queue->epoch_us = fs_epoch_ns(fs_greater(queue->flows_before, 1), epoch->burst_ns) / 1000;
	queue->epoch++;
	ep_leave(queue);
}

/*
 * Keeps the bytes of a backlog at another rate. Returns by how much the finish time has moved; a
 * negative number wraps.
 */
static inline __attribute__((always_inline)) __u64 ep_rescale(__u64 *finish_ns, __u64 from,
							      __u64 to, __u64 drop_ns, __u64 now)
{
	__s64 backlog = *(volatile __u64 *)finish_ns - now;
	__u64 moved;

	if (backlog <= 0)
		return 0;
	moved = vq_rescaled_ns(backlog, from, to, drop_ns) - backlog;
	__sync_fetch_and_add(finish_ns, moved);
	return moved;
}

/*
 * The rate has changed since the last packet. The backlog keeps its bytes, and the epoch its number
 * of bursts: a small backlog at one rate would block everything for seconds at another. While
 * another CPU changes the epoch, this is left to the next packet. `other_ns` is a second finish
 * time of the queue, or null.
 */
static inline __attribute__((always_inline)) void
ep_follow_rate(const struct vq_conf *conf, struct tg_queue *queue, __u64 *other_ns, __u64 now)
{
	__u64 from, to, epoch_ns;

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
		/* This is not a charge of this epoch. */
		queue->epoch_base_ns += ep_rescale(&queue->finish_ns, from, to, conf->drop_ns, now);
		if (other_ns)
			ep_rescale(other_ns, from, to, conf->drop_ns, now);
	}
	ep_leave(queue);
}

#endif
