// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The companion of the virtual queue on TCP sockets: a cgroup sock_ops program that, when a
 * connection is established, sets
 * - a pacing ceiling at the limit's rate, so that one socket alone never overruns the virtual queue
 * and its segments are no longer than about a millisecond at that rate;
 * - the minimum retransmission time-out and the longest delayed ACK, which replace the 20 ms probe
 * timer of the NRM paper: after a loss with nothing in flight, recovery does not wait 200 ms.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "sockets.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tg_limit);
} limit SEC(".maps");

/* Sets a timer option; where the kernel's tick is too coarse for it, the next power of two that it
 * takes. */
static __always_inline void set_timer(struct bpf_sock_ops *ops, int option, __u32 us)
{
	for (int i = 0; us && i < TG_TIMER_TRIES; i++, us *= 2)
		if (!bpf_setsockopt(ops, TG_SOL_TCP, option, &us, sizeof(us)))
			return;
}

static __always_inline void set_ceiling(struct bpf_sock_ops *ops, const struct tg_limit *l)
{
	__u32 wanted = tg_pacing_ceiling(l, ops->mss_cache, ops->family == TG_AF_INET6);
	__u32 current = TG_PACING_UNLIMITED;
	struct tg_socket *ours;

	if (!ops->sk)
		return;
	ours = bpf_sk_storage_get(&sockets, ops->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!ours)
		return;
	bpf_getsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &current, sizeof(current));
	if (!tg_may_set(current, wanted, ours))
		return;
	if (!bpf_setsockopt(ops, TG_SOL_SOCKET, TG_SO_MAX_PACING_RATE, &wanted, sizeof(wanted)))
		ours->pacing_byte_s = wanted;
}

SEC("sockops")
int tune(struct bpf_sock_ops *ops)
{
	__u32 key = 0;
	struct tg_limit *l = bpf_map_lookup_elem(&limit, &key);

	if (!l)
		return 1;
	switch (ops->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		set_timer(ops, TCP_BPF_RTO_MIN, l->rto_min_us);
		set_timer(ops, TCP_BPF_DELACK_MAX, l->delack_max_us);
		set_ceiling(ops, l);
		break;
	}
	return 1;
}

char _license[] SEC("license") = "Dual BSD/GPL";
