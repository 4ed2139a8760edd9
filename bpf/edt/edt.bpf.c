// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Scheme `edt`: writes a departure time on each packet, and the `fq` qdisc of its device keeps it
 * until then.
 *
 * Three hooks, of which one limit uses one: egress of a cgroup, egress of a device, and ingress of
 * a port (what a virtual machine sends). At a port the time must be marked as a delivery time, or
 * forwarding would clear it. If a packet already has a time (TCP's own pacing, an inner limit), the
 * later one counts.
 *
 * TCP of this host is held back: its queued packets are charged to its socket until they leave.
 * Other traffic is dropped beyond the horizon. So is everything where no fq keeps packets, as
 * schedules run ahead of departures there.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "common/counters.h"
#include "common/counters_map.h"
#include "edt/edt.h"
#include "edt/intf.h"
#include "common/epoch.h"
#include "common/exempt_packet.h"
#include "common/flow.h"
#include "common/intf.h"
#include "common/maps.h"
#include "common/packet.h"
#include "common/wire_bytes.h"

/* In every network namespace the loopback device is the first. */
#define LOOPBACK_IFINDEX 1
/* A socket's own departure time that is later than this is of another clock. */
#define MAX_OWN_NS 10000000000ULL

enum {
	RET_DROP_SLOW = 2,
	RET_PASS = 1,
};

enum place {
	CGROUP,
	DEVICE,
	PORT,
};

/* Only that of egress is used. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct tg_edt_queue);
} queues_of_limit SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, EDT_FLOWS);
	__type(key, __u32);
	__type(value, struct edt_flow);
} flows SEC(".maps");

/* The slot of the packet's flow. A separate function: see tg_parse. */
__noinline __u32 flow_place(struct __sk_buff *skb)
{
	return fl_hash(skb, tg_load_from, 0, skb->protocol) % EDT_FLOWS;
}

/* TCP small queues hold the sender back: TCP, of a socket of this host. */
static __always_inline int is_held(struct __sk_buff *skb, __u8 protocol, enum place place)
{
	struct bpf_sock *sk;

	if (place == PORT || protocol != IPPROTO_TCP || !skb->sk)
		return 0;
	sk = bpf_sk_fullsock(skb->sk);
	return sk && sk->protocol == IPPROTO_TCP;
}

/* Counts the flows, and updates the fair share of each. */
static __always_inline void share(const struct vq_conf *conf, struct tg_edt_queue *edt,
				  struct edt_flow *flow, const struct edt_look *look, __u64 now,
				  __u32 bytes)
{
	struct tg_queue *queue = &edt->common;
	/* Numbered from one, so that a new slot has been seen in none. */
	__u32 epoch = queue->epoch + 1;
	__u64 ahead = now + edt_lead_ns(edt->latest_ns, now);
	__u64 finish = queue->finish_ns;
	struct fs_sharers sharers;
	struct fs_epoch ended;
	int wants, counts;
	__u64 largest;

	if (bytes > edt->largest_bytes)
		edt->largest_bytes = bytes;
	wants = look->busy && flow->room_epoch != epoch;
	counts = (look->busy || bytes > VQ_SMALL_BYTES) && flow->epoch != epoch;
	if ((wants || counts) && ep_enter(queue)) {
		epoch = queue->epoch + 1;
		if (counts && flow->epoch != epoch) {
			flow->epoch = epoch;
			queue->flows++;
		}
		/* Room is made for a flow that wants it, not for a packet now and then. */
		if (wants && flow->room_epoch != epoch) {
			flow->room_epoch = epoch;
			if (queue->flows > queue->flows_before) {
				fs_flows(&sharers, queue->flows);
				queue->share = fs_make_room(queue->share, &sharers);
			}
		}
		ep_leave(queue);
	}
	if (!ep_end(queue, now, &ended))
		return;
	/* Two rounds of the largest packet show every flow. */
	largest = fs_max(fs_min(edt->largest_bytes, VQ_MAX_PACKET_BYTES), 2 * EDT_FRAME_BYTES);
	ended.burst_ns = vq_time_ns(largest, conf->cost);
	ended.backlog_ns = finish > ahead ? finish - ahead : 0;
	ended.rtt_ns = 0;
	ep_take_flows(queue, &ended.sharers);
	ep_next(queue, &ended);
	edt->largest_bytes = 0;
}

/* Writes the departure time of the packet. */
static __always_inline void stamp(struct __sk_buff *skb, __u64 departure, __u64 now,
				  enum place place)
{
	__u64 own;

	if (departure <= now)
		return;
	if (place == PORT) {
		bpf_skb_set_tstamp(skb, departure, BPF_SKB_TSTAMP_DELIVERY_MONO);
		return;
	}
	own = skb->tstamp;
	if (own < departure || own > now + MAX_OWN_NS)
		skb->tstamp = departure;
}

static __always_inline void count(struct tg_counters *c, enum place place, enum tg_outcome outcome,
				  __u32 bytes)
{
	tg_add(&c->packets[outcome], 1, place != CGROUP);
	tg_add(&c->bytes[outcome], bytes, place != CGROUP);
}

/* The rate has changed since the last packet. A separate function: see tg_parse. */
__noinline int follow_rate(const struct vq_conf *conf, struct tg_queue *queue, __u64 now)
{
	if (conf && queue)
		ep_follow_rate(conf, queue, 0, now);
	return 0;
}

static __always_inline enum tg_outcome gate(struct __sk_buff *skb, enum place place)
{
	struct tg_headers headers;
	const struct vq_conf *conf;
	struct edt_class class;
	struct edt_flow *flow;
	struct edt_look look;
	struct tg_counters *c;
	struct tg_edt_queue *edt;
	struct tg_queue *queue;
	enum vq_verdict verdict;
	struct tg_limit *l;
	__u64 now, cost;
	__u32 key = 0, bytes, place_of_flow, carry;
	int held;

	l = tg_limit_of(0, TG_EGRESS);
	edt = bpf_map_lookup_elem(&queues_of_limit, &key);
	c = bpf_map_lookup_elem(&counters, &key);
	if (!l || !edt || !c)
		return TG_PASS;
	queue = &edt->common;
	conf = &l->queue[TG_EGRESS];
	if (!conf->cost)
		return TG_PASS;
	bytes = place == CGROUP ? tg_wire_bytes(skb, TG_EGRESS) : tg_frame_bytes(skb, skb->len);
	if (place == CGROUP && skb->ifindex == LOOPBACK_IFINDEX && !(l->flags & TG_FLAG_LOOPBACK)) {
		count(c, place, TG_EXEMPT, bytes);
		return TG_PASS;
	}
	if (has_exempt && tg_is_exempt(skb, l->exempt_dscps, TG_EGRESS)) {
		count(c, place, TG_EXEMPT, bytes);
		return TG_PASS;
	}
	tg_parse(skb, &headers);
	place_of_flow = flow_place(skb);
	flow = bpf_map_lookup_elem(&flows, &place_of_flow);
	if (!flow)
		return TG_PASS;
	held = is_held(skb, headers.protocol, place);

	now = bpf_ktime_get_ns();
	if (queue->cost != conf->cost)
		follow_rate(conf, queue, now);
	class.finish_ns = *(volatile __u64 *)&queue->finish_ns;
	class.latest_ns = *(volatile __u64 *)&edt->latest_ns;
	class.share = queue->share ? queue->share : FS_TARGET;
	edt_look(conf, &class, flow, now, bytes, held, &look);
	verdict = edt_verdict(conf, &look, 1);
	if (verdict == VQ_MARK && !bpf_skb_ecn_set_ce(skb))
		verdict = VQ_PASS;
	else if (verdict != VQ_PASS)
		c->last_ns[verdict] = now;
	if (verdict < VQ_DROP_FULL) {
		carry = c->carry;
		cost = vq_cost_ns(conf, bytes, &carry);
		c->carry = carry;
		vq_charge(conf, &queue->finish_ns, &queue->skipped_ns, class.finish_ns, now, cost);
		stamp(skb, edt_commit(&look, flow, &edt->latest_ns, now), now, place);
		share(conf, edt, flow, &look, now, bytes);
	}
	/* The verdicts are the first outcomes, in the same order. */
	count(c, place, (enum tg_outcome)verdict, bytes);
	return (enum tg_outcome)verdict;
}

SEC("cgroup_skb/egress")
int edt_cgroup(struct __sk_buff *skb)
{
	if (skb->mark == TG_DEAD_MARK)
		return RET_DROP_SLOW;
	if (gate(skb, CGROUP) == TG_DROP_FULL) {
		skb->mark = TG_DEAD_MARK;
		return RET_DROP_SLOW;
	}
	return RET_PASS;
}

SEC("tcx/egress")
int edt_device(struct __sk_buff *skb)
{
	/* The next program decides. */
	return gate(skb, DEVICE) == TG_DROP_FULL ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

SEC("tcx/ingress")
int edt_port(struct __sk_buff *skb)
{
	return gate(skb, PORT) == TG_DROP_FULL ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
