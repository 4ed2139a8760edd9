//! Limits that refuse: the least rate, a rate that cannot be changed, a limit that is not there.

use tidegate_core::{
    Direction,
    fleet::message::{Body, Entry},
};

use super::*;

/// Two hosts with limits `a` and `b` each; of the second `b` is idle.
fn two_limits(reserve: &str, hosts: usize) -> Fleet {
    let group = SHARE
        .replace("reserve = \"4%\"", &format!("reserve = \"{reserve}\""))
        .replace("hosts = 4", &format!("hosts = {hosts}"));
    let mut fleet = Fleet::new(2, &group);
    let more = fleet.text.replace("members = [\"a\"]", "members = [\"a\", \"b\"]");
    let more = more.replace("10mbit", "100mbit");
    fleet.text = format!(
        "{more}\n[[limit]]\nname = \"b\"\nscope = {{ cgroup = \"b\" }}\negress = \"100mbit\"\n"
    );
    for i in 0..2 {
        fleet.load(i, |load| load.rate_bit_s = 100_000);
        let copy = fleet.hosts[i].loads.borrow()["a"].clone();
        let idle = Load { flows: u32::from(i == 0), ..copy };
        fleet.hosts[i].loads.borrow_mut().insert("b".into(), idle);
        fleet.start(i, &format!("n{i}"), ring(1), true);
    }
    fleet
}

fn rate_of(fleet: &Fleet, i: usize, limit: &str) -> f64 {
    let host = &fleet.hosts[i];
    host.loads.borrow()[limit].rate_bit_s(Nanos(fleet.now + host.skew)) as f64 / 1e6
}

/// The idle limit was told 625 bit/s, which no limit takes, and its host then said nothing any more.
#[test]
fn a_host_with_a_busy_and_an_idle_limit_has_its_part() {
    let mut fleet = two_limits("10%", 16);
    let mut most: f64 = 0.0;
    for _ in 0..100 {
        fleet.run(0.1);
        let sum: f64 = (0..2).map(|i| rate_of(&fleet, i, "a") + rate_of(&fleet, i, "b")).sum();
        most = most.max(sum);
    }
    assert!(most <= 100.0 + 1e-6, "{most}");
    assert!(
        rate_of(&fleet, 1, "a") > 29.0,
        "{} {:?}",
        rate_of(&fleet, 1, "a"),
        fleet.hosts[1].said
    );
    assert!(rate_of(&fleet, 1, "b") >= 0.008);
    assert_eq!(fleet.state(1), "sharing");
    assert!(!fleet.said(1, "injected fault"), "{:?}", fleet.hosts[1].said);
}

#[test]
fn a_gate_that_cannot_be_lowered_does_not_stop_its_node_and_nothing_is_raised_by_it() {
    let mut fleet = two_limits("1%", 4);
    fleet.load(1, |load| load.flows = 1);
    fleet.run(6.0);
    let before = rate_of(&fleet, 1, "a");
    assert!(before > 30.0, "{before}");
    // `a` of host 1 has 33 and cannot be set any more; others want it, and so does `b` of the same host.
    fleet.load(1, |load| load.stuck = true);
    fleet.load(0, |load| load.flows = 10);
    fleet.hosts[1].loads.borrow_mut().get_mut("b").unwrap().flows = 10;
    let mut most: f64 = 0.0;
    for _ in 0..80 {
        fleet.run(0.05);
        let sum: f64 = (0..2).map(|i| rate_of(&fleet, i, "a") + rate_of(&fleet, i, "b")).sum();
        most = most.max(sum);
    }
    assert!(most <= 100.0 + 1e-6, "{most}");
    assert!(fleet.said(1, "limit `a`: injected fault"), "{:?}", fleet.hosts[1].said);
    assert_eq!(fleet.state(1), "sharing", "it is heard: {:?}", fleet.hosts[1].said);
    // Its lease ended in the limit; all the rest is in use.
    assert!((rate_of(&fleet, 1, "a") - 0.125).abs() < 1e-6, "{}", rate_of(&fleet, 1, "a"));
    let used = rate_of(&fleet, 1, "b") + rate_of(&fleet, 0, "a") + rate_of(&fleet, 0, "b");
    assert!(used > 97.0, "{used}");
    // It is not asked with each datagram.
    let asked = fleet.hosts[1].loads.borrow()["a"].asked;
    fleet.run(3.0);
    let again = fleet.hosts[1].loads.borrow()["a"].asked - asked;
    assert!((4..=8).contains(&again), "{again}");
}

