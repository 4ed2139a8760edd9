// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The empty cgroup_skb program: the cost of the hook itself. The benchmarks subtract it. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("cgroup_skb/egress")
int nothing(struct __sk_buff *skb)
{
	return 1;
}

char _license[] SEC("license") = "Dual BSD/GPL";
