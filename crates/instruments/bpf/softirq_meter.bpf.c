// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures the CPU time of the network's softirqs that interrupt others.
 *
 * Most of the kernel's work for a packet runs in the process that sends or receives it, and is in
 * that process's CPU time. Work that a timer or a device started runs in whatever process has the
 * CPU, in the idle task or in ksoftirqd, and is charged to nobody. It is added up here, except in
 * the named processes, whose CPU time has it.
 *
 * A softirq is not interrupted by another one on its CPU, so one start time a CPU is stored.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* Numbers of softirqs, in the order of the kernel's enum: net tx and rx, tasklets (TCP small
 * queues), and soft hrtimers (TCP's pacing).
 */
#define NETWORK_SOFTIRQS (1U << 2 | 1U << 3 | 1U << 6 | 1U << 8)

/* The layout is shared with softirq_meter.rs. */
struct softirq_time {
	__u64 began_ns; /* CLOCK_MONOTONIC; 0: none that counts runs */
	__u64 spent_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct softirq_time);
} softirq_times SEC(".maps");

/* Processes whose softirqs are not counted, by thread group. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, __u8);
} softirq_own SEC(".maps");

SEC("raw_tp/softirq_entry")
int softirq_begins(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 zero = 0, process = bpf_get_current_pid_tgid() >> 32;
	struct softirq_time *time;

	if (!(NETWORK_SOFTIRQS >> (ctx->args[0] & 31) & 1) ||
	    bpf_map_lookup_elem(&softirq_own, &process))
		return 0;
	time = bpf_map_lookup_elem(&softirq_times, &zero);
	if (time)
		time->began_ns = bpf_ktime_get_ns();
	return 0;
}

SEC("raw_tp/softirq_exit")
int softirq_ends(struct bpf_raw_tracepoint_args *ctx)
{
	struct softirq_time *time;
	__u32 zero = 0;

	time = bpf_map_lookup_elem(&softirq_times, &zero);
	if (time && time->began_ns) {
		time->spent_ns += bpf_ktime_get_ns() - time->began_ns;
		time->began_ns = 0;
	}
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
