/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Two helpers that spare the kernel's verifier work. The verifier follows both sides of each branch
 * with all that it has learnt there, and a limit is in force only when the verifier is done.
 * Neither helper changes what a program does.
 */
#ifndef TG_VERIFIER_H
#define TG_VERIFIER_H

/* A function that the verifier checks by itself, once, and not again for each path to its calls. */
#ifdef __bpf__
#define VF_ONCE __attribute__((noinline))
#else
#define VF_ONCE static inline
#endif

/*
 * Returns `value`, of which the verifier now knows nothing: paths that differ in it alone are the
 * same from here on, and are followed once. `any` is a number that it does not know.
 */
static inline __attribute__((always_inline)) __u64 vf_forget(__u64 value, __u64 any)
{
#ifdef __bpf__
	asm volatile("%0 ^= %1; %0 ^= %1" : "+r"(value) : "r"(any));
#else
	(void)any;
#endif
	return value;
}

#endif
