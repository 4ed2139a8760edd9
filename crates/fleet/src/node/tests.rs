//! Whole nodes in virtual time: backend and storage are fakes, the network loses, delays and is cut, and each
//! node has a clock of its own.

use std::{cell::RefCell, collections::BTreeMap, path::Path, rc::Rc};

use proptest::prelude::{ProptestConfig, prop, prop_assert, proptest};
use rand::Rng as _;
use tidegate_core::{
    fleet::share::Saved,
    units::{MAX_RATE_BIT_S, MIN_RATE_BIT_S},
};
use tidegate_host::spec::Spec;
use tidegate_sys::limit::Lease;

use super::*;
use crate::{
    backend::{Done, Place, Sample},
    seal::{Cause, VERSION, open},
    status::NodeStatus,
    storage::Stored,
};

mod identity;
mod lent;
mod refusals;
mod storage;

const SECOND: u64 = 1_000_000_000;
const STEP: u64 = 5_000_000;

/// Traffic at a limit that a shaper holds: so many flows take all they get, or a bound.
#[derive(Debug, Default, Clone)]
struct Load {
    flows: u32,
    bound_bit_s: Option<u64>,
    rate_bit_s: u64,
    lease: Option<Lease>,
    /// Senders that are told their rate: what each has heard of by now.
    paces_bit_s: Option<f64>,
    measured: Option<Nanos>,
    drop: f64,
    broken: bool,
    gone: bool,
    /// Its rate can be read and not be set.
    stuck: bool,
    /// It can be set and not be read.
    blind: bool,
    /// How often it was to be set.
    asked: u64,
    /// The greatest rate that was ever set.
    most_bit_s: u64,
}

impl Load {
    /// What paced senders send in all. Each doubles when it has sent two packets, up to its part.
    fn hear(&mut self, elapsed_ns: u64) -> u64 {
        let (flows, rate) = (f64::from(self.flows), self.rate_bit_s as f64);
        let Some(paces) = &mut self.paces_bit_s else { return u64::MAX };
        let doublings = elapsed_ns as f64 / 1e9 * *paces / (2.0 * 12_112.0);
        *paces = (*paces * doublings.min(1.0).exp2()).min(rate / flows);
        (*paces * flows) as u64
    }

    /// What is in force, as a limit has it that looks at the time.
    fn rate_bit_s(&self, now: Nanos) -> u64 {
        let ended = self.lease.filter(|lease| lease.until <= now);
        ended.map_or(self.rate_bit_s, |lease| lease.then.bit_s())
    }
}

type Loads = Rc<RefCell<BTreeMap<String, Load>>>;

#[derive(Debug, Clone)]
struct Fake {
    loads: Loads,
    can_drop: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("injected fault")]
struct Fault;

impl GroupBackend for Fake {
    type Error = Fault;

    fn measure(&mut self, now: Nanos, place: &Place) -> Result<Option<Sample>, Fault> {
        let mut loads = self.loads.borrow_mut();
        let load = loads.get_mut(&place.limit).unwrap();
        if load.broken || load.blind {
            return Err(Fault);
        }
        if load.gone {
            return Ok(None);
        }
        let elapsed = load.measured.replace(now).map_or(0, |at| now.0 - at.0);
        let rate = load.rate_bit_s(now);
        let demand = load.bound_bit_s.unwrap_or(u64::MAX).min(rate);
        let demand = if load.flows == 0 { 0 } else { demand };
        let demand = demand.min(load.hear(elapsed));
        let arrived_bytes = (u128::from(demand) * u128::from(elapsed) / 8 / 1_000_000_000) as u64;
        Ok(Some(Sample {
            flow_count: None,
            arrived_bytes,
            slowed_bytes: 0,
            flows: vec![],
            flow_bit_s: (load.flows > 0).then(|| demand / u64::from(load.flows)),
            rate_bit_s: rate,
            until: load.lease.map(|lease| lease.until).filter(|until| *until > now),
        }))
    }

