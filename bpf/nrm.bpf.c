// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The `nrm` scheme: a virtual queue on each direction of a cgroup, without a lock.
 *
 * One copy of this object is loaded per limit; its maps hold that limit alone. The kernel runs the
 * programs of all ancestors of a socket's cgroup, innermost first, so nested limits each charge
 * their own queue; a packet that one of them drops carries TG_DEAD_MARK to the outer ones, which
 * must not charge it.
 *
 * Egress tells a TCP sender of this host to reduce its window (return values 2 and 3); on ingress
 * the sender is elsewhere, so there are only marks and drops.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "epoch.h"
#include "intf.h"
#include "packet.h"
#include "sockets.h"

/* In every network namespace the loopback device is the first. */
#define LOOPBACK_IFINDEX 1

/* Return values of cgroup_skb programs; the second and third only on egress. */
enum {
	RET_DROP = 0,
	RET_PASS = 1,
	RET_DROP_SLOW = 2,
	RET_PASS_SLOW = 3,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct tg_counters);
} counters SEC(".maps");

static __always_inline void count(struct tg_counters *c, enum tg_outcome outcome, __u32 bytes)
{
	c->packets[outcome]++;
	c->bytes[outcome] += bytes;
}

/* The part of the verdict that needs the packet's headers and its socket; sets CE where it can. */
static __always_inline enum vq_verdict tell(struct __sk_buff *skb, const struct vq_conf *conf,
					    enum vq_zone zone, __s64 backlog_ns, __u32 bytes,
					    enum tg_direction direction)
{
	struct vq_packet packet = {
	    .wire_bytes = bytes,
	    .in_flight = 1,
	    .local = direction == TG_EGRESS,
	};
	struct tg_headers headers;

	tg_parse(skb, &headers);
	packet.tcp = headers.protocol == IPPROTO_TCP;
	if (zone == VQ_RESERVE && packet.tcp && packet.local && skb->sk) {
		struct bpf_sock *sk = bpf_sk_fullsock(skb->sk);
		struct bpf_tcp_sock *tp = sk ? bpf_tcp_sock(sk) : 0;

		packet.in_flight = !tp || tp->packets_out;
	}
	/* The reserve may turn the packet away: ask before the header is written. */
	if (zone == VQ_RESERVE && vq_decide(conf, zone, backlog_ns, &packet, 0) == VQ_DROP_RESERVE)
		return VQ_DROP_RESERVE;
	packet.ecn_capable = bpf_skb_ecn_set_ce(skb);
	return vq_decide(conf, zone, backlog_ns, &packet, bpf_get_prandom_u32());
}

/*
 * How far the queue may be behind before it turns to a paced socket, which can do nothing about it:
 * its bursts may meet those of others, and its first ten segments are not paced. A cut window would
 * not grow again, as pacing keeps it from being full; a dropped packet with nothing in flight waits
 * for TCP's probe timer. The share drains the backlog instead. Small packets of others pass, too.
 */
#define PACED_DEPTH_NS 16000000

/* Whether the packet is of a socket that is paced by this limit. */
static __always_inline int is_paced(struct __sk_buff *skb)
{
	struct tg_socket *ours = skb->sk ? bpf_sk_storage_get(&sockets, skb->sk, 0, 0) : 0;

	return ours && ours->pacing_byte_s;
}

/* Two full segments: the least that TCP sends at once when it is paced. */
#define PACED_BURST_BYTES (2 * 1514)
/* The most that it sends at once. */
#define PACED_BURST_MOST_BYTES 65536

/* What a flow sends at once: its part of TG_BURSTS_US of the limit. */
static __always_inline __u64 paced_burst_bytes(__u64 rate_bit_s, __u32 flows)
{
	__u64 bytes = rate_bit_s / (8 * 1000000 / TG_BURSTS_US) / (flows ? flows : 1);

	return fs_min(fs_max(bytes, PACED_BURST_BYTES), PACED_BURST_MOST_BYTES);
}

/* Counts the flow in this epoch. */
static __always_inline void see_flow(struct __sk_buff *skb, struct tg_queue *queue)
{
	struct tg_socket *ours = skb->sk ? bpf_sk_storage_get(&sockets, skb->sk, 0, 0) : 0;
	__u32 flows;
	int known;

	/* A new socket's storage is zero: number epochs from one. */
	if (!ours || ours->epoch == queue->epoch + 1)
		return;
	known = ours->epoch && queue->epoch + 1 - ours->epoch <= FS_KNOWN_EPOCHS;
	ours->epoch = queue->epoch + 1;
	flows = __sync_fetch_and_add(&queue->flows, 1) + 1;
	if (!known && flows > queue->flows_before)
		queue->share = fs_join(queue->share, flows);
}

