/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The shares of flows whose senders cannot be paced: see unpaced_flow.h. */
#ifndef TG_RESERVE_H
#define TG_RESERVE_H

#include <bpf/bpf_helpers.h>

#include "common/flow.h"
#include "common/intf.h"
#include "common/packet.h"
#include "nrm/arrival.h"
#include "nrm/unpaced_flow.h"

/* The flows of all queues, and the shift for their number. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, UF_SETS);
	__type(key, __u32);
	__type(value, struct uf_set);
} unpaced_flows SEC(".maps");

const volatile __u32 set_shift = UF_SET_SHIFT;

/* The flow of a packet. */
__noinline __u64 flow_of(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u64 flow = fl_hash_at_hand(data, end, skb->protocol);

	return flow ? flow : fl_hash(skb, tg_load_from, 0, skb->protocol);
}

/* Whether a packet is within its flow's share; then it is charged. */
__noinline int is_within_share(const struct vq_conf *conf, struct tg_queue *queue,
			       struct uf_flow *cell, const struct arrival *packet)
{
	if (!conf || !queue || !cell || !packet)
		return 0;
	if (uf_within(queue, cell, packet->now, packet->bytes, conf->cost))
		return 1;
	if (!queue->flooded)
		queue->flooded = 1;
	return 0;
}

/*
 * Gives a flow of an unpaced sender its share. What it takes of that counts as for TCP flows; what
 * it sends beyond earns it nothing. Returns whether the packet is within its share.
 */
__noinline int reserve(struct __sk_buff *skb, const struct vq_conf *conf, struct tg_queue *queue,
		       const struct arrival *packet, __u32 index)
{
	struct uf_set *set;
	__u64 flow;
	__u32 key;

	if (!conf || !queue || !packet)
		return 0;
	flow = sm_flow(sm_mix(flow_of(skb), index));
	key = flow >> set_shift;
	set = bpf_map_lookup_elem(&unpaced_flows, &key);
	if (!set)
		return 0;
	return is_within_share(conf, queue, uf_find(set, flow, packet->now, queue->epoch + 1),
			       packet);
}

#endif
