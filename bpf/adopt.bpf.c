// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Takes the TCP sockets that exist into a limit, and gives them back: an iterator over the sockets
 * of a network namespace that sets or lifts the pacing ceiling of those in the limit's cgroup or
 * below it.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "intf.h"
#include "sockets.h"
#include "vmlinux.h"

#define TG_TCP_ESTABLISHED 1

/* Lift what the limit has set instead of setting it. */
const volatile __u8 release = 0;

/* How deep the limit's cgroup lies. */
const volatile __u32 level = 0;

static __always_inline int is_below(struct cgroup *cgroup, __u64 id)
{
	struct cgroup *ancestor;

	if (!cgroup || BPF_CORE_READ(cgroup, level) < (int)level)
		return 0;
	if (bpf_core_read(&ancestor, sizeof(ancestor), &cgroup->ancestors[level]))
		return 0;
	return BPF_CORE_READ(ancestor, kn, id) == id;
}

SEC("iter/tcp")
int adopt(struct bpf_iter__tcp *ctx)
{
	__u32 key = 0, current = TG_PACING_UNLIMITED, wanted;
	struct tg_limit *l = bpf_map_lookup_elem(&limit, &key);
	struct tg_queue *queue = bpf_map_lookup_elem(&queues, &key);
	struct sock_common *common = ctx->sk_common;
	struct tg_socket *ours;
	struct tcp_sock *tp;
	struct sock *sk;

	if (!l || !queue || !common || common->skc_state != TG_TCP_ESTABLISHED)
		return 0;
	tp = bpf_skc_to_tcp_sock(common);
	if (!tp)
		return 0;
	sk = (struct sock *)tp;
	if (!is_below(BPF_CORE_READ(sk, sk_cgrp_data.cgroup), l->cgroup_id))
		return 0;
	ours = bpf_sk_storage_get(&sockets, sk, 0, release ? 0 : BPF_SK_STORAGE_GET_F_CREATE);
	if (!ours)
		return 0;
	wanted = release ? TG_PACING_UNLIMITED
			 : tg_pacing_rate(l, tg_share(l, queue, 0), tp->mss_cache,
					  common->skc_family == TG_AF_INET6);
	bpf_getsockopt(sk, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &current, sizeof(current));
	if (!tg_may_set(current, wanted, ours))
		return 0;
	if (!bpf_setsockopt(sk, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &wanted, sizeof(wanted)))
		ours->pacing_byte_s = wanted;
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
