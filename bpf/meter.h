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
 *
 * A bucket is a time at a rate, and its debt is bytes: when the rate changes, the time must. Nobody
 * tells the program; the packet that finds another policy than the one the times were kept under
 * turns them over. So a meter has two sides. Packets use the one that `turn` names; who turns makes
 * `turn` odd, fills the other side, and makes it even again:
 *
 *   missing = used - earned                     bytes; both are counted since the limit began
 *   used    = what the old rate had earned when the old bucket would have been full
 *   earned  = what all rates had earned when the new policy came; user space says so
 *   full_ns = since_ns + (missing + burst - old burst) / rate
 *
 * That counts every rate for the time that it was in force, whether a packet met it or not. It only
 * ever rounds the debt up, by a few bytes.
 *
 * A packet passes only if `turn` is still what it was before the packet was charged. Then its
 * charge came before the turn, and is in what is turned over. If not, the charge may be lost with
 * the old side, and the packet is refused: it is one of those that happen to be under way on other
 * CPUs while a rate changes. Who turns may be interrupted, and packets are refused for as long.
 * Nobody waits, and nothing is given twice.
 *
 * A meter turns forward only. A packet whose CPU stood still while the policy changed has an older
 * one than the meter: by its books the debt of the new one would be none. It is refused, too.
 *
 * The clock is CLOCK_BOOTTIME, by which a lent rate ends: a policy begins when the one before ends,
 * also while the host sleeps, and no time is ever converted.
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
	/* When it came into force, CLOCK_BOOTTIME; always later than the one before. */
	__u64 since_ns;
};

/* A bucket whose times a side keeps; a rate of 0: none yet. */
struct pl_kept {
	__u64 rate;
	__u64 burst;
	__u64 earned_bytes;
};

/* The times of a meter's buckets, and the policy under which they were kept. */
struct pl_side {
	__u64 full_ns;
	/* For how long the committed bucket has been full, ever. */
	__u64 skipped_ns;
	__u64 second_full_ns;
	__u64 since_ns;
	struct pl_kept committed;
	struct pl_kept second;
	__u64 kind;
};

/* A meter; it lies where other schemes have a tg_queue. */
struct pl_meter {
	__u64 turn;
	struct pl_side side[2];
};

/* The state of a meter, as a packet finds it. */
struct pl_state {
	struct pl_side *side;
	/* The meter's, and the one in which it had that side. */
	const __u64 *turn_now;
	__u64 turn;
	/* This CPU's. */
	__u64 *carry;
	__u64 *second_carry;
};

static inline __attribute__((always_inline)) struct pl_side *pl_side(struct pl_meter *meter,
								     __u64 turn)
{
	return &meter->side[turn >> 1 & 1];
}

/* Whether the times of a side are those of a policy. */
static inline __attribute__((always_inline)) int pl_is_kept(const struct pl_policy *policy,
							    const struct pl_side *side)
{
	return *(const volatile __u64 *)&side->since_ns == policy->since_ns &&
	       *(const volatile __u64 *)&side->committed.rate == policy->committed.rate;
}

/* What had been used when a bucket is full at `at_ns` of a clock that began to count at `from_ns`.
 */
static inline __attribute__((always_inline)) __u64
pl_used_bytes(const struct pl_kept *kept, __u64 at_ns, __u64 from_ns, __u64 carry)
{
	if (!kept->rate || at_ns <= from_ns)
		return kept->earned_bytes;
	return kept->earned_bytes + pl_earned_bytes(kept->rate, at_ns - from_ns) +
	       carry / PL_UNITS_PER_BYTE + PL_EARNED_ERROR_BYTES;
}

/* How long a bucket takes to fill in which so much was missing of another's depth. */
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
		/* Of what was in it the rest does not fit. */
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

/* Fills a side with what another one says, under a policy. */
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

/* Whether a side is kept under a policy that came after this one. */
static inline __attribute__((always_inline)) int pl_is_late(const struct pl_policy *policy,
							    const struct pl_side *side)
{
	return policy->since_ns < *(const volatile __u64 *)&side->since_ns;
}

/*
 * Turns a meter over to a policy. Returns its turn; odd: another CPU is at it, or it has been
 * turned to a later policy.
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

/* Whether what was charged to a side in a turn counts: see above. After an atomic operation. */
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
 * Moves the clock of the second bucket on by the time for which the committed one has been full.
 * The clock comes last: who reads it meanwhile finds less in the bucket, never more.
 */
static inline __attribute__((always_inline)) void
pl_overflow(const struct pl_policy *policy, const struct pl_state *state, __u64 now_ns)
{
	struct pl_side *side = state->side;
	__u64 seen = *(volatile __u64 *)&side->full_ns;

	if (seen >= now_ns || __sync_val_compare_and_swap(&side->full_ns, seen, now_ns) != seen)
		return;
	/* It was full a part of a nanosecond later: so much less flowed over. */
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
