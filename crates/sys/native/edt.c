// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "edt/edt.h"

/* One packet through class and flow, put together as the program in edt.bpf.c does. */
__u32 native_edt_packet(const struct vq_conf *conf, struct edt_class *class, __u32 *carry,
			struct edt_flow *flow, __u64 now_ns, __u32 wire_bytes, __u8 ecn_capable,
			__u8 held, __u64 *departure_ns)
{
	struct edt_look look;
	enum vq_verdict verdict;

	edt_look(conf, class, flow, now_ns, wire_bytes, held, &look);
	verdict = edt_verdict(conf, &look, ecn_capable);
	*departure_ns = 0;
	if (verdict < VQ_DROP_FULL) {
		vq_charge(conf, &class->finish_ns, 0, class->finish_ns, now_ns,
			  vq_cost_ns(conf, wire_bytes, carry));
		*departure_ns = edt_commit(&look, flow, &class->latest_ns, now_ns);
	}
	return verdict;
}

const __u32 native_edt_flow_bytes = sizeof(struct edt_flow);
