//! Departure times: what holds a packet back is the time at which it may leave, and the `fq` qdisc that keeps
//! it until then (the `edt` scheme; Carousel, Saeed et al., SIGCOMM 2017, in the kernel).
//!
//! Carousel's rule is `LTS = max(LTS, now - burst) + len/rate`, and the packet leaves at `LTS`. One such time
//! for a whole limit is one big FIFO: who has queued much delays all others. Here every flow has a schedule
//! of its own, at its share of the limit, and the limit as a whole is held by a second time:
//!
//! ```text
//!   flow:    finish = max(finish, now - burst) + len / (share x rate)        its own departure
//!   class:   total  = max(total,  now - burst) + len / rate                  what has been handed out
//!   packet:  leaves at max(finish, total - horizon - lead), lead = latest own departure - now
//! ```
//!
//! - A newcomer's schedule is empty, so its first packets leave at once, however much others have queued:
//!   they are handed out *early*, on top of what the others have scheduled. `total` keeps the account, and
//!   the share law ([`crate::fair_share`]) gives less until it is even.
//! - What may be handed out early is bounded: no packet leaves before `total - horizon - lead`. So a flood of
//!   flows with a packet each is one FIFO at the limit's rate, as it must be, and never more than the
//!   limit. In any time t at most `rate x (t + burst + horizon + lead)` leaves, lead being what the flows'
//!   own schedules span, 200 ms at most.
//! - The schedule of a flow reaches `horizon` ahead and no further. ECN-capable packets that wait longer than
//!   `mark` are marked; beyond the horizon a packet is dropped. TCP of this host is held back instead: it has
//!   at most two segments of 64 KB below it (TCP small queues), and sends the next when one has left; so its
//!   horizon is no shorter than those two.
//! - Where nothing releases packets at their time (no `fq`), schedules run into the horizon all the same, and
//!   the rule becomes a policer.
//!
//! A finish time is the time at which the packet itself is paid, so a flow is never ahead of its schedule by
//! more than `burst` (at least one full frame). Each packet costs O(1); a flow is 32 bytes of state, a
//! class 24. The kernel's copy is `bpf/edt.h`.

use alloc::vec::Vec;

use crate::{
    fair_share::{self, Epoch, Sharers},
    units::Nanos,
    verdict::{DropReason, Verdict},
    virtual_queue::{COST_SHIFT, MAX_PACKET_BYTES, SMALL_BYTES, VirtualQueueConfig},
};

/// A flow saves up at least one full frame.
pub const FRAME_BYTES: u64 = 1514;
/// What TCP small queues let a socket have below it.
pub const HELD_BYTES: u64 = 2 * 70 * 1024;
/// `fq` holds 100 packets of a flow by default, and drops what comes on top.
pub const FLOW_PACKETS: u64 = 90;
/// The weight of a new packet in the mean is 2^-3.
pub const MEAN_SHIFT: u32 = 3;
/// No packet is sent off for later than this: beyond 10 s `fq` drops.
pub const MAX_DELAY: Nanos = Nanos(4_000_000_000);
/// The class may be ahead by what its flows have scheduled, but by no more than this.
pub const MAX_LEAD: Nanos = Nanos(200_000_000);
/// No packet costs its flow more.
pub const MAX_COST: Nanos = Nanos(1 << 38);
/// Places for flows; those that meet in one share it.
pub const FLOWS: usize = 4096;

/// What the rule needs to know of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Length on the wire with all headers of all its segments.
    pub wire_bytes: u32,
    /// Whether its IP header says ECT(0), ECT(1) or CE.
    pub ecn_capable: bool,
    /// TCP of a socket of this host, which sends no more before this has left.
    pub held: bool,
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// [`Verdict::Pass`], [`Verdict::Mark`] or a drop.
    pub verdict: Verdict,
    /// Not before this; `now` or earlier is at once. Of a dropped packet zero.
    pub at: Nanos,
}

/// The schedule of one flow.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// When it would have sent all that passed, at its share.
    pub finish: Nanos,
    /// The departure of its last packet.
    pub last: Nanos,
    /// Mean cost of its packets.
    pub mean: Nanos,
    /// The last epoch in which it was counted.
    epoch: u32,
    /// The last epoch in which room was made for it.
    room_epoch: u32,
}

