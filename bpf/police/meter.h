/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Meters that colour packets: a pure header over (state, now, length). The model, with the rules of
 * the RFCs, is crates/core/src/meter.rs; a property test compares the two, bit by bit.
 *
 * A meter is two buckets of police.h, and needs no lock. A bucket gives tokens in one atomic step.
 * The RFCs differ only in the order of the buckets:
 *
 *   bucket    committed: green; else red
 *   srTCM     committed: green; else second, which runs by another clock: yellow; else red
 *   trTCM     second, or red; then committed: green; else yellow
 *   RFC 4115  committed: green; else second: yellow; else red
 *
 * In srTCM the overflow of the committed bucket fills the second one. So the clock of the second
 * bucket is the time for which the committed one has been full: it stops while that fills. Other
 * CPUs may take from a bucket between the two steps, as if their packets had come in between.
 *
 * A bucket is stored as a time at a rate, and its debt is in bytes. When the rate changes, the time
 * must change. Nobody notifies the program: the packet that finds a policy other than that of the
 * times converts them. So a meter has two sides. Packets use the side that `turn` names. The CPU
 * that converts makes `turn` odd, fills the other side, and makes it even again:
 *
 *   missing = used - earned                     bytes; both are counted since the limit began
 *   used    = what the old rate had earned when the old bucket would have been full
 *   earned  = what all rates had earned when the new policy came; user space says so
 *   full_ns = since_ns + (missing + burst - old burst) / rate
 *
 * So every rate counts for the time that it was in force, whether a packet came or not. It only
 * ever rounds the debt up, by a few bytes.
 *
 * A packet passes only if `turn` is the same as before the packet was charged. Then its charge came
 * before the conversion, and is part of it. If not, the charge may be lost with the old side, and
 * the packet is refused. This happens only to packets in progress on other CPUs while a rate
 * changes. If the converting CPU is interrupted, packets are refused for that time. Nobody waits,
 * and nothing is given twice.
 *
 * A meter only moves to later policies. A packet whose CPU stalled while the policy changed has an
 * older one than the meter: by that policy the debt of the new one would be none. It is refused,
 * too.
 *
 * The clock is CLOCK_BOOTTIME, because leases end by it: a policy begins when the one before ends,
 * also while the host sleeps, and no time is ever converted.
 */
#ifndef TG_METER_H
#define TG_METER_H

#include "police/police.h"

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
	/* Mark ECN congestion experienced, or drop what is not ECN-capable. */
	PL_CE,
	/* Set another DSCP. */
	PL_DSCP,
};

/* The policy of a policer in one direction. */
struct pl_policy {
	struct pl_bucket committed;
	struct pl_bucket second;
	/* Bit d is set if DSCP d comes in as yellow, or red. */
	__u64 yellow_dscps;
	__u64 red_dscps;
	__u8 kind;
	/* Whether the incoming colour of a packet counts. */
	__u8 aware;
	/* The action, by colour. */
	__u8 action[PL_COLOURS];
	__u8 dscp[PL_COLOURS];
	/* How the depth of the second bucket was given: for user space. */
	__u32 second_given;
	/* Whether flows have equal parts of the committed bucket (fair_police.h). */
	__u32 fair;
	/* When it came into force, CLOCK_BOOTTIME; always later than the one before. */
	__u64 since_ns;
};

/* A bucket whose times a side keeps; a rate of 0: none yet. */
struct pl_kept {
	__u64 rate;
	__u64 burst;
	__u64 earned_bytes;
};

/* The times of a meter's buckets, and the policy to which they belong. */
struct pl_side {
	__u64 full_ns;
	/* For how long the committed bucket has been full since the limit began. */
	__u64 skipped_ns;
	__u64 second_full_ns;
	__u64 since_ns;
	struct pl_kept committed;
	struct pl_kept second;
	__u64 kind;
};

/* A meter. It is to a policer what a tg_queue is to `pace`, `nrm` and `edt`. */
struct pl_meter {
	__u64 turn;
	struct pl_side side[2];
};

