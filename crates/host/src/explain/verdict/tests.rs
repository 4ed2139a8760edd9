//! Samples as they are seen, and the sentence for each.

use tidegate_core::Scope;
use tidegate_sys::{intf::OUTCOME_TABLE, limit::LimitOptions};

use super::*;
use crate::{
    live::Origin,
    status::{Ages, Counts, DirectionStatus, Fair},
};

const GBIT: u64 = 1_000_000_000;

/// An egress limit of 1 Gbit/s with nine flows, of which so many Mbit/s are used.
fn limit(name: &str, scheme: &'static str, used_mbit: u64) -> Applied {
    let mut sample = Counts::default();
    sample.packets[0] = used_mbit * 80;
    let fair = Fair { flows: 9, share_bit_s: GBIT / 9, rtt_ns: Some(100_000), held: 0 };
    let now = DirectionStatus {
        rate_bit_s: GBIT,
        now_bit_s: None,
        share: None,
        burst_ns: 1_000_000,
        mark_ns: Some(2_000_000),
        drop_ns: Some(4_000_000),
        backlog_ns: 0,
        fair: (scheme != "nrm").then_some(fair),
        at_risk: None,
        counters: sample,
        colours: None,
        last: Ages::default(),
    };
    Applied {
        name: name.to_owned(),
        scope: Scope::Cgroup(name.to_owned()),
        members: None,
        origin: Origin::Pinned,
        state: State::InForce,
        far_end: false,
        parent: None,
        guarantee_bit_s: None,
        weight: None,
        settings: LimitOptions { scheme: scheme.parse().unwrap(), ..LimitOptions::default() }
            .into(),
        egress: Some(AppliedDirection {
            used_bit_s: used_mbit * 1_000_000,
            now,
            sample,
            sample_at_risk: None,
        }),
        ingress: None,
    }
}

/// A flow of a guest: the limit of its port is on no cgroup and no device of the socket here.
#[test]
fn a_flow_in_the_queue_of_a_limit_is_limited() {
    let passed = limit("guest", "htb", 950);
    let none = || Verdict::NotEnforced { limit: "a".to_owned() };
    for free in [Verdict::Unlimited, none()] {
        let said = or_of_queue(free, &passed).to_string();
        assert!(said.starts_with("limit `guest` (htb, egress 1gbit) is full"), "{said}");
    }
    assert_eq!(or_of_queue(Verdict::Idle, &passed), Verdict::Idle);
    let mut gone = passed;
    gone.state = State::Detached;
    assert_eq!(or_of_queue(none(), &gone), none());
}

/// A flow to a guest: what it sends is ingress of the limit on the guest's port.
#[test]
fn a_flow_to_a_guest_is_held_by_the_limit_of_the_guests_port() {
    let mut port = Applied { far_end: true, ..limit("guest", "htb", 950) };
    let sends = [socket(950, None)];
    assert_eq!(judge(std::slice::from_ref(&port), &[], &sends, false), Verdict::Unlimited);
    std::mem::swap(&mut port.egress, &mut port.ingress);
    let said = judge(&[port], &[], &sends, false).to_string();
    assert!(said.starts_with("limit `guest` (htb, ingress 1gbit) is full"), "{said}");
}

/// A socket that was asked about, sends at so many Mbit/s and may pace at so many.
fn socket(sent_mbit: u64, pace_mbit: Option<u64>) -> SocketSample {
    SocketSample {
        asked: true,
        local: "10.0.0.1:1".parse().unwrap(),
        remote: "10.0.0.2:2".parse().unwrap(),
        namespace: 0,
        pid: None,
        comm: None,
        cgroup: None,
        congestion_control: "cubic".to_owned(),
        sent_bit_s: sent_mbit * 1_000_000,
        received_bit_s: 0,
        pacing_bit_s: None,
        max_pacing_bit_s: pace_mbit.map(|mbit| mbit * 1_000_000),
        delivery_bit_s: 0,
        rtt_ns: 0,
        cwnd_segments: 10,
        retransmitted_segments: 3,
        retransmitted_segments_ever: 3,
        busy: 1.0,
        receiver_limited: 0.0,
        inode: 0,
    }
}

