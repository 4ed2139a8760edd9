/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Counts the flows of a limit that take all they get: a pure header over (state, now, acknowledged
 * bytes). Its model, with the reasons, is crates/core/src/flow_count.rs; a property test compares
 * the two.
 */
#ifndef TG_FLOW_COUNT_H
#define TG_FLOW_COUNT_H

#include "acks/spring.h"

/* A flow's part of what the limit passes in a time is in these units. */
#define FC_ONE		 (1ULL << 16)
#define FC_MOST		 (2 * FC_ONE)
#define FC_MIN_PERIOD_NS 100000000ULL
#define FC_MAX_PERIOD_NS SP_SECOND_NS
/* Two full frames: the most that a receiver acknowledges at once. */
#define FC_ROUND_BYTES 3028

struct fc_sums {
	__u64 parts;
	__u64 squares;
	__u64 cubes;
	__u64 flows;
};

struct fc_count {
	/* When this period began, and how long it lasts. */
	__u64 start_ns;
	__u64 period_ns;
	/* Flow counts of this period, and of the one before. */
	struct fc_sums sums;
	struct fc_sums before;
	/* Number of this period; those of flows begin at one. */
	__u32 number;
	__u32 pad;
};

/* When a flow was last counted. */
struct fc_mark {
	__u64 at_ns;
	__u32 acked;
	__u32 number;
};

/* The part of a flow to which this many bytes were acknowledged in this time. */
static inline __attribute__((always_inline)) __u64 fc_part(const struct sp_conf *conf, __u32 bytes,
							   __u64 elapsed_ns)
{
	__u64 all = fs_max(sp_bytes(conf, elapsed_ns), 1);

	return fs_min((fs_min(bytes, SP_MAX_BYTES) << 16) / all, FC_MOST);
}

/* How long a period must be to see all flows in it. */
static inline __attribute__((always_inline)) __u64 fc_period(const struct sp_conf *conf,
							     __u64 flows)
{
	__u64 round = 2 * sp_time(conf, fs_min(flows, SP_MAX_FLOWS) * FC_ROUND_BYTES);

	return fs_min(fs_max(round, FC_MIN_PERIOD_NS), FC_MAX_PERIOD_NS);
}

/* Everything before `ack` of a flow has arrived. */
static inline __attribute__((always_inline)) void fc_ack(const struct sp_conf *conf,
							 struct fc_count *count,
							 struct fc_mark *mark, __u32 ack,
							 __u64 now_ns)
{
	__u64 start = *(volatile __u64 *)&count->start_ns;
	__u64 since = now_ns > start ? now_ns - start : 0, part;
	__u32 number;

	if (since >= count->period_ns &&
	    __sync_val_compare_and_swap(&count->start_ns, start, now_ns) == start) {
		count->before.parts = __sync_lock_test_and_set(&count->sums.parts, 0);
		count->before.squares = __sync_lock_test_and_set(&count->sums.squares, 0);
		count->before.cubes = __sync_lock_test_and_set(&count->sums.cubes, 0);
		count->before.flows = __sync_lock_test_and_set(&count->sums.flows, 0);
		count->period_ns = fc_period(conf, count->before.flows);
		count->number++;
	}
	number = count->number + 1;
	if (mark->number == number)
		return;
	/* The first ACK only sets the reference. */
	if (mark->number && (__s32)(ack - mark->acked) > 0) {
		since = now_ns > mark->at_ns ? now_ns - mark->at_ns : 0;
		part = fc_part(conf, ack - mark->acked, since);
		__sync_fetch_and_add(&count->sums.parts, part);
		__sync_fetch_and_add(&count->sums.squares, part * part);
		__sync_fetch_and_add(&count->sums.cubes, part * part * part);
		__sync_fetch_and_add(&count->sums.flows, 1);
	}
	mark->at_ns = now_ns;
	mark->acked = ack;
	mark->number = number;
}

#endif
