/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * When a new connection may begin in a limit that is in use: a pure header. Its model, with the
 * reasons, is crates/core/src/admission.rs; a property test compares the two.
 */
#ifndef TG_ADMISSION_H
#define TG_ADMISSION_H

#include "common/fair_share.h"
#include "common/vqueue.h"

/* Each connection that ends moves the average by one part in 2^6. */
#define AD_AVERAGE_SHIFT 6
/* TCP's first ten segments; what a connection sends later is paced. */
#define AD_FRAME_BYTES 1514
#define AD_MOST_BYTES  (10 * AD_FRAME_BYTES)
/* A backlog up to this delays no connection. */
#define AD_SLACK_NS 4000000ULL
/* No connection waits longer: a client retries after a second. */
#define AD_MOST_NS 850000000ULL
/* A client has this time and this many round trips to answer a held SYN-ACK. */
#define AD_PATIENCE_NS	   992000000ULL
#define AD_PATIENCE_ROUNDS 16
/* The least hold may be at most this, or twice the time until the turn. */
#define AD_LEAST_NS 32000000ULL
/* A value of `crowded`: this limit no longer holds connections. */
#define AD_NEVER 2
/* The first timer of a SYN that is not held. A hold of a millisecond is ten doublings shorter. */
#define AD_SECOND_NS	   1000000000ULL
#define AD_SYN_DOUBLINGS   10
#define AD_SYN_RETRIES_MAX 127
/* More retries of a SYN-ACK than this gain nothing. */
#define AD_MAX_RETRIES 15
/* The SYN-ACK retries that a listener in a limit gets, and the kernel's default. */
#define AD_ANSWER_RETRIES  7
#define AD_DEFAULT_RETRIES 5
/*
 * The kernel sends a held SYN-ACK again after twice its time. A path up to twice as long gets it
 * once.
 */
#define AD_ONCE_NS 16000000ULL

/* The turns that the new connections of a queue take. */
struct ad_turns {
	/* When the next turn comes. */
	__u64 next_ns;
	/* Average bytes that a connection takes before it is paced, in 2^-6 bytes. */
	__u32 average;
	/* The last SYN-ACK that is to be held: a time and a port (ad_asked). */
	__u32 asked;
	/* How many were held since the limit began; it wraps. */
	__u32 held;
	/*
	 * The fewest SYN-ACK retries of a listener; 0: not known, as no SYN-ACK was seen (programs
	 * of cgroups see none before Linux 6.13).
	 */
	__u8 retries;
	/*
	 * 1 while the listener that was seen last has many waiting connections. AD_NEVER once a
	 * listener was seen that sends no SYN-ACK again.
	 */
	__u8 crowded;
	/* The direction for whose turn the last one waits. */
	__u8 asked_of;
	__u8 pad;
};

/* A connection that took `bytes` on the wire has ended. A lost update does no harm. */
static inline __attribute__((always_inline)) void ad_ended(struct ad_turns *turns, __u64 bytes)
{
	__u32 average = *(volatile __u32 *)&turns->average;

	bytes = fs_min(bytes, AD_MOST_BYTES);
	bytes = average ? average + bytes : bytes << AD_AVERAGE_SHIFT;
	turns->average = fs_min(bytes, AD_MOST_BYTES << AD_AVERAGE_SHIFT);
}

/*
 * A connection begins: returns how long it has to wait. `others` is the number of paced flows.
 * `backlog_ns` is negative if the queue has credit. If two CPUs give the same turn, the backlog
 * makes up for it.
 */
static inline __attribute__((always_inline)) __u64
ad_ask(struct ad_turns *turns, __u64 now, __s64 backlog_ns, __u64 cost, __u32 others)
{
	__u32 average = *(volatile __u32 *)&turns->average;
	__s64 ahead = *(volatile __u64 *)&turns->next_ns - now;
	__u64 wait = ahead > 0 ? fs_min(ahead, AD_MOST_NS) : 0;
	__u64 bytes = fs_min(average >> AD_AVERAGE_SHIFT, AD_MOST_BYTES);
	__u64 own = vq_time_ns(bytes, cost);
	__u64 turns_ahead = wait / fs_max(own, 1), waiting;

	others = fs_min(others, FS_MAX_FLOWS);
	/* The paced flows have their parts of the time until the turn. */
	waiting = turns_ahead > others ? turns_ahead - others : 1;
	turns->average = average - (average >> AD_AVERAGE_SHIFT);
	turns->next_ns = now + wait + own + own * others / waiting;
	if (backlog_ns > (__s64)(wait + AD_SLACK_NS))
		wait = fs_min(backlog_ns - AD_SLACK_NS, AD_MOST_NS);
	return wait;
}

