/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The receive window as a limiter: a pure header over (state, path, now). Its model, with the
 * reasons, is crates/core/src/receive_window.rs; a property test compares the two.
 *
 * The right edge of the window moves at the flow's share of the limit, whatever the round trip is.
 * A flow that has used all it was granted sends at exactly that rate, and its window is rate x RTT
 * without a measurement of the RTT.
 */
#ifndef TG_RWND_H
#define TG_RWND_H

#include "common/fair_share.h"
#include "common/verifier.h"

#define RW_SECOND_NS 1000000000ULL
/* The longest round trip that the virtual queue makes room for. */
#define RW_MAX_ROOM_NS 200000000ULL
/* Upper bound of a time; keeps the product with the largest rate in 64 bits. */
#define RW_MAX_NS     RW_SECOND_NS
#define RW_MAX_BYTE_S 12500000000ULL
/* The largest window that TCP can express. */
#define RW_MAX_BYTES (1ULL << 30)
/* Beyond a round trip a flow may be granted this much of its rate at once: hosts stall. */
#define RW_SLACK_NS 2000000ULL
/* The least window, in segments: with less, TCP may delay its ACK for some milliseconds. */
#define RW_LEAST_SEGMENTS 2
/* The first window of a connection: this much of its rate, within these bounds. */
#define RW_FIRST_NS	      2000000ULL
#define RW_FIRST_SEGMENTS     4
#define RW_FIRST_SEGMENTS_MAX 45
/*
 * A flow pays its debt in this many parts, one before each request. Otherwise the debt from before
 * it could be kept back would be one long wait.
 */
#define RW_PAYMENTS 4
/* No flow waits longer before it asks. */
#define RW_WAIT_MAX_NS 200000000ULL
/* Upper bound of a flow's debt, as a time. */
#define RW_DEBT_MAX_S  4
#define RW_DEBT_MAX_NS (RW_DEBT_MAX_S * RW_SECOND_NS)
/* A flow with a smaller debt keeps to its share, by waiting before it asks for more. */
#define RW_OWED_KEPT_NS 3000000000ULL

/* The state of a flow. */
struct rw_flow {
	/* When the edge was last moved; 0: never. */
	__u64 last_ns;
	/*
	 * How far the edge is beyond what was received, in bytes; negative: that was granted early.
	 */
	__s64 credit;
	__u32 rcv_nxt;
	/* Its debt in bytes when the edge was last moved (rw_owes). */
	__u32 debt_bytes;
	/* Its share then, in bytes a second. */
	__u64 byte_s;
};

/* The inputs when an ACK is built. */
struct rw_path {
	/* The flow's share of the limit, payload alone. */
	__u64 byte_s;
	__u64 rtt_ns;
	__u32 mss;
	__u32 rcv_nxt;
};

static inline __attribute__((always_inline)) __u64 rw_bytes(__u64 byte_s, __u64 ns)
{
	return fs_lesser(byte_s, RW_MAX_BYTE_S) * fs_lesser(ns, RW_MAX_NS) / RW_SECOND_NS;
}

/*
 * The most that a flow may have been granted beyond what it sent, and its largest negative credit.
 */
static inline __attribute__((always_inline)) __u64 rw_most(const struct rw_path *path)
{
	__u64 rtt_ns = fs_lesser(path->rtt_ns, RW_MAX_NS);
	__u64 bytes = rw_bytes(path->byte_s, rtt_ns + rtt_ns / 4 + RW_SLACK_NS) +
		      RW_LEAST_SEGMENTS * (__u64)path->mss;

	return fs_lesser(bytes, RW_MAX_BYTES);
}

/*
 * How long a flow would have to be silent at `now_ns` for what it has received to be its share. The
 * debt is in bytes, so it is paid sooner if the share grows.
 */
static inline __attribute__((always_inline)) __u64 rw_owes(const struct rw_flow *flow, __u64 now_ns)
{
	__u64 elapsed = now_ns > flow->last_ns ? now_ns - flow->last_ns : 0;
	__u64 debt_ns = flow->debt_bytes * RW_SECOND_NS / fs_max(flow->byte_s, 1);

	debt_ns = fs_lesser(debt_ns, RW_DEBT_MAX_NS);
	return debt_ns > elapsed ? debt_ns - elapsed : 0;
}

