/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A policer at any hook: the colour that its meter gives a packet, and its counters. */
#ifndef TG_POLICE_COUNTERS_H
#define TG_POLICE_COUNTERS_H

#include <bpf/bpf_helpers.h>

#include "common/counters.h"
#include "police/intf.h"

/* A policy other than that of the packet before. A separate function: see tg_parse. */
__noinline __u64 turn_meter(const struct pl_policy *policy, struct pl_meter *meter, __u64 *carry,
			    __u64 *second_carry)
{
	if (!policy || !meter || !carry || !second_carry)
		return 1;
	return pl_turn(policy, meter, carry, second_carry);
}

/* The turn of a meter whose side has this policy; odd: none yet, or no more. */
static __always_inline __u64 turn_of(const struct pl_policy *policy, struct pl_meter *meter,
				     struct tg_police_counters *c)
{
	__u64 turn = *(volatile __u64 *)&meter->turn;

	if (turn & 1 || pl_is_kept(policy, pl_side(meter, turn)))
		return turn;
	return turn_meter(policy, meter, &c->carry, &c->second_carry);
}

/* The colour of a packet with this DSCP; charges the packet. */
static __always_inline enum pl_colour meter(const struct pl_policy *policy, struct pl_meter *meter,
					    struct tg_police_counters *c, __u64 now,
					    const struct pl_packet *packet, __u8 dscp)
{
	__u64 turn = turn_of(policy, meter, c);
	struct pl_state state = {
	    .side = pl_side(meter, turn),
	    .turn_now = &meter->turn,
	    .turn = turn,
	    .carry = &c->carry,
	    .second_carry = &c->second_carry,
	};
	enum pl_colour incoming = PL_GREEN, colour;

	if (turn & 1)
		return PL_RED;
	if (policy->aware)
		incoming = pl_incoming(policy, dscp);
	colour = pl_colour(policy, &state, now, packet, incoming);
	return pl_counts(meter, turn) ? colour : PL_RED;
}

/* The bytes of a packet as a bucket counts them. */
static __always_inline __u32 metered_bytes(__u32 bytes)
{
	return bytes < PL_MAX_PACKET_BYTES ? bytes : PL_MAX_PACKET_BYTES;
}

static __always_inline int is_drop(enum tg_outcome outcome)
{
	return outcome == TG_DROP_FULL || outcome == TG_DROP_EARLY;
}

/* Counts a packet by its colour. `is_alone`: see tg_add, here and below. */
static __always_inline enum pl_colour count_colour(struct tg_police_counters *c,
						   enum pl_colour colour, __u32 bytes, int is_alone)
{
	if (colour > PL_RED)
		colour = PL_RED;
	tg_add(&c->packets[colour], 1, is_alone);
	tg_add(&c->bytes[colour], bytes, is_alone);
	return colour;
}

static __always_inline void count(struct tg_police_counters *c, enum tg_outcome outcome,
				  __u32 bytes, int is_alone)
{
	tg_add(&c->common.packets[outcome], 1, is_alone);
	tg_add(&c->common.bytes[outcome], bytes, is_alone);
}

/* The same for a packet that was not exempt. */
static __always_inline void count_at(struct tg_police_counters *c, enum tg_outcome outcome,
				     __u64 now, __u32 bytes, int is_alone)
{
	if (outcome != TG_PASS)
		c->common.last_ns[outcome] = now;
	count(c, outcome, bytes, is_alone);
}

#endif
