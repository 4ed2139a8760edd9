//! Storage that is slow: promises wait for it, and the rest of a node does not.

use super::*;

/// Hosts 0 and 2 start again, and begin an epoch that host 1 is to promise.
fn others_begin_an_epoch(fleet: &mut Fleet) {
    for (i, name) in [(0, "n0"), (2, "n2")] {
        fleet.hosts[i].node = None;
        fleet.start(i, name, ring(1), true);
    }
}

#[test]
fn what_rests_on_a_promise_waits_until_it_is_stored() {
    let mut fleet = Fleet::new(3, SHARE);
    for host in &fleet.hosts {
        *host.memory.slow.borrow_mut() = true;
    }
    fleet.run(5.0);
    assert!((0..3).all(|i| (fleet.rate(i) - 0.1).abs() < 1e-6), "an epoch began by mere words");
    assert!((0..3).all(|i| !fleet.said(i, "promises nothing")), "slow is not broken");
    // Each write takes up to 300 ms, three intervals: the fleet shares all the same, and goes on sharing.
    let mut most: f64 = 0.0;
    for round in 0..100 {
        fleet.run(0.1);
        fleet.hosts[round % 3].memory.finish();
        most = most.max(fleet.sum());
    }
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
    // The leader goes; the next epoch is promised as slowly.
    fleet.hosts[0].node = None;
    for round in 0..100 {
        fleet.run(0.1);
        fleet.hosts[round % 3].memory.finish();
        most = most.max(fleet.sum());
    }
    assert!(fleet.rate(1) + fleet.rate(2) > 9.6, "{} {}", fleet.rate(1), fleet.rate(2));
    assert!(most <= 10.0 + 1e-6, "{most}");
}

#[test]
fn messages_that_wait_for_storage_are_bounded_and_dropped_if_it_fails() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    *fleet.hosts[1].memory.slow.borrow_mut() = true;
    others_begin_an_epoch(&mut fleet);
    fleet.run(30.0);
    let waiting = fleet.hosts[1].node.as_ref().unwrap().groups[0].group.waiting_messages();
    assert!((1..=64).contains(&waiting), "{waiting}");
    *fleet.hosts[1].memory.full.borrow_mut() = true;
    fleet.run(1.0);
    let waiting = fleet.hosts[1].node.as_ref().unwrap().groups[0].group.waiting_messages();
    assert_eq!(waiting, 0);
    *fleet.hosts[1].memory.full.borrow_mut() = false;
    *fleet.hosts[1].memory.slow.borrow_mut() = false;
    fleet.run(6.0);
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
}

/// Each try was news that the state could be written again, and each failure that it could not.
#[test]
fn a_disk_that_stays_full_is_reported_once() {
    let mut fleet = Fleet::new(3, SHARE);
    *fleet.hosts[0].memory.full.borrow_mut() = true;
    *fleet.hosts[0].memory.slow.borrow_mut() = true;
    fleet.run(10.0);
    assert!(*fleet.hosts[0].memory.tries.borrow() > 6);
    let count = |fleet: &Fleet, what: &str| {
        fleet.hosts[0].said.iter().filter(|line| line.contains(what)).count()
    };
    let (fails, again) = ("promises nothing", "the state can be written again");
    assert_eq!((count(&fleet, fails), count(&fleet, again)), (1, 0), "{:?}", fleet.hosts[0].said);
    *fleet.hosts[0].memory.full.borrow_mut() = false;
    *fleet.hosts[0].memory.slow.borrow_mut() = false;
    fleet.run(5.0);
    assert_eq!((count(&fleet, fails), count(&fleet, again)), (1, 1), "{:?}", fleet.hosts[0].said);
}

/// A group that was replaced while its promise could not be stored went on trying, and put that in the place
/// of what its successor had promised meanwhile: that acceptor then promised an epoch for the second time.
#[test]
fn a_group_that_was_replaced_takes_no_promise_of_its_successor_back() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    *fleet.hosts[1].memory.full.borrow_mut() = true;
    others_begin_an_epoch(&mut fleet);
    while !fleet.said(1, "promises nothing") {
        fleet.run(0.02);
    }
    // All take another spec, and begin another.
    *fleet.hosts[1].memory.full.borrow_mut() = false;
    fleet.text = fleet.text.replace("lease = \"1.5s\"", "lease = \"1.6s\"");
    let (spec, groups) = groups(&fleet.text);
    let mut newest = 0;
    for i in 0..3 {
        let now = Nanos(fleet.now + fleet.hosts[i].skew);
        let node = fleet.hosts[i].node.as_mut().unwrap();
        node.reconfigure(now, spec.clone(), &groups, &BTreeMap::new(), ring(1)).unwrap();
    }
    for _ in 0..1000 {
        fleet.run(0.01);
        let saved = fleet.hosts[1].memory.saved.borrow().get("up").unwrap().promised.number;
        assert!(saved >= newest, "{saved} after {newest}");
        newest = saved;
    }
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
}
