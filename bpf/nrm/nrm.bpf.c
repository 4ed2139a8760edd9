// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Schemes `nrm` and `pace`: a virtual queue on each direction of a cgroup, without a lock. With
 * `pace` also the fair share of its flows, and in a tree that of its children.
 *
 * A copy of this object serves one limit, or those of a pool (slot.h). The kernel runs the programs
 * of all ancestors of a socket's cgroup, innermost first, so nested limits each charge their own
 * queue. One that drops a packet sets TG_DEAD_MARK, and the outer ones do not charge it.
 *
 * Egress signals congestion to a TCP sender of this host (return values 2 and 3). On ingress there
 * are only marks and drops; `pace` slows a remote sender by the receive window (tune.h).
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "nrm/admission_packet.h"
#include "nrm/arrival.h"
#include "common/counters.h"
#include "common/counters_map.h"
#include "nrm/epoch.h"
#include "common/exempt_packet.h"
#include "nrm/intf.h"
#include "common/packet.h"
#include "nrm/reserve.h"
#include "nrm/risk.h"
#include "nrm/slot.h"
#include "nrm/sockets.h"
#include "nrm/tree.h"
#include "nrm/tune.h"
#include "nrm/unpaced.h"
#include "common/verifier.h"
#include "common/vmlinux.h"
#include "common/wire_bytes.h"

/* Return values of cgroup_skb programs; the second and third only on egress. */
enum {
	RET_DROP = 0,
	RET_PASS = 1,
	RET_DROP_SLOW = 2,
	RET_PASS_SLOW = 3,
};

/*
 * An index that old verifiers accept. The compiler must not know that it is one already, nor, after
 * the mask, that all but 7 are: it would compare only for that, of which Linux 6.1 learns nothing.
 */
static __always_inline __u64 outcome_index(__u64 outcome)
{
	asm volatile("" : "+r"(outcome));
	outcome &= 7;
	asm volatile("" : "+r"(outcome));
	return outcome < TG_OUTCOMES ? outcome : TG_OUTCOMES - 1;
}

static __always_inline void count(struct tg_counters *c, enum tg_direction direction,
				  enum tg_outcome outcome, __u32 bytes)
{
	__u64 index = outcome_index(outcome);

	tg_add(&c->packets[index], 1, direction == TG_INGRESS);
	tg_add(&c->bytes[index], bytes, direction == TG_INGRESS);
}

/*
 * The part of the verdict that needs the packet's headers and its socket. Judges a packet of
 * `bytes` at a backlog above the mark, and sets CE where it can.
 */
VF_ONCE int signal_congestion(struct __sk_buff *skb, const struct vq_conf *conf, __s64 backlog_ns,
			      __u32 bytes, __u32 direction)
{
	struct vq_packet packet = {.wire_bytes = bytes, .in_flight = 1};
	struct tg_headers headers;
	enum vq_zone zone;

	if (!conf)
		return VQ_PASS;
	zone = vq_zone(conf, backlog_ns);
	packet.local = direction == TG_EGRESS;
	tg_parse(skb, &headers);
	packet.tcp = headers.protocol == IPPROTO_TCP;
	if (zone == VQ_RESERVE && packet.tcp && packet.local && skb->sk) {
		struct bpf_sock *sk = bpf_sk_fullsock(skb->sk);
		struct bpf_tcp_sock *tp = sk ? bpf_tcp_sock(sk) : 0;

		packet.in_flight = !tp || tp->packets_out;
	}
	/* The reserve may refuse the packet: ask before the header is written. */
	if (zone == VQ_RESERVE && vq_decide(conf, zone, backlog_ns, &packet, 0) == VQ_DROP_RESERVE)
		return VQ_DROP_RESERVE;
	packet.ecn_capable = bpf_skb_ecn_set_ce(skb);
	return vq_decide(conf, zone, backlog_ns, &packet, bpf_get_prandom_u32());
}

/*
 * Whether the packet is of a socket that this limit paces. A socket whose program has set a higher
 * rate since is unpaced until its share is set again.
 */
