/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The backlog of a limiter whose packets wait in a qdisc, read in real time by any program.
 *
 * Nothing is counted here. The kernel keeps the bytes and packets of each qdisc itself, under the
 * qdisc's lock, however they leave (sent, dropped on entry, dropped from the middle, purged).
 * Counting by tracepoints would cost every packet of the host, and would drift with every drop that
 * has no tracepoint. So a program gets the qdisc's address, and reads what `tc -s` shows at that
 * moment.
 *
 * backlog.bpf.c finds the address when the limit is installed (sys::backlog). Somebody may delete
 * the qdisc later. The address is then free memory, or another qdisc, perhaps of another limit: all
 * limits use the same handles. So four things must be unchanged:
 *
 *   refcnt     not 0: a qdisc that is deleted has none, and keeps the 0 when its memory is free
 *   handle     it is a limit's leaf
 *   dev_queue  of the same device, as long as there is that device
 *   ifindex    of another device, at the same address, that came after: it has another index
 *
 * While these programs are attached to the device that has the qdisc, the third proves it. On
 * ingress packets wait at an ifb, which may go before the programs do. It would be confused only
 * with a device of another network namespace that has the same index, and whose queues and leaf are
 * at the same addresses. A read of such an address never faults: it gives zero if nothing is there.
 *
 *	struct tg_backlog *at = bpf_map_lookup_elem(&backlogs, &direction);
 *	struct tg_waiting now;
 *
 *	if (at && !tg_backlog_read(at, &now) && now.bytes > threshold)
 *		...
 */
#ifndef TG_BACKLOG_H
#define TG_BACKLOG_H

#include "common/vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "waiting/intf.h"

/* The backlog at one moment. */
struct tg_waiting {
	/* On the wire, with the headers of every segment. */
	__u32 bytes;
	/* As the stack sees them: a packet that will be segmented counts once. */
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

/* Reads the backlog. Returns non-zero, and a backlog of 0, if the qdisc is gone. */
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
 * The bytes alone; called for every packet. From Linux 6.2 on an address can be cast to a readable
 * pointer, which reads as zero if nothing is there.
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
