// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "unpaced.h"

__u64 native_vq_time_ns(__u64 bytes, __u64 cost)
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

void native_up_config(const struct vq_conf *conf, struct vq_conf *out)
{
	up_config(conf, out);
}
