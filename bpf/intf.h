/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract between the eBPF programs and Rust: what lies in the maps.
 * Mirrored by crates/sys/src/intf.rs; a test compares sizes and offsets. Times are nanoseconds of
 * CLOCK_MONOTONIC, those of a policer of CLOCK_BOOTTIME; rates are bit/s unless the name says
 * otherwise.
 */
#ifndef TG_INTF_H
#define TG_INTF_H

#include "admission.h"
#include "class.h"
#include "meter.h"
#include "rwnd.h"
#include "sample.h"
#include "vqueue.h"

/* The header of a frame below IP, as tc counts it: Ethernet without its checksum. */
#define TG_LINK_HEADER_BYTES 14
/* IPv6 extension headers that are followed before a packet counts as "other". */
#define TG_MAX_EXTENSION_HEADERS 4
/* Of an IPv4 header's word about fragments: more follow, or its offset. */
#define TG_FRAGMENT 0x3fff
/*
 * The mark of a packet that the program of an inner cgroup has dropped. The kernel runs the
 * programs of outer cgroups all the same; they see this, drop it again and charge nothing. Whoever
 * gives a packet this mark himself only loses it.
 */
#define TG_DEAD_MARK 0x7d9a7e1d

enum tg_direction {
	TG_EGRESS,
	TG_INGRESS,
	TG_DIRECTIONS,
};

/*
 * The queues of a limit: one of each direction, and one of each for what belongs to none of its
 * children while it has some, a class beside them.
 */
#define TG_OWN	  TG_DIRECTIONS
#define TG_QUEUES (2 * TG_DIRECTIONS)
/* A limit without traffic of a child for so long has none. */
#define TG_CHILDREN_NS 1000000000ULL

/* What became of a packet; the index of its counters. */
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

/* A flow counts ahead in so many epochs, less one. A power of two. */
#define TG_STAYS 16

/* Why a packet was dropped that leaves TCP with nothing in flight (risk.h). */
enum tg_risk {
	/* It begins a connection: SYN or SYN-ACK. */
	TG_RISK_CONNECTING,
	/* Its connection is paced, and the queue was behind by more than the credit for it. */
	TG_RISK_CREDIT_USED,
	/* Its connection is not paced by the limit, and has no credit. */
	TG_RISK_NOT_PACED,
	TG_RISKS,
};

enum tg_flags {
	/* Charge packets on the loopback interface too. */
	TG_FLAG_LOOPBACK = 1 << 0,
	/* No socket may pace faster than the egress limit. */
	TG_FLAG_PACE_CEILING = 1 << 1,
	/* Each socket is paced at its fair share of the egress limit; implies the ceiling. */
	TG_FLAG_PACE_FAIR = 1 << 2,
	/* Packets wait for their departure; drop_ns is the horizon. */
	TG_FLAG_EDT = 1 << 3,
	/* The device is a port: its workload's egress is what comes in. */
	TG_FLAG_PORT = 1 << 4,
	/* What finds no tokens is dropped: `police` says how many there are. */
	TG_FLAG_POLICE = 1 << 5,
	/* Packets wait in the kernel's HTB; drop_ns is what its queue holds. */
	TG_FLAG_HTB = 1 << 8,
	/* Senders are told in the ACKs that come back to them: ECE, windows. */
	TG_FLAG_DEM = 1 << 9,
	TG_FLAG_SPRING = 1 << 10,
	/* With TG_FLAG_POLICE: what comes in by the device is policed in XDP. For user space. */
	TG_FLAG_XDP = 1 << 11,
};

/* Prefixes that a limit exempts at most. */
#define TG_EXEMPT_MAX 32

/* Who is exempt. The prefixes are here for user space, and for programs in a trie (exempt.h). */
struct tg_exempt {
	/* Bit d: code point d is. */
	__u64 dscps;
	/* IPv6, or IPv4 in IPv6. */
	__u8 address[TG_EXEMPT_MAX][16];
	__u8 bits[TG_EXEMPT_MAX];
	__u32 count;
	__u32 pad;
};

