//! Compares the queueing disciplines that we set with what `tc` shows. Needs root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::process::Command;

use serde_json::Value;
use tidegate_instruments::qdiscs::{Cake, DestinationFilter, Fq, Netem, add_filter};
use tidegate_sys::net::{
    NetNs, Netlink, VethPair,
    qdisc::{Clsact, Fifo, FqCodel, Handle, Htb, HtbClass, Place, Qdisc, QueueStats, Tbf, Verb},
};

/// Two devices in a namespace of their own; what `tc` shows of the first.
struct Bench {
    netns: NetNs,
    netlink: Netlink,
    ifindex: u32,
}

impl Bench {
    /// None, and a line that says so, without root.
    fn new(test: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP {test}: needs root");
            return None;
        }
        let netns = NetNs::create(&format!("tidegate-{}-{test}", std::process::id())).unwrap();
        let mut netlink = netns.netlink().unwrap();
        let pair = VethPair { name: "a", peer: "b", peer_netns: None };
        netlink.add_veth(&pair).unwrap();
        let ifindex = netlink.index_of("a").unwrap();
        netlink.set_up(ifindex, true).unwrap();
        Some(Self { netns, netlink, ifindex })
    }

    fn tc(&self, words: &str) -> String {
        let output =
            self.netns.run(|| Command::new("tc").args(words.split(' ')).output().unwrap()).unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "tc {words}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn tc_json(&self, words: &str) -> Vec<Value> {
        serde_json::from_str(&self.tc(&format!("-s -d -j {words} show dev a"))).unwrap()
    }

    fn at(&self, parent: Handle, handle: Handle) -> Place {
        Place { ifindex: self.ifindex, parent, handle }
    }
}

const ONE: Handle = Handle::new(1, 0);

/// What we set is word for word what `tc` sets.
#[test]
fn root_htb_equals_tc() {
    let Some(mut bench) = Bench::new("root_htb_equals_tc") else { return };
    let cases = [
        (HtbClass::new(1_000_000_000), "rate 1gbit"),
        (HtbClass::new(50_000_000), "rate 50mbit"),
        (HtbClass::new(100_000_000_000), "rate 100gbit"),
        (
            HtbClass {
                ceil_bit_s: Some(40_000_000_000),
                burst_bytes: Some(65536),
                cburst_bytes: Some(131072),
                priority: 2,
                quantum_bytes: 60000,
                mtu_bytes: 9000,
                ..HtbClass::new(300_000_000)
            },
            "rate 300mbit ceil 40gbit burst 65536 cburst 131072 prio 2 quantum 60000 mtu 9000",
        ),
    ];
    for (class, words) in cases {
        let place = bench.at(Handle::ROOT, ONE);
        bench.netlink.set_qdisc(Verb::Add, place, &Htb::new(0x10)).unwrap();
        let place = bench.at(ONE, Handle::new(1, 0x10));
        bench.netlink.set_class(Verb::Add, place, &class).unwrap();
        let ours = (bench.tc("-s -d qdisc show dev a"), bench.tc("-s -d class show dev a"));
        bench.netlink.delete_qdisc(bench.ifindex, Handle::ROOT).unwrap();

        bench.tc("qdisc add dev a root handle 1: htb default 10");
        bench.tc(&format!("class add dev a parent 1: classid 1:10 htb {words}"));
        let theirs = (bench.tc("-s -d qdisc show dev a"), bench.tc("-s -d class show dev a"));
        bench.tc("qdisc del dev a root");
        assert_eq!(ours, theirs, "{words}");
    }
}

#[test]
fn root_netem_equals_tc() {
    let test = "root_netem_equals_tc";
    let Some(mut bench) = Bench::new(test) else { return };
    let netem = Netem {
        delay_ns: 10_000_000,
        rate_bit_s: Some(100_000_000),
        limit_packets: 5000,
        loss: 0.01,
        seed: None,
    };
    let place = bench.at(Handle::ROOT, ONE);
    match bench.netlink.set_qdisc(Verb::Add, place, &netem) {
        Err(error) if error.is_absent() => {
            eprintln!("SKIP {test}: this kernel has no netem");
            return;
        }
        outcome => outcome.unwrap(),
    }
    // The seed is another at each time.
    let show = |bench: &Bench| {
        let mut shown = bench.tc_json("qdisc");
        shown[0]["options"].as_object_mut().unwrap().remove("seed");
        shown
    };
    let ours = show(&bench);
    bench.netlink.delete_qdisc(bench.ifindex, Handle::ROOT).unwrap();
    bench.tc("qdisc add dev a root handle 1: netem limit 5000 delay 10ms loss 1% rate 100mbit");
    assert_eq!(ours, show(&bench));
}

