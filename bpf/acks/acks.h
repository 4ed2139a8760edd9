/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps of the programs that act on ACKs (acks.bpf.c). Rust has them from bindgen
 * (crates/sys/build.rs).
 */
#ifndef TG_ACKS_H
#define TG_ACKS_H

#include "acks/flow_count.h"
#include "acks/dem.h"
#include "acks/spring.h"
#include "acks/wait.h"

/* Most connections in the table; the one that was silent longest makes room for a new one. */
#define AC_FLOWS 16384
/* Index of the limit, and of the limit that is in force after its time is over. */
#define AC_NOW	  0
#define AC_THEN	  1
#define AC_LIMITS 2

enum ac_scheme {
	AC_DEM,
	AC_SPRING,
};

/* A limit. Only user space writes it. */
struct ac_limit {
	/* Also used by DEM: turns the backlog into a time. */
	struct sp_conf spring;
	struct dem_conf dem;
	struct wt_conf wait;
	/* Valid until, in ns since boot including suspend; 0: for ever. */
	__u64 until_ns;
	/*
	 * The longest debt of AC_THEN, whose rate HTB does not know. Packets that find a larger
	 * debt are dropped; never 0.
	 */
	__u64 most_ns;
	/* enum ac_scheme */
	__u32 scheme;
	__u32 pad;
};

/*
 * The state that all flows of a limit share. Packets write it without a lock; a lost update does no
 * harm.
 */
struct ac_state {
	/* Every byte that reached the queue. */
	__u64 in_bytes;
	struct wt_account account;
	__u64 unused[4];
	/* spring: smoothed, in time at the limit's rate. */
	__u64 backlog_ns;
	__u64 share;
	/* When this epoch began, and the bytes that had come and the backlog then. */
	__u64 epoch_start_ns;
	/* The least length of this epoch. */
	__u64 epoch_ns;
	__u64 epoch_in_bytes;
	__u64 epoch_backlog_bytes;
	/* The longest round trip of this epoch and of the one before. */
	__u64 longest_ns;
	__u64 longest_before_ns;
	/* Numbered from one, so that a new flow has been counted in none. */
	__u32 epoch;
	__u32 flows;
	__u32 flows_before;
	/* 1 while a CPU changes the epoch. */
	__u32 entered;
	/* dem */
	struct dem_marker marker;
	struct fc_count flow_count;
};

/*
 * Whether this CPU may change the epoch; then it must call ac_leave. Nobody waits: the next ACK
 * counts the flow or ends the epoch.
 */
static inline __attribute__((always_inline)) int ac_enter(struct ac_state *s)
{
	return !__sync_val_compare_and_swap(&s->entered, 0, 1);
}

static inline __attribute__((always_inline)) void ac_leave(struct ac_state *s)
{
	/* An exchange: the next CPU that enters sees all that was written before. */
	__sync_lock_test_and_set(&s->entered, 0);
}

/*
 * Counts a flow in this epoch, if it is not counted yet, and makes room for it if it is new. *seen
 * is the last epoch in which it was counted. Returns whether it was counted now.
 */
static inline __attribute__((always_inline)) int ac_count_flow(struct ac_state *s, __u32 *seen)
{
	__u32 epoch, before = *(volatile __u32 *)seen;

	if (before == *(volatile __u32 *)&s->epoch + 1 || !ac_enter(s))
		return 0;
	epoch = s->epoch + 1;
	before = *(volatile __u32 *)seen;
	if (before != epoch) {
		*seen = epoch;
		s->flows++;
		if (!(before && epoch - before <= SP_KNOWN_EPOCHS) && s->flows > s->flows_before)
			s->share = sp_join(s->share, s->flows);
	}
	ac_leave(s);
	return before != epoch;
}

/*
 * Ends the epoch when it has lasted long enough. Only one CPU does so; it gets the number of flows
 * plus one.
 */
static inline __attribute__((always_inline)) int
ac_turn_epoch(const struct ac_limit *l, struct ac_state *s, __u64 now, __u64 backlog, __u16 mss)
{
	__u64 start = *(volatile __u64 *)&s->epoch_start_ns;
	__u64 in, came, rtt = fs_max(s->longest_ns, s->longest_before_ns);
	struct sp_epoch epoch = {.rtt_ns = rtt};
	__u32 flows;

	if (now < start || now - start < s->epoch_ns || !ac_enter(s))
		return 0;
	/* Another CPU may have ended it since. */
	if (*(volatile __u64 *)&s->epoch_start_ns != start) {
		ac_leave(s);
		return 0;
	}
	s->epoch_start_ns = now;
	in = s->in_bytes;
	came = in - s->epoch_in_bytes + s->epoch_backlog_bytes;
	flows = s->flows;
	s->flows = 0;
	epoch.elapsed_ns = now - start;
	epoch.left_bytes = came > backlog ? came - backlog : 0;
	epoch.backlog_ns = s->backlog_ns;
	epoch.flows = flows > s->flows_before ? flows : s->flows_before;
	s->share = sp_next(s->share, &l->spring, &epoch);
	s->epoch_in_bytes = in;
	s->epoch_backlog_bytes = backlog;
	s->flows_before = flows;
	s->longest_before_ns = s->longest_ns;
	s->longest_ns = 0;
	s->epoch_ns = sp_epoch_ns(&l->spring, rtt, flows, mss);
	s->epoch++;
	ac_leave(s);
	return 1 + flows;
}

/* Both ends of a connection, IPv4 as mapped into IPv6. */
struct tcp_key {
	__u32 own[4];
	__u32 other[4];
	__u16 own_port;
	__u16 other_port;
};

enum ac_flow_flags {
	/*
	 * A SYN was seen from the workload, or from the other side; the workload's, or the other
	 * side's, asked for ECN; the SYN itself was ECN-capable, which only DCTCP and the like
	 * send.
	 */
	AC_OWN_SYN = 1 << 0,
	AC_OTHER_SYN = 1 << 1,
	AC_ASKED_ECN = 1 << 2,
	AC_ECT_SYN = 1 << 3,
	AC_OWN_SCALES = 1 << 4,
	AC_OTHER_SCALES = 1 << 5,
	/* The connection is established: both SYNs were seen. */
	AC_KNOWN = 1 << 6,
	/* It agreed on ECN as in RFC 3168, and its sender behaves like DCTCP. */
	AC_ECN = 1 << 7,
	AC_SCALABLE = 1 << 8,
	/* FINs that were seen. They are set atomically, as both may pass at once, on two CPUs. */
	AC_OWN_FIN = 1 << 9,
	AC_OTHER_FIN = 1 << 10,
};

/* A connection. */
struct ac_flow {
	struct sp_rtt rtt;
	struct sp_edge edge;
	struct fc_mark mark;
	/* enum ac_flow_flags; those of a handshake in progress are below AC_KNOWN. */
	__u32 flags;
	/* How far the workload has sent, and its last acknowledgement. */
	__u32 sent;
	__u32 own_ack;
	/* How far it has been acknowledged. */
	__u32 acked;
	/* The fraction of a mark that is due. */
	__u32 due;
	/* A random constant of the flow, and the last epoch in which it was seen. */
	__u32 hash;
	__u32 epoch;
	/* The segment size of the sender, and the most that the last handshake allows it. */
	__u16 mss;
	__u16 syn_mss;
	/* The scale of the other side, also that of a handshake in progress. */
	__u16 scale;
	__u16 syn_scale;
	/* How far the other side has sent. */
	__u32 other_sent;
};

#endif
