/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The counters of a limit by direction. A policer has counters of its own (police_limit.h). */
#ifndef TG_COUNTERS_MAP_H
#define TG_COUNTERS_MAP_H

#include <bpf/bpf_helpers.h>

#include "common/intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct tg_counters);
} counters SEC(".maps");

#endif