/* The window of the ACK that is being built, in bytes. */
VF_ONCE __u32 rw_window(struct rw_flow *flow, const struct rw_path *path, __u64 now_ns)
{
	__u64 elapsed, paid, debt;
	__s64 most, least;
	__u32 received;

	if (!flow || !path)
		return 0;
	most = rw_most(path);
	least = fs_lesser(RW_LEAST_SEGMENTS * (__u64)path->mss, most);
	elapsed = now_ns > flow->last_ns ? now_ns - flow->last_ns : 0;
	received = path->rcv_nxt - flow->rcv_nxt;
	/* Times up to that of the largest debt count; short ones without a rounded quotient. */
	paid = elapsed > RW_MAX_NS ? RW_DEBT_MAX_S * rw_bytes(flow->byte_s, elapsed / RW_DEBT_MAX_S)
				   : rw_bytes(flow->byte_s, elapsed);
	debt = flow->debt_bytes;
	debt = debt > paid ? debt - paid : 0;
	if (flow->last_ns) {
		flow->credit += rw_bytes(path->byte_s, elapsed);
		flow->credit -= received;
		debt += received;
	} else {
		flow->credit = most;
	}
	flow->byte_s = fs_lesser(path->byte_s, RW_MAX_BYTE_S);
	flow->debt_bytes = fs_lesser(debt, fs_lesser(RW_DEBT_MAX_S * flow->byte_s, RW_MAX_BYTES));
	if (flow->credit > most)
		flow->credit = most;
	if (flow->credit < -most)
		flow->credit = -most;
	flow->last_ns = now_ns;
	flow->rcv_nxt = path->rcv_nxt;
	return flow->credit > least ? flow->credit : least;
}

/* How long a flow waits before it asks again. */
static inline __attribute__((always_inline)) __u64 rw_waits(const struct rw_flow *flow,
							    __u64 now_ns)
{
	return fs_min(rw_owes(flow, now_ns) / RW_PAYMENTS, RW_WAIT_MAX_NS);
}

/*
 * The pacing rate, in bytes a second, at which `payload` bytes sent at `now_ns` delay the data
 * behind them for as long as the flow waits. The largest value: no wait.
 */
static inline __attribute__((always_inline)) __u64 rw_asking_byte_s(const struct rw_flow *flow,
								    __u32 payload, __u64 now_ns)
{
	__u64 wait_ns = rw_waits(flow, now_ns);

	return wait_ns ? payload * RW_SECOND_NS / wait_ns : ~0ULL;
}

/* The first window of a connection, in segments. */
static inline __attribute__((always_inline)) __u32 rw_first_segments(__u64 byte_s, __u32 mss)
{
	__u64 segments = rw_bytes(byte_s, RW_FIRST_NS) / fs_max(mss, 1);

	return fs_min(fs_max(segments, RW_FIRST_SEGMENTS), RW_FIRST_SEGMENTS_MAX);
}

/*
 * The backlog of the virtual queue behind windows, as it is judged. All windows may be sent at
 * once, which is a round trip's worth above the mark.
 */
static inline __attribute__((always_inline)) __s64 rw_judged_ns(__s64 backlog_ns, __u64 mark_ns,
								__u64 rtt_ns)
{
	__s64 mark = mark_ns, room = fs_min(rtt_ns, RW_MAX_ROOM_NS);

	if (backlog_ns <= mark)
		return backlog_ns;
	return backlog_ns - mark > room ? backlog_ns - room : mark;
}

/*
 * How long an epoch must be to see a flow that sends a whole window at once. Expressed as the burst
 * time of each flow, of which two must fit in.
 */
static inline __attribute__((always_inline)) __u64 rw_burst_ns(__u64 rtt_ns, __u32 flows)
{
	return fs_min(rtt_ns, RW_MAX_NS) / (2 * fs_max(flows, 1));
}

#endif