    fn set_rate(&mut self, place: &Place, rate: Rate, lease: Option<Lease>) -> Result<Done, Fault> {
        let mut loads = self.loads.borrow_mut();
        let load = loads.get_mut(&place.limit).unwrap();
        if load.broken {
            return Err(Fault);
        }
        if load.gone {
            return Ok(Done::Gone);
        }
        load.asked += 1;
        let takes = MIN_RATE_BIT_S..=MAX_RATE_BIT_S;
        let then = lease.map_or(rate, |lease| lease.then);
        if load.stuck || !takes.contains(&rate.bit_s()) || !takes.contains(&then.bit_s()) {
            return Err(Fault);
        }
        (load.rate_bit_s, load.lease) = (rate.bit_s(), lease);
        load.most_bit_s = load.most_bit_s.max(rate.bit_s());
        Ok(Done::Set)
    }

    fn set_drop(&mut self, place: &Place, probability: f64) -> Result<Done, Fault> {
        if !self.can_drop {
            return Ok(Done::Cannot);
        }
        self.loads.borrow_mut().get_mut(&place.limit).unwrap().drop = probability;
        Ok(Done::Set)
    }

    fn leave(&mut self, place: &Place) -> Result<(), Fault> {
        self.loads.borrow_mut().get_mut(&place.limit).unwrap().drop = 0.0;
        Ok(())
    }
}

#[derive(Debug, Default, Clone)]
struct Memory {
    saved: Rc<RefCell<BTreeMap<String, Saved>>>,
    full: Rc<RefCell<bool>>,
    /// Writes are not finished before [`Memory::finish`].
    slow: Rc<RefCell<bool>>,
    writing: Rc<RefCell<BTreeMap<String, Saved>>>,
    tries: Rc<RefCell<u64>>,
}

impl Memory {
    fn finish(&self) {
        self.saved.borrow_mut().append(&mut self.writing.borrow_mut());
    }
}

impl Storage for Memory {
    fn load(&mut self, group: &str) -> Result<Option<Saved>, StorageError> {
        Ok(self.saved.borrow().get(group).copied())
    }

    fn save(&mut self, group: &str, saved: Saved) -> Result<Stored, StorageError> {
        if *self.full.borrow() {
            let tries = &mut *self.tries.borrow_mut();
            *tries += 1;
            // Being written, in vain.
            if *self.slow.borrow() && tries.is_multiple_of(2) {
                return Ok(Stored::Pending);
            }
            let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(StorageError { path: "state".into(), source });
        }
        if *self.slow.borrow() && self.saved.borrow().get(group) != Some(&saved) {
            self.writing.borrow_mut().insert(group.to_owned(), saved);
            return Ok(Stored::Pending);
        }
        self.saved.borrow_mut().insert(group.to_owned(), saved);
        Ok(Stored::Durably)
    }
}

struct Host {
    node: Option<Node<Fake, Memory>>,
    loads: Loads,
    memory: Memory,
    /// How far its clock is ahead of the first one's.
    skew: u64,
    session: u64,
    side: u8,
    said: Vec<String>,
}

struct Fleet {
    hosts: Vec<Host>,
    wire: Vec<(u64, SocketAddr, SocketAddr, Vec<u8>)>,
    recorded: Vec<(SocketAddr, SocketAddr, Vec<u8>)>,
    now: u64,
    random: SmallRng,
    loss: f64,
    text: String,
}

fn addr(i: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, i as u8 + 1], 7946))
}

fn ring(byte: u8) -> KeyRing {
    let line = format!("1 {}", format!("{byte:02x}").repeat(32));
    KeyRing::parse(Path::new("k"), &line).unwrap()
}

fn text(group: &str) -> String {
    format!(
        "[fleet]\nname = \"prod\"\nkeys = \"k\"\nacceptors = [\"n0\", \"n1\", \"n2\"]\n\
         [[limit]]\nname = \"a\"\nscope = {{ cgroup = \"a\" }}\negress = \"10mbit\"\n\
         [[group]]\nname = \"up\"\nrate = \"10mbit\"\nmembers = [\"a\"]\ninterval = \"100ms\"\n{group}\n"
    )
}

const SHARE: &str =
    "algorithm = \"share\"\nhosts = 4\nreserve = \"4%\"\nlease = \"1.5s\"\nsuspect = \"1.5s\"";

