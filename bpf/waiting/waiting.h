/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flow of a waiting packet: a pure header over the bytes of its network header. Its model is
 * crates/core/src/waiting.rs, and a property test compares the two.
 */
#ifndef TG_WAITING_H
#define TG_WAITING_H

#include <linux/types.h>

/* The longest header of IPv4, and ports. */
#define WF_BYTES 64
#define WF_IPV4	 20
#define WF_IPV6	 40
#define WF_PORTS 4
#define WF_TCP	 6
#define WF_UDP	 17

/* A flow in one direction; addresses and ports as on the wire, IPv4 as mapped into IPv6. */
struct wf_flow {
	__u8 from[16];
	__u8 to[16];
	__u8 from_port[2];
	__u8 to_port[2];
	/* For IPv6: what follows its header. */
	__u8 protocol;
	__u8 pad[3];
};

static inline __attribute__((always_inline)) void wf_copy(__u8 *to, const __u8 *from, __u32 length)
{
	for (__u32 i = 0; i < length; i++)
		to[i] = from[i];
}

static inline __attribute__((always_inline)) void wf_mapped(__u8 *to, const __u8 *from)
{
	to[10] = 0xff;
	to[11] = 0xff;
	wf_copy(to + 12, from, 4);
}

/*
 * Reads the `length` bytes at a network header, of a buffer of WF_BYTES; non-zero if it is not IP.
 * Only whole TCP and UDP packets have ports: all fragments of a packet are the same flow.
 */
static inline __attribute__((always_inline)) int wf_read(const __u8 *bytes, __u32 length,
							 struct wf_flow *flow)
{
	__u32 version = bytes[0] >> 4, header = WF_IPV6;
	int whole = 1;

	__builtin_memset(flow, 0, sizeof(*flow));
	if (version == 4) {
		header = (bytes[0] & 15) * 4;
		if (length < WF_IPV4 || header < WF_IPV4)
			return -1;
		wf_mapped(flow->from, bytes + 12);
		wf_mapped(flow->to, bytes + 16);
		flow->protocol = bytes[9];
		whole = !(bytes[6] & 0x3f) && !bytes[7];
	} else if (version == 6) {
		if (length < WF_IPV6)
			return -1;
		wf_copy(flow->from, bytes + 8, 16);
		wf_copy(flow->to, bytes + 24, 16);
		flow->protocol = bytes[6];
	} else {
		return -1;
	}
	if (!whole || (flow->protocol != WF_TCP && flow->protocol != WF_UDP) ||
	    header > WF_BYTES - WF_PORTS || header + WF_PORTS > length)
		return 0;
	wf_copy(flow->from_port, bytes + header, 2);
	wf_copy(flow->to_port, bytes + header + 2, 2);
	return 0;
}

#endif
