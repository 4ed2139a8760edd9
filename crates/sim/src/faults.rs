//! A fleet of `share` without packets, and everything that can go wrong with it.
//!
//! After each event the local limits of all members are added up, those of the dead and of the cut off too: a
//! gate goes on with what it was granted until the grant ends by its host's clock, whatever became of the
//! process. Messages are encoded, counted and decoded. [`Fleet::breach`] tells of the first time at which the
//! sum was above the limit.

use std::collections::BTreeMap;

use tidegate_core::{
    Nanos,
    fleet::{
        MemberId,
        level::Want,
        message::Message,
        share::{Event, Grant, Saved, Share, ShareOptions},
    },
};

use crate::{
    clock::Clock,
    net::{Net, NetOptions},
    queue::Queue,
    random::Random,
};

/// What a datagram of the daemon adds to a message: IPv4 and UDP headers, 28 bytes, its own header, 26, a
/// tag, 16, and the head of a frame, 3; less the sender, 10, which the header says; and 6 since members'
/// numbers there are not small.
pub const DATAGRAM_BYTES: u64 = 69;

#[derive(Debug, Clone)]
pub struct FleetOptions {
    /// The seed of everything.
    pub seed: u64,
    /// Members at the start; their ids are their places.
    pub members: usize,
    /// The network at the start.
    pub net: NetOptions,
    /// The options of all members, except for `id` and `incarnation`.
    pub share: ShareOptions,
}

#[derive(Debug)]
struct Host {
    clock: Clock,
    share: Option<Share>,
    incarnation: u64,
    /// Storage, which survives the process.
    saved: Option<Saved>,
    gate: Grant,
    /// What the gate passes now, as far as it was added up.
    counted: u64,
    expires: Option<Nanos>,
    timer: Nanos,
    paused: Nanos,
    want: Want,
}

#[derive(Debug)]
enum Happens {
    Timer(usize),
    Arrives { to: usize, bytes: Vec<u8> },
    Expires(usize),
}

/// The limit was exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breach {
    pub at: Nanos,
    /// What the local limits added up to, in bit/s.
    pub sum_bit_s: u64,
}

/// A running fleet. See the [module](self).
#[derive(Debug)]
pub struct Fleet {
    options: ShareOptions,
    random: Random,
    net: Net,
    hosts: Vec<Host>,
    queue: Queue<Happens>,
    now: Nanos,
    sum: u64,
    breach: Option<Breach>,
    sent_bytes: u64,
    sent_messages: u64,
    entered: BTreeMap<usize, u64>,
}

impl Fleet {
    /// All members start within the first 10 ms.
    ///
    /// # Panics
    /// If the options are none; they are the caller's, not input.
    pub fn new(options: FleetOptions) -> Fleet {
        let FleetOptions { seed, members, net, share } = options;
        let mut fleet = Fleet {
            options: share,
            random: Random::new(seed),
            net: Net::new(net, members),
            hosts: Vec::new(),
            queue: Queue::default(),
            now: Nanos(0),
            sum: 0,
            breach: None,
            sent_bytes: 0,
            sent_messages: 0,
            entered: BTreeMap::new(),
        };
        for _ in 0..members {
            let clock = Clock::new(&mut fleet.random, fleet.options.rate_error_ppm);
            let gate = Grant { bit_s: 0, until: Nanos(0), floor_bit_s: 0 };
            fleet.hosts.push(Host {
                clock,
                share: None,
                incarnation: 0,
                saved: None,
                gate,
                counted: 0,
                expires: None,
                timer: Nanos(u64::MAX),
                paused: Nanos(0),
                want: Want::default(),
            });
        }
        for host in 0..members {
            fleet.start(host);
        }
        fleet
    }

    /// Starts a member that does not run; with what it stored.
    pub fn start(&mut self, host: usize) {
        if self.hosts[host].share.is_some() {
            return;
        }
        self.hosts[host].incarnation += 1;
        let Host { incarnation, saved, clock, want, .. } = &self.hosts[host];
        let id = MemberId(host as u32);
        let options = ShareOptions { id, incarnation: *incarnation, ..self.options.clone() };
        let started = Nanos(self.now.0 + self.random.below(10_000_000));
        let mut share = Share::new(clock.reads(started), options, *saved).expect("good options");
        share.set_want(clock.reads(started), *want);
        self.hosts[host].share = Some(share);
        self.hosts[host].timer = started;
        self.queue.push(started, Happens::Timer(host));
    }

    /// Ends a member's process; its gate goes on as granted.
    pub fn kill(&mut self, host: usize) {
        self.hosts[host].share = None;
    }

    /// Stops a member's process for a while; its gate goes on as granted.
    pub fn pause(&mut self, host: usize, time: Nanos) {
        self.hosts[host].paused = Nanos(self.now.0 + time.0);
    }

    /// A member gives back what it has and goes.
    pub fn leave(&mut self, host: usize) {
        let reading = self.hosts[host].clock.reads(self.now);
        if let Some(share) = &mut self.hosts[host].share {
            share.leave(reading);
        }
        self.step(host);
    }

