//! Schemes `dem` and `spring` on a port and on a device. That traffic passes, no faster than it may, and that
//! its ACKs are changed; how short the queue is, the tests of `tidegate-sys` look at.

use std::{env, fs, process::Stdio};

use serde_json::Value;
use tidegate_instruments::plumbing::{add_bridge, set_master};
use tidegate_sys::{
    libbpf_rs::{MapCore, MapHandle, query::MapInfoIter},
    net::{NetNs, VethPair},
};

use crate::{
    common::{Guard, Place, is_emulated, wait_for},
    edt::{BURST_BYTES, Bed, Traffic, into, is_at_most, is_free, ok, refused, tidegate},
    htb::{guest, json, links},
    need_root,
};

const LIMIT_BIT_S: f64 = 20e6;
const TRAFFIC: &str = "3 2 0 10.97.0.2";
/// Probes that take longer wait in a queue.
const STANDING_US: u64 = 5_000;

/// What can be seen of a limit from outside.
fn traces(bed: &Bed) -> (String, String, Vec<String>) {
    let show = |words: &str| String::from_utf8(bed.tc(words).stdout).unwrap();
    let filters = ["ingress", "egress"].map(|side| show(&format!("filter show dev tap0 {side}")));
    (show("qdisc show"), links(bed), filters.into())
}

/// Not above the limit, and not nothing. Where the machine is busy a short queue runs empty: how far below is
/// not asked.
pub fn is_below(traffic: &Traffic, bit_s: f64) {
    is_at_most(traffic, 1.02 * bit_s, BURST_BYTES);
    assert!(traffic.bit_s() > 0.02 * bit_s, "{traffic:?}");
}

/// RFC 3168, which `dem` needs.
pub fn use_ecn(netns: &NetNs) {
    netns.run(|| fs::write("/proc/sys/net/ipv4/tcp_ecn", "1").unwrap()).unwrap();
}

#[test]
fn root_acks_the_queue_of_a_port_tells_its_guest() {
    need_root!();
    for (scheme, told) in [("spring", "slow_packets"), ("dem", "mark_packets")] {
        let (place, bed) = (Place::new(), Bed::new());
        let guest = guest(&bed);
        [&guest, &bed.receiver].into_iter().for_each(use_ecn);
        let before = traces(&bed);
        let add = |egress: &str| {
            format!(
                "limit add guest --port tap0 --scheme {scheme} --egress {egress} --ingress 40mbit"
            )
        };
        ok(&place, &bed, &add("20mbit"));
        assert!(ok(&place, &bed, "status").contains("in force"));
        assert!(ok(&place, &bed, &add("20mbit")).contains("nothing changed"));
        is_below(&bed.free(&guest, TRAFFIC), LIMIT_BIT_S);
        let status = json(&place, &bed, "status --json");
        let limit = &status["limits"][0];
        assert_eq!(limit["scheme"], scheme, "{limit}");
        let egress = &limit["egress"];
        assert!(egress[told].as_u64().unwrap() > 0, "{egress}");
        assert!(egress["pass_bytes"].as_u64().unwrap() > 100_000, "{egress}");
        // They go the other way: nothing of the rate is theirs.
        assert_eq!(egress[told.replace("packets", "bytes")], 0, "{egress}");

        // Another rate, without a new connection being needed.
        let map = place.store().join("guest/acks_egress/limits");
        let map_id = || MapHandle::from_pinned_path(&map).unwrap().info().unwrap().info.id;
        let id = map_id();
        ok(&place, &bed, "limit set guest --egress 10mbit");
        assert_eq!(map_id(), id);
        is_below(&bed.free(&guest, TRAFFIC), LIMIT_BIT_S / 2.0);
        // Another scheme, and back: a threshold of that one is not of this.
        ok(&place, &bed, "limit set guest --scheme htb --ecn 60kb");
        let changed = ok(&place, &bed, &format!("limit set guest --scheme {scheme}"));
        assert!(changed.contains(&format!("scheme htb -> {scheme}")), "{changed}");
        let status = json(&place, &bed, "status --json");
        assert!(status["limits"][0]["egress"]["mark_ns"].is_null(), "{status}");

        // Somebody takes the qdisc off: it says so, and is put back.
        assert!(bed.tc("qdisc del dev tap0 root").status.success());
        let (_, table, _) = tidegate(&place, &bed, "status");
        assert!(table.contains("DETACHED") && table.contains("NOT ENFORCED"), "{table}");
        ok(&place, &bed, &add("20mbit"));
        assert!(ok(&place, &bed, "status").contains("in force"));
        is_below(&bed.free(&guest, TRAFFIC), LIMIT_BIT_S);

        let id = map_id();
        ok(&place, &bed, "detach");
        assert_eq!(traces(&bed), before);
        assert!(!place.store().exists());
        wait_for("the end of the programs' maps", || {
            (!MapInfoIter::default().any(|map| map.id == id)).then_some(())
        });
        is_free(&bed.free(&guest, "2 1 0 10.97.0.2"), LIMIT_BIT_S);
    }
}

/// A guest on the receiver's network: the sender is a bridge of its port and the way out.
fn bridged_guest(bed: &Bed) -> NetNs {
    let guest = NetNs::create(&format!("{}-g", bed.sender.name())).unwrap();
    let mut host = bed.sender.netlink().unwrap();
    host.add_veth(&VethPair { name: "tap0", peer: "eth0", peer_netns: Some(&guest) }).unwrap();
    add_bridge(&mut host, "br0").unwrap();
    let bridge = host.index_of("br0").unwrap();
    for port in ["tap0", "eth0"] {
        let index = host.index_of(port).unwrap();
        set_master(&mut host, index, bridge).unwrap();
        host.set_up(index, true).unwrap();
    }
    host.set_up(bridge, true).unwrap();
    let mut netlink = guest.netlink().unwrap();
    let index = netlink.index_of("eth0").unwrap();
    netlink.add_address(index, "10.97.0.3".parse().unwrap(), 24).unwrap();
    netlink.set_up(index, true).unwrap();
    guest
}

