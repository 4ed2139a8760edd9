/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Departure times: a pure header over (state, now, length). Its model, with the reasons, is
 * crates/core/src/edt.rs; a property test compares the two.
 *
 * Every flow has its own schedule, at its share of the limit. The class has a finish time at the
 * whole limit. A packet leaves when its flow's schedule says so, and not before the class has paid
 * for all but a horizon of what passed.
 */
#ifndef TG_EDT_H
#define TG_EDT_H

#include "common/fair_share.h"
#include "common/vqueue.h"

/*
 * A flow saves up at least one full frame, so that the first packet of a new flow leaves at once.
 */
#define EDT_FRAME_BYTES 1514
/*
 * The most that TCP small queues let a socket queue below it: two segments of 64 KB, with headers.
 */
#define EDT_HELD_BYTES (2 * 70 * 1024)
/* By default fq holds 100 packets of a flow, and drops more. */
#define EDT_FLOW_PACKETS 90
/* The weight of a new packet in the mean is 2^-3. */
#define EDT_MEAN_SHIFT 3
/* No departure is later than this: fq drops beyond 10 s. */
#define EDT_MAX_DELAY_NS 4000000000ULL
/* The class may be ahead by what its flows have scheduled, but at most by this. */
#define EDT_MAX_LEAD_NS 200000000ULL
/* Upper bound of what a packet costs its flow; keeps the products below in 64 bits. */
#define EDT_MAX_COST_NS (1ULL << 38)
/* Slots for flows. Flows in the same slot share it. */
#define EDT_FLOWS 4096

/* The schedule of one flow. */
struct edt_flow {
	/* When it would have sent all that passed, at its share. */
	__u64 finish_ns;
	/* The departure of its last packet. */
	__u64 last_ns;
	/* Mean cost of its packets. */
	__u64 mean_ns;
	/* The last epoch in which it was counted, and in which it got room. */
	__u32 epoch;
	__u32 room_epoch;
};

/* The state that all flows of a limit share, as a packet reads it. */
struct edt_class {
	/* When the limit would have sent all that passed. */
	__u64 finish_ns;
	/* The latest departure that a flow's own schedule has given. */
	__u64 latest_ns;
	/* Share of each flow, of the limit in 2^-24. */
	__u64 share;
};

/* Inputs and results for one packet. */
struct edt_look {
	/* Its cost to its flow. */
	__u64 cost_ns;
	/* The finish time of its flow before the packet. */
	__u64 seen_ns;
	/* The credit that an idle flow may have saved up. */
	__u64 burst_ns;
	/* Earliest departure, whatever its flow says. */
	__u64 turn_ns;
	/* How long it would wait for those before it; 0: not at all. */
	__u64 wait_ns;
	/* The flow has not yet sent what passed before. */
	__u32 busy;
	/* Beyond the horizon. */
	__u32 full;
};

/* The cost of a packet to its flow, at the flow's share. */
static inline __attribute__((always_inline)) __u64 edt_cost_ns(const struct vq_conf *conf,
							       __u64 share, __u64 bytes)
{
	bytes = fs_min(bytes, VQ_MAX_PACKET_BYTES);
	return fs_min(bytes * conf->cost / fs_max(fs_min(share, FS_ONE), 1), EDT_MAX_COST_NS);
}

/* How far the schedules of the flows reach. */
static inline __attribute__((always_inline)) __u64 edt_lead_ns(__u64 latest_ns, __u64 now_ns)
{
	return latest_ns > now_ns ? fs_min(latest_ns - now_ns, EDT_MAX_LEAD_NS) : 0;
}

/*
 * Judges by flow and class; charges nothing. `held`: the packet is TCP of a socket of this host,
 * which sends no more before this packet has left.
 */
static inline __attribute__((always_inline)) void
edt_look(const struct vq_conf *conf, const struct edt_class *class, const struct edt_flow *flow,
	 __u64 now_ns, __u32 wire_bytes, int held, struct edt_look *look)
{
	__u64 finish = *(const volatile __u64 *)&flow->finish_ns;
	__u64 ahead = conf->drop_ns + edt_lead_ns(class->latest_ns, now_ns);
	__u64 own = finish > now_ns ? finish - now_ns : 0;
	__u64 room = conf->drop_ns;
	__u64 turn;

	look->cost_ns = edt_cost_ns(conf, class->share, wire_bytes);
	look->burst_ns = fs_max(conf->burst_ns, edt_cost_ns(conf, class->share, EDT_FRAME_BYTES));
	look->seen_ns = finish;
	look->turn_ns = class->finish_ns > ahead ? class->finish_ns - ahead : 0;
	turn = look->turn_ns > now_ns ? look->turn_ns - now_ns : 0;
	if (held)
		room = fs_max(room, edt_cost_ns(conf, class->share, EDT_HELD_BYTES));
	else if (flow->mean_ns)
		room = fs_min(room, fs_min(flow->mean_ns, EDT_MAX_COST_NS) * EDT_FLOW_PACKETS);
	look->wait_ns = fs_max(own, turn);
	look->busy = own > 0;
	/*
	 * A held sender waits for the class too. Otherwise it would only try again, and others
	 * would be first.
	 */
	look->full = own > room || turn > (held ? room : conf->drop_ns);
}

static inline __attribute__((always_inline)) enum vq_verdict
edt_verdict(const struct vq_conf *conf, const struct edt_look *look, int ecn_capable)
{
	if (look->full)
		return VQ_DROP_FULL;
	return look->wait_ns > conf->mark_ns && ecn_capable ? VQ_MARK : VQ_PASS;
}

/*
 * Enters a packet in its flow's schedule. Returns when it leaves, which may be in the past.
 * *latest_ns belongs to the class.
 */
static inline __attribute__((always_inline)) __u64
edt_commit(const struct edt_look *look, struct edt_flow *flow, __u64 *latest_ns, __u64 now_ns)
{
	struct vq_conf schedule = {.burst_ns = look->burst_ns};
	__u64 mean = fs_min(flow->mean_ns, EDT_MAX_COST_NS);
	__u64 departure = look->cost_ns + vq_charge(&schedule, &flow->finish_ns, 0, look->seen_ns,
						    now_ns, look->cost_ns);

	flow->mean_ns = mean ? mean - (mean >> EDT_MEAN_SHIFT) + (look->cost_ns >> EDT_MEAN_SHIFT)
			     : look->cost_ns;
	if (departure > *latest_ns)
		*latest_ns = departure;
	/* The class may have held an earlier packet back: a flow stays in order. */
	departure = fs_max(fs_max(departure, look->turn_ns), flow->last_ns);
	departure = fs_min(departure, now_ns + EDT_MAX_DELAY_NS);
	if (departure > now_ns)
		flow->last_ns = departure;
	return departure;
}

#endif