static __always_inline int is_paced(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct tg_socket *ours = sk ? bpf_sk_storage_get(&sockets_of_limit, sk, 0, 0) : 0;
	struct tcp_sock *tp;

	if (!ours || !ours->pacing_byte_s)
		return 0;
	/* The share is faster than the option can express. */
	if (ours->pacing_byte_s == TG_PACING_UNLIMITED)
		return 1;
	tp = bpf_skc_to_tcp_sock(sk);
	return tp && tp->inet_conn.icsk_inet.sk.sk_max_pacing_rate <= ours->pacing_byte_s;
}

/* Two full segments: the least that TCP sends at once when it is paced. */
#define PACED_BURST_BYTES (2 * 1514)
/* The most that it sends at once. */
#define PACED_BURST_MOST_BYTES 65536

/* The bytes that a flow sends at once: its part of TG_BURSTS_US of the limit. */
static __always_inline __u32 paced_burst_bytes(__u64 rate_bit_s, __u32 flows)
{
	__u64 bytes = rate_bit_s / (8 * 1000000 / TG_BURSTS_US) / (flows ? flows : 1);

	return fs_min(fs_max(bytes, PACED_BURST_BYTES), PACED_BURST_MOST_BYTES);
}

/* Sets a packet aside if it is within one share of the epoch. */
static __always_inline void set_aside(struct tg_nrm_queue *queue, __u64 *sent, __u32 bytes,
				      __u64 cost)
{
	__u64 share = queue->common.share ? queue->common.share : FS_TARGET;
	__u64 fair_ns = up_fair_ns(share, queue->common.epoch_us * 1000ULL);

	if (up_within(sent, queue->common.epoch + 1, bytes, cost, fair_ns))
		__sync_fetch_and_add(&queue->aside_ns, vq_time_ns(bytes, cost));
}

/* The data segments that a connection has sent, or received, in a direction of the limit. */
static __always_inline __u32 moved_segments(struct bpf_sock *sk, __u32 direction)
{
	struct bpf_tcp_sock *tp = bpf_tcp_sock(sk);
	__u32 received;

	if (!tp)
		return ~0U;
	/* Both are read, as the verifier allows no pointer to one of two fields. */
	received = tp->data_segs_in;
	asm volatile("" : "+r"(received));
	return direction == TG_INGRESS ? received : tp->data_segs_out;
}

/*
 * Whether these are the first ten segments, which TCP does not pace. On egress only where programs
 * see SYN-ACKs, and so can hold connections.
 */
static __always_inline int is_first_flight(const struct tg_nrm_queue *queue, __u32 direction,
					   __u32 segments)
{
	return segments <= TG_INITIAL_WINDOW && (direction == TG_INGRESS || queue->turns.retries);
}

/* Counts what a flow takes, by the words of its socket. */
__noinline int use_share(const struct vq_conf *conf, struct tg_nrm_queue *queue, __u64 *sent,
			 __u32 *seen, __u32 bytes)
{
	if (conf && queue && sent && seen)
		ep_use(queue, sent, seen, bytes, conf->cost, 1);
	return 0;
}

/* The same for a flow that has a share: then its socket has a storage. */
__noinline int use(struct __sk_buff *skb, const struct vq_conf *conf, struct tg_nrm_queue *queue,
		   __u32 bytes, __u32 index)
{
	struct bpf_sock *sk = skb->sk ? bpf_sk_fullsock(skb->sk) : 0;
	struct tg_socket *ours;
	__u32 segments;

	if (!conf || !queue || !sk || index >= TG_QUEUES || sk->protocol != IPPROTO_TCP)
		return 0;
	ours = bpf_sk_storage_get(&sockets_of_limit, sk, 0, 0);
	if (!ours)
		return 0;
	segments = moved_segments(sk, index & 1);
	if (ours->epoch[index & 1] - (queue->common.epoch + 1) >= TG_STAYS &&
	    is_first_flight(queue, index & 1, segments) && ad_ends_soon(&queue->turns, segments))
		/* It is not yet a flow with a share; the flows leave it what it takes. */
		set_aside(queue, &ours->sent[index], bytes, conf->cost);
	else
		use_share(conf, queue, &ours->sent[index], &ours->epoch[index & 1], bytes);
	return 0;
}

