/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Meters that colour packets: a pure header over (state, now, length). The model, with the rules of
 * the RFCs, is crates/core/src/meter.rs; a property test holds the two together, bit by bit.
 *
 * A meter is two buckets of police.h, and needs no lock. A bucket is asked for tokens in one atomic
 * step, and which is asked first is all that the RFCs differ in:
 *
 *   bucket    committed: green; else red
 *   srTCM     committed: green; else second, which runs by another clock: yellow; else red
 *   trTCM     second, or red; then committed: green; else yellow
 *   RFC 4115  committed: green; else second: yellow; else red
 *
 * What a full committed bucket has no room for fills the second one of srTCM. So the clock of the
 * second is the time for which the committed one has been full: it stands while that fills. Other
 * CPUs may take from a bucket between the two steps, as if their packets had come in between.
 */
#ifndef TG_METER_H
#define TG_METER_H

#include "police.h"

enum pl_kind {
	PL_ONE_BUCKET,
	PL_SINGLE_RATE,
	PL_TWO_RATE,
	PL_DIFFERENTIATED,
};

enum pl_colour {
	PL_GREEN,
	PL_YELLOW,
	PL_RED,
	PL_COLOURS,
};

enum pl_action {
	PL_PASS,
	PL_DROP,
	/* ECN congestion experienced, or drop what is not ECN-capable. */
	PL_CE,
	/* Another DSCP. */
	PL_DSCP,
};

/* What a policer does in one direction. */
struct pl_policy {
	struct pl_bucket committed;
	struct pl_bucket second;
	/* Bit d: what comes with code point d is yellow, or red, already. */
	__u64 yellow_dscps;
	__u64 red_dscps;
	__u8 kind;
	/* Whether the colour counts with which a packet comes. */
	__u8 aware;
	/* By colour. */
	__u8 action[PL_COLOURS];
	__u8 dscp[PL_COLOURS];
	/* How the depth of the second bucket was given: for user space. */
	__u32 second_given;
	/* Whether the flows have equal parts of the committed bucket (fair_police.h). */
	__u32 fair;
};

/* The state of a meter. */
struct pl_state {
	__u64 *full_ns;
	/* For how long the committed bucket has been full, ever. */
	__u64 *skipped_ns;
	__u64 *second_full_ns;
	/* This CPU's. */
	__u64 *carry;
	__u64 *second_carry;
};

static inline __attribute__((always_inline)) enum pl_colour
pl_incoming(const struct pl_policy *policy, __u8 dscp)
{
	if (policy->red_dscps >> (dscp & 63) & 1)
		return PL_RED;
	return policy->yellow_dscps >> (dscp & 63) & 1 ? PL_YELLOW : PL_GREEN;
}

/*
 * Moves the clock of the second bucket on by the time for which the committed one has been full.
 * The clock comes last: who reads it meanwhile finds less in the bucket, never more.
 */
static inline __attribute__((always_inline)) void
pl_overflow(const struct pl_policy *policy, const struct pl_state *state, __u64 now_ns)
{
	__u64 seen = *(volatile __u64 *)state->full_ns;

	if (seen >= now_ns || __sync_val_compare_and_swap(state->full_ns, seen, now_ns) != seen)
		return;
	/* It was full a part of a nanosecond later: so much less flowed over. */
	*state->second_carry += *state->carry;
	*state->carry = 0;
	if (*state->second_carry >= policy->second.rate) {
		*state->second_carry -= policy->second.rate;
		__sync_fetch_and_add(state->second_full_ns, 1);
	}
	__sync_fetch_and_add(state->skipped_ns, now_ns - seen);
}

static inline __attribute__((always_inline)) int pl_committed(const struct pl_policy *policy,
							      const struct pl_state *state,
							      __u64 now_ns,
							      const struct pl_packet *packet)
{
	return pl_take(&policy->committed, state->full_ns, now_ns, packet, state->carry);
}

static inline __attribute__((always_inline)) int pl_second(const struct pl_policy *policy,
							   const struct pl_state *state,
							   __u64 now_ns,
							   const struct pl_packet *packet)
{
	return pl_take(&policy->second, state->second_full_ns, now_ns, packet, state->second_carry);
}

/* Colours a packet that comes with a colour, and charges it. */
static inline __attribute__((always_inline)) enum pl_colour
pl_colour(const struct pl_policy *policy, const struct pl_state *state, __u64 now_ns,
	  const struct pl_packet *packet, enum pl_colour incoming)
{
	__u64 clock_ns = now_ns;

	if (policy->kind == PL_TWO_RATE) {
		if (incoming == PL_RED || !pl_second(policy, state, now_ns, packet))
			return PL_RED;
		if (incoming == PL_YELLOW || !pl_committed(policy, state, now_ns, packet))
			return PL_YELLOW;
		return PL_GREEN;
	}
	if (policy->kind == PL_SINGLE_RATE) {
		pl_overflow(policy, state, now_ns);
		clock_ns = *(volatile __u64 *)state->skipped_ns;
	}
	if (incoming == PL_GREEN && pl_committed(policy, state, now_ns, packet))
		return PL_GREEN;
	if (policy->kind == PL_ONE_BUCKET || incoming == PL_RED)
		return PL_RED;
	return pl_second(policy, state, clock_ns, packet) ? PL_YELLOW : PL_RED;
}

#endif
