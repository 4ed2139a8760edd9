/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Prefixes of addresses as keys of tries, IPv4 mapped into IPv6. */
#ifndef TG_PREFIX_H
#define TG_PREFIX_H

#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* IP version and address. */
#define TG_PREFIX_BITS 160

/*
 * The key of the trie, a struct bpf_lpm_trie_key: the version of IP, as ::/0 is not all of IPv4,
 * and an address of IPv6, or of IPv4 mapped into it (RFC 4291, 2.5.5.2).
 */
struct tg_prefix {
	__u32 bits;
	__u32 version;
	__u32 address[4];
};

static __always_inline void tg_key4(struct tg_prefix *key, __u32 address)
{
	key->bits = TG_PREFIX_BITS;
	key->version = bpf_htonl(4);
	key->address[0] = 0;
	key->address[1] = 0;
	key->address[2] = bpf_htonl(0xffff);
	key->address[3] = address;
}

/* The address is in the key. It may be an IPv4 one. */
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

#endif
