// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Takes existing TCP sockets into a limit, and gives them back: an iterator over the sockets of a
 * network namespace that sets or removes pacing, window and timers of those in the limit's cgroup
 * or below it.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "common/exempt.h"
#include "nrm/intf.h"
#include "nrm/sockets.h"
#include "nrm/states.h"
#include "common/vmlinux.h"
#include "nrm/windows.h"

#define MOST_LEVELS 65536

/* The order to carry out. A map and no constant, so that it is loaded once for all cgroups. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tg_adoption);
} adoption SEC(".maps");

static __always_inline int is_below(struct cgroup *cgroup, __u32 level, __u64 id)
{
	struct cgroup *ancestor;

	/* Bounded for the verifier; no cgroup is so deep. */
	if (!cgroup || BPF_CORE_READ(cgroup, level) < (int)level || level > MOST_LEVELS)
		return 0;
	if (bpf_core_read(&ancestor, sizeof(ancestor), &cgroup->ancestors[level]))
		return 0;
	return BPF_CORE_READ(ancestor, kn, id) == id;
}

static __always_inline int is_exempt(struct sock_common *sk, const struct tg_limit *l)
{
	if (l->flags & TG_FLAG_LOOPBACK)
		return 0;
	if (tg_is_routed_within((const struct sock *)sk))
		return 1;
	if (sk->skc_family == TG_AF_INET6) {
		__u32 local[4], remote[4];

		BPF_CORE_READ_INTO(&local, sk, skc_v6_rcv_saddr.in6_u.u6_addr32);
		BPF_CORE_READ_INTO(&remote, sk, skc_v6_daddr.in6_u.u6_addr32);
		return tg_within_host6(local, remote);
	}
	return tg_within_host4(sk->skc_rcv_saddr, sk->skc_daddr);
}

/* Whether the remote address is exempt. */
static __always_inline int is_exempt_remote(struct sock_common *sk)
{
	struct tg_prefix key;

	if (!has_exempt)
		return 0;
	tg_key4(&key, BPF_CORE_READ(sk, skc_daddr));
	if (sk->skc_family == TG_AF_INET6) {
		BPF_CORE_READ_INTO(&key.address, sk, skc_v6_daddr.in6_u.u6_addr32);
		tg_end_key6(&key);
	}
	return tg_has_prefix(&key);
}

/*
 * Asks for a callback every round trip, and with `acks` for every packet that is built. Before
 * Linux 6.12 this is not possible for an existing socket.
 */
static __always_inline int hear(void *sk, int acks)
{
	int flags = 0;

	if (bpf_getsockopt(sk, TG_SOL_TCP, TG_TCP_CB_FLAGS, &flags, sizeof(flags)))
		return 0;
	flags |= BPF_SOCK_OPS_RTT_CB_FLAG;
	if (acks)
		flags |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	return !bpf_setsockopt(sk, TG_SOL_TCP, TG_TCP_CB_FLAGS, &flags, sizeof(flags));
}

/* Until now the socket was its parent's: claims it, with what the parent has set. */
static __always_inline void take_over(struct sock *sk, struct tg_socket *ours, __u32 current)
{
	struct tg_socket *theirs =
	    bpf_sk_storage_get(&sockets_of_limit_above, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);

	if (!theirs)
		return;
	theirs->claimed_ns = bpf_ktime_get_ns();
	if (theirs->pacing_byte_s && theirs->pacing_byte_s == current) {
		ours->pacing_byte_s = current;
		theirs->pacing_byte_s = 0;
	}
	if (theirs->window_segments) {
		ours->window_segments = theirs->window_segments;
		theirs->window_segments = 0;
	}
}

/* The timers of a listener are those of the sockets that it accepts. */
static __always_inline void adopt_listener(struct sock *sk, const struct tcp_sock *tp,
					   const struct tg_limit *l,
					   const struct tg_nrm_queue *queue, int release)
{
	struct tg_socket *ours;
	__u64 now = bpf_ktime_get_ns();

	ours =
	    bpf_sk_storage_get(&sockets_of_limit, sk, 0, release ? 0 : BPF_SK_STORAGE_GET_F_CREATE);
	if (!ours)
		return;
	if (release) {
		tg_free_timers(sk, l);
		tg_free_answers(sk, tp);
	} else if (!tg_is_parent(queue, now) || !tg_is_claimed(ours, now)) {
		tg_set_timers(sk, l);
		if (l->flags & TG_FLAG_PACE_FAIR)
			tg_set_answers(sk, tp);
	}
	if (has_parent && !release)
		take_over(sk, ours, TG_PACING_UNLIMITED);
}