#[test]
fn datagrams_that_are_not_of_the_fleet_cost_a_look_and_no_more() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    let asked = fleet.hosts[1].loads.borrow()["a"].asked;
    let keys = ring(9);
    let mut sealer =
        Sealer::new(number(&["prod"]), member_id("n0"), Life { session: 1 << 40, salt: 7 });
    // The lease is over, so whatever looks at the groups sets the limit and says so.
    let now = Nanos(fleet.now + fleet.hosts[1].skew + 3 * SECOND);
    let said = fleet.hosts[1].said.len();
    let other = sealer.seal(&keys, Some(member_id("n1")), b"hello").unwrap();
    let is_taken = |bytes: &Vec<u8>| fleet.wire.iter().all(|(.., waits)| waits != bytes);
    let recorded = fleet.recorded.iter().filter(|(_, to, bytes)| *to == addr(1) && is_taken(bytes));
    let recorded: Vec<_> = recorded.cloned().collect();
    let node = fleet.hosts[1].node.as_mut().unwrap();
    for i in 0..2_000usize {
        let junk = vec![i as u8; i % 1_500];
        node.on_datagram(now, addr(7), &junk);
        node.on_datagram(now, addr(7), &other);
    }
    // Sealed well, and taken before.
    for (from, _, bytes) in &recorded {
        node.on_datagram(now, *from, bytes);
    }
    assert!(node.drops.of(Cause::Seal) >= 2_000 && node.drops.of(Cause::Replay) > 20);
    assert_eq!(fleet.hosts[1].loads.borrow()["a"].asked, asked);
    assert_eq!(fleet.hosts[1].said.len(), said);
    fleet.collect(1);
    assert!(!fleet.said(1, "hears nobody"), "{:?}", fleet.hosts[1].said);
    // The next look at the time does all that.
    fleet.hosts[1].node.as_mut().unwrap().on_timer(now);
    fleet.collect(1);
    assert!(fleet.said(1, "hears nobody"), "{:?}", fleet.hosts[1].said);
}

/// The share was given away with the call, and the limit kept its rate until its lease ended.
#[test]
fn a_limit_that_leaves_counts_until_its_gate_takes_another_rate() {
    let place = |limit: &str| Place { limit: limit.into(), direction: Direction::Egress };
    for (own, expected) in [(None, 0.25), (Some(70), 70.0)] {
        let mut fleet = two_limits("1%", 4);
        fleet.load(1, |load| load.flows = 1);
        fleet.run(6.0);
        assert!(rate_of(&fleet, 1, "a") > 30.0, "{}", rate_of(&fleet, 1, "a"));
        fleet.load(1, |load| load.stuck = true);
        let text = fleet.text.replace("members = [\"a\", \"b\"]", "members = [\"b\"]");
        let rate = own.and_then(|mbit: u64| Rate::from_bit_s(mbit * 1_000_000));
        let own = rate.map(|rate| (place("a"), rate)).into_iter().collect();
        let (spec, groups) = groups(&text);
        let now = Nanos(fleet.now + fleet.hosts[1].skew);
        let node = fleet.hosts[1].node.as_mut().unwrap();
        node.reconfigure(now, spec, &groups, &own, ring(1)).unwrap();
        // Its lease ends after 1.5 s and an eighth of that.
        for _ in 0..40 {
            fleet.run(0.05);
            let sum: f64 = (0..2).map(|i| rate_of(&fleet, i, "a") + rate_of(&fleet, i, "b")).sum();
            assert!(sum <= 100.0 + 1e-6, "{sum}");
        }
        assert!(fleet.said(1, "limit `a`: injected fault"), "{:?}", fleet.hosts[1].said);
        fleet.load(1, |load| load.stuck = false);
        fleet.run(1.0);
        assert!((rate_of(&fleet, 1, "a") - expected).abs() < 0.13, "{}", rate_of(&fleet, 1, "a"));
        let ends = fleet.hosts[1].loads.borrow()["a"].lease.map(|lease| lease.until);
        let now = Nanos(fleet.now + fleet.hosts[1].skew);
        assert!(ends.is_none_or(|ends| ends <= now), "it is its own for good");
        // What somebody sets from now on stays.
        fleet.load(1, |load| (load.rate_bit_s, load.lease) = (12_000_000, None));
        fleet.run(6.0);
        assert_eq!(rate_of(&fleet, 1, "a"), 12.0);
        let used: f64 = rate_of(&fleet, 1, "b") + rate_of(&fleet, 0, "a") + rate_of(&fleet, 0, "b");
        assert!(used > 97.0 && used <= 100.0 + 1e-6, "{used}");
    }
}

