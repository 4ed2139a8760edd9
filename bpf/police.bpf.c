// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The `police` scheme: a token bucket, or a meter of two, gives every packet a colour, and what
 * becomes of it is said for each. If nothing is said what finds no tokens is dropped. Nothing
 * waits.
 *
 * Both directions of a cgroup, or of a device. Directions are the workload's: for a device what
 * leaves by it is egress, for a port, behind which the workload is, what comes in by it.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "exempt_packet.h"
#include "group.h"
#include "intf.h"
#include "maps.h"
#include "packet.h"
#include "police_packet.h"

/* In every network namespace the loopback device is the first. */
#define LOOPBACK_IFINDEX 1

enum {
	RET_DROP,
	RET_PASS,
	RET_DROP_SLOW,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct tg_police_counters);
} counters SEC(".maps");

/* The device is a port. */
const volatile __u8 is_port = 0;

/* Of a packet whose first header is that of IP, or of the link. */
static __always_inline enum tg_outcome gate(struct __sk_buff *skb, enum tg_direction direction,
					    int from_ip)
{
	const struct pl_policy *policy;
	struct tg_police_counters *c;
	enum tg_outcome outcome;
	struct tg_queue *queue;
	enum pl_colour colour;
	struct tg_limit *l;
	__u32 key = direction, bytes;
	__u64 now;

	l = tg_limit_of(direction);
	queue = bpf_map_lookup_elem(&queues_of_limit, &key);
	c = bpf_map_lookup_elem(&counters, &key);
	if (!l || !queue || !c)
		return TG_PASS;
	policy = &l->police[direction];
	if (!policy->committed.cost)
		return TG_PASS;
	bytes = from_ip ? tg_wire_bytes(skb) : tg_frame_bytes(skb, skb->len);
	if (from_ip && skb->ifindex == LOOPBACK_IFINDEX && !(l->flags & TG_FLAG_LOOPBACK)) {
		count(c, TG_EXEMPT, bytes);
		return TG_PASS;
	}
	if (has_exempt && tg_is_exempt(skb, l->exempt.dscps, direction)) {
		count(c, TG_EXEMPT, bytes);
		return TG_PASS;
	}
	now = bpf_ktime_get_ns();
	if (gr_drops(skb, direction, bytes)) {
		outcome = TG_DROP_EARLY;
	} else {
		colour = meter(skb, policy, queue, c, now, bytes);
		outcome = act_on(skb, policy, c, colour, bytes, !from_ip);
	}
	count_at(c, outcome, now, bytes);
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
	/* Whoever comes next decides. */
	return is_drop(gate(skb, direction, 0)) ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

SEC("tcx/egress")
int police_out(struct __sk_buff *skb)
{
	return of_device(skb, is_port ? TG_INGRESS : TG_EGRESS);
}

SEC("tcx/ingress")
int police_in(struct __sk_buff *skb)
{
	return of_device(skb, is_port ? TG_EGRESS : TG_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
