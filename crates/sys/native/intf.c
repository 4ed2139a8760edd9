// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <stddef.h>

#include "intf.h"

/* Sizes, offsets and constants of the contract, in the order in which the test in intf.rs names
 * them. */
const __u64 native_intf_layout[] = {
    sizeof(struct vq_conf),
    sizeof(struct tg_limit),
    offsetof(struct tg_limit, rate_bit_s),
    offsetof(struct tg_limit, class),
    sizeof(struct cl_class),
    offsetof(struct cl_class, drop_bytes),
    offsetof(struct tg_limit, cgroup_id),
    offsetof(struct tg_limit, flags),
    offsetof(struct tg_limit, delack_max_us),
    offsetof(struct tg_limit, ifindex),
    offsetof(struct tg_limit, police),
    sizeof(struct pl_policy),
    offsetof(struct pl_policy, yellow_dscps),
    offsetof(struct pl_policy, kind),
    offsetof(struct pl_policy, second_given),
    sizeof(struct tg_queue),
    offsetof(struct tg_queue, epoch_base_ns),
    offsetof(struct tg_queue, share),
    offsetof(struct tg_queue, newcomers),
    offsetof(struct tg_queue, now),
    offsetof(struct tg_queue, lightest_before),
    sizeof(struct tg_counters),
    offsetof(struct tg_counters, bytes),
    offsetof(struct tg_counters, carry),
    offsetof(struct tg_counters, last_ns),
    sizeof(struct tg_police_counters),
    offsetof(struct tg_police_counters, packets),
    offsetof(struct tg_police_counters, bytes),
    sizeof(struct tg_group),
    offsetof(struct tg_group, sample),
    sizeof(struct sm_counts),
    TG_BUFFERS,
    TG_DIRECTIONS,
    TG_QUEUES,
    TG_OUTCOMES,
    TG_FLAG_LOOPBACK,
    TG_FLAG_PACE_CEILING,
    TG_FLAG_PACE_FAIR,
    TG_FLAG_EDT,
    TG_FLAG_PORT,
    TG_FLAG_POLICE,
    TG_FLAG_HTB,
    TG_EGRESS,
    TG_INGRESS,
};
const __u32 native_intf_layout_len = sizeof(native_intf_layout) / sizeof(native_intf_layout[0]);
