use proptest::prelude::*;
use std::{vec, vec::Vec};

use super::*;

const MS: u64 = 1_000_000;
const LIMIT: u64 = 10_000_000;

fn options(id: usize, acceptors: usize, members_max: u32) -> ShareOptions {
    ShareOptions {
        group: 1,
        id: MemberId(id as u32),
        incarnation: 1,
        limit: Rate::from_bit_s(LIMIT).unwrap(),
        reserve_per_mille: 10,
        members_max,
        acceptors: (0..acceptors)
            .map(|id| Acceptor { id: MemberId(id as u32), votes: 1 })
            .collect(),
        interval: Nanos(100 * MS),
        lease: Nanos(1_000 * MS),
        suspect: Nanos(1_000 * MS),
        rate_error_ppm: 1_000,
    }
}

/// Members with one clock, and messages in transit until they are delivered.
struct Net {
    now: Nanos,
    members: Vec<Share>,
    /// The last rate of each member's backend.
    gates: Vec<Grant>,
    left: Vec<bool>,
    way: Vec<Transmit>,
}

impl Net {
    fn new(members: usize, acceptors: usize) -> Net {
        let share =
            |id| Share::new(Nanos(0), options(id, acceptors, members as u32), None).unwrap();
        let members: Vec<_> = (0..members).map(share).collect();
        let gates = members.iter().map(Share::grant).collect();
        let left = vec![false; members.len()];
        Net { now: Nanos(0), members, gates, left, way: vec![] }
    }

    fn drain(&mut self, member: usize) {
        while let Some(event) = self.members[member].poll_event() {
            self.left[member] |= event == Event::Left;
            if let Event::Store(saved) = event {
                self.members[member].on_stored(self.now, saved);
            }
        }
        self.gates[member] = self.members[member].grant();
        while let Some(transmit) = self.members[member].poll_transmit(true) {
            self.way.push(transmit);
        }
        assert!(self.sum() <= LIMIT, "{} at {:?}", self.sum(), self.now);
    }

    fn sum(&self) -> u64 {
        self.gates.iter().map(|gate| gate.at(self.now)).sum()
    }

    fn timer(&mut self, member: usize) {
        self.members[member].on_timer(self.now);
        self.drain(member);
    }

    fn deliver(&mut self, transmit: &Transmit) {
        let to = transmit.to.0 as usize;
        self.members[to].on_message(self.now, &transmit.message);
        self.drain(to);
    }

    /// Runs for so long; a message takes 5 ms at most, if `passes` lets it through.
    fn run(&mut self, ms: u64, passes: impl Fn(usize, usize) -> bool) {
        for _ in 0..ms / 5 {
            self.now.0 += 5 * MS;
            for transmit in core::mem::take(&mut self.way) {
                if passes(transmit.message.from.0 as usize, transmit.to.0 as usize) {
                    self.deliver(&transmit);
                }
            }
            for member in 0..self.members.len() {
                if self.members[member].next_deadline() <= self.now {
                    self.timer(member);
                }
            }
        }
    }

    fn wants(&mut self, flows: &[f32]) {
        for (member, flows) in self.members.iter_mut().zip(flows) {
            member.set_want(self.now, Want { flows: *flows, demand_bit_s: u64::MAX });
        }
    }

    fn has(&self, member: usize) -> f64 {
        self.gates[member].at(self.now) as f64 / LIMIT as f64
    }
}

#[test]
fn one_alone_has_all_at_once() {
    let mut net = Net::new(1, 1);
    net.run(10, |_, _| true);
    assert_eq!(net.sum(), LIMIT);
}

/// A crash before that would forget the promise, and the next life would divide the limit once more.
#[test]
fn an_acceptor_with_the_majority_begins_nothing_before_its_own_promise_is_stored() {
    let mut options = options(0, 2, 2);
    options.acceptors[0].votes = 3;
    let floor = options.floor_bit_s();
    let mut one = Share::new(Nanos(0), options, None).unwrap();
    let mut promised = None;
    for at in (0..2_000).step_by(10) {
        one.on_timer(Nanos(at * MS));
        while let Some(event) = one.poll_event() {
            assert!(!matches!(event, Event::Entered(_)), "at {at} ms");
            if let Event::Store(saved) = event {
                promised = Some(saved);
            }
        }
        assert!(!one.is_leader() && one.grant().at(Nanos(at * MS)) == floor, "at {at} ms");
    }
    let saved = promised.expect("a promise");
    // An earlier one is not enough.
    one.on_stored(Nanos(2_000 * MS), Saved::default());
    assert!(!one.is_leader());
    one.on_stored(Nanos(2_000 * MS), saved);
    assert!(one.is_leader());
    one.on_timer(Nanos(2_001 * MS));
    assert_eq!(one.grant().at(Nanos(2_001 * MS)), LIMIT - floor);
}

#[test]
fn capacity_goes_where_the_flows_are() {
    let mut net = Net::new(3, 3);
    net.wants(&[3.0, 7.0, 0.0]);
    net.run(1_000, |_, _| true);
    assert!((net.has(0) - 0.3).abs() < 0.02 && (net.has(1) - 0.7).abs() < 0.02);
    assert!(net.sum() > LIMIT * 99 / 100);
    net.wants(&[3.0, 3.0, 6.0]);
    net.run(500, |_, _| true);
    assert!((net.has(0) - 0.25).abs() < 0.02 && (net.has(2) - 0.5).abs() < 0.02);
    assert!(net.members[0].is_leader() && net.members.iter().all(|m| m.epoch().number == 1));
}