/// What all flows of a limit share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    /// When the limit would have sent all that passed.
    pub finish: Nanos,
    /// The part of the last cost below a nanosecond, in 2^-24 ns.
    pub carry: u32,
    /// The latest departure that a flow's own schedule has given.
    pub latest: Nanos,
    /// Share of each flow, of the limit in 2^-24.
    pub share: u64,
}

/// What a packet costs its flow, at the flow's share.
#[must_use]
pub fn cost(config: &VirtualQueueConfig, share: u64, bytes: u64) -> Nanos {
    let bytes = bytes.min(u64::from(MAX_PACKET_BYTES));
    Nanos(bytes * config.cost / share.clamp(1, fair_share::ONE)).min(MAX_COST)
}

impl Class {
    /// Nothing has been sent; one flow may have the whole target.
    #[must_use]
    pub fn new() -> Class {
        Class { finish: Nanos(0), carry: 0, latest: Nanos(0), share: fair_share::TARGET }
    }

    /// How far the schedules of the flows reach.
    #[must_use]
    pub fn lead(&self, now: Nanos) -> Nanos {
        Nanos(self.latest.0.saturating_sub(now.0)).min(MAX_LEAD)
    }

    /// Judges a packet of `flow`, and enters it unless it is dropped. `config.drop` is the horizon.
    pub fn on_packet(
        &mut self,
        config: &VirtualQueueConfig,
        flow: &mut Flow,
        now: Nanos,
        packet: &Packet,
    ) -> Departure {
        let cost_of = |bytes| cost(config, self.share, bytes);
        let horizon = config.drop;
        let turn = Nanos(self.finish.0.saturating_sub(horizon.0 + self.lead(now).0));
        let room = if packet.held {
            horizon.max(cost_of(HELD_BYTES))
        } else if flow.mean.0 > 0 {
            horizon.min(Nanos(flow.mean.min(MAX_COST).0 * FLOW_PACKETS))
        } else {
            horizon
        };
        let until = |time: Nanos| Nanos(time.0.saturating_sub(now.0));
        // Who is held back waits for the class too: it would only try again, and others be first.
        let class_room = if packet.held { room } else { horizon };
        if until(flow.finish) > room || until(turn) > class_room {
            return Departure { verdict: Verdict::Drop(DropReason::Full), at: Nanos(0) };
        }
        let wait = until(flow.finish.max(turn));
        let marked = wait > config.mark && packet.ecn_capable;
        let verdict = if marked { Verdict::Mark } else { Verdict::Pass };
        let burst = config.burst.max(cost_of(FRAME_BYTES));
        let packet_cost = cost_of(u64::from(packet.wire_bytes));
        let own = flow.enter(now, burst, packet_cost);
        self.latest = self.latest.max(own);
        self.charge(config, now, packet.wire_bytes);
        let at = own.max(turn).max(flow.last).min(Nanos(now.0 + MAX_DELAY.0));
        if at > now {
            flow.last = at;
        }
        Departure { verdict, at }
    }

    fn charge(&mut self, config: &VirtualQueueConfig, now: Nanos, wire_bytes: u32) {
        let bytes = u64::from(wire_bytes.min(MAX_PACKET_BYTES));
        let cost = bytes * config.cost + u64::from(self.carry);
        self.carry = (cost & ((1 << COST_SHIFT) - 1)) as u32;
        let idle_since = now.0.saturating_sub(config.burst.0);
        self.finish = Nanos(self.finish.0.max(idle_since) + (cost >> COST_SHIFT));
    }
}

impl Default for Class {
    fn default() -> Self {
        Self::new()
    }
}

impl Flow {
    fn enter(&mut self, now: Nanos, burst: Nanos, cost: Nanos) -> Nanos {
        self.finish = Nanos(self.finish.0.max(now.0.saturating_sub(burst.0)) + cost.0);
        let mean = self.mean.min(MAX_COST).0;
        self.mean = if mean == 0 {
            cost
        } else {
            Nanos(mean - (mean >> MEAN_SHIFT) + (cost.0 >> MEAN_SHIFT))
        };
        self.finish
    }
}

