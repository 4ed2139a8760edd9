/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The companion of the virtual queue on TCP sockets: a cgroup sock_ops program.
 * - Scheme `pace`: each socket is paced at the fair share of the limit, from the moment it is
 *   established and again every round trip; on short paths its window keeps bursts short.
 * - Scheme `pace`, ingress: the receive window of each socket grants the fair share, ACK by ACK.
 * - Scheme `nrm` with a pacing ceiling: no socket is paced faster than the limit, so that one alone
 *   never overruns the virtual queue.
 * - Both: the minimum retransmission time-out and the longest delayed ACK of the limit, before the
 *   handshake.
 */
#ifndef TG_TUNE_H
#define TG_TUNE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "nrm/admission.h"
#include "common/exempt.h"
#include "nrm/intf.h"
#include "nrm/slot.h"
#include "nrm/sockets.h"
#include "nrm/windows.h"

/* A SYN-ACK, the ACK of a request and the end of a connection. */
#define CONTROL_SEGMENTS 4
/* A program that has waited for this many replies in a row will wait for the next one. */
#define LEAST_EXCHANGES 4
/* This long after the end of an epoch its flow count means nothing. */
#define SILENT_NS 200000000ULL

static __always_inline int is_close(__u32 is, __u32 wanted, __u32 tolerance)
{
	return (is > wanted ? is - wanted : wanted - is) <= tolerance;
}

/*
 * Whether the path is short by its least round trip: delayed ACKs make the smoothed one long. When
 * the path becomes long, the least one stays for minutes (tcp_min_rtt_wlen), so both count. One
 * that was long is short again at half of the threshold.
 */
static __always_inline int on_short_path(const struct bpf_sock_ops *ops, int was_short)
{
	__u64 most_us = TG_SHORT_PATH_US + TG_DELAYED_ACK_US;

	return ops->rtt_min <= TG_SHORT_PATH_US &&
	       ops->srtt_us >> 3 <= (was_short ? most_us : most_us / 2);
}

/*
 * Keeps bursts short on a short path. Longer paths and their congestion control are left alone. The
 * window follows the share and the path: a connection outlives both.
 */
static __always_inline void set_window(struct bpf_sock_ops *ops, struct tg_socket *ours,
				       __u32 byte_s, int newcomer, int has_new_rate)
{
	__u32 window, wanted = 0, set = ours->window_segments;
	__u64 srtt_us = ops->srtt_us >> 3;

	if (byte_s != TG_PACING_UNLIMITED) {
		/* The first ten segments of a connection are not paced. On a longer path its share
		 * of a round trip is more. */
		window = tg_window(byte_s, srtt_us, ops->mss_cache);
		if (newcomer && window < TG_INITIAL_WINDOW)
			bpf_setsockopt(ops, TG_SOL_TCP, TCP_BPF_IW, &window, sizeof(window));
		if (on_short_path(ops, set))
			wanted =
			    tg_window(byte_s, fs_min(srtt_us, TG_SHORT_PATH_US), ops->mss_cache);
	}
	wanted = fs_min(wanted, TG_WINDOW_MAX);
	/*
	 * It need not follow each measurement of the round trip. With a new rate a flow that was
	 * slowed down begins again: the kernel takes the clamp for the threshold of slow start.
	 */
	if (!has_new_rate && is_close(set, wanted, wanted / 8))
		return;
	if (!wanted && !set)
		return;
	window = wanted ? wanted : TG_NO_WINDOW;
	if (!bpf_setsockopt(ops, TG_SOL_TCP, TCP_BPF_SNDCWND_CLAMP, &window, sizeof(window)))
		ours->window_segments = wanted;
}

/*
 * Whether the remote address is exempt; DSCPs are known only from packets. The fields are volatile,
 * or the compiler reads them through one pointer, which the verifier does not allow.
 */
