/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The end of an epoch, in which the next share of each flow is computed. */
#ifndef TG_EPOCH_H
#define TG_EPOCH_H

#include "fair_share.h"
#include "intf.h"

/*
 * Who sent data in the epoch that ends: children if there were any, or flows. What senders without
 * a share have used counts as reserved.
 */
static inline __attribute__((always_inline)) void tg_take_sharers(struct tg_queue *queue,
								  __u64 rate_bit_s,
								  __u64 elapsed_ns,
								  struct fs_sharers *sharers)
{
	__u64 untold = __sync_lock_test_and_set(&queue->untold_ns, 0);
	__u32 count = __sync_lock_test_and_set(&queue->flows, 0);
	__u32 weight = queue->weight;
	__u64 seen_reserved = queue->reserved_bit_s, reserved;
	__u32 lightest = queue->lightest;

	/* One that was silent for one epoch may only have been unlucky. */
	fs_flows(sharers, count > queue->flows_before ? count : queue->flows_before);
	queue->flows_before = count;
	sharers->reserved = fs_min(fs_max(untold, queue->untold_before_ns), FS_MAX_CHARGED_NS) *
			    FS_ONE / fs_max(elapsed_ns, 1);
	queue->untold_before_ns = untold;
	if (!weight && !queue->weight_before)
		return;
	queue->weight = 0;
	queue->reserved_bit_s = 0;
	queue->lightest = 0;
	sharers->weight = fs_max(weight, queue->weight_before);
	reserved = fs_max(seen_reserved, queue->reserved_before_bit_s);
	sharers->reserved = fs_min(reserved, 1ULL << 37) * FS_ONE / fs_max(rate_bit_s, 1);
	sharers->lightest =
	    queue->lightest_before && (!lightest || queue->lightest_before < lightest)
		? queue->lightest_before
		: lightest;
	queue->weight_before = weight;
	queue->reserved_before_bit_s = seen_reserved;
	queue->lightest_before = lightest;
}

/*
 * Closes the epoch when it has lasted long enough; one CPU does, and hears 1. `burst_bytes` is what
 * a flow sends at once.
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

	if ((__s64)(now - start) < (__s64)queue->epoch_us * 1000 ||
	    __sync_val_compare_and_swap(&queue->epoch_start_ns, start, now) != start)
		return 0;
	epoch.backlog_ns = backlog_ns;
	epoch.elapsed_ns = now - start;
	epoch.rtt_ns = rtt_ns;
	epoch.burst_ns = burst_bytes * conf->cost >> VQ_COST_SHIFT;
	base = queue->finish_ns - queue->skipped_ns;
	charged = base - queue->epoch_base_ns;
	epoch.charged_ns = charged > 0 ? charged : 0;
	queue->epoch_base_ns = base;
	tg_take_sharers(queue, rate_bit_s, epoch.elapsed_ns, &epoch.sharers);
	queue->share = fs_next(queue->share, &epoch);
	queue->epoch_us = fs_epoch_ns(queue->flows_before, epoch.burst_ns) / 1000;
	queue->epoch++;
	return 1;
}

#endif
