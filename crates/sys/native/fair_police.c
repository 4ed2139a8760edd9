// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "police/fair_police.h"
#include "police/meter.h"

/* The steps that are due, as fair() of police_limit.h takes them. */
static void look(const struct pl_bucket *bucket, struct fp_table *table, __u64 now_ns,
		 __u64 deficit_ns)
{
	__u32 cells = fp_begin_steps(bucket, table, now_ns, deficit_ns);

	if (!cells)
		return;
	for (__u32 i = 0; i < cells; i++)
		fp_look(table, i);
	fp_end_steps(bucket, table, now_ns, deficit_ns, cells);
}

/* A packet of a flow; whether it fits its part. It is charged if `taken`, and fits. */
__u32 native_fp_packet(const struct pl_bucket *bucket, struct fp_table *table, const __u64 *times,
		       __u64 flow, __u32 wire_bytes, __u32 taken)
{
	__u64 now_ns = times[0], deficit_ns = times[1];
	struct fp_fit fit;
	int fits;

	look(bucket, table, now_ns, deficit_ns);
	fits = fp_fits(bucket, table, now_ns, deficit_ns, flow, wire_bytes, &fit);
	if (fits && taken)
		fp_charge(&fit);
	return fits;
}

/* A packet through phantom queues and bucket, as fair() of police_limit.h does it. */
__u32 native_fp_colour(const struct pl_policy *policy, struct pl_meter *meter, __u64 *carry,
		       struct fp_table *table, __u64 now_ns, __u64 flow, __u32 wire_bytes)
{
	const struct pl_packet packet = {.wire_bytes = wire_bytes, .may_owe = PL_OWE_ALL};
	const struct pl_bucket *bucket = &policy->committed;
	__u64 turn = *(volatile __u64 *)&meter->turn;
	__u64 *full_ns, deficit_ns;
	struct fp_fit fit;
	struct pl_at at;

	if (!(turn & 1) && !pl_is_kept(policy, pl_side(meter, turn)))
		turn = pl_turn(policy, meter, &carry[0], &carry[1]);
	if (turn & 1)
		return PL_RED;
	full_ns = &pl_side(meter, turn)->full_ns;
	at = (struct pl_at){full_ns, &meter->turn, turn};
	deficit_ns = fp_less(*(volatile __u64 *)full_ns, now_ns);
	look(bucket, table, now_ns, deficit_ns);
	if (!fp_fits(bucket, table, now_ns, deficit_ns, flow, wire_bytes, &fit) ||
	    !pl_take(bucket, &at, now_ns, &packet, carry) || !pl_counts(meter, turn))
		return PL_RED;
	fp_charge(&fit);
	return PL_GREEN;
}

__u64 native_fp_table_bytes(void)
{
	return sizeof(struct fp_table);
}