/* A limit on one cgroup or device; written by user space alone. */
struct tg_limit {
	/* By direction; a cost of 0 is no limit. Of a child: at its ceiling. */
	struct vq_conf queue[TG_DIRECTIONS];
	__u64 rate_bit_s[TG_DIRECTIONS];
	/* By direction: its place among its siblings. */
	struct cl_class class[TG_DIRECTIONS];
	/* Of a device: the inode of its network namespace. */
	__u64 cgroup_id;
	__u32 flags;
	/* For TCP sockets in the cgroup, in microseconds; 0 leaves the kernel's. */
	__u32 rto_min_us;
	__u32 delack_max_us;
	/* 0: a cgroup. */
	__u32 ifindex;
	/* By direction: of scheme `police`. */
	struct pl_policy police[TG_DIRECTIONS];
	struct tg_exempt exempt;
	/* Whose packets it polices; none: everybody's. For user space, and as above without code
	 * points; the programs of match.h find a packet's limit the other way round. */
	struct tg_exempt match;
	/* By direction: from when on what stands at its place after this is in force (maps.h), in
	 * ns since boot with the time asleep; 0: never. */
	__u64 until_ns[TG_DIRECTIONS];
	/* Of the first entry: which copy is in force, 0 or 1 (maps.h). */
	__u64 copy;
};

/*
 * Limits of one device that each police some prefixes (match.h): at most TG_CHUNKS x TG_CHUNK of
 * them, whose settings, queues and counters lie in maps of TG_CHUNK each.
 */
#define TG_CHUNK	32
#define TG_CHUNKS	128
#define TG_PREFIXES_MAX 65536
/* Different lengths of prefixes of one version of IP, in one direction. */
#define TG_LENGTHS_MAX 16
#define TG_FAMILIES    2

/* A length of prefixes. */
struct tg_length {
	/* Of an address that begins with one: the bits that count. */
	__u32 mask[4];
	__u32 bits;
};

/* Those that there are, the longest first. */
struct tg_lengths {
	__u32 count;
	struct tg_length length[TG_LENGTHS_MAX];
};

/* The key of a prefix; its value is the index of its limit. */
struct tg_place {
	__u32 address[4];
	/* Direction, family and length: 8 bits each, from the left of 24. */
	__u32 what;
};

/* A limit, and after it by direction what it is once its time has come. All that is there twice
 * (maps.h). */
#define TG_COPY	  (1 + TG_DIRECTIONS)
#define TG_LIMITS (2 * TG_COPY)

/*
 * A virtual queue and the fair share of those that use it: flows, or the children of a limit. The
 * first cache line is written by packets, the second once an epoch and with each new connection,
 * the third once an epoch and child. A policer has a pl_meter in its place.
 */
struct tg_queue {
	__u64 finish_ns;
	/* How much idle time the finish time has skipped, ever. */
	__u64 skipped_ns;
	/* When this epoch began, and finish less skipped time then. */
	__u64 epoch_start_ns;
	__u64 epoch_base_ns;
	union {
		/* pace: smoothed round-trip time of the flows. */
		__u64 rtt_ns;
		/* edt: the latest departure that a flow's own schedule has given. */
		__u64 latest_ns;
	};
	/* Share of each flow, of the limit in 2^-24. */
	__u32 share;
	/* Number of this epoch, flows that sent data in it and in the one before. */
	__u32 epoch;
	__u32 flows;
	__u32 flows_before;
	union {
		/* pace: flows established in this epoch. */
		__u32 newcomers;
		/* edt: the largest packet of this epoch. */
		__u32 largest_bytes;
	};
	/* How long this epoch must last. */
	__u32 epoch_us;

	/*
	 * Of a child: what a byte costs at its present rate, 0: not yet. Its thresholds follow from
	 * this one word (cl_config_at), so no packet sees a part of the old and a part of the new.
	 */
	__u64 cost_now;
	__u64 rate_bit_s;
	/* Of a parent: until when traffic of no child is a class of its own. */
	__u64 children_until_ns;
	/* What a byte cost when the last packet came; 0: none has. */
	__u64 cost;
	/* 1 while a CPU changes what is kept of the epoch (epoch.h). */
	__u32 entered;
	/* pace, ingress: how long flows wait before they ask, smoothed. */
	__u32 wait_ns;
	/* pace, egress: when new connections begin. */
	struct ad_turns turns;