/// With another rate the group is another one: it sets the limit once the first has let go of it.
#[test]
fn a_limit_that_changes_its_group_counts_in_the_first_until_its_gate_is_lowered() {
    let mut fleet = two_limits("1%", 4);
    fleet.load(1, |load| load.flows = 1);
    fleet.run(6.0);
    fleet.load(1, |load| load.stuck = true);
    let text = fleet.text.replacen("rate = \"100mbit\"", "rate = \"60mbit\"", 1);
    assert_ne!(text, fleet.text);
    let (spec, groups) = groups(&text);
    let now = Nanos(fleet.now + fleet.hosts[1].skew);
    let node = fleet.hosts[1].node.as_mut().unwrap();
    node.reconfigure(now, spec, &groups, &BTreeMap::new(), ring(1)).unwrap();
    for round in 0..80 {
        fleet.run(0.05);
        let sum: f64 = (0..2).map(|i| rate_of(&fleet, i, "a") + rate_of(&fleet, i, "b")).sum();
        assert!(sum <= 100.0 + 1e-6, "{sum} after round {round}");
        if round == 20 {
            fleet.load(1, |load| load.stuck = false);
        }
    }
    assert!(rate_of(&fleet, 1, "a") <= 0.15, "{}", rate_of(&fleet, 1, "a"));
}

/// Nothing is known of a limit that cannot be read: its claim is the rate of the file, and a lower one may be
/// a higher rate all the same.
#[test]
fn a_rate_that_may_rise_is_set_after_those_that_fall() {
    let mut fleet = Fleet::new(1, &SHARE.replace("hosts = 4", "hosts = 1"));
    fleet.text = fleet.text.replace("\"n0\", \"n1\", \"n2\"", "\"n0\"");
    fleet.start(0, "n0", ring(1), true);
    fleet.load(0, |load| load.flows = 0);
    // Until nothing is left of what it wanted at the start.
    fleet.run(15.0);
    assert!(rate_of(&fleet, 0, "a") > 9.9, "{}", rate_of(&fleet, 0, "a"));
    // `b` comes first in the group, and has 50 kbit/s that nobody can read; `a` cannot be set.
    fleet.load(0, |load| load.stuck = true);
    let b = Load {
        rate_bit_s: 50_000,
        lease: None,
        blind: true,
        stuck: false,
        most_bit_s: 0,
        ..fleet.hosts[0].loads.borrow()["a"].clone()
    };
    fleet.hosts[0].loads.borrow_mut().insert("b".into(), b);
    let text = fleet.text.replace("members = [\"a\"]", "members = [\"b\", \"a\"]");
    let text = format!(
        "{text}\n[[limit]]\nname = \"b\"\nscope = {{ cgroup = \"b\" }}\negress = \"10mbit\"\n"
    );
    let (spec, groups) = groups(&text);
    let now = Nanos(fleet.now + fleet.hosts[0].skew);
    let node = fleet.hosts[0].node.as_mut().unwrap();
    node.reconfigure(now, spec, &groups, &BTreeMap::new(), ring(1)).unwrap();
    // Not even for the time that it takes to find that `a` refuses.
    assert_eq!(fleet.hosts[0].loads.borrow()["b"].most_bit_s, 8_000);
    fleet.run(1.0);
    assert_eq!(fleet.hosts[0].loads.borrow()["b"].most_bit_s, 8_000);
}