/* How long the burst of a flow takes, paced or by its window. */
VF_ONCE __u64 burst_ns(const struct vq_conf *conf, const struct tg_nrm_queue *queue,
		       __u64 rate_bit_s, int windows)
{
	__u32 flows;

	if (!conf || !queue)
		return 0;
	/* The epoch that ends and the one before count alike, as in ep_take_sharers. */
	flows = fs_max(queue->common.flows, queue->common.flows_before);
	if (!windows)
		return vq_time_ns(paced_burst_bytes(rate_bit_s, flows), conf->cost);
	return fs_max(rw_burst_ns(fs_max(queue->rtt_ns, queue->wait_ns), flows),
		      vq_time_ns(PACED_BURST_BYTES, conf->cost));
}

/*
 * The backlog of the epoch that ends: without this packet, which was charged `cost_ns`, and beyond
 * what bursts that coincide explain.
 */
VF_ONCE __u64 standing_backlog_ns(const struct vq_conf *conf, const struct tg_nrm_queue *queue,
				  const struct arrival *packet, __u64 cost_ns)
{
	__u64 standing;
	__s64 backlog;

	if (!conf || !queue || !packet)
		return 0;
	standing = packet->windows ? conf->mark_ns
				   : up_standing_ns(conf, TG_BURSTS_US * 1000, queue->rtt_ns);
	/* The flows cannot drain the backlog of a flood. */
	if (queue->flooded)
		standing = fs_max(standing, conf->drop_ns);
	backlog = queue->common.finish_ns - packet->now - cost_ns - standing;
	return backlog > 0 ? backlog : 0;
}

/* Ends the epoch, if no other CPU has. The queue has been charged `cost_ns` for the packet. */
__noinline int end_epoch(const struct vq_conf *conf, struct tg_nrm_queue *queue,
			 const struct arrival *packet, __u64 cost_ns, __u64 rate_bit_s)
{
	if (!conf || !queue || !packet)
		return 0;
	if (!ep_turn(queue, packet->now, standing_backlog_ns(conf, queue, packet, cost_ns),
		     queue->rtt_ns, burst_ns(conf, queue, rate_bit_s, packet->windows), rate_bit_s))
		return 0;
	queue->newcomers = 0;
	queue->flooded = 0;
	queue->strangers_ns = 0;
	/* Flows that still wait raise it again. */
	queue->wait_ns -= queue->wait_ns / 16;
	return 1;
}

/* The same, if the epoch is over. Most packets end no epoch, and make no call. */
static __always_inline int turn(const struct vq_conf *conf, struct tg_nrm_queue *queue,
				const struct arrival *packet, __u64 cost_ns, __u64 rate_bit_s)
{
	return ep_is_over(&queue->common, queue->common.epoch_start_ns, packet->now) &&
	       end_epoch(conf, queue, packet, cost_ns, rate_bit_s);
}

/* The rate has changed since the last packet. */
__noinline int follow_rate(const struct vq_conf *conf, struct tg_nrm_queue *queue, __u64 now)
{
	if (conf && queue)
		ep_follow_rate(conf, &queue->common, &queue->unpaced_finish_ns, now);
	return 0;
}

/* The virtual queue of a class at its present rate, or without one that of the limit. */
static __always_inline const struct vq_conf *config_now(const struct tg_nrm_queue *queue,
							const struct vq_conf *ceiling,
							const struct cl_class *class,
							struct vq_conf *now)
{
	if (!queue->cost_now)
		return ceiling;
	__builtin_memset(now, 0, sizeof(*now));
	tg_config_now(queue, ceiling, class, now);
	return now;
}

/* Whether the packet is of the limit's own class. */
static __always_inline int is_own(const struct arrival *packet)
{
	return can_be_parent && packet->is_own;
}