/* The state of a meter, as a packet reads it. */
struct pl_state {
	struct pl_side *side;
	/* The turn of the meter, and the turn in which it had that side. */
	const __u64 *turn_now;
	__u64 turn;
	/* Remainders of this CPU. */
	__u64 *carry;
	__u64 *second_carry;
};

static inline __attribute__((always_inline)) struct pl_side *pl_side(struct pl_meter *meter,
								     __u64 turn)
{
	return &meter->side[turn >> 1 & 1];
}

/* Whether the times of a side belong to a policy. */
static inline __attribute__((always_inline)) int pl_is_kept(const struct pl_policy *policy,
							    const struct pl_side *side)
{
	return *(const volatile __u64 *)&side->since_ns == policy->since_ns &&
	       *(const volatile __u64 *)&side->committed.rate == policy->committed.rate;
}

/* The bytes used if a bucket is full at `at_ns` of a clock that began to count at `from_ns`. */
static inline __attribute__((always_inline)) __u64
pl_used_bytes(const struct pl_kept *kept, __u64 at_ns, __u64 from_ns, __u64 carry)
{
	if (!kept->rate || at_ns <= from_ns)
		return kept->earned_bytes;
	return kept->earned_bytes + pl_earned_bytes(kept->rate, at_ns - from_ns) +
	       carry / PL_UNITS_PER_BYTE + PL_EARNED_ERROR_BYTES;
}

/* The time to fill a bucket that lacks what another bucket of another depth lacked. */
static inline __attribute__((always_inline)) __u64
pl_turned_ns(const struct pl_bucket *bucket, const struct pl_kept *was, __u64 missing_bytes)
{
	__u64 most = was->burst / PL_UNITS_PER_BYTE + PL_MAX_PACKET_BYTES + 1;
	__u64 units, less;

	if (!was->rate || !bucket->rate)
		return 0;
	units = (missing_bytes < most ? missing_bytes : most) * PL_UNITS_PER_BYTE;
	if (bucket->burst >= was->burst) {
		units += bucket->burst - was->burst;
	} else {
		/* The rest of its tokens does not fit. */
		less = was->burst - bucket->burst;
		units = units > less ? units - less : 0;
	}
	return (units + bucket->rate - 1) / bucket->rate;
}

static inline __attribute__((always_inline)) void pl_keep(struct pl_kept *kept,
							  const struct pl_bucket *bucket)
{
	kept->rate = bucket->rate;
	kept->burst = bucket->burst;
	kept->earned_bytes = bucket->earned_bytes;
}

/* Fills a side from another one, under a policy. */
static inline __attribute__((always_inline)) void pl_turn_over(const struct pl_policy *policy,
							       const struct pl_side *was,
							       struct pl_side *side, __u64 *carry,
							       __u64 *second_carry)
{
	__u64 used = pl_used_bytes(&was->committed, was->full_ns, was->since_ns, *carry);
	__u64 earned = policy->committed.earned_bytes, missing, over, second;

	side->skipped_ns = was->skipped_ns;
	if (!was->committed.rate) {
		/* The first policy. */
		side->full_ns = was->full_ns;
		side->second_full_ns = was->second_full_ns;
	} else {
		missing = used > earned ? used - earned : 0;
		over = earned > used ? earned - used : 0;
		side->full_ns =
		    policy->since_ns + pl_turned_ns(&policy->committed, &was->committed, missing);
		if (was->kind == PL_SINGLE_RATE) {
			second = 0;
			if (was->second_full_ns > was->skipped_ns)
				second = pl_earned_bytes(was->second.rate,
							 was->second_full_ns - was->skipped_ns) +
					 *second_carry / PL_UNITS_PER_BYTE + PL_EARNED_ERROR_BYTES;
			second = second > over ? second - over : 0;
		} else {
			second = pl_used_bytes(&was->second, was->second_full_ns, was->since_ns,
					       *second_carry);
			earned = policy->second.earned_bytes;
			second = second > earned ? second - earned : 0;
		}
		side->second_full_ns =
		    (policy->kind == PL_SINGLE_RATE ? side->skipped_ns : policy->since_ns) +
		    pl_turned_ns(&policy->second, &was->second, second);
	}
	*carry = 0;
	*second_carry = 0;
	pl_keep(&side->committed, &policy->committed);
	pl_keep(&side->second, &policy->second);
	side->kind = policy->kind;
	side->since_ns = policy->since_ns;
}

