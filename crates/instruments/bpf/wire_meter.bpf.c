// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Counts the bytes on the wire in bins of time.
 *
 * It is attached to clsact ingress of a receiver, behind whatever limits the sender, and sees what
 * came through. A packet that is still to be segmented (GSO on the sender's side, or merged by GRO)
 * carries its headers once; on a wire each segment has its own, so they are added. A frame counts
 * from its MAC header to its last byte, without preamble, FCS and gap.
 *
 * Each of several flows with consecutive source ports also has its own bins.
 *
 * Not counted right: the headers of segmented packets with VLAN tags, tunnels, IPv4 fragments or
 * IPv6 extension headers. The testbed makes none.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* The layout is shared with wire_meter.rs. */
struct wire_clock {
	__u64 start_ns; /* CLOCK_MONOTONIC; 0: stopped */
	__u64 bin_ns;
	__u64 bins; /* one more bin takes all that comes later */
	__u64 first_port;
	__u64 flows; /* source ports that have bins of their own */
};

struct wire_bin {
	__u64 bytes;
	__u64 packets;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct wire_clock);
} wire_clock SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load */
	__type(key, __u32);
	__type(value, struct wire_bin);
} wire_bins SEC(".maps");

/* Bytes, by flow and bin: the bins of the first flow, then those of the second. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load */
	__type(key, __u32);
	__type(value, __u64);
} wire_flows SEC(".maps");

/* Bytes of MAC, network and transport header, or 0 if unknown; and the source port. */
static __u32 header_len(struct __sk_buff *skb, __u16 *source)
{
	__u32 len = ETH_HLEN;
	__u8 proto, byte;
	__be16 port = 0;

	switch (skb->protocol) {
	case bpf_htons(ETH_P_IP):
		if (bpf_skb_load_bytes(skb, len, &byte, 1) ||
		    bpf_skb_load_bytes(skb, len + offsetof(struct iphdr, protocol), &proto, 1))
			return 0;
		len += (byte & 0xf) * 4;
		break;
	case bpf_htons(ETH_P_IPV6):
		if (bpf_skb_load_bytes(skb, len + offsetof(struct ipv6hdr, nexthdr), &proto, 1))
			return 0;
		len += sizeof(struct ipv6hdr);
		break;
	default:
		return 0;
	}
	/* The first field of both. */
	if ((proto == IPPROTO_TCP || proto == IPPROTO_UDP) &&
	    bpf_skb_load_bytes(skb, len, &port, sizeof(port)))
		return 0;
	*source = bpf_ntohs(port);
	switch (proto) {
	case IPPROTO_TCP:
		/* The data offset is the upper half of byte 12. */
		if (bpf_skb_load_bytes(skb, len + 12, &byte, 1))
			return 0;
		return len + (byte >> 4) * 4;
	case IPPROTO_UDP:
		return len + sizeof(struct udphdr);
	default:
		return 0;
	}
}

SEC("tc")
int wire_meter(struct __sk_buff *skb)
{
	__u32 zero = 0, key, headers = 0, segments = 1;
	struct wire_clock *clock = bpf_map_lookup_elem(&wire_clock, &zero);
	__u64 now = bpf_ktime_get_ns();
	__u64 bytes = skb->len;
	struct wire_bin *bin;
	__u64 index, flow, *of_flow;
	__u16 source = 0;

	if (!clock || !clock->start_ns || !clock->bin_ns || now < clock->start_ns)
		return TC_ACT_UNSPEC;

	if (skb->gso_size || clock->flows)
		headers = header_len(skb, &source);
	if (skb->gso_size) {
		if (skb->gso_segs)
			segments = skb->gso_segs;
		else if (headers && bytes > headers)
			segments = (bytes - headers + skb->gso_size - 1) / skb->gso_size;
		bytes += (__u64)(segments - 1) * headers;
	}

	index = (now - clock->start_ns) / clock->bin_ns;
	key = index < clock->bins ? index : clock->bins;
	bin = bpf_map_lookup_elem(&wire_bins, &key);
	if (bin) {
		__sync_fetch_and_add(&bin->bytes, bytes);
		__sync_fetch_and_add(&bin->packets, segments);
	}
	flow = source - clock->first_port;
	if (flow < clock->flows && index < clock->bins) {
		key = flow * clock->bins + index;
		of_flow = bpf_map_lookup_elem(&wire_flows, &key);
		if (of_flow)
			__sync_fetch_and_add(of_flow, bytes);
	}
	/* The next program decides. */
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
