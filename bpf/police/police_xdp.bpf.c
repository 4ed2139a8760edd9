// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Scheme `police` for ingress of a device, at the earliest hook: in the driver, before the kernel
 * has made a packet of a frame. It has the maps of police.bpf.c and gives every frame the same
 * verdict as that program at tc; frame.h handles the differences between the two.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "common/exempt.h"
#include "common/frame.h"
#include "police/group.h"
#include "police/police_limit.h"

/* Whether a frame is exempt by its DSCP, or by its source. */
static __always_inline int is_exempt(struct xdp_md *ctx, const struct fr_frame *frame, __u64 dscps)
{
	struct tg_prefix key;

	if (frame->type == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (fr_load(ctx, frame->start, 0, &ip, sizeof(ip)))
			return 0;
		tg_key4(&key, ip.saddr);
	} else if (frame->type == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (fr_load(ctx, frame->start, 0, &ip, sizeof(ip)))
			return 0;
		tg_key6(&key, ip.saddr.in6_u.u6_addr32);
	} else {
		return 0;
	}
	return dscps >> (frame->tos >> 2) & 1 || tg_has_prefix(&key);
}

/* Applies the action of its colour to a frame. */
static __always_inline enum tg_outcome act(struct xdp_md *ctx, const struct fr_frame *frame,
					   const struct pl_policy *policy, enum pl_colour colour)
{
	__u8 action = policy->action[colour];

	if (action == PL_DROP)
		return TG_DROP_FULL;
	if (action == PL_CE) {
		if (!(frame->tos & TG_ECN_CE))
			return TG_DROP_FULL;
		fr_set_tos(ctx, frame, frame->tos | TG_ECN_CE);
		return TG_MARK;
	}
	if (action == PL_DSCP)
		fr_set_tos(ctx, frame, tg_with_dscp(frame->tos, policy->dscp[colour]));
	return TG_PASS;
}

/* The colour of a frame; charges the frame. */
static __always_inline enum pl_colour colour_of(const struct fr_frame *frame,
						const struct pl_policy *policy,
						struct pl_meter *state,
						struct tg_police_counters *c, __u64 now, __u64 flow)
{
	struct pl_packet packet = {
	    .wire_bytes = metered_bytes(frame->bytes),
	    .may_owe = frame->is_aggregate ? PL_OWE_HALF : PL_OWE_NOTHING,
	};

	if (policy->fair)
		return fair(TG_INGRESS, now, frame->bytes, flow);
	return meter(policy, state, c, now, &packet, frame->tos >> 2);
}

static __always_inline enum tg_outcome gate(struct xdp_md *ctx)
{
	const struct pl_policy *policy;
	const struct tg_group *group;
	struct tg_police_counters *c;
	enum tg_outcome outcome;
	struct fr_frame frame;
	struct pl_meter *meter;
	enum pl_colour colour;
	__u32 key = TG_INGRESS;
	struct tg_police_limit *l;
	__u64 now, flow = 0;

	l = limit_of(TG_INGRESS);
	meter = bpf_map_lookup_elem(&meters_of_limit, &key);
	c = bpf_map_lookup_elem(&counters, &key);
	group = bpf_map_lookup_elem(&group_of_limit, &key);
	if (!l || !meter || !c || !group)
		return TG_PASS;
	policy = &l->police[TG_INGRESS];
	if (!policy->committed.cost || !fr_read(ctx, &frame))
		return TG_PASS;
	if (has_exempt && is_exempt(ctx, &frame, l->common.exempt_dscps)) {
		count(c, TG_EXEMPT, frame.bytes, 1);
		return TG_PASS;
	}
	now = bpf_ktime_get_boot_ns();
	if (group->sample || policy->fair)
		flow = fl_hash(ctx, fr_load, frame.start, frame.type);
	if (group->sample)
		gr_count(TG_INGRESS, group->sample - 1, flow, frame.bytes);
	if (gr_drops(group)) {
		outcome = TG_DROP_EARLY;
	} else {
		colour = colour_of(&frame, policy, meter, c, now, flow);
		/* The compiler knows what fair() returns; the verifier needs this check. */
		barrier_var(colour);
		colour = count_colour(c, colour, frame.bytes, 1);
		outcome = act(ctx, &frame, policy, colour);
	}
	count_at(c, outcome, now, frame.bytes, 1);
	return outcome;
}

/* Also handles frames of several buffers: jumbo frames, and aggregates of a device. */
SEC("xdp.frags")
int police_xdp(struct xdp_md *ctx)
{
	return is_drop(gate(ctx)) ? XDP_DROP : XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