	/* Of a parent: what its active children weigh, what is guaranteed to them, in this epoch
	 * and the one before. */
	__u64 reserved_bit_s;
	__u64 reserved_before_bit_s;
	__u32 weight;
	__u32 weight_before;
	__u32 lightest;
	__u32 lightest_before;
	/* Of flows: what is set aside (unpaced.h) in this epoch, may be negative for a moment, and
	 * what was in the one before, of the limit in 2^-24. */
	__u64 aside_ns;
	__u64 aside_before;
	/* Of a child: the last epoch of its parent in which it was counted. */
	__u32 counted_epoch;
	/* Of flows: whether a sender that cannot be paced wanted more than one share in this
	 * epoch. */
	__u32 flooded;
	/* Behind windows: the finish time of what unpaced senders alone have sent. */
	__u64 unpaced_finish_ns;
	/* Flows that cannot be paced and count in an epoch, by its number, though they may be
	 * silent in it: what they have taken is more than they have earned (epoch.h). */
	__u16 stays[TG_STAYS];
	/* The time of the packets of such flows that began in this epoch. */
	__u64 strangers_ns;
	/* pace, nrm: packets that were dropped and leave TCP with nothing in flight, ever. At the
	 * end: a packet that passes has no use for them. */
	__u64 at_risk[TG_RISKS];
};

/* One direction, one CPU. */
struct tg_counters {
	__u64 packets[TG_OUTCOMES];
	__u64 bytes[TG_OUTCOMES];
	/* The part of the last cost below a nanosecond, in 2^-24 ns. */
	__u32 carry;
	__u32 pad;
	/* When the last packet met each outcome; only of those that tell or drop. At the end, so
	 * that a packet that passes finds all that is its on the lines it had. */
	__u64 last_ns[TG_OUTCOMES];
};

/* The same of a policer. */
struct tg_police_counters {
	struct tg_counters common;
	/* The part of the last cost below a nanosecond, in units; of each bucket. */
	__u64 carry;
	__u64 second_carry;
	/* By the colour that they got. */
	__u64 packets[PL_COLOURS];
	__u64 bytes[PL_COLOURS];
};

/* Buffers of each sample of flows: packets fill one while user space reads the other. */
#define TG_BUFFERS 2

/* What a limit does for its group in one direction; written by user space alone. */
struct tg_group {
	/* The probability at which a packet is dropped, before the limit itself, in 2^-32. */
	__u32 drop;
	/* Into which buffer flows are counted, from 1 on; 0: they are not. */
	__u32 sample;
};

/*
 * What a limit has set on a socket, kept with the socket so that it can be taken back. The members
 * up to `theirs_bytes` keep their places, so that any version can give the sockets of another one
 * back (release.bpf.c, struct tg_socket_kept).
 */
struct tg_socket {
	__u32 pacing_byte_s;
	/* By direction, the last epoch in which it had data. */
	__u32 epoch[TG_DIRECTIONS];
	/* The clamp of the receive window that was set here, and the last that was not. */
	__u32 clamp_bytes;
	__u32 theirs_bytes;
	/* The share that it was paced at. */
	__u32 share;
	struct rw_flow rwnd;
	/* When a child of the limit last had a packet of it. */
	__u64 claimed_ns;
	/* By queue: an epoch of it, and bytes in it (unpaced.h). */
	__u64 sent[TG_QUEUES];
	/* What it had sent when the payload of its segments was last worked out, and that payload;
	 * 0: it has not been. */
	__u64 bytes_sent;
	__u32 segments_sent;
	__u32 payload;
	/* The pacing rate that its share is; less is set while it waits before it asks. */
	__u32 share_byte_s;
	/* 1: its SYN is to be held (tune.bpf.c). */
	__u32 syn_waits;
	/* How often it has sent data and received some since, and what it had when it last sent. */
	__u32 exchanges;
	__u32 asked_rcv_nxt;
};

/* The first members of struct tg_socket; the oldest version had `pacing_byte_s` alone. */
struct tg_socket_kept {
	__u32 pacing_byte_s;
	__u32 epoch[TG_DIRECTIONS];
	__u32 clamp_bytes;
	__u32 theirs_bytes;
};

#endif
