/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The fair share of a paced limit: a pure header over what one epoch has seen. Its model, with the
 * reasons, is crates/core/src/fair_share.rs; a property test compares the two.
 */
#ifndef TG_FAIR_SHARE_H
#define TG_FAIR_SHARE_H

#include <linux/types.h>

/* Shares and loads are fractions of the limit in 2^-24. */
#define FS_ONE (1ULL << 24)
/* 99 % of the limit, so that the virtual queue drains. */
#define FS_TARGET (FS_ONE * 99 / 100)
/* A backlog is drained in about this time, with at most this part of the limit. */
#define FS_DRAIN_NS  20000000ULL
#define FS_MAX_DRAIN (FS_ONE / 4)
/* The shortest epoch, and the shortest delay of the loop that is assumed. */
#define FS_MIN_EPOCH_NS 4000000ULL
/* Upper bound of an epoch; keeps the products below in 64 bits. */
#define FS_MAX_EPOCH_NS	  (1ULL << 34)
#define FS_MAX_CHARGED_NS (1ULL << 38)
/* After this many epochs without a packet everything known is stale. */
#define FS_STALE_EPOCHS 16
#define FS_MAX_FLOWS	(1U << 16)
/*
 * A flow that was silent for fewer epochs is not new: it had its room, and the load says what it
 * needs.
 */
#define FS_KNOWN_EPOCHS 8
/* The weight of a flow, and the default weight of a limit inside a limit. */
#define FS_WEIGHT 100ULL
/* All of the limit for a weight of one. */
#define FS_MAX_SHARE (FS_ONE * FS_WEIGHT)
/* However much is guaranteed, a weight keeps this part (a shift) of what it would have without. */
#define FS_LEAST_SHIFT 8

/* The sharers of a limit: the flows, or classes, that sent data in an epoch. */
struct fs_sharers {
	__u32 count;
	/* Weight of all together, and of the lightest. */
	__u32 weight;
	__u32 lightest;
	/* Guaranteed to them, or set aside for unpaced senders, as a part of the limit. */
	__u64 reserved;
};

/* The observations of one epoch. */
struct fs_epoch {
	__u64 elapsed_ns;
	/* The charge of the virtual queue, in time at the limit's rate. */
	__u64 charged_ns;
	/* Backlog of the virtual queue at its end, 0 if it has credit. */
	__u64 backlog_ns;
	/* Smoothed round-trip time of the flows. */
	__u64 rtt_ns;
	/* Time of the smallest paced burst, two segments, at the limit's rate. */
	__u64 burst_ns;
	/* The flows or classes that sent data. */
	struct fs_sharers sharers;
};

static inline __attribute__((always_inline)) __u64 fs_min(__u64 a, __u64 b)
{
	return a < b ? a : b;
}

static inline __attribute__((always_inline)) __u64 fs_max(__u64 a, __u64 b)
{
	return a > b ? a : b;
}

/*
 * All bits set if a < b, and none otherwise, without a branch. The law below takes dozens of minima
 * and maxima once an epoch, and a window some with each ACK; the verifier follows both sides of
 * each branch: with branches `pace` takes twice as long to load. Other code that runs for each
 * packet has branches, which are cheaper to run.
 *
 * The sign of a - b is the answer unless exactly one of the two has its highest bit set; then that
 * of b is (as GT in BearSSL's inner.h). The empty asm keeps the compiler from making it a branch.
 */
static inline __attribute__((always_inline)) __u64 fs_less_mask(__u64 a, __u64 b)
{
	__u64 difference = a - b;
	__u64 mask = (__s64)(difference ^ ((a ^ b) & (b ^ difference))) >> 63;

	asm("" : "+r"(mask));
	return mask;
}

static inline __attribute__((always_inline)) __u64 fs_lesser(__u64 a, __u64 b)
{
	return b + ((a - b) & fs_less_mask(a, b));
}

static inline __attribute__((always_inline)) __u64 fs_greater(__u64 a, __u64 b)
{
	return a - ((a - b) & fs_less_mask(a, b));
}

/* How long an epoch must be for each flow to be seen in it. */
static inline __attribute__((always_inline)) __u64 fs_epoch_ns(__u32 flows, __u64 burst_ns)
{
	__u64 round = 2 * fs_lesser(flows, FS_MAX_FLOWS) * fs_lesser(burst_ns, FS_MAX_EPOCH_NS);

	return fs_lesser(fs_greater(round, FS_MIN_EPOCH_NS), FS_MAX_EPOCH_NS);
}

