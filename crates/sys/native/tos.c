// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "common/tos.h"

__u16 native_tg_checksum(__u16 checksum, __u16 was, __u16 is)
{
	return tg_checksum(checksum, was, is);
}

__u8 native_tg_with_dscp(__u8 tos, __u8 dscp)
{
	return tg_with_dscp(tos, dscp);
}

/* The first two bytes of an IPv6 header with another traffic class; the class that they had. */
__u8 native_tg_set_traffic_class(__u8 *first, __u8 tos)
{
	union tg_ip_head head = {.byte = {first[0], first[1]}};
	__u8 was = tg_traffic_class(&head);

	tg_set_traffic_class(&head, tos);
	first[0] = head.byte[0];
	first[1] = head.byte[1];
	return was;
}
