/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The backlog of a limiter whose packets wait in a qdisc, in real time, for any program that wants
 * to act on it.
 *
 * Nothing is counted here: the kernel keeps the bytes and packets of each qdisc itself, under the
 * qdisc's lock, whatever way they go (sent, dropped on entry, dropped from the middle, purged). A
 * count of our own by tracepoints would cost every packet of the host and would drift with every
 * drop that has no tracepoint. So a program is told where the qdisc is, and reads what `tc -s`
 * shows, at the moment it looks.
 *
 * The address is found by backlog.bpf.c when the limit is put on (sys::backlog). Somebody else may
 * delete the qdisc later, and the address is then free memory, or another qdisc, of another limit
 * perhaps: all limits call theirs alike. So four things must be as they were:
 *
 *   refcnt     not 0: a qdisc that is deleted has none, and keeps the 0 when its memory is free
 *   handle     it is a limit's leaf
 *   dev_queue  of the same device, as long as there is that device
 *   ifindex    of another device, at the same address, that came after: it has another index
 *
 * While these programs stand on the device that has the qdisc, the third proves it. What comes in
 * waits at an ifb, which may go before they do; then it takes a device of another network
 * namespace, with the same index, its queues where the ifb's were and its leaf where the leaf was,
 * to be taken for it. A read of such an address never faults: it gives zero where nothing is.
 *
 *	struct tg_backlog *at = bpf_map_lookup_elem(&backlogs, &direction);
 *	struct tg_waiting now;
 *
 *	if (at && !tg_backlog_read(at, &now) && now.bytes > threshold)
 *		...
 */
#ifndef TG_BACKLOG_H
#define TG_BACKLOG_H

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

/* Where the packets of a limiter wait. */
struct tg_backlog {
	/* The kernel's struct Qdisc; 0: there is none. */
	__u64 qdisc;
	/* What it is called as long as it is the limiter's: major:minor as the kernel has it. */
	__u32 handle;
	/* The device that it sends by: of what comes in that is an ifb. */
	__u32 ifindex;
	/* What it is emptied at, at most. */
	__u64 rate_bit_s;
	/* Its struct netdev_queue, which is the device's. */
	__u64 dev_queue;
};

/* What waits at one moment. */
struct tg_waiting {
	/* On the wire, with the headers of every segment. */
	__u32 bytes;
	/* As the stack sees them: one that is yet to be segmented counts once. */
	__u32 packets;
};

/* Whether the qdisc is still the limiter's. */
static __always_inline int tg_backlog_is_there(const struct tg_backlog *at)
{
	const struct Qdisc *qdisc = (const struct Qdisc *)at->qdisc;

	return qdisc && BPF_CORE_READ(qdisc, handle) == at->handle &&
	       BPF_CORE_READ(qdisc, refcnt.refs.counter) &&
	       (__u64)BPF_CORE_READ(qdisc, dev_queue) == at->dev_queue &&
	       BPF_CORE_READ(qdisc, dev_queue, dev, ifindex) == at->ifindex;
}

/* Reads what waits; other than 0, and nothing waits, if the qdisc is not there. */
static __always_inline int tg_backlog_read(const struct tg_backlog *at, struct tg_waiting *now)
{
	const struct Qdisc *qdisc = (const struct Qdisc *)at->qdisc;

	now->bytes = 0;
	now->packets = 0;
	if (!tg_backlog_is_there(at))
		return -1;
	now->bytes = BPF_CORE_READ(qdisc, qstats.backlog);
	now->packets = BPF_CORE_READ(qdisc, q.qlen);
	return 0;
}

/*
 * The bytes alone; on the way of every packet. From Linux 6.2 an address can be made one that may
 * be read, and that reads as zero where nothing is.
 */
static __always_inline __u32 tg_backlog_bytes(const struct tg_backlog *at)
{
	const struct Qdisc *qdisc = (const struct Qdisc *)at->qdisc;
	const struct netdev_queue *queue;

	if (!qdisc)
		return 0;
	if (bpf_rdonly_cast) {
		qdisc = bpf_core_cast(qdisc, struct Qdisc);
		queue = qdisc->dev_queue;
		if (qdisc->handle != at->handle || !qdisc->refcnt.refs.counter ||
		    (__u64)queue != at->dev_queue || queue->dev->ifindex != at->ifindex)
			return 0;
		return qdisc->qstats.backlog;
	}
	return tg_backlog_is_there(at) ? BPF_CORE_READ(qdisc, qstats.backlog) : 0;
}

#endif
