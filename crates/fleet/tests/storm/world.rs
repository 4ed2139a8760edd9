//! Whole nodes in seeded virtual time. After each event all that gates may pass is added up.

use std::{cell::RefCell, collections::BTreeMap, net::SocketAddr, path::Path, rc::Rc};

use tidegate_core::{Nanos, units::MIN_RATE_BIT_S};
use tidegate_fleet::{
    keys::KeyRing,
    node::{Node, NodeOptions},
    rates::with_ceilings,
};
use tidegate_host::{
    fleet::{Algorithm, CLOCK_ERROR_PPM, FleetSpec, GroupSpec},
    spec::Spec,
};
use tidegate_sim::{
    clock::Clock,
    net::{Net, NetOptions},
    queue::Queue,
    random::Random,
};

use super::host::{GateFault, Kernel, Limit, Load, Local, Shared};

pub const MS: u64 = 1_000_000;
/// As in the spec.
pub const LEASE: Nanos = Nanos(1_500 * MS);
/// Who leaves goes after this, whether it is done or not.
const LEAVE_PATIENCE: Nanos = Nanos(2_000 * MS);
const RATES_MBIT: [u64; 2] = [100, 60];

/// What a host is told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Which of [`RATES_MBIT`].
    pub rate: usize,
    /// How many of its limits are in the group.
    pub limits: usize,
}

/// How large a world is. The first hosts are acceptors.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub acceptors: usize,
    pub hosts: usize,
    /// Of each host.
    pub limits: usize,
}

pub struct Host {
    clock: Clock,
    pub node: Option<Node<Local, Local>>,
    pub kernel: Shared,
    /// How often it was started.
    lives: u64,
    timer: Nanos,
    /// Its process does nothing before this.
    pub busy: Nanos,
    pub plan: Plan,
    leaving: Option<Nanos>,
    /// What the process that runs, or ran last, was told.
    told: Plan,
    /// Since when nothing has been wrong that may keep its gates from their rates.
    sound: Nanos,
    /// Nobody runs who would give its gates their own part: its process has ended before it could set them,
    /// or a limit was put on anew since.
    is_left: bool,
    /// Since when its gates pass less than its own part.
    short: Option<Nanos>,
}

type Datagrams = Vec<(usize, Vec<u8>)>;

enum Happens {
    Timer(usize),
    Arrives {
        from: usize,
        to: usize,
        bytes: Vec<u8>,
    },
    /// A call took its time; what it says leaves if the process is still the same.
    Leaves {
        host: usize,
        life: u64,
        datagrams: Datagrams,
    },
}

/// A rule of a fleet is broken.
#[derive(Debug, Clone, PartialEq)]
pub enum Breach {
    /// More than the limit may pass: bit/s, of bit/s.
    Sum(u64, u64),
    /// A host has less than its own part: which, bit/s, of bit/s.
    Floor(usize, u64, u64),
    /// A rate was asked for that no scheme takes, in bit/s.
    Rate(u64),
}

pub struct World {
    pub algorithm: Algorithm,
    acceptors: usize,
    pub hosts: Vec<Host>,
    pub net: Net,
    pub random: Random,
    queue: Queue<Happens>,
    pub now: Nanos,
    /// The greatest rate that any host was told.
    bound: u64,
    pub breach: Option<(Nanos, Breach)>,
    /// What went wrong when, by name.
    pub log: Vec<(Nanos, String)>,
}

fn addr(host: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host as u8 + 1], 7946))
}

fn keys() -> KeyRing {
    KeyRing::parse(Path::new("k"), &format!("1 {}", "5a".repeat(32))).expect("a key")
}