fn groups(text: &str) -> (FleetSpec, Vec<(GroupSpec, Vec<Rate>)>) {
    let spec = Spec::parse("f", text).unwrap();
    let rate = |name: &String| {
        let limit = spec.limits.iter().find(|limit| limit.name == *name).unwrap();
        limit.options.egress.unwrap().rate
    };
    let groups = spec.groups.iter().map(|g| (g.clone(), g.members.iter().map(rate).collect()));
    (spec.fleet.clone().unwrap(), groups.collect())
}

impl Fleet {
    fn new(hosts: usize, group: &str) -> Fleet {
        let mut fleet = Fleet {
            hosts: vec![],
            wire: vec![],
            recorded: vec![],
            now: SECOND,
            random: SmallRng::seed_from_u64(7),
            loss: 0.0,
            text: text(group),
        };
        for i in 0..hosts {
            let load = Load { flows: 1, rate_bit_s: 1_000_000, ..Load::default() };
            fleet.hosts.push(Host {
                node: None,
                loads: Rc::new(RefCell::new(BTreeMap::from([("a".to_owned(), load)]))),
                memory: Memory::default(),
                // Minutes apart, on both sides.
                skew: (i as u64 * 7 + 1) * 60 * SECOND,
                session: 0,
                side: 0,
                said: vec![],
            });
            fleet.start(i, &format!("n{i}"), ring(1), true);
        }
        fleet
    }

    fn start(&mut self, i: usize, name: &str, keys: KeyRing, can_drop: bool) {
        let (fleet, groups) = groups(&self.text);
        let all: Vec<_> = (0..8).map(addr).collect();
        let host = &mut self.hosts[i];
        host.session += 1 << 32;
        let mut seed = [0; 32];
        self.random.fill(&mut seed);
        let options = NodeOptions {
            fleet,
            name: name.to_owned(),
            groups,
            keys,
            addr: addr(i),
            session: host.session,
            seed,
        };
        let backend = Fake { loads: host.loads.clone(), can_drop };
        let now = Nanos(self.now + host.skew);
        let mut node = Node::new(now, options, backend, host.memory.clone()).unwrap();
        node.discovered(now, "peers", &all);
        host.node = Some(node);
    }

    fn run(&mut self, seconds: f64) {
        let end = self.now + (seconds * SECOND as f64) as u64;
        while self.now < end {
            self.now += STEP;
            for i in 0..self.hosts.len() {
                let now = Nanos(self.now + self.hosts[i].skew);
                if let Some(node) = &mut self.hosts[i].node
                    && node.next_deadline(now) <= now
                {
                    node.on_timer(now);
                }
                self.collect(i);
            }
            let (due, later) =
                std::mem::take(&mut self.wire).into_iter().partition(|(at, ..)| *at <= self.now);
            self.wire = later;
            let due: Vec<_> = due;
            for (_, from, to, bytes) in due {
                let at = |a: SocketAddr| (0..self.hosts.len()).find(|i| addr(*i) == a);
                let (Some(source), Some(i)) = (at(from), at(to)) else { continue };
                if self.hosts[source].side != self.hosts[i].side {
                    continue;
                }
                let now = Nanos(self.now + self.hosts[i].skew);
                if let Some(node) = &mut self.hosts[i].node {
                    node.on_datagram(now, from, &bytes);
                }
                self.collect(i);
            }
        }
    }

    fn collect(&mut self, i: usize) {
        let Host { node, said, .. } = &mut self.hosts[i];
        let Some(node) = node else { return };
        while let Some(event) = node.poll_event() {
            said.push(event.to_string());
        }
        while let Some((to, bytes)) = node.poll_transmit() {
            if self.recorded.len() < 2_000 {
                self.recorded.push((addr(i), to, bytes.clone()));
            }
            if !self.random.random_bool(self.loss) {
                let at = self.now + self.random.random_range(1_000_000..20_000_000);
                self.wire.push((at, addr(i), to, bytes));
            }
        }
    }

