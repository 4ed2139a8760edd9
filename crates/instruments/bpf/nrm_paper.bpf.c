// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * NRM as published, for comparison in the lab: see nrm_paper.h for the rule, and nrm.bpf.c for the
 * scheme to use. One spin lock a direction is held over the whole decision; only the packet's
 * header is read before it and written after it.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "nrm_paper.h"

/* Return values of cgroup_skb programs; the last two only on egress. */
enum {
	RET_DROP = 0,
	RET_PASS = 1,
	RET_DROP_SLOW = 2,
	RET_PASS_SLOW = 3,
};

/* Byte/s; 0 lets everything pass. */
const volatile __u64 egress_byte_s;
const volatile __u64 ingress_byte_s;

/* Mirrored by crates/instruments/src/paper.rs. */
struct np_state {
	struct bpf_spin_lock lock;
	__u32 reserved;
	struct np_queue queue;
	__u64 packets[NP_VERDICTS];
	__u64 bytes[NP_VERDICTS];
};

struct np_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct np_state);
};

struct np_map egress SEC(".maps");
struct np_map ingress SEC(".maps");

/* Extension headers are not parsed, as in the original: such a packet is not TCP. */
static __always_inline void parse(struct __sk_buff *skb, struct np_packet *packet)
{
	__u8 ip[10] = {};

	packet->bytes = skb->len;
	if (bpf_skb_load_bytes(skb, 0, ip, sizeof(ip)))
		return;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		packet->ecn_capable = ip[1] & 3;
		packet->tcp = ip[9] == IPPROTO_TCP;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		packet->ecn_capable = (ip[1] >> 4) & 3;
		packet->tcp = ip[6] == IPPROTO_TCP;
	}
}

static __always_inline enum np_verdict gate(struct __sk_buff *skb, void *map, __u64 byte_s,
					    struct np_packet *packet)
{
	__u32 key = 0, random;
	struct np_state *state = bpf_map_lookup_elem(map, &key);
	enum np_verdict verdict;
	__u64 now;

	if (!state || !byte_s)
		return NP_PASS;
	parse(skb, packet);
	random = bpf_get_prandom_u32();
	now = bpf_ktime_get_ns();

	bpf_spin_lock(&state->lock);
	verdict = np_packet(&state->queue, now, byte_s, packet, random);
	state->packets[verdict]++;
	state->bytes[verdict] += packet->bytes;
	bpf_spin_unlock(&state->lock);

	if (verdict == NP_MARK)
		bpf_skb_ecn_set_ce(skb);
	return verdict;
}

SEC("cgroup_skb/egress")
int paper_egress(struct __sk_buff *skb)
{
	struct np_packet packet = {};

	switch (gate(skb, &egress, egress_byte_s, &packet)) {
	case NP_SLOW:
		return RET_PASS_SLOW;
	case NP_DROP:
		return packet.tcp ? RET_DROP_SLOW : RET_DROP;
	default:
		return RET_PASS;
	}
}

SEC("cgroup_skb/ingress")
int paper_ingress(struct __sk_buff *skb)
{
	struct np_packet packet = {};

	/* The sender is remote: only marks and drops reach it. */
	return gate(skb, &ingress, ingress_byte_s, &packet) == NP_DROP ? RET_DROP : RET_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
