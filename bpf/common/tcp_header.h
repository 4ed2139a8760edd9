/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Offsets and flags of a TCP header (RFC 9293, 3.1). */
#ifndef TG_TCP_HEADER_H
#define TG_TCP_HEADER_H

#define TCP_FIN	     0x01
#define TCP_SYN	     0x02
#define TCP_RST	     0x04
#define TCP_ACK_FLAG 0x10
#define TCP_ECE	     0x40
#define TCP_CWR	     0x80
/* Above the flags' byte: Accurate ECN. */
#define TCP_AE 0x100

/* From the header's start: the receiver's port. */
#define TCP_DEST_OFFSET 2
/* The word that holds data offset, flags and window, and the flags' byte in it. */
#define TCP_WORD_OFFSET	 12
#define TCP_FLAGS_OFFSET 13
#define TCP_CHECK_OFFSET 16

/* A header without options. */
#define TCP_LEAST_BYTES 20
/* Bytes before the options: a reader without options reads these. */
#define TCP_BEFORE_OPTIONS 4

#endif