    fn rate(&self, i: usize) -> f64 {
        let host = &self.hosts[i];
        host.loads.borrow()["a"].rate_bit_s(Nanos(self.now + host.skew)) as f64 / 1e6
    }

    fn sum(&self) -> f64 {
        (0..self.hosts.len()).map(|i| self.rate(i)).sum()
    }

    fn load(&self, i: usize, change: impl FnOnce(&mut Load)) {
        change(self.hosts[i].loads.borrow_mut().get_mut("a").unwrap());
    }

    fn state(&self, i: usize) -> String {
        self.status(i).groups[0].state.clone()
    }

    fn status(&self, i: usize) -> NodeStatus {
        let now = Nanos(self.now + self.hosts[i].skew);
        self.hosts[i].node.as_ref().unwrap().status(now)
    }

    fn said(&self, i: usize, what: &str) -> bool {
        self.hosts[i].said.iter().any(|line| line.contains(what))
    }

    fn drops(&self, i: usize, cause: Cause) -> u64 {
        self.hosts[i].node.as_ref().unwrap().drops.of(cause)
    }
}

/// What each host has, in megabits, within 3 % of the limit.
#[track_caller]
fn assert_rates(fleet: &Fleet, rates: &[f64]) {
    for (i, rate) in rates.iter().enumerate() {
        let is = fleet.rate(i);
        assert!((is - rate).abs() < 0.3, "host {i}: {is} for {rate}; {:?}", fleet.hosts[i].said);
    }
}

#[test]
fn share_divides_by_flows_and_what_one_leaves_others_have() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.load(1, |load| load.flows = 4);
    fleet.run(6.0);
    assert_rates(&fleet, &[1.67, 6.67, 1.67]);
    fleet.load(0, |load| load.bound_bit_s = Some(500_000));
    fleet.run(5.0);
    let rest = 9.4;
    assert_rates(&fleet, &[0.6, rest * 0.8, rest * 0.2]);
    assert!((0..3).all(|i| fleet.state(i) == "sharing"));
    assert!(fleet.said(0, "group `up` shares"), "{:?}", fleet.hosts[0].said);
    assert!(fleet.sum() <= 10.0 + 1e-6, "{}", fleet.sum());
}

#[test]
fn share_never_adds_up_to_more_whatever_is_cut_lost_killed_and_started_again() {
    let mut fleet = Fleet::new(4, SHARE);
    fleet.loss = 0.2;
    let mut most: f64 = 0.0;
    for round in 0..60 {
        match round % 12 {
            3 => fleet.hosts[round % 3].side = 1,
            5 => fleet.hosts.iter_mut().for_each(|host| host.side = 0),
            // Nobody has a dead one's limit fall: it does so itself.
            7 => fleet.hosts[round % 4].node = None,
            9 => {
                for i in 0..4 {
                    if fleet.hosts[i].node.is_none() {
                        fleet.start(i, &format!("n{i}"), ring(1), true);
                    }
                }
            }
            _ => {}
        }
        for _ in 0..10 {
            fleet.run(0.05);
            most = most.max(fleet.sum());
        }
    }
    assert!(most <= 10.0 + 1e-6, "{most}");
    fleet.hosts.iter_mut().for_each(|host| host.side = 0);
    (fleet.loss, most) = (0.02, 0.0);
    for _ in 0..100 {
        fleet.run(0.1);
        most = most.max(fleet.sum());
    }
    assert!(most <= 10.0 + 1e-6 && fleet.sum() > 9.7, "{most} {}", fleet.sum());
}

#[test]
fn a_member_of_share_that_is_cut_off_falls_to_its_part_and_says_so() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
    fleet.hosts[2].side = 1;
    fleet.run(8.0);
    assert_rates(&fleet, &[4.95, 4.95, 0.1]);
    assert_eq!(fleet.state(2), "alone");
    let said = "group `up` hears nobody and falls back to this host's reserved share: 100kbit";
    assert!(fleet.said(2, said), "{:?}", fleet.hosts[2].said);
    fleet.hosts[2].side = 0;
    fleet.run(6.0);
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
}

