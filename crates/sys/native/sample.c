// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "common/sample.h"

__u64 native_sm_flow(__u64 seed, const __u64 *words, __u32 count)
{
	for (__u32 i = 0; i < count; i++)
		seed = sm_mix(seed, words[i]);
	return sm_flow(seed);
}

void native_sm_count(struct sm_counts *counts, __u64 flow, __u32 bytes, __u32 random)
{
	struct sm_cell *set = counts->set[flow >> SM_SET_SHIFT];
	__u32 way = sm_add(set, flow, bytes);

	if (way < SM_WAYS)
		sm_replace(&set[way], flow, bytes, random);
}

__u32 native_sm_drops(__u32 probability, __u32 random)
{
	return sm_drops(probability, random);
}
