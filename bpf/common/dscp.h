/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The DSCP of a packet: any program reads it, only one at tc writes it. */
#ifndef TG_DSCP_H
#define TG_DSCP_H

#include "common/packet.h"
#include "common/tos.h"

/* Below IP: Ethernet, nothing, Ethernet with one VLAN tag and with two in the packet. */
#define TG_LINK_HEADERS                                                                            \
	{                                                                                          \
		TG_LINK_HEADER_BYTES, 0, 18, 22                                                    \
	}
#define TG_LINK_HEADERS_MAX 4

/* 0 if the packet is not IP. */
static __always_inline __u8 tg_dscp(struct __sk_buff *skb)
{
	union tg_ip_head head;

	if (tg_load(skb, 0, &head, 2))
		return 0;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return head.byte[1] >> 2;
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return tg_traffic_class(&head) >> 2;
	return 0;
}

/* Where in the packet its IP header starts; negative if unknown. */
static __always_inline int tg_ip_offset(struct __sk_buff *skb, const union tg_ip_head *head)
{
	const int headers[TG_LINK_HEADERS_MAX] = TG_LINK_HEADERS;
	union tg_ip_head there;

	for (int i = 0; i < TG_LINK_HEADERS_MAX; i++)
		if (!bpf_skb_load_bytes(skb, headers[i], &there, sizeof(there)) &&
		    there.all == head->all)
			return headers[i];
	return -1;
}

/*
 * Sets the DSCP of a packet. The sum over an IPv4 header with its checksum does not change, so a
 * checksum over the whole packet that the device has computed stays right. IPv6 has no header
 * checksum, so there the kernel must update that sum.
 */
static __always_inline void tg_set_dscp(struct __sk_buff *skb, __u8 dscp)
{
	union tg_ip_head head, new;
	int offset;

	if (tg_load(skb, 0, &head, sizeof(head)))
		return;
	new = head;
	offset = tg_ip_offset(skb, &head);
	if (offset < 0)
		return;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		new.byte[1] = tg_with_dscp(head.byte[1], dscp);
		if (new.byte[1] == head.byte[1])
			return;
		bpf_l3_csum_replace(skb, offset + TG_IP_CHECKSUM_OFFSET, head.half[0], new.half[0],
				    sizeof(head.half[0]));
		bpf_skb_store_bytes(skb, offset, &new, sizeof(new.half[0]), 0);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		__u8 tos = tg_with_dscp(tg_traffic_class(&head), dscp);

		tg_set_traffic_class(&new, tos);
		if (new.half[0] == head.half[0])
			return;
		bpf_skb_store_bytes(skb, offset, &new, sizeof(new.half[0]), BPF_F_RECOMPUTE_CSUM);
	}
}

#endif