#[test]
fn fps_divides_by_flows_and_keeps_free_what_is_not_heard() {
    let mut fleet = Fleet::new(3, "algorithm = \"fps\"\nhosts = 5");
    fleet.load(2, |load| load.flows = 3);
    fleet.run(12.0);
    assert_rates(&fleet, &[2.0, 2.0, 6.0]);
    fleet.hosts[0].side = 1;
    fleet.run(12.0);
    // Alone: an equal part of five. The others: two of three parts, divided by flows.
    assert_rates(&fleet, &[2.0, 1.67, 5.0]);
    assert_eq!(fleet.state(0), "alone");
    fleet.hosts[0].side = 0;
    fleet.run(15.0);
    assert_rates(&fleet, &[2.0, 2.0, 6.0]);
}

#[test]
fn a_node_of_fps_that_starts_again_takes_over_what_is_pinned() {
    let mut fleet = Fleet::new(2, "algorithm = \"fps\"\nhosts = 8");
    fleet.run(8.0);
    assert_rates(&fleet, &[5.0, 5.0]);
    fleet.hosts[0].node = None;
    fleet.run(0.5);
    assert_rates(&fleet, &[5.0, 5.0]);
    fleet.start(0, "n0", ring(1), true);
    let mut least: f64 = 10.0;
    for _ in 0..40 {
        fleet.run(0.1);
        least = least.min(fleet.rate(0));
    }
    assert!(least > 3.0, "{least}");
    assert_rates(&fleet, &[5.0, 5.0]);
}

#[test]
fn gtb_has_what_others_do_not_report() {
    let mut fleet = Fleet::new(2, "algorithm = \"gtb\"\nhosts = 4");
    fleet.load(1, |load| load.bound_bit_s = Some(3_000_000));
    fleet.run(8.0);
    assert!((fleet.rate(0) - 7.0).abs() < 0.3, "{}", fleet.rate(0));
}

#[test]
fn grd_drops_alike_where_gates_can_and_says_so_where_they_cannot() {
    let group = "algorithm = \"grd\"\nhosts = 2";
    let mut fleet = Fleet::new(2, group);
    fleet.run(8.0);
    let drop = |fleet: &Fleet, i: usize| fleet.hosts[i].loads.borrow()["a"].drop;
    // Two that arrive at 10 each: half must go.
    assert!((drop(&fleet, 0) - 0.5).abs() < 0.05, "{}", drop(&fleet, 0));
    assert!((drop(&fleet, 1) - drop(&fleet, 0)).abs() < 0.05);
    // A group that is left leaves no drops behind.
    let (spec, _) = groups(&fleet.text);
    let now = Nanos(fleet.now + fleet.hosts[1].skew);
    let node = fleet.hosts[1].node.as_mut().unwrap();
    node.reconfigure(now, spec, &[], &BTreeMap::new(), ring(1)).unwrap();
    assert_eq!(drop(&fleet, 1), 0.0);
    fleet.start(0, "n0", ring(1), false);
    fleet.run(5.0);
    assert_eq!(fleet.state(0), "cannot_drop");
    assert!((fleet.rate(0) - 5.0).abs() < 0.01, "{}", fleet.rate(0));
    assert!(fleet.said(0, "limits that cannot drop at random"), "{:?}", fleet.hosts[0].said);
}

#[test]
fn a_wrong_key_and_another_cluster_are_reported_and_do_no_harm() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.start(2, "n2", ring(9), true);
    fleet.run(5.0);
    assert!(fleet.drops(0, Cause::Seal) > 0 && fleet.drops(2, Cause::Seal) > 0);
    assert!(fleet.said(2, "another key of the same number"), "{:?}", fleet.hosts[2].said);
    assert_rates(&fleet, &[4.95, 4.95, 0.1]);
    fleet.text = fleet.text.replace("\"prod\"", "\"test\"");
    fleet.start(2, "n2", ring(1), true);
    fleet.run(4.0);
    assert!(fleet.said(0, "their [fleet] name differs"), "{:?}", fleet.hosts[0].said);
    assert_rates(&fleet, &[4.95, 4.95, 0.1]);
}