#[test]
fn root_fair_queues_equal_tc() {
    let test = "root_fair_queues_equal_tc";
    let Some(mut bench) = Bench::new(test) else { return };
    let cases = [
        (&Fq as &dyn Qdisc, "fq"),
        (&FqCodel::usual(), "fq_codel"),
        (&Cake { bandwidth_bit_s: 50_000_000 }, "cake bandwidth 50mbit"),
    ];
    for (qdisc, words) in cases {
        let place = bench.at(Handle::ROOT, ONE);
        match bench.netlink.set_qdisc(Verb::Add, place, qdisc) {
            Err(error) if error.is_absent() => {
                eprintln!("SKIP {test}: this kernel has no {}", qdisc.kind());
                continue;
            }
            outcome => outcome.unwrap(),
        }
        let options = |bench: &Bench| bench.tc_json("qdisc")[0]["options"].clone();
        let ours = options(&bench);
        bench.netlink.delete_qdisc(bench.ifindex, Handle::ROOT).unwrap();
        bench.tc(&format!("qdisc add dev a root handle 1: {words}"));
        assert_eq!(ours, options(&bench), "{words}");
        bench.tc("qdisc del dev a root");
    }
}

#[test]
fn root_tbf_and_fifos_equal_tc() {
    let Some(mut bench) = Bench::new("root_tbf_and_fifos_equal_tc") else { return };
    let one = Tbf { rate_bit_s: 1_000_000_000, burst_bytes: 125_000, limit_bytes: 6_375_000 };
    let forty = Tbf { rate_bit_s: 40_000_000_000, burst_bytes: 5_000_000, limit_bytes: 9_000_000 };
    let cases = [
        (&one as &dyn Qdisc, "tbf rate 1gbit burst 125000 latency 50ms"),
        (&forty, "tbf rate 40gbit burst 5000000 limit 9000000"),
        (&Fifo::Packets(123), "pfifo limit 123"),
        (&Fifo::Bytes(45678), "bfifo limit 45678"),
    ];
    for (qdisc, words) in cases {
        let place = bench.at(Handle::ROOT, ONE);
        bench.netlink.set_qdisc(Verb::Add, place, qdisc).unwrap();
        let ours = bench.tc_json("qdisc");
        bench.netlink.delete_qdisc(bench.ifindex, Handle::ROOT).unwrap();
        bench.tc(&format!("qdisc add dev a root handle 1: {words}"));
        assert_eq!(ours, bench.tc_json("qdisc"), "{words}");
        bench.tc("qdisc del dev a root");
    }
}

#[test]
fn root_change_needs_an_object_and_add_refuses_one() {
    let Some(mut bench) = Bench::new("root_change_needs_an_object_and_add_refuses_one") else {
        return;
    };
    let root = bench.at(Handle::ROOT, ONE);
    let leaf = bench.at(ONE, Handle::new(1, 1));
    let class = HtbClass::new(8_000_000);
    assert!(bench.netlink.set_class(Verb::Add, leaf, &class).is_err());
    bench.netlink.set_qdisc(Verb::Add, root, &Htb::new(1)).unwrap();
    assert!(bench.netlink.set_class(Verb::Change, leaf, &class).is_err());
    bench.netlink.set_class(Verb::Add, leaf, &class).unwrap();
    let error = bench.netlink.set_class(Verb::Add, leaf, &class).unwrap_err();
    assert!(error.is_exists(), "{error}");
    bench.netlink.set_class(Verb::Change, leaf, &HtbClass::new(16_000_000)).unwrap();
    assert!(bench.tc("class show dev a").contains("rate 16Mbit"));
    bench.netlink.set_class(Verb::Replace, leaf, &HtbClass::new(24_000_000)).unwrap();
    assert!(bench.tc("class show dev a").contains("rate 24Mbit"));
    bench.netlink.delete_class(bench.ifindex, leaf.handle).unwrap();
    assert!(bench.netlink.class_stats(bench.ifindex).unwrap().is_empty());
}