    /// What a member's flows want.
    pub fn set_want(&mut self, host: usize, want: Want) {
        let reading = self.hosts[host].clock.reads(self.now);
        self.hosts[host].want = want;
        if let Some(share) = &mut self.hosts[host].share {
            share.set_want(reading, want);
        }
        self.step(host);
    }

    /// The network, to be cut and healed.
    pub fn net(&mut self) -> &mut Net {
        &mut self.net
    }

    /// The source of chance.
    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    /// The time of the simulation.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// How many members there are, running or not.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// Whether there is no member.
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// Whether a member runs.
    pub fn runs(&self, host: usize) -> bool {
        self.hosts[host].share.is_some()
    }

    /// Whether a member divides the limit.
    pub fn audits(&self, host: usize) -> bool {
        self.hosts[host].share.as_ref().is_some_and(Share::is_leader)
    }

    /// What a member's gate passes now, in bit/s.
    pub fn passes(&self, host: usize) -> u64 {
        self.hosts[host].counted
    }

    /// What the gates of members that run pass now, in bit/s.
    pub fn in_use(&self) -> u64 {
        (0..self.len()).filter(|host| self.runs(*host)).map(|host| self.passes(host)).sum()
    }

    /// What all gates pass now, in bit/s.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The first time at which the sum was above the limit, if there was one.
    pub fn breach(&self) -> Option<Breach> {
        self.breach
    }

    /// Bytes that were sent, with [`DATAGRAM_BYTES`] for each message, and messages.
    pub fn sent(&self) -> (u64, u64) {
        (self.sent_bytes, self.sent_messages)
    }

    /// How many epochs a member entered.
    pub fn epochs(&self, host: usize) -> u64 {
        self.entered.get(&host).copied().unwrap_or(0)
    }

    /// Goes on until a time.
    pub fn run_until(&mut self, end: Nanos) {
        while let Some((at, happens)) = self.queue.pop(end) {
            self.now = at;
            let host = match &happens {
                Happens::Timer(host) | Happens::Expires(host) => *host,
                Happens::Arrives { to, .. } => *to,
            };
            if let Happens::Expires(host) = happens {
                self.hosts[host].expires = None;
                self.add_up(host);
                continue;
            }
            let Host { timer, paused, .. } = &mut self.hosts[host];
            if *paused > at {
                if matches!(happens, Happens::Timer(_)) && *timer == at {
                    *timer = *paused;
                }
                self.queue.push(*paused, happens);
                continue;
            }
            let Host { clock, share, timer, .. } = &mut self.hosts[host];
            let (reading, Some(share)) = (clock.reads(at), share) else { continue };
            match happens {
                // One that was set before, and set earlier since.
                Happens::Timer(_) if *timer != at => continue,
                Happens::Timer(_) => {
                    *timer = Nanos(u64::MAX);
                    share.on_timer(reading);
                }
                Happens::Arrives { bytes, .. } => {
                    let message = Message::decode(&bytes).expect("what was encoded");
                    share.on_message(reading, &message);
                }
                Happens::Expires(_) => {}
            }
            self.step(host);
        }
        self.now = end;
    }

    /// What a caller of `share` must do after every call, in this order.
    fn step(&mut self, host: usize) {
        let Host { share, saved, gate, clock, .. } = &mut self.hosts[host];
        let Some(share) = share else { return };
        let now = clock.reads(self.now);
        let mut left = false;
        while let Some(event) = share.poll_event() {
            match event {
                Event::Store(promises) => {
                    *saved = Some(promises);
                    share.on_stored(now, promises);
                }
                Event::Entered(_) => *self.entered.entry(host).or_insert(0) += 1,
                Event::Left => left = true,
            }
        }
        *gate = share.grant();
        self.add_up(host);
        let Some(share) = &mut self.hosts[host].share else { return };
        let mut out = Vec::new();
        while let Some(transmit) = share.poll_transmit(true) {
            out.push(transmit);
        }
        let deadline = share.next_deadline();
        for transmit in out {
            let mut bytes = Vec::new();
            transmit.message.encode(&mut bytes);
            self.sent_bytes += bytes.len() as u64 + DATAGRAM_BYTES;
            self.sent_messages += 1;
            let to = transmit.to.0 as usize;
            let now = self.now;
            let arrivals: Vec<_> = self.net.send(&mut self.random, now, host, to).collect();
            for at in arrivals {
                self.queue.push(at, Happens::Arrives { to, bytes: bytes.clone() });
            }
        }
        if left {
            self.kill(host);
            return;
        }
        let at = self.hosts[host].clock.shows(deadline).max(Nanos(self.now.0 + 1));
        if at < self.hosts[host].timer {
            self.hosts[host].timer = at;
            self.queue.push(at, Happens::Timer(host));
        }
    }

    /// Adds up what all gates pass, after one may have changed.
    fn add_up(&mut self, host: usize) {
        let Host { clock, gate, counted, expires, .. } = &mut self.hosts[host];
        let passes = gate.at(clock.reads(self.now));
        self.sum = self.sum - *counted + passes;
        *counted = passes;
        if passes > gate.floor_bit_s && expires.is_none() {
            let at = clock.shows(gate.until);
            *expires = Some(at);
            self.queue.push(at, Happens::Expires(host));
        }
        if self.sum > self.options.limit.bit_s() && self.breach.is_none() {
            self.breach = Some(Breach { at: self.now, sum_bit_s: self.sum });
        }
    }
}

