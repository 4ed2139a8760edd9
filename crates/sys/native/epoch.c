// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "nrm/epoch.h"

int native_ep_count_flow(struct tg_nrm_queue *queue, __u32 *seen)
{
	return ep_count_flow(&queue->common, seen);
}

int native_ep_count_class(struct tg_nrm_queue *parent, __u32 *seen, const struct cl_class *class)
{
	return ep_count_class(parent, seen, class, 1);
}

void native_ep_use_class(struct tg_nrm_queue *parent, struct tg_nrm_queue *queue,
			 const struct cl_class *class, __u32 bytes)
{
	ep_use_class(parent, queue, class, bytes);
}

void native_ep_charge(const struct vq_conf *conf, struct tg_nrm_queue *queue, __u64 now_ns,
		      __u64 cost_ns, __u64 aside_ns)
{
	__u64 seen_ns = *(volatile __u64 *)&queue->common.finish_ns;

	vq_charge(conf, &queue->common.finish_ns, &queue->common.skipped_ns, seen_ns, now_ns,
		  cost_ns);
	__sync_fetch_and_add(&queue->aside_ns, aside_ns);
}

int native_ep_turn(const struct vq_conf *conf, struct tg_nrm_queue *queue, __u64 now_ns,
		   __u64 rate_bit_s)
{
	return ep_turn(queue, now_ns, 0, 0, vq_time_ns(1, conf->cost), rate_bit_s);
}

void native_ep_follow_rate(const struct vq_conf *conf, struct tg_nrm_queue *queue, __u64 now_ns)
{
	ep_follow_rate(conf, &queue->common, &queue->unpaced_finish_ns, now_ns);
}

/* What a packet sees of a class whose rate others change. */
void native_ep_config_now(const struct tg_nrm_queue *queue, const struct vq_conf *ceiling,
			  const struct cl_class *class, struct vq_conf *now)
{
	cl_config_at(ceiling, class, *(volatile __u64 *)&queue->cost_now, now);
}

void native_ep_set_rate(struct tg_nrm_queue *queue, __u64 bit_s)
{
	queue->cost_now = cl_cost(bit_s);
}
