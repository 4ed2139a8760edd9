/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How much a new cgroup may send and receive until user space has decided which limits hold it: a
 * pure header. Its model is crates/core/src/gate.rs, and a property test compares the two.
 *
 * A cgroup is undecided from its creation on. Until its deadline, GT_BYTES of its packets pass in
 * both directions together, in bytes on the wire as limits count them. A packet that does not fit
 * into the rest is dropped; a smaller one may still pass. After the deadline everything passes.
 *
 * A packet takes its bytes from its own cgroup and from all above it that are undecided and not
 * late, and passes if it fits into each of them. So GT_BYTES pass of an undecided cgroup together
 * with all below it, whatever is decided meanwhile above or below. A cgroup that was decided before
 * one above it still waits for that one.
 *
 * A packet without bytes takes nothing, and tells if its cgroup is late with all above it. Then it
 * gives up its place if a new one needs that.
 *
 * No number of CPUs passes more. A packet that does not fit gives back what it took; one that comes
 * between both is dropped although it would just have fit.
 */
#ifndef TG_GATE_H
#define TG_GATE_H

#include <linux/types.h>

/* Bytes of an undecided cgroup that pass. */
#define GT_BYTES 65536
/* Undecided cgroups above one another that a packet looks at, from its own on. */
#define GT_LEVELS 8
/*
 * Cgroups that are undecided at a time. One that finds no place, and none of a late one, is
 * reported, but not held.
 */
#define GT_UNDECIDED_MAX 4096

struct gt_counters {
	/* Cgroups that were made. */
	__u64 cgroups;
	/* Cgroups that were not held: `undecided` was full. */
	__u64 full;
	/* Events that found the ring full. */
	__u64 lost;
	/* Traffic of undecided cgroups before their deadline. */
	__u64 passed_bytes;
	__u64 dropped_packets;
	/* Passed of undecided cgroups after it. */
	__u64 late_bytes;
};

struct gt_cgroup {
	/* The id of the cgroup above it. */
	__u64 parent;
	/* Its deadline by CLOCK_MONOTONIC. 0: it is decided, and waits for one above it. */
	__u64 until_ns;
	/* The bytes that have passed, of it and of those below it. */
	__u64 bytes;
};

/* Finds an undecided cgroup by its id; 0 if there is none. */
typedef struct gt_cgroup *(*gt_find)(void *ctx, __u64 id);

enum gt_verdict {
	/* The deadline is over, of its cgroup and of all above it that are undecided. */
	GT_LATE,
	GT_PASS,
	GT_DROP,
};

/* Takes the bytes of a packet; 0 if they do not fit. A flood that is dropped writes nothing. */
static inline __attribute__((always_inline)) int gt_take(struct gt_cgroup *held, __u32 bytes)
{
	if (*(volatile __u64 *)&held->bytes + bytes > GT_BYTES)
		return 0;
	if (__sync_fetch_and_add(&held->bytes, bytes) + bytes <= GT_BYTES)
		return 1;
	__sync_fetch_and_add(&held->bytes, -(__u64)bytes);
	return 0;
}

/* Gives back what the lowest cgroups from `at` on gave a packet: `levels` of them. */
static inline __attribute__((always_inline)) void
gt_give_back(void *ctx, gt_find find, struct gt_cgroup *at, int levels, __u64 now_ns, __u32 bytes)
{
	for (int i = 0; i < GT_LEVELS && i < levels && at; i++) {
		if (now_ns < at->until_ns)
			__sync_fetch_and_add(&at->bytes, -(__u64)bytes);
		at = find(ctx, at->parent);
	}
}

/* Judges a packet of the undecided cgroup `own`. */
static inline __attribute__((always_inline)) enum gt_verdict
gt_judge(void *ctx, gt_find find, struct gt_cgroup *own, __u64 now_ns, __u32 bytes)
{
	enum gt_verdict verdict = GT_LATE;
	struct gt_cgroup *at = own;

	for (int i = 0; i < GT_LEVELS && at; i++) {
		if (now_ns < at->until_ns) {
			if (!gt_take(at, bytes)) {
				gt_give_back(ctx, find, own, i, now_ns, bytes);
				return GT_DROP;
			}
			verdict = GT_PASS;
		}
		at = find(ctx, at->parent);
	}
	return verdict;
}

#endif
