//! Who a node is, and where: copies of a machine, other releases, names without number, and greetings.

use super::*;

/// Starts host `i` as `name` in this session, whatever it ran before.
fn start_as(fleet: &mut Fleet, i: usize, name: &str, session: u64) {
    fleet.hosts[i].session = session - (1 << 32);
    fleet.start(i, name, ring(1), true);
}

/// The nonce of a datagram: sender, session, salt and number.
fn nonce(bytes: &[u8]) -> Vec<u8> {
    bytes[4..26].to_vec()
}

#[test]
fn a_copied_machine_is_found_shares_no_nonce_and_takes_nothing_twice() {
    let mut fleet = Fleet::new(4, SHARE);
    fleet.hosts[3].node = None;
    fleet.run(5.0);
    fleet.recorded.clear();
    // Host 3 is host 2: its name, its keys, what it stored, and even the session that it begins.
    let session = fleet.hosts[2].session + (1 << 32);
    fleet.hosts[3].memory = fleet.hosts[2].memory.clone();
    start_as(&mut fleet, 2, "n2", session);
    start_as(&mut fleet, 3, "n2", session);
    let mut most: f64 = 0.0;
    for _ in 0..80 {
        fleet.run(0.1);
        most = most.max(fleet.sum());
    }
    let from = |i| fleet.recorded.iter().filter(move |(from, ..)| *from == addr(i));
    let nonces: BTreeSet<_> = from(2).chain(from(3)).map(|(.., bytes)| nonce(bytes)).collect();
    assert_eq!(nonces.len(), from(2).count() + from(3).count(), "no nonce came twice");
    assert!(from(2).count() > 10 && from(3).count() > 10);
    // One of the two stands back; both say so, and in the status of each.
    let states: BTreeSet<_> = [fleet.state(2), fleet.state(3)].into();
    assert!(states.contains("stood_back") && states.len() == 2, "{states:?}");
    for i in 2..4 {
        assert!(fleet.said(i, "is also called `n2`"), "{i}: {:?}", fleet.hosts[i].said);
        let status = fleet.status(i);
        assert!(status.alerts.iter().any(|alert| alert.contains("is also called `n2`")));
        let names = status.peers.iter().map(|peer| &peer.node);
        assert!(
            names.chain(status.groups[0].members.iter().map(|one| &one.node)).all(|n| n != "n2")
        );
    }
    // So does who hears both.
    let tells = |i: usize| {
        let alerts = fleet.status(i).alerts;
        let alert = alerts.iter().any(|alert| alert.contains("two machines run node `n2`"));
        alert && fleet.said(i, "two machines run node `n2`")
    };
    assert!(tells(0) || tells(1), "{:?} {:?}", fleet.hosts[0].said, fleet.status(1).alerts);
    assert!(most <= 10.0 + 1e-6, "{most}");
    // It is over when one of them is.
    let stands_back = (2..4).find(|i| fleet.state(*i) == "stood_back").unwrap();
    fleet.hosts[stands_back].node = None;
    fleet.run(70.0);
    assert!((0..2).all(|i| fleet.status(i).alerts.is_empty()), "{:?}", fleet.status(0).alerts);
}

