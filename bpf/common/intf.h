/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract between the eBPF programs and Rust: the layout of the maps that every limit has,
 * and of the queue that several schemes have. Schemes add theirs in an intf.h of their own. Rust
 * has all of it from bindgen (crates/sys/build.rs). Times are nanoseconds of CLOCK_MONOTONIC, those
 * of a policer of CLOCK_BOOTTIME; rates are bit/s unless the name says otherwise.
 */
#ifndef TG_INTF_H
#define TG_INTF_H

#include "common/class.h"
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
 * A virtual queue and the fair share of those that use it. Packets write the finish time; the rest
 * changes about once an epoch. A scheme with more state has it behind this.
 */
struct tg_queue {
	__u64 finish_ns;
	/* Idle time that the finish time has skipped since the limit began. */
	__u64 skipped_ns;
	/* When this epoch began, and the finish time less the skipped time then. */
	__u64 epoch_start_ns;
	__u64 epoch_base_ns;
	/* The cost of a byte when the last packet came; 0: no packet yet. */
	__u64 cost;
	/* Share of each flow, of the limit in 2^-24. */
	__u32 share;
	/* Number of this epoch, flows that sent data in it and in the one before. */
	__u32 epoch;
	__u32 flows;
	__u32 flows_before;
	/* The least length of this epoch. */
	__u32 epoch_us;
	/* 1 while a CPU changes the epoch (epoch.h). */
	__u32 entered;
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

#endif
