/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The length of a cgroup's packet on the wire. The programs of a cgroup see a fragmented packet
 * whole: on egress before the stack cuts it, on ingress after it was reassembled.
 *
 * No helper gives the length of the fragments, but the kernel's own structures do. This follows
 * ip_finish_output() and ip6_finish_output(). From Linux 6.2 on an address can be cast to a
 * readable pointer. A socket that ignores the path's MTU (IP_PMTUDISC_INTERFACE, _OMIT) sends
 * longer fragments than are counted here.
 */
#ifndef TG_WIRE_BYTES_H
#define TG_WIRE_BYTES_H

#include "common/vmlinux.h"
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "common/fragments.h"
#include "common/intf.h"
#include "common/packet.h"

/* Flags in addresses of struct sk_buff and struct dst_entry. */
#define TG_REFDST_FLAGS	 1UL
#define TG_METRICS_FLAGS 3UL
/* RTAX_MTU of linux/rtnetlink.h, less one. */
#define TG_METRIC_MTU 1

/*
 * The types of what is read; kernel_types.rs has their names in the same order. It gives the
 * kernel's numbers of them, where addresses can be cast.
 */
enum {
	TG_TYPE_sk_buff,
	TG_TYPE_dst_entry,
	TG_TYPE_rtable,
	TG_TYPE_dst_metrics,
	TG_TYPE_net_device,
	TG_TYPE_inet6_dev,
	TG_TYPE_inet_skb_parm,
	TG_TYPE_inet6_skb_parm,
	TG_TYPES,
};
const volatile __u32 type_numbers[TG_TYPES];

/*
 * bpf_rdonly_cast, of Linux 6.2 on. Whoever loads the program puts its number in the place of this
 * one (bpf.rs). If it were declared as a function of the kernel, libbpf would read all the kernel's
 * types.
 */
#define TG_CAST 0x7467c457
static const void *(*const tg_cast)(const void *address, __u32 type) = (void *)TG_CAST;

#define TG_CAN_CAST type_numbers[TG_TYPE_sk_buff]
#define TG_AS(address, name)                                                                       \
	((const struct name *)tg_cast((const void *)(address), type_numbers[TG_TYPE_##name]))
#define TG_READ(address, name, field)                                                              \
	(TG_CAN_CAST ? TG_AS(address, name)->field                                                 \
		     : BPF_CORE_READ((const struct name *)(address), field))

/* The MTU that a route to the packet's destination has learned, or has configured; 0: none. */
static __always_inline __u32 tg_route_mtu(__be16 type, unsigned long dst)
{
	unsigned long metrics = TG_READ(dst, dst_entry, _metrics) & ~TG_METRICS_FLAGS;
	const struct rtable *route = (const void *)dst;
	__u32 mtu = 0;

	/* For IPv6 the learned MTU is a separate route. */
	if (type == bpf_htons(ETH_P_IP)) {
		if (TG_CAN_CAST) {
			route = TG_AS(dst, rtable);
			mtu = BPF_CORE_READ_BITFIELD(route, rt_pmtu);
		} else {
			mtu = BPF_CORE_READ_BITFIELD_PROBED(route, rt_pmtu);
		}
		if (mtu && (long)(bpf_jiffies64() - TG_READ(dst, dst_entry, expires)) < 0)
			return mtu;
	}
	return metrics ? TG_READ(metrics, dst_metrics, metrics[TG_METRIC_MTU]) : 0;
}

/* The longest packet that can leave for the packet's destination; 0: not known. */
static __always_inline __u32 tg_path_mtu(struct __sk_buff *skb)
{
	unsigned long dst = TG_READ(skb, sk_buff, _skb_refdst) & ~TG_REFDST_FLAGS;
	const struct net_device *device;
	const struct inet6_dev *ipv6;
	__u32 mtu;

	if (!dst)
		return 0;
	mtu = tg_route_mtu(skb->protocol, dst);
	if (mtu)
		return mtu;
	device = TG_READ(dst, dst_entry, dev);
	if (!device)
		return 0;
	if (skb->protocol == bpf_htons(ETH_P_IPV6) &&
	    bpf_core_field_exists(struct inet6_dev, cnf.mtu6)) {
		ipv6 = TG_READ(device, net_device, ip6_ptr);
		return ipv6 ? TG_READ(ipv6, inet6_dev, cnf.mtu6) : 0;
	}
	return TG_READ(device, net_device, mtu);
}

/* The longest fragment that the packet came in; 0: it came whole. */
static __always_inline __u32 tg_longest_fragment(struct __sk_buff *skb)
{
	unsigned long cb = (unsigned long)skb + bpf_core_field_offset(struct sk_buff, cb);

	if (skb->protocol == bpf_htons(ETH_P_IP))
		return TG_READ(cb, inet_skb_parm, frag_max_size);
	if (bpf_core_field_exists(struct inet6_skb_parm, frag_max_size))
		return TG_READ(cb, inet6_skb_parm, frag_max_size);
	return 0;
}

/*
 * Bytes on the wire of a packet that is cut into fragments of at most `mtu`, or came in such. A
 * separate function: see tg_parse.
 */
__noinline __u32 tg_fragments(struct __sk_buff *skb, __u32 mtu)
{
	__u32 header = sizeof(struct ipv6hdr), extra = TG_FRAGMENT_HEADER_BYTES;
	__u8 first;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (tg_load(skb, 0, &first, sizeof(first)))
			return skb->len + TG_LINK_HEADER_BYTES;
		header = (first & 0xf) * 4;
		extra = 0;
	}
	return tg_fragmented_bytes(skb->len, mtu, header, extra, TG_LINK_HEADER_BYTES);
}

/*
 * Bytes on the wire of a cgroup's packet, which starts at its IP header and is whole. Counts the
 * headers of the segments, or fragments, that it will be cut into or came in.
 */
static __always_inline __u32 tg_wire_bytes(struct __sk_buff *skb, __u32 direction)
{
	__u32 bytes = skb->len, mtu;

	if (skb->gso_size || bytes <= TG_MIN_MTU)
		return tg_frame_bytes(skb, bytes + TG_LINK_HEADER_BYTES);
	mtu = direction == TG_EGRESS ? tg_path_mtu(skb) : tg_longest_fragment(skb);
	return mtu && mtu < bytes ? tg_fragments(skb, mtu) : bytes + TG_LINK_HEADER_BYTES;
}

#endif