/* Finds out where in the tree the packet belongs. */
static __always_inline void find_place(struct __sk_buff *skb, const struct tg_nrm_queue *queue,
				       struct arrival *packet)
{
	struct tg_socket *socket;

	packet->is_parent = tg_is_parent(queue, packet->now);
	if (!packet->is_parent)
		return;
	socket = skb->sk ? bpf_sk_storage_get(&sockets_of_limit, skb->sk, 0, 0) : 0;
	packet->claimed = vf_forget(tg_is_claimed(socket, packet->now), packet->now);
	packet->is_own = !packet->claimed;
	packet->unpaced &= packet->is_own;
}

/*
 * A TCP flow has taken less than half of its share in this epoch so far; or it has nothing in
 * flight; or, where connections are held, it has sent at most its first ten segments, which are not
 * paced.
 */
enum {
	TAKES_LITTLE = 1,
	TAKES_ALONE = 2,
	TAKES_FIRST = 3,
};

/*
 * Whether a program asks again and again on a connection, and is kept back so that it receives its
 * share (tune.h). A transfer asks once. The first ten segments of a connection cannot be kept
 * back.
 */
static __always_inline int keeps_share(struct bpf_sock *sk, const struct tg_socket *ours, __u64 now)
{
	struct bpf_tcp_sock *tp = bpf_tcp_sock(sk);

	return tp && tp->data_segs_out > 1 &&
	       (tp->data_segs_out <= TG_INITIAL_WINDOW ||
		rw_owes(&ours->rwnd, now) < RW_OWED_KEPT_NS);
}

/*
 * Whether a socket has nothing in flight. If its packet is dropped now, the kernel treats it as
 * never sent, and tries again when the probe timer ends: after 200 ms, however short the least
 * time-out is (tcp_probe0_base).
 */
static __always_inline int is_alone(struct bpf_sock *sk)
{
	struct bpf_tcp_sock *tp = bpf_tcp_sock(sk);

	return tp && !tp->packets_out;
}

/* The credit of a connection that begins: other traffic waits until it is paid. */
#define FIRST_CREDIT_NS 100000000ULL
/*
 * The credit of a socket with nothing in flight. The rest is left to connections that begin:
 * transfers over a short path have nothing in flight between their bursts.
 */
#define ALONE_CREDIT_NS 50000000ULL

/* Whether the packet is of such a flow; which kind. */
__noinline int takes_little(struct __sk_buff *skb, const struct tg_nrm_queue *queue,
			    __u32 direction, __u64 now)
{
	struct bpf_sock *sk = skb->sk ? bpf_sk_fullsock(skb->sk) : 0;
	struct tg_socket *ours;

	if (!queue || !sk || direction >= TG_DIRECTIONS || sk->protocol != IPPROTO_TCP)
		return 0;
	if (is_first_flight(queue, direction, moved_segments(sk, direction)))
		return TAKES_FIRST;
	if (direction == TG_EGRESS && is_paced(skb) && is_alone(sk))
		return TAKES_ALONE;
	ours = bpf_sk_storage_get(&sockets_of_limit, sk, 0, 0);
	if (!ours)
		return 0;
	if (direction == TG_INGRESS && keeps_share(sk, ours, now))
		return TAKES_FIRST;
	/* The bytes that it took of the queue of its limit, or of that for traffic of no child. */
	if (up_has_much(ours->sent[direction], queue->common.epoch + 1) ||
	    up_has_much(ours->sent[direction + TG_OWN], queue->common.epoch + 1))
		return 0;
	return TAKES_LITTLE;
}

/*
 * The backlog that the packet passes; 0: the thresholds. A flow that takes little of its share has
 * more room than the others, which pay for it: a connection that waits for a reply of some packets
 * would wait for TCP's timer if it lost them.
 */
