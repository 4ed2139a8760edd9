/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The part of an epoch that is set aside: the bytes of flows that take less than half of their
 * share, and up to one share for connections that are expected to end soon. The header also gives
 * the allowed backlog of a sender that cannot be paced (UDP, QUIC, raw sockets) where the virtual
 * queue has room for TCP's windows. It is pure; its model, with the reasons, is
 * crates/core/src/unpaced.rs, and a property test compares the two.
 */
#ifndef TG_UNPACED_H
#define TG_UNPACED_H

#include "common/fair_share.h"
#include "common/vqueue.h"

/* The thresholds of a queue alone (scheme `nrm`): as a time, but at least this many bytes. */
#define UP_MARK_NS    500000ULL
#define UP_DROP_NS    4000000ULL
#define UP_MARK_BYTES (2 * 1514)
#define UP_DROP_BYTES (4 * 1514)
/* More than this in an epoch is beyond every share. The bit is set when a flow took half of one. */
#define UP_MAX_BYTES (1ULL << 31)
/* Ethernet's largest frame; a paced flow sends at least two at once. */
#define UP_FRAME_BYTES 1514
/* A CPU may be this many epochs behind the others, and no more: 64 ms at least. */
#define UP_LATE_EPOCHS 16
/* The backlog that paced packets pass: see up_depth_ns. */
#define UP_DEPTH_NS 16000000ULL
/* A paced socket learns its share once a round trip: it may have sent this much before. */
#define UP_ROOM_NS 16000000ULL
/* The credit beyond that of a flow that takes little. */
#define UP_CREDIT_NS 16000000ULL

/* One share of an epoch, in time at the limit's rate. */
static inline __attribute__((always_inline)) __u64 up_fair_ns(__u64 share, __u64 epoch_ns)
{
	return fs_lesser(epoch_ns, FS_MAX_EPOCH_NS) * (fs_min(share, FS_MAX_SHARE) >> 8) >> 16;
}

/*
 * Whether the bytes in a socket's word (up_add) belong to this epoch, or to one that other CPUs
 * have begun meanwhile.
 */
static inline __attribute__((always_inline)) int up_is_of(__u64 seen, __u32 epoch)
{
	return (__u32)((seen >> 32) - epoch) < UP_LATE_EPOCHS;
}

/*
 * Counts a packet. `*sent`, as it was `seen`, holds the epoch in its upper half and the bytes of
 * the socket in the lower. It is one word, so that bytes never count for another epoch, however
 * many CPUs send.
 */
static inline __attribute__((always_inline)) void up_add(__u64 *sent, __u64 seen, __u32 epoch,
							 __u32 bytes)
{
	if (!up_is_of(seen, epoch) &&
	    __sync_val_compare_and_swap(sent, seen, (__u64)epoch << 32 | bytes) == seen)
		return;
	__sync_fetch_and_add(sent, bytes);
}

/*
 * Whether a sender is still within one share of the epoch; then the packet counts. Beyond the share
 * nothing is written.
 */
static inline __attribute__((always_inline)) int up_within(__u64 *sent, __u32 epoch, __u32 bytes,
							   __u64 cost, __u64 fair_ns)
{
	__u64 seen = *(volatile __u64 *)sent;
	__u64 counted = up_is_of(seen, epoch) ? seen & 0xffffffff : 0;

	if (counted >= UP_MAX_BYTES || vq_time_ns(counted, cost) >= fair_ns)
		return 0;
	up_add(sent, seen, epoch, bytes < VQ_MAX_PACKET_BYTES ? bytes : VQ_MAX_PACKET_BYTES);
	return 1;
}

/*
 * At least half of a share, and more than so many bytes: a flow or class that takes less in an
 * epoch does not count.
 */
static inline __attribute__((always_inline)) int up_is_much(__u64 bytes, __u32 least_bytes,
							    __u64 cost, __u64 fair_ns)
{
	return bytes >= UP_MAX_BYTES ||
	       (bytes > least_bytes && vq_time_ns(bytes, cost) >= fair_ns / 2);
}

/* Whether a flow has taken half of its share in this epoch, by its socket's word. */
static inline __attribute__((always_inline)) int up_has_much(__u64 seen, __u32 epoch)
{
	return up_is_of(seen, epoch) && (seen & UP_MAX_BYTES);
}

/*
 * Whether a socket's word is of an earlier epoch in which it took as much: it is expected to take
 * as much again.
 */
