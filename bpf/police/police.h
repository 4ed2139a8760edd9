/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The token bucket of a policer: a pure header over (state, now, length). Its model, with the
 * reasons, is crates/core/src/token_bucket.rs; a property test compares the two, bit by bit.
 *
 * The state is one u64: the time at which the bucket will be full again. The deficit until then is
 * rate x (time - now). A packet passes if that and its own length fit the depth, and advances the
 * time by its cost. That is one compare-and-swap when the bucket was full, one atomic add when it
 * was not, and no write for a packet that is dropped. As in the model, a byte has 8e9 units and a
 * bit/s adds one each nanosecond. What a cost leaves over of a nanosecond is carried per CPU in
 * units, so nothing is ever rounded.
 */
#ifndef TG_POLICE_H
#define TG_POLICE_H

#include <linux/types.h>

#define PL_UNITS_PER_BYTE   8000000000ULL
#define PL_COST_SHIFT	    24
#define PL_MAX_PACKET_BYTES ((1 << 20) - 1)
/* More units than any bucket has. */
#define PL_ALL (~0ULL)

struct pl_bucket {
	/* Cost of a byte in 2^-24 ns, rounded; 0 is no limit. */
	__u64 cost;
	/* Units that a nanosecond adds: bit/s. */
	__u64 rate;
	/* Depth in units. */
	__u64 burst;
	/* How long an empty bucket takes to fill. */
	__u64 fill_ns;
	/* Bytes that the bucket had been given in total when the policy came into force. */
	__u64 earned_bytes;
};

enum pl_debt {
	PL_OWE_NOTHING,
	/*
	 * It will be cut into segments. If longer than half the bucket, it passes a bucket that is
	 * half full.
	 */
	PL_OWE_HALF,
	/* It is within its flow's part: it passes a bucket that has no debt yet. */
	PL_OWE_ALL,
};

/* A packet, as a bucket sees it. */
struct pl_packet {
	/* At most PL_MAX_PACKET_BYTES. */
	__u32 wire_bytes;
	/* How many of its units the bucket may lack; they become its debt. */
	__u32 may_owe;
};

/* Where the time of a bucket is, and the turn of its meter (meter.h) in which it is there. */
struct pl_at {
	__u64 *full_ns;
	const __u64 *turn_now;
	__u64 turn;
};

/* How many times a packet is given back while other CPUs charge theirs; then its charge stays. */
#define PL_GIVE_BACK_TRIES 8

#define PL_SECOND_NS 1000000000ULL

/* Bytes that a rate adds in a time, rounded down by less than this. */
#define PL_EARNED_ERROR_BYTES 3
static inline __attribute__((always_inline)) __u64 pl_earned_bytes(__u64 rate, __u64 ns)
{
	__u64 seconds = ns / PL_SECOND_NS, rest_ns = ns % PL_SECOND_NS;

	return seconds * (rate >> 3) + (seconds * (rate & 7) >> 3) +
	       rest_ns * (rate >> 3) / PL_SECOND_NS;
}

static inline __attribute__((always_inline)) __u64 pl_units(__u32 wire_bytes)
{
	return wire_bytes * PL_UNITS_PER_BYTE;
}

/* The deficit: what is missing until the bucket is full. */
static inline __attribute__((always_inline)) __u64
pl_deficit(const struct pl_bucket *bucket, __u64 full_ns, __u64 now_ns, __u64 carry)
{
	if (full_ns < now_ns)
		return 0;
	/* An empty bucket and more; beyond, the product might not fit. */
	if (full_ns - now_ns > bucket->fill_ns)
		return PL_ALL;
	return (full_ns - now_ns) * bucket->rate + carry;
}

/* Whether there are tokens for the packet. */
static inline __attribute__((always_inline)) int
pl_fits(const struct pl_bucket *bucket, __u64 deficit, const struct pl_packet *packet)
{
	__u64 units = pl_units(packet->wire_bytes);

	if (packet->may_owe == PL_OWE_ALL)
		units = 0;
	if (packet->may_owe && units > bucket->burst / 2)
		units = bucket->burst / 2;
	return units <= bucket->burst && deficit <= bucket->burst - units;
}

/*
 * The cost of the packet in nanoseconds; the rest, below one, goes to *carry. The rounded cost is
 * off by less than a nanosecond for the longest packet, and the remainder, which is exact, gives
 * the sign: this is a division by two multiplications.
 */
static inline __attribute__((always_inline)) __u64 pl_cost_ns(const struct pl_bucket *bucket,
							      __u32 wire_bytes, __u64 *carry)
{
	__u64 ns = wire_bytes * bucket->cost >> PL_COST_SHIFT;
	__s64 rest;

	/* From another rate, before the limit was changed. */
	if (*carry >= bucket->rate)
		*carry = 0;
	rest = pl_units(wire_bytes) + *carry - ns * bucket->rate;
	if (rest < 0) {
		ns--;
		rest += bucket->rate;
	}
	if (rest >= (__s64)bucket->rate) {
		ns++;
		rest -= bucket->rate;
	}
	if (rest >= (__s64)bucket->rate) {
		ns++;
		rest -= bucket->rate;
	}
	*carry = rest;
	return ns;
}

/*
 * Gives back a charge after which the time was `held_ns`. After a conversion the charge is lost or
 * already part of the debt, and the time may belong to another rate: then nothing is given back.
 */
static inline __attribute__((always_inline)) void pl_give_back(const struct pl_at *at,
							       __u64 held_ns, __u64 cost)
{
	__u64 found;

	for (int i = 0; i < PL_GIVE_BACK_TRIES; i++) {
		if (*(const volatile __u64 *)at->turn_now != at->turn)
			return;
		found = __sync_val_compare_and_swap(at->full_ns, held_ns, held_ns - cost);
		if (found == held_ns)
			return;
		held_ns = found;
	}
}

/*
 * Takes the tokens of a packet and returns 1, or returns 0 and takes nothing. If another CPU came
 * first the packet is given back.
 */
static inline __attribute__((always_inline)) int pl_take(const struct pl_bucket *bucket,
							 const struct pl_at *at, __u64 now_ns,
							 const struct pl_packet *packet,
							 __u64 *carry)
{
	__u64 *full_ns = at->full_ns;
	__u64 seen = *(volatile __u64 *)full_ns, found;
	__u64 left = seen < now_ns ? 0 : *carry;
	__u64 cost;

	if (!pl_fits(bucket, pl_deficit(bucket, seen, now_ns, left), packet))
		return 0;
	cost = pl_cost_ns(bucket, packet->wire_bytes, &left);
	if (seen < now_ns) {
		found = __sync_val_compare_and_swap(full_ns, seen, now_ns + cost);
		if (found == seen) {
			*carry = left;
			return 1;
		}
	}
	found = __sync_fetch_and_add(full_ns, cost);
	if (found != seen && !pl_fits(bucket, pl_deficit(bucket, found, now_ns, *carry), packet)) {
		pl_give_back(at, found + cost, cost);
		return 0;
	}
	*carry = left;
	return 1;
}

#endif