VF_ONCE __u64 depth_ns(struct __sk_buff *skb, const struct arrival *packet,
		       const struct vq_conf *conf, const struct tg_nrm_queue *queue)
{
	__u64 rtt_ns, depth;
	int little = 0;

	if (!packet || !conf || !queue)
		return 0;
	/* Behind windows the backlog is judged without the round trip. */
	rtt_ns = packet->windows ? 0 : queue->rtt_ns;
	depth = up_depth_ns(conf, queue->aside_before || queue->flooded, rtt_ns);
	if (packet->admitted)
		little = TAKES_FIRST;
	else if (packet->paced)
		little = takes_little(skb, queue, packet->direction, packet->now);
	/*
	 * A class within its own rate does not pay for flows that do not yet keep to their shares.
	 */
	if (packet->claimed && little != TAKES_FIRST)
		return fs_max(UP_DEPTH_NS, conf->drop_ns) + up_room_ns(rtt_ns);
	if (!packet->paced)
		return 0;
	if (little)
		return fs_max(depth, conf->drop_ns) + (little == TAKES_FIRST   ? FIRST_CREDIT_NS
						       : little == TAKES_ALONE ? ALONE_CREDIT_NS
									       : UP_CREDIT_NS);
	if (packet->windows)
		return 0;
	if (packet->reserved)
		return depth + ALONE_CREDIT_NS;
	return packet->needs_share || (packet->bytes > VQ_SMALL_BYTES && !is_paced(skb)) ? 0
											 : depth;
}

/* The length by which the packet is judged. */
static __always_inline __u32 judged_bytes(const struct arrival *packet)
{
	return up_judged_bytes(packet->bytes, packet->needs_share && !packet->reserved);
}

/*
 * The room above the thresholds of scheme `nrm` is for windows that are sent at once. Senders
 * without a window get the backlog of `nrm` only. Within their shares only their own traffic counts
 * for that, so that they do not pay for windows; else all traffic does.
 */
__noinline int judge_unpaced(struct __sk_buff *skb, const struct vq_conf *conf,
			     const struct tg_nrm_queue *queue, struct arrival *packet)
{
	struct vq_conf alone;
	enum vq_zone zone;
	__s64 backlog;
	int within;

	if (!conf || !queue || !packet)
		return VQ_PASS;
	/* Its sender is within one share, or it is small and needs none. */
	within = packet->reserved || (packet->bytes <= VQ_SMALL_BYTES && !packet->needs_share);
	up_config(conf, &alone);
	packet->most.all_ns = packet->most.unpaced_ns = alone.drop_ns;
	backlog = *(volatile __u64 *)&queue->common.finish_ns - packet->now;
	if (within) {
		/* Nor do they pay for replies that pass on credit (depth_ns). */
		packet->most.all_ns = conf->drop_ns + FIRST_CREDIT_NS + UP_CREDIT_NS +
				      fs_min(queue->rtt_ns, RW_MAX_ROOM_NS);
		if (backlog > (__s64)packet->most.all_ns)
			return VQ_DROP_FULL;
		backlog = *(volatile __u64 *)&queue->unpaced_finish_ns - packet->now;
	}
	zone = vq_zone(&alone, backlog);
	if (zone == VQ_FREE)
		return VQ_PASS;
	if (zone == VQ_FULL)
		return VQ_DROP_FULL;
	return signal_congestion(skb, &alone, backlog, judged_bytes(packet), packet->direction);
}

/* Judges a packet that finds a backlog above the mark. */
__noinline int judge_backlog(struct __sk_buff *skb, const struct vq_conf *conf,
			     const struct tg_nrm_queue *queue, struct arrival *packet)
{
	enum vq_zone zone;
	__s64 backlog;
	__u64 depth;

	if (!conf || !queue || !packet)
		return VQ_PASS;
	backlog = *(volatile __u64 *)&queue->common.finish_ns - packet->now;
	if (packet->windows)
		backlog = rw_judged_ns(backlog, conf->mark_ns, queue->rtt_ns);
	zone = vq_zone(conf, backlog);
	if (zone == VQ_FREE)
		return VQ_PASS;
	depth = depth_ns(skb, packet, conf, queue);
	if (backlog <= (__s64)depth) {
		/* Beyond that it has a round trip, without which the backlog was judged. */
		if (depth > conf->drop_ns)
			packet->most.all_ns += depth - conf->drop_ns;
		return VQ_PASS;
	}
	if (zone == VQ_FULL)
		return VQ_DROP_FULL;
	return signal_congestion(skb, conf, backlog, judged_bytes(packet), packet->direction);
}

