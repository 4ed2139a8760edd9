// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Finds the qdisc with a handle on a device of the caller's network namespace, for backlog.h. User
 * space runs it once when the qdisc has been made; it handles no packets.
 *
 * Devices are found by their index as the kernel does it, and each has a small hash table of its
 * qdiscs. If somebody adds or removes others meanwhile the search can only fail, and user space
 * runs it again. It holds no lock.
 */
#include "common/vmlinux.h"
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "waiting/intf.h"

/* NETDEV_HASHENTRIES of include/net/net_namespace.h. */
#define DEVICE_BUCKETS 256
/* More than the devices or qdiscs in one bucket on any host. */
#define CHAIN_MAX 65536

struct search {
	struct hlist_node *at;
	__u64 found;
	__u32 wanted;
};

static long next_device(__u32 i, struct search *search)
{
	const struct hlist_node *at = search->at;
	const struct net_device *device;

	if (!at)
		return 1;
	device = (void *)at - bpf_core_field_offset(struct net_device, index_hlist);
	if (BPF_CORE_READ(device, ifindex) == search->wanted) {
		search->found = (__u64)device;
		return 1;
	}
	search->at = BPF_CORE_READ(at, next);
	return 0;
}

static long next_qdisc(__u32 i, struct search *search)
{
	const struct hlist_node *at = search->at;
	const struct Qdisc *qdisc;

	if (!at)
		return 1;
	qdisc = (void *)at - bpf_core_field_offset(struct Qdisc, hash);
	if (BPF_CORE_READ(qdisc, handle) == search->wanted) {
		search->found = (__u64)qdisc;
		return 1;
	}
	search->at = BPF_CORE_READ(at, next);
	return 0;
}

SEC("syscall")
int find_qdisc(struct tg_qdisc_query *query)
{
	const struct task_struct *task = (void *)bpf_get_current_task();
	struct search search = {.wanted = query->ifindex};
	const struct hlist_head *table, *bucket;
	const struct net_device *device;
	const struct Qdisc *found;
	__u32 buckets;

	query->qdisc = 0;
	table = BPF_CORE_READ(task, nsproxy, net_ns, dev_index_head);
	bucket = &table[query->ifindex & (DEVICE_BUCKETS - 1)];
	search.at = BPF_CORE_READ(bucket, first);
	bpf_loop(CHAIN_MAX, next_device, &search, 0);
	device = (void *)search.found;
	if (!device)
		return 0;
	search.found = 0;
	search.wanted = query->handle;
	bucket = (void *)device + bpf_core_field_offset(struct net_device, qdisc_hash);
	buckets = bpf_core_field_size(struct net_device, qdisc_hash) / sizeof(*bucket);
	for (__u32 i = 0; i < 16 && i < buckets && !search.found; i++) {
		search.at = BPF_CORE_READ(&bucket[i], first);
		bpf_loop(CHAIN_MAX, next_qdisc, &search, 0);
	}
	found = (void *)search.found;
	/* Zero if there is none. */
	query->dev_queue = (__u64)BPF_CORE_READ(found, dev_queue);
	query->qdisc = search.found;
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