/// A limit with its flows and its share law: what `bpf/edt.bpf.c` puts together.
#[derive(Debug, Clone)]
pub struct Limiter {
    config: VirtualQueueConfig,
    class: Class,
    flows: Vec<Flow>,
    /// How much idle time the class's finish time has skipped; what was charged is finish less this.
    skipped: u64,
    epoch: u32,
    epoch_start: Nanos,
    epoch_base: u64,
    epoch_length: Nanos,
    seen: u32,
    seen_before: u32,
    /// The largest packet of this epoch.
    largest_bytes: u32,
}

impl Limiter {
    /// A limit with `places` for flows.
    #[must_use]
    pub fn new(config: VirtualQueueConfig, places: usize) -> Limiter {
        Limiter {
            config,
            class: Class::new(),
            flows: alloc::vec![Flow::default(); places.max(1)],
            skipped: 0,
            epoch: 0,
            epoch_start: Nanos(0),
            epoch_base: 0,
            epoch_length: Nanos(0),
            seen: 0,
            seen_before: 0,
            largest_bytes: 0,
        }
    }

    /// What all flows share.
    #[must_use]
    pub fn class(&self) -> &Class {
        &self.class
    }

    /// Changes rate and thresholds; what is scheduled stays so.
    pub fn set_config(&mut self, config: VirtualQueueConfig) {
        self.config = config;
    }

    /// Judges a packet of the flow with this hash.
    pub fn on_packet(&mut self, now: Nanos, hash: usize, packet: &Packet) -> Departure {
        let places = self.flows.len();
        let flow = &mut self.flows[hash % places];
        let busy = flow.finish > now;
        let before = self.class.finish;
        let departure = self.class.on_packet(&self.config, flow, now, packet);
        if matches!(departure.verdict, Verdict::Drop(_)) {
            return departure;
        }
        let idle_since = now.0.saturating_sub(self.config.burst.0);
        self.skipped += idle_since.saturating_sub(before.0);
        self.largest_bytes = self.largest_bytes.max(packet.wire_bytes);
        // Epochs are numbered from one, so that a new place has been seen in none.
        let epoch = self.epoch + 1;
        if (busy || packet.wire_bytes > SMALL_BYTES) && flow.epoch != epoch {
            flow.epoch = epoch;
            self.seen += 1;
        }
        // Room is made for who wants it, not for a packet now and then.
        if busy && flow.room_epoch != epoch {
            flow.room_epoch = epoch;
            if self.seen > self.seen_before {
                self.class.share =
                    fair_share::make_room(self.class.share, &Sharers::flows(self.seen));
            }
        }
        self.turn_epoch(now);
        departure
    }

    fn turn_epoch(&mut self, now: Nanos) {
        let elapsed = Nanos(now.0.saturating_sub(self.epoch_start.0));
        if elapsed < self.epoch_length {
            return;
        }
        let base = self.class.finish.0 - self.skipped;
        let ahead = now.0 + self.class.lead(now).0;
        // Two rounds of the largest packet show every flow.
        let bytes = u64::from(self.largest_bytes.min(MAX_PACKET_BYTES)).max(2 * FRAME_BYTES);
        let epoch = Epoch {
            elapsed,
            charged: Nanos(base - self.epoch_base),
            backlog: Nanos(self.class.finish.0.saturating_sub(ahead)),
            rtt: Nanos(0),
            burst: Nanos((bytes * self.config.cost) >> COST_SHIFT),
            sharers: Sharers::flows(self.seen.max(self.seen_before)),
        };
        self.class.share = fair_share::next_share(self.class.share, &epoch);
        self.epoch_length = fair_share::epoch_length(self.seen, epoch.burst);
        self.epoch_start = now;
        self.epoch_base = base;
        self.seen_before = self.seen;
        self.seen = 0;
        self.largest_bytes = 0;
        self.epoch += 1;
    }
}

#[cfg(test)]
mod tests;
