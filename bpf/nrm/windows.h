/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The receive window that an ingress limit of scheme `pace` sets on the TCP sockets of its cgroup.
 * Used by the sock_ops program, which runs for every packet that a socket builds before its window
 * is chosen, and by the iterator over existing sockets.
 */
#ifndef TG_WINDOWS_H
#define TG_WINDOWS_H

#include <bpf/bpf_core_read.h>

#include "nrm/rwnd.h"
#include "nrm/sockets.h"
#include "common/vmlinux.h"

#define TG_TCP_WINDOW_CLAMP 10
/* The kernel does not know the segment size of a new connection. */
#define TG_LEAST_MSS_BYTES 536
/* The kernel stores the receiver's estimate times eight, like the sender's. */
#define TG_RTT_SHIFT 3

/* Whether flows get their share as receive windows. */
static __always_inline int tg_has_windows(const struct tg_limit *limit)
{
	return limit->flags & TG_FLAG_PACE_FAIR && limit->queue[TG_INGRESS].cost;
}

/* The share of a connection that is about to offer its first window. */
static __always_inline __u64 tg_first_share(const struct tg_limit *limit,
					    struct tg_nrm_queue *queue)
{
	__u64 flows = queue->common.flows_before + queue->newcomers + 1;

	return fs_min(tg_share(limit, queue, 0), FS_TARGET / flows);
}

/* The payload that may arrive in `share` of what the limit may use. */
static __always_inline __u64 tg_receive_byte_s(__u64 rate_bit_s, __u64 share, __u32 mss, int ipv6)
{
	__u64 headers = TG_HEADER_BYTES + (ipv6 ? TG_IPV6_EXTRA_BYTES : 0);
	__u64 byte_s = (rate_bit_s / 8) * (share >> 8) >> 16;

	return byte_s * mss / (mss + headers);
}

/* Gives the window back. */
static __always_inline void tg_free_window(void *ctx, struct tcp_sock *tp, struct tg_socket *ours)
{
	if (ours->clamp_bytes && ours->clamp_bytes == tp->window_clamp)
		bpf_setsockopt(ctx, TG_SOL_TCP, TG_TCP_WINDOW_CLAMP, &ours->theirs_bytes,
			       sizeof(ours->theirs_bytes));
	ours->clamp_bytes = 0;
	ours->rwnd.last_ns = 0;
}

/*
 * Sets the window of a socket that builds a packet: down always, up only if the current one was set
 * here, and never above what the kernel or the program had chosen. What an outer limit set stays.
 */
static __always_inline void tg_set_window(void *ctx, struct tcp_sock *tp, struct tg_socket *ours,
					  const struct tg_limit *limit, struct tg_nrm_queue *queue,
					  int newcomer, int ipv6)
{
	__u32 current = tp->window_clamp, mss, rtt_us, wanted;
	struct rw_path path;

	mss = fs_max(tp->inet_conn.icsk_ack.rcv_mss, TG_LEAST_MSS_BYTES);
	/* The receiver's own estimate comes with the data; until then there is the handshake's. */
	rtt_us = fs_max(tp->rcv_rtt_est.rtt_us, tp->srtt_us) >> TG_RTT_SHIFT;
	path.byte_s = tg_receive_byte_s(tg_rate(limit, queue, TG_INGRESS),
					tg_share(limit, queue, newcomer), mss, ipv6);
	path.rtt_ns = (__u64)rtt_us * 1000;
	path.mss = mss;
	path.rcv_nxt = tp->rcv_nxt;
	/* A lost update of a smoothed value does no harm. */
	queue->rtt_ns += path.rtt_ns / 16 - queue->rtt_ns / 16;

	wanted = rw_window(&ours->rwnd, &path, bpf_ktime_get_ns());
	if (!ours->clamp_bytes || current > ours->clamp_bytes)
		ours->theirs_bytes = current;
	if (ours->theirs_bytes && wanted > ours->theirs_bytes)
		wanted = ours->theirs_bytes;
	if (wanted == current || (wanted > current && current != ours->clamp_bytes))
		return;
	if (bpf_setsockopt(ctx, TG_SOL_TCP, TG_TCP_WINDOW_CLAMP, &wanted, sizeof(wanted)))
		return;
	/* The kernel has its own minimum. */
	ours->clamp_bytes = tp->window_clamp;
}

#endif
