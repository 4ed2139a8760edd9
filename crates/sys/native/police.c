// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "police.h"

__u32 native_pl_take(const struct pl_bucket *bucket, __u64 *full_ns, __u64 now_ns,
		     const struct pl_packet *packet, __u64 *carry)
{
	return pl_take(bucket, full_ns, now_ns, packet, carry);
}
