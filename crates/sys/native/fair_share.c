// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "common/fair_share.h"

__u64 native_fs_lesser(__u64 a, __u64 b)
{
	return fs_lesser(a, b);
}

__u64 native_fs_greater(__u64 a, __u64 b)
{
	return fs_greater(a, b);
}

__u64 native_fs_next(__u64 share, const struct fs_epoch *epoch)
{
	return fs_next(share, epoch);
}

__u64 native_fs_make_room(__u64 share, const struct fs_sharers *sharers)
{
	return fs_make_room(share, sharers);
}

void native_fs_flows(struct fs_sharers *sharers, __u32 count)
{
	fs_flows(sharers, count);
}

__u64 native_fs_join(__u64 share, __u32 flows)
{
	return fs_join(share, flows);
}

__u64 native_fs_epoch_ns(__u32 flows, __u64 burst_ns)
{
	return fs_epoch_ns(flows, burst_ns);
}
