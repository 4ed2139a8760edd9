// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Schemes `dem` and `spring`: a shaper that slows TCP senders down by the ACKs that come back to
 * them. Two programs on one device, on whichever sides of it:
 *
 *   acks_data  what the senders send, before it waits in the shaper's queue
 *   acks_back  what comes back to them
 *
 * The queue is the kernel's (HTB), and is read when an ACK passes (backlog.h). `dem` sets ECE in
 * the ACKs of flows that agreed on ECN. `spring` writes into their windows how much a flow may have
 * in flight, and drops what a sender sends beyond.
 *
 * A connection is known from its handshake on. An unknown one passes unchanged, as all else does:
 * its handshake was not seen, it was pushed out of the table, or it is not whole TCP. Only flags,
 * window and checksum of a packet are changed.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "acks/acks.h"
#include "waiting/backlog.h"
#include "common/counters_map.h"
#include "common/intf.h"
#include "common/packet.h"
#include "acks/tcp.h"

/* A SYN without the option for its segment size (RFC 9293, 3.7.1). */
#define DEFAULT_MSS 536
/* The weight of a new sample of the backlog is 2^-4. */
#define BACKLOG_SHIFT 4

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, AC_LIMITS);
	__type(key, __u32);
	__type(value, struct ac_limit);
} limits SEC(".maps");

struct ac_states {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ac_state);
} states SEC(".maps");

/* `states` of the limit's other direction, if that is limited: its queue is where ACKs wait. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct ac_states);
} other_states SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tg_backlog);
} backlogs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, AC_FLOWS);
	__type(key, struct tcp_key);
	__type(value, struct ac_flow);
} flows SEC(".maps");

/*
 * Where the IP header is: behind Ethernet's, or at the start if the device has none, as TUN,
 * WireGuard and PPP.
 */
const volatile __u32 link_bytes = ETH_HLEN;

static __always_inline void count(enum tg_outcome outcome, __u32 bytes, __u64 now)
{
	__u32 key = 0;
	struct tg_counters *c = bpf_map_lookup_elem(&counters, &key);

	if (!c)
		return;
	c->packets[outcome]++;
	c->bytes[outcome] += bytes;
	if (outcome != TG_PASS)
		c->last_ns[outcome] = now;
}

/*
 * The limit that is in force. A lease may end when no daemon is there. The kernel's HTB keeps its
 * rate then, so these programs hold the lower one.
 */
static __always_inline const struct ac_limit *limit_now(void)
{
	__u32 key = AC_NOW;
	const struct ac_limit *l = bpf_map_lookup_elem(&limits, &key);

	if (!l || !l->until_ns || bpf_ktime_get_boot_ns() < l->until_ns)
		return l;
	key = AC_THEN;
	return bpf_map_lookup_elem(&limits, &key);
}

/* How long a packet waits that comes now. */
struct ahead {
	__u64 ns;
	__u64 bytes;
};

static __always_inline struct ahead waiting(const struct ac_limit *l, struct ac_state *s, __u64 now)
{
	__u32 key = 0;
	struct tg_backlog *at = bpf_map_lookup_elem(&backlogs, &key);
	__u64 queued = at ? tg_backlog_bytes(at) : 0;
	struct ahead ahead;

	if (l->most_ns) {
		ahead.ns = fs_min(wt_debt(&s->account, now), WT_MAX_NS);
		ahead.bytes = sp_bytes(&l->spring, ahead.ns);
		return ahead;
	}
	ahead.ns = wt_look(&l->wait, &s->account, now, sp_time(&l->spring, queued));
	/* Times have a bound. */
	ahead.bytes = fs_max(sp_bytes(&l->spring, ahead.ns), queued);
	return ahead;
}

/* How long an ACK waits behind this program, in the queue of the other direction. */
static __always_inline __u64 ack_waits(__u64 now)
{
	__u32 key = 0;
	void *others = bpf_map_lookup_elem(&other_states, &key);
	const struct ac_state *other = others ? bpf_map_lookup_elem(others, &key) : 0;

	return other ? wt_short_debt(&other->account, now) : 0;
}

static __always_inline int is_syn(const struct tcp_packet *packet)
{
	return (packet->flags & (TCP_SYN | TCP_ACK_FLAG | TCP_RST | TCP_FIN)) == TCP_SYN;
}

