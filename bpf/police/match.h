/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Many policers on one device, each for the addresses behind it that begin with its prefixes: finds
 * the limit of a packet. On egress of the device the destination counts, on ingress the source.
 *
 * Prefixes are in a hash table with one lookup for each length in use, the longest first. So a
 * packet pays for lengths, of which there are few, not for prefixes. A trie gets deeper with
 * prefixes: from ten to a thousand it costs 30 ns more a packet. Lengths are a map in a map, so
 * that packets see the old ones or the new, never half of both.
 *
 * The limits lie in chunks, maps of TG_CHUNK each. So memory grows with the limits, and a device
 * waits for the kernel (which changes a map in a map in some 15 ms) only once a chunk.
 */
#ifndef TG_MATCH_H
#define TG_MATCH_H

#include "common/packet.h"
#include "common/prefix.h"
#include "common/settings.h"
#include "police/intf.h"

/* 15 letters that differ, for all maps (maps.h). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TG_PREFIXES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tg_place);
	__type(value, __u32);
} places_of_device SEC(".maps");

struct mt_lengths {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_DIRECTIONS *TG_FAMILIES);
	__type(key, __u32);
	__uint(value_size, sizeof(struct tg_lengths));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct mt_lengths);
} lengths_of_device SEC(".maps");

struct mt_limits {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_CHUNK *TG_LIMITS);
	__type(key, __u32);
	__uint(value_size, sizeof(struct tg_police_limit));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, TG_CHUNKS);
	__type(key, __u32);
	__array(values, struct mt_limits);
} limits_of_device SEC(".maps");

struct mt_meters {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_CHUNK *TG_DIRECTIONS);
	__type(key, __u32);
	__uint(value_size, sizeof(struct pl_meter));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, TG_CHUNKS);
	__type(key, __u32);
	__array(values, struct mt_meters);
} meters_of_device SEC(".maps");

struct mt_counters {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_CHUNK *TG_DIRECTIONS);
	__type(key, __u32);
	__uint(value_size, sizeof(struct tg_police_counters));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, TG_CHUNKS);
	__type(key, __u32);
	__array(values, struct mt_counters);
} counters_of_device SEC(".maps");

/* Exemptions by limit: the index of the limit comes before the version of IP. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, TG_CHUNKS *TG_CHUNK *TG_EXEMPT_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tg_prefix);
	__type(value, __u8);
} exempts_of_device SEC(".maps");

/* The key by which the limit of a packet is found. */
struct mt_packet {
	/* The host behind the device. */
	struct tg_prefix behind;
	/* The remote host, seen from the workload. It may be exempt (exempt.h). */
	struct tg_prefix other;
	__u8 dscp;
};

/* The parts of a limit. */
struct mt_limit {
	struct tg_police_limit *limit;
	struct pl_meter *meter;
	struct tg_police_counters *counters;
};

/* The index of the limit that a host behind the device has in a direction; negative if none. */
static __always_inline int mt_index(const struct tg_prefix *behind, __u32 direction)
{
	__u32 family = behind->version == bpf_htonl(4), key = 0;
	const struct tg_lengths *lengths;
	struct tg_place place;
	__u32 *index;
	void *lists;

	lists = bpf_map_lookup_elem(&lengths_of_device, &key);
	if (!lists)
		return -1;
	key = direction * TG_FAMILIES + family;
	lengths = bpf_map_lookup_elem(lists, &key);
	if (!lengths)
		return -1;
	for (__u32 i = 0; i < TG_LENGTHS_MAX; i++) {
		if (i >= lengths->count)
			break;
		for (__u32 w = 0; w < 4; w++)
			place.address[w] = behind->address[w] & lengths->length[i].mask[w];
		place.what = direction << 16 | family << 8 | lengths->length[i].bits;
		index = bpf_map_lookup_elem(&places_of_device, &place);
		if (index)
			return *index & (TG_CHUNK * TG_CHUNKS - 1);
	}
	return -1;
}

/* The parts of the limit with this index, as in force (settings.h); 0 if one is missing. */
static __always_inline int mt_open(__u32 index, __u32 direction, struct mt_limit *found)
{
	__u32 chunk = index / TG_CHUNK, place = index % TG_CHUNK, key;
	void *map;

	map = bpf_map_lookup_elem(&limits_of_device, &chunk);
	if (!map)
		return 0;
	found->limit = tg_settings_of(map, place * TG_LIMITS, direction);
	map = bpf_map_lookup_elem(&meters_of_device, &chunk);
	if (!map)
		return 0;
	key = place * TG_DIRECTIONS + direction;
	found->meter = bpf_map_lookup_elem(map, &key);
	map = bpf_map_lookup_elem(&counters_of_device, &chunk);
	if (!map)
		return 0;
	found->counters = bpf_map_lookup_elem(map, &key);
	return found->limit && found->meter && found->counters;
}

/* Whether a limit exempts a packet. */
static __always_inline int mt_is_exempt(const struct tg_limit *limit, __u32 index,
					struct mt_packet *packet)
{
	if (limit->exempt_dscps >> (packet->dscp & 63) & 1)
		return 1;
	if (!(limit->flags & TG_FLAG_EXEMPT))
		return 0;
	packet->other.version |= bpf_htonl(index << 8);
	return bpf_map_lookup_elem(&exempts_of_device, &packet->other) != 0;
}

#endif
