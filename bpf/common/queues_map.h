/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The queues of a limit. A scheme with more state has a map of its own in their place. */
#ifndef TG_QUEUES_MAP_H
#define TG_QUEUES_MAP_H

#include <bpf/bpf_helpers.h>

#include "common/intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_QUEUES);
	__type(key, __u32);
	__type(value, struct tg_queue);
} queues_of_limit SEC(".maps");

#endif
