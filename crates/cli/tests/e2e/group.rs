//! What a limit does for a group of hosts, on traffic that a router forwards: the machine behind a port
//! sends, the limits are asked and told as the daemon does it.

use std::{
    net::UdpSocket,
    time::{Duration, Instant},
};

use tidegate_core::{Direction::Egress, Nanos, Rate};
use tidegate_instruments::plumbing::{Route, add_route, link_stats};
use tidegate_sys::{
    group::FLOWS_PER_CPU,
    libbpf_rs::num_possible_cpus,
    limit::Lease,
    net::NetNs,
    store::{PinnedLimit, RateSet, Store},
};

use crate::{
    common::{Place, wait_for},
    edt::{Bed, cable, ok},
    need_root,
};

const HOST: &str = "10.97.0.2";
const SINK_PORT: u16 = 8;
const DATAGRAM_BYTES: usize = 200;
/// On the wire, with Ethernet, IP and UDP.
const FRAME_BYTES: u64 = DATAGRAM_BYTES as u64 + 42;

/// A guest behind port `tap0` of a router, which forwards to the receiver.
struct Routed {
    bed: Bed,
    guest: NetNs,
}

impl Routed {
    fn new() -> Routed {
        let bed = Bed::new();
        let guest = NetNs::create(&format!("{}-g", bed.sender.name())).unwrap();
        cable(&guest, "eth0", "10.96.0.2", &bed.sender, "tap0", "10.96.0.1");
        for (netns, gateway) in
            [(&guest, "10.96.0.1"), (&bed.sender, HOST), (&bed.receiver, "10.97.0.1")]
        {
            let mut netlink = netns.netlink().unwrap();
            let (network, gateway) = ("0.0.0.0".parse().unwrap(), gateway.parse().unwrap());
            add_route(&mut netlink, &Route { network, prefix_len: 0, gateway }).unwrap();
        }
        bed.sender.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap()).unwrap();
        let sink = bed.receiver.run(|| UdpSocket::bind((HOST, SINK_PORT)).unwrap()).unwrap();
        sink.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let routed = Routed { bed, guest };
        // A neighbour that is not yet known loses what is sent to it.
        wait_for("the way to be known", || {
            routed.send(std::iter::once(SINK_PORT));
            sink.recv(&mut [0; DATAGRAM_BYTES]).ok()
        });
        routed
    }

    /// The guest sends a datagram to each of these ports; from one socket, so a port is a flow.
    fn send(&self, ports: impl Iterator<Item = u16> + Send) {
        let send = || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            for port in ports {
                // A queue that is full for a moment is met again.
                wait_for("room to send", || {
                    socket.send_to(&[7; DATAGRAM_BYTES], (HOST, port)).ok()
                });
            }
        };
        self.guest.run(send).unwrap();
    }

    /// The limit, as a process sees it that has just started.
    fn limit(&self, place: &Place) -> PinnedLimit {
        let open = || Store::at(place.store()).open(&place.hierarchy, "guest").unwrap();
        self.bed.sender.run(open).unwrap()
    }

    /// Packets that the receiver's device has taken in.
    fn received(&self) -> u64 {
        let mut netlink = self.bed.receiver.netlink().unwrap();
        let index = netlink.index_of("eth0").unwrap();
        link_stats(&mut netlink, index).unwrap().rx_packets
    }
}

#[test]
fn root_group_drops_forwarded_packets_at_random() {
    need_root!();
    const PACKETS: u64 = 20_000;
    const PROBABILITY: f64 = 0.3;
    let (place, routed) = (Place::new(), Routed::new());
    let words = "limit add guest --port tap0 --scheme police --egress 10gbit --burst 10mb";
    ok(&place, &routed.bed, words);
    let limit = routed.limit(&place);
    assert!(limit.maps().set_drop(Egress, PROBABILITY).unwrap());
    drop(limit);

    // Another process finds what the first has set, and a change of the limit leaves it.
    ok(&place, &routed.bed, "limit set guest --egress 20gbit");
    let limit = routed.limit(&place);
    assert!((limit.maps().drop_probability(Egress).unwrap() - PROBABILITY).abs() < 1e-9);
    let (before, received) = (limit.maps().measure(Egress).unwrap(), routed.received());
    routed.send((0..PACKETS).map(|_| 9));
    let after = limit.maps().measure(Egress).unwrap();
    let arrived = after.arrived.packets - before.arrived.packets;
    let passed = after.passed.packets - before.passed.packets;
    // Address resolution has a few packets besides.
    assert!((PACKETS..PACKETS + 20).contains(&arrived), "{arrived} arrived");
    // Five standard deviations of a binomial.
    let (mean, dropped) = (arrived as f64 * PROBABILITY, (arrived - passed) as f64);
    let bound = 5.0 * (mean * (1.0 - PROBABILITY)).sqrt();
    assert!((dropped - mean).abs() <= bound, "{dropped} of {arrived} dropped");
    let got = wait_for("all that passed", || {
        let got = routed.received() - received;
        (got + 20 >= passed).then_some(got)
    });
    assert!(got <= passed + 20, "{got} received of {passed} that passed");

    // A packet of the guest's own, such as a multicast report, may have been dropped since.
    limit.maps().leave_group(Egress).unwrap();
    let left = limit.maps().measure(Egress).unwrap();
    routed.send((0..1000).map(|_| 9));
    let free = limit.maps().measure(Egress).unwrap();
    assert_eq!(free.slowed, left.slowed);
    ok(&place, &routed.bed, "detach");
}

