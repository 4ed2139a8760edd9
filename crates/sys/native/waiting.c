// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "waiting/waiting.h"

int native_wf_read(const __u8 *bytes, __u32 length, struct wf_flow *flow)
{
	return wf_read(bytes, length, flow);
}