#[test]
fn two_releases_say_that_they_share_no_limits() {
    let mut fleet = Fleet::new(2, SHARE);
    fleet.run(5.0);
    let keys = ring(1);
    let life = Life { session: 1 << 50, salt: 1 };
    let mut sealer = Sealer::new(number(&["prod"]), member_id("n1"), life);
    let now = Nanos(fleet.now + fleet.hosts[0].skew);
    // An older and a newer release: one at a node that is known by name, one that is not.
    for (version, from, sender) in [(1, 1, "n1"), (VERSION + 1, 5, "n5")] {
        let mut bytes = sealer.seal(&keys, None, b"whatever they say").unwrap();
        bytes[0] = bytes[0] & 0x80 | version;
        bytes[4..8].copy_from_slice(&member_id(sender).0.to_le_bytes());
        for _ in 0..10 {
            fleet.hosts[0].node.as_mut().unwrap().on_datagram(now, addr(from), &bytes);
        }
    }
    fleet.collect(0);
    let said = "node `n1` at 10.0.0.2:7946 speaks version 1 of the fleet's protocol and this one version 2";
    assert_eq!(fleet.hosts[0].said.iter().filter(|line| line.contains(said)).count(), 1);
    assert!(fleet.said(0, "at 10.0.0.6:7946 speaks version 3"), "{:?}", fleet.hosts[0].said);
    let status = fleet.status(0);
    assert_eq!(status.protocol, VERSION);
    let rows: Vec<_> = status
        .other_versions
        .iter()
        .map(|row| (row.node.clone(), row.addr, row.protocol, row.datagrams))
        .collect();
    let unknown = format!("#{}", member_id("n5").0);
    assert_eq!(rows, [("n1".into(), addr(1), 1, 10), (unknown, addr(5), 3, 10)]);
    assert_eq!(status.alerts.iter().filter(|a| a.contains("cannot share limits")).count(), 2);
    assert_eq!(fleet.drops(0, Cause::Version), 20);
    // Claims cost nothing, so they are forged: an address is told of once, whatever it claims.
    let mut bytes = sealer.seal(&keys, None, b"x").unwrap();
    for claimed in [3, 4, 3, 4, 5] {
        bytes[0] = bytes[0] & 0x80 | claimed;
        fleet.hosts[0].node.as_mut().unwrap().on_datagram(now, addr(1), &bytes);
    }
    fleet.collect(0);
    let of_it = |line: &&String| line.contains("at 10.0.0.2:7946 speaks version");
    assert_eq!(fleet.hosts[0].said.iter().filter(of_it).count(), 1);
    // Few are remembered.
    let mut bytes = sealer.seal(&keys, None, b"x").unwrap();
    bytes[0] = VERSION + 7;
    let node = fleet.hosts[0].node.as_mut().unwrap();
    for port in 1..10_000 {
        node.on_datagram(now, SocketAddr::from(([10, 9, 9, 9], port)), &bytes);
    }
    assert!(fleet.status(0).other_versions.len() <= 64);
    fleet.run(61.0);
    assert!(fleet.status(0).other_versions.is_empty());
    assert_rates(&fleet, &[5.0, 5.0]);
}

#[test]
fn names_without_number_take_bounded_memory_and_the_fleet_goes_on() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    let keys = ring(1);
    let now = Nanos(fleet.now + fleet.hosts[0].skew);
    let hello = {
        let mut payload = Vec::new();
        Frame::Hello { name: "x".into() }.encode(&mut payload);
        payload
    };
    for i in 0..20_000u32 {
        let life = Life { session: 1, salt: i };
        let mut sealer = Sealer::new(number(&["prod"]), MemberId(i), life);
        let bytes = sealer.seal(&keys, None, &hello).unwrap();
        let from = SocketAddr::from(([10, 1, (i >> 8) as u8, i as u8], 1));
        fleet.hosts[0].node.as_mut().unwrap().on_datagram(now, from, &bytes);
    }
    let (proven, strangers) = fleet.hosts[0].node.as_ref().unwrap().sessions.count();
    assert!(proven <= 3 && strangers <= crate::session::STRANGERS_MAX, "{proven} {strangers}");
    assert!(fleet.hosts[0].node.as_ref().unwrap().contacts.len() <= 3);
    fleet.run(5.0);
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
    fleet.hosts[2].node = None;
    fleet.start(2, "n2", ring(1), true);
    fleet.run(6.0);
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
}

