// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "nrm/admission.h"

void native_ad_ended(struct ad_turns *turns, __u64 bytes)
{
	ad_ended(turns, bytes);
}

__u64 native_ad_ask(struct ad_turns *turns, __u64 now, __s64 backlog_ns, __u64 cost, __u32 others)
{
	return ad_ask(turns, now, backlog_ns, cost, others);
}

int native_ad_only_asks(const struct ad_turns *turns)
{
	return ad_only_asks(turns);
}

int native_ad_ends_soon(const struct ad_turns *turns, __u32 segments)
{
	return ad_ends_soon(turns, segments);
}

__u32 native_ad_hold_ticks(__u64 wait_ns, __u32 retries, __u64 rtt_ns, __u64 tick_ns)
{
	return ad_hold_ticks(wait_ns, retries, rtt_ns, tick_ns);
}

__u32 native_ad_syn_ticks(__u64 wait_ns, __u64 rtt_ns, __u64 tick_ns)
{
	return ad_syn_ticks(wait_ns, rtt_ns, tick_ns);
}

__u32 native_ad_answer_retries(__u32 chosen, __u32 host)
{
	return ad_answer_retries(chosen, host);
}

__u32 native_ad_syn_retries(__u32 ticks, __u64 tick_ns, __u32 retries)
{
	return ad_syn_retries(ticks, tick_ns, retries);
}

__u32 native_ad_asked(__u64 now, __u32 port)
{
	return ad_asked(now, port);
}

int native_ad_is_asked(__u32 asked, __u64 now, __u32 port)
{
	return ad_is_asked(asked, now, port);
}