static __always_inline int is_exempt_remote(struct bpf_sock_ops *ops)
{
	struct tg_prefix key;

	if (!has_exempt)
		return 0;
	tg_key4(&key, *(volatile __u32 *)&ops->remote_ip4);
	if (ops->family == TG_AF_INET6) {
		for (int i = 0; i < 4; i++)
			key.address[i] = *(volatile __u32 *)&ops->remote_ip6[i];
		tg_end_key6(&key);
	}
	return tg_has_prefix(&key);
}

/* The same, or the connection stays within this host and such traffic is exempt. */
VF_ONCE int is_exempt(struct bpf_sock_ops *ops, const struct tg_limit *l)
{
	if (!l || is_exempt_remote(ops))
		return 1;
	if (l->flags & TG_FLAG_LOOPBACK)
		return 0;
	if (ops->family == TG_AF_INET6) {
		__u32 local[] = {ops->local_ip6[0], ops->local_ip6[1], ops->local_ip6[2],
				 ops->local_ip6[3]};
		__u32 remote[] = {ops->remote_ip6[0], ops->remote_ip6[1], ops->remote_ip6[2],
				  ops->remote_ip6[3]};

		return tg_within_host6(local, remote);
	}
	return tg_within_host4(ops->local_ip4, ops->remote_ip4);
}

/* The same of a connection that begins: its route is looked at. */
VF_ONCE int begins_exempt(struct bpf_sock_ops *ops, const struct tg_limit *l)
{
	struct tcp_sock *tp = ops->sk ? bpf_skc_to_tcp_sock(ops->sk) : 0;

	if (is_exempt(ops, l))
		return 1;
	return l && !(l->flags & TG_FLAG_LOOPBACK) && tp &&
	       tg_is_routed_within((const struct sock *)tp);
}

static __always_inline void set_pacing(struct bpf_sock_ops *ops, const struct tg_limit *l,
				       struct tg_nrm_queue *queue, int newcomer)
{
	__u32 wanted, current = TG_PACING_UNLIMITED;
	int ipv6 = ops->family == TG_AF_INET6, has_new_rate;
	struct bpf_sock *sk = ops->sk;
	struct tg_socket *ours;
	struct tcp_sock *tp;
	__u64 share, rate;

	if (!sk)
		return;
	ours = bpf_sk_storage_get(&sockets_of_limit, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	tp = bpf_skc_to_tcp_sock(sk);
	if (!ours || !tp)
		return;
	share = tg_share(l, queue, newcomer);
	/*
	 * A flow grows into its share as in slow start: the others need time to make room. If the
	 * rate is raised there is room for all at once, unless a parent gives it.
	 */
	if (!has_parent && !newcomer && ours->share && share / 2 > ours->share)
		share = 2ULL * ours->share;
	ours->share = share;
	rate = tg_rate(l, queue, TG_EGRESS);
	wanted = tg_pacing_rate(l, rate, share, tg_payload(tp, ours, ops->mss_cache), ipv6);
	if (has_parent && !newcomer && ours->share_byte_s && wanted / 2 > ours->share_byte_s)
		wanted = 2 * ours->share_byte_s;
	ours->share_byte_s = wanted;
	bpf_getsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &current, sizeof(current));
	/*
	 * Every round trip comes here: a rate within 2 % stays, if it is the socket's. The program
	 * may have set another rate, and a parent that did not know its child yet may have raised
	 * it.
	 */
	has_new_rate =
	    newcomer || current != ours->pacing_byte_s || !is_close(current, wanted, wanted / 64);
	if (has_new_rate) {
		if (!tg_may_set(current, wanted, ours))
			return;
		if (bpf_setsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &wanted,
				   sizeof(wanted)))
			return;
		ours->pacing_byte_s = wanted;
	}
	if (l->flags & TG_FLAG_PACE_FAIR)
		set_window(ops, ours, tg_pacing_rate(l, rate, share, ops->mss_cache, ipv6),
			   newcomer, has_new_rate);
}