static inline __attribute__((always_inline)) int up_took_much(__u64 seen, __u32 epoch)
{
	return !up_is_of(seen, epoch) && (seen & UP_MAX_BYTES);
}

/*
 * Counts a packet of a flow or class. Returns whether it takes at least half of its share in this
 * epoch, and more than `least_bytes`: then it counts among those that divide the limit. Until then
 * *aside_ns is what to set aside for it. With the packet that makes it count, *aside_ns is what to
 * give back (negative).
 */
static inline __attribute__((always_inline)) int up_takes(__u64 *sent, __u32 epoch, __u32 bytes,
							  __u32 least_bytes, __u64 cost,
							  __u64 fair_ns, __s64 *aside_ns)
{
	__u64 seen = *(volatile __u64 *)sent;
	__u64 counted = up_is_of(seen, epoch) ? seen & 0xffffffff : 0;
	__u64 before_ns = vq_time_ns(counted, cost);

	*aside_ns = 0;
	if (up_is_much(counted, least_bytes, cost, fair_ns))
		return 1;
	bytes = bytes < VQ_MAX_PACKET_BYTES ? bytes : VQ_MAX_PACKET_BYTES;
	up_add(sent, seen, epoch, bytes);
	if (up_is_much(counted + bytes, least_bytes, cost, fair_ns)) {
		__sync_fetch_and_or(sent, UP_MAX_BYTES);
		*aside_ns = -(__s64)before_ns;
		return 1;
	}
	*aside_ns = vq_time_ns(counted + bytes, cost) - before_ns;
	return 0;
}

/*
 * The length by which a packet is judged: the queue's reserve for small packets is closed to
 * senders beyond their share.
 */
static inline __attribute__((always_inline)) __u32 up_judged_bytes(__u32 wire_bytes, int beyond)
{
	return beyond ? fs_max(wire_bytes, VQ_SMALL_BYTES + 1) : wire_bytes;
}

/* The room for sockets on a path of this round trip that have not yet learnt their new share. */
static inline __attribute__((always_inline)) __u64 up_room_ns(__u64 rtt_ns)
{
	return fs_min(rtt_ns, UP_ROOM_NS);
}

/*
 * The backlog that a packet of a paced socket passes, or one within its share, or a small one that
 * needs no share. A paced socket can do nothing about a backlog: its bursts may meet those of
 * others, and its first ten segments are not paced. A cut window would not grow again, as pacing
 * keeps it from being full. A dropped packet with nothing in flight waits for TCP's probe timer.
 * The share drains the backlog instead. Beside unpaced senders that would only make room for them:
 * then it is the drop threshold, if that is further. On a longer path sockets learn later of new
 * flows, and that is added.
 */
static inline __attribute__((always_inline)) __u64 up_depth_ns(const struct vq_conf *conf,
							       int beside_unpaced, __u64 rtt_ns)
{
	return (beside_unpaced ? fs_max(UP_DEPTH_NS, conf->drop_ns) : UP_DEPTH_NS) +
	       up_room_ns(rtt_ns);
}

/*
 * The backlog above which the share is lowered. Bursts of paced sockets that meet explain
 * `bursts_ns`. On a longer path many replies may begin in one round trip and end before a socket
 * learns of them: half of the room is for these, and the transfers send that much less afterwards.
 */
static inline __attribute__((always_inline)) __u64 up_standing_ns(const struct vq_conf *conf,
								  __u64 bursts_ns, __u64 rtt_ns)
{
	return fs_max(fs_max(conf->mark_ns, bursts_ns), up_room_ns(rtt_ns) / 2);
}

/*
 * The thresholds for unpaced senders in a queue that has room for windows: those of a queue
 * without.
 */
static inline __attribute__((always_inline)) void up_config(const struct vq_conf *conf,
							    struct vq_conf *out)
{
	__u64 cost = conf->cost;
	__u64 mark = fs_max(UP_MARK_NS, vq_time_ns(UP_MARK_BYTES, cost));
	__u64 drop = fs_max(UP_DROP_NS, vq_time_ns(UP_DROP_BYTES, cost));

	drop = fs_min(drop, conf->drop_ns);
	out->cost = cost;
	out->burst_ns = conf->burst_ns;
	out->mark_ns = fs_min(mark, conf->mark_ns);
	out->large_drop_ns = drop - drop / 8;
	out->drop_ns = drop;
}

#endif
