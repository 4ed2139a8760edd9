/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * NRM's virtual queue as published (Brakmo and Starovoitov, "BPF Host Network Resource Management",
 * with the constants of the kernel's HBM sample): credit in bytes, thresholds in bytes whatever the
 * rate, a critical section around the update. A pure header over (state, now, length); the caller
 * of np_packet() holds the lock.
 *
 * Not copied: the pseudo-code's max() where min() is meant, and the rate unit that makes 1000 Mbps
 * 976.6. Kept: a packet is charged skb->len, without link headers and without those that
 * segmentation adds; and the fraction of a byte that each update cuts off.
 */
#ifndef TG_NRM_PAPER_H
#define TG_NRM_PAPER_H

#include <linux/types.h>

#define NP_INLINE static inline __attribute__((always_inline))

/* Bytes. */
#define NP_MAX_CREDIT	     150000
#define NP_MARK_CREDIT	     -60000
#define NP_LARGE_DROP_CREDIT -577500
#define NP_DROP_CREDIT	     -600000
#define NP_SMALL_BYTES	     120

#define NP_NS_PER_SEC 1000000000ULL
/* An idle time that fills the credit at any rate; bounds the products. */
#define NP_MAX_IDLE_SEC 1000000ULL

struct np_queue {
	__s64 credit_bytes;
	__u64 last_ns;
};

struct np_packet {
	__u32 bytes;
	/* The IP header says ECT(0), ECT(1) or CE. */
	__u8 ecn_capable;
	__u8 tcp;
};

enum np_verdict {
	NP_PASS,
	NP_MARK,
	NP_SLOW,
	NP_DROP,
	NP_VERDICTS,
};

NP_INLINE void np_refill(struct np_queue *q, __u64 now_ns, __u64 byte_s)
{
	__u64 idle_ns, sec, earned;

	/* Another CPU read its clock later but came first: the credit has been given. */
	if (now_ns <= q->last_ns)
		return;
	idle_ns = now_ns - q->last_ns;
	q->last_ns = now_ns;
	sec = idle_ns / NP_NS_PER_SEC;
	if (sec > NP_MAX_IDLE_SEC)
		sec = NP_MAX_IDLE_SEC;
	earned = sec * byte_s + idle_ns % NP_NS_PER_SEC * byte_s / NP_NS_PER_SEC;
	q->credit_bytes += (__s64)earned;
	if (q->credit_bytes > NP_MAX_CREDIT)
		q->credit_bytes = NP_MAX_CREDIT;
}

/* True with probability (-credit - 60 000) / 517 500. */
NP_INLINE int np_linear_law(__s64 credit_bytes, __u32 random)
{
	__u64 range = NP_MARK_CREDIT - NP_LARGE_DROP_CREDIT;

	return (random * range) >> 32 < (__u64)(NP_MARK_CREDIT - credit_bytes);
}

NP_INLINE enum np_verdict np_packet(struct np_queue *q, __u64 now_ns, __u64 byte_s,
				    const struct np_packet *packet, __u32 random)
{
	int large = packet->bytes > NP_SMALL_BYTES;
	__s64 credit;

	np_refill(q, now_ns, byte_s);
	q->credit_bytes -= packet->bytes;
	credit = q->credit_bytes;
	if (credit >= NP_MARK_CREDIT)
		return NP_PASS;
	if (credit >= NP_DROP_CREDIT && !(large && credit < NP_LARGE_DROP_CREDIT)) {
		if (packet->ecn_capable)
			return NP_MARK;
		if (packet->tcp)
			return np_linear_law(credit, random) ? NP_SLOW : NP_PASS;
		if (!large)
			return NP_PASS;
	}
	q->credit_bytes += packet->bytes;
	return NP_DROP;
}

#endif