#[test]
fn of_two_nodes_with_one_name_the_earlier_stands_back_and_both_say_so() {
    let mut fleet = Fleet::new(4, SHARE);
    fleet.run(4.0);
    // Host 3 is given the name of host 2, by mistake.
    fleet.hosts[3].session = fleet.hosts[2].session;
    fleet.start(3, "n2", ring(1), true);
    fleet.run(6.0);
    assert_eq!(fleet.state(2), "stood_back");
    assert!(fleet.said(2, "is also called `n2` and started later"), "{:?}", fleet.hosts[2].said);
    assert!(fleet.said(3, "is also called `n2` and started earlier"), "{:?}", fleet.hosts[3].said);
    assert!((fleet.rate(2) - 0.1).abs() < 1e-6, "{}", fleet.rate(2));
    fleet.run(4.0);
    assert!(fleet.sum() <= 10.1 && fleet.sum() > 9.5, "{}", fleet.sum());
}

#[test]
fn two_limits_for_one_group_are_reported_and_neither_is_exceeded() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(4.0);
    fleet.text = fleet.text.replace("rate = \"10mbit\"", "rate = \"4mbit\"");
    fleet.start(2, "n2", ring(1), true);
    fleet.run(10.0);
    let said = "node `n2` has other settings for group `up`: 4mbit by share, here 10mbit by share";
    assert!(fleet.said(0, said), "{:?}", fleet.hosts[0].said);
    assert!(fleet.said(2, "node `n0` has other settings"), "{:?}", fleet.hosts[2].said);
    // One of three acceptors cannot begin an epoch.
    assert!((fleet.rate(2) - 0.04).abs() < 1e-6, "{}", fleet.rate(2));
    // All take the new one, one after the other, while the fleet runs.
    let mut most: f64 = 0.0;
    for i in [0, 1] {
        let (spec, groups) = groups(&fleet.text);
        let now = Nanos(fleet.now + fleet.hosts[i].skew);
        let node = fleet.hosts[i].node.as_mut().unwrap();
        let changes = node.reconfigure(now, spec, &groups, &BTreeMap::new(), ring(1)).unwrap();
        assert_eq!(changes, ["group `up` begins"]);
        for _ in 0..80 {
            fleet.run(0.05);
            most = most.max(fleet.sum());
        }
    }
    assert!(most <= 10.0 + 1e-6, "never above the greater one: {most}");
    fleet.run(2.0);
    assert!(fleet.sum() <= 4.0 + 1e-6 && fleet.sum() > 3.8, "{}", fleet.sum());
    assert!(fleet.said(0, "has the same settings for group `up` again"));
}

#[test]
fn what_was_recorded_is_worth_nothing() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    let recorded = std::mem::take(&mut fleet.recorded);
    // Also to one that has forgotten everything, and while the sender is away.
    fleet.hosts[0].node = None;
    fleet.start(1, "n1", ring(1), true);
    let status = |fleet: &Fleet| fleet.hosts[1].node.as_ref().unwrap().contacts.len();
    assert_eq!(status(&fleet), 0);
    let now = Nanos(fleet.now + fleet.hosts[1].skew);
    let node = fleet.hosts[1].node.as_mut().unwrap();
    for (from, to, bytes) in recorded.iter().filter(|(from, ..)| *from == addr(0)) {
        if *to == addr(1) {
            node.on_datagram(now, *from, bytes);
        }
    }
    assert_eq!(node.contacts.len(), 0, "it believes nobody");
    assert!(node.drops.of(Cause::Unproven) > 5);
    fleet.run(3.0);
    let node = fleet.hosts[1].node.as_ref().unwrap();
    let proven: Vec<_> = node.sessions.proven().map(|(id, _)| id).collect();
    assert_eq!(proven, [member_id("n2")]);
    for (from, to, bytes) in &recorded {
        for i in 1..3 {
            let now = Nanos(fleet.now + fleet.hosts[i].skew);
            if *to == addr(i) {
                fleet.hosts[i].node.as_mut().unwrap().on_datagram(now, *from, bytes);
            }
        }
    }
    assert!(fleet.drops(2, Cause::Replay) + fleet.drops(2, Cause::Stale) > 10);
}

