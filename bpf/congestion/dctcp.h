/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * DCTCP's arithmetic (Alizadeh et al., SIGCOMM 2010; RFC 8257): pure functions, no kernel.
 *
 *   once a window:        alpha += (F - alpha) / 16        F = marked / delivered packets
 *   on a mark, a window:  cwnd  -= cwnd * alpha / 2        at least 2 packets
 *   on a loss:            cwnd   = cwnd before this window's reduction / 2
 *
 * For cwnd alpha is a 10-bit fraction. The state has ten more bits below those: with 10 bits
 * alone an alpha under 16/1024 could neither decay nor grow by a sixteenth.
 */
#ifndef TG_DCTCP_H
#define TG_DCTCP_H

#include <linux/types.h>

#define DCTCP_INLINE static inline __attribute__((always_inline))

#define DCTCP_ALPHA_BITS 10
#define DCTCP_GUARD_BITS 10
#define DCTCP_ALPHA_ONE	 (1U << (DCTCP_ALPHA_BITS + DCTCP_GUARD_BITS))
/* The gain g of the average is 2^-4 (RFC 8257, 4.2). */
#define DCTCP_GAIN_SHIFT 4
#define DCTCP_CWND_MIN	 2

/*
 * alpha after a window in which `delivered` packets were acknowledged, `marked` of them with ECE.
 */
DCTCP_INLINE __u32 dctcp_alpha(__u32 alpha, __u32 delivered, __u32 marked)
{
	__u32 f;

	if (!delivered)
		return alpha;
	if (marked > delivered)
		marked = delivered;
	f = ((__u64)marked << (DCTCP_ALPHA_BITS + DCTCP_GUARD_BITS)) / delivered;
	if (f >= alpha)
		return alpha + ((f - alpha) >> DCTCP_GAIN_SHIFT);
	return alpha - ((alpha - f) >> DCTCP_GAIN_SHIFT);
}

/* The window, in packets, after a mark. */
DCTCP_INLINE __u32 dctcp_ssthresh(__u32 cwnd, __u32 alpha)
{
	__u32 cut = ((__u64)cwnd * (alpha >> DCTCP_GUARD_BITS)) >> (DCTCP_ALPHA_BITS + 1);

	return cwnd - cut > DCTCP_CWND_MIN ? cwnd - cut : DCTCP_CWND_MIN;
}

/*
 * The window after a loss, as for any TCP (RFC 8257, 3.5). `prior_cwnd` is the window before this
 * window's reduction: mark and loss in one window together halve it, no more.
 */
DCTCP_INLINE __u32 dctcp_ssthresh_loss(__u32 prior_cwnd, __u32 ssthresh)
{
	__u32 half = prior_cwnd / 2 > DCTCP_CWND_MIN ? prior_cwnd / 2 : DCTCP_CWND_MIN;

	return half < ssthresh ? half : ssthresh;
}

enum dctcp_ack {
	/* No change: ACKs may still be delayed. */
	DCTCP_ACK_AS_USUAL = 0,
	/* ACK this packet at once. */
	DCTCP_ACK_NOW = 1,
	/* First ACK what the delayed ACK stands for, with the ECE of those packets. */
	DCTCP_ACK_PRIOR_THEN_NOW = 2,
};

/*
 * The receiver's two states (RFC 8257, 3.2). ECE of an ACK says whether the packets it covers were
 * marked, so an ACK must not cover packets of both kinds. Updates `*ce_state`.
 */
DCTCP_INLINE enum dctcp_ack dctcp_received(__u8 *ce_state, __u8 ce, int ack_is_delayed)
{
	if (*ce_state == ce)
		return DCTCP_ACK_AS_USUAL;
	*ce_state = ce;
	return ack_is_delayed ? DCTCP_ACK_PRIOR_THEN_NOW : DCTCP_ACK_NOW;
}

#endif