/* The verdict of one queue. Most packets find no backlog above the mark, and make no call. */
static __always_inline enum vq_verdict judge(struct __sk_buff *skb, struct arrival *packet,
					     const struct vq_conf *conf,
					     const struct tg_nrm_queue *queue)
{
	__u64 window_ns;
	__s64 backlog;
	__u32 verdict;

	if (packet->unpaced) {
		verdict = judge_unpaced(skb, conf, queue, packet);
	} else {
		backlog = *(volatile __u64 *)&queue->common.finish_ns - packet->now;
		/* The time that rw_judged_ns subtracts. */
		window_ns = packet->windows ? fs_min(queue->rtt_ns, RW_MAX_ROOM_NS) : 0;
		packet->most.all_ns = conf->drop_ns + window_ns;
		if (backlog <= (__s64)(conf->mark_ns + window_ns))
			return VQ_PASS;
		verdict = judge_backlog(skb, conf, queue, packet);
	}
	return verdict < VQ_DROP_EARLY ? verdict : VQ_DROP_EARLY;
}

/*
 * Charges a finish time. Returns 0, and gives the charge back, if other CPUs have moved it since it
 * was judged.
 */
static __always_inline int charge_one(const struct vq_conf *conf, __u64 *finish_ns,
				      __u64 *skipped_ns, __u64 now, __u64 cost, __u64 most_ns)
{
	__u64 seen = *(volatile __u64 *)finish_ns;
	__u64 found = vq_charge(conf, finish_ns, skipped_ns, seen, now, cost);

	if ((__s64)(found - now) <= (__s64)most_ns)
		return 1;
	__sync_fetch_and_sub(finish_ns, cost);
	return 0;
}

/* Whether the limit has shares to update: of flows, or in a tree. */
static __always_inline int takes_part(const struct arrival *packet)
{
	return packet->paced || has_parent || packet->is_parent;
}

static __always_inline void refund(struct tg_nrm_queue *queue, int unpaced, __u64 cost)
{
	__sync_fetch_and_sub(&queue->common.finish_ns, cost);
	if (unpaced)
		__sync_fetch_and_sub(&queue->unpaced_finish_ns, cost);
}

/* Charges a queue, and for an unpaced sender its second finish time; 0 as above. */
__noinline int charge_both(const struct vq_conf *conf, struct tg_nrm_queue *queue,
			   const struct arrival *packet, __u64 cost, int counts)
{
	int unpaced = packet ? packet->unpaced : 0;

	if (!conf || !queue || !packet)
		return 0;
	if (unpaced && !charge_one(conf, &queue->unpaced_finish_ns, 0, packet->now, cost,
				   packet->most.unpaced_ns))
		return 0;
	if (charge_one(conf, &queue->common.finish_ns, counts ? &queue->common.skipped_ns : 0,
		       packet->now, cost, packet->most.all_ns))
		return 1;
	if (unpaced)
		__sync_fetch_and_sub(&queue->unpaced_finish_ns, cost);
	return 0;
}

/* The same. Most packets are from paced senders, and make no call. */
static __always_inline int charge(const struct vq_conf *conf, struct tg_nrm_queue *queue,
				  const struct arrival *packet, __u64 cost, int counts)
{
	if (packet->unpaced)
		return charge_both(conf, queue, packet, cost, counts);
	return charge_one(conf, &queue->common.finish_ns, counts ? &queue->common.skipped_ns : 0,
			  packet->now, cost, packet->most.all_ns);
}

/* Judges a packet, and charges it to the queues that it passes. Returns the verdict. */
static __always_inline int decide(struct __sk_buff *skb, const struct vq_conf *conf,
				  const struct vq_conf *own_conf, struct tg_nrm_queue *queue,
				  struct tg_nrm_queue *own, struct tg_counters *c,
				  enum tg_direction direction, struct arrival *packet)
{
	__u32 first = packet->slot * TG_QUEUES + direction;
	enum vq_verdict verdict, other;
	struct bounds most;
	__u32 carry;

