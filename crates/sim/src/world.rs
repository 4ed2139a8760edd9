//! Hosts with limiters and TCP flows, packet by packet.
//!
//! A flow's packets reach the limiter of its host a quarter of the round trip after they were sent, and if
//! they pass, the sender has the acknowledgement three quarters after they left it. Limiters measure what
//! arrives, exchange what their scheme says, and set their gates.

use tidegate_core::{
    Nanos, Rate, Verdict,
    fleet::{
        MemberId,
        average::{ArrivalRate, TAU},
        ctb::TokenBucket,
        flows::FlowSample,
        fps::{Fps, FpsOptions},
        grd::Grd,
        gtb::Gtb,
        share::ShareOptions,
    },
    units::Bytes,
};

use crate::{
    gate::{Gate, PUBLISHED_DEPTH, Shaper, Waiting},
    measure::Bins,
    net::{Net, NetOptions},
    queue::Queue,
    random::Random,
    tcp::Sender,
};

mod control;
mod host;

use control::Control;
use host::Host;

/// Bytes of a packet on the wire.
pub const PACKET_BYTES: u32 = 1_500;

/// How the limiters work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// All flows meet the first host's bucket.
    Ctb,
    /// Buckets at the global rate, less what the others report.
    Gtb,
    /// One drop probability.
    Grd,
    /// Parts as large as the parts of the flows; buckets as published.
    Fps,
    /// The same with queues that shape, and the part of a flow that is typical, not the largest.
    FpsShaped,
    /// Capacity that moves and is conserved; queues that shape.
    Share,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FlowOptions {
    /// The host of its limiter.
    pub host: usize,
    pub start: Nanos,
    pub stop: Nanos,
    /// Round trip without queues.
    pub rtt: Nanos,
    /// The most it sends, in bit/s; none: all it can.
    pub bound_bit_s: Option<f64>,
}

#[derive(Debug, Clone)]
pub struct WorldOptions {
    /// The seed of everything.
    pub seed: u64,
    pub scheme: Scheme,
    /// Limiters.
    pub hosts: usize,
    /// The limit of all together.
    pub limit: Rate,
    pub flows: Vec<FlowOptions>,
    /// How often limiters measure and tell.
    pub interval: Nanos,
    /// How many peers a limiter tells; `share` asks its leader.
    pub branches: usize,
    /// Adds up by push-sum, as published, where a vector would do.
    pub push_sum: bool,
    /// Depth of each bucket.
    pub depth: Bytes,
    /// Between limiters.
    pub net: NetOptions,
    /// Of `share`.
    pub share: ShareOptions,
    /// How long the run is.
    pub lasts: Nanos,
}

impl WorldOptions {
    /// Cloud Control's baseline: two limiters, 10 Mbit/s, three flows at the one and seven at the other, 40
    /// ms between all. Flows start within the first 100 ms.
    pub fn baseline(seed: u64, scheme: Scheme, lasts: Nanos) -> WorldOptions {
        WorldOptions::two_limiters(seed, scheme, lasts, [3, 7])
    }

    /// The same with so many flows at each.
    pub fn two_limiters(
        seed: u64,
        scheme: Scheme,
        lasts: Nanos,
        flows: [usize; 2],
    ) -> WorldOptions {
        let share = crate::faults::share_options(2, 2);
        let mut options = WorldOptions {
            seed,
            scheme,
            hosts: 2,
            limit: share.limit,
            flows: Vec::new(),
            interval: Nanos(50_000_000),
            branches: 1,
            push_sum: false,
            depth: PUBLISHED_DEPTH,
            net: NetOptions::default(),
            share,
            lasts,
        };
        for (host, count) in flows.into_iter().enumerate() {
            options.add_flows(host, count, Nanos(0));
        }
        options
    }

    /// Adds greedy flows that start within 100 ms of `start`, with round trips of 40 ms give or take 1 ms:
    /// equal ones would lose and win in step.
    pub fn add_flows(&mut self, host: usize, count: usize, start: Nanos) {
        let mut random = Random::new(self.seed ^ (self.flows.len() as u64 + 1) << 32);
        for _ in 0..count {
            self.flows.push(FlowOptions {
                host,
                start: Nanos(start.0 + random.below(100_000_000)),
                stop: self.lasts,
                rtt: Nanos(39_000_000 + random.below(2_000_000)),
                bound_bit_s: None,
            });
        }
    }
}

