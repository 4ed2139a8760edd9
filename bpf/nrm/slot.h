/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which limit a program runs for, where one copy of the programs serves many. The limits of a pool
 * have their state in the same maps, each in a slot. The kernel keeps a value for each cgroup that
 * a program is attached to: the slot of the limit that the cgroup has. It is one value for all
 * hooks, so one write puts a limit in force.
 *
 * A program asks once, and passes the slot on: a second look would cost the verifier as much as
 * the first one.
 */
#ifndef TG_SLOT_H
#define TG_SLOT_H

#include <bpf/bpf_helpers.h>

#include "nrm/intf.h"

/* Whether the limit shares programs and maps with others. If not its slot is 0. */
const volatile __u8 is_pooled = 0;

struct {
	__uint(type, BPF_MAP_TYPE_CGROUP_STORAGE);
	__type(key, __u64);
	__type(value, struct tg_slot);
} slots_of_cgroups SEC(".maps");

/* Finds the slot. Returns 0 if the cgroup has no limit: it has left one, or does not have it yet.
 */
static __always_inline int tg_find_slot(__u32 *slot)
{
	struct tg_slot *here;

	*slot = 0;
	if (!is_pooled)
		return 1;
	here = bpf_get_local_storage(&slots_of_cgroups, 0);
	*slot = here->index;
	return *slot != 0;
}

#endif
