/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The shares of flows whose senders cannot be paced: see unpaced_flow.h. */
#ifndef TG_RESERVE_H
#define TG_RESERVE_H

#include <bpf/bpf_helpers.h>

#include "common/flow.h"
#include "nrm/intf.h"
#include "common/packet.h"
#include "common/verifier.h"
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

/*
 * Gives a flow of an unpaced sender its share. What it takes of that counts as for TCP flows; what
 * it sends beyond earns it nothing. Returns whether the packet is within its share.
 */
__noinline int reserve(struct __sk_buff *skb, const struct vq_conf *conf,
		       struct tg_nrm_queue *queue, const struct arrival *packet, __u32 index)
{
	struct uf_set *set;
	__u64 flow, way;
	__u32 key;

	if (!conf || !queue || !packet)
		return 0;
	/* In line, as the search for the cell: each call would cost a packet 10 to 22 ns. */
	flow = fl_hash_at_hand((void *)(long)skb->data, (void *)(long)skb->data_end, skb->protocol);
	if (!flow)
		flow = fl_hash(skb, tg_load_from, 0, skb->protocol);
	flow = sm_flow(sm_mix(flow, index));
	key = flow >> set_shift;
	set = bpf_map_lookup_elem(&unpaced_flows, &key);
	if (!set)
		return 0;
	way = uf_find(set, flow, packet->now, queue->common.epoch + 1);
	index = vf_forget(way, flow) % UF_WAYS;
	if (uf_within(queue, &set->way[index], packet->now, packet->bytes, conf->cost))
		return 1;
	if (!queue->flooded)
		queue->flooded = 1;
	return 0;
}

#endif
