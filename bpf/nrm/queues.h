/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The map of the queues of a limit. */
#ifndef TG_NRM_QUEUES_H
#define TG_NRM_QUEUES_H

#include <bpf/bpf_helpers.h>

#include "nrm/intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_QUEUES);
	__type(key, __u32);
	__type(value, struct tg_nrm_queue);
} queues_of_limit SEC(".maps");

/* A queue of a limit by its slot, which is 0 in maps that hold one limit. */
static __always_inline struct tg_nrm_queue *tg_queue_of(__u32 slot, __u32 index)
{
	__u32 key = slot * TG_QUEUES + index;

	return bpf_map_lookup_elem(&queues_of_limit, &key);
}

#endif
