/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract of user space with the programs that look at queues, and with the schemes that have
 * a queue: a pure header.
 */
#ifndef TG_WAITING_INTF_H
#define TG_WAITING_INTF_H

#include <linux/types.h>

/* Where the packets of a limiter wait (backlog.h). */
struct tg_backlog {
	/* The kernel's struct Qdisc; 0: none. */
	__u64 qdisc;
	/* Its handle as long as it is the limiter's: major:minor as the kernel has it. */
	__u32 handle;
	/* The device that it sends by; on ingress an ifb. */
	__u32 ifindex;
	/* The highest rate at which it is emptied. */
	__u64 rate_bit_s;
	/* Its struct netdev_queue, which is the device's. */
	__u64 dev_queue;
};

/* Asks for the address of a qdisc. */
struct tg_qdisc_query {
	__u32 ifindex;
	__u32 handle;
	/* The answer; 0: there is none. */
	__u64 qdisc;
	__u64 dev_queue;
};

/* Packets, one that is yet to be segmented as one. */
struct wf_count {
	__u64 packets;
	/* On the wire, as the qdisc counts them. */
	__u64 bytes;
};

/* Asks what waits in a queue. */
struct wf_query {
	struct tg_backlog at;
	/* The answer: the qdisc exists and is of a known kind. */
	__u32 known;
	/* Lists whose end was not found. */
	__u32 torn;
	struct wf_count all;
	/* Packets of no known flow. */
	struct wf_count other;
};

#endif
