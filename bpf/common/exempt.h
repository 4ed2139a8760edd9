/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Exemptions of a limit: prefixes of remote addresses, and DSCPs. If a limit exempts nobody the
 * verifier removes this code from its program.
 */
#ifndef TG_EXEMPT_H
#define TG_EXEMPT_H

#include <bpf/bpf_helpers.h>

#include "common/intf.h"
#include "common/prefix.h"

const volatile __u8 has_exempt = 0;

/* 15 letters, as for all maps that objects share (maps.h). */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, TG_EXEMPT_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tg_prefix);
	__type(value, __u8);
} exempt_prefixes SEC(".maps");

static __always_inline int tg_has_prefix(const struct tg_prefix *key)
{
	return bpf_map_lookup_elem(&exempt_prefixes, key) != 0;
}

#endif