#[test]
fn an_acceptor_that_cannot_store_promises_nothing_and_says_so() {
    let mut fleet = Fleet::new(3, SHARE);
    for i in 0..3 {
        *fleet.hosts[i].memory.full.borrow_mut() = i > 0;
    }
    fleet.run(5.0);
    assert!((0..3).all(|i| (fleet.rate(i) - 0.1).abs() < 1e-6), "no epoch has begun");
    assert!(fleet.said(1, "this node promises nothing"), "{:?}", fleet.hosts[1].said);
    for i in 0..3 {
        *fleet.hosts[i].memory.full.borrow_mut() = false;
    }
    fleet.run(8.0);
    assert!(fleet.said(1, "the state can be written again"));
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
}

#[test]
fn a_limit_that_cannot_be_lowered_silences_its_node_and_one_that_is_gone_does_not() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    fleet.load(0, |load| load.broken = true);
    fleet.load(1, |load| load.flows = 8);
    let mut most: f64 = 0.0;
    for _ in 0..60 {
        fleet.run(0.1);
        most = most.max(fleet.sum());
    }
    // It keeps its rate, but others never had what it did not give up.
    assert!(fleet.said(0, "limit `a`: injected fault"), "{:?}", fleet.hosts[0].said);
    fleet.load(0, |load| load.broken = false);
    fleet.run(6.0);
    assert!(fleet.said(0, "its limits can be set again"));
    assert!(fleet.sum() > 9.7, "{}", fleet.sum());
    fleet.load(0, |load| (load.gone, load.rate_bit_s) = (true, 0));
    fleet.run(6.0);
    assert!(
        fleet.sum() > 9.6,
        "what a service that stopped does not use, others have: {}",
        fleet.sum()
    );
}

#[test]
fn who_leaves_gives_back_at_once_and_keeps_its_own_part() {
    let mut fleet = Fleet::new(4, SHARE);
    fleet.run(5.0);
    // Not an acceptor and not the leader.
    let now = Nanos(fleet.now + fleet.hosts[3].skew);
    fleet.hosts[3].node.as_mut().unwrap().leave(now);
    fleet.run(1.0);
    let now = Nanos(fleet.now + fleet.hosts[3].skew);
    let mut node = fleet.hosts[3].node.take().unwrap();
    assert!(node.has_left());
    assert!(node.end(now));
    assert!((fleet.rate(3) - 0.1).abs() < 1e-6);
    fleet.run(1.0);
    assert!(fleet.sum() > 9.7, "{}", fleet.sum());
    // The leader does not wait for anybody; what it held is found by the next one.
    let leader = {
        let now = Nanos(fleet.now + fleet.hosts[0].skew);
        let status = fleet.hosts[0].node.as_ref().unwrap().status(now);
        let name = status.groups[0].leader.clone().unwrap();
        (0..3).find(|i| format!("n{i}") == name).unwrap()
    };
    let now = Nanos(fleet.now + fleet.hosts[leader].skew);
    let mut node = fleet.hosts[leader].node.take().unwrap();
    node.leave(now);
    assert!(node.has_left() && node.end(now));
    assert!((fleet.rate(leader) - 0.1).abs() < 1e-6, "{}", fleet.rate(leader));
    fleet.run(6.0);
    assert!(fleet.sum() > 9.7 && fleet.sum() <= 10.0 + 1e-6, "{}", fleet.sum());
}

#[test]
fn groups_that_did_not_change_go_on_over_a_reload() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    let (spec, groups) = groups(&fleet.text);
    let now = Nanos(fleet.now + fleet.hosts[1].skew);
    let node = fleet.hosts[1].node.as_mut().unwrap();
    assert_eq!(
        node.reconfigure(now, spec.clone(), &groups, &BTreeMap::new(), ring(1)).unwrap(),
        Vec::<String>::new()
    );
    assert!(fleet.rate(1) > 3.0);
    let node = fleet.hosts[1].node.as_mut().unwrap();
    assert_eq!(
        node.reconfigure(now, spec, &[], &BTreeMap::new(), ring(1)).unwrap(),
        ["group `up` ends"]
    );
}