/// An idle limit rose to its part when its lease ended, though the other kept more than its own for good.
#[test]
fn a_limit_rises_at_the_end_of_its_lease_only_to_what_others_leave() {
    let mut fleet = two_limits("1%", 4);
    // Alone, `a` has nearly all of the host's 250 kbit/s, for good, and cannot be set any more.
    fleet.hosts[0].side = 1;
    fleet.run(1.0);
    assert!((rate_of(&fleet, 1, "a") - 0.242).abs() < 1e-3, "{}", rate_of(&fleet, 1, "a"));
    fleet.load(1, |load| load.stuck = true);
    fleet.hosts[0].side = 0;
    fleet.run(6.0);
    assert_eq!(fleet.state(1), "sharing");
    // The node is dead, and its leases end.
    fleet.hosts[1].node = None;
    fleet.run(2.0);
    let sum = rate_of(&fleet, 1, "a") + rate_of(&fleet, 1, "b");
    assert!(sum <= 0.25 + 1e-6, "{sum}");
    // With limits that take what they are told both have their part then.
    fleet.load(1, |load| load.stuck = false);
    fleet.start(1, "n1", ring(1), true);
    fleet.run(6.0);
    fleet.hosts[1].node = None;
    fleet.run(3.0);
    assert!([0.125, 0.125] == [rate_of(&fleet, 1, "a"), rate_of(&fleet, 1, "b")]);
}

/// What is in use of 100 Mbit/s at two hosts of which the second cannot read or set `b`.
fn used_without_b(fleet: &Fleet) -> f64 {
    rate_of(fleet, 0, "a") + rate_of(fleet, 0, "b") + rate_of(fleet, 1, "a")
}

/// It counted as much as the file allows for ever, and the host kept what it could not use.
#[test]
fn a_gate_that_was_never_read_keeps_nothing_of_the_fleet_for_long() {
    let mut fleet = two_limits("1%", 4);
    let broken = |fleet: &Fleet, broken| {
        fleet.hosts[1].loads.borrow_mut().get_mut("b").unwrap().broken = broken;
    };
    broken(&fleet, true);
    fleet.load(1, |load| load.flows = 1);
    fleet.start(1, "n1", ring(1), true);
    // What an earlier life may have lent it may be in force, and nothing relies on less.
    fleet.run(2.0);
    assert!(rate_of(&fleet, 1, "a") < 0.3, "{}", rate_of(&fleet, 1, "a"));
    // All that was lent has ended.
    fleet.run(8.0);
    assert!(used_without_b(&fleet) > 97.0, "{}", used_without_b(&fleet));
    assert!(rate_of(&fleet, 1, "a") > 30.0, "{}", rate_of(&fleet, 1, "a"));
    // The host gives back what it does not want.
    fleet.load(1, |load| load.flows = 0);
    fleet.run(8.0);
    let others = rate_of(&fleet, 0, "a") + rate_of(&fleet, 0, "b");
    assert!(others > 97.0, "{others}");
    broken(&fleet, false);
    fleet.run(3.0);
    assert!(!fleet.status(1).alerts.iter().any(|alert| alert.contains("limit `b`")));
}

/// So it is with one that was read once, with a rate that an earlier life had lent it.
#[test]
fn a_gate_that_an_earlier_life_lent_its_rate_keeps_that_until_its_end() {
    let mut fleet = two_limits("1%", 4);
    fleet.run(6.0);
    assert!(rate_of(&fleet, 0, "a") > 30.0);
    // Host 0 starts again, may not set `a`, and cannot read it any more soon after.
    fleet.load(0, |load| load.stuck = true);
    fleet.start(0, "n0", ring(1), true);
    fleet.run(0.2);
    fleet.load(0, |load| load.broken = true);
    fleet.load(1, |load| load.flows = 5);
    fleet.run(8.0);
    assert!(rate_of(&fleet, 0, "a") < 0.2, "its lease has ended");
    let used = rate_of(&fleet, 0, "b") + rate_of(&fleet, 1, "a") + rate_of(&fleet, 1, "b");
    assert!(used > 97.0, "{used}");
}

/// Host 1 takes another spec, in which limits have these rates that no group decides.
fn reload(fleet: &mut Fleet, text: &str, own: &BTreeMap<Place, Rate>) {
    let (spec, groups) = groups(text);
    let now = Nanos(fleet.now + fleet.hosts[1].skew);
    let node = fleet.hosts[1].node.as_mut().unwrap();
    node.reconfigure(now, spec, &groups, own, ring(1)).unwrap();
}