#[test]
fn who_is_cut_off_falls_to_the_floor_and_the_others_have_the_rest() {
    let mut net = Net::new(3, 3);
    net.wants(&[1.0; 3]);
    net.run(1_000, |_, _| true);
    let before = net.has(0);
    // Also the leader.
    net.run(900, |from, to| from != 0 && to != 0);
    assert_eq!(net.has(0), before, "a lease is good for a second");
    net.run(3_000, |from, to| from != 0 && to != 0);
    let floor = options(0, 3, 3).floor_bit_s();
    assert_eq!(net.gates[0].at(net.now), floor);
    assert_eq!(net.sum(), LIMIT, "the others have all but one floor");
    net.run(1_000, |_, _| true);
    assert!((net.has(0) - 0.333).abs() < 0.02, "{}", net.has(0));
}

#[test]
fn halves_go_on_with_what_they_hold() {
    let mut net = Net::new(4, 2);
    net.wants(&[1.0, 2.0, 3.0, 4.0]);
    net.run(1_000, |_, _| true);
    let before: Vec<_> = (0..4).map(|member| net.has(member)).collect();
    // Members 1 and 3 with the second acceptor, 0 and 2 with the first.
    net.run(8_000, |from, to| from % 2 == to % 2);
    for (member, before) in before.iter().enumerate() {
        assert!(
            (net.has(member) - before).abs() < 0.02,
            "{member}: {} of {before}",
            net.has(member)
        );
    }
}

#[test]
fn who_leaves_gives_back() {
    let mut net = Net::new(3, 1);
    net.wants(&[1.0; 3]);
    net.run(1_000, |_, _| true);
    net.members[2].leave(net.now);
    net.run(500, |_, _| true);
    assert!(net.left[2]);
    assert!(net.has(2) < 0.01, "{}", net.has(2));
    assert!(net.has(0) + net.has(1) > 0.98);
    assert_eq!(net.members[0].epoch().number, 1, "no audit was needed");
}

#[test]
fn options_that_do_not_fit_are_refused() {
    let refused = |change: fn(&mut ShareOptions)| {
        let mut options = options(0, 3, 3);
        change(&mut options);
        Share::new(Nanos(0), options, None).unwrap_err()
    };
    assert_eq!(refused(|o| o.acceptors.clear()), OptionsError::Acceptors);
    assert_eq!(refused(|o| o.acceptors[1].id = MemberId(0)), OptionsError::Acceptors);
    assert_eq!(
        refused(|o| o.acceptors.iter_mut().for_each(|k| k.votes = 0)),
        OptionsError::Acceptors
    );
    assert_eq!(refused(|o| o.members_max = 0), OptionsError::Members(0));
    assert_eq!(refused(|o| o.reserve_per_mille = 1_001), OptionsError::Reserve(1_001));
    assert_eq!(refused(|o| o.lease = Nanos(1)), OptionsError::Times);
    assert_eq!(refused(|o| o.rate_error_ppm = u32::MAX), OptionsError::RateError(u32::MAX));
}

proptest! {
    /// The sum is checked after every step, in [`Net::drain`]. A step is a number: time passes, a timer ends,
    /// or some message that was ever in transit is delivered, again or for the first time.
    #[test]
    fn the_limit_holds_in_any_order(
        members in 1usize..5,
        acceptors in 1usize..4,
        steps in prop::collection::vec((0u8..10, any::<prop::sample::Index>()), 1..400),
    ) {
        let mut net = Net::new(members, acceptors.min(members));
        net.wants(&[1.0, 2.0, 3.0, 4.0]);
        let mut ever: Vec<Transmit> = vec![];
        for (kind, index) in steps {
            ever.append(&mut net.way);
            match kind {
                0 => net.now.0 += index.index(400) as u64 * MS,
                1 | 2 => {
                    net.now.0 += 30 * MS;
                    (0..members).for_each(|member| net.timer(member));
                }
                3 => {
                    // One is restarted, with what it stored.
                    let member = index.index(members);
                    let saved = net.members[member].register.as_ref().map(Register::saved);
                    let mut options = options(member, acceptors.min(members), members as u32);
                    options.incarnation = net.members[member].options.incarnation + 1;
                    // Its backend goes on as granted until a new grant comes.
                    let gate = net.gates[member];
                    net.members[member] = Share::new(net.now, options, saved).unwrap();
                    net.gates[member] = gate;
                }
                4..=6 if !ever.is_empty() => {
                    // Of the newest, mostly.
                    let at = ever.len() - 1 - index.index(ever.len().min(12));
                    let transmit = ever[at].clone();
                    net.deliver(&transmit);
                }
                7..=8 if !ever.is_empty() => {
                    let transmit = ever[index.index(ever.len())].clone();
                    net.deliver(&transmit);
                }
                _ => {
                    for transmit in ever.clone().into_iter().rev().take(6).rev() {
                        net.deliver(&transmit);
                    }
                }
            }
            prop_assert!(net.sum() <= LIMIT);
        }
    }
}
