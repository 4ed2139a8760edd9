/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The virtual queue: a pure header over (state, now, length). Its model, with the reasons, is
 * crates/core/src/virtual_queue.rs; a property test compares the two.
 *
 * The state is one u64, the time at which a link of the limit's rate would have sent all that
 * passed. One compare-and-swap advances it when the queue was idle, one atomic add when it was
 * busy, so there is no critical section. The fraction of a nanosecond that a cost leaves over is
 * carried per CPU.
 */
#ifndef TG_VQUEUE_H
#define TG_VQUEUE_H

#include <linux/types.h>

#define VQ_COST_SHIFT	    24
#define VQ_MAX_PACKET_BYTES ((1 << 20) - 1)
#define VQ_SMALL_BYTES	    120

struct vq_conf {
	/* Cost of a byte in 2^-24 ns. */
	__u64 cost;
	__u64 burst_ns;
	__u64 mark_ns;
	__u64 large_drop_ns;
	__u64 drop_ns;
};

/* The zone of a backlog. */
enum vq_zone {
	VQ_FREE,
	VQ_TELL,
	VQ_RESERVE,
	VQ_FULL,
};

enum vq_verdict {
	VQ_PASS,
	VQ_MARK,
	VQ_SLOW,
	VQ_DROP_FULL,
	VQ_DROP_RESERVE,
	VQ_DROP_EARLY,
};

/* The properties of a packet that matter above the mark. */
struct vq_packet {
	__u32 wire_bytes;
	__u8 ecn_capable;
	__u8 tcp;
	/* TCP with other packets in flight; for a remote sender always 1. */
	__u8 in_flight;
	/* The sender is a socket of this host. */
	__u8 local;
};

static inline __attribute__((always_inline)) enum vq_zone vq_zone(const struct vq_conf *conf,
								  __s64 backlog_ns)
{
	if (backlog_ns <= (__s64)conf->mark_ns)
		return VQ_FREE;
	if (backlog_ns <= (__s64)conf->large_drop_ns)
		return VQ_TELL;
	if (backlog_ns <= (__s64)conf->drop_ns)
		return VQ_RESERVE;
	return VQ_FULL;
}

/* True with probability (backlog - mark) / (large_drop - mark); only above the mark. */
static inline __attribute__((always_inline)) int vq_linear_law(const struct vq_conf *conf,
							       __s64 backlog_ns, __u32 random)
{
	__u64 range = conf->large_drop_ns - conf->mark_ns;
	__u64 over = (__u64)backlog_ns - conf->mark_ns;

	return ((__u64)(random >> 8) * range) >> 24 < over;
}

static inline __attribute__((always_inline)) enum vq_verdict
vq_decide(const struct vq_conf *conf, enum vq_zone zone, __s64 backlog_ns,
	  const struct vq_packet *packet, __u32 random)
{
	int large = packet->wire_bytes > VQ_SMALL_BYTES;

	if (zone == VQ_FREE)
		return VQ_PASS;
	if (zone == VQ_FULL)
		return VQ_DROP_FULL;
	if (zone == VQ_RESERVE && large && !(packet->tcp && !packet->in_flight))
		return VQ_DROP_RESERVE;
	if (packet->ecn_capable)
		return VQ_MARK;
	if (!vq_linear_law(conf, backlog_ns, random))
		return VQ_PASS;
	/* A remote TCP sender would halve its window after an early drop, which is too much. */
	if (packet->tcp)
		return packet->local ? VQ_SLOW : VQ_PASS;
	return large ? VQ_DROP_EARLY : VQ_PASS;
}

/* Upper bounds of a time and of a cost of a byte. */
#define VQ_MAX_SCALED_NS (1ULL << 44)
#define VQ_MAX_COST	 (1ULL << 46)

/* How long this many bytes take, in nanoseconds, rounded down. No cost up to 2^56 overflows. */
static inline __attribute__((always_inline)) __u64 vq_time_ns(__u32 bytes, __u64 cost)
{
	return bytes * (cost >> VQ_COST_SHIFT) +
	       (bytes * (cost & ((1 << VQ_COST_SHIFT) - 1)) >> VQ_COST_SHIFT);
}

/* The cost of a packet in nanoseconds; the remainder goes to *carry. */
static inline __attribute__((always_inline)) __u64 vq_cost_ns(const struct vq_conf *conf,
							      __u32 wire_bytes, __u32 *carry)
{
	__u64 bytes = wire_bytes < VQ_MAX_PACKET_BYTES ? wire_bytes : VQ_MAX_PACKET_BYTES;
	__u64 cost = bytes * conf->cost + *carry;

	*carry = cost & ((1 << VQ_COST_SHIFT) - 1);
	return cost >> VQ_COST_SHIFT;
}

/* The time of the same bytes when one costs `to` and no longer `from`; to 2^-16 of the ratio. */
static inline __attribute__((always_inline)) __u64 vq_scaled_ns(__u64 ns, __u64 from, __u64 to)
{
	__u64 ratio;

	ns = ns < VQ_MAX_SCALED_NS ? ns : VQ_MAX_SCALED_NS;
	from = from < VQ_MAX_COST ? from : VQ_MAX_COST;
	to = to < VQ_MAX_COST ? to : VQ_MAX_COST;
	if (!from || !to)
		return ns;
	if (to <= from)
		return ns * ((to << 16) / from) >> 16;
	ratio = (from << 16) / to;
	return (ns << 16) / (ratio ? ratio : 1);
}

/*
 * A backlog at another rate: the same bytes. At a slower rate it grows, but not beyond the drop
 * threshold. That bounds how long old traffic can delay new packets.
 */
static inline __attribute__((always_inline)) __u64 vq_rescaled_ns(__u64 backlog_ns, __u64 from,
								  __u64 to, __u64 drop_ns)
{
	__u64 scaled = vq_scaled_ns(backlog_ns, from, to);

	if (scaled <= backlog_ns)
		return scaled;
	scaled = scaled < drop_ns ? scaled : drop_ns;
	return scaled > backlog_ns ? scaled : backlog_ns;
}

/*
 * Charges a packet; returns the finish time before the charge. If an idle queue is moved on to the
 * present, *skipped_ns, if given, grows by its idle time. The charge over a while is then how far
 * the finish time moved, less the skipped time, and a busy queue pays one atomic instruction.
 */
static inline __attribute__((always_inline)) __u64 vq_charge(const struct vq_conf *conf,
							     __u64 *finish_ns, __u64 *skipped_ns,
							     __u64 seen_ns, __u64 now_ns,
							     __u64 cost_ns)
{
	__u64 idle_since = now_ns > conf->burst_ns ? now_ns - conf->burst_ns : 0;

	if (seen_ns < idle_since) {
		if (skipped_ns)
			__sync_fetch_and_add(skipped_ns, idle_since - seen_ns);
		if (__sync_val_compare_and_swap(finish_ns, seen_ns, idle_since + cost_ns) ==
		    seen_ns)
			return idle_since;
		/* A packet on another CPU filled the queue first: add to it. */
		if (skipped_ns)
			__sync_fetch_and_sub(skipped_ns, idle_since - seen_ns);
	}
	return __sync_fetch_and_add(finish_ns, cost_ns);
}

#endif
