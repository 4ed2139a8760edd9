// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Ways in which many limits on cgroups can share programs, to compare what a limit and a packet
 * cost. Each way has the same three programs, which find the state of the packet's limit:
 * - own: each limit has its own copy of programs and maps;
 * - slot: the storage of the cgroup that the program is attached to holds the limit's index in
 *   pooled maps;
 * - chunk: the same, but the pool is maps of SH_CHUNK limits each, in maps;
 * - whole: that storage holds the state itself;
 * - ancestor: a hash table gives the index by the id of the cgroup at a level.
 *
 * What a program does with a packet is the same in all: it judges it, charges the virtual queue and
 * counts, as nrm.bpf.c does for a packet of a limit without a fair share. User space loads the
 * programs and maps of one way; the first word of their names is the way.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "common/counters.h"
#include "common/vqueue.h"
#include "common/wire_bytes.h"
#include "nrm/intf.h"

#define SH_CHUNK 32

/* The layout is shared with sharing.rs: one of each for a limit. */
#define SH_LIMITS   TG_LIMITS
#define SH_QUEUES   TG_DIRECTIONS
#define SH_COUNTERS TG_DIRECTIONS

/* What a program needs of a limit. */
struct sh_limit {
	const struct tg_limit *limit;
	struct tg_nrm_queue *queue;
	struct tg_counters *counters;
};

static __always_inline int sh_pass(struct __sk_buff *skb, const struct vq_conf *conf,
				   struct tg_nrm_queue *queue, struct tg_counters *counters,
				   __u32 direction)
{
	__u64 now = bpf_ktime_get_ns(), seen, cost;
	__u32 bytes = tg_wire_bytes(skb, direction), carry = counters->carry;

	if (!conf->cost)
		return 1;
	seen = *(volatile __u64 *)&queue->common.finish_ns;
	if (vq_zone(conf, seen - now) == VQ_FULL) {
		tg_add(&counters->packets[TG_DROP_FULL], 1, direction == TG_INGRESS);
		tg_add(&counters->bytes[TG_DROP_FULL], bytes, direction == TG_INGRESS);
		skb->mark = TG_DEAD_MARK;
		return direction == TG_EGRESS ? 2 : 0;
	}
	cost = vq_cost_ns(conf, bytes, &carry);
	vq_charge(conf, &queue->common.finish_ns, &queue->common.skipped_ns, seen, now, cost);
	counters->carry = carry;
	tg_add(&counters->packets[TG_PASS], 1, direction == TG_INGRESS);
	tg_add(&counters->bytes[TG_PASS], bytes, direction == TG_INGRESS);
	return 1;
}

static __always_inline int sh_gate(struct __sk_buff *skb, const struct sh_limit *found,
				   __u32 direction)
{
	if (skb->mark == TG_DEAD_MARK)
		return direction == TG_EGRESS ? 2 : 0;
	if (!found->limit || !found->queue || !found->counters)
		return 1;
	return sh_pass(skb, &found->limit->queue[direction], found->queue, found->counters,
		       direction);
}

/* The three programs of a way that finds limits by `find(ctx, direction, &found)`. */
#define SH_PROGRAMS(way, find, find_of_socket)                                                     \
	SEC("cgroup_skb/egress")                                                                   \
	int way##_egress(struct __sk_buff *skb)                                                    \
	{                                                                                          \
		struct sh_limit found = {};                                                        \
                                                                                                   \
		find(skb, TG_EGRESS, &found);                                                      \
		return sh_gate(skb, &found, TG_EGRESS);                                            \
	}                                                                                          \
	SEC("cgroup_skb/ingress")                                                                  \
	int way##_ingress(struct __sk_buff *skb)                                                   \
	{                                                                                          \
		struct sh_limit found = {};                                                        \
                                                                                                   \
		find(skb, TG_INGRESS, &found);                                                     \
		return sh_gate(skb, &found, TG_INGRESS);                                           \
	}                                                                                          \
	SEC("sockops")                                                                             \
	int way##_sockops(struct bpf_sock_ops *ops)                                                \
	{                                                                                          \
		struct sh_limit found = {};                                                        \
                                                                                                   \
		find_of_socket(ops, TG_EGRESS, &found);                                            \
		if (ops->op == BPF_SOCK_OPS_TCP_CONNECT_CB && found.queue)                         \
			__sync_fetch_and_add(&found.queue->newcomers, 1);                          \
		return 1;                                                                          \
	}