impl World {
    pub fn new(seed: u64, algorithm: Algorithm, net: NetOptions, size: Size) -> World {
        let random = Random::new(seed);
        let Size { acceptors, hosts, limits } = size;
        let mut world = World {
            algorithm,
            acceptors,
            hosts: Vec::new(),
            net: Net::new(net, hosts),
            random,
            queue: Queue::default(),
            now: Nanos(0),
            bound: RATES_MBIT[0] * 1_000_000,
            breach: None,
            log: Vec::new(),
        };
        for host in 0..hosts {
            let plan = Plan { rate: 0, limits: if world.is_here(host) { limits } else { 0 } };
            let clock = Clock::new(&mut world.random, CLOCK_ERROR_PPM);
            world.hosts.push(Host {
                clock,
                node: None,
                kernel: Rc::new(RefCell::new(Kernel::default())),
                lives: 0,
                timer: Nanos(u64::MAX),
                busy: Nanos(0),
                plan,
                told: plan,
                leaving: None,
                sound: Nanos(0),
                is_left: false,
                short: None,
            });
            let alone = world.alone_bit_s(host) / limits as u64;
            for i in 0..plan.limits {
                let limit = Limit::new(alone, world.random.chance(0.5));
                let name = format!("l{i}");
                world.hosts[host].kernel.borrow_mut().limits.insert(name, limit);
            }
        }
        (0..hosts).for_each(|host| world.start(host));
        world
    }

    /// `ctb` has all its limits on the first host.
    fn is_here(&self, host: usize) -> bool {
        self.algorithm != Algorithm::Ctb || host == 0
    }