/// A host leaves a group and comes back into it without a restart: what others counted for it before is not
/// its own any more.
#[test]
fn a_group_that_is_left_and_entered_again_brings_nothing_with_it() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    let first = fleet.text.clone();
    let other = first.replace("rate = \"10mbit\"\nmembers", "rate = \"4mbit\"\nmembers");
    assert_ne!(first, other);
    let mut most: f64 = 0.0;
    for round in 0..8 {
        let text = if round % 2 == 0 { &other } else { &first };
        let (spec, groups) = groups(text);
        let now = Nanos(fleet.now + fleet.hosts[2].skew);
        let node = fleet.hosts[2].node.as_mut().unwrap();
        node.reconfigure(now, spec, &groups, &BTreeMap::new(), ring(1)).unwrap();
        for _ in 0..(if round % 3 == 0 { 15 } else { 60 }) {
            // What it wants moves, so capacity does.
            fleet.load(2, |load| load.flows = 1 + round % 3 * 4);
            fleet.run(0.1);
            most = most.max(fleet.sum());
        }
    }
    assert!(most <= 10.0 + 1e-6, "{most}");
    fleet.load(2, |load| load.flows = 1);
    fleet.run(10.0);
    assert_rates(&fleet, &[3.33, 3.33, 3.33]);
    // Other limits on the host are no reason to begin anew.
    let more = first.replace("members = [\"a\"]", "members = [\"a\", \"b\"]");
    let more = format!(
        "{more}\n[[limit]]\nname = \"b\"\nscope = {{ cgroup = \"b\" }}\negress = \"10mbit\"\n"
    );
    let copy = fleet.hosts[2].loads.borrow()["a"].clone();
    let b = Load { flows: 0, rate_bit_s: 8_000, lease: None, ..copy };
    fleet.hosts[2].loads.borrow_mut().insert("b".into(), b);
    for (text, changed) in [(&more, true), (&more, false), (&first, true)] {
        let (spec, groups) = groups(text);
        let now = Nanos(fleet.now + fleet.hosts[2].skew);
        let node = fleet.hosts[2].node.as_mut().unwrap();
        let changes = node.reconfigure(now, spec, &groups, &BTreeMap::new(), ring(1)).unwrap();
        assert_eq!(changes == ["group `up` changes"], changed, "{changes:?}");
        for _ in 0..10 {
            fleet.run(0.1);
            assert!(fleet.rate(2) > 3.0 && fleet.sum() <= 10.0 + 1e-6);
        }
    }
}

/// Another interval, or another number of hosts, was never told.
#[test]
fn other_hosts_or_another_interval_are_reported_and_the_group_goes_on() {
    let said = |node: &str| {
        format!("node `{node}` has another `interval` or other `hosts` for group `up`: ")
    };
    for algorithm in ["fps", "gtb", "grd"] {
        let group = format!("algorithm = \"{algorithm}\"\nhosts = 5");
        for (from, to) in [("hosts = 5", "hosts = 7"), ("\"100ms\"", "\"150ms\"")] {
            let mut fleet = Fleet::new(3, &group);
            fleet.run(4.0);
            let before = fleet.text.clone();
            fleet.text = fleet.text.replace(from, to);
            assert_ne!(fleet.text, before);
            fleet.start(2, "n2", ring(1), true);
            fleet.run(10.0);
            assert!(fleet.said(0, &said("n2")), "{:?}", fleet.hosts[0].said);
            assert!(fleet.said(2, &said("n0")), "{:?}", fleet.hosts[2].said);
            let status = fleet.status(0);
            assert!(status.alerts.iter().any(|alert| alert.starts_with(&said("n2"))));
            let differs = |name: &str| {
                status.groups[0].members.iter().any(|one| one.node == name && one.differs)
            };
            assert!(differs("n2") && !differs("n1"), "{:?}", status.groups[0].members);
            // They hear each other all the same.
            assert!((0..3).all(|i| fleet.state(i) == "sharing"));
            // One file again.
            fleet.text = before;
            fleet.start(2, "n2", ring(1), true);
            fleet.run(10.0);
            assert!(fleet.said(0, "node `n2` has the same settings for group `up` again"));
            assert!(fleet.status(0).alerts.is_empty(), "{:?}", fleet.status(0).alerts);
        }
    }
}