static __always_inline int is_syn_ack(const struct tcp_packet *packet)
{
	return (packet->flags & (TCP_SYN | TCP_ACK_FLAG | TCP_RST | TCP_FIN)) ==
	       (TCP_SYN | TCP_ACK_FLAG);
}

/*
 * A SYN: a connection may come. An existing one between the same two stays until the SYN is
 * answered.
 */
static __always_inline void on_syn(struct __sk_buff *skb, const struct tcp_packet *packet, int own)
{
	struct ac_flow *flow = bpf_map_lookup_elem(&flows, &packet->key);
	__u32 flags = own ? AC_OWN_SYN : AC_OTHER_SYN;
	struct ac_flow fresh = {};
	struct opt_syn syn = {};

	tcp_read_syn(skb, packet->offset, packet->doff, &syn);
	if (packet->flags & TCP_ECE && packet->flags & TCP_CWR)
		flags |= AC_ASKED_ECN;
	if (packet->ecn)
		flags |= AC_ECT_SYN;
	if (syn.has_scale)
		flags |= own ? AC_OWN_SCALES : AC_OTHER_SCALES;
	if (!flow) {
		fresh.flags = flags;
		fresh.syn_mss = syn.mss;
		fresh.syn_scale = syn.scale;
		fresh.hash = bpf_get_prandom_u32();
		if (own) {
			fresh.sent = packet->seq + 1;
			sp_rtt_data(&fresh.rtt, packet->seq + 1, bpf_ktime_get_ns(), 0, 0);
		}
		bpf_map_update_elem(&flows, &packet->key, &fresh, BPF_ANY);
		return;
	}
	/* Sent again, or a new one between the same two. */
	flow->flags = (flow->flags & ~(AC_KNOWN - 1)) | flags;
	flow->syn_mss = syn.mss;
	flow->syn_scale = syn.scale;
	if (own && !(flow->flags & AC_KNOWN)) {
		flow->rtt.sent_ns = 0;
		flow->sent = packet->seq + 1;
	}
}

/* The answer to a SYN: from here on the connection is known. */
static __always_inline void on_syn_ack(struct __sk_buff *skb, const struct tcp_packet *packet,
				       struct ac_flow *flow, int own)
{
	__u32 asked = flow->flags, known = AC_KNOWN;
	struct opt_syn syn = {};

	if (!(asked & (own ? AC_OTHER_SYN : AC_OWN_SYN)))
		return;
	/* A repeated one adds nothing. */
	if (asked & (own ? AC_OWN_SYN : AC_OTHER_SYN) && asked & AC_KNOWN)
		return;
	tcp_read_syn(skb, packet->offset, packet->doff, &syn);
	/* Both must have asked for ECN; more flags than ECE mean Accurate ECN. */
	if (asked & AC_ASKED_ECN && (packet->flags & (TCP_ECE | TCP_CWR | TCP_AE)) == TCP_ECE) {
		known |= AC_ECN;
		if (asked & AC_ECT_SYN)
			known |= AC_SCALABLE;
	}
	flow->scale = 0;
	if (own) {
		if (asked & AC_OTHER_SCALES && syn.has_scale)
			flow->scale = flow->syn_scale;
		flow->rtt.sent_ns = 0;
		flow->sent = packet->seq + 1;
		sp_rtt_data(&flow->rtt, flow->sent, bpf_ktime_get_ns(), 0, 0);
	} else {
		flow->syn_mss = syn.mss;
		if (asked & AC_OWN_SCALES && syn.has_scale)
			flow->scale = syn.scale;
		/* The sample is of an older connection between the same two. */
		if (asked & AC_KNOWN) {
			flow->rtt.sent_ns = 0;
			flow->sent = packet->ack;
		}
	}
	if (flow->scale > SP_MAX_SCALE)
		flow->scale = SP_MAX_SCALE;
	if (!flow->syn_mss)
		flow->syn_mss = DEFAULT_MSS;
	flow->mss = flow->syn_mss;
	flow->rtt.least_ns = 0;
	flow->rtt.recent_ns = 0;
	flow->edge.known = 0;
	flow->mark.number = 0;
	flow->acked = flow->sent;
	flow->other_sent = own ? packet->ack : packet->seq + 1;
	flow->due = 0;
	/* The SYN is answered. Both sides' numbers are stored, to recognise this answer again. */
	flow->flags = known | AC_OWN_SYN | AC_OTHER_SYN;
}

