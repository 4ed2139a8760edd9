// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "common/vqueue.h"

/* One packet through the queue, put together as the program in nrm.bpf.c does. */
__u32 native_vq_packet(const struct vq_conf *conf, __u64 *finish_ns, __u64 *skipped_ns,
		       __u32 *carry, __u64 now_ns, const struct vq_packet *packet, __u32 random)
{
	__u64 seen_ns = *finish_ns;
	__s64 backlog_ns = (__s64)(seen_ns - now_ns);
	enum vq_verdict verdict =
	    vq_decide(conf, vq_zone(conf, backlog_ns), backlog_ns, packet, random);

	if (verdict < VQ_DROP_FULL)
		vq_charge(conf, finish_ns, skipped_ns, seen_ns, now_ns,
			  vq_cost_ns(conf, packet->wire_bytes, carry));
	return verdict;
}

__u64 native_vq_charge(const struct vq_conf *conf, __u64 *finish_ns, __u64 *skipped_ns,
		       __u64 seen_ns, __u64 now_ns, __u64 cost_ns)
{
	return vq_charge(conf, finish_ns, skipped_ns, seen_ns, now_ns, cost_ns);
}

__u64 native_vq_rescaled_ns(__u64 backlog_ns, __u64 from, __u64 to, __u64 drop_ns)
{
	return vq_rescaled_ns(backlog_ns, from, to, drop_ns);
}
