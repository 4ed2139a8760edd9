// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Scheme `police` for the prefixes behind a device: one program a direction, however many limits it
 * has. match.h finds the limit of a packet, police_packet.h applies it. A packet of no limit passes
 * to what else is on the device.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "police/match.h"
#include "police/police_packet.h"

/* The device is a port. */
const volatile __u8 is_port = 0;

/* Reads an egress or ingress packet of the device. 0: it is not IP. */
static __always_inline int read(struct __sk_buff *skb, enum tg_direction direction, int is_out,
				struct mt_packet *packet)
{
	int to_other = direction == TG_EGRESS;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (tg_load(skb, 0, &ip, sizeof(ip)))
			return 0;
		tg_key4(&packet->behind, is_out ? ip.daddr : ip.saddr);
		tg_key4(&packet->other, to_other ? ip.daddr : ip.saddr);
		packet->dscp = ip.tos >> 2;
		return 1;
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (tg_load(skb, 0, &ip, sizeof(ip)))
			return 0;
		tg_key6(&packet->behind,
			is_out ? ip.daddr.in6_u.u6_addr32 : ip.saddr.in6_u.u6_addr32);
		tg_key6(&packet->other,
			to_other ? ip.daddr.in6_u.u6_addr32 : ip.saddr.in6_u.u6_addr32);
		packet->dscp = (__u8)(ip.priority << 4 | ip.flow_lbl[0] >> 4) >> 2;
		return 1;
	}
	return 0;
}

static __always_inline enum tg_outcome gate(struct __sk_buff *skb, enum tg_direction direction,
					    int is_out)
{
	const struct pl_policy *policy;
	struct mt_packet packet = {};
	enum tg_outcome outcome;
	enum pl_colour colour;
	struct mt_limit at;
	__u32 bytes;
	__u64 now;
	int index;

	if (!read(skb, direction, is_out, &packet))
		return TG_PASS;
	index = mt_index(&packet.behind, direction);
	if (index < 0 || !mt_open(index, direction, &at))
		return TG_PASS;
	policy = &at.limit->police[direction];
	if (!policy->committed.cost)
		return TG_PASS;
	bytes = tg_frame_bytes(skb, skb->len);
	if (mt_is_exempt(&at.limit->common, index, &packet)) {
		count(at.counters, TG_EXEMPT, bytes, 1);
		return TG_PASS;
	}
	now = bpf_ktime_get_boot_ns();
	colour = meter_skb(skb, policy, at.meter, at.counters, now, bytes);
	outcome = act_on(skb, policy, at.counters, colour, bytes, 1, 1);
	count_at(at.counters, outcome, now, bytes, 1);
	return outcome;
}

static __always_inline int of_device(struct __sk_buff *skb, enum tg_direction direction, int is_out)
{
	/* The next program decides. */
	return is_drop(gate(skb, direction, is_out)) ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

SEC("tcx/egress")
int match_out(struct __sk_buff *skb)
{
	return of_device(skb, is_port ? TG_INGRESS : TG_EGRESS, 1);
}

SEC("tcx/ingress")
int match_in(struct __sk_buff *skb)
{
	return of_device(skb, is_port ? TG_EGRESS : TG_INGRESS, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
