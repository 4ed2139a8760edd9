/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Scheme `htb`: the handles of classes, and when a packet that joins their queue is marked. A pure
 * header; its model is crates/core/src/htb.rs, and a test compares the two.
 */
#ifndef TG_HTB_H
#define TG_HTB_H

#include <linux/types.h>

#include "waiting/intf.h"

/* The HTB of a limit, at the root of a device; "tg". */
#define HTB_MAJOR 0x7467U
/* Limits of one tree; slot 0 is none, 1 the root. */
#define HTB_SLOTS     1024U
#define HTB_ROOT_SLOT 1U
/* Handles of the leaf qdiscs are this plus the slot. */
#define HTB_QUEUE_MAJOR 0x7500U
/* How many levels of cgroups are searched for a limit of a tree. */
#define HTB_CGROUP_LEVELS 16U

/* In the root's slot: its tree has limits on cgroups, on ports. */
#define HTB_HAS_CGROUPS (1U << 0)
#define HTB_HAS_PORTS	(1U << 1)
/* Distinguishes keys of ports from those of cgroups. */
#define HTB_PORT_KEY (1ULL << 63)

/* A slot, in one direction. */
struct htb_slot {
	/* 0: packets are not marked. */
	__u32 mark_bytes;
	__u32 flags;
	/* The backlog of its leaf. */
	struct tg_backlog backlog;
};

/* Marked packets of a slot; on each CPU. */
struct htb_marked {
	__u64 packets;
	__u64 bytes;
};

/*
 * The leaf of a slot, for packets that belong to no limit below it. Its last four bits are 0, so
 * that a packet which leaves by another device later has the priority "none" there.
 */
static inline __attribute__((always_inline)) __u32 htb_leaf(__u32 slot)
{
	return HTB_MAJOR << 16 | slot << 4;
}

/* Whether a packet is marked that joins a queue with `waiting_bytes`; 0 is no threshold. */
static inline __attribute__((always_inline)) int htb_marks(__u32 waiting_bytes, __u32 mark_bytes)
{
	return mark_bytes && waiting_bytes > mark_bytes;
}

#endif