#[derive(Debug)]
struct Flow {
    options: FlowOptions,
    sender: Sender,
    timer: Option<Nanos>,
    passed: Bins,
}

#[derive(Debug)]
enum Happens {
    Starts(usize),
    AtGate { flow: usize, number: u64, sent: Nanos },
    Leaves(usize),
    Acked { flow: usize, number: u64, sent: Nanos },
    TimesOut(usize),
    Ticks(usize),
    Wakes(usize),
    Arrives { to: usize, bytes: Vec<u8> },
    Stopped,
}

/// A run. See the [module](self).
#[derive(Debug)]
pub struct World {
    options: WorldOptions,
    random: Random,
    net: Net,
    queue: Queue<Happens>,
    now: Nanos,
    flows: Vec<Flow>,
    hosts: Vec<Host>,
    sent_bytes: u64,
    arrived: u64,
    dropped: u64,
}

impl World {
    /// A world at its start.
    pub fn new(options: WorldOptions) -> World {
        let mut random = Random::new(options.seed);
        let mut queue = Queue::default();
        let flow = |flow: &FlowOptions| {
            let packets = |bit_s: f64| bit_s * flow.rtt.0 as f64 / 8e9 / f64::from(PACKET_BYTES);
            let sender = Sender::new(flow.bound_bit_s.map(packets));
            Flow { options: *flow, sender, timer: None, passed: Bins::default() }
        };
        let flows: Vec<_> = options.flows.iter().map(flow).collect();
        for (i, flow) in flows.iter().enumerate() {
            queue.push(flow.options.start, Happens::Starts(i));
        }
        let hosts: Vec<_> =
            (0..options.hosts).map(|host| Host::new(&options, host, &mut random)).collect();
        for host in 0..options.hosts {
            // Limiters are not in step.
            queue.push(random.time(options.interval), Happens::Ticks(host));
            if options.scheme == Scheme::Share {
                queue.push(Nanos(0), Happens::Wakes(host));
            }
        }
        queue.push(options.lasts, Happens::Stopped);
        let net = Net::new(options.net, options.hosts);
        let (now, sent_bytes, arrived, dropped) = (Nanos(0), 0, 0, 0);
        World { options, random, net, queue, now, flows, hosts, sent_bytes, arrived, dropped }
    }

    /// The network between limiters.
    pub fn net(&mut self) -> &mut Net {
        &mut self.net
    }

    /// A limiter's process ends, and its flows with it.
    pub fn kill(&mut self, host: usize) {
        self.hosts[host].alive = false;
        for flow in self.flows.iter_mut().filter(|flow| flow.options.host == host) {
            flow.options.stop = self.now;
        }
    }

    pub fn finished(mut self) -> World {
        self.run_until(self.options.lasts);
        self
    }

    /// Goes on until a time.
    pub fn run_until(&mut self, end: Nanos) {
        while let Some((at, happens)) = self.queue.pop(end) {
            self.now = at;
            match happens {
                Happens::Starts(flow) => self.pump(flow),
                Happens::AtGate { flow, number, sent } => self.at_gate(flow, number, sent),
                Happens::Leaves(host) => {
                    if self.hosts[host].leaves == at {
                        while let Some(packet) = self.hosts[host].pop(at) {
                            self.leave(packet);
                        }
                        self.arm_gate(host);
                    }
                }
                Happens::Acked { flow, number, sent } => {
                    self.flows[flow].sender.on_ack(at, number, Nanos(at.0 - sent.0));
                    self.pump(flow);
                }
                Happens::TimesOut(flow) => {
                    self.flows[flow].timer = None;
                    self.flows[flow].sender.on_timer(at);
                    self.pump(flow);
                }
                Happens::Ticks(host) => {
                    let next = Nanos(at.0 + self.options.interval.0);
                    self.queue.push(next, Happens::Ticks(host));
                    self.tick(host);
                }
                Happens::Wakes(host) => {
                    if self.hosts[host].wakes(at) {
                        self.exchange(host);
                    }
                }
                Happens::Arrives { to, bytes } => {
                    if self.hosts[to].alive {
                        self.hosts[to].on_bytes(at, &bytes);
                        self.exchange(to);
                    }
                }
                Happens::Stopped => {}
            }
        }
        self.now = end;
    }