/* Folds a round-trip time into the limit's. A lost update of a smoothed value does no harm. */
static __always_inline void fold_rtt(struct tg_nrm_queue *queue, __u32 srtt_us)
{
	__u64 rtt_ns = (__u64)srtt_us * 1000;

	queue->rtt_ns += rtt_ns / 16 - queue->rtt_ns / 16;
}

/* Whether a child of the limit has the socket; then what was set here before is taken back. */
static __always_inline int leave_to_child(struct bpf_sock_ops *ops, __u64 now)
{
	struct tg_socket *ours = ops->sk ? bpf_sk_storage_get(&sockets_of_limit, ops->sk, 0, 0) : 0;
	__u32 current = 0, none = TG_PACING_UNLIMITED, window = TG_NO_WINDOW;
	struct tcp_sock *tp;

	if (!tg_is_claimed(ours, now))
		return 0;
	if (ours->window_segments) {
		tp = ops->sk ? bpf_skc_to_tcp_sock(ops->sk) : 0;
		/* The child may have set another. An equal one it sets again with a new rate. */
		if (tp && tp->snd_cwnd_clamp == ours->window_segments)
			bpf_setsockopt(ops, TG_SOL_TCP, TCP_BPF_SNDCWND_CLAMP, &window,
				       sizeof(window));
		ours->window_segments = 0;
	}
	if (ours->pacing_byte_s) {
		bpf_getsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &current,
			       sizeof(current));
		if (current == ours->pacing_byte_s)
			bpf_setsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &none,
				       sizeof(none));
		ours->pacing_byte_s = 0;
		ours->share = 0;
	}
	return 1;
}

/* The queue whose share the socket takes; 0: a child of the limit has it. */
static __always_inline struct tg_nrm_queue *inward_queue(struct tg_socket *ours, __u32 slot)
{
	__u64 now = bpf_ktime_get_ns();
	struct tg_nrm_queue *queue = tg_queue_of(slot, TG_INGRESS);

	if (!queue || !tg_is_parent(queue, now))
		return queue;
	if (tg_is_claimed(ours, now))
		return 0;
	return tg_queue_of(slot, TG_INGRESS + TG_OWN);
}

/*
 * A socket sends data while it has a debt: TCP sends its next data when that is paid. Only programs
 * that ask again when they have a reply are kept back, not those that send twice without a reply
 * between. set_pacing gives the rate back when the next ACK comes, since TCP raises its own rate
 * only then. Data that is sent earlier goes at this rate. So the rate is at least half a segment a
 * second: a longer wait than 45 ms needs a request of more than 33 bytes, and within that time
 * receivers acknowledge the first part of a request of two.
 */
static __always_inline void wait_before_asking(struct bpf_sock_ops *ops, struct tg_nrm_queue *queue,
					       struct tg_socket *ours, const struct tcp_sock *tp)
{
	__u32 wanted, current = TG_PACING_UNLIMITED;
	__u64 now = bpf_ktime_get_ns(), byte_s;

	ours->exchanges = tp->rcv_nxt != ours->asked_rcv_nxt ? ours->exchanges + 1 : 0;
	ours->asked_rcv_nxt = tp->rcv_nxt;
	if (ours->exchanges < LEAST_EXCHANGES)
		return;
	queue->wait_ns += rw_waits(&ours->rwnd, now) / 16 - queue->wait_ns / 16;
	byte_s = rw_asking_byte_s(&ours->rwnd, ops->skb_len, now);
	if (byte_s >= TG_PACING_UNLIMITED)
		return;
	wanted = fs_max(byte_s, ops->mss_cache / 2);
	bpf_getsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &current, sizeof(current));
	/* A rate that the program has set could not be restored. */
	if (current != TG_PACING_UNLIMITED && current != ours->pacing_byte_s)
		return;
	if (wanted < current &&
	    !bpf_setsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &wanted, sizeof(wanted)))
		ours->pacing_byte_s = wanted;
}

/*
 * Runs before each packet that the socket builds, so that this very packet carries the window. A
 * separate function: see tg_parse.
 */