#define SH_ARRAY(name, kind, count, type_of_value)                                                 \
	struct {                                                                                   \
		__uint(type, kind);                                                                \
		__uint(max_entries, count); /* times the limits, set at load */                    \
		__type(key, __u32);                                                                \
		__type(value, type_of_value);                                                      \
	} name SEC(".maps")

SH_ARRAY(own_limits, BPF_MAP_TYPE_ARRAY, SH_LIMITS, struct tg_limit);
SH_ARRAY(own_queues, BPF_MAP_TYPE_ARRAY, SH_QUEUES, struct tg_nrm_queue);
SH_ARRAY(own_counters, BPF_MAP_TYPE_PERCPU_ARRAY, SH_COUNTERS, struct tg_counters);

static __always_inline void find_own(void *ctx, __u32 direction, struct sh_limit *found)
{
	__u32 zero = 0;

	found->limit = bpf_map_lookup_elem(&own_limits, &zero);
	found->queue = bpf_map_lookup_elem(&own_queues, &direction);
	found->counters = bpf_map_lookup_elem(&own_counters, &direction);
}

SH_PROGRAMS(own, find_own, find_own)

/* In the storage of a cgroup, one for all hooks: an index; 0: the cgroup has no limit yet. */
struct sh_place {
	__u32 index;
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_CGROUP_STORAGE);
	__type(key, __u64);
	__type(value, struct sh_place);
} slot_places SEC(".maps");

SH_ARRAY(slot_limits, BPF_MAP_TYPE_ARRAY, SH_LIMITS, struct tg_limit);
SH_ARRAY(slot_queues, BPF_MAP_TYPE_ARRAY, SH_QUEUES, struct tg_nrm_queue);
SH_ARRAY(slot_counters, BPF_MAP_TYPE_PERCPU_ARRAY, SH_COUNTERS, struct tg_counters);

static __always_inline void find_slot(void *ctx, __u32 direction, struct sh_limit *found)
{
	struct sh_place *place = bpf_get_local_storage(&slot_places, 0);
	__u32 first = place->index * SH_LIMITS, key = place->index * TG_DIRECTIONS + direction;

	found->limit = bpf_map_lookup_elem(&slot_limits, &first);
	found->queue = bpf_map_lookup_elem(&slot_queues, &key);
	found->counters = bpf_map_lookup_elem(&slot_counters, &key);
}

SH_PROGRAMS(slot, find_slot, find_slot)

struct {
	__uint(type, BPF_MAP_TYPE_CGROUP_STORAGE);
	__type(key, __u64);
	__type(value, struct sh_place);
} chunk_places SEC(".maps");

#define SH_CHUNKED(name, inner, kind, count, value_bytes)                                          \
	struct inner {                                                                             \
		__uint(type, kind);                                                                \
		__uint(max_entries, SH_CHUNK *count);                                              \
		__type(key, __u32);                                                                \
		__uint(value_size, value_bytes);                                                   \
	};                                                                                         \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);                                          \
		__uint(max_entries, 1); /* set at load */                                          \
		__type(key, __u32);                                                                \
		__array(values, struct inner);                                                     \
	} name SEC(".maps")

SH_CHUNKED(chunk_limits, sh_chunk_limits, BPF_MAP_TYPE_ARRAY, SH_LIMITS, sizeof(struct tg_limit));
SH_CHUNKED(chunk_queues, sh_chunk_queues, BPF_MAP_TYPE_ARRAY, SH_QUEUES,
	   sizeof(struct tg_nrm_queue));
SH_CHUNKED(chunk_counters, sh_chunk_counters, BPF_MAP_TYPE_PERCPU_ARRAY, SH_COUNTERS,
	   sizeof(struct tg_counters));

