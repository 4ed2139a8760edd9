/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The window that a shaper gives each flow: a pure header over (state, now, packet). Its model,
 * with the reasons, is crates/core/src/spring.rs; a property test compares the two.
 */
#ifndef TG_SPRING_H
#define TG_SPRING_H

#include "common/fair_share.h"

#define SP_SECOND_NS 1000000000ULL
/* Shares are fractions of the limit in 2^-24. */
#define SP_ONE	(1ULL << 24)
#define SP_MOST (2 * SP_ONE)
/* The gain for a share of one, in time at the limit's rate. */
#define SP_STALLS_NS	  1000000ULL
#define SP_LEAST_SEGMENTS 2
#define SP_SLACK_SEGMENTS 2
/* Bounds that keep the products in 64 bits. */
#define SP_MAX_BYTE_S 12500000000ULL
#define SP_MAX_NS     SP_SECOND_NS
#define SP_MAX_BYTES  (1ULL << 30)
#define SP_MAX_SCALE  14
#define SP_MIN_RTT_NS 1000ULL
/* The least round trip is that of two such times. */
#define SP_RTT_WINDOW_NS 500000000ULL
/* A rate that changed by less than this part is the same. */
#define SP_RATE_PART	8
#define SP_MIN_EPOCH_NS 2000000ULL
#define SP_MAX_EPOCH_NS 100000000ULL
#define SP_KNOWN_EPOCHS 8
#define SP_MAX_FLOWS	(1U << 16)
/* Headers of a full frame beyond its segment: Ethernet, IPv4, TCP. */
#define SP_HEADER_BYTES 54

struct sp_conf {
	__u64 byte_s;
	/* The target backlog. */
	__u64 target_ns;
};

/* The observations of one epoch. */
struct sp_epoch {
	__u64 elapsed_ns;
	__u64 left_bytes;
	__u64 backlog_ns;
	__u64 rtt_ns;
	__u32 flows;
	__u32 pad;
};

/* The round trip of a flow's path behind the queue. */
struct sp_rtt {
	/* When the segment that is timed came, and how long it had to wait; 0: none. */
	__u64 sent_ns;
	__u64 wait_ns;
	/* The least so far, and the least of this window, which began then; 0: none. */
	__u64 least_ns;
	__u64 recent_ns;
	__u64 since_ns;
	/* The cost of a byte then. */
	__u64 cost;
	/* The end of that segment. */
	__u32 probe;
	__u32 pad;
};

/* State of the windows of a flow. */
struct sp_edge {
	/* The furthest edge ever offered. */
	__u32 edge;
	/*
	 * The last ACK: its number, the window that it came with, and the window that it left with.
	 */
	__u32 ack;
	__u16 raw;
	__u16 said;
	__u32 known;
};

struct sp_ack {
	__u32 ack;
	__u16 raw;
	/* Scale of the window; 0 in a SYN. */
	__u8 scale;
	/* It carries no data. */
	__u8 bare;
};

/* How long bytes take to be sent. */
static inline __attribute__((always_inline)) __u64 sp_time(const struct sp_conf *conf, __u64 bytes)
{
	return fs_min(fs_min(bytes, SP_MAX_BYTES) * SP_SECOND_NS / fs_max(conf->byte_s, 1),
		      SP_MAX_NS);
}

/* The bytes that are sent in a time. */
static inline __attribute__((always_inline)) __u64 sp_bytes(const struct sp_conf *conf, __u64 ns)
{
	return fs_min(conf->byte_s, SP_MAX_BYTE_S) * fs_min(ns, SP_MAX_NS) / SP_SECOND_NS;
}

static inline __attribute__((always_inline)) __u64 sp_flows(__u32 flows)
{
	return flows < 1 ? 1 : flows < SP_MAX_FLOWS ? flows : SP_MAX_FLOWS;
}

/* The share of each flow in the next epoch. */
static inline __attribute__((always_inline)) __u64 sp_next(__u64 share, const struct sp_conf *conf,
							   const struct sp_epoch *epoch)
{
	__u64 floor = SP_ONE * 3 / 4 / sp_flows(epoch->flows);
	__u64 elapsed = fs_min(fs_max(epoch->elapsed_ns, 1), SP_MAX_NS);
	__u64 load = fs_min(sp_time(conf, epoch->left_bytes) * SP_ONE / elapsed, SP_ONE);
	__u64 target = fs_min(conf->target_ns, SP_MAX_NS);
	__u64 delay = fs_max(fs_min(epoch->rtt_ns, SP_MAX_NS) + target, 1);
	__u64 backlog = fs_min(epoch->backlog_ns, SP_MAX_NS);
	__u64 over, up;

	share = fs_min(fs_max(share, floor), SP_MOST);
	up = share * (SP_ONE - load) >> 25;
	if (backlog <= target) {
		share += up + (share * ((target - backlog) * SP_ONE / delay) >> 25);
	} else {
		over = fs_min((backlog - target) * SP_ONE / delay, SP_ONE);
		share = share + up - (share * over >> 25);
	}
	return fs_min(fs_max(share, floor), SP_MOST);
}

/* The share for the rest of an epoch when one more flow comes, so that there are `flows`. */
static inline __attribute__((always_inline)) __u64 sp_join(__u64 share, __u32 flows)
{
	__u64 n = sp_flows(flows);

	share = fs_min(share, SP_ONE);
	return fs_max(share * (n - 1) / n, fs_min(share, SP_ONE / n));
}

