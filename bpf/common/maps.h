/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The map of the settings of a limit. A scheme with settings of its own has such a map with longer
 * entries (police/police_limit.h).
 *
 * A map that libbpf reuses gets the kernel's name for it. The skeletons then do not find it, unless
 * that name is 15 letters long and ours begins with it. So the maps that a child shares with its
 * parent (tree.h) have their first 15 letters in common.
 */
#ifndef TG_MAPS_H
#define TG_MAPS_H

#include <bpf/bpf_helpers.h>

#include "common/settings.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_LIMITS);
	__type(key, __u32);
	__type(value, struct tg_limit);
} limit SEC(".maps");

/* A limit by its slot, which is 0 in maps that hold one limit. */
static __always_inline struct tg_limit *tg_limit_now(__u32 slot, __u32 *key)
{
	*key = slot * TG_LIMITS;
	return tg_settings_now(&limit, key);
}

static __always_inline struct tg_limit *tg_limit_of(__u32 slot, enum tg_direction direction)
{
	return tg_settings_of(&limit, slot * TG_LIMITS, direction);
}

#endif