    /// Sends what a flow may send now.
    fn pump(&mut self, flow: usize) {
        let Flow { options, sender, timer, .. } = &mut self.flows[flow];
        if self.now >= options.stop {
            return;
        }
        let first = Nanos(options.rtt.0 / 4);
        // A host takes a moment for each packet, never the same.
        let mut at = self.now.0 + first.0;
        while let Some(number) = sender.poll_packet(self.now) {
            at += 5_000 + self.random.below(20_000);
            self.queue.push(Nanos(at), Happens::AtGate { flow, number, sent: self.now });
        }
        if let Some(deadline) = sender.deadline()
            && timer.is_none_or(|timer| timer > deadline)
        {
            *timer = Some(deadline);
            self.queue.push(deadline, Happens::TimesOut(flow));
        }
    }

    fn at_gate(&mut self, flow: usize, number: u64, sent: Nanos) {
        let host = self.flows[flow].options.host;
        let host = if self.options.scheme == Scheme::Ctb { 0 } else { host };
        let random = self.random.bits();
        self.arrived += 1;
        let packet = Waiting { flow, number, sent };
        let passes = self.hosts[host].on_packet(self.now, packet, random).passes();
        if !passes {
            self.dropped += 1;
        } else if matches!(self.hosts[host].gate, Gate::Shaper(_)) {
            self.arm_gate(host);
        } else {
            self.leave(packet);
        }
    }

    /// A packet leaves its limiter.
    fn leave(&mut self, packet: Waiting) {
        let Waiting { flow, number, sent } = packet;
        self.flows[flow].passed.add(self.now, PACKET_BYTES.into());
        let back = Nanos(self.now.0 + self.flows[flow].options.rtt.0 * 3 / 4);
        self.queue.push(back, Happens::Acked { flow, number, sent });
    }

    fn arm_gate(&mut self, host: usize) {
        if let Some(at) = self.hosts[host].rearm_gate(self.now) {
            self.queue.push(at, Happens::Leaves(host));
        }
    }

    /// Ends an interval at a limiter.
    fn tick(&mut self, host: usize) {
        if !self.hosts[host].alive {
            return;
        }
        self.hosts[host].measure(self.now);
        let peers = self.options.hosts as u64;
        if peers > 1 && self.hosts[host].gossips() {
            for _ in 0..self.options.branches.min(self.options.hosts - 1) {
                let to = (host as u64 + 1 + self.random.below(peers - 1)) % peers;
                let bytes = self.hosts[host].news(MemberId(to as u32));
                self.transmit(host, to as usize, bytes);
            }
        }
        self.exchange(host);
    }

    /// Carries what `share` has to say; the gate has it before.
    fn exchange(&mut self, host: usize) {
        for (to, bytes) in self.hosts[host].outbox(self.now) {
            self.transmit(host, to, bytes);
        }
        if let Some(at) = self.hosts[host].rearm(self.now) {
            self.queue.push(at, Happens::Wakes(host));
        }
        self.arm_gate(host);
    }

    fn transmit(&mut self, from: usize, to: usize, bytes: Vec<u8>) {
        self.sent_bytes += bytes.len() as u64 + crate::faults::DATAGRAM_BYTES;
        let arrivals: Vec<_> = self.net.send(&mut self.random, self.now, from, to).collect();
        for at in arrivals {
            self.queue.push(at, Happens::Arrives { to, bytes: bytes.clone() });
        }
    }

    /// What each flow passed.
    pub fn flows(&self) -> impl Iterator<Item = &Bins> {
        self.flows.iter().map(|flow| &flow.passed)
    }

    /// What each flow passed on average from `from` to the end, in bit/s.
    pub fn rates(&self, from: Nanos) -> Vec<f64> {
        self.flows().map(|flow| flow.rate(from, self.options.lasts)).collect()
    }

    /// What all flows passed.
    pub fn total(&self) -> Bins {
        let mut all = Bins::default();
        self.flows().for_each(|flow| all.merge(flow));
        all
    }

    /// The part of packets that were dropped.
    pub fn drops(&self) -> f64 {
        self.dropped as f64 / self.arrived.max(1) as f64
    }

    /// Messages between limiters, headers and seals included, as a part of the limit.
    pub fn overhead(&self) -> f64 {
        let bit_s = self.sent_bytes as f64 * 8e9 / self.now.0.max(1) as f64;
        bit_s / self.options.limit.bit_s() as f64
    }

    /// What the gate of a limiter is set to now, in bit/s.
    pub fn local_limit(&self, host: usize) -> f64 {
        self.hosts[host].local_limit(self.now)
    }
}