/* Keeps the fair share of the paced flows up to date. */
static __always_inline void pace(struct __sk_buff *skb, const struct tg_limit *l,
				 struct tg_queue *queue, __u64 now, __u64 cost_ns, __u32 bytes)
{
	const struct vq_conf *conf = &l->queue[TG_EGRESS];
	__s64 backlog;

	if (bytes > VQ_SMALL_BYTES)
		see_flow(skb, queue);
	/* Without the packet at hand, and above what bursts that meet explain. */
	backlog = queue->finish_ns - now - cost_ns - fs_max(conf->mark_ns, TG_BURSTS_US * 1000);
	if (tg_turn_epoch(conf, queue, now, backlog > 0 ? backlog : 0, queue->rtt_ns,
			  paced_burst_bytes(l->rate_bit_s[TG_EGRESS], queue->flows_before)))
		queue->newcomers = 0;
}

static __always_inline int gate(struct __sk_buff *skb, enum tg_direction direction)
{
	const int drop = direction == TG_EGRESS ? RET_DROP_SLOW : RET_DROP;
	enum vq_verdict verdict = VQ_PASS;
	const struct vq_conf *conf;
	struct tg_counters *c;
	struct tg_queue *queue;
	struct tg_limit *l;
	__u64 now, seen, cost;
	__u32 key = 0, bytes, carry;
	enum vq_zone zone;
	__s64 most;
	int paced;

	if (skb->mark == TG_DEAD_MARK)
		return drop;
	l = bpf_map_lookup_elem(&limit, &key);
	key = direction;
	queue = bpf_map_lookup_elem(&queues, &key);
	c = bpf_map_lookup_elem(&counters, &key);
	if (!l || !queue || !c)
		return RET_PASS;
	conf = &l->queue[direction];
	if (!conf->cost)
		return RET_PASS;
	bytes = tg_wire_bytes(skb);
	if (skb->ifindex == LOOPBACK_IFINDEX && !(l->flags & TG_FLAG_LOOPBACK)) {
		count(c, TG_EXEMPT, bytes);
		return RET_PASS;
	}

	now = bpf_ktime_get_ns();
	seen = *(volatile __u64 *)&queue->finish_ns;
	zone = vq_zone(conf, (__s64)(seen - now));
	paced = direction == TG_EGRESS && l->flags & TG_FLAG_PACE_FAIR;
	most = conf->drop_ns;
	if (zone != VQ_FREE && paced && (__s64)(seen - now) <= PACED_DEPTH_NS &&
	    (bytes <= VQ_SMALL_BYTES || is_paced(skb))) {
		zone = VQ_FREE;
		most = fs_max(most, PACED_DEPTH_NS);
	}
	if (zone == VQ_FULL)
		verdict = VQ_DROP_FULL;
	else if (zone != VQ_FREE)
		verdict = tell(skb, conf, zone, (__s64)(seen - now), bytes, direction);

	if (verdict < VQ_DROP_FULL) {
		carry = c->carry;
		cost = vq_cost_ns(conf, bytes, &carry);
		/* Other CPUs may have filled the queue since it was read: then give it back. */
		if ((__s64)(vq_charge(conf, &queue->finish_ns, paced ? &queue->skipped_ns : 0, seen,
				      now, cost) -
			    now) > most) {
			__sync_fetch_and_sub(&queue->finish_ns, cost);
			verdict = VQ_DROP_FULL;
		} else {
			c->carry = carry;
			if (paced)
				pace(skb, l, queue, now, cost, bytes);
		}
	}
	/* The verdicts are the first outcomes, in the same order. */
	count(c, (enum tg_outcome)verdict, bytes);
	if (verdict >= VQ_DROP_FULL) {
		skb->mark = TG_DEAD_MARK;
		return drop;
	}
	return verdict == VQ_SLOW ? RET_PASS_SLOW : RET_PASS;
}

SEC("cgroup_skb/egress")
int nrm_egress(struct __sk_buff *skb)
{
	return gate(skb, TG_EGRESS);
}

SEC("cgroup_skb/ingress")
int nrm_ingress(struct __sk_buff *skb)
{
	return gate(skb, TG_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
