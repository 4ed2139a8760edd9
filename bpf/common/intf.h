/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract between the eBPF programs and Rust: the layout of the maps that every limit has.
 * Schemes add theirs in an intf.h of their own. Rust has all of it from bindgen
 * (crates/sys/build.rs). Times are nanoseconds of CLOCK_MONOTONIC, those of a policer of
 * CLOCK_BOOTTIME; rates are bit/s unless the name says otherwise.
 */
#ifndef TG_INTF_H
#define TG_INTF_H

#include "nrm/admission.h"
#include "common/class.h"
#include "nrm/rwnd.h"
#include "common/sample.h"
#include "common/vqueue.h"

/* The link header of a frame, as tc counts it: Ethernet without its checksum. */
#define TG_LINK_HEADER_BYTES 14
/* IPv6 extension headers that are parsed before a packet counts as "other". */
#define TG_MAX_EXTENSION_HEADERS 4
/* The fragment field of an IPv4 header: more follow, or its offset. */
#define TG_FRAGMENT 0x3fff
/*
 * The mark of a packet that the program of an inner cgroup has dropped. The kernel still runs the
 * programs of outer cgroups. They see this mark, drop the packet again and charge nothing. A
 * program that sets this mark itself only loses the packet.
 */
#define TG_DEAD_MARK 0x7d9a7e1d

enum tg_direction {
	TG_EGRESS,
	TG_INGRESS,
	TG_DIRECTIONS,
};

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

/* The outcome of a packet; the index of its counters. */
enum tg_outcome {
	TG_PASS,
	TG_MARK,
	TG_SLOW,
	TG_DROP_FULL,
	TG_DROP_RESERVE,
	TG_DROP_EARLY,
	TG_EXEMPT,
	TG_OUTCOMES,
};

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

enum tg_flags {
	/* Charge packets on the loopback interface, too. */
	TG_FLAG_LOOPBACK = 1 << 0,
	/* No socket may pace faster than the egress limit. */
	TG_FLAG_PACE_CEILING = 1 << 1,
	/* Each socket is paced at its fair share of the egress limit; implies the ceiling. */
	TG_FLAG_PACE_FAIR = 1 << 2,
	/* The device is a port: its ingress is the workload's egress. */
	TG_FLAG_PORT = 1 << 3,
	/* Scheme `police`: ingress of the device is policed in XDP. For user space. */
	TG_FLAG_XDP = 1 << 4,
	/* It exempts prefixes (exempt.h). */
	TG_FLAG_EXEMPT = 1 << 5,
	/* Scheme `police`: it has the packets of some prefixes (match.h). For user space. */
	TG_FLAG_MATCH = 1 << 6,
};

/* The most prefixes that a limit exempts. */
#define TG_EXEMPT_MAX 32

/*
 * A limit on one cgroup or device. Only user space writes it. A scheme with more settings has them
 * behind it, in an entry of its own map.
 */
struct tg_limit {
	/* By direction; a cost of 0 is no limit. For a child: at its ceiling. */
	struct vq_conf queue[TG_DIRECTIONS];
	__u64 rate_bit_s[TG_DIRECTIONS];
	/* By direction: its guarantee and weight among its siblings. */
	struct cl_class class[TG_DIRECTIONS];
	/* For a device: the inode of its network namespace. */
	__u64 cgroup_id;
	__u32 flags;
	/* For TCP sockets in the cgroup, in microseconds; 0 leaves the kernel's. */
	__u32 rto_min_us;
	__u32 delack_max_us;
	/* 0: a cgroup. */
	__u32 ifindex;
	/* The scheme: its row in the table of crates/core/src/scheme.rs. For user space. */
	__u32 scheme;
	__u32 pad;
	/* Bit d is set if DSCP d is exempt. */
	__u64 exempt_dscps;
	/*
	 * By direction: when the entry after this one comes into force (settings.h), in ns since
	 * boot including suspend; 0: never.
	 */
	__u64 until_ns[TG_DIRECTIONS];
	/* In the first entry: which copy is in force, 0 or 1 (settings.h). */
	__u64 copy;
};

/*
 * A limit, and after it by direction the limit that follows when its time is over. All of it is
 * stored twice (settings.h).
 */
enum {
	TG_COPY = 1 + TG_DIRECTIONS,
	TG_LIMITS = 2 * TG_COPY,
};

/*
 * A virtual queue and the fair share of those that use it: flows, or the children of a limit.
 * Packets write the first cache line, the second is written once an epoch and with each new
 * connection, the third once an epoch and child. A scheme with more state has it behind this one.
 */
struct tg_queue {
	__u64 finish_ns;
	/* Idle time that the finish time has skipped since the limit began. */
	__u64 skipped_ns;
	/* When this epoch began, and the finish time less the skipped time then. */
	__u64 epoch_start_ns;
	__u64 epoch_base_ns;
	/* pace: smoothed round-trip time of the flows. */
	__u64 rtt_ns;
	/* Share of each flow, of the limit in 2^-24. */
	__u32 share;
	/* Number of this epoch, flows that sent data in it and in the one before. */
	__u32 epoch;
	__u32 flows;
	__u32 flows_before;
	/* pace: flows established in this epoch. */
	__u32 newcomers;
	/* The least length of this epoch. */
	__u32 epoch_us;

	/*
	 * For a child: the cost of a byte at its present rate; 0: not known yet. Its thresholds
	 * follow from this one word (cl_config_at), so no packet sees a part of the old and a part
	 * of the new rate.
	 */
	__u64 cost_now;
	__u64 rate_bit_s;
	/* For a parent: until when traffic of no child is a separate class. */
	__u64 children_until_ns;
	/* The cost of a byte when the last packet came; 0: no packet yet. */
	__u64 cost;
	/* 1 while a CPU changes the epoch (epoch.h). */
	__u32 entered;
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
 * What the kernel keeps for a cgroup: the slot of its limit in a pool (nrm/slot.h); 0: none. A
 * cgroup keeps it when it leaves the limit, and no version of Tidegate may read it differently.
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
 * What the iterator over sockets is to do (nrm/adopt.bpf.c). That of a pool is pinned, and any
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

/* Counters of one direction on one CPU. */
struct tg_counters {
	__u64 packets[TG_OUTCOMES];
	__u64 bytes[TG_OUTCOMES];
	/* The part of the last cost below a nanosecond, in 2^-24 ns. */
	__u32 carry;
	__u32 pad;
	/*
	 * When the last packet had each outcome; only for outcomes that signal congestion or drop.
	 * At the end, so that a packet that passes uses the same cache lines as before.
	 */
	__u64 last_ns[TG_OUTCOMES];
};

/* Buffers of each sample of flows: packets fill one while user space reads the other. */
#define TG_BUFFERS 2

/* What a group adds to a limit in one direction. Only user space writes it. */
struct tg_group {
	/* The probability of a drop before the limit itself, in 2^-32. */
	__u32 drop;
	/* The buffer into which flows are counted, from 1 on; 0: they are not counted. */
	__u32 sample;
};

/*
 * What a limit has set on a socket, stored with the socket so that it can be taken back. The
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
	__u32 syn_waits;
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