static __always_inline int adopt_socket(struct sock_common *common, struct tcp_sock *tp,
					const struct tg_limit *l, struct tg_nrm_queue *queue,
					__u32 slot, int release)
{
	__u32 current = TG_PACING_UNLIMITED, wanted = TG_PACING_UNLIMITED;
	__u32 window = TG_NO_WINDOW;
	struct sock *sk = (struct sock *)tp;
	struct tg_socket *ours;
	int hears, lift, exempt;
	__u64 now;

	if (common->skc_state == TG_TCP_LISTEN) {
		adopt_listener(sk, tp, l, queue, release);
		return 0;
	}
	exempt = is_exempt(common, l) || is_exempt_remote(common);
	ours = bpf_sk_storage_get(&sockets_of_limit, sk, 0,
				  release || exempt ? 0 : BPF_SK_STORAGE_GET_F_CREATE);
	if (!ours)
		return 0;
	/* A socket that has become exempt is given back. */
	lift = release || exempt;
	now = bpf_ktime_get_ns();
	if (!release && tg_is_parent(queue, now)) {
		if (tg_is_claimed(ours, now))
			return 0;
		queue = tg_queue_of(slot, TG_EGRESS + TG_OWN);
		if (!queue)
			return 0;
	}
	/*
	 * The window moves with the next packet that the socket builds, if there is a callback for
	 * it.
	 */
	if (lift || !tg_has_windows(l))
		tg_free_window(sk, tp, ours);
	if (lift) {
		tg_free_timers(sk, l);
		if (l->flags & TG_FLAG_PACE_FAIR)
			bpf_setsockopt(sk, TG_SOL_TCP, TCP_BPF_SNDCWND_CLAMP, &window,
				       sizeof(window));
		ours->window_segments = 0;
	} else {
		tg_set_timers(sk, l);
		hears = hear(sk, tg_has_windows(l));
		/*
		 * A socket without a callback learns no new share or rate, so it gets at least the
		 * ceiling.
		 */
		ours->share = hears ? tg_share(l, queue, 0) : FS_ONE;
		wanted = tg_pacing_rate(
		    l, hears ? tg_rate(l, queue, TG_EGRESS) : l->rate_bit_s[TG_EGRESS], ours->share,
		    tp->mss_cache, common->skc_family == TG_AF_INET6);
	}
	bpf_getsockopt(sk, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &current, sizeof(current));
	if (has_parent && !release)
		take_over(sk, ours, current);
	if (!tg_may_set(current, wanted, ours))
		return 0;
	if (!bpf_setsockopt(sk, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &wanted, sizeof(wanted)))
		ours->pacing_byte_s = wanted;
	return 0;
}

SEC("iter/tcp")
int adopt(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;
	struct tg_adoption *what;
	struct tg_nrm_queue *queue;
	struct tg_limit *l;
	struct tcp_sock *tp;
	__u32 key = 0, copy;

	if (!common || !tg_is_in_use(common))
		return 0;
	what = bpf_map_lookup_elem(&adoption, &key);
	if (!what)
		return 0;
	l = tg_limit_now(what->slot, &copy);
	queue = tg_queue_of(what->slot, TG_EGRESS);
	tp = bpf_skc_to_tcp_sock(common);
	if (!l || !queue || !tp ||
	    !is_below(BPF_CORE_READ((struct sock *)tp, sk_cgrp_data.cgroup), what->level,
		      what->cgroup_id))
		return 0;
	adopt_socket(common, tp, l, queue, what->slot, what->release);
	/* In a pool another limit may have the socket next. */
	if (what->release)
		bpf_sk_storage_delete(&sockets_of_limit, (struct sock *)tp);
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