/// Everything that can go wrong, one thing after the other; then the network is mended and the acceptors run,
/// and after a while the members that run must have all there is again. Members, acceptors, clocks and votes
/// are drawn from the seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Storm {
    /// The seed of everything.
    pub seed: u64,
    /// The loss during the storm, 0 to 1.
    pub loss: f64,
    /// How long it lasts.
    pub lasts: Nanos,
    /// How long it takes at most to mend.
    pub mends: Nanos,
}

/// What a storm left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Aftermath {
    /// If the limit was exceeded.
    pub breach: Option<Breach>,
    /// The part of the limit that members that run have at the end, 0 to 1.
    pub in_use: f64,
    /// The mean of that part during the storm.
    pub mean_in_use: f64,
    /// Epochs that the first member entered.
    pub epochs: u64,
}

impl Storm {
    pub fn run(&self) -> Aftermath {
        let mut draw = Random::new(self.seed ^ 0x5707);
        let acceptors = 1 + draw.below(5) as usize;
        let members = acceptors + draw.below(8) as usize;
        let mut share = share_options(acceptors, members as u32);
        // Also clocks that are much worse than any.
        share.rate_error_ppm = if draw.chance(0.5) { 1_000 } else { 50_000 };
        if draw.chance(0.3) {
            share.acceptors[0].votes = 2;
        }
        let bad = NetOptions {
            delay: Nanos(1_000_000 + draw.below(60_000_000)),
            jitter: Nanos(draw.below(60_000_000)),
            loss: self.loss,
            duplicate: 0.1,
            late: 0.05,
            late_by: Nanos(3_000_000_000),
        };
        let options = FleetOptions { seed: self.seed, members, net: bad, share };
        let limit = options.share.limit.bit_s() as f64;
        let mut fleet = Fleet::new(options);
        let (mut used, mut steps) = (0.0, 0.0);
        while fleet.now() < self.lasts {
            let pause = Nanos(20_000_000 + draw.below(1_500_000_000));
            let end = Nanos((fleet.now().0 + pause.0).min(self.lasts.0));
            fleet.run_until(end);
            used += fleet.in_use() as f64 / limit;
            steps += 1.0;
            strike(&mut fleet, &mut draw);
        }
        fleet.net().heal();
        fleet.net().set_options(NetOptions { loss: self.loss.min(0.1), ..NetOptions::default() });
        // Again later: some are just leaving.
        for wait in [0, self.mends.0 / 3] {
            fleet.run_until(Nanos(self.lasts.0 + wait));
            (0..acceptors).for_each(|host| fleet.start(host));
        }
        fleet.run_until(Nanos(self.lasts.0 + self.mends.0));
        Aftermath {
            breach: fleet.breach(),
            in_use: fleet.in_use() as f64 / limit,
            mean_in_use: used / steps,
            epochs: fleet.epochs(0),
        }
    }
}

/// The options of all members, the first `acceptors` of them acceptors: 10 Mbit/s, asked ten times a second.
pub fn share_options(acceptors: usize, members_max: u32) -> ShareOptions {
    use tidegate_core::{Rate, fleet::share::Acceptor};
    let acceptor = |id: usize| Acceptor { id: MemberId(id as u32), votes: 1 };
    ShareOptions {
        group: 1,
        id: MemberId(0),
        incarnation: 0,
        limit: Rate::from_bit_s(10_000_000).expect("not zero"),
        reserve_per_mille: 10,
        members_max,
        acceptors: (0..acceptors).map(acceptor).collect(),
        interval: Nanos(100_000_000),
        lease: Nanos(1_500_000_000),
        suspect: Nanos(1_500_000_000),
        rate_error_ppm: 1_000,
    }
}

/// Something goes wrong, or is mended.
fn strike(fleet: &mut Fleet, draw: &mut Random) {
    let host = draw.below(fleet.len() as u64) as usize;
    match draw.below(12) {
        0 | 1 => fleet.kill(host),
        2..=4 => (0..fleet.len()).for_each(|host| fleet.start(host)),
        5 => {
            for host in 0..fleet.len() {
                let group = draw.below(2) as u8;
                fleet.net().cut(host, group);
            }
        }
        6 => fleet.net().cut(host, 9),
        7 => {
            let other = draw.below(fleet.len() as u64) as usize;
            fleet.net().deafen(host, other);
        }
        8 => fleet.net().heal(),
        9 => fleet.pause(host, Nanos(draw.below(4_000_000_000))),
        10 => fleet.leave(host),
        _ => {
            for host in 0..fleet.len() {
                let flows = draw.below(20) as f32 / 2.0;
                let demand_bit_s = if draw.chance(0.5) { u64::MAX } else { draw.below(12_000_000) };
                fleet.set_want(host, Want { flows, demand_bit_s });
            }
        }
    }
}
