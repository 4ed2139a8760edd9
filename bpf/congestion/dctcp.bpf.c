// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * DCTCP as a struct_ops congestion control, for kernels that were built without it. The kernel
 * calls it `tg_dctcp`: names are at most 15 characters and `dctcp` stays free for the module.
 *
 * TCP_CONG_NEEDS_ECN makes a connection ask for ECN even where net.ipv4.tcp_ecn is 2 (answer only),
 * sets ECT on every packet, SYN included, and makes the kernel report each arriving packet's CE
 * bit. Both ends need it:
 * - a listener without it refuses ECN to a SYN that carries ECT (a plain RFC 3168 SYN does not);
 *   then, as for every connection without ECN, init() switches to Reno;
 * - a peer that did agree to ECN, but as RFC 3168, repeats ECE for a whole round trip after one
 *   mark. F then comes out too large and the window is cut as much as Reno would: safe, but slow.
 */
#include <linux/bpf.h>
#include <linux/tcp.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#include "common/vmlinux.h"
#include "congestion/dctcp.h"

#define SOL_TCP		   6
#define TCP_CONG_NEEDS_ECN 0x2
/* Bits of tcp_sock.ecn_flags. */
#define ECN_OK	       0x1
#define ECN_DEMAND_CWR 0x4

/* enum of <net/tcp_states.h>; UAPI values, seen in TCP_INFO. */
#define STATE_SYN_SENT 2
#define STATE_CLOSE    7
#define STATE_LISTEN   10

extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;

/* In icsk_ca_priv, zeroed before init. */
struct dctcp {
	/*
	 * Sender: counters of tcp_sock when the current window began, and the window's last
	 * sequence number.
	 */
	__u32 delivered;
	__u32 delivered_ce;
	__u32 window_end;
	__u32 alpha;
	/* Before the last reduction. */
	__u32 prior_cwnd;
	/* Receiver: rcv_nxt at the last packet, and whether that was marked. */
	__u32 rcv_nxt;
	__u8 ce_state;
};

static const char fallback[] = "reno";

static __always_inline struct dctcp *state(struct sock *sk)
{
	return (struct dctcp *)((struct inet_connection_sock *)sk)->icsk_ca_priv;
}

static __always_inline void begin_window(const struct tcp_sock *tp, struct dctcp *ca)
{
	ca->delivered = tp->delivered;
	ca->delivered_ce = tp->delivered_ce;
	ca->window_end = tp->snd_nxt;
}

SEC("struct_ops")
void BPF_PROG(tg_init, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct dctcp *ca = state(sk);
	__u8 tcp_state = sk->__sk_common.skc_state;

	/* Until the SYN is answered it is not known whether there will be ECN. */
	if (!(tp->ecn_flags & ECN_OK) && tcp_state != STATE_CLOSE && tcp_state != STATE_LISTEN &&
	    tcp_state != STATE_SYN_SENT) {
		/* Without echoed marks packets must not have ECT; Reno removes it. */
		bpf_setsockopt(sk, SOL_TCP, TCP_CONGESTION, (void *)fallback, sizeof(fallback));
		return;
	}
	/* Begin with 1: the first mark halves the window (RFC 8257, 4.2). */
	ca->alpha = DCTCP_ALPHA_ONE;
	ca->prior_cwnd = 0;
	ca->rcv_nxt = tp->rcv_nxt;
	ca->ce_state = 0;
	begin_window(tp, ca);
}

/* Called once a window, on its first ECE or loss. */
SEC("struct_ops")
__u32 BPF_PROG(tg_ssthresh, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct dctcp *ca = state(sk);

	ca->prior_cwnd = tp->snd_cwnd;
	return dctcp_ssthresh(tp->snd_cwnd, ca->alpha);
}

SEC("struct_ops")
void BPF_PROG(tg_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	tcp_reno_cong_avoid(sk, ack, acked);
}

