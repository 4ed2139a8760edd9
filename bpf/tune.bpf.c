// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The companion of the virtual queue on TCP sockets: a cgroup sock_ops program.
 * - Scheme `pace`: each socket is paced at the fair share of the limit, from the moment it is
 *   established and again every round trip; on short paths its window keeps bursts short.
 * - Scheme `nrm` with a pacing ceiling: no socket is paced faster than the limit, so that one alone
 *   never overruns the virtual queue.
 * - Both: the minimum retransmission time-out and the longest delayed ACK of the limit.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "sockets.h"

/* Keeps bursts short on a short path; no longer path is touched, nor is its congestion control. */
static __always_inline void set_window(struct bpf_sock_ops *ops, __u32 byte_s, int newcomer)
{
	/* Delayed ACKs make a short path's smoothed round trip long, its least not. */
	__u64 srtt_us = fs_min(ops->srtt_us >> 3, TG_SHORT_PATH_US);
	__u32 window = tg_window(byte_s, srtt_us, ops->mss_cache);

	if (byte_s == TG_PACING_UNLIMITED)
		return;
	/* The first ten segments of a connection are not paced. */
	if (newcomer && window < TG_INITIAL_WINDOW)
		bpf_setsockopt(ops, TG_SOL_TCP, TCP_BPF_IW, &window, sizeof(window));
	if (ops->rtt_min <= TG_SHORT_PATH_US)
		bpf_setsockopt(ops, TG_SOL_TCP, TCP_BPF_SNDCWND_CLAMP, &window, sizeof(window));
}

/* Whether the connection stays within this host, and such traffic is exempt. */
static __always_inline int is_exempt(struct bpf_sock_ops *ops, const struct tg_limit *l)
{
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

static __always_inline void set_pacing(struct bpf_sock_ops *ops, const struct tg_limit *l,
				       struct tg_queue *queue, int newcomer)
{
	__u32 wanted, current = TG_PACING_UNLIMITED;
	struct tg_socket *ours;

	if (!ops->sk)
		return;
	ours = bpf_sk_storage_get(&sockets, ops->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!ours)
		return;
	wanted = tg_pacing_rate(l, tg_share(l, queue, newcomer), ops->mss_cache,
				ops->family == TG_AF_INET6);
	/* A flow grows into its share as in slow start: the others need time to make room. */
	if (!newcomer && ours->pacing_byte_s && wanted / 2 > ours->pacing_byte_s)
		wanted = 2 * ours->pacing_byte_s;
	/* Every round trip asks: what is within 2 % can stay. */
	if (!newcomer && wanted - wanted / 64 <= ours->pacing_byte_s &&
	    ours->pacing_byte_s <= wanted + wanted / 64)
		return;
	bpf_getsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &current, sizeof(current));
	if (!tg_may_set(current, wanted, ours))
		return;
	if (bpf_setsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &wanted, sizeof(wanted)))
		return;
	ours->pacing_byte_s = wanted;
	if (l->flags & TG_FLAG_PACE_FAIR)
		set_window(ops, wanted, newcomer);
}

/* Folds a round-trip time into the limit's; a lost update of a smoothed value is no loss. */
static __always_inline void fold_rtt(struct tg_queue *queue, __u32 srtt_us)
{
	__u64 rtt_ns = (__u64)srtt_us * 1000;

	queue->rtt_ns += rtt_ns / 16 - queue->rtt_ns / 16;
}

SEC("sockops")
int tune(struct bpf_sock_ops *ops)
{
	__u32 key = 0;
	struct tg_limit *l = bpf_map_lookup_elem(&limit, &key);
	struct tg_queue *queue = bpf_map_lookup_elem(&queues, &key);

	if (!l || !queue)
		return 1;
	switch (ops->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		if (is_exempt(ops, l))
			break;
		tg_set_timers(ops, l);
		set_pacing(ops, l, queue, 1);
		bpf_sock_ops_cb_flags_set(ops,
					  ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RTT_CB_FLAG);
		break;
	case BPF_SOCK_OPS_RTT_CB:
		/* srtt_us is kept eight times as large. */
		fold_rtt(queue, ops->srtt_us >> 3);
		set_pacing(ops, l, queue, 0);
		break;
	}
	return 1;
}

char _license[] SEC("license") = "Dual BSD/GPL";