/* How long an epoch must be to see all flows in it. */
static inline __attribute__((always_inline)) __u64 sp_epoch_ns(const struct sp_conf *conf,
							       __u64 rtt_ns, __u32 flows, __u16 mss)
{
	__u64 burst = SP_LEAST_SEGMENTS * ((__u64)mss + SP_HEADER_BYTES);
	__u64 round = sp_time(conf, fs_min(flows, SP_MAX_FLOWS) * burst);

	round = 2 * fs_max(round, fs_min(rtt_ns, SP_MAX_NS));
	return fs_min(fs_max(round, SP_MIN_EPOCH_NS), SP_MAX_EPOCH_NS);
}

/* The part of a segment that a flow gets on top in an epoch, in 2^-16. */
static inline __attribute__((always_inline)) __u16 sp_phase(__u32 hash, __u32 epoch)
{
	return (hash + epoch * 0x9e3779b1U) >> 16;
}

/* The window of a flow: whole segments. */
static inline __attribute__((always_inline)) __u32
sp_window(const struct sp_conf *conf, __u64 share, __u64 rtt_ns, __u16 mss, __u16 phase)
{
	__u64 segment = mss > 1 ? mss : 1;
	__u64 time =
	    fs_min(fs_min(rtt_ns, SP_MAX_NS) + fs_min(conf->target_ns, SP_MAX_NS), SP_MAX_NS);
	__u64 bytes = fs_min(conf->byte_s, SP_MAX_BYTE_S) * time / SP_SECOND_NS;
	__u64 segments, more = fs_min(fs_max(share, SP_ONE), SP_MOST) - SP_ONE;

	bytes *= fs_min(share, SP_ONE);
	if (more)
		bytes += fs_min(conf->byte_s, SP_MAX_BYTE_S) * SP_STALLS_NS / SP_SECOND_NS * more;
	bytes >>= 24;
	segments =
	    (fs_min(bytes, SP_MAX_BYTES) + (segment * phase >> 16)) / (segment + SP_HEADER_BYTES);
	return fs_min(fs_max(segments, SP_LEAST_SEGMENTS) * segment, SP_MAX_BYTES);
}

/* Data that ends at `end` comes, and will wait for `wait_ns` at this cost of a byte. */
static inline __attribute__((always_inline)) void
sp_rtt_data(struct sp_rtt *rtt, __u32 end, __u64 now_ns, __u64 wait_ns, __u64 cost)
{
	if (rtt->sent_ns)
		return;
	rtt->probe = end;
	rtt->cost = cost;
	rtt->wait_ns = wait_ns;
	rtt->sent_ns = now_ns;
}

/* Everything before `ack` has arrived; 1 if there is a sample. */
static inline __attribute__((always_inline)) int sp_rtt_ack(struct sp_rtt *rtt, __u32 ack,
							    __u64 now_ns, __u64 cost)
{
	__u64 sent = rtt->sent_ns, took, since, most = fs_max(cost, rtt->cost);

	if (!sent || (__s32)(ack - rtt->probe) < 0)
		return 0;
	/* At another rate it has waited for a different time. */
	if (rtt->wait_ns && most - fs_min(cost, rtt->cost) > most / SP_RATE_PART) {
		rtt->sent_ns = 0;
		return 0;
	}
	took = now_ns > sent ? now_ns - sent : 0;
	took = took > rtt->wait_ns ? took - rtt->wait_ns : 0;
	took = fs_min(fs_max(took, SP_MIN_RTT_NS), SP_MAX_NS);
	rtt->sent_ns = 0;
	since = now_ns > rtt->since_ns ? now_ns - rtt->since_ns : 0;
	if (!rtt->least_ns || since > SP_RTT_WINDOW_NS) {
		rtt->least_ns = rtt->recent_ns ? fs_min(took, rtt->recent_ns) : took;
		rtt->recent_ns = took;
		rtt->since_ns = now_ns;
	} else {
		rtt->recent_ns = fs_min(rtt->recent_ns, took);
		rtt->least_ns = fs_min(rtt->least_ns, took);
	}
	return 1;
}

/*
 * The window field of the ACK that leaves, where the law gives `window` bytes. Never more than it
 * came with.
 */
static inline __attribute__((always_inline)) __u16 sp_say(struct sp_edge *edge,
							  const struct sp_ack *ack, __u32 window)
{
	__u32 scale = ack->scale < SP_MAX_SCALE ? ack->scale : SP_MAX_SCALE;
	__u32 known = edge->known, ahead = edge->edge - ack->ack, next;
	__u64 units;
	__u16 said;

	if (known && ack->bare && ack->ack == edge->ack && ack->raw == edge->raw)
		return edge->said < ack->raw ? edge->said : ack->raw;
	if (known && ahead < SP_MAX_BYTES && ahead > window)
		window = ahead;
	units = ((__u64)window + (1U << scale) - 1) >> scale;
	said = units < ack->raw ? units : ack->raw;
	next = ack->ack + ((__u32)said << scale);
	if (!known || (__s32)(next - edge->edge) > 0)
		edge->edge = next;
	if (!known || (__s32)(ack->ack - edge->ack) >= 0) {
		edge->ack = ack->ack;
		edge->raw = ack->raw;
		edge->said = said;
	}
	edge->known = 1;
	return said;
}

/* Whether data that ends at `end` is beyond all that the sender was ever allowed. */
static inline __attribute__((always_inline)) int sp_is_beyond(const struct sp_edge *edge, __u32 end,
							      __u16 mss)
{
	__s32 beyond = end - edge->edge;

	return edge->known && beyond > (__s32)(SP_SLACK_SEGMENTS * (__u32)mss) &&
	       beyond < (__s32)SP_MAX_BYTES;
}

#endif
