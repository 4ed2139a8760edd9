/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Adding to counters of this CPU.
 *
 * At tc, in XDP and where a cgroup receives, a program runs with softirqs off: it is alone on its
 * CPU. Where a cgroup sends it is not. A softirq that sends for the same cgroup (an ACK has come),
 * or another process, may come between the load and the store of an addition, and all that it
 * counted would be lost: a counter could go backwards, and a difference of two readings be 2^64. So
 * there an addition is one instruction, for some 5 ns.
 *
 * What else is per CPU needs no care. The remainder of a cost that is lost is less than a
 * nanosecond of the rate, and any remainder is valid. The time of the last event of a kind may be
 * that of the last but one. In a sample of flows (group.h) a packet may be counted with another
 * flow, or not.
 */
#ifndef TG_COUNTERS_H
#define TG_COUNTERS_H

#include <bpf/bpf_helpers.h>

/* `is_alone`: with softirqs off; known when it is compiled. */
static __always_inline void tg_add(__u64 *counter, __u64 more, int is_alone)
{
	if (is_alone)
		*counter += more;
	else
		__sync_fetch_and_add(counter, more);
}

#endif
