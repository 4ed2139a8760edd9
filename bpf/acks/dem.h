/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ECN marks in ACKs, from the length of a queue: a pure header over (state, now, backlog). Its
 * model, with the reasons, is crates/core/src/dem.rs; a property test compares the two.
 */
#ifndef TG_DEM_H
#define TG_DEM_H

#include "common/fair_share.h"

/* Probabilities in 2^-24. */
#define DEM_ONE (1ULL << 24)
/* The interval at which the PI law reads the queue; its gains. */
#define DEM_PERIOD_NS	 500000ULL
#define DEM_INTEGRAL	 (DEM_ONE / 256)
#define DEM_PROPORTIONAL (DEM_ONE / 32)
/* The PI law marks every ACK while the queue is longer than this many thresholds. */
#define DEM_CERTAIN_THRESHOLDS 4
/* It marks none while the queue is shorter than this part of a threshold. */
#define DEM_NEVER_PART 4
/* Clamps the distance from the threshold, in thresholds, and the length of an ACK, in segments. */
#define DEM_MAX_THRESHOLDS 8
#define DEM_MAX_SEGMENTS   64
#define DEM_MAX_BYTES	   (1ULL << 34)

enum dem_law {
	DEM_STEP,
	DEM_PI,
};

struct dem_conf {
	__u64 threshold_bytes;
	/* enum dem_law */
	__u32 law;
	__u32 pad;
};

/* State of the PI law for a limit. */
struct dem_marker {
	__u64 updated_ns;
	__u64 probability;
	__u64 before_bytes;
};

static inline __attribute__((always_inline)) __u64 dem_scaled(__u64 value, __u64 gain,
							      __u64 threshold)
{
	return fs_min(value, threshold * DEM_MAX_THRESHOLDS) * gain / threshold;
}

static inline __attribute__((always_inline)) void
dem_update(const struct dem_conf *conf, struct dem_marker *marker, __u64 now_ns, __u64 backlog)
{
	__u64 threshold = fs_max(conf->threshold_bytes, 1), before = marker->before_bytes;
	__u64 elapsed = now_ns > marker->updated_ns ? now_ns - marker->updated_ns : 0;
	__u64 up = 0, down = 0, next;

	if (elapsed < DEM_PERIOD_NS)
		return;
	if (backlog > threshold)
		up += dem_scaled(backlog - threshold, DEM_INTEGRAL, threshold);
	else
		down += dem_scaled(threshold - backlog, DEM_INTEGRAL, threshold);
	if (backlog > before)
		up += dem_scaled(backlog - before, DEM_PROPORTIONAL, threshold);
	else
		down += dem_scaled(before - backlog, DEM_PROPORTIONAL, threshold);
	next = fs_min(marker->probability, DEM_ONE) + up;
	marker->probability = fs_min(next > down ? next - down : 0, DEM_ONE);
	marker->before_bytes = backlog;
	marker->updated_ns = now_ns;
}

/*
 * Whether the passing ACK gets ECE. `due` is the flow's state: the fraction of its next mark.
 * `scalable`: the sender reacts to the fraction of marked segments, like DCTCP.
 */
static inline __attribute__((always_inline)) int dem_on_ack(const struct dem_conf *conf,
							    struct dem_marker *marker, __u32 *due,
							    __u64 now_ns, __u64 backlog_bytes,
							    __u32 segments, int scalable)
{
	__u64 backlog = fs_min(backlog_bytes, DEM_MAX_BYTES);
	__u64 p, part, sum;
	int mark = 0;

	if (conf->law == DEM_STEP)
		return backlog > conf->threshold_bytes;
	dem_update(conf, marker, now_ns, backlog);
	if (backlog > fs_min(conf->threshold_bytes, DEM_MAX_BYTES) * DEM_CERTAIN_THRESHOLDS)
		return 1;
	if (backlog < conf->threshold_bytes / DEM_NEVER_PART)
		return 0;
	p = fs_min(marker->probability, DEM_ONE);
	part = scalable ? fs_min(2 * p, DEM_ONE) : p * p / DEM_ONE;
	sum = *due + part * fs_min(segments, DEM_MAX_SEGMENTS);
	if (sum >= DEM_ONE) {
		sum -= DEM_ONE;
		mark = 1;
	}
	*due = fs_min(sum, DEM_ONE);
	return mark;
}

#endif
