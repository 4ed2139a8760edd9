//! A host: a limiter, what it measures, and what it tells.

use tidegate_core::fleet::{
    aggregate::{PushSum, VECTOR_MAX, Vector},
    flows::flow_hash,
    message::{Body, Mass, Message},
    share::{Event, Share},
};

use super::control::Measured;
use super::{
    ArrivalRate, Bytes, Control, FlowSample, Fps, FpsOptions, Gate, Grd, Gtb, MemberId, Nanos,
    PACKET_BYTES, Random, Scheme, Shaper, ShareOptions, TAU, TokenBucket, Verdict, WorldOptions,
};
use crate::{clock::Clock, gate::Waiting};

/// How others are added up.
#[derive(Debug)]
pub(super) enum Sum {
    Vector(Vector),
    /// The mean of all, and of how many; what was last added.
    Mean {
        push: Box<PushSum>,
        members: f64,
        own: f64,
    },
}

#[derive(Debug)]
pub(super) struct Host {
    id: MemberId,
    pub alive: bool,
    pub gate: Gate,
    pub arrivals: ArrivalRate,
    pub sample: FlowSample,
    pub sum: Sum,
    pub control: Control,
    pub clock: Clock,
    interval: Nanos,
    patience: u64,
    last_drop: Option<Nanos>,
    timer: Nanos,
    pub leaves: Nanos,
}

impl Host {
    pub fn new(options: &WorldOptions, host: usize, random: &mut Random) -> Host {
        let now = Nanos(0);
        let limit = options.limit;
        let bit_s = limit.bit_s();
        let part = bit_s as f64 / options.hosts as f64;
        let id = MemberId(host as u32);
        let fps = |limited_from| Fps::new(now, FpsOptions { limit, tau: TAU, limited_from }, part);
        let bucket = |bit_s: u64, depth: Bytes| Gate::Bucket(TokenBucket::new(now, bit_s, depth));
        let (gate, control) = match options.scheme {
            Scheme::Ctb => (bucket(bit_s, options.depth), Control::None),
            Scheme::Gtb => (Gate::Global(Gtb::new(now, limit, options.depth)), Control::Demand),
            Scheme::Grd => (Gate::Random(Grd::new(limit)), Control::Demand),
            Scheme::Fps => (bucket(part as u64, options.depth), Control::Fps(fps(1.0))),
            Scheme::FpsShaped => {
                (Gate::Shaper(Shaper::with_rate(part as u64)), Control::FpsShaped(fps(0.95)))
            }
            Scheme::Share => {
                let clock = Clock::new(random, options.share.rate_error_ppm);
                let of = ShareOptions { id, incarnation: 1, ..options.share.clone() };
                let share = Share::new(clock.reads(now), of, None).expect("good options");
                let gate = Gate::Shaper(Shaper::new(share.grant()));
                return Host {
                    clock,
                    ..Host::with(options, id, gate, Control::Share(Box::new(share)))
                };
            }
        };
        Host::with(options, id, gate, control)
    }

    fn with(options: &WorldOptions, id: MemberId, gate: Gate, control: Control) -> Host {
        let now = Nanos(0);
        let sum = if options.push_sum || options.hosts > VECTOR_MAX {
            let push = Box::new(PushSum::new(Mass { value: 0.0, weight: 1.0 }));
            Sum::Mean { push, members: options.hosts as f64, own: 0.0 }
        } else {
            Sum::Vector(Vector::new(id, 1, now))
        };
        Host {
            id,
            alive: true,
            gate,
            arrivals: ArrivalRate::new(now, TAU),
            sample: FlowSample::new(now, control.flow_tau()),
            sum,
            control,
            clock: Clock::new(&mut Random::new(0), 0),
            interval: options.interval,
            patience: (options.hosts as u64 / 8).max(10),
            last_drop: None,
            timer: Nanos(u64::MAX),
            leaves: Nanos(u64::MAX),
        }
    }

    /// A packet: dropped, passed, or held back until it comes out of [`Host::pop`].
    pub fn on_packet(&mut self, now: Nanos, packet: Waiting, random: u64) -> Verdict {
        self.arrivals.on_packet(PACKET_BYTES);
        // A shaper keeps the host's time, by which its grant ends.
        let local = self.clock.reads(now);
        let (verdict, sampled) = match &mut self.gate {
            Gate::Shaper(shaper) => {
                let verdict = shaper.offer(local, packet, PACKET_BYTES, random);
                (verdict, verdict.passes())
            }
            // As published: a flow's rate is measured before it is dropped.
            gate => (gate.on_packet(now, PACKET_BYTES, random), true),
        };
        if sampled {
            let flow = flow_hash(0, &[packet.flow as u64]);
            self.sample.on_packet(flow, PACKET_BYTES, random as u32);
        }
        if !verdict.passes() {
            self.last_drop = Some(now);
        }
        verdict
    }

