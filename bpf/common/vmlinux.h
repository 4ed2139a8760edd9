/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The few kernel-internal types that our programs use, with only the members they use. Offsets come
 * from the running kernel's BTF (CO-RE), so order and gaps here mean nothing. Types of the user API
 * come from <linux/...> instead; both may be included together. kernel_types.rs takes the records
 * here, by their names at the beginning of a line, out of the kernel's types.
 */
#ifndef TG_VMLINUX_H
#define TG_VMLINUX_H

#include <linux/types.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct kernfs_node {
	__u64 id;
};

struct cgroup_root {
	int hierarchy_id;
};

struct cgroup {
	struct kernfs_node *kn;
	int level;
	struct cgroup_root *root;
	struct cgroup *ancestors[0];
};

struct sock_cgroup_data {
	struct cgroup *cgroup;
};

struct in6_addr___kernel {
	union {
		__u32 u6_addr32[4];
	} in6_u;
};

struct net {
	struct hlist_head *dev_index_head;
	struct {
		__u8 sysctl_tcp_syn_retries;
		__u8 sysctl_tcp_synack_retries;
	} ipv4;
};

struct sock_common {
	struct {
		struct net *net;
	} skc_net;
	__u32 skc_daddr;
	__u32 skc_rcv_saddr;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	struct in6_addr___kernel skc_v6_daddr;
	struct in6_addr___kernel skc_v6_rcv_saddr;
};

struct sock {
	struct sock_common __sk_common;
	struct sock_cgroup_data sk_cgrp_data;
	struct dst_entry *sk_dst_cache;
	unsigned long sk_max_pacing_rate;
	__u32 sk_ack_backlog;
	__u32 sk_max_ack_backlog;
};

struct inet_sock {
	struct sock sk;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
	struct {
		struct {
			int counter;
		} qlen;
	} icsk_accept_queue;
	__u8 icsk_syn_retries;
	__u8 icsk_ca_state : 5;
	__u8 icsk_ca_initialized : 1;
	__u8 icsk_ca_setsockopt : 1;
	struct {
		__u8 pending;
		__u16 rcv_mss;
	} icsk_ack;
	__u64 icsk_ca_priv[13];
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 mss_cache;
	__u32 rcv_nxt;
	__u32 snd_nxt;
	__u32 snd_una;
	__u32 snd_cwnd;
	__u32 snd_cwnd_clamp;
	__u32 snd_ssthresh;
	__u32 delivered;
	__u32 delivered_ce;
	__u32 data_segs_out;
	__u32 total_retrans;
	__u64 bytes_sent;
	__u8 ecn_flags;
	__u32 srtt_us;
	__u32 window_clamp;
	struct {
		__u32 rtt_us;
	} rcv_rtt_est;
};

struct bpf_iter_meta {
	__u64 session_id;
};

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};

struct hlist_node {
	struct hlist_node *next;
};

struct hlist_head {
	struct hlist_node *first;
};

struct gnet_stats_queue {
	__u32 backlog;
};

struct sk_buff {
	struct sk_buff *next;
	char cb[48];
	unsigned int len;
	unsigned int data_len;
	__u16 network_header;
	unsigned char *head;
	unsigned char *data;
	/* A struct dst_entry; the lowest bit is a flag. */
	unsigned long _skb_refdst;
};

/* The part of a packet's cb that IP uses. */
struct inet_skb_parm {
	__u16 frag_max_size;
};

struct inet6_skb_parm {
	__u16 frag_max_size;
};

struct dst_metrics {
	__u32 metrics[2];
};

struct dst_entry {
	struct net_device *dev;
	/* A struct dst_metrics; the lowest two bits are flags. */
	unsigned long _metrics;
	unsigned long expires;
};

struct rtable {
	struct dst_entry dst;
	__u32 rt_pmtu : 31;
};

struct ipv6_devconf {
	__s32 mtu6;
};

struct inet6_dev {
	struct ipv6_devconf cnf;
};

/* The part of a packet's cb that a qdisc uses. */
struct qdisc_skb_cb {
	unsigned int pkt_len;
};

struct qdisc_skb_head {
	struct sk_buff *head;
	struct sk_buff *tail;
	__u32 qlen;
};

struct Qdisc_ops {
	char id[16];
};

typedef struct {
	int counter;
} atomic_t;

struct refcount_struct {
	atomic_t refs;
};

struct netdev_queue {
	struct net_device *dev;
};

struct Qdisc {
	const struct Qdisc_ops *ops;
	__u32 handle;
	struct netdev_queue *dev_queue;
	struct refcount_struct refcnt;
	struct hlist_node hash;
	struct qdisc_skb_head q;
	struct gnet_stats_queue qstats;
	long privdata[0];
};

/* In a module, which not every kernel has. */
struct fq_codel_flow {
	struct sk_buff *head;
	struct sk_buff *tail;
};

struct fq_codel_sched_data {
	struct fq_codel_flow *flows;
	__u32 *backlogs;
	__u32 flows_cnt;
};

struct net_device {
	int ifindex;
	unsigned int mtu;
	struct inet6_dev *ip6_ptr;
	struct hlist_node index_hlist;
	struct hlist_head qdisc_hash[16];
};

struct nsproxy {
	struct net *net_ns;
};

struct task_struct {
	struct nsproxy *nsproxy;
};

#pragma clang attribute pop

/* Values differ between kernels: read them with bpf_core_enum_value(). */
enum tcp_ca_event {
	CA_EVENT_LOSS = 3,
	CA_EVENT_ECN_NO_CE = 4,
	CA_EVENT_ECN_IS_CE = 5,
};

enum inet_csk_ack_state_t {
	ICSK_ACK_TIMER = 2,
	ICSK_ACK_NOW = 16,
};

/* libbpf fills the kernel's struct from this one, member by member, by name. */
struct tcp_congestion_ops {
	__u32 (*ssthresh)(struct sock *sk);
	void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
	void (*set_state)(struct sock *sk, __u8 new_state);
	void (*cwnd_event)(struct sock *sk, enum tcp_ca_event event);
	void (*in_ack_event)(struct sock *sk, __u32 flags);
	__u32 (*undo_cwnd)(struct sock *sk);
	char name[16];
	__u32 flags;
	void (*init)(struct sock *sk);
};

#endif
