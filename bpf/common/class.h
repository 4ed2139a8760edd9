/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Limits inside a limit: a pure header over what the parent gives now. Its model, with the reasons,
 * is crates/core/src/class.rs; a property test compares the two.
 */
#ifndef TG_CLASS_H
#define TG_CLASS_H

#include "common/fair_share.h"
#include "common/vqueue.h"

#define CL_MIN_RATE_BIT_S 8000ULL
#define CL_MAX_SPAN_NS	  512000000000ULL
/* The cost of a byte at 1 bit/s, in 2^-24 ns. */
#define CL_ONE_BIT_S_COST (8000000000ULL << VQ_COST_SHIFT)

/* Guarantee, weight and least thresholds of a limit among its siblings. */
struct cl_class {
	__u64 guarantee_bit_s;
	/* 0: it has no parent. */
	__u32 weight;
	/* No threshold is below these lengths. */
	__u32 burst_bytes;
	__u32 mark_bytes;
	__u32 drop_bytes;
};

/*
 * The rate that a class may use of a parent that has `parent_bit_s` and gives `share` to a weight
 * of 100.
 */
static inline __attribute__((always_inline)) __u64
cl_rate(const struct cl_class *class, __u64 ceiling_bit_s, __u64 parent_bit_s, __u64 share)
{
	__u64 part = parent_bit_s * (fs_min(share, FS_MAX_SHARE) >> 8) >> 16;
	__u64 rate = class->guarantee_bit_s + part * class->weight / FS_WEIGHT;

	return fs_max(fs_min(rate, fs_min(ceiling_bit_s, parent_bit_s)), CL_MIN_RATE_BIT_S);
}

/* The cost of a byte at a rate, rounded to the nearest. */
static inline __attribute__((always_inline)) __u64 cl_cost(__u64 bit_s)
{
	bit_s = fs_max(bit_s, CL_MIN_RATE_BIT_S);
	return (CL_ONE_BIT_S_COST + bit_s / 2) / bit_s;
}

static inline __attribute__((always_inline)) __u64 cl_threshold(__u64 at_ceiling_ns, __u32 bytes,
								__u64 cost)
{
	return fs_max(at_ceiling_ns, fs_min(vq_time_ns(bytes, cost), CL_MAX_SPAN_NS));
}

/*
 * Derives the virtual queue of a class whose bytes cost `cost` now from the queue at its ceiling.
 */
static inline __attribute__((always_inline)) void cl_config_at(const struct vq_conf *ceiling,
							       const struct cl_class *class,
							       __u64 cost, struct vq_conf *now)
{
	__u64 drop = cl_threshold(ceiling->drop_ns, class->drop_bytes, cost);
	__u64 mark = cl_threshold(ceiling->mark_ns, class->mark_bytes, cost);
	__u64 large_drop = drop - drop / 8;

	now->cost = cost;
	now->burst_ns = cl_threshold(ceiling->burst_ns, class->burst_bytes, cost);
	now->mark_ns = mark < large_drop ? mark : large_drop / 2;
	now->large_drop_ns = large_drop;
	now->drop_ns = drop;
}

#endif
