/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The settings of a limit on the TCP sockets of its cgroup. Used by the sock_ops program for new
 * connections, and by the iterator for existing ones.
 */
#ifndef TG_SOCKETS_H
#define TG_SOCKETS_H

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "nrm/answers.h"
#include "common/fair_share.h"
#include "nrm/intf.h"
#include "common/maps.h"
#include "nrm/queues.h"
#include "nrm/tree.h"
#include "common/vmlinux.h"

#define TG_SOL_SOCKET	      1
#define TG_SO_MAX_PACING_RATE 47
#define TG_PACING_UNLIMITED   (~0U)
/* IPv4 and TCP headers with timestamps; IPv6 is 20 bytes longer, 2 % at the usual segment size. */
#define TG_HEADER_BYTES	     (TG_LINK_HEADER_BYTES + 20 + 32)
#define TG_IPV6_EXTRA_BYTES  20
#define TG_AF_INET6	     10
#define TG_DEFAULT_MSS_BYTES 1448
/* The kernel accepts these only from two timer ticks up, and a tick is 1 to 10 ms. */
#define TG_TIMER_TRIES 4

/* Paths up to this round-trip time get a window. */
#define TG_SHORT_PATH_US 4000
/*
 * All flows' bursts together, in time at the limit's rate: less than the drop threshold of the
 * virtual queue, so that bursts that meet harm no other traffic.
 */
#define TG_BURSTS_US 3000
/*
 * BBR needs at least four packets. Of the 64 KB packets of the loopback interface two must be
 * enough.
 */
#define TG_LEAST_WINDOW	     4
#define TG_LEAST_LONG_WINDOW 2
#define TG_LONG_MSS_BYTES    16384
#define TG_INITIAL_WINDOW    10
#define TG_WINDOW_MAX	     0xffff
/* The receiver may keep an ACK back for so long (Linux: TCP_DELACK_MIN and a tick). */
#define TG_DELAYED_ACK_US 50000
/* The kernel's default. */
#define TG_DEFAULT_TIMER_US 200000
#define TG_NO_WINDOW	    0x7fffffff
/* TCP_BPF_SOCK_OPS_CB_FLAGS, since Linux 6.12. */
#define TG_TCP_CB_FLAGS 1008

/* Fewer segments do not predict those that follow. */
#define TG_PAYLOAD_SEGMENTS 8

/*
 * The payload of a segment of a socket, at most `mss`. A program that answers requests sends
 * segments of some bytes, which are mostly headers.
 */
static __always_inline __u32 tg_payload(const struct tcp_sock *tp, struct tg_socket *ours,
					__u32 mss)
{
	__u32 segments = tp->data_segs_out - ours->segments_sent;

	if (segments >= TG_PAYLOAD_SEGMENTS) {
		ours->payload = fs_max((tp->bytes_sent - ours->bytes_sent) / segments, 1);
		ours->bytes_sent = tp->bytes_sent;
		ours->segments_sent = tp->data_segs_out;
	}
	return ours->payload ? fs_min(ours->payload, mss) : mss;
}

/*
 * The pacing rate of a socket that may use `share` of what the limit may use. The kernel paces
 * payload, the limit counts whole frames. `payload` is that of a segment.
 */
static __always_inline __u32 tg_pacing_rate(const struct tg_limit *limit, __u64 rate_bit_s,
					    __u64 share, __u32 payload, int ipv6)
{
	__u64 headers = TG_HEADER_BYTES + (ipv6 ? TG_IPV6_EXTRA_BYTES : 0);
	__u64 byte_s = (rate_bit_s / 8) * (share >> 8) >> 16;

	if (!(limit->flags & (TG_FLAG_PACE_CEILING | TG_FLAG_PACE_FAIR)) ||
	    !limit->queue[TG_EGRESS].cost)
		return TG_PACING_UNLIMITED;
	if (!payload)
		payload = TG_DEFAULT_MSS_BYTES;
	byte_s = byte_s * payload / (payload + headers);
	return byte_s < TG_PACING_UNLIMITED ? byte_s : TG_PACING_UNLIMITED;
}

