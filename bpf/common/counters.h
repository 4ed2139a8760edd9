/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Adds to counters of this CPU.
 *
 * At tc, in XDP and on cgroup ingress, a program runs with softirqs off: it is alone on its CPU. On
 * cgroup egress it is not. A softirq that sends for the same cgroup (after an ACK), or another
 * process, may run between the load and the store of an addition. Its counts would be lost: a
 * counter could go backwards, and a difference of two readings be 2^64. So there an addition is one
 * instruction, for some 5 ns.
 *
 * Other per-CPU state needs no care. A lost remainder of a cost is less than a nanosecond of the
 * rate, and any remainder is valid. The time of the last event of a kind may be that of the one
 * before. A packet may be counted with another flow in a sample of flows (group.h), or not at all.
 */
#ifndef TG_COUNTERS_H
#define TG_COUNTERS_H

#include <bpf/bpf_helpers.h>

/* `is_alone`: softirqs are off; a compile-time constant. */
static __always_inline void tg_add(__u64 *counter, __u64 more, int is_alone)
{
	if (is_alone)
		*counter += more;
	else
		__sync_fetch_and_add(counter, more);
}

#endif