fn say(limits: &[Applied], sockets: &[SocketSample]) -> String {
    judge(limits, &[], sockets, false).to_string()
}

#[test]
fn no_limit_is_no_limit() {
    assert_eq!(say(&[], &[socket(100, None)]), "not limited by Tidegate");
    let gone = Applied { state: State::Detached, ..limit("backup", "pace", 0) };
    assert!(say(&[gone], &[socket(100, None)]).contains("`backup` is NOT ENFORCED"));
}

/// With `spring` nearly every ACK is given a window; with `dem` ECE says that packets wait.
#[test]
fn windows_do_not_say_that_a_limit_is_full() {
    for (scheme, outcome, full) in [("spring", 2, false), ("dem", 1, true)] {
        let mut limit = limit("guest", scheme, 100);
        let egress = limit.egress.as_mut().unwrap();
        egress.now.fair = None;
        egress.sample.packets[outcome] = 4000;
        let verdict = judge(&[limit], &[], &[socket(100, None)], false);
        assert_eq!(matches!(verdict, Verdict::Full { .. }), full, "{scheme}: {verdict}");
    }
}

/// A window of two segments a round trip is more than its share, and a lost one costs its sender 200 ms.
#[test]
fn a_limit_that_drops_slows_a_sender_that_leaves_some_of_it() {
    let mut limit = limit("web", "pace", 400);
    limit.ingress = limit.egress.take();
    let ingress = limit.ingress.as_mut().unwrap();
    let dropped = OUTCOME_TABLE.iter().position(|outcome| !outcome.passed).unwrap();
    ingress.sample.packets[dropped] = 250;
    let receives = SocketSample { received_bit_s: 400_000_000, ..socket(0, None) };
    let said = say(&[limit], &[receives]);
    assert_eq!(
        said,
        "limit `web` (pace, ingress 1gbit) slows it: 400mbit used, 0 packets marked or slowed and 250 \
         dropped in the sample"
    );
}

/// They go the other way: what is charged is what has bytes.
#[test]
fn acks_are_not_charged() {
    let mut counts = Counts::default();
    (counts.packets[0], counts.bytes[0], counts.packets[2]) = (3, 4500, 2);
    assert_eq!(counts.charged(), (3, 4500));
}

/// Both ends are in the cgroup, and the one that receives may have counted more: some was on its way.
#[test]
fn a_flow_within_a_cgroup_is_judged_by_its_sender() {
    let sends = socket(900, None);
    let (local, remote) = (sends.remote, sends.local);
    let receives = SocketSample { local, remote, received_bit_s: 910_000_000, ..socket(0, None) };
    let mut full = limit("port", "htb", 990);
    for sockets in [[sends.clone(), receives.clone()], [receives, sends]] {
        let said = say(std::slice::from_ref(&full), &sockets);
        assert!(said.starts_with("limit `port` (htb, egress 1gbit) is full"), "{said}");
        std::mem::swap(&mut full.egress, &mut full.ingress);
        let said = say(std::slice::from_ref(&full), &sockets);
        assert!(said.starts_with("limit `port` (htb, ingress 1gbit) is full"), "{said}");
        std::mem::swap(&mut full.egress, &mut full.ingress);
    }
}

#[test]
fn a_flow_that_uses_its_share_is_paced() {
    let said = say(&[limit("backup", "pace", 987)], &[socket(105, Some(106))]);
    assert_eq!(
        said,
        "paced at its fair share, 111.1mbit for each flow of limit `backup` (1gbit, 9 flows)"
    );
}

#[test]
fn of_nested_limits_the_smaller_share_holds() {
    let mut inner = limit("inner", "pace", 500);
    if let Some(egress) = &mut inner.egress {
        egress.now.fair = Some(Fair { flows: 2, share_bit_s: GBIT / 2, rtt_ns: None, held: 0 });
    }
    let said = say(&[inner, limit("outer", "pace", 987)], &[socket(105, Some(106))]);
    assert!(said.contains("limit `outer`"), "{said}");
}