#[test]
fn root_group_finds_the_largest_of_forwarded_flows() {
    need_root!();
    const FLOWS: u16 = 20_000;
    const LARGEST: u16 = 1;
    /// After so many small ones a packet of the largest.
    const EACH: u16 = 10;
    let (place, routed) = (Place::new(), Routed::new());
    ok(&place, &routed.bed, "limit add guest --port tap0 --scheme police --egress 10gbit");
    let limit = routed.limit(&place);
    assert!(limit.maps().measure(Egress).unwrap().flows.is_empty());
    let small = (0..FLOWS).map(|flow| 1000 + flow);
    routed.send(small.flat_map(|port| {
        [Some(port), (port % EACH == 0).then_some(LARGEST)].into_iter().flatten()
    }));
    let measured = limit.maps().measure(Egress).unwrap();
    let cpus = num_possible_cpus().unwrap();
    assert!(measured.flows.len() <= cpus * FLOWS_PER_CPU, "{} flows", measured.flows.len());
    let all = u64::from(FLOWS / EACH) * FRAME_BYTES;
    let mut bytes: Vec<_> = measured.flows.iter().map(|flow| flow.bytes).collect();
    bytes.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
    assert!((all * 8 / 10..=all).contains(&bytes[0]), "the largest: {} of {all}", bytes[0]);
    assert!(bytes[0] > 100 * bytes[1], "{:?}", &bytes[..8]);
    // The next interval begins with nothing.
    assert!(limit.maps().measure(Egress).unwrap().flows.len() < 20);
    ok(&place, &routed.bed, "detach");
}

#[test]
fn root_group_lends_what_a_shaper_lets_through() {
    need_root!();
    const PACKETS: u64 = 500;
    let (place, routed) = (Place::new(), Routed::new());
    let rate = |text: &str| text.parse::<Rate>().unwrap();
    for scheme in ["dem", "spring"] {
        ok(
            &place,
            &routed.bed,
            &format!("limit add guest --port tap0 --scheme {scheme} --egress 1gbit"),
        );
        let lend = |lease| {
            let set = || {
                let (store, patience) = (Store::at(place.store()), Duration::from_secs(10));
                store.set_rate(&place.hierarchy, "guest", Egress, rate("500mbit"), lease, patience)
            };
            assert_eq!(routed.bed.sender.run(set).unwrap().unwrap(), RateSet::Set);
        };
        let lease = |ms: u64| {
            let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            let now = boot.tv_sec as u64 * 1_000_000_000 + boot.tv_nsec as u64;
            Some(Lease { until: Nanos(now + ms * 1_000_000), then: rate("80kbit") })
        };
        let measure = || {
            let limit = routed.limit(&place);
            routed.bed.sender.run(|| limit.maps().measure(Egress).unwrap()).unwrap()
        };
        // What passed, and what 80 kbit/s may have let through meanwhile.
        let passed = || {
            let (before, started) = (measure(), Instant::now());
            routed.send((0..PACKETS).map(|_| SINK_PORT));
            let last = || {
                let now = measure();
                let is_last = now.arrived.packets - before.arrived.packets >= PACKETS;
                is_last.then_some(now.passed.packets - before.passed.packets)
            };
            let passed = wait_for("the last packet to go on or be dropped", last);
            let earned = started.elapsed().as_secs_f64() * 80e3 / 8.0 / FRAME_BYTES as f64;
            (passed, earned as u64)
        };
        for (what, ms, all) in [
            ("lent for an hour", Some(3_600_000), true),
            ("its end has come", Some(100), false),
            ("lent again", Some(3_600_000), true),
            ("its end has come again", Some(100), false),
            ("for ever", None, true),
        ] {
            lend(ms.and_then(lease));
            let shown = Some(rate(if all { "500mbit" } else { "80kbit" }));
            wait_for(what, || (routed.limit(&place).limit.rate(Egress) == shown).then_some(()));
            let (passed, earned) = passed();
            // A tenth may have been in the queue.
            let is_right = if all { passed >= PACKETS } else { passed < PACKETS / 10 + earned };
            assert!(is_right, "{scheme}: {what}: {passed} of {PACKETS}");
        }
        ok(&place, &routed.bed, "detach");
    }
}
