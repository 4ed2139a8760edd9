// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Gives back the TCP sockets of a limit of another version: an iterator over the sockets of a
 * network namespace that removes pacing, window and timers of those that have an entry in the
 * limit's map. Nothing else of the limit is read, and only the members of an entry that keep their
 * offset in every version (intf.h).
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "nrm/answers.h"
#include "nrm/intf.h"
#include "nrm/states.h"
#include "common/vmlinux.h"

#define TG_SOL_SOCKET	      1
#define TG_SO_MAX_PACING_RATE 47
#define TG_TCP_WINDOW_CLAMP   10
/* The kernel's default. */
#define TG_PACING_UNLIMITED (~0U)
#define TG_DEFAULT_TIMER_US 200000
#define TG_NO_WINDOW	    0x7fffffff

/* Whether sockets of that version have a receive window of ours. */
const volatile __u8 has_window = 0;

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tg_socket_kept);
} sockets_of_limit SEC(".maps");

SEC("iter/tcp")
int release(struct bpf_iter__tcp *ctx)
{
	__u32 timer = TG_DEFAULT_TIMER_US, window = TG_NO_WINDOW, free = TG_PACING_UNLIMITED;
	struct sock_common *common = ctx->sk_common;
	struct tg_socket_kept *ours;
	__u32 current = 0;
	struct tcp_sock *tp;
	struct sock *sk;

	if (!common || !tg_is_in_use(common))
		return 0;
	tp = bpf_skc_to_tcp_sock(common);
	if (!tp)
		return 0;
	sk = (struct sock *)tp;
	ours = bpf_sk_storage_get(&sockets_of_limit, sk, 0, 0);
	if (!ours)
		return 0;
	if (has_window && ours->clamp_bytes && ours->clamp_bytes == tp->window_clamp)
		bpf_setsockopt(sk, TG_SOL_TCP, TG_TCP_WINDOW_CLAMP, &ours->theirs_bytes,
			       sizeof(ours->theirs_bytes));
	if (common->skc_state == TG_TCP_LISTEN)
		tg_free_answers(sk, tp);
	bpf_setsockopt(sk, TG_SOL_TCP, TCP_BPF_RTO_MIN, &timer, sizeof(timer));
	bpf_setsockopt(sk, TG_SOL_TCP, TCP_BPF_DELACK_MAX, &timer, sizeof(timer));
	bpf_setsockopt(sk, TG_SOL_TCP, TCP_BPF_SNDCWND_CLAMP, &window, sizeof(window));
	bpf_getsockopt(sk, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &current, sizeof(current));
	if (ours->pacing_byte_s && ours->pacing_byte_s == current)
		bpf_setsockopt(sk, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &free, sizeof(free));
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
