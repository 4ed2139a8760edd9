//! What a host has for a time: how it begins, and that it ends, whoever is there.

use super::*;

#[test]
fn a_gate_whose_node_is_dead_falls_to_its_part_when_others_may_use_the_rest() {
    for (algorithm, left) in [(SHARE, 0.1), ("algorithm = \"fps\"\nhosts = 5", 2.0)] {
        let mut fleet = Fleet::new(3, algorithm);
        fleet.run(10.0);
        assert_rates(&fleet, &[3.33, 3.33, 3.33]);
        fleet.hosts[2].node = None;
        let mut most: f64 = 0.0;
        for _ in 0..150 {
            fleet.run(0.1);
            most = most.max(fleet.sum());
        }
        // `fps` has it from its weights, which are late.
        let room = if algorithm == SHARE { 1e-6 } else { 1.0 };
        assert!(most <= 10.0 + room, "{algorithm}: {most}");
        assert!((fleet.rate(2) - left).abs() < 1e-6, "{algorithm}: {}", fleet.rate(2));
    }
}

/// A paced sender hears of another rate with its own packets, and at most doubles: what its site shows as
/// demand is late, and is not to cost it its part.
#[test]
fn senders_that_hear_late_of_a_rate_do_not_stay_at_the_floor() {
    let group = SHARE.replace("reserve = \"4%\"", "reserve = \"2%\"");
    let mut fleet = Fleet::new(2, &group);
    fleet.load(0, |load| load.flows = 0);
    fleet.load(1, |load| load.flows = 7);
    fleet.run(6.0);
    assert!((fleet.rate(0) - 0.05).abs() < 0.01, "{}", fleet.rate(0));
    // 3 flows that have paced at a part of 50 kbit/s.
    fleet.load(0, |load| (load.flows, load.paces_bit_s) = (3, Some(50e3 / 3.0)));
    fleet.run(0.5);
    for _ in 0..40 {
        fleet.run(0.25);
        assert!(fleet.rate(0) > 1.0, "back at the floor: {}", fleet.rate(0));
    }
    for _ in 0..20 {
        fleet.run(0.5);
        assert_rates(&fleet, &[3.0, 7.0]);
    }
}

#[test]
fn a_group_of_share_says_that_it_starts_until_it_divides() {
    let mut fleet = Fleet::new(3, SHARE);
    // Two acceptors of three are needed for an epoch, and half of the votes for a lease.
    (1..3).for_each(|i| fleet.hosts[i].side = 1);
    fleet.run(1.0);
    assert_eq!((fleet.state(0), fleet.rate(0)), ("starting".to_owned(), 0.1));
    fleet.run(5.0);
    assert_eq!(fleet.state(0), "alone");
    fleet.hosts.iter_mut().for_each(|host| host.side = 0);
    fleet.run(6.0);
    assert_eq!(fleet.state(0), "sharing");
}

/// A lease is shorter than the time to the next report.
#[test]
fn others_hear_what_a_host_may_use_now() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(20.0);
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
    for i in 0..3 {
        let members = fleet.status(i).groups[0].members.clone();
        assert_eq!(members.len(), 2);
        for member in members {
            assert!(member.share_bit_s.abs_diff(3_330_000) < 100_000, "{}", member.share_bit_s);
        }
    }
}

#[test]
fn who_is_taken_out_of_a_group_leaves_it_at_once() {
    for (algorithm, rates) in [
        (SHARE, [5.0, 5.0, 0.1]),
        // Nothing is kept free for the third.
        ("algorithm = \"fps\"\nhosts = 5", [5.0, 5.0, 2.0]),
    ] {
        let mut fleet = Fleet::new(3, algorithm);
        fleet.run(10.0);
        assert_rates(&fleet, &[3.33, 3.33, 3.33]);
        let (spec, _) = groups(&fleet.text);
        let now = Nanos(fleet.now + fleet.hosts[2].skew);
        let node = fleet.hosts[2].node.as_mut().unwrap();
        assert_eq!(
            node.reconfigure(now, spec, &[], &BTreeMap::new(), ring(1)).unwrap(),
            ["group `up` ends"]
        );
        // Its limit does not keep what others have from now on.
        assert!((fleet.rate(2) - rates[2]).abs() < 1e-6, "{algorithm}: {}", fleet.rate(2));
        fleet.run(4.0);
        assert_rates(&fleet, &rates);
        fleet.run(8.0);
        assert_rates(&fleet, &rates);
    }
}

#[test]
fn acceptors_without_limits_are_heard() {
    let mut fleet = Fleet::new(4, SHARE);
    fleet.text = fleet.text.replace("members = [\"a\"]", "members = []");
    (1..3).for_each(|i| fleet.start(i, &format!("n{i}"), ring(1), true));
    // Of the acceptors, only those without limits are left.
    fleet.hosts[0].node = None;
    fleet.run(8.0);
    assert_eq!([1, 2, 3].map(|i| fleet.state(i)), ["sharing"; 3]);
    assert!((fleet.rate(3) - 9.7).abs() < 0.3, "{}", fleet.rate(3));
    assert_eq!((1..4).map(|i| fleet.drops(i, Cause::Content)).sum::<u64>(), 0);
}

#[test]
fn what_is_kept_free_for_who_is_not_heard_is_said() {
    let mut fleet = Fleet::new(3, "algorithm = \"fps\"\nhosts = 5");
    fleet.run(10.0);
    assert_eq!(fleet.status(0).alerts, Vec::<String>::new());
    let now = Nanos(fleet.now + fleet.hosts[2].skew);
    let mut node = fleet.hosts[2].node.take().unwrap();
    node.leave(now);
    assert!(node.end(now));
    fleet.run(12.0);
    // Its limit has that still.
    assert_rates(&fleet, &[3.33, 3.33, 2.0]);
    let alerts = fleet.status(0).alerts;
    assert!(alerts[0].contains("group `up` keeps 3333.334kbit free for `n2`"), "{alerts:?}");
    // A group of another name never heard of it.
    fleet.text = fleet.text.replace("name = \"up\"", "name = \"up2\"");
    let (spec, groups) = groups(&fleet.text);
    for i in 0..2 {
        let now = Nanos(fleet.now + fleet.hosts[i].skew);
        let node = fleet.hosts[i].node.as_mut().unwrap();
        node.reconfigure(now, spec.clone(), &groups, &BTreeMap::new(), ring(1)).unwrap();
    }
    fleet.run(12.0);
    assert_rates(&fleet, &[5.0, 5.0]);
    assert_eq!(fleet.status(0).alerts, Vec::<String>::new());
}

#[test]
fn who_starts_does_not_say_that_it_hears_nobody_while_it_hears_others() {
    for seed in 0..12 {
        let mut fleet = Fleet::new(4, SHARE);
        fleet.random = SmallRng::seed_from_u64(seed);
        fleet.run(5.0);
        for i in [2, 3] {
            fleet.hosts[i].node = None;
            fleet.run(3.0);
            fleet.start(i, &format!("n{i}"), ring(1), true);
            fleet.run(5.0);
            assert_eq!(fleet.state(i), "sharing");
        }
        for host in &fleet.hosts {
            assert!(!host.said.iter().any(|line| line.contains("hears nobody")), "{:?}", host.said);
        }
    }
}
