/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The layout of the state of scheme `edt`; see common/intf.h. */
#ifndef TG_EDT_INTF_H
#define TG_EDT_INTF_H

#include "common/intf.h"

struct tg_edt_queue {
	struct tg_queue common;
	/* The latest departure that a flow's own schedule has given. */
	__u64 latest_ns;
	/* The largest packet of this epoch. */
	__u32 largest_bytes;
	__u32 pad;
};

#endif