static __always_inline void find_chunk(void *ctx, __u32 direction, struct sh_limit *found)
{
	struct sh_place *place = bpf_get_local_storage(&chunk_places, 0);
	__u32 chunk = place->index / SH_CHUNK, slot = place->index % SH_CHUNK;
	__u32 first = slot * SH_LIMITS, key = slot * TG_DIRECTIONS + direction;
	void *map;

	map = bpf_map_lookup_elem(&chunk_limits, &chunk);
	if (map)
		found->limit = bpf_map_lookup_elem(map, &first);
	map = bpf_map_lookup_elem(&chunk_queues, &chunk);
	if (map)
		found->queue = bpf_map_lookup_elem(map, &key);
	map = bpf_map_lookup_elem(&chunk_counters, &chunk);
	if (map)
		found->counters = bpf_map_lookup_elem(map, &key);
}

SH_PROGRAMS(chunk, find_chunk, find_chunk)

/* Without what user space alone reads: older kernels store a page at most. */
struct sh_whole {
	struct vq_conf conf[TG_DIRECTIONS];
	struct tg_nrm_queue queue[TG_DIRECTIONS];
};

struct {
	__uint(type, BPF_MAP_TYPE_CGROUP_STORAGE);
	__type(key, __u64);
	__type(value, struct sh_whole);
} whole_states SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_CGROUP_STORAGE);
	__type(key, __u64);
	__type(value, struct tg_counters[TG_DIRECTIONS]);
} whole_counters SEC(".maps");

static __always_inline int whole_gate(struct __sk_buff *skb, __u32 direction)
{
	struct sh_whole *state = bpf_get_local_storage(&whole_states, 0);
	struct tg_counters *counters = bpf_get_local_storage(&whole_counters, 0);

	if (skb->mark == TG_DEAD_MARK)
		return direction == TG_EGRESS ? 2 : 0;
	return sh_pass(skb, &state->conf[direction], &state->queue[direction], &counters[direction],
		       direction);
}

SEC("cgroup_skb/egress")
int whole_egress(struct __sk_buff *skb)
{
	return whole_gate(skb, TG_EGRESS);
}

SEC("cgroup_skb/ingress")
int whole_ingress(struct __sk_buff *skb)
{
	return whole_gate(skb, TG_INGRESS);
}

SEC("sockops")
int whole_sockops(struct bpf_sock_ops *ops)
{
	struct sh_whole *state = bpf_get_local_storage(&whole_states, 0);

	if (ops->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
		__sync_fetch_and_add(&state->queue[TG_EGRESS].newcomers, 1);
	return 1;
}

/* The level of the cgroups: each level of a tree has a copy of the programs. */
const volatile __u32 level = 0;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* set at load */
	__type(key, __u64);
	__type(value, struct sh_place);
} ancestor_places SEC(".maps");

SH_ARRAY(ancestor_limits, BPF_MAP_TYPE_ARRAY, SH_LIMITS, struct tg_limit);
SH_ARRAY(ancestor_queues, BPF_MAP_TYPE_ARRAY, SH_QUEUES, struct tg_nrm_queue);
SH_ARRAY(ancestor_counters, BPF_MAP_TYPE_PERCPU_ARRAY, SH_COUNTERS, struct tg_counters);

static __always_inline void find_ancestor(struct __sk_buff *skb, __u32 direction,
					  struct sh_limit *found)
{
	__u64 id = bpf_skb_ancestor_cgroup_id(skb, level);
	struct sh_place *place = bpf_map_lookup_elem(&ancestor_places, &id);
	__u32 first, key;

	if (!place)
		return;
	first = place->index * SH_LIMITS;
	key = place->index * TG_DIRECTIONS + direction;
	found->limit = bpf_map_lookup_elem(&ancestor_limits, &first);
	found->queue = bpf_map_lookup_elem(&ancestor_queues, &key);
	found->counters = bpf_map_lookup_elem(&ancestor_counters, &key);
}

/* Programs of sock_ops have no helper for that. */
static __always_inline void find_nothing(void *ctx, __u32 direction, struct sh_limit *found)
{
}

SH_PROGRAMS(ancestor, find_ancestor, find_nothing)

char _license[] SEC("license") = "Dual BSD/GPL";