	if (packet->needs_share && is_own(packet))
		packet->reserved = reserve(skb, own_conf, own, packet, first + TG_OWN);
	else if (packet->needs_share && !packet->is_parent)
		packet->reserved = reserve(skb, conf, queue, packet, first);

	verdict = judge(skb, packet, conf, queue);
	most = packet->most;
	if (is_own(packet) && verdict < VQ_DROP_FULL) {
		other = judge(skb, packet, own_conf, own);
		verdict = other > verdict ? other : verdict;
	}
	if (verdict != VQ_PASS)
		c->last_ns[outcome_index(verdict)] = packet->now;
	if (verdict >= VQ_DROP_FULL)
		return verdict;
	carry = c->carry;
	packet->cost_ns = vq_cost_ns(conf, packet->bytes, &carry);
	if (is_own(packet)) {
		packet->own_cost_ns = vq_time_ns(packet->bytes, own_conf->cost);
		if (!charge_both(own_conf, own, packet, packet->own_cost_ns, 1))
			goto full;
		packet->most = most;
	}
	if (!charge(conf, queue, packet, packet->cost_ns, takes_part(packet))) {
		if (is_own(packet))
			refund(own, packet->unpaced, packet->own_cost_ns);
		goto full;
	}
	c->carry = carry;
	return verdict;
full:
	c->last_ns[TG_DROP_FULL] = packet->now;
	return VQ_DROP_FULL;
}

/* Updates the shares: of the flows, of the children, and of the limit in its parent. */
static __always_inline void account(struct __sk_buff *skb, const struct tg_limit *limit,
				    const struct vq_conf *conf, const struct vq_conf *own_conf,
				    struct tg_nrm_queue *queue, struct tg_nrm_queue *own,
				    enum tg_direction direction, const struct arrival *packet)
{
	const struct cl_class *class = &limit->class[direction];
	__u64 own_rate, rate = tg_rate(limit, queue, direction);
	__u32 key = parent_slot * TG_QUEUES + direction;
	struct tg_nrm_queue *parent = 0;

	if (has_parent)
		parent = bpf_map_lookup_elem(&queues_of_limit_above, &key);
	if (packet->paced && !packet->needs_share && is_own(packet))
		use(skb, own_conf, own, packet->bytes, direction + TG_OWN);
	else if (packet->paced && !packet->needs_share && !packet->is_parent)
		use(skb, conf, queue, packet->bytes, direction);
	if (packet->bytes > VQ_SMALL_BYTES) {
		if (is_own(packet))
			tg_use_class(queue, own, 0, packet->bytes);
		if (parent)
			tg_use_class(parent, queue, class, packet->bytes);
	}
	if (is_own(packet)) {
		own_rate = own->cost_now ? own->rate_bit_s : rate;
		if (turn(own_conf, own, packet, packet->own_cost_ns, own_rate)) {
			tg_report(queue, own, packet->now);
			tg_follow(queue, own, 0, rate);
		}
	}
	if (!turn(conf, queue, packet, packet->cost_ns, rate))
		return;
	/* The rate of which its children take their parts. */
	queue->rate_bit_s = rate;
	if (parent) {
		tg_report(parent, queue, packet->now);
		tg_follow(parent, queue, class, limit->rate_bit_s[direction]);
	}
}

/* Counts a dropped packet if TCP waits for a timer now. */
__noinline int count_risk(struct __sk_buff *skb, struct tg_nrm_queue *queue,
			  const struct arrival *packet)
{
	enum risk_kind kind = packet ? risk_kind(skb, packet->direction) : RISK_NONE;

	if (packet && queue && kind != RISK_NONE)
		risk_count(queue, kind, packet->claimed || (packet->paced && is_paced(skb)));
	return 0;
}

