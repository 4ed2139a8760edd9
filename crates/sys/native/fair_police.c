// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "fair_police.h"

/* A packet of a flow; whether it fits its part. It is charged if `taken`, and fits. */
__u32 native_fp_packet(const struct pl_bucket *bucket, struct fp_table *table, const __u64 *times,
		       __u64 flow, __u32 wire_bytes, __u32 taken)
{
	__u64 now_ns = times[0], deficit_ns = times[1];
	struct fp_fit fit;
	int fits;

	if (fp_begin_turn(bucket, table, now_ns)) {
		for (__u32 i = 0; i < FP_SETS * FP_WAYS; i++)
			fp_add(&table->sum, &table->set[i / FP_WAYS][i % FP_WAYS]);
		fp_add(&table->sum, &table->others);
		fp_end_turn(table, deficit_ns);
	}
	fits = fp_fits(bucket, table, now_ns, deficit_ns, flow, wire_bytes, &fit);
	if (fits && taken)
		fp_charge(&fit);
	return fits;
}

__u64 native_fp_table_bytes(void)
{
	return sizeof(struct fp_table);
}
