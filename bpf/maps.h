/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps that every limit has, whatever its scheme: its settings and its queues.
 */
#ifndef TG_MAPS_H
#define TG_MAPS_H

#include <bpf/bpf_helpers.h>

#include "intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tg_limit);
} limit SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_QUEUES);
	__type(key, __u32);
	__type(value, struct tg_queue);
} queues SEC(".maps");

#endif
