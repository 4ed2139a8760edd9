// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "common/class.h"

__u64 native_cl_rate(const struct cl_class *class, __u64 ceiling_bit_s, __u64 parent_bit_s,
		     __u64 share)
{
	return cl_rate(class, ceiling_bit_s, parent_bit_s, share);
}

void native_cl_config_at(const struct vq_conf *ceiling, const struct cl_class *class, __u64 bit_s,
			 struct vq_conf *now)
{
	cl_config_at(ceiling, class, cl_cost(bit_s), now);
}
