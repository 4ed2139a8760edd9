// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "meter.h"

__u32 native_pl_take(const struct pl_bucket *bucket, __u64 *full_ns, __u64 now_ns,
		     const struct pl_packet *packet, __u64 *carry)
{
	return pl_take(bucket, full_ns, now_ns, packet, carry);
}

/* State: both buckets, the time skipped, and what is carried of both. */
__u32 native_pl_colour(const struct pl_policy *policy, __u64 *state, __u64 now_ns,
		       const struct pl_packet *packet, __u32 incoming)
{
	struct pl_state all = {
	    .full_ns = &state[0],
	    .second_full_ns = &state[1],
	    .skipped_ns = &state[2],
	    .carry = &state[3],
	    .second_carry = &state[4],
	};

	return pl_colour(policy, &all, now_ns, packet, incoming);
}

__u32 native_pl_incoming(const struct pl_policy *policy, __u8 dscp)
{
	return pl_incoming(policy, dscp);
}