/* Whether a side belongs to a policy later than this one. */
static inline __attribute__((always_inline)) int pl_is_late(const struct pl_policy *policy,
							    const struct pl_side *side)
{
	return policy->since_ns < *(const volatile __u64 *)&side->since_ns;
}

/*
 * Converts a meter to a policy. Returns its turn; odd: another CPU is converting, or the meter has
 * a later policy.
 */
static inline __attribute__((always_inline)) __u64
pl_turn(const struct pl_policy *policy, struct pl_meter *meter, __u64 *carry, __u64 *second_carry)
{
	__u64 turn = *(volatile __u64 *)&meter->turn;

	if (turn & 1 || pl_is_late(policy, pl_side(meter, turn)) ||
	    __sync_val_compare_and_swap(&meter->turn, turn, turn + 1) != turn)
		return 1;
	pl_turn_over(policy, pl_side(meter, turn), pl_side(meter, turn + 2), carry, second_carry);
	__sync_fetch_and_add(&meter->turn, 1);
	return turn + 2;
}

/* Whether a charge to a side in a turn counts: see above. Call it after an atomic operation. */
static inline __attribute__((always_inline)) int pl_counts(const struct pl_meter *meter, __u64 turn)
{
	return *(const volatile __u64 *)&meter->turn == turn;
}

static inline __attribute__((always_inline)) enum pl_colour
pl_incoming(const struct pl_policy *policy, __u8 dscp)
{
	if (policy->red_dscps >> (dscp & 63) & 1)
		return PL_RED;
	return policy->yellow_dscps >> (dscp & 63) & 1 ? PL_YELLOW : PL_GREEN;
}

/*
 * Advances the clock of the second bucket by the time for which the committed one has been full.
 * The clock is written last: a CPU that reads it meanwhile finds less in the bucket, never more.
 */
static inline __attribute__((always_inline)) void
pl_overflow(const struct pl_policy *policy, const struct pl_state *state, __u64 now_ns)
{
	struct pl_side *side = state->side;
	__u64 seen = *(volatile __u64 *)&side->full_ns;

	if (seen >= now_ns || __sync_val_compare_and_swap(&side->full_ns, seen, now_ns) != seen)
		return;
	/* It was full a part of a nanosecond later: so much less overflowed. */
	*state->second_carry += *state->carry;
	*state->carry = 0;
	if (*state->second_carry >= policy->second.rate) {
		*state->second_carry -= policy->second.rate;
		__sync_fetch_and_add(&side->second_full_ns, 1);
	}
	__sync_fetch_and_add(&side->skipped_ns, now_ns - seen);
}

static inline __attribute__((always_inline)) int pl_committed(const struct pl_policy *policy,
							      const struct pl_state *state,
							      __u64 now_ns,
							      const struct pl_packet *packet)
{
	const struct pl_at at = {&state->side->full_ns, state->turn_now, state->turn};

	return pl_take(&policy->committed, &at, now_ns, packet, state->carry);
}

static inline __attribute__((always_inline)) int pl_second(const struct pl_policy *policy,
							   const struct pl_state *state,
							   __u64 now_ns,
							   const struct pl_packet *packet)
{
	const struct pl_at at = {&state->side->second_full_ns, state->turn_now, state->turn};

	return pl_take(&policy->second, &at, now_ns, packet, state->second_carry);
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
		clock_ns = *(volatile __u64 *)&state->side->skipped_ns;
	}
	if (incoming == PL_GREEN && pl_committed(policy, state, now_ns, packet))
		return PL_GREEN;
	if (policy->kind == PL_ONE_BUCKET || incoming == PL_RED)
		return PL_RED;
	return pl_second(policy, state, clock_ns, packet) ? PL_YELLOW : PL_RED;
}

#endif
