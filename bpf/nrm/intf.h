/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The layout of the maps of schemes `nrm` and `pace`; see common/intf.h. */
#ifndef TG_NRM_INTF_H
#define TG_NRM_INTF_H

#include "common/intf.h"
#include "nrm/admission.h"
#include "nrm/rwnd.h"

/*
 * The queues of a limit: one for each direction, and one for each for traffic of none of its
 * children while it has some. That traffic is a class beside them.
 */
enum {
	TG_OWN = TG_DIRECTIONS,
	TG_QUEUES = 2 * TG_DIRECTIONS,
};
/* A limit without traffic of a child for this long has no children. */
#define TG_CHILDREN_NS 1000000000ULL

/* An unpaced flow counts in advance in this many epochs, less one. A power of two. */
#define TG_STAYS 16

/* Why a packet was dropped that leaves TCP with nothing in flight (risk.h). */
enum tg_risk {
	/* It begins a connection: SYN or SYN-ACK. */
	TG_RISK_CONNECTING,
	/* Its connection is paced, and the backlog was beyond its credit. */
	TG_RISK_CREDIT_USED,
	/* Its connection is not paced by the limit, and has no credit. */
	TG_RISK_NOT_PACED,
	TG_RISKS,
};

/*
 * A queue of a limit, and the fair share of those that use it: flows, or the children of the limit.
 * First what changes once an epoch, with a new connection or a round trip, then what the flows or
 * children that take little write with each packet.
 */
struct tg_nrm_queue {
	struct tg_queue common;
	/* pace: smoothed round-trip time of the flows. */
	__u64 rtt_ns;
	/*
	 * For a child: the cost of a byte at its present rate; 0: not known yet. Its thresholds
	 * follow from this one word (cl_config_at), so no packet sees a part of the old and a part
	 * of the new rate.
	 */
	__u64 cost_now;
	__u64 rate_bit_s;
	/* For a parent: until when traffic of no child is a separate class. */
	__u64 children_until_ns;
	/* pace: flows established in this epoch. */
	__u32 newcomers;
	/* pace, ingress: how long flows wait before they ask, smoothed. */
	__u32 wait_ns;
	/* pace, egress: when new connections begin. */
	struct ad_turns turns;

	/*
	 * For a parent: weight and guarantees of its active children, in this epoch and the one
	 * before.
	 */
	__u64 reserved_bit_s;
	__u64 reserved_before_bit_s;
	__u32 weight;
	__u32 weight_before;
	__u32 lightest;
	__u32 lightest_before;
	/*
	 * For flows: what is set aside (unpaced.h) in this epoch, which may be negative for a
	 * moment, and what was in the one before, as a part of the limit in 2^-24.
	 */
	__u64 aside_ns;
	__u64 aside_before;
	/* For a child: an epoch of its parent, and bytes in it (unpaced.h). */
	__u64 sent;
	/* For a child: the last epochs of its parent in which it counted, and took half a part. */
	__u32 counted_epoch;
	__u32 busy_epoch;
	/* For flows: whether an unpaced sender wanted more than one share in this epoch. */
	__u32 flooded;
	__u32 pad;
	/* Behind windows: the finish time of traffic of unpaced senders alone. */
	__u64 unpaced_finish_ns;
	/*
	 * How many unpaced flows count in an epoch, by its number, even if they are silent in it:
	 * they have taken more than they have earned (epoch.h).
	 */
	__u16 stays[TG_STAYS];
	/* The time that packets of unpaced flows took that began in this epoch. */
	__u64 strangers_ns;
	/*
	 * pace, nrm: dropped packets that left TCP with nothing in flight, since the limit began.
	 * At the end, as a packet that passes does not need it.
	 */
	__u64 at_risk[TG_RISKS];
};

/*
 * The value that the kernel keeps for a cgroup: the slot of its limit in a pool (nrm/slot.h); 0:
 * none. A cgroup keeps it when it leaves the limit, and no version of Tidegate may read it
 * differently.
 */
struct tg_slot {
	__u32 index;
	__u32 zero;
};

/* Slots of a pool, and of one whose limits are inside another limit; slot 0 has no limit. */
#define TG_SLOTS	1024
#define TG_SLOTS_INSIDE 128
/* Sets of unpaced flows for each slot of a pool (unpaced_flow.h). All three are powers of two. */
#define TG_SETS_PER_SLOT 16

/*
 * A task for the iterator over sockets (nrm/adopt.bpf.c). That of a pool is pinned, and any
 * version of Tidegate may ask it: the layout must never change.
 */
struct tg_adoption {
	/* The cgroup whose sockets are meant, and its depth. */
	__u64 cgroup_id;
	__u32 level;
	/* The limit, in a pool. */
	__u32 slot;
	/* Remove what the limit has set instead of setting it. */
	__u32 release;
	__u32 pad;
};

/*
 * The settings of a limit on a socket, stored with the socket so that they can be taken back. The
 * members up to `theirs_bytes` keep their offsets, so that any version can give back the sockets of
 * another one (release.bpf.c, struct tg_socket_kept).
 */
struct tg_socket {
	__u32 pacing_byte_s;
	/* By direction, the last epoch in which it had data. */
	__u32 epoch[TG_DIRECTIONS];
	/*
	 * The clamp of the receive window that was set here, and the last one that was set
	 * elsewhere.
	 */
	__u32 clamp_bytes;
	__u32 theirs_bytes;
	/* The share at which it was paced last. */
	__u32 share;
	struct rw_flow rwnd;
	/* When a child of the limit last had a packet of it. */
	__u64 claimed_ns;
	/* By queue: an epoch, and bytes in it (unpaced.h). */
	__u64 sent[TG_QUEUES];
	/*
	 * Bytes and segments sent when the payload of its segments was last computed, and that
	 * payload; 0: not yet.
	 */
	__u64 bytes_sent;
	__u32 segments_sent;
	__u32 payload;
	/* The pacing rate of its share. A lower one is set while it waits before it asks. */
	__u32 share_byte_s;
	/* 1: its SYN is to be held (tune.h). */
	__u16 syn_waits;
	/* The clamp of its congestion window that was set here, in segments; 0: none. */
	__u16 window_segments;
	/*
	 * How many times in a row it sent data and then received some, and rcv_nxt when it last
	 * sent.
	 */
	__u32 exchanges;
	__u32 asked_rcv_nxt;
};

/* The first members of struct tg_socket. The oldest version had only `pacing_byte_s`. */
struct tg_socket_kept {
	__u32 pacing_byte_s;
	__u32 epoch[TG_DIRECTIONS];
	__u32 clamp_bytes;
	__u32 theirs_bytes;
};

#endif
