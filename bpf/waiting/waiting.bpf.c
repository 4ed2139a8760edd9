// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The flows whose packets wait in the queue of a limiter. User space runs it on demand; it handles
 * no packets, so it costs none anything.
 *
 * It walks the kernel's own lists of packets: a FIFO, or the queues of fq_codel. Nothing is counted
 * beside them, so nothing can drift. It holds no lock: if a packet leaves the queue meanwhile, the
 * walk leaves its list. So the end of a list is read before its begin. A walk that does not reach
 * the end reports that it is torn, and is made again.
 */
#include "common/vmlinux.h"
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "waiting/backlog.h"
#include "waiting/waiting.h"

/* The most flows that one walk reports, and packets that it visits in a list. */
#define WF_FLOWS   1024
#define WF_PACKETS 65536
/* The kernel's own bound of the queues of an fq_codel. */
#define WF_QUEUES 65536

struct walk {
	const struct sk_buff *at;
	const struct sk_buff *last;
	__u64 flows;
	__u64 backlogs;
	__u32 found_last;
	__u32 torn;
	struct wf_count all;
	struct wf_count other;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, WF_FLOWS);
	__type(key, struct wf_flow);
	__type(value, struct wf_count);
} waiting SEC(".maps");

static __always_inline void add(struct wf_count *count, __u32 bytes)
{
	count->packets++;
	count->bytes += bytes;
}

/* The bytes of the packet's network header; 0 if it has no known one. */
static __always_inline __u32 read_header(const struct sk_buff *skb, __u8 *bytes)
{
	__u32 linear = BPF_CORE_READ(skb, len) - BPF_CORE_READ(skb, data_len);
	__u64 data = (__u64)BPF_CORE_READ(skb, data);
	__u64 at = (__u64)BPF_CORE_READ(skb, head) + BPF_CORE_READ(skb, network_header);
	__u64 end = data + linear;

	if (at < data || at >= end || bpf_probe_read_kernel(bytes, WF_BYTES, (void *)at))
		return 0;
	return end - at;
}

static __noinline void look_at(const struct sk_buff *skb, struct walk *walk)
{
	const void *cb = (const void *)skb + bpf_core_field_offset(struct sk_buff, cb);
	struct wf_count *known, fresh = {.packets = 1};
	__u8 bytes[WF_BYTES] = {};
	struct wf_flow flow;
	__u32 wire = 0;

	bpf_probe_read_kernel(&wire, sizeof(wire),
			      cb + bpf_core_field_offset(struct qdisc_skb_cb, pkt_len));
	add(&walk->all, wire);
	if (wf_read(bytes, read_header(skb, bytes), &flow)) {
		add(&walk->other, wire);
		return;
	}
	known = bpf_map_lookup_elem(&waiting, &flow);
	fresh.bytes = wire;
	if (known)
		add(known, wire);
	else if (bpf_map_update_elem(&waiting, &flow, &fresh, BPF_ANY))
		add(&walk->other, wire);
}

static long next_packet(__u32 i, struct walk *walk)
{
	const struct sk_buff *skb = walk->at;

	if (!skb)
		return 1;
	look_at(skb, walk);
	if (skb == walk->last) {
		walk->found_last = 1;
		return 1;
	}
	walk->at = BPF_CORE_READ(skb, next);
	return 0;
}

static __always_inline void walk_list(struct walk *walk, const struct sk_buff *first,
				      const struct sk_buff *last)
{
	if (!first || !last)
		return;
	walk->at = first;
	walk->last = last;
	walk->found_last = 0;
	bpf_loop(WF_PACKETS, next_packet, walk, 0);
	if (!walk->found_last)
		walk->torn++;
}

static long next_queue(__u32 i, struct walk *walk)
{
	const struct fq_codel_flow *queue;
	const struct sk_buff *last;
	__u32 backlog = 0;

	bpf_probe_read_kernel(&backlog, sizeof(backlog),
			      (void *)(walk->backlogs + i * sizeof(backlog)));
	if (!backlog)
		return 0;
	queue = (void *)(walk->flows + i * bpf_core_type_size(struct fq_codel_flow));
	last = BPF_CORE_READ(queue, tail);
	walk_list(walk, BPF_CORE_READ(queue, head), last);
	return 0;
}

/* The queues of an fq_codel; 0 if the layout of this kernel is not known. */
static __always_inline int walk_queues(struct walk *walk, const struct Qdisc *qdisc)
{
	const struct fq_codel_sched_data *data;
	__u32 count;

	if (!bpf_core_type_exists(struct fq_codel_sched_data))
		return 0;
	data = (void *)qdisc + bpf_core_field_offset(struct Qdisc, privdata);
	walk->flows = (__u64)BPF_CORE_READ(data, flows);
	walk->backlogs = (__u64)BPF_CORE_READ(data, backlogs);
	count = BPF_CORE_READ(data, flows_cnt);
	bpf_loop(count < WF_QUEUES ? count : WF_QUEUES, next_queue, walk, 0);
	return 1;
}

SEC("syscall")
int look(struct wf_query *query)
{
	const struct Qdisc *qdisc = (void *)query->at.qdisc;
	const struct Qdisc_ops *ops;
	const struct sk_buff *last;
	struct walk walk = {};
	char id[16] = {};
	__u32 known = 0;

	if (tg_backlog_is_there(&query->at)) {
		ops = BPF_CORE_READ(qdisc, ops);
		BPF_CORE_READ_INTO(&id, ops, id);
		if (!bpf_strncmp(id, sizeof("bfifo"), "bfifo")) {
			last = BPF_CORE_READ(qdisc, q.tail);
			walk_list(&walk, BPF_CORE_READ(qdisc, q.head), last);
			known = 1;
		} else if (!bpf_strncmp(id, sizeof("fq_codel"), "fq_codel")) {
			known = walk_queues(&walk, qdisc);
		}
	}
	query->known = known;
	query->torn = walk.torn;
	query->all = walk.all;
	query->other = walk.other;
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
