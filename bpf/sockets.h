/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a limit sets on the TCP sockets of its cgroup, whoever asks for it: the sock_ops program for
 * new connections, the iterator for those that exist.
 */
#ifndef TG_SOCKETS_H
#define TG_SOCKETS_H

#include <bpf/bpf_helpers.h>

#include "fair_share.h"
#include "intf.h"

#define TG_SOL_SOCKET	      1
#define TG_SO_MAX_PACING_RATE 47
#define TG_SOL_TCP	      6
#define TG_TCP_MAXSEG	      2
#define TG_PACING_UNLIMITED   (~0U)
/* IPv4 and TCP headers with timestamps; IPv6 is 20 bytes longer, 2 % at the usual segment size. */
#define TG_HEADER_BYTES	     (TG_LINK_HEADER_BYTES + 20 + 32)
#define TG_IPV6_EXTRA_BYTES  20
#define TG_AF_INET6	     10
#define TG_DEFAULT_MSS_BYTES 1448
/* The kernel takes these only from two timer ticks up, and a tick is 1 to 10 ms. */
#define TG_TIMER_TRIES 4

/* Paths up to this round-trip time get a window; BBR needs at least four packets. */
#define TG_SHORT_PATH_US 4000
#define TG_LEAST_WINDOW	 4

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tg_limit);
} limit SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct tg_queue);
} queues SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tg_socket);
} sockets SEC(".maps");

/*
 * The pacing rate of a socket that may use `share` of the limit: the kernel paces payload, the
 * limit counts whole frames.
 */
static __always_inline __u32 tg_pacing_rate(const struct tg_limit *limit, __u64 share, __u32 mss,
					    int ipv6)
{
	__u64 headers = TG_HEADER_BYTES + (ipv6 ? TG_IPV6_EXTRA_BYTES : 0);
	__u64 byte_s = (limit->rate_bit_s[TG_EGRESS] / 8) * (share >> 8) >> 16;

	if (!(limit->flags & (TG_FLAG_PACE_CEILING | TG_FLAG_PACE_FAIR)) ||
	    !limit->queue[TG_EGRESS].cost)
		return TG_PACING_UNLIMITED;
	if (!mss)
		mss = TG_DEFAULT_MSS_BYTES;
	byte_s = byte_s * mss / (mss + headers);
	return byte_s < TG_PACING_UNLIMITED ? byte_s : TG_PACING_UNLIMITED;
}

/* The share of a socket that has been established or, if `newcomer`, is being so. */
static __always_inline __u64 tg_share(const struct tg_limit *limit, struct tg_queue *queue,
				      int newcomer)
{
	__u64 share, flows;

	if (!(limit->flags & TG_FLAG_PACE_FAIR))
		return FS_ONE;
	share = queue->share ? queue->share : FS_TARGET;
	if (!newcomer)
		return share;
	/* Newcomers of one epoch share what the next would give them all. */
	flows = queue->flows_before + __sync_fetch_and_add(&queue->newcomers, 1) + 1;
	return fs_min(share, FS_TARGET / flows);
}

/*
 * Whether a socket that is paced at `current` should now be paced at `wanted`: down always, up only
 * if what holds it was set here. What the program itself asked for, or an outer limit set, stays.
 */
static __always_inline int tg_may_set(__u32 current, __u32 wanted, const struct tg_socket *ours)
{
	return wanted < current || (ours->pacing_byte_s && ours->pacing_byte_s == current);
}

#endif
