/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The states of TCP sockets, by the kernel's numbers. */
#ifndef TG_STATES_H
#define TG_STATES_H

#include "common/vmlinux.h"
#include <bpf/bpf_helpers.h>

#define TG_TCP_LISTEN 10
/*
 * ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING: it moves data, also
 * when one side has shut down, or others inherit what it has.
 */
#define TG_TCP_IN_USE (1U << 1 | 1U << 4 | 1U << 5 | 1U << 8 | 1U << 9 | 1U << 10 | 1U << 11)

static __always_inline int tg_is_in_use(const struct sock_common *sk)
{
	return 1U << (sk->skc_state & 31) & TG_TCP_IN_USE;
}

#endif
