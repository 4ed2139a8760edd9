/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A frame as XDP sees it, before the kernel has made a packet of it. VLAN tags are in the frame
 * unless the device has removed them. Nothing says where IP starts, or how many segments an
 * aggregate has.
 *
 * Bytes are what a program at tc would count. That sees the packet without its outer tag, and knows
 * the segments. Here a frame longer than the MTU of its device is taken for an aggregate of the
 * longest frames that fit: LRO, or a neighbour on this host that leaves segmentation to a device.
 * XDP comes before the kernel's own GRO.
 */
#ifndef TG_FRAME_H
#define TG_FRAME_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "common/headers.h"
#include "common/intf.h"
#include "police/meter.h"
#include "common/tos.h"

#define FR_TAG_BYTES 4
/* 802.1ad and 802.1Q in it. */
#define FR_TAGS_MAX 2
/* Where the IP header of a frame starts at most. */
#define FR_IP_MAX (ETH_HLEN + FR_TAGS_MAX * FR_TAG_BYTES)
/* Up to this length a frame fits every Ethernet, and the MTU is not looked up. */
#define FR_ETHERNET_BYTES (ETH_DATA_LEN + ETH_HLEN)
/* An IPv4 header without options. No more bytes of any IP header are written. */
#define FR_WRITTEN_BYTES 20

struct fr_tag {
	__be16 control;
	__be16 type;
};

struct fr_frame {
	/* Protocol at `start`: ETH_P_IP or ETH_P_IPV6 with a whole header, or 0. */
	__be16 type;
	/* Type of service or traffic class. */
	__u8 tos;
	/* Where in the frame the IP header is. */
	__u32 start;
	/* On the wire. */
	__u32 bytes;
	/* Whether the frame is an aggregate of segments. */
	__u32 is_aggregate;
};

/* Loads bytes of a frame from its IP header on, in linear memory or not. */
static __always_inline long fr_load(void *ctx, __u32 start, __u32 offset, void *to, __u32 bytes)
{
	return bpf_xdp_load_bytes(ctx, start + offset, to, bytes);
}

/* Bytes on the wire of a frame that is longer than any Ethernet's. Rare, so not inlined. */
static __noinline void fr_measure(struct xdp_md *ctx, struct fr_frame *frame)
{
	__u32 link = TG_LINK_HEADER_BYTES, mtu = 0, headers;
	struct tg_headers parsed;

	/* Index 0 is the device of the frame. The call sets the MTU whatever it returns. */
	bpf_check_mtu(ctx, 0, &mtu, 0, 0);
	if (!mtu || frame->bytes <= mtu + link)
		return;
	frame->is_aggregate = 1;
	tg_read_headers(ctx, fr_load, frame->start, frame->type, &parsed);
	headers = parsed.bytes + link;
	if (frame->type && headers < mtu + link)
		frame->bytes = tg_segmented_bytes(frame->bytes, 0, mtu + link - headers, headers);
}

/* Reads a frame; 0: it is malformed. */
static __always_inline int fr_read(struct xdp_md *ctx, struct fr_frame *frame)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end, *at;
	struct ethhdr *eth = data;
	__be16 type;

	at = eth + 1;
	if (at > end)
		return 0;
	type = eth->h_proto;
	frame->start = ETH_HLEN;
	frame->bytes = bpf_xdp_get_buff_len(ctx);
	for (int i = 0; i < FR_TAGS_MAX; i++) {
		const struct fr_tag *tag = at;

		if (type != bpf_htons(ETH_P_8021Q) && type != bpf_htons(ETH_P_8021AD))
			break;
		at += FR_TAG_BYTES;
		if (at > end)
			break;
		/* The outer one: see above. */
		if (!i)
			frame->bytes -= FR_TAG_BYTES;
		type = tag->type;
		frame->start += FR_TAG_BYTES;
	}
	frame->type = 0;
	frame->tos = 0;
	frame->is_aggregate = 0;
	if (type == bpf_htons(ETH_P_IP) && at + sizeof(struct iphdr) <= end) {
		const struct iphdr *ip = at;

		frame->tos = ip->tos;
		frame->type = type;
	} else if (type == bpf_htons(ETH_P_IPV6) && at + sizeof(struct ipv6hdr) <= end) {
		frame->tos = tg_traffic_class(at);
		frame->type = type;
	}
	if (frame->bytes > FR_ETHERNET_BYTES)
		fr_measure(ctx, frame);
	return 1;
}

/* The IP header of a frame, with as many bytes as are ever written; 0 if it has none. */
static __always_inline void *fr_header(struct xdp_md *ctx, const struct fr_frame *frame)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end, *ip;

	if (!frame->type || frame->start > FR_IP_MAX)
		return 0;
	ip = data + frame->start;
	return ip + FR_WRITTEN_BYTES <= end ? ip : 0;
}

/*
 * Sets the type of service of a frame with an IP header. The sum over an IPv4 header does not
 * change.
 */
static __always_inline void fr_set_tos(struct xdp_md *ctx, const struct fr_frame *frame, __u8 tos)
{
	__u8 *ip = fr_header(ctx, frame);
	__u16 *checksum = (void *)(ip + TG_IP_CHECKSUM_OFFSET);
	union tg_ip_head *there = (void *)ip;
	union tg_ip_head head;

	if (!ip)
		return;
	head.half[0] = there->half[0];
	if (frame->type == bpf_htons(ETH_P_IP)) {
		head.byte[1] = tos;
		*checksum = tg_checksum(*checksum, there->half[0], head.half[0]);
	} else {
		tg_set_traffic_class(&head, tos);
	}
	there->half[0] = head.half[0];
}

#endif
