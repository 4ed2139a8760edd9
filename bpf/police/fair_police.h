/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Equal parts for the flows of a policer: a pure header over (phantom queues, bucket, now, length).
 * Its model, with the reasons, is crates/core/src/fair_police.rs; a property test compares the two,
 * bit by bit.
 *
 * The length of a flow's phantom queue is how far its finish is above a level that is the same for
 * all. At that level the phantom queues together hold the deficit of the bucket. A flow is written
 * by compare-and-swap. One CPU finds the level of a turn. A CPU that reads it meanwhile is off by
 * less than the rise of a turn, which the next turn corrects.
 *
 * A phantom queue is bytes, stored as a time at the rate that its cell names. The first packet at
 * another rate takes a whole turn, which converts all of them, each once: the CPU that converts one
 * changes the rate's name before. The bucket, which alone decides how much passes, is converted at
 * once (meter.h).
 *
 * A turn visits all FP_CELLS cells in FP_STEPS steps. A packet takes one or two of them, and more
 * only after that much time without a step: never more than FP_STEP_CELLS cells in an FP_STEPS-th
 * of a turn, whatever the packets do. So the sums are of different moments. Both sides of the
 * balance are, the phantom queues and the deficit of the bucket, each against the level of its
 * moment. If a CPU stalls within a step, another one may take the step as well; then the level of
 * that turn is off, and the next turn corrects it.
 */
#ifndef TG_FAIR_POLICE_H
#define TG_FAIR_POLICE_H

#include "police/police.h"
#include "common/vqueue.h"

/* The set is in the upper bits of the hash. */
#define FP_SETS	     128
#define FP_SET_SHIFT 57
#define FP_WAYS	     4
/* The cells that a turn visits, and the cell of flows without one. */
#define FP_CELLS (FP_SETS * FP_WAYS)
/* The phantom queues may be this many times (a shift) as long as what is left in the bucket. */
#define FP_ROOM_SHIFT 3
/* How often the level is computed in the time that the bucket takes to fill (a shift). */
#define FP_TURN_SHIFT  5
#define FP_TURN_MIN_NS 250000ULL
#define FP_TURN_MAX_NS 4000000ULL
/* A turn has so many steps (a shift). */
#define FP_STEPS_SHIFT 3
#define FP_STEPS       (1 << FP_STEPS_SHIFT)
#define FP_STEP_CELLS  (FP_CELLS / FP_STEPS)

struct fp_phantom {
	/* The flow of the cell; 0: free. */
	__u64 flow;
	/* The level at which it is empty. */
	__u64 finish_ns;
	/* The cost of a byte at the rate at which finish_ns is kept; 0: the cell is unused. */
	__u64 cost;
};

/*
 * The sums over all phantom queues in a turn. In the table, where the verifier knows nothing of it:
 * on the stack it would follow each possible sum.
 */
struct fp_sum {
	/* The level of this step, and the sum against it. */
	__u64 level_ns;
	__u64 ahead_ns;
	__u64 busy;
	/* When the last phantom queue becomes empty. */
	__u64 latest_ns;
	/* The deficit of the bucket, added up over the steps. */
	__u64 deficit_ns;
};

struct fp_table {
	/* The level, when it was computed, and how many flows were busy; 0: none yet. */
	__u64 level_ns;
	__u64 turned_ns;
	__u64 busy;
	/* The cost of a byte at the last step. */
	__u64 cost;
	/* When that was, and which step is next. */
	__u64 stepped_ns;
	__u64 step;
	/* Belongs to the CPU that takes the step. */
	struct fp_sum sum;
	/* For all flows without a cell. */
	struct fp_phantom others;
	struct fp_phantom set[FP_SETS][FP_WAYS];
};

/* The verdict of a flow's phantom queue on a packet. */
struct fp_fit {
	struct fp_phantom *phantom;
	__u64 seen_ns;
	__u64 finish_ns;
	__u64 cost_ns;
};

