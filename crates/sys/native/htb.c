// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "htb/htb.h"

__u32 native_htb_marks(__u32 waiting_bytes, __u32 mark_bytes)
{
	return htb_marks(waiting_bytes, mark_bytes);
}

__u32 native_htb_leaf(__u32 slot)
{
	return htb_leaf(slot);
}

/* In the order of the test in crates/sys/src/htb/tests.rs. */
const __u32 native_htb_constants[] = {HTB_MAJOR, HTB_SLOTS, HTB_ROOT_SLOT, HTB_QUEUE_MAJOR};
