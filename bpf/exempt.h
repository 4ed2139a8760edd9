/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Who is exempt from a limit: prefixes of addresses at the other end, and code points. A program
 * whose limit exempts nobody has none of this: the verifier takes it out.
 */
#ifndef TG_EXEMPT_H
#define TG_EXEMPT_H

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Version and address. */
#define TG_PREFIX_BITS 160

const volatile __u8 has_exempt = 0;

/*
 * The key of the trie, a struct bpf_lpm_trie_key: the version of IP, for ::/0 is not all of IPv4,
 * and an address of IPv6, or one of IPv4 as it stands in one (RFC 4291, 2.5.5.2).
 */
struct tg_prefix {
	__u32 bits;
	__u32 version;
	__u32 address[4];
};

/* 15 letters, as all maps that objects share (maps.h). */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, TG_EXEMPT_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tg_prefix);
	__type(value, __u8);
} exempt_prefixes SEC(".maps");

static __always_inline void tg_key4(struct tg_prefix *key, __u32 address)
{
	key->bits = TG_PREFIX_BITS;
	key->version = bpf_htonl(4);
	key->address[0] = 0;
	key->address[1] = 0;
	key->address[2] = bpf_htonl(0xffff);
	key->address[3] = address;
}

/* The address is in the key: it may be one of IPv4. */
static __always_inline void tg_end_key6(struct tg_prefix *key)
{
	int mapped = !key->address[0] && !key->address[1] && key->address[2] == bpf_htonl(0xffff);

	key->bits = TG_PREFIX_BITS;
	key->version = bpf_htonl(mapped ? 4 : 6);
}

static __always_inline void tg_key6(struct tg_prefix *key, const __u32 *address)
{
	for (int i = 0; i < 4; i++)
		key->address[i] = address[i];
	tg_end_key6(key);
}

static __always_inline int tg_has_prefix(const struct tg_prefix *key)
{
	return bpf_map_lookup_elem(&exempt_prefixes, key) != 0;
}

#endif
