// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Scheme `htb`: chooses the class of the kernel's HTB for a packet, and marks the packet if the
 * queue that it joins is longer than a threshold. User space builds the classes (sys::htb).
 *
 * Egress of a device passes `htb_out` before its qdisc. Ingress passes `htb_in`, whose filter sends
 * it through an ifb device that has a qdisc; from there the kernel handles it as if it had just
 * come. The packet's priority names the class.
 *
 * In a tree the cgroup of its sender, or the port by which it came, decides the class: `htb_stamp`
 * writes that on the packet, as no other field survives a bridge and routing.
 */
#include "common/vmlinux.h"
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "waiting/backlog.h"
#include "htb/htb.h"
#include "common/counters_map.h"
#include "common/intf.h"
#include "common/maps.h"
#include "common/packet.h"

/* The slots of a tree, of the first direction, then of the other. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_DIRECTIONS *HTB_SLOTS);
	__type(key, __u32);
	__type(value, struct htb_slot);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_DIRECTIONS *HTB_SLOTS);
	__type(key, __u32);
	__type(value, struct htb_marked);
} marked SEC(".maps");

/* Cgroup ids, and HTB_PORT_KEY | index of a port, to slots. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, HTB_SLOTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} members SEC(".maps");

/* The workload's direction of egress and of ingress of the device. */
const volatile __u32 direction_out = TG_EGRESS;
const volatile __u32 direction_in = TG_INGRESS;

/* The packet's limit: that of the nearest cgroup of its sender, or of the port it came by. */
static __always_inline __u32 slot_of(struct __sk_buff *skb, __u32 flags)
{
	__u32 slot = HTB_ROOT_SLOT;
	__u32 *found;
	__u64 key;

	if (flags & HTB_HAS_PORTS && skb->tc_index) {
		key = HTB_PORT_KEY | skb->tc_index;
		found = bpf_map_lookup_elem(&members, &key);
		if (found)
			return *found;
	}
	if (!(flags & HTB_HAS_CGROUPS))
		return slot;
	for (__u32 level = 1; level <= HTB_CGROUP_LEVELS; level++) {
		key = bpf_skb_ancestor_cgroup_id(skb, level);
		if (!key)
			break;
		found = bpf_map_lookup_elem(&members, &key);
		if (found)
			slot = *found;
	}
	return slot;
}

static __always_inline void join(struct __sk_buff *skb, __u32 direction)
{
	__u32 key = direction * HTB_SLOTS + HTB_ROOT_SLOT;
	struct htb_slot *root = bpf_map_lookup_elem(&slots, &key);
	struct htb_slot *slot = root;
	struct htb_marked *count;
	struct tg_waiting now;
	__u32 place = HTB_ROOT_SLOT;

	if (root && root->flags) {
		place = slot_of(skb, root->flags);
		key = direction * HTB_SLOTS + place;
		slot = bpf_map_lookup_elem(&slots, &key);
	}
	skb->priority = htb_leaf(place);
	if (!slot || !slot->mark_bytes || tg_backlog_read(&slot->backlog, &now))
		return;
	if (!htb_marks(now.bytes, slot->mark_bytes) || !bpf_skb_ecn_set_ce(skb))
		return;
	count = bpf_map_lookup_elem(&marked, &key);
	if (count) {
		count->packets++;
		count->bytes += tg_frame_bytes(skb, skb->len);
	}
}

SEC("tcx/egress")
int htb_out(struct __sk_buff *skb)
{
	join(skb, direction_out);
	/* The next program decides. */
	return TC_ACT_UNSPEC;
}

SEC("tcx/ingress")
int htb_in(struct __sk_buff *skb)
{
	join(skb, direction_in);
	/* The filter's action sends it to the ifb device. */
	return TC_ACT_UNSPEC;
}

/* At a port that is inside a device's limit. */
SEC("tcx/ingress")
int htb_stamp(struct __sk_buff *skb)
{
	skb->tc_index = skb->ifindex;
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
