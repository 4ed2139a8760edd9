// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "acks/acks.h"
#include "acks/dem.h"
#include "common/options.h"
#include "acks/spring.h"

int native_dem_on_ack(const struct dem_conf *conf, struct dem_marker *marker, __u32 *due,
		      __u64 now_ns, __u64 backlog_bytes, __u32 segments, __u8 scalable)
{
	return dem_on_ack(conf, marker, due, now_ns, backlog_bytes, segments, scalable);
}

__u64 native_sp_next(__u64 share, const struct sp_conf *conf, const struct sp_epoch *epoch)
{
	return sp_next(share, conf, epoch);
}

__u64 native_sp_join(__u64 share, __u32 flows)
{
	return sp_join(share, flows);
}

__u64 native_sp_epoch_ns(const struct sp_conf *conf, __u64 rtt_ns, __u32 flows, __u16 mss)
{
	return sp_epoch_ns(conf, rtt_ns, flows, mss);
}

__u32 native_sp_window(const struct sp_conf *conf, __u64 share, __u64 rtt_ns, __u16 mss, __u32 hash,
		       __u32 epoch)
{
	return sp_window(conf, share, rtt_ns, mss, sp_phase(hash, epoch));
}

void native_sp_rtt_data(struct sp_rtt *rtt, __u32 end, __u64 now_ns, __u64 wait_ns, __u64 cost)
{
	sp_rtt_data(rtt, end, now_ns, wait_ns, cost);
}

int native_sp_rtt_ack(struct sp_rtt *rtt, __u32 ack, __u64 now_ns, __u64 cost)
{
	return sp_rtt_ack(rtt, ack, now_ns, cost);
}

__u16 native_sp_say(struct sp_edge *edge, const struct sp_ack *ack, __u32 window)
{
	return sp_say(edge, ack, window);
}

int native_sp_is_beyond(const struct sp_edge *edge, __u32 end, __u16 mss)
{
	return sp_is_beyond(edge, end, mss);
}

void native_wt_charge(const struct wt_conf *conf, struct wt_account *account, __u64 now_ns,
		      __u32 wire_bytes)
{
	wt_charge(conf, account, now_ns, wire_bytes);
}

__u64 native_wt_look(const struct wt_conf *conf, struct wt_account *account, __u64 now_ns,
		     __u64 queued_ns)
{
	return wt_look(conf, account, now_ns, queued_ns);
}

__u64 native_wt_debt(const struct wt_account *account, __u64 now_ns)
{
	return wt_debt(account, now_ns);
}

__u64 native_wt_short_debt(const struct wt_account *account, __u64 now_ns)
{
	return wt_short_debt(account, now_ns);
}

void native_fc_ack(const struct sp_conf *conf, struct fc_count *count, struct fc_mark *mark,
		   __u32 ack, __u64 now_ns)
{
	fc_ack(conf, count, mark, ack, now_ns);
}

int native_ac_count_flow(struct ac_state *state, __u32 *seen)
{
	return ac_count_flow(state, seen);
}

int native_ac_turn_epoch(const struct ac_limit *limit, struct ac_state *state, __u64 now_ns)
{
	return ac_turn_epoch(limit, state, now_ns, 0, 1448);
}

void native_opt_read(struct opt_walk *walk)
{
	for (int i = 0; i < OPT_MAX_BYTES; i++)
		if (opt_next(walk))
			return;
}
