/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which dropped packets leave TCP with nothing in flight. No ACK can reveal the loss then, so TCP
 * waits for a timer: 200 ms or more for data, a second for the first packet of a connection. A
 * packet that passes is not checked.
 *
 * The data that a remote sender has in flight is not known here. So on ingress only the packets
 * that begin a connection are counted.
 */
#ifndef TG_RISK_H
#define TG_RISK_H

#include <bpf/bpf_helpers.h>

#include "nrm/intf.h"
#include "common/packet.h"
#include "common/tcp_header.h"

/* The kind of a packet, by its headers and its socket. */
enum risk_kind {
	RISK_NONE,
	/* SYN or SYN-ACK. */
	RISK_BEGINS,
	/* Data of a socket that has nothing else in flight. */
	RISK_ALONE,
};

/*
 * The packets that a TCP socket has in flight, as in tcp_packets_in_flight(). A packet that is sent
 * for the first time does not count yet; one that the timer sends again counts as lost.
 */
static __always_inline __u32 risk_in_flight(const struct bpf_tcp_sock *tp)
{
	return tp->packets_out - tp->sacked_out - tp->lost_out + tp->retrans_out;
}

static __always_inline enum risk_kind risk_kind(struct __sk_buff *skb, __u32 direction)
{
	struct bpf_sock *sk = skb->sk ? bpf_sk_fullsock(skb->sk) : 0;
	struct bpf_tcp_sock *tp;
	/* Length of the header, and flags. */
	__u8 first = 0, word[2] = {};
	__u32 start;

	if (!sk || sk->protocol != IPPROTO_TCP || tg_load(skb, 0, &first, sizeof(first)))
		return RISK_NONE;
	/* A segment behind IPv6 extension headers is not recognised. */
	start = first >> 4 == 4 ? (first & 15) * 4 : sizeof(struct ipv6hdr);
	if (tg_load(skb, start + TCP_WORD_OFFSET, word, sizeof(word)))
		return RISK_NONE;
	if (word[1] & TCP_SYN)
		return RISK_BEGINS;
	/* A pure ACK: the next one carries as much. */
	if (direction == TG_INGRESS || skb->len <= start + (word[0] >> 4) * 4)
		return RISK_NONE;
	tp = bpf_tcp_sock(sk);
	return tp && !risk_in_flight(tp) ? RISK_ALONE : RISK_NONE;
}

/* Counts such a packet. `paced`: by the limit, or by one inside it. */
static __always_inline void risk_count(struct tg_nrm_queue *queue, enum risk_kind kind, int paced)
{
	if (kind == RISK_BEGINS)
		__sync_fetch_and_add(&queue->at_risk[TG_RISK_CONNECTING], 1);
	else if (paced)
		__sync_fetch_and_add(&queue->at_risk[TG_RISK_CREDIT_USED], 1);
	else
		__sync_fetch_and_add(&queue->at_risk[TG_RISK_NOT_PACED], 1);
}

#endif
