/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Scheme `htb`: how classes are called, and when a packet that joins their queue is marked. A pure
 * header; its model is crates/core/src/htb.rs, and a test holds the two together.
 */
#ifndef TG_HTB_H
#define TG_HTB_H

#include <linux/types.h>

/* The HTB of a limit, at the root of a device; "tg". */
#define HTB_MAJOR 0x7467U
/* Limits of one tree; slot 0 is none, 1 the root. */
#define HTB_SLOTS     1024U
#define HTB_ROOT_SLOT 1U
/* The qdiscs of the leaves are called after their slots, from here on. */
#define HTB_QUEUE_MAJOR 0x7500U
/* Cgroups above each other in which a limit of a tree is looked for. */
#define HTB_CGROUP_LEVELS 16U

/*
 * The leaf of a slot, in which the packets of no limit below it wait. Its last four bits are 0: a
 * packet that leaves by another device later has a priority there that is no other than none.
 */
static inline __attribute__((always_inline)) __u32 htb_leaf(__u32 slot)
{
	return HTB_MAJOR << 16 | slot << 4;
}

/* A packet joins a queue in which `waiting_bytes` are: is it marked? 0 is no threshold. */
static inline __attribute__((always_inline)) int htb_marks(__u32 waiting_bytes, __u32 mark_bytes)
{
	return mark_bytes && waiting_bytes > mark_bytes;
}

#endif
