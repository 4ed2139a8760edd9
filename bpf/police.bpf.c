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
#include "fair_police.h"
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

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct fp_table);
} flows_of_police SEC(".maps");

/* The device is a port. */
const volatile __u8 is_port = 0;

static long add_phantom(__u32 i, void *ctx)
{
	struct fp_table *table = *(struct fp_table **)ctx;

	if (i >= FP_SETS * FP_WAYS)
		return 1;
	fp_add(&table->sum, &table->set[i / FP_WAYS][i % FP_WAYS]);
	return 0;
}

/*
 * The colour of a packet where flows have equal parts of the bucket: one that does not fit its
 * flow's part is red, and charged to nobody. A function of its own: see tg_parse.
 */
__noinline int fair(struct __sk_buff *skb, __u32 direction, __u64 now, __u32 bytes)
{
	struct fp_table *table = bpf_map_lookup_elem(&flows_of_police, &direction);
	struct tg_queue *queue = bpf_map_lookup_elem(&queues_of_limit, &direction);
	struct tg_police_counters *c = bpf_map_lookup_elem(&counters, &direction);
	const struct pl_bucket *bucket;
	struct pl_packet packet;
	struct fp_fit fit;
	struct tg_limit *l;
	__u64 deficit;
	__u32 key = 0;

	l = bpf_map_lookup_elem(&limit, &key);
	if (!l || !table || !queue || !c || direction >= TG_DIRECTIONS)
		return PL_GREEN;
	bucket = &l->police[direction].committed;
	packet.wire_bytes = bytes < PL_MAX_PACKET_BYTES ? bytes : PL_MAX_PACKET_BYTES;
	packet.may_owe = PL_OWE_ALL;
	deficit = fp_less(*(volatile __u64 *)&queue->finish_ns, now);
	if (fp_begin_turn(bucket, table, now)) {
		bpf_loop(FP_SETS * FP_WAYS, add_phantom, &table, 0);
		fp_add(&table->sum, &table->others);
		fp_end_turn(table, deficit);
	}
	if (!fp_fits(bucket, table, now, deficit, gr_flow(skb), packet.wire_bytes, &fit) ||
	    !pl_take(bucket, &queue->finish_ns, now, &packet, &c->carry))
		return PL_RED;
	fp_charge(&fit);
	return PL_GREEN;
}

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
	__u32 key = 0, bytes;
	__u64 now;

	l = bpf_map_lookup_elem(&limit, &key);
	key = direction;
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
		if (policy->fair)
			colour = fair(skb, direction, now, bytes);
		else
			colour = meter(skb, policy, queue, c, now, bytes);
		/* The compiler knows what fair() returns; the verifier must be told. */
		barrier_var(colour);
		if (colour > PL_RED)
			colour = PL_RED;
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

/*
 * The verdict on a packet that leaves, where flows have equal parts. A sender on this host would be
 * told of a drop, as by a full queue, and TCP that has nothing on the way then waits 200 ms for a
 * timer instead of finding the loss as behind a router. So the packet gets lost: sent to a device
 * that cannot be, which the kernel drops and says nothing of.
 */
static __always_inline int quietly(int verdict, enum tg_direction direction)
{
	const struct tg_limit *l;
	__u32 key = 0;

	if (verdict != TC_ACT_SHOT)
		return verdict;
	l = bpf_map_lookup_elem(&limit, &key);
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