/* A loss was found; ssthresh() has already run for this window. */
static __always_inline void lost(struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;

	tp->snd_ssthresh = dctcp_ssthresh_loss(state(sk)->prior_cwnd, tp->snd_ssthresh);
}

SEC("struct_ops")
void BPF_PROG(tg_set_state, struct sock *sk, __u8 new_state)
{
	struct inet_connection_sock *icsk = (struct inet_connection_sock *)sk;

	if (new_state == TCP_CA_Recovery &&
	    BPF_CORE_READ_BITFIELD(icsk, icsk_ca_state) != TCP_CA_Recovery)
		lost(sk);
}

static __always_inline void echo(struct tcp_sock *tp, __u8 ce)
{
	if (ce)
		tp->ecn_flags |= ECN_DEMAND_CWR;
	else
		tp->ecn_flags &= ~ECN_DEMAND_CWR;
}

static __always_inline void received(struct sock *sk, __u8 ce)
{
	struct inet_connection_sock *icsk = (struct inet_connection_sock *)sk;
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct dctcp *ca = state(sk);
	__u8 timer = bpf_core_enum_value(enum inet_csk_ack_state_t, ICSK_ACK_TIMER);
	__u8 now = bpf_core_enum_value(enum inet_csk_ack_state_t, ICSK_ACK_NOW);
	__u8 prior_ce = ca->ce_state;

	switch (dctcp_received(&ca->ce_state, ce, icsk->icsk_ack.pending & timer)) {
	case DCTCP_ACK_PRIOR_THEN_NOW:
		echo(tp, prior_ce);
		bpf_tcp_send_ack(tp, ca->rcv_nxt);
		icsk->icsk_ack.pending |= now;
		break;
	case DCTCP_ACK_NOW:
		icsk->icsk_ack.pending |= now;
		break;
	case DCTCP_ACK_AS_USUAL:
		break;
	}
	ca->rcv_nxt = tp->rcv_nxt;
	echo(tp, ce);
}

SEC("struct_ops")
void BPF_PROG(tg_cwnd_event, struct sock *sk, __u32 event)
{
	if (event == bpf_core_enum_value(enum tcp_ca_event, CA_EVENT_ECN_IS_CE))
		received(sk, 1);
	else if (event == bpf_core_enum_value(enum tcp_ca_event, CA_EVENT_ECN_NO_CE))
		received(sk, 0);
	else if (event == bpf_core_enum_value(enum tcp_ca_event, CA_EVENT_LOSS))
		lost(sk);
}

SEC("struct_ops")
void BPF_PROG(tg_in_ack_event, struct sock *sk, __u32 flags)
{
	const struct tcp_sock *tp = (const struct tcp_sock *)sk;
	struct dctcp *ca = state(sk);

	if ((__s32)(tp->snd_una - ca->window_end) < 0)
		return;
	ca->alpha = dctcp_alpha(ca->alpha, tp->delivered - ca->delivered,
				tp->delivered_ce - ca->delivered_ce);
	begin_window(tp, ca);
}

SEC("struct_ops")
__u32 BPF_PROG(tg_undo_cwnd, struct sock *sk)
{
	const struct tcp_sock *tp = (const struct tcp_sock *)sk;
	__u32 prior = state(sk)->prior_cwnd;

	return tp->snd_cwnd > prior ? tp->snd_cwnd : prior;
}

/* The name of this map is how other processes find the registration. */
SEC(".struct_ops.link")
struct tcp_congestion_ops tg_dctcp = {
    .init = (void *)tg_init,
    .ssthresh = (void *)tg_ssthresh,
    .cong_avoid = (void *)tg_cong_avoid,
    .set_state = (void *)tg_set_state,
    .cwnd_event = (void *)tg_cwnd_event,
    .in_ack_event = (void *)tg_in_ack_event,
    .undo_cwnd = (void *)tg_undo_cwnd,
    .flags = TCP_CONG_NEEDS_ECN,
    .name = "tg_dctcp",
};

char _license[] SEC("license") = "Dual BSD/GPL";
