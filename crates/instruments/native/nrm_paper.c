// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "nrm_paper.h"

__u32 native_np_packet(struct np_queue *q, __u64 now_ns, __u64 byte_s,
		       const struct np_packet *packet, __u32 random)
{
	return np_packet(q, now_ns, byte_s, packet, random);
}