    fn spec(&self, host: usize) -> (FleetSpec, Vec<(GroupSpec, Vec<tidegate_core::Rate>)>) {
        let plan = self.hosts[host].plan;
        let quoted = |names: Vec<String>| {
            names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
        };
        let acceptors = quoted((0..self.acceptors).map(|i| format!("n{i}")).collect());
        let members = quoted((0..plan.limits).map(|i| format!("l{i}")).collect());
        let hosts = self.hosts.len();
        let more = match self.algorithm {
            Algorithm::Share => format!(
                "hosts = {hosts}\nreserve = \"1%\"\nlease = \"{}ms\"\nsuspect = \"{}ms\"",
                LEASE.0 / MS,
                LEASE.0 / MS
            ),
            Algorithm::Ctb => "center = \"n0\"".to_owned(),
            _ => format!("hosts = {hosts}"),
        };
        let mut text = format!(
            "[fleet]\nname = \"storm\"\nkeys = \"k\"\nacceptors = [{acceptors}]\n[[group]]\nname = \"up\"\n\
             rate = \"{}mbit\"\nalgorithm = \"{}\"\nmembers = [{members}]\ninterval = \"100ms\"\n{more}\n",
            RATES_MBIT[plan.rate], self.algorithm
        );
        for i in 0..plan.limits {
            text += &format!(
                "[[limit]]\nname = \"l{i}\"\nscope = {{ cgroup = \"l{i}\" }}\negress = \"100mbit\"\n"
            );
        }
        if plan.limits == 0 {
            // A node without limits still keeps for the others.
            text = text.replace("members = []\n", "");
            if self.algorithm != Algorithm::Share {
                text = text.split("[[group]]").next().unwrap_or_default().to_owned();
            }
        }
        let spec = Spec::parse("f", &text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let groups = with_ceilings(&spec);
        (spec.fleet.expect("a fleet"), groups)
    }

    /// What is a host's own in any case.
    fn alone_bit_s(&self, host: usize) -> u64 {
        self.spec(host).1.first().map_or(0, |(group, _)| group.alone_bit_s())
    }

    pub fn note(&mut self, what: String) {
        self.log.push((self.now, what));
    }

    /// Starts a node that does not run.
    pub fn start(&mut self, host: usize) {
        if self.hosts[host].node.is_some() {
            return;
        }
        let (fleet, groups) = self.spec(host);
        let all: Vec<_> = (0..self.hosts.len()).map(addr).collect();
        let mut seed = [0; 32];
        seed.chunks_mut(8).for_each(|part| part.copy_from_slice(&self.random.bits().to_le_bytes()));
        let low = self.random.below(1 << 29);
        let one = &mut self.hosts[host];
        one.lives += 1;
        let options = NodeOptions {
            fleet,
            name: format!("n{host}"),
            groups,
            keys: keys(),
            addr: addr(host),
            session: one.lives << 30 | low,
            seed,
        };
        let local = Local(one.kernel.clone());
        let now = one.clock.reads(self.now);
        let node = Node::new(now, options, local.clone(), local).expect("a good spec");
        one.node = Some(node);
        (one.timer, one.leaving, one.sound) = (Nanos(u64::MAX), None, self.now);
        (one.told, one.is_left) = (one.plan, false);
        self.enter(host);
        self.call(host, |node, now| node.discovered(now, "peers", &all));
    }

    /// SIGKILL.
    pub fn kill(&mut self, host: usize) {
        let is_there = self.random.chance(0.5);
        self.end(host);
        self.hosts[host].kernel.borrow_mut().disk.kill(is_there);
    }

    /// A process is no more. One that was not there changes nothing.
    fn end(&mut self, host: usize) {
        let one = &mut self.hosts[host];
        let now = one.clock.reads(self.now);
        let kernel = one.kernel.borrow();
        let is_unset =
            kernel.limits.values().take(one.told.limits).any(|limit| limit.is_unset(now));
        drop(kernel);
        one.is_left |= one.node.take().is_some() && is_unset;
    }

    /// SIGTERM.
    pub fn leave(&mut self, host: usize) {
        if self.hosts[host].busy > self.now {
            return;
        }
        self.hosts[host].leaving = Some(Nanos(self.now.0 + LEAVE_PATIENCE.0));
        self.call(host, |node, now| node.leave(now));
    }

    /// Has a host take another spec, now or at its next start. One that stands still takes none.
    pub fn reload(&mut self, host: usize, plan: Plan) {
        if self.hosts[host].node.is_some() && self.hosts[host].busy > self.now {
            return;
        }
        let plan =
            Plan { limits: plan.limits.min(self.hosts[host].kernel.borrow().limits.len()), ..plan };
        let own = RATES_MBIT[0] * 10_000 / self.hosts.len() as u64;
        self.hosts[host].plan = plan;
        self.hosts[host].sound = self.now;
        self.bound = self.bound.max(RATES_MBIT[plan.rate] * 1_000_000);
        let left = |kernel: &mut Kernel| {
            for limit in kernel.limits.values_mut().skip(plan.limits) {
                limit.enters = false;
                if limit.member.is_some() && limit.leaves.is_none() {
                    limit.leaves = Some(own);
                }
            }
        };
        left(&mut self.hosts[host].kernel.borrow_mut());
        let (fleet, groups) = self.spec(host);
        if self.hosts[host].node.is_some() {
            self.hosts[host].told = plan;
            self.enter(host);
        }
        self.call(host, |node, now| {
            node.reconfigure(now, fleet, &groups, &BTreeMap::new(), keys()).expect("a good spec");
        });
    }

    /// The node of a host is about to take limits into its group.
    fn enter(&mut self, host: usize) {
        let one = &self.hosts[host];
        let now = one.clock.reads(self.now);
        let kernel = &mut *one.kernel.borrow_mut();
        for limit in kernel.limits.values_mut().take(one.plan.limits) {
            if limit.leaves.is_some_and(|own| limit.passes(now) <= own) {
                limit.member = None;
            }
            (limit.enters, limit.leaves) = (limit.member.is_none(), None);
        }
    }

    /// A gate breaks, or is mended; one that was gone is put on again as `apply` does.
    pub fn break_gate(&mut self, host: usize, limit: usize, fault: GateFault) {
        let count = self.hosts[host].plan.limits.max(1) as u64;
        let alone = self.alone_bit_s(host) / count;
        self.hosts[host].sound = self.now;
        let one = &mut self.hosts[host];
        let now = one.clock.reads(self.now);
        let kernel = &mut *one.kernel.borrow_mut();
        let Some(limit) = kernel.limits.values_mut().nth(limit) else { return };
        if limit.fault == GateFault::Gone && fault != GateFault::Gone {
            one.is_left |= one.node.is_none();
            limit.put_on(alone);
            // One that a node has in its group counts again once that has set it.
            let is_in = limit.leaves.take().is_none() && limit.member.is_some();
            (limit.member, limit.enters) = (None, is_in || limit.enters);
        }
        limit.breaks(now, fault);
    }

    /// Somebody else changes limits of a host for so long.
    pub fn lock(&mut self, host: usize, lasts: Nanos) {
        let now = self.hosts[host].clock.reads(self.now);
        let until = Nanos(now.0 + lasts.0);
        (0..3).for_each(|limit| self.break_gate(host, limit, GateFault::Busy(until)));
    }

    pub fn load(&mut self, host: usize, limit: usize, load: Load) {
        let kernel = &mut *self.hosts[host].kernel.borrow_mut();
        if let Some(limit) = kernel.limits.values_mut().nth(limit) {
            limit.load = load;
        }
    }

    /// Calls a node, if it runs, and does what its caller must.
    fn call(&mut self, host: usize, f: impl FnOnce(&mut Node<Local, Local>, Nanos)) {
        self.look();
        let hosts = self.hosts.len();
        let one = &mut self.hosts[host];
        let now = one.clock.reads(self.now);
        let Some(node) = &mut one.node else { return };
        {
            let kernel = &mut *one.kernel.borrow_mut();
            (kernel.now, kernel.took) = (now, Nanos(0));
        }
        f(node, now);
        let ends = one.leaving.is_some_and(|until| self.now >= until || node.has_left());
        if ends {
            node.end(now);
        }
        let mut datagrams: Datagrams = Vec::new();
        while let Some((to, bytes)) = node.poll_transmit() {
            if let Some(to) = (0..hosts).find(|i| addr(*i) == to) {
                datagrams.push((to, bytes));
            }
        }
        let one = &mut self.hosts[host];
        let Some(node) = &mut one.node else { return };
        while node.poll_event().is_some() {}
        let deadline = node.next_deadline(now);
        let took = one.kernel.borrow().took;
        // By the host's clock, as what its gates do meanwhile.
        let over = match took.0 {
            0 => self.now,
            took => Nanos(one.clock.shows(Nanos(now.0 + took)).0 + 1),
        };
        one.busy = one.busy.max(over);
        if let Some(rate) = one.kernel.borrow_mut().illegal.pop() {
            self.breach.get_or_insert((self.now, Breach::Rate(rate)));
        }
        let wakes = one.leaving.unwrap_or(Nanos(u64::MAX));
        let at = one.clock.shows(deadline).min(wakes).max(Nanos(self.now.0 + 1)).max(one.busy);
        if at < one.timer || one.timer <= self.now {
            one.timer = at;
            self.queue.push(at, Happens::Timer(host));
        }
        let life = one.lives;
        if ends {
            self.end(host);
        }
        match took.0 {
            0 => self.send(host, datagrams),
            _ => self.queue.push(over, Happens::Leaves { host, life, datagrams }),
        }
        self.look();
    }

    fn send(&mut self, from: usize, datagrams: Datagrams) {
        for (to, bytes) in datagrams {
            let arrivals: Vec<_> = self.net.send(&mut self.random, self.now, from, to).collect();
            for at in arrivals {
                self.queue.push(at, Happens::Arrives { from, to, bytes: bytes.clone() });
            }
        }
    }

    /// What the limits of a host may pass, in bit/s.
    fn passes(&self, host: usize, of: impl Fn(&Limit) -> bool) -> u64 {
        let one = &self.hosts[host];
        let now = one.clock.reads(self.now);
        let kernel = one.kernel.borrow();
        let is_in = |limit: &Limit| {
            let leaves = limit.leaves.is_none_or(|own| limit.passes(now) > own);
            leaves && limit.member.is_some_and(|since| now >= since)
        };
        let limits = kernel.limits.values().filter(|limit| is_in(limit) && of(limit));
        limits.map(|limit| (limit.passes(now) as f64 * (1.0 - limit.drop)) as u64).sum()
    }

    /// How many limits of a host have entered their group beside one that could not be lowered.
    fn entered(&self, host: usize) -> u64 {
        let one = &self.hosts[host];
        one.kernel.borrow().entered(one.clock.reads(self.now), LEASE)
    }

    /// What limits may pass that want all they get, in bit/s.
    pub fn greedy_bit_s(&self) -> u64 {
        let is_greedy = |limit: &Limit| matches!(limit.load, Load::Greedy(_));
        (0..self.hosts.len()).map(|host| self.passes(host, is_greedy)).sum()
    }

    /// What each limit wants and may pass, in Mbit/s.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for (i, host) in self.hosts.iter().enumerate() {
            let now = host.clock.reads(self.now);
            let status = host.node.as_ref().map(|node| node.status(now));
            let group = status.as_ref().and_then(|status| status.groups.first());
            let alerts = status.as_ref().map(|status| status.alerts.join("; "));
            let flows = group.map(|g| g.limits.iter().map(|l| l.flows).collect::<Vec<_>>());
            let group = group.map(|g| (g.state.as_str(), g.share_bit_s as f64 / 1e6, g.epoch));
            text += &format!("\n    n{i} {group:?} {flows:?} {alerts:?}:");
            for limit in host.kernel.borrow().limits.values().filter(|l| l.member.is_some()) {
                text += &format!(" {:?} {:.3}", limit.load, limit.passes(now) as f64 / 1e6);
            }
        }
        text
    }

    /// The rules that hold at any time.
    fn look(&mut self) {
        if self.algorithm != Algorithm::Share || self.breach.is_some() {
            return;
        }
        let sum = (0..self.hosts.len()).map(|host| self.passes(host, |_| true)).sum();
        // No scheme takes less than the least rate, so a limit may enter with that when a gate of its host
        // that has all of the host's part cannot be lowered. That one's lease ends.
        let entered: u64 = (0..self.hosts.len()).map(|host| self.entered(host)).sum();
        let bound = self.bound + MIN_RATE_BIT_S * entered;
        if sum > bound {
            self.breach = Some((self.now, Breach::Sum(sum, bound)));
            self.note(format!("the sum is {sum}:{}", self.describe()));
        }
        for host in 0..self.hosts.len() {
            let one = &self.hosts[host];
            let kernel = one.kernel.borrow();
            let good = kernel.limits.values().all(|limit| limit.fault == GateFault::None);
            // What a gate that failed has, and what a change of the spec brings, takes a lease to end.
            let sound = good
                && !one.is_left
                && self.now.0 >= one.sound.0 + 2 * LEASE.0
                && one.busy <= self.now;
            // A division of the part among n limits may lose n - 1 bit/s, and the rates' fractions one each.
            let (count, own) = (one.told.limits, self.alone_bit_s_of(host));
            let floor = if count > 0 && sound { own - 2 * count as u64 } else { 0 };
            // Also of those that are about to enter.
            let now = one.clock.reads(self.now);
            let passes = kernel.limits.values().take(count).map(|limit| limit.passes(now)).sum();
            drop(kernel);
            if passes >= floor {
                self.hosts[host].short = None;
                continue;
            }
            // An idle limit rises when those that others count on have fallen: an eighth of a lease later.
            let since = *self.hosts[host].short.get_or_insert(self.now);
            if self.now.0 >= since.0 + LEASE.0 / 4 {
                self.breach = Some((self.now, Breach::Floor(host, passes, floor)));
            }
        }
    }

    /// As [`World::alone_bit_s`] with `share`, without reading a spec.
    fn alone_bit_s_of(&self, host: usize) -> u64 {
        RATES_MBIT[self.hosts[host].told.rate] * 10_000 / self.hosts.len() as u64
    }

    pub fn run_until(&mut self, end: Nanos) {
        while let Some((at, happens)) = self.queue.pop(end) {
            self.now = at;
            let (Happens::Timer(host)
            | Happens::Arrives { to: host, .. }
            | Happens::Leaves { host, .. }) = happens;
            if let Happens::Leaves { life, datagrams, .. } = happens {
                let one = &self.hosts[host];
                if one.lives == life && one.node.is_some() {
                    self.send(host, datagrams);
                }
                continue;
            }
            let one = &mut self.hosts[host];
            if one.busy > at {
                let is_timer = matches!(happens, Happens::Timer(_));
                if is_timer && one.timer != at {
                    continue;
                }
                if is_timer {
                    one.timer = one.busy;
                }
                self.queue.push(one.busy, happens);
                continue;
            }
            match happens {
                // One that was set before, and set earlier since.
                Happens::Timer(_) if one.timer != at => {}
                Happens::Timer(_) => self.call(host, |node, now| node.on_timer(now)),
                Happens::Arrives { from, bytes, .. } => {
                    self.call(host, |node, now| node.on_datagram(now, addr(from), &bytes));
                }
                Happens::Leaves { .. } => {}
            }
        }
        self.now = end;
    }
}