static inline __attribute__((always_inline)) __u64 fp_turn_ns(const struct pl_bucket *bucket)
{
	__u64 turn = bucket->fill_ns >> FP_TURN_SHIFT;

	if (turn < FP_TURN_MIN_NS)
		return FP_TURN_MIN_NS;
	return turn < FP_TURN_MAX_NS ? turn : FP_TURN_MAX_NS;
}

static inline __attribute__((always_inline)) __u64 fp_busy(const struct fp_table *table)
{
	__u64 busy = *(volatile __u64 *)&table->busy;

	return busy ? busy : 1;
}

static inline __attribute__((always_inline)) __u64 fp_less(__u64 a, __u64 b)
{
	return a > b ? a - b : 0;
}

/* As if no flow became busy, or idle, since the last turn. */
static inline __attribute__((always_inline)) __u64
fp_level(const struct pl_bucket *bucket, const struct fp_table *table, __u64 now_ns)
{
	__u64 since = fp_less(now_ns, *(volatile __u64 *)&table->turned_ns);
	__u64 turn = fp_turn_ns(bucket);

	return *(volatile __u64 *)&table->level_ns + (since < turn ? since : turn) / fp_busy(table);
}

/*
 * How many cells the caller must visit, starting at the table's current step; mostly none. After a
 * turn without a step a new turn begins, and is done at once.
 */
static inline __attribute__((always_inline)) __u32 fp_begin_steps(const struct pl_bucket *bucket,
								  struct fp_table *table,
								  __u64 now_ns, __u64 deficit_ns)
{
	__u64 stepped = *(volatile __u64 *)&table->stepped_ns, turn = fp_turn_ns(bucket);
	__u64 step = table->step, since = fp_less(now_ns, stepped), due;
	__u64 each = turn >> FP_STEPS_SHIFT;
	int changed = *(volatile __u64 *)&table->cost != bucket->cost;
	int anew = changed || since >= turn || step >= FP_STEPS;

	if (since < each && !changed)
		return 0;
	if (anew)
		step = 0;
	due = anew ? FP_STEPS : since / each;
	if (due > FP_STEPS - step)
		due = FP_STEPS - step;
	if (__sync_val_compare_and_swap(&table->stepped_ns, stepped,
					anew ? now_ns : stepped + due * each) != stepped)
		return 0;
	if (!step) {
		table->sum.ahead_ns = 0;
		table->sum.busy = 0;
		table->sum.latest_ns = 0;
		table->sum.deficit_ns = 0;
	}
	table->cost = bucket->cost;
	table->sum.level_ns = fp_level(bucket, table, now_ns);
	table->sum.deficit_ns += due * deficit_ns;
	table->step = step;
	return due * FP_STEP_CELLS;
}

/* Converts a phantom queue to the rate at which a byte costs `cost`, if needed. */
static inline __attribute__((always_inline)) void fp_follow(struct fp_phantom *phantom,
							    __u64 level_ns, __u64 cost)
{
	__u64 from = *(volatile __u64 *)&phantom->cost, ahead;

	if (from == cost || __sync_val_compare_and_swap(&phantom->cost, from, cost) != from)
		return;
	ahead = fp_less(*(volatile __u64 *)&phantom->finish_ns, level_ns);
	if (ahead)
		__sync_fetch_and_add(&phantom->finish_ns, vq_scaled_ns(ahead, from, cost) - ahead);
}

static inline __attribute__((always_inline)) void fp_add(struct fp_sum *sum,
							 struct fp_phantom *phantom, __u64 cost)
{
	__u64 finish, ahead;

	fp_follow(phantom, sum->level_ns, cost);
	finish = *(volatile __u64 *)&phantom->finish_ns;
	ahead = fp_less(finish, sum->level_ns);
	if (!ahead)
		return;
	sum->ahead_ns += ahead;
	sum->busy++;
	if (finish > sum->latest_ns)
		sum->latest_ns = finish;
}

