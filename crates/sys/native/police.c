// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "police/meter.h"

__u32 native_pl_take(const struct pl_bucket *bucket, __u64 *full_ns, __u64 now_ns,
		     const struct pl_packet *packet, __u64 *carry)
{
	const __u64 turn = 0;
	const struct pl_at at = {full_ns, &turn, turn};

	return pl_take(bucket, &at, now_ns, packet, carry);
}

/* A packet through a meter, as the programs do it. `carry`: of both buckets. */
__u32 native_pl_colour(const struct pl_policy *policy, struct pl_meter *meter, __u64 *carry,
		       __u64 now_ns, const struct pl_packet *packet, __u32 incoming)
{
	__u64 turn = *(volatile __u64 *)&meter->turn;
	struct pl_state state = {
	    .turn_now = &meter->turn,
	    .carry = &carry[0],
	    .second_carry = &carry[1],
	};
	enum pl_colour colour;

	if (!(turn & 1) && !pl_is_kept(policy, pl_side(meter, turn)))
		turn = pl_turn(policy, meter, &carry[0], &carry[1]);
	if (turn & 1)
		return PL_RED;
	state.side = pl_side(meter, turn);
	state.turn = turn;
	colour = pl_colour(policy, &state, now_ns, packet, incoming);
	return pl_counts(meter, turn) ? colour : PL_RED;
}

__u32 native_pl_incoming(const struct pl_policy *policy, __u8 dscp)
{
	return pl_incoming(policy, dscp);
}
