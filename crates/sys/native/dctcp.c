// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "congestion/dctcp.h"

__u32 native_dctcp_alpha(__u32 alpha, __u32 delivered, __u32 marked)
{
	return dctcp_alpha(alpha, delivered, marked);
}

__u32 native_dctcp_ssthresh(__u32 cwnd, __u32 alpha)
{
	return dctcp_ssthresh(cwnd, alpha);
}

__u32 native_dctcp_ssthresh_loss(__u32 prior_cwnd, __u32 ssthresh)
{
	return dctcp_ssthresh_loss(prior_cwnd, ssthresh);
}

__u32 native_dctcp_received(__u8 *ce_state, __u8 ce, int ack_is_delayed)
{
	return dctcp_received(ce_state, ce, ack_is_delayed);
}