/// The rate is held, and what waits is less than in an HTB as people set it up, in the same run.
fn holds(bed: &Bed, guest: &NetNs) {
    let place = Place::new();
    [guest, &bed.receiver].into_iter().for_each(use_ecn);
    // The machine's may be BBR, which heeds no ECE.
    let reno = || fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno").unwrap();
    guest.run(reno).unwrap();
    // A segment of 64 KB takes 26 ms at 20 Mbit/s, which is all that an emulated machine carries.
    let mbit = if is_emulated() { 20 } else { 200 };
    let class = format!("class add dev eth0 parent 1: classid 1:1 htb rate {mbit}mbit");
    for words in ["qdisc add dev eth0 root handle 1: htb default 1", &class] {
        assert!(bed.tc(words).status.success(), "{words}");
    }
    let peer = bed.free(guest, TRAFFIC);
    assert!(bed.tc("qdisc del dev eth0 root").status.success());
    for scheme in ["dem", "spring"] {
        let add = format!("limit add guest --port tap0 --scheme {scheme} --egress {mbit}mbit");
        ok(&place, bed, &add);
        let traffic = bed.free(guest, TRAFFIC);
        is_below(&traffic, f64::from(mbit) * 1e6);
        // An emulated machine has no time of its own: of its rate and its delays nothing is asked.
        if !is_emulated() {
            assert!(
                traffic.best_bit_s() > peer.bit_s() / 4.0,
                "{scheme}: {traffic:?}, htb {peer:?}"
            );
            // Seen: a five-hundredth. A machine that is too slow to fill the queue has nothing to compare.
            let waits = [&traffic, &peer].map(|traffic| traffic.rtt_us(50));
            let has_queue = waits[1] > STANDING_US;
            assert!(!has_queue || waits[0] < waits[1] / 4, "{scheme}: {traffic:?}, htb {peer:?}");
        }
        ok(&place, bed, "detach");
    }
}

#[test]
fn root_acks_hold_a_routed_guest() {
    need_root!();
    let bed = Bed::new();
    holds(&bed, &guest(&bed));
}

#[test]
fn root_acks_hold_a_bridged_guest() {
    need_root!();
    let bed = Bed::new();
    holds(&bed, &bridged_guest(&bed));
}

/// This host's own sockets, by a device: what `explain` and `monitor` say.
#[test]
fn root_acks_the_device_is_explained() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme spring --egress 20mbit");
    let _server = bed.serve();
    let mut command = into(&bed.sender, env::current_exe().unwrap().to_str().unwrap());
    command
        .args(["helper", "--exact", "--nocapture"])
        .env("TIDEGATE_TEST_EDT", "600 2 0 10.97.0.2");
    let sender = Guard(command.stdout(Stdio::null()).spawn().unwrap());
    wait_for("its ACKs to be changed", || {
        let status = json(&place, &bed, "status --json");
        (status["limits"][0]["egress"]["slow_packets"].as_u64()? > 100).then_some(())
    });
    let text = ok(&place, &bed, &format!("explain {}", sender.0.id()));
    assert!(text.contains("Limit `up` on device `eth0`: spring"), "{text}");
    assert!(text.contains("egress 20mbit") && text.contains("\n    slowed "), "{text}");
    let line = ok(&place, &bed, "monitor --json --count 1 --interval 1s");
    let sample: Value = serde_json::from_str(line.trim()).unwrap();
    let used = sample["egress"]["used_bit_s"].as_f64().unwrap();
    assert!(used > 0.0 && used < 1.1 * LIMIT_BIT_S, "{sample}");
    drop(sender);
    ok(&place, &bed, "detach");
}

#[test]
fn root_acks_the_refused_say_what_to_type() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let group = place.group.path().trim_matches('/').to_owned();
    for scheme in ["dem", "spring"] {
        let add = format!("limit add a --dev eth0 --scheme {scheme} --egress 9mbit");
        for (words, part) in [
            (format!("run --scheme {scheme} --egress 1mbit -- true"), "on a cgroup write --scheme"),
            (
                format!("limit add a --cgroup {group} --scheme {scheme} --egress 1mbit"),
                "on a cgroup write --scheme",
            ),
            (format!("{add} --mark 2ms"), "has no `mark`"),
            (format!("{add} --ecn 60kb"), "has no `ecn`"),
            (format!("{add} --exempt 10.0.0.0/8"), "has no `exempt`"),
            (format!("{add} --loopback"), "has no `loopback`"),
            (format!("{add} --rto-min 20ms"), "has no `rto-min`"),
        ] {
            let message = refused(&place, &bed, &words);
            assert!(message.contains(part), "{words}: {message}");
        }
        assert!(!place.store().exists());
        ok(&place, &bed, &add);
        for (flags, part) in [
            (format!("--scheme {scheme}"), "neither has a parent nor is one"),
            ("--scheme htb".to_owned(), "in a tree on a device all have `htb`"),
        ] {
            let words = format!("limit add in --cgroup {group} --parent a {flags}");
            let message = refused(&place, &bed, &words);
            assert!(message.contains(part), "{words}: {message}");
        }
        ok(&place, &bed, "detach");
    }
}
