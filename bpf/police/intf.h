/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The layout of the maps of scheme `police`; see common/intf.h. */
#ifndef TG_POLICE_INTF_H
#define TG_POLICE_INTF_H

#include "common/intf.h"
#include "common/sample.h"
#include "police/meter.h"

/* The settings of a policer. */
struct tg_police_limit {
	struct tg_limit common;
	/* By direction. */
	struct pl_policy police[TG_DIRECTIONS];
};

/* Counters of a policer. */
struct tg_police_counters {
	struct tg_counters common;
	/* The part of the last cost below a nanosecond, in units; for each bucket. */
	__u64 carry;
	__u64 second_carry;
	/* By the colour of the packets. */
	__u64 packets[PL_COLOURS];
	__u64 bytes[PL_COLOURS];
};

/* Buffers of each sample of flows: packets fill one while user space reads the other. */
#define TG_BUFFERS 2

/* The part of a group of hosts in a limit, in one direction. Only user space writes it. */
struct tg_group {
	/* The probability of a drop before the limit itself, in 2^-32. */
	__u32 drop;
	/* The buffer into which flows are counted, from 1 on; 0: they are not counted. */
	__u32 sample;
};

/*
 * Limits of one device that each police some prefixes (match.h): at most TG_CHUNKS x TG_CHUNK of
 * them. Their settings, queues and counters lie in maps of TG_CHUNK each.
 */
#define TG_CHUNK	32
#define TG_CHUNKS	128
#define TG_PREFIXES_MAX 65536
/* Most different prefix lengths of one version of IP, in one direction. */
#define TG_LENGTHS_MAX 16
#define TG_FAMILIES    2

/* A length of prefixes. */
struct tg_length {
	/* The mask for an address: the bits that count. */
	__u32 mask[4];
	__u32 bits;
};

/* The lengths in use, the longest first. */
struct tg_lengths {
	__u32 count;
	struct tg_length length[TG_LENGTHS_MAX];
};

/* The key of a prefix; its value is the index of its limit. */
struct tg_place {
	__u32 address[4];
	/* Direction, family and length: 8 bits each, from the left of 24. */
	__u32 what;
};

#endif
