// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Scheme `police`: a token bucket, or a meter of two, gives every packet a colour, and the policy
 * has an action for each. By default packets without tokens are dropped. Nothing waits.
 *
 * Both directions of a cgroup, or of a device. Directions are the workload's: egress of a device is
 * egress; at a port, behind which the workload is, ingress of the device is egress.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "common/exempt_packet.h"
#include "police/group.h"
#include "common/packet.h"
#include "police/police_limit.h"
#include "police/police_packet.h"
#include "common/wire_bytes.h"

/* In every network namespace the loopback device is the first. */
#define LOOPBACK_IFINDEX 1

enum {
	RET_DROP,
	RET_PASS,
	RET_DROP_SLOW,
};

/* The device is a port. */
const volatile __u8 is_port = 0;

/* The hash of a packet's flow. A separate function: see tg_parse. */
__noinline __u64 flow_of(struct __sk_buff *skb)
{
	return fl_hash(skb, tg_load_from, 0, skb->protocol);
}

/* Counts a packet for the group, if there is one, and returns whether to drop it at random. */
static __always_inline int group_drops(struct __sk_buff *skb, __u32 direction, __u32 bytes)
{
	const struct tg_group *group = bpf_map_lookup_elem(&group_of_limit, &direction);

	if (!group)
		return 0;
	if (group->sample)
		gr_count(direction, group->sample - 1, flow_of(skb), bytes);
	return gr_drops(group);
}

/* For a packet whose first header is that of IP, or of the link. */
static __always_inline enum tg_outcome gate(struct __sk_buff *skb, enum tg_direction direction,
					    int from_ip)
{
	const struct pl_policy *policy;
	struct tg_police_counters *c;
	enum tg_outcome outcome;
	struct pl_meter *meter;
	enum pl_colour colour;
	struct tg_police_limit *l;
	const int is_alone = !from_ip || direction == TG_INGRESS;
	__u32 key = direction, bytes;
	__u64 now;

	l = limit_of(direction);
	meter = bpf_map_lookup_elem(&meters_of_limit, &key);
	c = bpf_map_lookup_elem(&counters, &key);
	if (!l || !meter || !c)
		return TG_PASS;
	policy = &l->police[direction];
	if (!policy->committed.cost)
		return TG_PASS;
	bytes = from_ip ? tg_wire_bytes(skb, direction) : tg_frame_bytes(skb, skb->len);
	if (from_ip && skb->ifindex == LOOPBACK_IFINDEX && !(l->common.flags & TG_FLAG_LOOPBACK)) {
		count(c, TG_EXEMPT, bytes, is_alone);
		return TG_PASS;
	}
	if (has_exempt && tg_is_exempt(skb, l->common.exempt_dscps, direction)) {
		count(c, TG_EXEMPT, bytes, is_alone);
		return TG_PASS;
	}
	now = bpf_ktime_get_boot_ns();
	if (group_drops(skb, direction, bytes)) {
		outcome = TG_DROP_EARLY;
	} else {
		if (policy->fair)
			colour = fair(direction, now, bytes, flow_of(skb));
		else
			colour = meter_skb(skb, policy, meter, c, now, bytes);
		/* The compiler knows what fair() returns; the verifier needs this check. */
		barrier_var(colour);
		outcome = act_on(skb, policy, c, colour, bytes, !from_ip, is_alone);
	}
	count_at(c, outcome, now, bytes, is_alone);
	return outcome;
}

static __always_inline int of_cgroup(struct __sk_buff *skb, enum tg_direction direction)
{
	const int drop = direction == TG_EGRESS ? RET_DROP_SLOW : RET_DROP;

	if (skb->mark == TG_DEAD_MARK)
		return drop;
	if (is_drop(gate(skb, direction, 1))) {
		skb->mark = TG_DEAD_MARK;
		return drop;
	}
	return RET_PASS;
}

SEC("cgroup_skb/egress")
int police_egress(struct __sk_buff *skb)
{
	return of_cgroup(skb, TG_EGRESS);
}

SEC("cgroup_skb/ingress")
int police_ingress(struct __sk_buff *skb)
{
	return of_cgroup(skb, TG_INGRESS);
}

static __always_inline int of_device(struct __sk_buff *skb, enum tg_direction direction)
{
	/* The next program decides. */
	return is_drop(gate(skb, direction, 0)) ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

/*
 * The verdict on egress where flows have equal parts. A sender on this host would see a drop, as by
 * a full queue. TCP with nothing in flight then waits 200 ms for a timer; behind a router it would
 * find the loss by ACKs. So the packet is lost silently: it is sent to a device that cannot exist,
 * and the kernel drops it without a signal.
 */
static __always_inline int quietly(int verdict, enum tg_direction direction)
{
	const struct tg_police_limit *l;

	if (verdict != TC_ACT_SHOT)
		return verdict;
	l = limit_of(direction);
	return l && l->police[direction].fair ? bpf_redirect(0, 0) : verdict;
}

SEC("tcx/egress")
int police_out(struct __sk_buff *skb)
{
	const enum tg_direction direction = is_port ? TG_INGRESS : TG_EGRESS;

	return quietly(of_device(skb, direction), direction);
}

SEC("tcx/ingress")
int police_in(struct __sk_buff *skb)
{
	return of_device(skb, is_port ? TG_EGRESS : TG_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
