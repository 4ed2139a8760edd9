/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Type of service of IPv4 and traffic class of IPv6, DSCP and ECN: a pure header over the first
 * bytes of an IP header. A property test compares it with sums over whole headers.
 */
#ifndef TG_TOS_H
#define TG_TOS_H

#include <linux/types.h>

#define TG_IP_CHECKSUM_OFFSET 10
/* ECN: congestion experienced. */
#define TG_ECN_CE 3

/* The first bytes of an IP header, which identify it. */
union tg_ip_head {
	__u8 byte[8];
	__u16 half[4];
	__u64 all;
};

/* The old type of service or traffic class with another DSCP; the ECN bits stay. */
static inline __attribute__((always_inline)) __u8 tg_with_dscp(__u8 tos, __u8 dscp)
{
	return dscp << 2 | (tos & 3);
}

/* In an IPv6 header: the lower half of the first byte, and the upper half of the second. */
static inline __attribute__((always_inline)) __u8 tg_traffic_class(const union tg_ip_head *head)
{
	return head->byte[0] << 4 | head->byte[1] >> 4;
}

static inline __attribute__((always_inline)) void tg_set_traffic_class(union tg_ip_head *head,
								       __u8 tos)
{
	head->byte[0] = (head->byte[0] & 0xf0) | tos >> 4;
	head->byte[1] = (head->byte[1] & 0x0f) | tos << 4;
}

/* The checksum of a header in which one word changes: RFC 1624, equation 3, in any byte order. */
static inline __attribute__((always_inline)) __u16 tg_checksum(__u16 checksum, __u16 was, __u16 is)
{
	__u32 sum = (__u16)~checksum + (__u16)~was + is;

	/* The carry of three words is 2 at most, and it adds one once more. */
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

#endif