    /// A packet that was held back and leaves now.
    pub fn pop(&mut self, now: Nanos) -> Option<Waiting> {
        let local = self.clock.reads(now);
        let Gate::Shaper(shaper) = &mut self.gate else { return None };
        shaper.pop(local)
    }

    /// When the next packet leaves, if that is not what was said last.
    pub fn rearm_gate(&mut self, now: Nanos) -> Option<Nanos> {
        let Gate::Shaper(shaper) = &self.gate else { return None };
        let at = self.clock.shows(shaper.next_departure()?).max(Nanos(now.0 + 1));
        (at != self.leaves).then(|| {
            self.leaves = at;
            at
        })
    }

    /// Ends an interval: what was measured goes to the controller, and its answer to the gate.
    pub fn measure(&mut self, now: Nanos) {
        let demand = self.arrivals.on_interval(now);
        self.sample.on_interval(now);
        // What is older counts nothing; a large fleet's news take longer.
        let fresh = Nanos(self.interval.0 * self.patience);
        let others = match &self.sum {
            Sum::Vector(vector) => vector.others(now, fresh),
            Sum::Mean { push, members, own } => {
                (push.estimate().unwrap_or(0.0) * members - own).max(0.0)
            }
        };
        let dropped = self.last_drop.is_some_and(|at| now.0 - at.0 < 1_000_000_000);
        let report = self.control.measure(
            now,
            self.clock,
            &mut self.gate,
            &Measured {
                demand_bit_s: demand,
                largest_bit_s: self.sample.rates().max_bit_s(),
                typical_bit_s: self.sample.rates().typical_bit_s(),
                others,
                dropped,
            },
        );
        match &mut self.sum {
            Sum::Vector(vector) => vector.set_own(now, report as f32),
            Sum::Mean { push, own, .. } => {
                push.add(report - *own);
                *own = report;
            }
        }
    }

    /// Whether it tells peers in its interval.
    pub fn gossips(&self) -> bool {
        !matches!(self.control, Control::None | Control::Share(_))
    }

    /// A message for a peer.
    pub fn news(&mut self, to: MemberId) -> Vec<u8> {
        let body = match &mut self.sum {
            Sum::Vector(vector) => Body::Values(vector.news()),
            Sum::Mean { push, .. } => {
                let (number, mass) = push.split(to);
                Body::Mass { number, mass }
            }
        };
        let mut bytes = Vec::new();
        Message { group: 1, from: self.id, incarnation: 1, body }.encode(&mut bytes);
        bytes
    }

    pub fn on_bytes(&mut self, now: Nanos, bytes: &[u8]) {
        let message = Message::decode(bytes).expect("what was encoded");
        match (&message.body, &mut self.sum) {
            (Body::Values(entries), Sum::Vector(vector)) => vector.on_values(now, entries),
            (Body::Mass { number, mass }, Sum::Mean { push, .. }) => {
                push.on_mass(message.from, *number, *mass);
            }
            _ => {
                if let Control::Share(share) = &mut self.control {
                    share.on_message(self.clock.reads(now), &message);
                }
            }
        }
    }

    /// Whether a timer was due.
    pub fn wakes(&mut self, now: Nanos) -> bool {
        if !self.alive || (self.timer != now && now.0 > 0) {
            return false;
        }
        self.timer = Nanos(u64::MAX);
        if let Control::Share(share) = &mut self.control {
            share.on_timer(self.clock.reads(now));
        }
        true
    }

    /// What `share` has to say, after the gate does as it says.
    pub fn outbox(&mut self, now: Nanos) -> Vec<(usize, Vec<u8>)> {
        let Control::Share(share) = &mut self.control else { return Vec::new() };
        while let Some(event) = share.poll_event() {
            if let Event::Store(saved) = event {
                share.on_stored(self.clock.reads(now), saved);
            }
        }
        if let Gate::Shaper(shaper) = &mut self.gate {
            shaper.set_grant(self.clock.reads(now), share.grant());
        }
        let mut out = Vec::new();
        while let Some(transmit) = share.poll_transmit(true) {
            let mut bytes = Vec::new();
            transmit.message.encode(&mut bytes);
            out.push((transmit.to.0 as usize, bytes));
        }
        out
    }

    /// When to wake, if that is earlier than was said before.
    pub fn rearm(&mut self, now: Nanos) -> Option<Nanos> {
        let Control::Share(share) = &self.control else { return None };
        let at = self.clock.shows(share.next_deadline()).max(Nanos(now.0 + 1));
        (at < self.timer).then(|| {
            self.timer = at;
            at
        })
    }

    pub fn local_limit(&self, now: Nanos) -> f64 {
        match &self.control {
            Control::Fps(fps) | Control::FpsShaped(fps) => fps.rate_bit_s(),
            Control::Share(share) if self.alive => share.grant().at(self.clock.reads(now)) as f64,
            _ => 0.0,
        }
    }
}