#[test]
fn a_node_that_starts_again_after_a_clash_is_no_clash_with_itself() {
    let mut fleet = Fleet::new(4, SHARE);
    fleet.hosts[3].node = None;
    fleet.run(5.0);
    let later = fleet.hosts[2].session + (1 << 32);
    start_as(&mut fleet, 3, "n2", later);
    fleet.run(5.0);
    let tells = |fleet: &Fleet| {
        let warns = |i| fleet.status(i).alerts.iter().any(|alert| alert.contains("two machines"));
        (0..2).any(warns)
    };
    assert!(tells(&fleet), "{:?}", fleet.status(0).alerts);
    fleet.hosts[3].node = None;
    start_as(&mut fleet, 2, "n2", later + (1 << 32));
    fleet.run(5.0);
    assert!(!tells(&fleet), "{:?}", fleet.status(0).alerts);
}

#[test]
fn the_same_file_is_no_difference_once_it_is_read() {
    let mut fleet = Fleet::new(3, SHARE);
    fleet.run(5.0);
    fleet.text = fleet.text.replace("rate = \"10mbit\"\nmembers", "rate = \"9mbit\"\nmembers");
    let (spec, groups) = groups(&fleet.text);
    let differs = |alert: &String| alert.contains("other settings");
    for i in 0..3 {
        assert_eq!(fleet.status(2).alerts.iter().any(differs), i > 0);
        let now = Nanos(fleet.now + fleet.hosts[i].skew);
        let node = fleet.hosts[i].node.as_mut().unwrap();
        node.reconfigure(now, spec.clone(), &groups, &BTreeMap::new(), ring(1)).unwrap();
        if i < 2 {
            fleet.run(8.0);
        }
    }
    assert!(!fleet.status(2).alerts.iter().any(differs), "{:?}", fleet.status(2).alerts);
    fleet.run(8.0);
    assert!((0..3).all(|i| fleet.status(i).alerts.is_empty()), "{:?}", fleet.status(2).alerts);
}

/// A greeting goes to an address that may have another owner by now, who can pass it on to every node.
#[test]
fn a_greeting_moves_only_a_node_that_is_down() {
    let mut fleet = Fleet::new(2, SHARE);
    fleet.run(5.0);
    let passed_on = |fleet: &mut Fleet, by: SocketAddr| {
        fleet.recorded.clear();
        fleet.run(3.0);
        // Nobody is at that address.
        let is_greeting =
            |(from, to, _): &&(SocketAddr, SocketAddr, Vec<u8>)| (*from, *to) == (addr(0), addr(5));
        let greeting = fleet.recorded.iter().rfind(is_greeting).unwrap().2.clone();
        let now = Nanos(fleet.now + fleet.hosts[1].skew);
        let node = fleet.hosts[1].node.as_mut().unwrap();
        let before = node.drops;
        node.on_datagram(now, by, &greeting);
        assert_eq!(node.drops, before, "it is taken");
        let peers = fleet.status(1).peers;
        let peer = peers.into_iter().find(|peer| peer.node == "n0").unwrap();
        (peer.up, peer.addr)
    };
    assert_eq!(passed_on(&mut fleet, addr(5)), (true, addr(0)));
    // Where both have another address, a greeting is all that arrives.
    fleet.hosts[1].side = 1;
    for _ in 0..60 {
        fleet.run(1.0);
    }
    assert_eq!(passed_on(&mut fleet, addr(6)), (false, addr(6)));
    // Datagrams for it then show again where their sender is.
    fleet.hosts[1].side = 0;
    fleet.run(40.0);
    assert_eq!(passed_on(&mut fleet, addr(5)), (true, addr(0)));
}

/// A membership that has lost its last node asks nobody any more.
#[test]
fn two_nodes_that_were_cut_off_for_long_share_again() {
    let mut fleet = Fleet::new(2, "algorithm = \"fps\"\nhosts = 5");
    fleet.run(8.0);
    assert_rates(&fleet, &[5.0, 5.0]);
    fleet.hosts[1].side = 1;
    fleet.run(60.0);
    assert_rates(&fleet, &[2.0, 2.0]);
    assert!((0..2).all(|i| fleet.state(i) == "alone" && !fleet.status(i).peers[0].up));
    fleet.hosts[1].side = 0;
    fleet.run(40.0);
    assert_rates(&fleet, &[5.0, 5.0]);
    assert!((0..2).all(|i| fleet.status(i).peers[0].up));
}
