// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "nrm/rwnd.h"

__u32 native_rw_window(struct rw_flow *flow, const struct rw_path *path, __u64 now_ns)
{
	return rw_window(flow, path, now_ns);
}

__u64 native_rw_asking_byte_s(const struct rw_flow *flow, __u32 payload, __u64 now_ns)
{
	return rw_asking_byte_s(flow, payload, now_ns);
}

__u32 native_rw_first_segments(__u64 byte_s, __u32 mss)
{
	return rw_first_segments(byte_s, mss);
}

__s64 native_rw_judged_ns(__s64 backlog_ns, __u64 mark_ns, __u64 rtt_ns)
{
	return rw_judged_ns(backlog_ns, mark_ns, rtt_ns);
}

__u64 native_rw_burst_ns(__u64 rtt_ns, __u32 flows)
{
	return rw_burst_ns(rtt_ns, flows);
}
