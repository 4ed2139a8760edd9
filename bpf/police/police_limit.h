/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps of a policer that is alone in its programs; and the colour of a packet where flows have
 * equal parts.
 */
#ifndef TG_POLICE_LIMIT_H
#define TG_POLICE_LIMIT_H

#include "police/fair_police.h"
#include "common/settings.h"
#include "police/intf.h"
#include "police/police_counters.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_LIMITS);
	__type(key, __u32);
	__type(value, struct tg_police_limit);
} limit SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct pl_meter);
} meters_of_limit SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct tg_police_counters);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_DIRECTIONS);
	__type(key, __u32);
	__type(value, struct fp_table);
} flows_of_police SEC(".maps");

static __always_inline struct tg_police_limit *limit_of(enum tg_direction direction)
{
	return tg_settings_of(&limit, 0, direction);
}

static long look_at_cell(__u32 i, void *ctx)
{
	fp_look(*(struct fp_table **)ctx, i);
	return 0;
}

/*
 * The colour of a packet where flows have equal parts of the bucket. A packet that does not fit its
 * flow's part is red, and charged to nobody. A separate function: see tg_parse.
 */
__noinline int fair(__u32 direction, __u64 now, __u32 bytes, __u64 flow)
{
	struct fp_table *table = bpf_map_lookup_elem(&flows_of_police, &direction);
	struct pl_meter *meter = bpf_map_lookup_elem(&meters_of_limit, &direction);
	struct tg_police_counters *c = bpf_map_lookup_elem(&counters, &direction);
	const struct pl_policy *policy;
	const struct pl_bucket *bucket;
	struct pl_packet packet;
	struct fp_fit fit;
	struct pl_at at;
	struct tg_police_limit *l;
	__u64 deficit, turn;
	__u64 *full_ns;
	__u32 index = direction, cells;

	/* The verifier of Linux 6.1 forgets a comparison; the compiler would omit this. */
	barrier_var(index);
	index &= TG_DIRECTIONS - 1;
	l = limit_of(index);
	if (!l || !table || !meter || !c)
		return PL_GREEN;
	policy = &l->police[index];
	bucket = &policy->committed;
	turn = turn_of(policy, meter, c);
	if (turn & 1)
		return PL_RED;
	full_ns = &pl_side(meter, turn)->full_ns;
	at.full_ns = full_ns;
	at.turn_now = &meter->turn;
	at.turn = turn;
	packet.wire_bytes = metered_bytes(bytes);
	packet.may_owe = PL_OWE_ALL;
	deficit = fp_less(*(volatile __u64 *)full_ns, now);
	cells = fp_begin_steps(bucket, table, now, deficit);
	if (cells) {
		bpf_loop(cells, look_at_cell, &table, 0);
		fp_end_steps(bucket, table, now, deficit, cells);
	}
	if (!fp_fits(bucket, table, now, deficit, flow, packet.wire_bytes, &fit) ||
	    !pl_take(bucket, &at, now, &packet, &c->carry) || !pl_counts(meter, turn))
		return PL_RED;
	fp_charge(&fit);
	return PL_GREEN;
}

#endif
