// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "nrm/epoch.h"
#include "nrm/unpaced.h"
#include "nrm/unpaced_flow.h"

__u64 native_vq_time_ns(__u32 bytes, __u64 cost)
{
	return vq_time_ns(bytes, cost);
}

__u64 native_up_fair_ns(__u64 share, __u64 epoch_ns)
{
	return up_fair_ns(share, epoch_ns);
}

__u32 native_up_within(__u64 *sent, __u32 epoch, __u32 bytes, __u64 cost, __u64 fair_ns)
{
	return up_within(sent, epoch, bytes, cost, fair_ns);
}

__u32 native_up_has_much(__u64 sent, __u32 epoch)
{
	return up_has_much(sent, epoch);
}

__u32 native_up_took_much(__u64 sent, __u32 epoch)
{
	return up_took_much(sent, epoch);
}

__u32 native_up_takes(__u64 *sent, __u32 epoch, __u32 bytes, __u64 cost, __u64 fair_ns,
		      __s64 *aside_ns)
{
	return up_takes(sent, epoch, bytes, UP_FRAME_BYTES, cost, fair_ns, aside_ns);
}

void native_up_config(const struct vq_conf *conf, struct vq_conf *out)
{
	up_config(conf, out);
}

struct uf_flow *native_uf_find(struct uf_set *set, __u64 flow, __u64 now, __u32 epoch)
{
	return &set->way[uf_find(set, flow, now, epoch)];
}

__u32 native_uf_earns(struct uf_flow *cell, __u64 now, __u32 bytes, __u64 cost, __u64 share)
{
	return uf_earns(cell, now, bytes, cost, share);
}

/* The flows' smoothed round trip. */
#define RTT_NS 1000000ULL

struct native_pace_packet {
	__u64 now_ns;
	__u64 rate_bit_s;
	__u32 wire_bytes;
	/* Of a flow that cannot be paced; else of one that is paced. */
	__u32 unpaced;
	__u32 random;
	/* What a paced flow sends at once. */
	__u32 burst_bytes;
};

/*
 * A packet at the egress of a limit that paces, as gate() of nrm.bpf.c judges and charges it; 1: it
 * passes. `flow` has what its socket has of it, or what a flow has that cannot be paced.
 */
int native_up_packet(const struct vq_conf *conf, struct tg_nrm_queue *queue, struct uf_flow *flow,
		     const struct native_pace_packet *p)
{
	struct vq_packet packet = {
	    .tcp = !p->unpaced,
	    .in_flight = 1,
	    .local = 1,
	};
	__s64 backlog = queue->common.finish_ns - p->now_ns;
	int reserved = 0;
	enum vq_zone zone = vq_zone(conf, backlog);
	__u64 cost_ns = vq_time_ns(p->wire_bytes, conf->cost), standing, depth_ns = 0;
	int beside_unpaced;

	if (p->unpaced) {
		reserved = uf_within(queue, flow, p->now_ns, p->wire_bytes, conf->cost);
		if (!reserved)
			queue->flooded = 1;
	}
	beside_unpaced = queue->aside_before || queue->flooded;
	packet.wire_bytes = up_judged_bytes(p->wire_bytes, p->unpaced && !reserved);
	if (reserved || !p->unpaced)
		depth_ns = up_depth_ns(conf, beside_unpaced, RTT_NS);
	if (!p->unpaced && !up_has_much(flow->sent, queue->common.epoch + 1))
		depth_ns = fs_max(depth_ns, conf->drop_ns) + UP_CREDIT_NS;
	if (zone != VQ_FREE && backlog > (__s64)depth_ns &&
	    (zone == VQ_FULL || vq_decide(conf, zone, backlog, &packet, p->random) >= VQ_DROP_FULL))
		return 0;
	vq_charge(conf, &queue->common.finish_ns, &queue->common.skipped_ns,
		  queue->common.finish_ns, p->now_ns, cost_ns);
	if (!p->unpaced)
		ep_use(queue, &flow->sent, &flow->seen, p->wire_bytes, conf->cost, 1);
	standing = up_standing_ns(conf, 3000000, RTT_NS);
	if (queue->flooded)
		standing = fs_max(standing, conf->drop_ns);
	backlog = queue->common.finish_ns - p->now_ns - cost_ns - standing;
	if (ep_turn(queue, p->now_ns, backlog > 0 ? backlog : 0, RTT_NS,
		    vq_time_ns(p->burst_bytes, conf->cost), p->rate_bit_s))
		queue->flooded = queue->strangers_ns = 0;
	return 1;
}
