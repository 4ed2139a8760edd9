/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A policer on a cgroup or at tc: reads a packet, and acts by its colour. */
#ifndef TG_POLICE_PACKET_H
#define TG_POLICE_PACKET_H

#include "common/dscp.h"
#include "common/packet.h"
#include "police/intf.h"
#include "police/police_counters.h"

/* The colour of a packet; charges the packet. */
static __always_inline enum pl_colour
meter_skb(struct __sk_buff *skb, const struct pl_policy *policy, struct pl_meter *state,
	  struct tg_police_counters *c, __u64 now, __u32 bytes)
{
	struct pl_packet packet = {
	    .wire_bytes = metered_bytes(bytes),
	    .may_owe = skb->gso_size ? PL_OWE_HALF : PL_OWE_NOTHING,
	};

	return meter(policy, state, c, now, &packet, policy->aware ? tg_dscp(skb) : 0);
}

/* Applies the action of its colour to a packet. Only a program at tc may write to it. */
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

/* The same, counted by colour. */
static __always_inline enum tg_outcome act_on(struct __sk_buff *skb, const struct pl_policy *policy,
					      struct tg_police_counters *c, enum pl_colour colour,
					      __u32 bytes, int may_write, int is_alone)
{
	return act(skb, policy, count_colour(c, colour, bytes, is_alone), may_write);
}

#endif