/*
 * How long to hold the SYN-ACK of a connection that has to wait, in ticks of the kernel's timers;
 * 0: not at all. The kernel sends a held SYN-ACK when its timer ends, and keeps the connection for
 * `retries` more times of the timer, each twice as long as the one before.
 */
static inline __attribute__((always_inline)) __u32 ad_hold_ticks(__u64 wait_ns, __u32 retries,
								 __u64 rtt_ns, __u64 tick_ns)
{
	__u64 patience = AD_PATIENCE_NS + AD_PATIENCE_ROUNDS * fs_min(rtt_ns, AD_MOST_NS);
	__u64 least;

	tick_ns = fs_max(tick_ns, 1);
	retries = retries < AD_MAX_RETRIES ? retries : AD_MAX_RETRIES;
	if (!retries || wait_ns < AD_SLACK_NS)
		return 0;
	least = fs_max(patience / ((2ULL << retries) - 2), fs_min(rtt_ns * 3 / 4, AD_ONCE_NS));
	if (least > fs_max(AD_LEAST_NS, 2 * wait_ns))
		return 0;
	return fs_max(fs_max(wait_ns / tick_ns, (least + tick_ns / 2) / tick_ns), 1);
}

/*
 * How often a listener should send a SYN-ACK again, so that a held one goes after 4 ms; 0: no
 * change. The program's own choice stays, and so does a host's choice of fewer than the default.
 */
static inline __attribute__((always_inline)) __u32 ad_answer_retries(__u32 chosen, __u32 host)
{
	return !chosen && host >= AD_DEFAULT_RETRIES && host < AD_ANSWER_RETRIES ? AD_ANSWER_RETRIES
										 : 0;
}

/* Whether connections take at most a frame: then their programs only ask. */
static inline __attribute__((always_inline)) int ad_only_asks(const struct ad_turns *turns)
{
	return turns->average >> AD_AVERAGE_SHIFT <= AD_FRAME_BYTES;
}

/*
 * Whether a connection that has moved this many data segments most likely ends before it is paced:
 * it has moved at most twice what others took.
 */
static inline __attribute__((always_inline)) int ad_ends_soon(const struct ad_turns *turns,
							      __u32 segments)
{
	__u64 bytes = (__u64)segments * AD_FRAME_BYTES;

	return bytes << AD_AVERAGE_SHIFT <= 2 * (__u64)turns->average;
}

/*
 * How long to hold the SYN of a connection that has to wait, in ticks of the kernel's timers; 0:
 * not at all. The kernel sends the SYN when the timer ends, and again after the same time, so the
 * hold is longer than a round trip.
 */
static inline __attribute__((always_inline)) __u32 ad_syn_ticks(__u64 wait_ns, __u64 rtt_ns,
								__u64 tick_ns)
{
	__u64 least = fs_min(rtt_ns, AD_MOST_NS) * 3 / 2;

	if (wait_ns < AD_SLACK_NS || least > AD_MOST_NS)
		return 0;
	tick_ns = fs_max(tick_ns, 1);
	return fs_max((fs_max(wait_ns, least) + tick_ns - 1) / tick_ns, 1);
}

/*
 * How many times the kernel must retry a SYN that was held for `ticks`, so that the connection
 * fails no earlier than with `retries` after a first timer of a second. Each time is twice as long
 * as the one before.
 */
static inline __attribute__((always_inline)) __u32 ad_syn_retries(__u32 ticks, __u64 tick_ns,
								  __u32 retries)
{
	__u64 held = (__u64)ticks * fs_max(tick_ns, 1);

	for (int i = 0; i < AD_SYN_DOUBLINGS && held < AD_SECOND_NS; i++, held *= 2)
		retries++;
	return fs_min(retries, AD_SYN_RETRIES_MAX);
}

/* An identifier of the SYN-ACK to hold: the time in units of 2^16 ns, and the client's port. */
static inline __attribute__((always_inline)) __u32 ad_asked(__u64 now, __u32 port)
{
	return (__u32)(now >> 16) << 16 | (port & 0xffff);
}

/*
 * Whether a SYN-ACK to `port` is the one to hold. It follows at once, so an older identifier
 * belongs to one that never came.
 */
static inline __attribute__((always_inline)) int ad_is_asked(__u32 asked, __u64 now, __u32 port)
{
	return asked && (asked & 0xffff) == (port & 0xffff) &&
	       (__u16)((__u16)(now >> 16) - (asked >> 16)) <= 16;
}

#endif