__noinline int set_window_clamp(struct bpf_sock_ops *ops, int newcomer, __u32 slot)
{
	const struct tg_limit *l = tg_limit_of(slot, TG_INGRESS);
	struct bpf_sock *sk = ops->sk;
	struct tg_nrm_queue *queue;
	struct tg_socket *ours;
	struct tcp_sock *tp;

	if (!sk || !l)
		return 0;
	ours = bpf_sk_storage_get(&sockets_of_limit, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	tp = bpf_skc_to_tcp_sock(sk);
	if (!ours || !tp)
		return 0;
	queue = tg_has_windows(l) ? inward_queue(ours, slot) : 0;
	if (!queue) {
		tg_free_window(ops, tp, ours);
		return 0;
	}
	tg_set_window(ops, tp, ours, l, queue, newcomer, ops->family == TG_AF_INET6);
	if (!newcomer && ops->skb_len)
		wait_before_asking(ops, queue, ours, tp);
	return 0;
}

/* The window that the handshake offers, in segments; none: the kernel's. */
static __always_inline void set_first_window(struct bpf_sock_ops *ops, __u32 slot)
{
	const struct tg_limit *l = tg_limit_of(slot, TG_INGRESS);
	struct tg_nrm_queue *queue;
	__u32 segments;
	__u64 byte_s;

	if (!l || !tg_has_windows(l) || is_exempt(ops, l))
		return;
	/* Not known yet: whose the socket will be. */
	queue = inward_queue(0, slot);
	if (!queue)
		return;
	byte_s = tg_receive_byte_s(tg_rate(l, queue, TG_INGRESS), tg_first_share(l, queue),
				   TG_DEFAULT_MSS_BYTES, 0);
	segments = rw_first_segments(byte_s, TG_DEFAULT_MSS_BYTES);
	if (!ops->reply || segments < ops->reply)
		ops->reply = segments;
}

/* The kernel's timer tick (HZ): the unit of the wait before it sends a SYN-ACK again. */
const volatile __u64 tick_ns = 4000000;

/*
 * How long a new connection waits for its turn in a direction of the limit. A separate function:
 * see tg_parse.
 */
__noinline __u64 turn_ns(__u32 slot, __u32 direction, __u64 now)
{
	struct tg_nrm_queue *queue;
	struct tg_limit *l;
	__s64 backlog;
	__u32 paced = 0;

	if (direction >= TG_DIRECTIONS)
		return 0;
	l = tg_limit_of(slot, direction);
	queue = tg_queue_of(slot, direction);
	if (!l || !queue || !queue->common.cost || tg_is_parent(queue, now))
		return 0;
	/* A queue without packets for this long has no flows. */
	if (now - queue->common.epoch_start_ns < 2000ULL * queue->common.epoch_us + SILENT_NS)
		paced = queue->common.flows_before;
	backlog = queue->common.finish_ns - now;
	/* Windows that are sent at once are a backlog of up to the drop threshold. */
	if (direction == TG_INGRESS)
		backlog -= l->queue[TG_INGRESS].drop_ns;
	return ad_ask(&queue->turns, now, backlog, queue->common.cost, paced);
}

/* Holds the SYN of a connection that is opened here; 0: it is not held. */
static __always_inline __u32 hold_syn(struct bpf_sock_ops *ops, __u64 wait, __u64 rtt_ns)
{
	__u32 ticks = ad_syn_ticks(wait, rtt_ns, tick_ns), retries;
	struct bpf_sock *sk = ops->sk;
	struct tg_socket *ours;
	struct tcp_sock *tp;

	tp = ticks && sk ? bpf_skc_to_tcp_sock(sk) : 0;
	/* The program has chosen how often it is sent. */
	if (!tp || tp->inet_conn.icsk_syn_retries)
		return 0;
	retries = tp->inet_conn.icsk_inet.sk.__sk_common.skc_net.net->ipv4.sysctl_tcp_syn_retries;
	ours = bpf_sk_storage_get(&sockets_of_limit, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!retries || !ours)
		return 0;
	retries = ad_syn_retries(ticks, tick_ns, retries);
	if (bpf_setsockopt(ops, TG_SOL_TCP, TG_TCP_SYNCNT, &retries, sizeof(retries)))
		return 0;
	ours->syn_waits = 1;
	return ticks;
}

/*
 * A connection begins. It may have to wait until the limit can carry what it will take, in both
 * directions. The kernel asks for the timer of a SYN or SYN-ACK just before it sends that. The
 * program on egress drops the one that must wait (`begin` in admission_packet.h), and the kernel
 * sends it again when the timer ends.
 */
static __always_inline void ask_turn(struct bpf_sock_ops *ops, const struct tg_limit *l,
				     struct tg_nrm_queue *egress, __u32 slot)
{
	struct tg_nrm_queue *ingress = tg_queue_of(slot, TG_INGRESS), *queue = egress;
	__u64 now = bpf_ktime_get_ns(), wait, other, rtt_ns;
	__u32 ticks;

	/* Another program, or the limit inside this one, has set the timer. */
	if (!ingress || !(l->flags & TG_FLAG_PACE_FAIR) || is_exempt(ops, l) ||
	    (__s32)ops->reply > 0)
		return;
	if (!ops->is_fullsock && (!egress->turns.retries || egress->turns.crowded))
		return;
	wait = turn_ns(slot, TG_EGRESS, now);
	/* A program that only asks waits for the turn of its replies. */
	if (ops->is_fullsock && ad_only_asks(&egress->turns))
		wait = 0;
	other = turn_ns(slot, TG_INGRESS, now);
	rtt_ns = fs_max(egress->rtt_ns, ingress->rtt_ns);
	if (other > wait) {
		queue = ingress;
		wait = other;
	}
	if (ops->is_fullsock) {
		ticks = hold_syn(ops, wait, rtt_ns);
		if (!ticks)
			return;
		__sync_fetch_and_add(&queue->turns.held, 1);
	} else {
		ticks = ad_hold_ticks(wait, egress->turns.retries, rtt_ns, tick_ns);
		if (!ticks)
			return;
		egress->turns.asked_of = queue == ingress ? TG_INGRESS : TG_EGRESS;
		egress->turns.asked = ad_asked(now, bpf_ntohl(ops->remote_port));
	}
	ops->reply = ticks;
}

/* A connection has ended: the next ones learn from what it took. */
static __always_inline void learn(struct bpf_sock_ops *ops, struct tg_nrm_queue *egress, __u32 slot)
{
	struct tcp_sock *tp = ops->sk ? bpf_skc_to_tcp_sock(ops->sk) : 0;
	struct tg_nrm_queue *ingress = tg_queue_of(slot, TG_INGRESS);

	if (!tp || !ingress || ops->args[1] != BPF_TCP_CLOSE ||
	    tg_is_parent(egress, bpf_ktime_get_ns()))
		return;
	ad_ended(&egress->turns,
		 tp->bytes_sent + (tp->data_segs_out + CONTROL_SEGMENTS) * (__u64)TG_HEADER_BYTES);
	ad_ended(&ingress->turns, ops->bytes_received + ops->segs_in * (__u64)TG_HEADER_BYTES);
}

/*
 * The kernel takes a held SYN-ACK, and one more that was sent again because the client is far away,
 * for lost ones, and begins with a window of one segment. So the connection gets the usual window.
 */
static __always_inline void set_initial_window(struct bpf_sock_ops *ops,
					       const struct tg_nrm_queue *queue)
{
	struct tcp_sock *tp = ops->sk ? bpf_skc_to_tcp_sock(ops->sk) : 0;
	__u32 window = TG_INITIAL_WINDOW;

	if (tp && queue->turns.held && tp->total_retrans > 1)
		bpf_setsockopt(ops, TG_SOL_TCP, TCP_BPF_IW, &window, sizeof(window));
}

/* Sets the timers of a socket before its first handshake. */
static __always_inline void set_first_timers(struct bpf_sock_ops *ops, const struct tg_limit *l)
{
	struct bpf_sock *sk = ops->sk;
	struct tcp_sock *tp;

	if (!sk || (ops->op == BPF_SOCK_OPS_TCP_CONNECT_CB && begins_exempt(ops, l)))
		return;
	/* Entries in the limit's map are given back, also by another version of Tidegate. */
	if (ops->op == BPF_SOCK_OPS_TCP_LISTEN_CB &&
	    !bpf_sk_storage_get(&sockets_of_limit, sk, 0, BPF_SK_STORAGE_GET_F_CREATE))
		return;
	tg_set_timers(ops, l);
	tp = ops->op == BPF_SOCK_OPS_TCP_LISTEN_CB ? bpf_skc_to_tcp_sock(sk) : 0;
	if (tp && l->flags & TG_FLAG_PACE_FAIR)
		tg_set_answers(ops, tp);
}

SEC("sockops")
int tune(struct bpf_sock_ops *ops)
{
	struct tg_nrm_queue *queue;
	struct tg_limit *l;
	int begins;
	__u32 slot;
	__u64 now;

	if (!tg_find_slot(&slot))
		return 1;
	l = tg_limit_of(slot, TG_EGRESS);
	queue = tg_queue_of(slot, TG_EGRESS);
	if (!l || !queue)
		return 1;
	if (ops->op == BPF_SOCK_OPS_TIMEOUT_INIT) {
		ask_turn(ops, l, queue, slot);
		return 1;
	}
	if (ops->op == BPF_SOCK_OPS_STATE_CB) {
		learn(ops, queue, slot);
		return 1;
	}
	if (ops->op == BPF_SOCK_OPS_RWND_INIT) {
		set_first_window(ops, slot);
		return 1;
	}
	/* No packet if only the length of the options is asked for. */
	if (ops->op == BPF_SOCK_OPS_HDR_OPT_LEN_CB &&
	    ops->args[0] != BPF_WRITE_HDR_TCP_CURRENT_MSS) {
		if (has_parent)
			tg_claim(ops->sk, bpf_ktime_get_ns());
		if (!is_exempt(ops, l))
			set_window_clamp(ops, 0, slot);
		return 1;
	}
	begins = ops->op == BPF_SOCK_OPS_TCP_CONNECT_CB || ops->op == BPF_SOCK_OPS_TCP_LISTEN_CB;
	if (!begins && ops->op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB &&
	    ops->op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB && ops->op != BPF_SOCK_OPS_RTT_CB)
		return 1;
	if (has_parent)
		tg_claim(ops->sk, bpf_ktime_get_ns());
	if (!begins && ops->op != BPF_SOCK_OPS_RTT_CB && tg_has_windows(l) &&
	    !begins_exempt(ops, l)) {
		set_window_clamp(ops, 1, slot);
		bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags |
						   BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	}
	now = bpf_ktime_get_ns();
	if (tg_is_parent(queue, now)) {
		if (leave_to_child(ops, now))
			return 1;
		queue = tg_queue_of(slot, TG_EGRESS + TG_OWN);
		if (!queue)
			return 1;
	}
	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		set_first_timers(ops, l);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		if (begins_exempt(ops, l)) {
			/* It has inherited them. */
			if (ops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
				tg_free_timers(ops, l);
			break;
		}
		/* An older listener had none. */
		tg_set_timers(ops, l);
		if (ops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
			set_initial_window(ops, queue);
		set_pacing(ops, l, queue, 1);
		bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags |
						   BPF_SOCK_OPS_RTT_CB_FLAG |
						   BPF_SOCK_OPS_STATE_CB_FLAG);
		break;
	case BPF_SOCK_OPS_RTT_CB:
		if (is_exempt(ops, l))
			break;
		/* srtt_us is stored times eight. */
		fold_rtt(queue, ops->srtt_us >> 3);
		set_pacing(ops, l, queue, 0);
		break;
	}
	return 1;
}

#endif
