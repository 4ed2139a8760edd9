/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The options of a TCP SYN: a pure header, one option a step. A malformed option ends them; what
 * was read before counts.
 */
#ifndef TG_OPTIONS_H
#define TG_OPTIONS_H

#include <linux/types.h>

/* The most bytes that the data offset allows. */
#define OPT_MAX_BYTES 40
/* A power of two, so that an index can be masked. */
#define OPT_ROOM 64

#define OPT_END	  0
#define OPT_NOP	  1
#define OPT_MSS	  2
#define OPT_SCALE 3

struct opt_syn {
	/* 0: not present. */
	__u16 mss;
	__u8 scale;
	__u8 has_scale;
};

struct opt_walk {
	__u8 options[OPT_ROOM];
	__u32 len;
	__u32 at;
	struct opt_syn syn;
};

static inline __attribute__((always_inline)) __u8 opt_byte(const struct opt_walk *walk, __u32 at)
{
	return walk->options[at & (OPT_ROOM - 1)];
}

/* Reads one option; 1: no more. */
static inline __attribute__((always_inline)) int opt_next(struct opt_walk *walk)
{
	__u32 at = walk->at;
	__u8 kind, size;

	if (at >= walk->len)
		return 1;
	kind = opt_byte(walk, at);
	if (kind == OPT_END)
		return 1;
	if (kind == OPT_NOP) {
		walk->at = at + 1;
		return 0;
	}
	size = opt_byte(walk, at + 1);
	if (at + 1 >= walk->len || size < 2 || at + size > walk->len)
		return 1;
	if (kind == OPT_MSS && size == 4) {
		walk->syn.mss = opt_byte(walk, at + 2) << 8 | opt_byte(walk, at + 3);
	} else if (kind == OPT_SCALE && size == 3) {
		walk->syn.scale = opt_byte(walk, at + 2);
		walk->syn.has_scale = 1;
	}
	walk->at = at + size;
	return 0;
}

#endif