#[test]
fn root_clsact_goes_without_a_trace() {
    let Some(mut bench) = Bench::new("root_clsact_goes_without_a_trace") else { return };
    let before = bench.tc_json("qdisc");
    let place = bench.at(Handle::CLSACT, Handle::new(0xffff, 0));
    bench.netlink.set_qdisc(Verb::Add, place, &Clsact).unwrap();
    assert!(bench.tc("qdisc show dev a").contains("qdisc clsact ffff: parent ffff:fff1"));
    let filters = bench.netlink.filters(bench.ifindex, Handle::CLSACT_INGRESS).unwrap();
    assert_eq!(filters, []);
    bench.netlink.delete_qdisc(bench.ifindex, Handle::CLSACT).unwrap();
    assert_eq!(bench.tc_json("qdisc"), before);
}

/// Packets go to the class of their destination, and the counters say so as `tc` does.
#[test]
fn root_filters_steer_and_counters_agree() {
    let Some(mut bench) = Bench::new("root_filters_steer_and_counters_agree") else { return };
    let ifindex = bench.ifindex;
    let peer = bench.netlink.index_of("b").unwrap();
    bench.netlink.set_up(peer, true).unwrap();
    bench.netlink.add_address(ifindex, "10.99.0.1".parse().unwrap(), 24).unwrap();
    bench.netlink.add_address(ifindex, "fd99::1".parse().unwrap(), 64).unwrap();
    // No one answers on the other end: neighbours are set by hand.
    for (to, tool) in
        [("10.99.0.2", "-4"), ("10.99.0.3", "-4"), ("fd99::2", "-6"), ("fd99::3", "-6")]
    {
        let words = ["neigh", "add", to, "lladdr", "02:00:00:00:00:01", "dev", "a"];
        let run = || Command::new("ip").arg(tool).args(words).status().unwrap();
        assert!(bench.netns.run(run).unwrap().success());
    }
    let root = bench.at(Handle::ROOT, ONE);
    bench.netlink.set_qdisc(Verb::Add, root, &Htb::new(0x30)).unwrap();
    for minor in [0x10, 0x20, 0x30] {
        let leaf = bench.at(ONE, Handle::new(1, minor));
        bench.netlink.set_class(Verb::Add, leaf, &HtbClass::new(1_000_000_000)).unwrap();
    }
    for (to, bits, minor) in [
        ("10.99.0.2", 32, 0x10),
        ("10.99.0.3", 32, 0x20),
        ("fd99::2", 128, 0x10),
        ("fd99::3", 128, 0x20),
    ] {
        let filter = DestinationFilter {
            ifindex,
            parent: ONE,
            network: to.parse().unwrap(),
            prefix_len: bits,
            class: Handle::new(1, minor),
        };
        add_filter(&mut bench.netlink, &filter).unwrap();
    }
    let before: Vec<_> = bench.netlink.class_stats(ifindex).unwrap();
    bench
        .netns
        .run(|| {
            let v4 = std::net::UdpSocket::bind("10.99.0.1:0").unwrap();
            let v6 = std::net::UdpSocket::bind("[fd99::1]:0").unwrap();
            v4.send_to(&[0; 100], "10.99.0.2:9").unwrap();
            v4.send_to(&[0; 100], "10.99.0.3:9").unwrap();
            v4.send_to(&[0; 100], "10.99.0.3:9").unwrap();
            v6.send_to(&[0; 100], "[fd99::2]:9").unwrap();
            v6.send_to(&[0; 100], "[fd99::3]:9").unwrap();
        })
        .unwrap();
    let after = bench.netlink.class_stats(ifindex).unwrap();
    let grown = |minor| {
        let of = |all: &[QueueStats]| {
            all.iter().find(|s| s.handle == Handle::new(1, minor)).unwrap().sent_packets
        };
        of(&after) - of(&before)
    };
    assert_eq!([grown(0x10), grown(0x20)], [2, 3]);
    let bytes = |minor| after.iter().find(|s| s.handle.minor == minor).unwrap().sent_bytes;
    assert_eq!(bytes(0x10), (14 + 20 + 8 + 100) + (14 + 40 + 8 + 100));

    // The same numbers as tc's own; the default class may get background IPv6 traffic meanwhile.
    let shown = bench.tc("-s class show dev a classid 1:10");
    assert!(shown.contains(&format!("Sent {} bytes 2 pkt", bytes(0x10))), "{shown}");
    let qdiscs = bench.netlink.qdisc_stats(ifindex).unwrap();
    let htb = qdiscs.iter().find(|q| q.kind == "htb").unwrap();
    assert_eq!((htb.handle, htb.parent), (ONE, Handle::ROOT));
    assert!(htb.sent_packets >= 5);
    assert_eq!((htb.drops, htb.queued_packets, htb.backlog_bytes), (0, 0, 0));
}