static __always_inline int gate(struct __sk_buff *skb, enum tg_direction direction)
{
	const int drop = direction == TG_EGRESS ? RET_DROP_SLOW : RET_DROP;
	struct arrival packet = {.direction = direction};
	const struct vq_conf *conf, *own_conf;
	/* The virtual queues of classes at their present rate. */
	struct vq_conf queue_now, own_now;
	struct tg_nrm_queue *queue, *own;
	const struct cl_class *class;
	struct tg_counters *c;
	struct tg_limit *limit;
	struct bpf_sock *sk;
	__u32 key, slot, verdict, unpaced;
	int answers;

	if (skb->mark == TG_DEAD_MARK)
		return drop;
	if (!tg_find_slot(&slot))
		return RET_PASS;
	limit = tg_limit_of(slot, direction);
	queue = tg_queue_of(slot, direction);
	own = tg_queue_of(slot, direction + TG_OWN);
	key = slot * TG_DIRECTIONS + direction;
	c = bpf_map_lookup_elem(&counters, &key);
	if (!limit || !queue || !own || !c)
		return RET_PASS;
	packet.paced = vf_forget(!!(limit->flags & TG_FLAG_PACE_FAIR), limit->flags);
	sk = packet.paced && skb->sk ? bpf_sk_fullsock(skb->sk) : 0;
	conf = &limit->queue[direction];
	if (!conf->cost) {
		/* A connection may have to wait for its turn in the other direction. */
		if (direction == TG_INGRESS ||
		    begin(skb, sk, queue, bpf_ktime_get_ns(), slot) != ANSWER_WAITS)
			return RET_PASS;
		skb->mark = TG_DEAD_MARK;
		return RET_DROP;
	}
	packet.bytes = tg_wire_bytes(skb, direction);
	if (skb->ifindex == TG_LOOPBACK_IFINDEX && !(limit->flags & TG_FLAG_LOOPBACK)) {
		count(c, direction, TG_EXEMPT, packet.bytes);
		return RET_PASS;
	}

	if (has_exempt && tg_is_exempt(skb, limit->exempt_dscps, direction)) {
		count(c, direction, TG_EXEMPT, packet.bytes);
		return RET_PASS;
	}
	packet.now = bpf_ktime_get_ns();
	packet.slot = slot;
	packet.windows = packet.paced && direction == TG_INGRESS;
	/* TCP of this host can be paced, or limited by its window. */
	unpaced = packet.paced & vf_forget(!(sk && sk->protocol == IPPROTO_TCP), packet.now);
	packet.unpaced = packet.windows & unpaced;
	/* Not packets that the kernel answers with, without a socket. */
	packet.needs_share = unpaced & vf_forget(!!sk, packet.now);
	if (has_parent)
		tg_claim(skb->sk, packet.now);
	find_place(skb, queue, &packet);
	class = &limit->class[direction];
	if (has_parent)
		conf = config_now(queue, conf, class, &queue_now);
	own_conf = is_own(&packet) ? config_now(own, conf, class, &own_now) : conf;
	if (queue->common.cost != conf->cost)
		follow_rate(conf, queue, packet.now);
	if (is_own(&packet) && own->common.cost != own_conf->cost)
		follow_rate(own_conf, own, packet.now);
	if (direction == TG_EGRESS) {
		answers = begin(skb, sk, queue, packet.now, slot);
		if (answers == ANSWER_WAITS) {
			skb->mark = TG_DEAD_MARK;
			return RET_DROP;
		}
		packet.admitted = answers == ANSWER_GOES;
	}

	verdict = decide(skb, conf, own_conf, queue, own, c, direction, &packet);
	verdict = vf_forget(verdict, packet.now);
	if (verdict < VQ_DROP_FULL && takes_part(&packet))
		account(skb, limit, conf, own_conf, queue, own, direction, &packet);
	/* The verdicts are the first outcomes, in the same order. */
	count(c, direction, (enum tg_outcome)verdict, packet.bytes);
	if (verdict >= VQ_DROP_FULL) {
		count_risk(skb, queue, &packet);
		skb->mark = TG_DEAD_MARK;
		return drop;
	}
	return verdict == VQ_SLOW && direction == TG_EGRESS ? RET_PASS_SLOW : RET_PASS;
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
