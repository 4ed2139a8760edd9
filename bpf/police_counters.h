/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a policer knows of a packet of any hook: the colour that its meter gives, its counters. */
#ifndef TG_POLICE_COUNTERS_H
#define TG_POLICE_COUNTERS_H

#include <bpf/bpf_helpers.h>

#include "intf.h"

/* The colour of a packet that comes with a code point; it is charged for it. */
static __always_inline enum pl_colour meter(const struct pl_policy *policy, struct tg_queue *queue,
					    struct tg_police_counters *c, __u64 now,
					    const struct pl_packet *packet, __u8 dscp)
{
	struct pl_state state = {
	    .full_ns = &queue->finish_ns,
	    .skipped_ns = &queue->skipped_ns,
	    .second_full_ns = &queue->second_full_ns,
	    .carry = &c->carry,
	    .second_carry = &c->second_carry,
	};
	enum pl_colour incoming = PL_GREEN;

	if (policy->aware)
		incoming = pl_incoming(policy, dscp);
	return pl_colour(policy, &state, now, packet, incoming);
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

/* Counts a packet by its colour. */
static __always_inline enum pl_colour count_colour(struct tg_police_counters *c,
						   enum pl_colour colour, __u32 bytes)
{
	if (colour > PL_RED)
		colour = PL_RED;
	c->packets[colour]++;
	c->bytes[colour] += bytes;
	return colour;
}

static __always_inline void count(struct tg_police_counters *c, enum tg_outcome outcome,
				  __u32 bytes)
{
	c->common.packets[outcome]++;
	c->common.bytes[outcome] += bytes;
}

/* The same of a packet that was not exempt. */
static __always_inline void count_at(struct tg_police_counters *c, enum tg_outcome outcome,
				     __u64 now, __u32 bytes)
{
	if (outcome != TG_PASS)
		c->common.last_ns[outcome] = now;
	count(c, outcome, bytes);
}

#endif
