/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What is set aside of an epoch: for flows that take less than half of their share what they take,
 * and for connections that are expected to end soon up to one share. The header also says how far
 * a sender that cannot be paced (UDP, QUIC, raw sockets) may be behind where the virtual queue has
 * room for TCP's windows. It is pure; its model, with the reasons, is crates/core/src/unpaced.rs,
 * and a property test holds the two together.
 */
#ifndef TG_UNPACED_H
#define TG_UNPACED_H

#include "fair_share.h"
#include "vqueue.h"

/* The thresholds of a queue that works alone (scheme `nrm`): as a time, but at least so long. */
#define UP_MARK_NS    500000ULL
#define UP_DROP_NS    4000000ULL
#define UP_MARK_BYTES (2 * 1514)
#define UP_DROP_BYTES (4 * 1514)
/* More than this in an epoch is beyond every share. The bit says that a flow took half of one. */
#define UP_MAX_BYTES (1ULL << 31)
/* Ethernet's largest frame; a paced flow sends two at once at least. */
#define UP_FRAME_BYTES 1514
/* A CPU may be so many epochs behind the others, and no more: 64 ms at least. */
#define UP_LATE_EPOCHS 16
/* How far the queue may be behind before it turns to a packet that passes: see up_depth_ns. */
#define UP_DEPTH_NS 16000000ULL
/* A paced socket hears of its share once a round trip: so much of one it may have sent before. */
#define UP_ROOM_NS 16000000ULL
/* What a flow that takes little may be behind beyond that. */
#define UP_CREDIT_NS 16000000ULL

/* What one share is of an epoch, in time at the limit's rate. */
static inline __attribute__((always_inline)) __u64 up_fair_ns(__u64 share, __u64 epoch_ns)
{
	return fs_min(epoch_ns, FS_MAX_EPOCH_NS) * (fs_min(share, FS_MAX_SHARE) >> 8) >> 16;
}

/* Whether what a socket's word (up_add) counts is of this epoch, or of one that other CPUs have
 * begun meanwhile. */
static inline __attribute__((always_inline)) int up_is_of(__u64 seen, __u32 epoch)
{
	return (__u32)((seen >> 32) - epoch) < UP_LATE_EPOCHS;
}

/*
 * Counts a packet. `*sent`, as it was `seen`, holds the epoch in its upper half and the bytes of
 * the socket in the lower: one word, so that bytes never count for another epoch than theirs,
 * however many CPUs send.
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
 * Whether a sender is still within one share of the epoch; then the packet counts. Who is beyond
 * writes nothing.
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

/* Half of a share: who takes less in an epoch, or no more than a frame, is not counted. */
static inline __attribute__((always_inline)) int up_is_much(__u64 bytes, __u64 cost, __u64 fair_ns)
{
	return bytes >= UP_MAX_BYTES ||
	       (bytes > UP_FRAME_BYTES && vq_time_ns(bytes, cost) >= fair_ns / 2);
}

/* Whether a flow has taken half of its share in this epoch, as its socket's word says. */
static inline __attribute__((always_inline)) int up_has_much(__u64 seen, __u32 epoch)
{
	return up_is_of(seen, epoch) && (seen & UP_MAX_BYTES);
}

/* Whether a socket's word is of an earlier epoch, in which it took as much: it is expected to take
 * as much again. */
static inline __attribute__((always_inline)) int up_took_much(__u64 seen, __u32 epoch)
{
	return !up_is_of(seen, epoch) && (seen & UP_MAX_BYTES);
}

/*
 * Counts a packet of a flow that is told its share. Returns whether it takes at least half of that
 * in this epoch, and more than a frame: then it is one of those that share the limit. Until then
 * *aside_ns is what is to be set aside for it; with the packet that makes it one of them, what is
 * to be given back (negative).
 */
static inline __attribute__((always_inline)) int
up_takes(__u64 *sent, __u32 epoch, __u32 bytes, __u64 cost, __u64 fair_ns, __s64 *aside_ns)
{
	__u64 seen = *(volatile __u64 *)sent;
	__u64 counted = up_is_of(seen, epoch) ? seen & 0xffffffff : 0;
	__u64 before_ns = vq_time_ns(counted, cost);

	*aside_ns = 0;
	if (up_is_much(counted, cost, fair_ns))
		return 1;
	bytes = bytes < VQ_MAX_PACKET_BYTES ? bytes : VQ_MAX_PACKET_BYTES;
	up_add(sent, seen, epoch, bytes);
	if (up_is_much(counted + bytes, cost, fair_ns)) {
		__sync_fetch_and_or(sent, UP_MAX_BYTES);
		*aside_ns = -(__s64)before_ns;
		return 1;
	}
	*aside_ns = vq_time_ns(counted + bytes, cost) - before_ns;
	return 0;
}

/*
 * The length by which a packet is judged: the queue's reserve for small ones is not for who is
 * beyond its share.
 */
static inline __attribute__((always_inline)) __u32 up_judged_bytes(__u32 wire_bytes, int beyond)
{
	return beyond ? fs_max(wire_bytes, VQ_SMALL_BYTES + 1) : wire_bytes;
}

/* The room for sockets on a path of this round trip that have not yet heard of their new share. */
static inline __attribute__((always_inline)) __u64 up_room_ns(__u64 rtt_ns)
{
	return fs_min(rtt_ns, UP_ROOM_NS);
}

/*
 * How far the queue may be behind before it turns to a packet of a paced socket, one within its
 * share, or a small one of nobody who must have one. A paced socket can do nothing about a backlog:
 * its bursts may meet those of others, and its first ten segments are not paced. A cut window would
 * not grow again, as pacing keeps it from being full; a dropped packet with nothing in flight waits
 * for TCP's probe timer. The share drains the backlog instead. Beside senders that cannot be paced
 * it would only make room for them: then it is the drop threshold, if that is further. On a longer
 * path the sockets hear later of flows that have begun, and that is added.
 */
static inline __attribute__((always_inline)) __u64 up_depth_ns(const struct vq_conf *conf,
							       int beside_unpaced, __u64 rtt_ns)
{
	return (beside_unpaced ? fs_max(UP_DEPTH_NS, conf->drop_ns) : UP_DEPTH_NS) +
	       up_room_ns(rtt_ns);
}

/*
 * The backlog from which on the share is lowered for it. Bursts of paced sockets that meet explain
 * `bursts_ns`. On a longer path many replies may begin in one round trip and end before a socket
 * hears: half of the room is theirs, and the transfers send that much less afterwards.
 */
static inline __attribute__((always_inline)) __u64 up_standing_ns(const struct vq_conf *conf,
								  __u64 bursts_ns, __u64 rtt_ns)
{
	return fs_max(fs_max(conf->mark_ns, bursts_ns), up_room_ns(rtt_ns) / 2);
}

/* The thresholds for them of a queue that has room for windows: those of a queue without. */
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
