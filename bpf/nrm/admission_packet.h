/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Egress packets that begin a connection: SYNs, and SYN-ACKs of listeners. The sock_ops program
 * decides which of them wait (tune.h). A packet that waits is dropped once, and the kernel's
 * timer sends it again. The rule is in admission.h.
 */
#ifndef TG_ADMISSION_PACKET_H
#define TG_ADMISSION_PACKET_H

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "nrm/admission.h"
#include "nrm/answers.h"
#include "nrm/intf.h"
#include "common/maps.h"
#include "nrm/queues.h"
#include "common/packet.h"
#include "common/tcp_header.h"
#include "nrm/tree.h"
#include "common/vmlinux.h"

/* The verdict on a packet of a socket that has no connection yet. */
enum {
	NO_ANSWER,
	ANSWER_GOES,
	ANSWER_WAITS,
};

/* With a smaller queue, a listener would forget other connections for one that is held. */
#define LEAST_BACKLOG 16

/*
 * Whether a packet is a SYN-ACK, and whether to hold it: the kernel sends it again when the timer
 * ends that tune.h set. Also learns for the next one how often the listener sends a SYN-ACK
 * again, and whether a quarter of its queue is taken, or half of its accept queue.
 */
__noinline int answer(struct __sk_buff *skb, struct tg_nrm_queue *queue, __u64 now, __u32 slot)
{
	struct bpf_sock *sk = skb->sk;
	struct tcp_sock *listener;
	__u32 retries, most, start;
	__u8 first = 0, flags = 0, crowded;
	__be16 port = 0;

	listener = sk ? bpf_skc_to_tcp_sock(sk) : 0;
	if (!listener || !queue || tg_load(skb, 0, &first, sizeof(first)))
		return NO_ANSWER;
	/*
	 * A SYN-ACK behind IPv6 extension headers is not recognised, and is judged as any packet.
	 */
	start = first >> 4 == 4 ? (first & 15) * 4 : sizeof(struct ipv6hdr);
	tg_load(skb, start + TCP_FLAGS_OFFSET, &flags, sizeof(flags));
	if ((flags & (TCP_SYN | TCP_RST)) != TCP_SYN)
		return NO_ANSWER;
	retries = tg_answer_retries(listener);
	most = listener->inet_conn.icsk_inet.sk.sk_max_ack_backlog;
	crowded = most < LEAST_BACKLOG ||
		  4 * (__u32)listener->inet_conn.icsk_accept_queue.qlen.counter >= most ||
		  2 * listener->inet_conn.icsk_inet.sk.sk_ack_backlog >= most;
	if (!retries)
		crowded = AD_NEVER;
	if (queue->turns.crowded != AD_NEVER && queue->turns.crowded != crowded)
		queue->turns.crowded = crowded;
	/* The hold was computed for more retries than this listener makes. */
	if (retries < queue->turns.retries || !queue->turns.retries) {
		queue->turns.retries = retries;
		return ANSWER_GOES;
	}
	if (!queue->turns.asked || crowded)
		return ANSWER_GOES;
	tg_load(skb, start + TCP_DEST_OFFSET, &port, sizeof(port));
	if (!ad_is_asked(queue->turns.asked, now, bpf_ntohs(port)))
		return ANSWER_GOES;
	queue->turns.asked = 0;
	__sync_fetch_and_add(&queue->turns.held, 1);
	if (queue->turns.asked_of == TG_INGRESS) {
		queue = tg_queue_of(slot, TG_INGRESS);
		if (queue)
			__sync_fetch_and_add(&queue->turns.held, 1);
	}
	return ANSWER_WAITS;
}

/* Whether a SYN passes or waits, as tune.h decided. */
__noinline int ask(struct __sk_buff *skb)
{
	struct tg_socket *ours = skb->sk ? bpf_sk_storage_get(&sockets_of_limit, skb->sk, 0, 0) : 0;

	if (!ours || !ours->syn_waits)
		return ANSWER_GOES;
	ours->syn_waits = 0;
	return ANSWER_WAITS;
}

/* The verdict on an egress packet, if it begins a connection. */
static __always_inline int begin(struct __sk_buff *skb, struct bpf_sock *sk,
				 struct tg_nrm_queue *queue, __u64 now, __u32 slot)
{
	if (!sk || sk->protocol != IPPROTO_TCP)
		return NO_ANSWER;
	if (sk->state == BPF_TCP_SYN_SENT)
		return ask(skb);
	return sk->state == BPF_TCP_LISTEN ? answer(skb, queue, now, slot) : NO_ANSWER;
}

#endif