/// Neither of two limits that went to another group could be lowered. The one that had little was forgotten
/// at once, the other had less than the host's own part, and the host gave back what both had beyond that.
#[test]
fn limits_that_leave_a_group_count_together_until_all_are_lowered() {
    let mut fleet = two_limits("1%", 2);
    for most in ["480kbit", "240kbit"] {
        let egress = format!("egress = \"{most}\"");
        fleet.text = fleet.text.replacen("egress = \"100mbit\"", &egress, 1);
    }
    fleet.hosts[1].loads.borrow_mut().values_mut().for_each(|load| load.flows = 1);
    fleet.start(1, "n1", ring(1), true);
    fleet.run(6.0);
    let (a, b) = (rate_of(&fleet, 1, "a"), rate_of(&fleet, 1, "b"));
    assert!(a < 0.5 && b < 0.25 && a + b > 0.7, "{a} {b}");
    fleet.hosts[1].loads.borrow_mut().values_mut().for_each(|load| load.stuck = true);
    let text = fleet.text.replacen("rate = \"100mbit\"", "rate = \"60mbit\"", 1);
    reload(&mut fleet, &text, &BTreeMap::new());
    for round in 0..60 {
        fleet.run(0.05);
        let sum: f64 = (0..2).map(|i| rate_of(&fleet, i, "a") + rate_of(&fleet, i, "b")).sum();
        assert!(sum <= 100.0 + 1e-6, "{sum} after round {round}");
    }
}

/// A limit that was taken out of its group could never be given the rate of the file, and that counted.
#[test]
fn a_limit_that_leaves_and_refuses_for_ever_keeps_nothing_of_the_fleet_for_long() {
    for stuck in [true, false] {
        let mut fleet = two_limits("1%", 4);
        fleet.load(1, |load| load.flows = 1);
        fleet.run(6.0);
        // It refuses, or cannot even be read.
        fleet.load(1, |load| (load.stuck, load.broken) = (stuck, !stuck));
        let text = fleet.text.replace("members = [\"a\", \"b\"]", "members = [\"b\"]");
        let place = Place { limit: "a".into(), direction: Direction::Egress };
        let own = BTreeMap::from([(place, Rate::from_bit_s(70_000_000).unwrap())]);
        reload(&mut fleet, &text, &own);
        fleet.run(8.0);
        let used = rate_of(&fleet, 1, "b") + rate_of(&fleet, 0, "a") + rate_of(&fleet, 0, "b");
        assert!(used > 97.0, "{used}, stuck: {stuck}");
        fleet.hosts[1].loads.borrow_mut().get_mut("b").unwrap().flows = 20;
        fleet.run(6.0);
        assert!(rate_of(&fleet, 1, "b") > 60.0, "{}, stuck: {stuck}", rate_of(&fleet, 1, "b"));
    }
}

#[test]
fn hosts_beyond_those_that_can_be_known_are_reported() {
    let mut fleet = Fleet::new(1, "algorithm = \"fps\"\nhosts = 200");
    fleet.run(1.0);
    let now = Nanos(fleet.now + fleet.hosts[0].skew);
    let group = &mut fleet.hosts[0].node.as_mut().unwrap().groups[0].group;
    for id in 0..600 {
        let entries = vec![Entry { member: MemberId(id), version: 1, value: 1.0 }];
        let (from, body) = (member_id("n7"), Body::Values(entries));
        group.on_message(now, &Message { group: group.number(), from, incarnation: 1, body });
    }
    let said = "group `up` knows 512 hosts, the most of its algorithm, and has refused 89 reports of others";
    fleet.run(0.5);
    assert!(fleet.said(0, said), "{:?}", fleet.hosts[0].said);
    let is_alert = |fleet: &Fleet| fleet.status(0).alerts.iter().any(|alert| alert.contains(said));
    assert!(is_alert(&fleet), "{:?}", fleet.status(0).alerts);
    fleet.run(60.0);
    assert!(!is_alert(&fleet), "{:?}", fleet.status(0).alerts);
}