/* A cell of the steps that the caller has begun. */
static inline __attribute__((always_inline)) void fp_look(struct fp_table *table, __u32 i)
{
	__u64 cell = table->step * FP_STEP_CELLS + i;

	if (cell < FP_CELLS)
		fp_add(&table->sum, &table->set[cell / FP_WAYS][cell % FP_WAYS], table->cost);
}

/*
 * The caller has visited this many cells. If they were the last of the turn, computes the level at
 * which the phantom queues hold the deficit, by a step of Newton's method.
 */
static inline __attribute__((always_inline)) void fp_end_steps(const struct pl_bucket *bucket,
							       struct fp_table *table, __u64 now_ns,
							       __u64 deficit_ns, __u32 cells)
{
	__u64 level = fp_level(bucket, table, now_ns), busy, lacks;
	struct fp_sum *sum = &table->sum;

	table->step += cells / FP_STEP_CELLS;
	if (table->step < FP_STEPS)
		return;
	table->step = 0;
	fp_add(sum, &table->others, table->cost);
	busy = sum->busy ? sum->busy : 1;
	lacks = sum->deficit_ns >> FP_STEPS_SHIFT;
	if (!deficit_ns) {
		if (sum->latest_ns > level)
			level = sum->latest_ns;
	} else if (sum->ahead_ns > lacks) {
		level += (sum->ahead_ns - lacks) / busy;
	} else {
		/* It rose too much since the last turn: more flows had become busy. */
		level = fp_less(level, (lacks - sum->ahead_ns) / busy);
		if (level < table->level_ns)
			level = table->level_ns;
	}
	table->level_ns = level;
	table->busy = busy;
	table->turned_ns = now_ns;
}

/* The cell of a flow. It may have been another flow's, as an empty phantom queue holds no state. */
static inline __attribute__((always_inline)) struct fp_phantom *fp_find(struct fp_table *table,
									__u64 level_ns, __u64 flow)
{
	struct fp_phantom *set = table->set[flow >> FP_SET_SHIFT];

	for (__u32 i = 0; i < FP_WAYS; i++) {
		if (set[i].flow == flow)
			return &set[i];
	}
	for (__u32 i = 0; i < FP_WAYS; i++) {
		__u64 owner = set[i].flow;

		if (set[i].finish_ns > level_ns)
			continue;
		if (__sync_val_compare_and_swap(&set[i].flow, owner, flow) == owner)
			return &set[i];
	}
	return &table->others;
}

/* Whether a packet of a flow fits its part. If the bucket takes it too, it must be charged. */
static inline __attribute__((always_inline)) int fp_fits(const struct pl_bucket *bucket,
							 struct fp_table *table, __u64 now_ns,
							 __u64 deficit_ns, __u64 flow,
							 __u32 wire_bytes, struct fp_fit *fit)
{
	__u64 level = fp_level(bucket, table, now_ns);
	__u64 room = fp_less(bucket->fill_ns, deficit_ns) << FP_ROOM_SHIFT;
	__u64 ahead;

	fit->phantom = fp_find(table, level, flow);
	fp_follow(fit->phantom, level, bucket->cost);
	fit->seen_ns = *(volatile __u64 *)&fit->phantom->finish_ns;
	ahead = fp_less(fit->seen_ns, level);
	if (ahead > deficit_ns)
		ahead = deficit_ns;
	fit->cost_ns = wire_bytes * bucket->cost >> PL_COST_SHIFT;
	fit->finish_ns = level + ahead + fit->cost_ns;
	return ahead * fp_busy(table) <= room;
}

/* The bucket has taken the packet. */
static inline __attribute__((always_inline)) void fp_charge(const struct fp_fit *fit)
{
	__u64 *finish = &fit->phantom->finish_ns;

	/* Another CPU has charged the flow meanwhile. */
	if (__sync_val_compare_and_swap(finish, fit->seen_ns, fit->finish_ns) != fit->seen_ns)
		__sync_fetch_and_add(finish, fit->cost_ns);
}

#endif
