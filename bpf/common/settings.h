/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds the settings that are in force in a map, whose entries begin with a struct tg_limit. */
#ifndef TG_SETTINGS_H
#define TG_SETTINGS_H

#include <bpf/bpf_helpers.h>

#include "common/intf.h"

/*
 * The limit whose first entry is at a key, before its leases; moves the key to what is in force. An
 * update of a map is not atomic, so user space writes the copy that is not in force, and then the
 * one word that names it. A packet sees the old settings or the new, never half of both, also if
 * the writer dies. Only a packet that is processed while two updates follow each other may see half
 * of the second.
 */
static __always_inline void *tg_settings_now(void *map, __u32 *key)
{
	struct tg_limit *l = bpf_map_lookup_elem(map, key);

	if (!l || !l->copy)
		return l;
	*key += TG_COPY;
	return bpf_map_lookup_elem(map, key);
}

/*
 * The same for a direction. A rate that a group lends to a host has an end. The group gives it to
 * others then, even if no daemon is there to lower the limit.
 */
static __always_inline void *tg_settings_of(void *map, __u32 key, enum tg_direction direction)
{
	struct tg_limit *l = tg_settings_now(map, &key);

	if (!l || !l->until_ns[direction] || bpf_ktime_get_boot_ns() < l->until_ns[direction])
		return l;
	key += 1 + direction;
	return bpf_map_lookup_elem(map, &key);
}

#endif
