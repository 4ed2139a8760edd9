/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A packet on its way through a limit of `nrm` or `pace`. */
#ifndef TG_ARRIVAL_H
#define TG_ARRIVAL_H

#include "common/intf.h"

/* The largest backlog at which a packet may be charged: of all traffic, and of unpaced senders. */
struct bounds {
	__u64 all_ns;
	__u64 unpaced_ns;
};

/* A packet, as the limit sees it. It has no padding, as Linux 6.1 wants every byte set. */
struct arrival {
	__u64 now;
	/* Set by the verdict on the packet. */
	struct bounds most;
	/* Its charge: in the queue of all traffic, and in that of traffic of no child. */
	__u64 cost_ns;
	__u64 own_cost_ns;
	__u32 bytes;
	__u32 direction;
	__u32 slot;
	/* The limit has active children. */
	__u8 is_parent;
	/* One of them has the packet's socket, and has judged the packet. */
	__u8 claimed;
	/* None of them has it: the packet also passes the queue for such traffic. */
	__u8 is_own;
	/* The limit gives its flows shares; in this direction as receive windows. */
	__u8 paced;
	__u8 windows;
	/* The sender cannot be paced: it must stay within one share, also with small packets. */
	__u8 needs_share;
	/* The sender is within that share. */
	__u8 reserved;
	/* The sender has no window, while others in the same queue have one. */
	__u8 unpaced;
	/* The packet is the SYN-ACK of a connection whose turn has come. */
	__u8 admitted;
	__u8 unused[3];
};

#endif