/* The share of a socket that is established or, if `newcomer`, is becoming so. */
static __always_inline __u64 tg_share(const struct tg_limit *limit, struct tg_nrm_queue *queue,
				      int newcomer)
{
	__u64 share, flows;

	if (!(limit->flags & TG_FLAG_PACE_FAIR))
		return FS_ONE;
	share = queue->common.share ? queue->common.share : FS_TARGET;
	if (!newcomer)
		return share;
	/* Newcomers of one epoch share what the next would give them all. */
	flows = queue->common.flows_before + __sync_fetch_and_add(&queue->newcomers, 1) + 1;
	return fs_min(share, FS_TARGET / flows);
}

/*
 * On a short path TCP builds segments of 64 KB whatever its pacing rate is (tcp_tso_rtt_log), 52 ms
 * at 10 Mbit/s, but none longer than half the window. A window of two round trips and twice
 * TG_BURSTS_US at the paced rate keeps the bursts of all flows together below TG_BURSTS_US of the
 * limit. The CPU time depends on the number of bursts, so they are as long as allowed.
 */
static __always_inline __u32 tg_window(__u32 byte_s, __u64 srtt_us, __u32 mss)
{
	__u32 least = mss > TG_LONG_MSS_BYTES ? TG_LEAST_LONG_WINDOW : TG_LEAST_WINDOW;

	if (!mss)
		mss = TG_DEFAULT_MSS_BYTES;
	return fs_max(least, byte_s * (2 * srtt_us + 2 * TG_BURSTS_US) / 1000000 / mss);
}

/*
 * Sets a timer option. If the kernel's tick is too coarse for it, sets the next doubling that the
 * kernel accepts.
 */
static __always_inline void tg_set_timer(void *ctx, int option, __u32 us)
{
	for (int i = 0; us && i < TG_TIMER_TRIES; i++, us *= 2)
		if (!bpf_setsockopt(ctx, TG_SOL_TCP, option, &us, sizeof(us)))
			return;
}

/*
 * The kernel uses the least time-out at the first round trip of a connection. Later it lowers the
 * time-out only by a quarter of the rest with each round trip. So a socket gets its timers before
 * its handshake: a client when it connects; an accepted socket inherits them from the listener.
 */
static __always_inline void tg_set_timers(void *ctx, const struct tg_limit *limit)
{
	tg_set_timer(ctx, TCP_BPF_RTO_MIN, limit->rto_min_us);
	tg_set_timer(ctx, TCP_BPF_DELACK_MAX, limit->delack_max_us);
}

/*
 * Gives back the timers that the limit has set. On an established connection the kernel lets the
 * time-out grow again only with the variance of its round trips.
 */
static __always_inline void tg_free_timers(void *ctx, const struct tg_limit *limit)
{
	if (limit->rto_min_us)
		tg_set_timer(ctx, TCP_BPF_RTO_MIN, TG_DEFAULT_TIMER_US);
	if (limit->delack_max_us)
		tg_set_timer(ctx, TCP_BPF_DELACK_MAX, TG_DEFAULT_TIMER_US);
}

/* In every network namespace the loopback device is the first. */
#define TG_LOOPBACK_IFINDEX 1

/* Traffic within the host takes the loopback interface: to 127/8 or to the host's own address. */
static __always_inline int tg_within_host4(__u32 local, __u32 remote)
{
	return remote == local || (remote & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
}

static __always_inline int tg_within_host6(const __u32 *local, const __u32 *remote)
{
	int mapped = !remote[0] && !remote[1] && remote[2] == bpf_htonl(0xffff);

	if (mapped)
		return tg_within_host4(local[3], remote[3]);
	return local[0] == remote[0] && local[1] == remote[1] && local[2] == remote[2] &&
	       local[3] == remote[3];
}

/* Its route leads to the loopback interface, as between two addresses of the host. */
static __always_inline int tg_is_routed_within(const struct sock *sk)
{
	return BPF_CORE_READ(sk, sk_dst_cache, dev, ifindex) == TG_LOOPBACK_IFINDEX;
}

/*
 * Whether a socket that is paced at `current` should now be paced at `wanted`: down always, up only
 * if the current rate was set here. What the program itself asked for, or an outer limit set,
 * stays.
 */
static __always_inline int tg_may_set(__u32 current, __u32 wanted, const struct tg_socket *ours)
{
	return wanted < current || (ours->pacing_byte_s && ours->pacing_byte_s == current);
}

#endif
