/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How long a packet waits that reaches a shaper now: the backlog of its queue, and the debt of the
 * packet that left it last. A pure header over (state, now, length); its model, with the reasons,
 * is crates/core/src/wait.rs, and a property test compares the two.
 */
#ifndef TG_WAIT_H
#define TG_WAIT_H

#include "common/fair_share.h"
#include "common/vqueue.h"

/* Upper bound of a wait. */
#define WT_MAX_NS 1000000000ULL
/* The longest packet that a stack builds, with the headers of its segments. */
#define WT_LONGEST_BYTES (65536 + 45 * 66)

struct wt_conf {
	/* Cost of a byte in 2^-24 ns. */
	__u64 cost;
	__u64 burst_ns;
	/* The time of the longest packet. */
	__u64 longest_ns;
};

struct wt_account {
	/* When all that came will be paid. */
	__u64 finish_ns;
	/* The part of a nanosecond that is still to be charged. */
	__u32 carry;
	__u32 pad;
	/* The cost of a byte in the debt; 0: not known. */
	__u64 cost;
};

/* The debt: what was let go and is still to be paid. */
static inline __attribute__((always_inline)) __u64 wt_debt(const struct wt_account *account,
							   __u64 now_ns)
{
	__u64 finish = *(const volatile __u64 *)&account->finish_ns;

	return finish > now_ns ? finish - now_ns : 0;
}

/* The debt, at most that of the longest packet. */
static inline __attribute__((always_inline)) __u64 wt_short_debt(const struct wt_account *account,
								 __u64 now_ns)
{
	return fs_min(wt_debt(account, now_ns), vq_time_ns(WT_LONGEST_BYTES, account->cost));
}

/* The debt is in bytes: at another rate it is another time. */
static inline __attribute__((always_inline)) void wt_turn(const struct wt_conf *conf,
							  struct wt_account *account, __u64 now_ns)
{
	__u64 was = *(volatile __u64 *)&account->cost, debt, moved;

	/* Only one CPU does it. */
	if (was == conf->cost ||
	    __sync_val_compare_and_swap(&account->cost, was, conf->cost) != was || !was)
		return;
	debt = wt_debt(account, now_ns);
	if (!debt)
		return;
	moved = fs_min(vq_scaled_ns(fs_min(debt, WT_MAX_NS), was, conf->cost), WT_MAX_NS);
	/* A charge that other CPUs make meanwhile stays. */
	__sync_fetch_and_add(&account->finish_ns, moved - debt);
}

/* A packet reaches the shaper. */
static inline __attribute__((always_inline)) void
wt_charge(const struct wt_conf *conf, struct wt_account *account, __u64 now_ns, __u32 wire_bytes)
{
	const struct vq_conf queue = {.cost = conf->cost, .burst_ns = conf->burst_ns};
	/* The remainder of another CPU may be lost: less than a nanosecond. */
	__u32 carry = account->carry;
	__u64 cost = vq_cost_ns(&queue, wire_bytes, &carry), seen;

	wt_turn(conf, account, now_ns);
	seen = *(volatile __u64 *)&account->finish_ns;
	account->carry = carry;
	vq_charge(&queue, &account->finish_ns, 0, seen, now_ns, cost);
}

/* How long a packet waits that comes now. `queued_ns` is the queue as a time at the rate. */
static inline __attribute__((always_inline)) __u64
wt_look(const struct wt_conf *conf, struct wt_account *account, __u64 now_ns, __u64 queued_ns)
{
	__u64 queued = fs_min(queued_ns, WT_MAX_NS);
	__u64 most = queued + fs_min(conf->longest_ns, WT_MAX_NS);
	__u64 debt, seen;

	wt_turn(conf, account, now_ns);
	seen = *(volatile __u64 *)&account->finish_ns;
	debt = seen > now_ns ? seen - now_ns : 0;
	/* A packet that came meanwhile stays charged; the next read corrects this. */
	if (debt > most)
		__sync_val_compare_and_swap(&account->finish_ns, seen, now_ns + most);
	return fs_min(fs_min(fs_max(debt, queued), most), WT_MAX_NS);
}

#endif
