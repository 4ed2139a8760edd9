// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Sets the congestion control of the TCP sockets of a cgroup, without a change of the programs in
 * it. A program that names its own (TCP_CONGESTION) keeps that.
 *
 * ECN is negotiated in the handshake, so a control that needs it must be set before:
 * - connecting: at connect(2), while the socket is still closed. BPF_SOCK_OPS_TCP_CONNECT_CB would
 *   also be before the SYN. But the state is already SYN_SENT there, so the kernel initialises the
 *   control at once, when no ECN has been agreed on, and its `dctcp` then switches to Reno for
 *   good. On a closed socket initialisation waits for the answer.
 * - accepting: on the listener, from which the accepted sockets inherit. A listener older than this
 *   program answers for ECN through BPF_SOCK_OPS_NEEDS_ECN, and its sockets get the control when
 *   they are established.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/tcp.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "common/vmlinux.h"

#define SOL_TCP	    6
#define SOCK_STREAM 1

/* Zero-padded name, as long as the kernel's longest (TCP_CA_NAME_MAX). */
const volatile char cc[16];
/* The control has TCP_CONG_NEEDS_ECN. */
const volatile bool needs_ecn;

/* True when somebody has already set this socket's congestion control. */
static __always_inline bool chosen(struct bpf_sock *sk)
{
	struct tcp_sock *tp = sk ? bpf_skc_to_tcp_sock(sk) : 0;

	return !tp || BPF_CORE_READ_BITFIELD(&tp->inet_conn, icsk_ca_setsockopt);
}

SEC("sockops")
int set_cc(struct bpf_sock_ops *ops)
{
	switch (ops->op) {
	case BPF_SOCK_OPS_NEEDS_ECN:
		/*
		 * Called for a connection request whose listener lacks ECN; for a full socket the
		 * answer is in its own congestion control.
		 */
		if (needs_ecn && !ops->is_fullsock)
			ops->reply = 1;
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		if (!chosen(ops->sk))
			bpf_setsockopt(ops, SOL_TCP, TCP_CONGESTION, (void *)cc, sizeof(cc));
		break;
	}
	return 1;
}

static __always_inline int before_connect(struct bpf_sock_addr *ctx)
{
	if (ctx->type == SOCK_STREAM && ctx->protocol == IPPROTO_TCP && !chosen(ctx->sk))
		bpf_setsockopt(ctx, SOL_TCP, TCP_CONGESTION, (void *)cc, sizeof(cc));
	return 1;
}

SEC("cgroup/connect4")
int set_cc_connect4(struct bpf_sock_addr *ctx)
{
	return before_connect(ctx);
}

SEC("cgroup/connect6")
int set_cc_connect6(struct bpf_sock_addr *ctx)
{
	return before_connect(ctx);
}

char _license[] SEC("license") = "Dual BSD/GPL";
