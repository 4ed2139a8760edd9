//! Departure times: each packet gets the time at which it may leave, and the `fq` qdisc keeps it until then
//! (the `edt` scheme; Carousel, Saeed et al., SIGCOMM 2017, in the kernel).
//!
//! Carousel's rule is `LTS = max(LTS, now - burst) + len/rate`, and the packet leaves at `LTS`. One such time
//! for a whole limit is one big FIFO: a sender with a long backlog delays all others. Here every flow has its
//! own schedule, at its share of the limit, and a second time holds the limit as a whole:
//!
//! ```text
//!   flow:    finish = max(finish, now - burst) + len / (share x rate)        its own departure
//!   class:   total  = max(total,  now - burst) + len / rate                  what has been handed out
//!   packet:  leaves at max(finish, total - horizon - lead), lead = latest own departure - now
//! ```
//!
//! - A new flow's schedule is empty, so its first packets leave at once, however much others have queued.
//!   They leave *early*, on top of what the others have scheduled. `total` keeps the account, and the share
//!   law ([`crate::fair_share`]) gives less until it is even.
//! - Early departures are bounded: no packet leaves before `total - horizon - lead`. So a flood of flows with
//!   a packet each is one FIFO at the limit's rate, as it must be, and never more than the limit. In any time
//!   t at most `rate x (t + burst + horizon + lead)` leaves, where lead is the span of the flows' own
//!   schedules, 200 ms at most.
//! - The schedule of a flow reaches `horizon` ahead and no further. ECN-capable packets that wait longer than
//!   `mark` are marked; beyond the horizon a packet is dropped. TCP of this host is held back instead: it has
//!   at most two segments of 64 KB below it (TCP small queues), and sends the next when one has left. So its
//!   horizon is at least those two.
//! - Where nothing releases packets at their time (no `fq`), schedules still run into the horizon, and the
//!   rule becomes a policer.
//!
//! A finish time is the time at which the packet itself is paid, so a flow is never ahead of its schedule by
//! more than `burst` (at least one full frame). Each packet costs O(1); a flow is 32 bytes of state, a class
//! 24. The kernel's copy is `bpf/edt/edt.h`.

use alloc::vec::Vec;

use crate::{
    fair_share::{self, Epoch, Sharers},
    units::Nanos,
    verdict::{DropReason, Verdict},
    virtual_queue::{COST_SHIFT, MAX_PACKET_BYTES, SMALL_BYTES, VirtualQueueConfig},
};

/// A flow saves up at least one full frame.
pub const FRAME_BYTES: u64 = 1514;
/// The most that TCP small queues let a socket queue below it.
pub const HELD_BYTES: u64 = 2 * 70 * 1024;
/// By default `fq` holds 100 packets of a flow, and drops more.
pub const FLOW_PACKETS: u64 = 90;
/// The weight of a new packet in the mean is 2^-3.
pub const MEAN_SHIFT: u32 = 3;
/// No departure is later than this: beyond 10 s `fq` drops.
pub const MAX_DELAY: Nanos = Nanos(4_000_000_000);
/// The class may be ahead by what its flows have scheduled, but at most by this.
pub const MAX_LEAD: Nanos = Nanos(200_000_000);
/// Upper bound of what a packet costs its flow.
pub const MAX_COST: Nanos = Nanos(1 << 38);
/// Slots for flows. Flows in the same slot share it.
pub const FLOWS: usize = 4096;

/// The properties of a packet for the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Length on the wire with all headers of all its segments.
    pub wire_bytes: u32,
    /// Whether its IP header says ECT(0), ECT(1) or CE.
    pub ecn_capable: bool,
    /// TCP of a socket of this host, which sends no more before this has left.
    pub held: bool,
}

/// The outcome for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// [`Verdict::Pass`], [`Verdict::Mark`] or a drop.
    pub verdict: Verdict,
    /// The departure time; `now` or earlier is at once. Zero for a dropped packet.
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
    /// The last epoch in which it got room.
    room_epoch: u32,
}

/// The state that all flows of a limit share.
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

/// The cost of a packet to its flow, at the flow's share.
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

    /// Judges a packet of `flow`, and schedules it unless it is dropped. `config.drop` is the horizon.
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
        // A held sender waits for the class too. Otherwise it would only try again, and others would be
        // first.
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

/// A limit with its flows and its share law, as in `bpf/edt/edt.bpf.c`.
#[derive(Debug, Clone)]
pub struct Limiter {
    config: VirtualQueueConfig,
    class: Class,
    flows: Vec<Flow>,
    /// Idle time that the class's finish time has skipped; the charge is the finish time less this.
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
    /// A limit with `places` slots for flows.
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

    /// The state that all flows share.
    #[must_use]
    pub fn class(&self) -> &Class {
        &self.class
    }

    /// Changes rate and thresholds. Packets keep their schedule.
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
        // Epochs are numbered from one, so that a new slot has been seen in none.
        let epoch = self.epoch + 1;
        if (busy || packet.wire_bytes > SMALL_BYTES) && flow.epoch != epoch {
            flow.epoch = epoch;
            self.seen += 1;
        }
        // Room is made for a flow that wants it, not for a packet now and then.
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
