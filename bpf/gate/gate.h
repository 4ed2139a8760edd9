/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How much a new cgroup may send and receive until user space has decided which limits hold it: a
 * pure header. Its model is crates/core/src/gate.rs, and a property test compares the two.
 *
 * A cgroup is undecided from its creation on. Until its deadline, GT_BYTES of its packets pass in
 * both directions together, in bytes on the wire as limits count them. A packet that does not fit
 * into the rest is dropped; a smaller one may still pass. After the deadline everything passes.
 *
 * A cgroup shares the bytes of those above it that are undecided, too. So what it makes below
 * itself has no bytes of its own, and a cgroup that was decided before one above it still waits for
 * that one. Cgroups that are late, or whose ancestors are decided, count as if they were new in
 * decided ones: each has its own bytes. So the sum over a tree is GT_BYTES for each part of it that
 * a decision or a deadline has separated.
 *
 * No number of CPUs passes more. A CPU that finds the bytes taken gives back what it took; a packet
 * that comes between both is dropped although it would just have fit.
 */
#ifndef TG_GATE_H
#define TG_GATE_H

#include <linux/types.h>

/* Bytes of an undecided cgroup that pass. */
#define GT_BYTES 65536
/* Undecided cgroups above one another that a packet looks at, from its own on. */
#define GT_LEVELS 8

struct gt_cgroup {
	/* The id of the cgroup above it. */
	__u64 parent;
	/* Its deadline by CLOCK_MONOTONIC. 0: it is decided, and waits for one above it. */
	__u64 until_ns;
	/* What has passed, of it and of those below it. */
	__u64 bytes;
};

/* Finds an undecided cgroup by its id; 0 if there is none. */
typedef struct gt_cgroup *(*gt_find)(void *ctx, __u64 id);

/*
 * The cgroup whose bytes a packet of the cgroup `at` takes: the uppermost one that is undecided and
 * not late; 0 if there is none.
 */
static inline __attribute__((always_inline)) struct gt_cgroup *
gt_holder(void *ctx, gt_find find, struct gt_cgroup *at, __u64 now_ns)
{
	struct gt_cgroup *holder = 0;

	for (int i = 0; i < GT_LEVELS && at; i++) {
		if (now_ns < at->until_ns)
			holder = at;
		at = find(ctx, at->parent);
	}
	return holder;
}

/* Takes the bytes of a packet; 0 if they do not fit. A flood that is dropped writes nothing. */
static inline __attribute__((always_inline)) int gt_take(struct gt_cgroup *holder, __u32 bytes)
{
	if (*(volatile __u64 *)&holder->bytes + bytes > GT_BYTES)
		return 0;
	if (__sync_fetch_and_add(&holder->bytes, bytes) + bytes <= GT_BYTES)
		return 1;
	__sync_fetch_and_add(&holder->bytes, -(__u64)bytes);
	return 0;
}

#endif
