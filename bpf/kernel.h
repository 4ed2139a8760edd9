/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The few kernel types that the socket iterator reads; relocated at load time (CO-RE). */
#ifndef TG_KERNEL_H
#define TG_KERNEL_H

#include <linux/types.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct kernfs_node {
	__u64 id;
};

struct cgroup {
	struct kernfs_node *kn;
	int level;
	struct cgroup *ancestors[0];
};

struct sock_cgroup_data {
	struct cgroup *cgroup;
};

struct sock_common {
	unsigned short skc_family;
	volatile unsigned char skc_state;
};

struct sock {
	struct sock_common __sk_common;
	struct sock_cgroup_data sk_cgrp_data;
};

struct tcp_sock {
	__u32 mss_cache;
};

struct bpf_iter_meta {
	__u64 session_id;
};

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};

#pragma clang attribute pop

#endif