/* Nobody sends more: the connection is removed when the other side has ended, too. */
static __always_inline void on_fin(struct ac_flow *flow, const struct tcp_packet *packet,
				   __u32 this, __u32 other)
{
	if (__sync_fetch_and_or(&flow->flags, this) & other)
		bpf_map_delete_elem(&flows, &packet->key);
}

/*
 * The sender's segment size: the one that the other side announced, less the options that the
 * sender uses. It is smaller for a while when the sender probes for the path's MTU, or when short
 * segments were merged.
 */
static __always_inline void learn_mss(struct ac_flow *flow, __u32 payload, __u32 gso_size)
{
	__u32 size = gso_size ? gso_size : payload, most = flow->syn_mss;

	if (size > flow->mss)
		flow->mss = fs_max(flow->mss, fs_min(size, most));
	else if (gso_size)
		flow->mss = gso_size;
}

/* Data of a known connection; 1 if it is beyond its window. */
static __always_inline int on_data(const struct ac_limit *l, struct ac_state *s,
				   struct ac_flow *flow, const struct tcp_packet *packet,
				   __u32 gso_size, __u64 now)
{
	__u32 end = packet->seq + packet->payload;

	if (l->scheme == AC_SPRING && sp_is_beyond(&flow->edge, end, flow->mss))
		return 1;
	if ((__s32)(end - flow->sent) <= 0) {
		/* Sent again: the next acknowledgement may be for either (Karn). */
		flow->rtt.sent_ns = 0;
		return 0;
	}
	flow->sent = end;
	learn_mss(flow, packet->payload, gso_size);
	/* HTB sends a packet as a whole when those before it are paid. */
	if (l->scheme == AC_SPRING && !flow->rtt.sent_ns)
		sp_rtt_data(&flow->rtt, end, now, waiting(l, s, now).ns, l->wait.cost);
	return 0;
}

/* Learns about a connection from a packet in the data's direction; 1: drop it. */
static __always_inline int data(struct __sk_buff *skb, const struct ac_limit *l, struct ac_state *s,
				__u64 now)
{
	struct tcp_packet packet;
	struct ac_flow *flow;

	if (tcp_read(skb, link_bytes, 0, &packet))
		return 0;
	if (is_syn(&packet)) {
		on_syn(skb, &packet, 1);
		return 0;
	}
	flow = bpf_map_lookup_elem(&flows, &packet.key);
	if (!flow)
		return 0;
	if (packet.flags & TCP_RST) {
		bpf_map_delete_elem(&flows, &packet.key);
		return 0;
	}
	if (is_syn_ack(&packet)) {
		on_syn_ack(skb, &packet, flow, 1);
		return 0;
	}
	if (!(flow->flags & AC_KNOWN) || packet.flags & TCP_SYN)
		return 0;
	flow->own_ack = packet.ack;
	if (packet.payload && on_data(l, s, flow, &packet, skb->gso_size, now))
		return 1;
	if (packet.flags & TCP_FIN) {
		/* The sequence number of the FIN is acknowledged, too. */
		if ((__s32)(packet.seq + packet.payload + 1 - flow->sent) > 0)
			flow->sent = packet.seq + packet.payload + 1;
		on_fin(flow, &packet, AC_OWN_FIN, AC_OTHER_FIN);
	}
	return 0;
}

SEC("tcx/ingress")
int acks_data(struct __sk_buff *skb)
{
	__u32 key = 0, bytes = tg_bytes_on_link(skb, skb->len, link_bytes);
	const struct ac_limit *l = limit_now();
	struct ac_state *s = bpf_map_lookup_elem(&states, &key);
	__u64 now = bpf_ktime_get_ns();

	/* The next program decides. */
	if (!l || !s)
		return TC_ACT_UNSPEC;
	if ((l->most_ns && wt_debt(&s->account, now) > l->most_ns) || data(skb, l, s, now)) {
		count(TG_DROP_FULL, bytes, now);
		return TC_ACT_SHOT;
	}
	__sync_fetch_and_add(&s->in_bytes, bytes);
	wt_charge(&l->wait, &s->account, now, bytes);
	count(TG_PASS, bytes, 0);
	return TC_ACT_UNSPEC;
}