/* A rate as a part of the limit's; none is higher than 2^37 bit/s. */
static inline __attribute__((always_inline)) __u64 fs_part(__u64 bit_s, __u64 rate_bit_s)
{
	return fs_lesser(bit_s, 1ULL << 37) * FS_ONE / fs_greater(rate_bit_s, 1);
}

/* The part of the limit that may be given out while a backlog drains. */
static inline __attribute__((always_inline)) __u64 fs_target(__u64 backlog_ns)
{
	__u64 backlog = fs_lesser(backlog_ns, FS_DRAIN_NS);

	return FS_TARGET - fs_lesser(backlog * FS_ONE / FS_DRAIN_NS, FS_MAX_DRAIN);
}

/* `count` equal flows. */
static inline __attribute__((always_inline)) void fs_flows(struct fs_sharers *sharers, __u32 count)
{
	sharers->count = count;
	sharers->weight = fs_lesser(fs_greater(count, 1), FS_MAX_FLOWS) * FS_WEIGHT;
	sharers->lightest = FS_WEIGHT;
	sharers->reserved = 0;
}

/* The share of each if all of them take all that they may. */
static inline __attribute__((always_inline)) __u64 fs_floor(const struct fs_sharers *sharers,
							    __u64 target)
{
	__u64 weight = fs_greater(sharers->weight, 1);
	__u64 least = target * FS_WEIGHT / weight >> FS_LEAST_SHIFT;

	return fs_greater((target - fs_lesser(sharers->reserved, target)) * FS_WEIGHT / weight,
			  least);
}

/* The share for the rest of an epoch in which more were seen than in the one before. */
static inline __attribute__((always_inline)) __u64 fs_make_room(__u64 share,
								const struct fs_sharers *sharers)
{
	return fs_lesser(share, fs_floor(sharers, FS_TARGET));
}

/*
 * The same where the existing flows may leave a part of theirs: each gives the new one, the
 * flows-th, an equal part of what it may use.
 */
static inline __attribute__((always_inline)) __u64 fs_join(__u64 share, __u32 flows)
{
	flows = flows < 1 ? 1 : flows < FS_MAX_FLOWS ? flows : FS_MAX_FLOWS;
	share = fs_lesser(share, FS_TARGET);
	return fs_greater(share * (flows - 1) / flows, fs_lesser(share, FS_TARGET / flows));
}

/* The share of each flow in the next epoch. */
static inline __attribute__((always_inline)) __u64 fs_next(__u64 share,
							   const struct fs_epoch *epoch)
{
	const struct fs_sharers *sharers = &epoch->sharers;
	__u64 need_ns = fs_epoch_ns(fs_greater(sharers->count, 1), epoch->burst_ns);
	__u64 elapsed = fs_lesser(fs_greater(epoch->elapsed_ns, 1), FS_MAX_EPOCH_NS);
	__u64 load = fs_lesser(epoch->charged_ns, FS_MAX_CHARGED_NS) * FS_ONE / elapsed;
	__u64 target = fs_target(epoch->backlog_ns);
	__u64 delay = fs_lesser(fs_greater(epoch->rtt_ns, need_ns), FS_MAX_EPOCH_NS);
	__u64 step = fs_lesser(elapsed, delay) * FS_ONE / delay;
	__u64 floor = fs_floor(sharers, target);
	__u64 pull, change;

	if (epoch->elapsed_ns / FS_STALE_EPOCHS > need_ns)
		return floor;
	share = fs_lesser(share, FS_MAX_SHARE);
	load = fs_lesser(load, 16 * FS_ONE);
	pull = share * step >> 24;
	if (load < target) {
		change = pull * (target - load) >> 25;
		share += change;
	} else {
		change = pull * fs_lesser(load - target, FS_ONE) >> 25;
		share -= change;
		/*
		 * Corrects all of the overload, but once a round trip, as sockets learn their share
		 * only then.
		 */
		if (epoch->backlog_ns)
			share = fs_lesser(share, share + change - pull * (load - target) / load);
	}
	/* Beyond this the lightest would have more than all. */
	share = fs_lesser(share, target * FS_WEIGHT / fs_greater(sharers->lightest, 1));
	return fs_greater(share, floor);
}

#endif
