/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Byte counters of some flows in fixed memory (sample and hold in sets of four), and random drops:
 * a pure header. Its models, with the reasons, are crates/core/src/fleet/flows/counts.rs and
 * grd.rs; a property test compares them, bit by bit.
 */
#ifndef TG_SAMPLE_H
#define TG_SAMPLE_H

#include <linux/types.h>

/* The set is in the upper bits of the hash. */
#define SM_SETS	     64
#define SM_SET_SHIFT 58
#define SM_WAYS	     4
/* 2^64 divided by the golden ratio, odd. */
#define SM_MIX 0x9e3779b97f4a7c15ULL

/* A flow and its bytes in this interval; 0 is no flow. */
struct sm_cell {
	__u64 flow;
	__u64 bytes;
};

/* Counters of one CPU. */
struct sm_counts {
	struct sm_cell set[SM_SETS][SM_WAYS];
};

/* Mixes another word of a flow's identity into its hash. */
static inline __attribute__((always_inline)) __u64 sm_mix(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * SM_MIX;
	return hash ^ hash >> 32;
}

/* A hash that is valid as a flow (not 0). */
static inline __attribute__((always_inline)) __u64 sm_flow(__u64 hash)
{
	return hash ? hash : 1;
}

/*
 * Counts a packet of a flow that has a cell in its set, or takes a free one: returns SM_WAYS.
 * Otherwise returns the cell with the fewest bytes, which the packet may take, at the odds.
 */
static inline __attribute__((always_inline)) __u32 sm_add(struct sm_cell *set, __u64 flow,
							  __u32 bytes)
{
	__u64 least = ~0ULL;
	__u32 way = 0;

	for (__u32 i = 0; i < SM_WAYS; i++) {
		if (set[i].flow == flow || !set[i].flow) {
			set[i].flow = flow;
			set[i].bytes += bytes;
			return SM_WAYS;
		}
		if (set[i].bytes < least) {
			least = set[i].bytes;
			way = i;
		}
	}
	return way;
}

/* Gives another flow's cell to the flow, at the odds bytes / (bytes of the other + bytes). */
static inline __attribute__((always_inline)) void sm_replace(struct sm_cell *cell, __u64 flow,
							     __u32 bytes, __u32 random)
{
	__u64 most = ~0U - bytes;
	__u64 all = (cell->bytes < most ? cell->bytes : most) + bytes;

	if (random * all < (__u64)bytes << 32) {
		cell->flow = flow;
		cell->bytes = bytes;
	}
}

/* Whether to drop a packet, at a probability in units of 2^-32. */
static inline __attribute__((always_inline)) int sm_drops(__u32 probability, __u32 random)
{
	return random < probability;
}

#endif
