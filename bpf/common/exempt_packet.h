/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whether a packet is exempt. exempt.h does the same for sockets. */
#ifndef TG_EXEMPT_PACKET_H
#define TG_EXEMPT_PACKET_H

#include "common/exempt.h"
#include "common/packet.h"

/* Whether a packet is exempt by its DSCP, or by the remote address. */
__noinline int tg_is_exempt(struct __sk_buff *skb, __u64 dscps, __u32 direction)
{
	struct tg_prefix key;
	__u8 dscp;

	/* Linux 6.1 verifies this also where nobody calls it, and then there is no trie. */
	if (!has_exempt)
		return 0;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (tg_load(skb, 0, &ip, sizeof(ip)))
			return 0;
		dscp = ip.tos >> 2;
		tg_key4(&key, direction == TG_EGRESS ? ip.daddr : ip.saddr);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (tg_load(skb, 0, &ip, sizeof(ip)))
			return 0;
		dscp = (__u8)(ip.priority << 4 | ip.flow_lbl[0] >> 4) >> 2;
		if (direction == TG_EGRESS)
			tg_key6(&key, ip.daddr.in6_u.u6_addr32);
		else
			tg_key6(&key, ip.saddr.in6_u.u6_addr32);
	} else {
		return 0;
	}
	return dscps >> (dscp & 63) & 1 || tg_has_prefix(&key);
}

#endif
