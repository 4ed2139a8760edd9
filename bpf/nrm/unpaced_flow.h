/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flows of senders that cannot be paced (UDP, QUIC, raw sockets): a pure header over (cell,
 * now, length). Their model, with the reasons, is crates/core/src/unpaced/flows.rs; a property test
 * compares the two.
 *
 * A flow has a cell in a set of UF_WAYS. A cell whose flow has been silent for a while is free, and
 * holds no state for the next. If none is free two flows have one cell, and one share.
 */
#ifndef TG_UNPACED_FLOW_H
#define TG_UNPACED_FLOW_H

#include "nrm/epoch.h"
#include "common/fair_share.h"
#include "nrm/unpaced.h"
#include "common/vqueue.h"

/* The set is in the upper bits of the hash. */
#define UF_SETS	     512
#define UF_SET_SHIFT 55
#define UF_WAYS	     4
/* The time by which a flow may be ahead of its share. */
#define UF_DEPTH_NS 50000000ULL
/*
 * Bounds how long old traffic can delay the packets of a flow, however small its share was: 17 s.
 */
#define UF_MOST_NS (1ULL << 34)

struct uf_flow {
	/* The flow of the cell; 0: none. */
	__u64 flow;
	/* When a link of the flow's share would have sent all that passed. */
	__u64 finish_ns;
	/* As in struct tg_socket: an epoch and bytes in it, and the last epoch in which it counted.
	 */
	__u64 sent;
	__u32 seen;
	/* The epoch until which it counts though it is silent (ep_stay). */
	__u32 until;
	/* The epoch in which it got the cell. */
	__u32 began;
	__u32 pad;
};

struct uf_set {
	struct uf_flow way[UF_WAYS];
};

/* Whether a cell is free: its flow has earned all that it may, and is new to the epochs. */
static inline __attribute__((always_inline)) int uf_is_free(const struct uf_flow *cell, __u64 now,
							    __u32 epoch)
{
	__u32 sent = *(volatile __u64 *)&cell->sent >> 32;

	return (__s64)(*(volatile __u64 *)&cell->finish_ns - now) <= 0 &&
	       epoch - sent > FS_KNOWN_EPOCHS;
}

/* The way of a flow's cell. If CPUs take one for two flows at once, the first gets it. */
static inline __attribute__((always_inline)) __u32 uf_find(struct uf_set *set, __u64 flow,
							   __u64 now, __u32 epoch)
{
	struct uf_flow *cell;
	__u64 owner;

	for (__u32 i = 0; i < UF_WAYS; i++)
		if (*(volatile __u64 *)&set->way[i].flow == flow)
			return i;
	for (__u32 i = 0; i < UF_WAYS; i++) {
		cell = &set->way[i];
		owner = *(volatile __u64 *)&cell->flow;
		if (owner && !uf_is_free(cell, now, epoch))
			continue;
		if (__sync_val_compare_and_swap(&cell->flow, owner, flow) != owner)
			continue;
		cell->sent = (__u64)epoch << 32;
		cell->seen = 0;
		cell->until = 0;
		cell->began = epoch;
		return i;
	}
	return flow % UF_WAYS;
}

/* How long a packet takes at a share of the limit, where a byte costs `cost`. */
static inline __attribute__((always_inline)) __u64 uf_time_ns(__u32 bytes, __u64 cost, __u64 share)
{
	__u64 time = vq_time_ns(bytes, cost);

	time = fs_min(time, UF_MOST_NS) * FS_ONE / fs_max(fs_min(share, FS_ONE), 1);
	return fs_min(time, UF_MOST_NS);
}

/*
 * Whether a packet is within its flow's share; then it is charged. Packets on several CPUs at once
 * are each charged.
 */
static inline __attribute__((always_inline)) int uf_earns(struct uf_flow *cell, __u64 now,
							  __u32 bytes, __u64 cost, __u64 share)
{
	__u64 seen = *(volatile __u64 *)&cell->finish_ns;
	__s64 ahead = seen - now;
	__u64 time;

	if (ahead > (__s64)UF_DEPTH_NS)
		return 0;
	time = uf_time_ns(bytes, cost, share);
	if (ahead < 0 && __sync_val_compare_and_swap(&cell->finish_ns, seen, now + time) == seen)
		return 1;
	__sync_fetch_and_add(&cell->finish_ns, time);
	return 1;
}

/* Counts a packet of a flow. */
VF_ONCE int uf_use(struct tg_nrm_queue *queue, struct uf_flow *cell, __u32 bytes, __u64 cost)
{
	if (queue && cell)
		ep_use(queue, &cell->sent, &cell->seen, bytes, cost, 0);
	return 0;
}

/*
 * Whether a packet is within its flow's share; then it is charged, and counts. A flow that no
 * earlier epoch has seen is a stranger. It is set aside and does not divide the limit, and all
 * strangers together have half of it. So a sender that addresses each packet to another host does
 * not get a share with each packet.
 */
static inline __attribute__((always_inline)) int
uf_within(struct tg_nrm_queue *queue, struct uf_flow *cell, __u64 now, __u32 bytes, __u64 cost)
{
	__u64 others, time, share = *(volatile __u32 *)&queue->common.share;
	int stranger = cell->began == queue->common.epoch + 1;
	__s64 ahead;

	if (stranger) {
		/* One packet in any case: it may be longer than this. */
		others = *(volatile __u64 *)&queue->strangers_ns;
		if (others && others + vq_time_ns(bytes, cost) >
				  fs_max(queue->common.epoch_us * 1000ULL, FS_MIN_EPOCH_NS) / 2)
			return 0;
	}
	if (!uf_earns(cell, now, bytes, cost, share ? share : FS_TARGET))
		return 0;
	if (stranger) {
		time = vq_time_ns(bytes, cost);
		__sync_fetch_and_add(&queue->strangers_ns, time);
		__sync_fetch_and_add(&queue->aside_ns, time);
		return 1;
	}
	ahead = *(volatile __u64 *)&cell->finish_ns - now;
	if (!ep_stays(queue, cell->until))
		uf_use(queue, cell, bytes, cost);
	if (ahead > 0)
		ep_stay(queue, &cell->until, ahead);
	return 1;
}

#endif