/* The window of the ACK that leaves. */
static __always_inline __u16 spring(const struct ac_limit *l, struct ac_state *s,
				    struct ac_flow *flow, const struct tcp_packet *packet,
				    __u64 now)
{
	struct sp_ack ack = {.ack = packet->ack, .raw = packet->window};
	struct ahead ahead = waiting(l, s, now);
	__u32 epoch = s->epoch + 1;
	__u64 smooth = s->backlog_ns, rtt_ns;

	s->backlog_ns = smooth - (smooth >> BACKLOG_SHIFT) + (ahead.ns >> BACKLOG_SHIFT);
	sp_rtt_ack(&flow->rtt, packet->ack, now, l->wait.cost);
	/* The sender has to wait for both. */
	rtt_ns = flow->rtt.least_ns + ack_waits(now);
	if (rtt_ns > s->longest_ns)
		s->longest_ns = rtt_ns;
	/* A flow gets its share with its handshake. */
	if (!flow->epoch || packet->ack != flow->acked)
		ac_count_flow(s, &flow->epoch);
	ac_turn_epoch(l, s, now, ahead.bytes, flow->mss);
	ack.scale = packet->flags & TCP_SYN ? 0 : flow->scale;
	ack.bare = !packet->payload && !(packet->flags & (TCP_SYN | TCP_FIN));
	return sp_say(
	    &flow->edge, &ack,
	    sp_window(&l->spring, s->share, rtt_ns, flow->mss, sp_phase(flow->hash, epoch)));
}

/* Whether the ACK that leaves has ECE. */
static __always_inline int dem(const struct ac_limit *l, struct ac_state *s, struct ac_flow *flow,
			       const struct tcp_packet *packet, __u64 now)
{
	__u32 acked = packet->ack - flow->acked, mss = flow->mss;
	__u32 segments = (__s32)acked > 0 ? (acked + mss - 1) / (mss ? mss : 1) : 0;

	return flow->flags & AC_ECN && !(packet->flags & TCP_SYN) &&
	       dem_on_ack(&l->dem, &s->marker, &flow->due, now, waiting(l, s, now).bytes, segments,
			  !!(flow->flags & AC_SCALABLE));
}

SEC("tcx/egress")
int acks_back(struct __sk_buff *skb)
{
	struct tcp_packet packet;
	__u16 flags, window;
	const struct ac_limit *l;
	struct ac_flow *flow;
	struct ac_state *s;
	__u32 key = 0;
	__u64 now;

	if (tcp_read(skb, link_bytes, 1, &packet))
		return TC_ACT_UNSPEC;
	if (is_syn(&packet)) {
		on_syn(skb, &packet, 0);
		return TC_ACT_UNSPEC;
	}
	l = limit_now();
	s = bpf_map_lookup_elem(&states, &key);
	flow = bpf_map_lookup_elem(&flows, &packet.key);
	if (!l || !s || !flow || !(packet.flags & (TCP_ACK_FLAG | TCP_RST)))
		return TC_ACT_UNSPEC;
	if (packet.flags & TCP_RST) {
		/* Only a valid one ends a connection. */
		if (!(flow->flags & AC_KNOWN) || packet.seq == flow->own_ack ||
		    packet.seq == flow->other_sent)
			bpf_map_delete_elem(&flows, &packet.key);
		return TC_ACT_UNSPEC;
	}
	if (is_syn_ack(&packet))
		on_syn_ack(skb, &packet, flow, 0);
	/* An ACK of more than was sent is not of this connection. */
	if (!(flow->flags & AC_KNOWN) || (__s32)(packet.ack - flow->sent) > 0)
		return TC_ACT_UNSPEC;

	flags = packet.flags;
	window = packet.window;
	now = bpf_ktime_get_ns();
	fc_ack(&l->spring, &s->flow_count, &flow->mark, packet.ack, now);
	if (l->scheme == AC_SPRING)
		window = spring(l, s, flow, &packet, now);
	else if (dem(l, s, flow, &packet, now))
		flags |= TCP_ECE;
	if ((__s32)(packet.ack - flow->acked) > 0)
		flow->acked = packet.ack;
	if ((__s32)(packet.seq + packet.payload - flow->other_sent) > 0)
		flow->other_sent = packet.seq + packet.payload;
	if (packet.flags & TCP_FIN)
		on_fin(flow, &packet, AC_OTHER_FIN, AC_OWN_FIN);
	if (flags == packet.flags && window == packet.window)
		return TC_ACT_UNSPEC;
	if (!tcp_write(skb, &packet, flags, window))
		count(l->scheme == AC_SPRING ? TG_SLOW : TG_MARK, skb->len, now);
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
