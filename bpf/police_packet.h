/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a policer does with a packet: the colour that a meter gives, what is done for it, counters.
 */
#ifndef TG_POLICE_PACKET_H
#define TG_POLICE_PACKET_H

#include "dscp.h"
#include "intf.h"
#include "packet.h"

/* The colour of a packet, which is charged for it. */
static __always_inline enum pl_colour meter(struct __sk_buff *skb, const struct pl_policy *policy,
					    struct tg_queue *queue, struct tg_police_counters *c,
					    __u64 now, __u32 bytes)
{
	struct pl_packet packet = {
	    .wire_bytes = bytes < PL_MAX_PACKET_BYTES ? bytes : PL_MAX_PACKET_BYTES,
	    .may_owe = skb->gso_size ? PL_OWE_HALF : PL_OWE_NOTHING,
	};
	struct pl_state state = {
	    .full_ns = &queue->finish_ns,
	    .skipped_ns = &queue->skipped_ns,
	    .second_full_ns = &queue->second_full_ns,
	    .carry = &c->carry,
	    .second_carry = &c->second_carry,
	};
	enum pl_colour incoming = PL_GREEN;

	if (policy->aware)
		incoming = pl_incoming(policy, tg_dscp(skb));
	return pl_colour(policy, &state, now, &packet, incoming);
}

/* Does with a packet what is said for its colour. Only a program of tc may write to it. */
static __always_inline enum tg_outcome act(struct __sk_buff *skb, const struct pl_policy *policy,
					   enum pl_colour colour, int may_write)
{
	__u8 action = policy->action[colour];

	if (action == PL_DROP)
		return TG_DROP_FULL;
	if (action == PL_CE)
		return bpf_skb_ecn_set_ce(skb) ? TG_MARK : TG_DROP_FULL;
	if (action == PL_DSCP && may_write)
		tg_set_dscp(skb, policy->dscp[colour]);
	return TG_PASS;
}

static __always_inline int is_drop(enum tg_outcome outcome)
{
	return outcome == TG_DROP_FULL || outcome == TG_DROP_EARLY;
}

/* The same, counted by colour. */
static __always_inline enum tg_outcome act_on(struct __sk_buff *skb, const struct pl_policy *policy,
					      struct tg_police_counters *c, enum pl_colour colour,
					      __u32 bytes, int may_write)
{
	if (colour > PL_RED)
		colour = PL_RED;
	c->packets[colour]++;
	c->bytes[colour] += bytes;
	return act(skb, policy, colour, may_write);
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