#[test]
fn a_flow_that_uses_little_is_held_by_itself_its_peer_or_its_path() {
    let limits = [limit("backup", "pace", 400)];
    let slow = SocketSample { busy: 0.1, ..socket(3, Some(106)) };
    let said = say(&limits, std::slice::from_ref(&slow));
    assert_eq!(said, "the sender itself: it uses 2.8 % of its share of limit `backup`");
    let peer = SocketSample { receiver_limited: 0.9, ..socket(3, Some(106)) };
    assert!(say(&limits, &[peer]).starts_with("the receiver: its window was full for 90 %"));
    let said = say(&limits, &[socket(3, Some(106))]);
    assert!(said.starts_with("its window: 10 segments of `cubic` on this path"), "{said}");
    let own = say(&limits, &[socket(3, Some(3))]);
    assert!(own.starts_with("its own program, which asked to be paced at 3mbit"), "{own}");
    assert!(say(&limits, &[socket(0, Some(106))]).starts_with("nothing"));
}

#[test]
fn many_flows_are_held_by_the_fullest_limit() {
    let flows = [socket(40, Some(106)), socket(50, Some(106))];
    let said = say(&[limit("inner", "pace", 90), limit("outer", "nrm", 950)], &flows);
    assert!(said.starts_with("limit `outer` (nrm, egress 1gbit) is full: 950mbit used"), "{said}");
    let said = say(&[limit("inner", "pace", 90), limit("outer", "nrm", 300)], &flows);
    assert_eq!(said, "the senders themselves: 30 % of limit `outer` is used");
}

#[test]
fn drops_make_a_limit_full_below_its_rate() {
    let mut limit = limit("a", "nrm", 500);
    if let Some(egress) = &mut limit.egress {
        egress.sample.packets[1] = 900;
        egress.sample.packets[3] = 7;
    }
    let said = say(&[limit], &[socket(250, None), socket(250, None)]);
    assert!(said.ends_with("900 packets marked or slowed and 7 dropped in the sample"), "{said}");
}

#[test]
fn loopback_is_said_so() {
    let local = "127.0.0.1:5".parse().unwrap();
    let socket = SocketSample { local, remote: local, ..socket(100, Some(106)) };
    let said = say(&[limit("a", "pace", 0)], std::slice::from_ref(&socket));
    assert!(said.contains("loopback traffic, which limit `a` does not count"), "{said}");
}

#[test]
fn of_a_cgroup_other_traffic_counts_too() {
    let verdict = judge(&[limit("a", "nrm", 950)], &[], &[], true);
    assert!(matches!(verdict, Verdict::Full { .. }), "{verdict}");
    assert_eq!(judge(&[limit("a", "nrm", 0)], &[], &[], true), Verdict::Idle);
    // Of a process without a connection nothing can be said.
    assert_eq!(judge(&[limit("a", "nrm", 950)], &[], &[], false), Verdict::Idle);
}

#[test]
fn a_full_limit_further_in_is_named() {
    let inside = [limit("web", "pace", 90), limit("backup", "pace", 990)];
    for outer in [vec![], vec![limit("outer", "nrm", 300)]] {
        let said = judge(&outer, &inside, &[], true).to_string();
        assert!(said.starts_with("limit `backup` further in, which is full"), "{said}");
    }
    let said = judge(&[limit("outer", "nrm", 950)], &inside, &[], true).to_string();
    assert!(said.starts_with("limit `outer` (nrm"), "{said}");
}

#[test]
fn what_is_received_is_held_by_ingress_limits_alone() {
    let receiving = SocketSample { received_bit_s: GBIT, ..socket(1, Some(106)) };
    assert_eq!(say(&[limit("a", "pace", 987)], &[receiving]), "not limited by Tidegate");
}
