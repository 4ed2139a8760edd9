// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Hands every frame of a device to the software NIC.
 *
 * Whatever its type, a frame goes to the AF_XDP socket of the queue on which it arrived; the host's
 * stack sees none of it. Frames of a queue without a socket go on to the stack: while the ports of
 * a device are being opened, it works as before.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* The same in crates/sys/src/xdp.rs. */
#define XDP_QUEUES_MAX 256

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, XDP_QUEUES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} xdp_sockets SEC(".maps");

SEC("xdp")
int xdp_port(struct xdp_md *ctx)
{
	return bpf_redirect_map(&xdp_sockets, ctx->rx_queue_index, XDP_PASS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
