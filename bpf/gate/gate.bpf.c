// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reports cgroups as they come and go, and bounds what a new one sends until user space has decided
 * which limits hold it (gate.h). For the agent; crates/sys/src/gate.rs loads it.
 *
 * Two programs run when a cgroup of the unified hierarchy is made or removed below the one that
 * user space has chosen. They keep the map `undecided` and write events to a ring. A cgroup is in
 * the map before its directory can be seen, so before a process can be in it. To decide, user space
 * removes it from the map, after it has attached the limits.
 *
 * Two more run for the packets of the cgroups there. A packet of a decided cgroup pays one lookup,
 * and no clock. Loopback is not counted, as limits do not count it by default. Limits are attached
 * further inside, so their programs run first; what they have dropped takes no bytes here.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "common/counters.h"
#include "common/intf.h"
#include "common/packet.h"
#include "common/vmlinux.h"
#include "common/wire_bytes.h"
#include "gate/gate.h"

/* The ring: the ids of 2048 cgroups, and their heads. A power of two. */
#define GT_RING_BYTES 32768
/* The deepest that the chosen cgroup may lie. */
#define GT_DEPTH_MAX 32

/* A full map is looked through for late cgroups so often at most: interrupts are off meanwhile. */
#define GT_LOOK_NS 10000000

/* In every network namespace the loopback device is the first. */
#define LOOPBACK_IFINDEX 1
/* The number of the unified hierarchy. */
#define UNIFIED 0

/* Return values of cgroup_skb programs; the third only on egress. */
enum {
	RET_DROP = 0,
	RET_PASS = 1,
	RET_DROP_SLOW = 2,
};

const volatile __u64 top_id = 0;
const volatile __u64 deadline_ns = 0;
__u64 next_look_ns = 0;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, GT_UNDECIDED_MAX);
	__type(key, __u64);
	__type(value, struct gt_cgroup);
} undecided SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, GT_RING_BYTES);
} cgroup_events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct gt_counters);
} gate_counters SEC(".maps");

static __always_inline struct gt_counters *counters_now(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&gate_counters, &zero);
}

static __always_inline __u64 ancestor_id(struct cgroup *cgroup, __u32 level)
{
	struct cgroup *ancestor;

	if (bpf_core_read(&ancestor, sizeof(ancestor), &cgroup->ancestors[level]))
		return 0;
	return BPF_CORE_READ(ancestor, kn, id);
}

/* Looks at each level: in a cgroup namespace user space does not know how deep its root lies. */
static __always_inline int is_below_top(struct cgroup *cgroup)
{
	__u32 level = cgroup->level;

	for (__u32 i = 0; i <= GT_DEPTH_MAX && i < level; i++) {
		if (ancestor_id(cgroup, i) == top_id)
			return 1;
	}
	return 0;
}

static __always_inline struct gt_cgroup *find_undecided(void *ctx, __u64 id)
{
	return bpf_map_lookup_elem(&undecided, &id);
}

static long drop_late(void *map, __u64 *id, struct gt_cgroup *held, __u64 *now_ns)
{
	if (gt_judge(0, find_undecided, held, *now_ns, 0) == GT_LATE)
		bpf_map_delete_elem(&undecided, id);
	return 0;
}

/*
 * Holds a new cgroup; 0 if there is a place. Those that are late give theirs up: user space may not
 * even see them, as where a path is too long.
 */
static __always_inline int hold(__u64 id, __u64 parent)
{
	__u64 now_ns = bpf_ktime_get_ns();
	struct gt_cgroup held = {.parent = parent, .until_ns = now_ns + deadline_ns};

	if (!bpf_map_update_elem(&undecided, &id, &held, BPF_ANY))
		return 0;
	if (now_ns < next_look_ns)
		return -1;
	next_look_ns = now_ns + GT_LOOK_NS;
	bpf_for_each_map_elem(&undecided, drop_late, &now_ns, 0);
	return bpf_map_update_elem(&undecided, &id, &held, BPF_ANY);
}

/* Follows a cgroup that is made or removed. Runs with interrupts off, so alone on its CPU. */
static __always_inline int follow(struct cgroup *cgroup, int is_removed)
{
	struct gt_counters *c = counters_now();
	__u64 id;

	if (!c || cgroup->root->hierarchy_id != UNIFIED || !is_below_top(cgroup))
		return 0;
	id = cgroup->kn->id;
	if (is_removed) {
		bpf_map_delete_elem(&undecided, &id);
	} else {
		tg_add(&c->cgroups, 1, 1);
		if (hold(id, ancestor_id(cgroup, cgroup->level - 1)))
			tg_add(&c->full, 1, 1);
	}
	if (bpf_ringbuf_output(&cgroup_events, &id, sizeof(id), 0))
		tg_add(&c->lost, 1, 1);
	return 0;
}

SEC("tp_btf/cgroup_mkdir")
int BPF_PROG(gate_made, struct cgroup *cgroup)
{
	return follow(cgroup, 0);
}

SEC("tp_btf/cgroup_rmdir")
int BPF_PROG(gate_removed, struct cgroup *cgroup)
{
	return follow(cgroup, 1);
}

/*
 * How a packet that does not fit is dropped. The slow drop hides the loss from a sender on this
 * host. To TCP it means congestion here: TCP would try again each half second, and after 15 times
 * end the connection. After a plain drop it waits longer each time, and hands the program no error.
 */
static __always_inline int drop_undecided(struct __sk_buff *skb, enum tg_direction direction)
{
	struct tg_headers headers;

	if (direction == TG_INGRESS)
		return RET_DROP;
	tg_parse(skb, &headers);
	return headers.protocol == IPPROTO_TCP ? RET_DROP : RET_DROP_SLOW;
}

static __always_inline int gate(struct __sk_buff *skb, enum tg_direction direction)
{
	const int drop = direction == TG_EGRESS ? RET_DROP_SLOW : RET_DROP;
	struct gt_cgroup *own;
	struct gt_counters *c;
	__u32 bytes;

	if (skb->mark == TG_DEAD_MARK)
		return drop;
	if (skb->ifindex == LOOPBACK_IFINDEX)
		return RET_PASS;
	own = find_undecided(0, bpf_skb_cgroup_id(skb));
	c = own ? counters_now() : 0;
	if (!c)
		return RET_PASS;
	bytes = tg_wire_bytes(skb, direction);
	switch (gt_judge(0, find_undecided, own, bpf_ktime_get_ns(), bytes)) {
	case GT_LATE:
		tg_add(&c->late_bytes, bytes, direction == TG_INGRESS);
		return RET_PASS;
	case GT_PASS:
		tg_add(&c->passed_bytes, bytes, direction == TG_INGRESS);
		return RET_PASS;
	default:
		break;
	}
	tg_add(&c->dropped_packets, 1, direction == TG_INGRESS);
	skb->mark = TG_DEAD_MARK;
	return drop_undecided(skb, direction);
}

SEC("cgroup_skb/egress")
int gate_out(struct __sk_buff *skb)
{
	return gate(skb, TG_EGRESS);
}

SEC("cgroup_skb/ingress")
int gate_in(struct __sk_buff *skb)
{
	return gate(skb, TG_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