#[test]
fn a_limiter_of_ctb_is_on_one_node() {
    let mut fleet = Fleet::new(0, "algorithm = \"ctb\"\ncenter = \"n0\"");
    let load = Load { flows: 1, rate_bit_s: 1, ..Load::default() };
    let loads = Rc::new(RefCell::new(BTreeMap::from([("a".to_owned(), load)])));
    let host = Host {
        node: None,
        loads: loads.clone(),
        memory: Memory::default(),
        skew: 0,
        session: 0,
        side: 0,
        said: vec![],
    };
    fleet.hosts.push(host);
    fleet.start(0, "n0", ring(1), true);
    fleet.run(1.0);
    assert_rates(&fleet, &[10.0]);
    let (spec, groups) = groups(&fleet.text);
    let options = NodeOptions {
        fleet: spec,
        name: "n1".into(),
        groups,
        keys: ring(1),
        addr: addr(1),
        session: 1,
        seed: [0; 32],
    };
    let refused = Node::new(Nanos(0), options, Fake { loads, can_drop: true }, Memory::default());
    assert_eq!(
        refused.err().unwrap().to_string(),
        "group `up` is ctb, and its one limiter is on node `n0`: this is `n1`; name no members of it here, \
         or make this node its center"
    );
}

#[test]
fn a_host_s_part_is_divided_among_its_limits() {
    let mut fleet = Fleet::new(2, SHARE);
    let more = fleet.text.replace("members = [\"a\"]", "members = [\"a\", \"b\"]");
    fleet.text = format!(
        "{more}\n[[limit]]\nname = \"b\"\nscope = {{ cgroup = \"b\" }}\negress = \"1mbit\"\n"
    );
    for i in 0..2 {
        let copy = fleet.hosts[i].loads.borrow()["a"].clone();
        fleet.hosts[i].loads.borrow_mut().insert("b".into(), copy);
        fleet.start(i, &format!("n{i}"), ring(1), true);
    }
    fleet.run(8.0);
    for i in 0..2 {
        let loads = fleet.hosts[i].loads.borrow();
        let (a, b) = (loads["a"].rate_bit_s as f64 / 1e6, loads["b"].rate_bit_s as f64 / 1e6);
        assert!(b <= 1.0 && b > 0.9 && a > 3.5 && a + b <= 5.1, "{a} {b}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Datagrams of a node that has the key and says anything: nothing panics, and the rate stays legal.
    #[test]
    fn nothing_that_is_sealed_panics(
        frames in prop::collection::vec(super::super::frame::tests::frames(), 0..20),
    ) {
        let mut fleet = Fleet::new(1, SHARE);
        let mut sealer = Sealer::new(number(&["prod"]), member_id("n7"), Life { session: 9, salt: 1 });
        let now = Nanos(fleet.now + fleet.hosts[0].skew);
        let node = fleet.hosts[0].node.as_mut().unwrap();
        let keys = ring(1);
        let hello = sealer.seal(&keys, None, &[]).unwrap();
        node.on_datagram(now, addr(7), &hello);
        let mut cookie = None;
        while let Some((_, bytes)) = node.poll_transmit() {
            if let Ok(opened) = open(&keys, number(&["prod"]), member_id("n7"), &bytes) {
                let found = Frame::decode(&opened.payload).unwrap().into_iter().find_map(|f| match f {
                    Frame::Challenge(cookie) => Some(cookie),
                    _ => None,
                });
                cookie = cookie.or(found);
            }
        }
        let name = "n7".to_owned();
        let all = std::iter::once(Frame::Echo { cookie: cookie.unwrap(), name }).chain(frames);
        for frame in all {
            let mut payload = Vec::new();
            frame.encode(&mut payload);
            let bytes = sealer.seal(&keys, Some(member_id("n0")), &payload).unwrap();
            node.on_datagram(now, addr(7), &bytes);
        }
        prop_assert!(node.contacts.contains_key(&member_id("n7")));
        fleet.run(0.5);
        prop_assert!(fleet.rate(0) <= 0.1 + 1e-6);
    }
}
