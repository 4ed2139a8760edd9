// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "gate/gate.h"

struct native_gt_tree {
	const __u64 *ids;
	struct gt_cgroup *cgroups;
	__u64 count;
};

static struct gt_cgroup *find(void *ctx, __u64 id)
{
	const struct native_gt_tree *tree = ctx;

	for (__u64 i = 0; i < tree->count; i++) {
		if (tree->ids[i] == id)
			return &tree->cgroups[i];
	}
	return 0;
}

/* A packet of a cgroup, put together as gate.bpf.c does. 0: decided; 1: passes; 2: late; 3: drop.
 */
__u32 native_gt_packet(struct native_gt_tree *tree, __u64 id, __u64 now_ns, __u32 bytes)
{
	struct gt_cgroup *own = find(tree, id);

	if (!own)
		return 0;
	switch (gt_judge(tree, find, own, now_ns, bytes)) {
	case GT_LATE:
		return 2;
	case GT_PASS:
		return 1;
	default:
		return 3;
	}
}

int native_gt_take(struct gt_cgroup *held, __u32 bytes)
{
	return gt_take(held, bytes);
}
