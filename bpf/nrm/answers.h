/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How often a listener in a limit sends a SYN-ACK again. The more retries, the earlier a held
 * connection can begin: the rule is in admission.h.
 */
#ifndef TG_ANSWERS_H
#define TG_ANSWERS_H

#include <bpf/bpf_helpers.h>

#include "nrm/admission.h"
#include "common/vmlinux.h"

#define TG_SOL_TCP    6
#define TG_TCP_SYNCNT 7
/* From Linux 6.13 on programs of cgroups see SYN-ACKs, and can hold them. */
#define TG_HOLDING_VERSION (6 << 16 | 13 << 8)

extern int LINUX_KERNEL_VERSION __kconfig;

/* The host's number of retries, for listeners that have not chosen one. */
static __always_inline __u32 tg_host_retries(const struct tcp_sock *tp)
{
	return tp->inet_conn.icsk_inet.sk.__sk_common.skc_net.net->ipv4.sysctl_tcp_synack_retries;
}

/* How often a listener sends a SYN-ACK again. */
static __always_inline __u32 tg_answer_retries(const struct tcp_sock *tp)
{
	__u32 chosen = tp->inet_conn.icsk_syn_retries;

	return chosen ? chosen : tg_host_retries(tp);
}

/* Gives a listener of a limit more retries. */
static __always_inline void tg_set_answers(void *ctx, const struct tcp_sock *tp)
{
	int retries;

	if (LINUX_KERNEL_VERSION < TG_HOLDING_VERSION)
		return;
	retries = ad_answer_retries(tp->inet_conn.icsk_syn_retries, tg_host_retries(tp));
	if (retries)
		bpf_setsockopt(ctx, TG_SOL_TCP, TG_TCP_SYNCNT, &retries, sizeof(retries));
}

/*
 * Takes them back: sets the host's number, as setsockopt does not accept the 0 that stands for it.
 */
static __always_inline void tg_free_answers(void *ctx, const struct tcp_sock *tp)
{
	int retries = tg_host_retries(tp);

	if (tp->inet_conn.icsk_syn_retries == AD_ANSWER_RETRIES)
		bpf_setsockopt(ctx, TG_SOL_TCP, TG_TCP_SYNCNT, &retries, sizeof(retries));
}

#endif
