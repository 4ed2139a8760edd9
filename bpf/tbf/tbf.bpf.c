// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Scheme `tbf`: counts what comes to the kernel's token bucket filter at the root of a device. The
 * qdisc itself holds the rate, and says what it has sent and how many packets it has dropped; the
 * difference to what came is the bytes that it dropped. The program also shows whose qdisc it is.
 */
#include "common/vmlinux.h"
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "common/counters_map.h"
#include "common/intf.h"
#include "common/maps.h"

/* The workload's direction of what leaves the device. */
const volatile __u32 direction_out = TG_EGRESS;

SEC("tcx/egress")
int tbf_out(struct __sk_buff *skb)
{
	__u32 key = direction_out;
	struct tg_counters *came = bpf_map_lookup_elem(&counters, &key);

	/* The kernel runs it with softirqs off, so nothing on this CPU interrupts it. */
	if (came) {
		came->packets[TG_PASS] += skb->gso_segs ? skb->gso_segs : 1;
		came->bytes[TG_PASS] += skb->wire_len;
	}
	/* The next program decides. */
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
