//! Scheme `htb`: the kernel's HTB on devices, ports and inside their limits. Rates are compared with the
//! limit; no time is asked for by itself.

use std::{
    env, fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tidegate_core::Direction;
use tidegate_instruments::plumbing::{Route, add_route};
use tidegate_instruments::sock::tcp_info;
use tidegate_sys::{
    net::NetNs,
    store::{RateSet, Store},
};

use crate::{
    common::{Guard, Place, is_emulated, wait_for},
    edt::{BURST_BYTES, Bed, PORT, RECEIVER, cable, into, is_free, is_held, ok, refused, tidegate},
    need_root,
};

const LIMIT_BIT_S: f64 = 20e6;

pub fn json(place: &Place, bed: &Bed, words: &str) -> Value {
    serde_json::from_str(&ok(place, bed, words)).unwrap()
}

/// The devices of the sender's namespace. Whether they are up changes by itself while a bed is new.
pub fn links(bed: &Bed) -> String {
    let output = into(&bed.sender, "ip").args(["-br", "link"]).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let names = shown.lines().filter_map(|line| line.split_whitespace().next());
    names.collect::<Vec<_>>().join("\n")
}

fn apply(place: &Place, bed: &Bed, spec: &str) -> String {
    let file = place.file("limits.toml", spec);
    ok(place, bed, &format!("apply {}", file.display()))
}

#[test]
fn root_htb_limits_a_device_and_leaves_no_trace() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = (bed.qdiscs(), links(&bed));
    let words = "limit add up --dev eth0 --scheme htb --egress 20mbit --ingress 40mbit";
    ok(&place, &bed, words);
    assert!(ok(&place, &bed, "status").contains("in force"));
    assert!(bed.qdiscs().contains("htb 7467:"), "{}", bed.qdiscs());
    assert!(links(&bed).contains("tgifb"), "{}", links(&bed));
    let same = ok(&place, &bed, words);
    assert!(same.contains("nothing changed"), "{same}");
    let fast = bed.free(&bed.sender, "3 2 0 10.97.0.2");
    is_held(&fast, LIMIT_BIT_S, BURST_BYTES);
    ok(&place, &bed, "limit set up --egress 10mbit");
    let slow = bed.free(&bed.sender, "3 1 0 10.97.0.2");
    is_held(&slow, LIMIT_BIT_S / 2.0, BURST_BYTES);
    // A flood: what is sent and dropped is told. Datagrams wait up to the buffer of their socket, which the
    // queue may hold; TCP beside them sends on until something is dropped.
    let flood = bed.free(&bed.sender, "2 2 40e6 10.97.0.2");
    is_held(&flood, LIMIT_BIT_S / 2.0, BURST_BYTES);
    let status = json(&place, &bed, "status --json");
    let egress = &status["limits"][0]["egress"];
    assert!(egress["drop_full_packets"].as_u64().unwrap() > 0, "{egress}");
    let received: u64 = [&fast, &slow, &flood].map(|traffic| traffic.bytes()).iter().sum();
    assert!(egress["pass_bytes"].as_u64().unwrap() >= received, "{egress} of {received}");
    assert!(egress["mark_ns"].is_null(), "{egress}");

    // Somebody takes it off: it says so, and is put back.
    assert!(bed.tc("qdisc del dev eth0 root").status.success());
    let (_, table, _) = tidegate(&place, &bed, "status");
    assert!(table.contains("DETACHED") && table.contains("NOT ENFORCED"), "{table}");
    ok(&place, &bed, words);
    assert!(ok(&place, &bed, "status").contains("in force"));
    is_held(&bed.free(&bed.sender, "3 1 0 10.97.0.2"), LIMIT_BIT_S, BURST_BYTES);

    ok(&place, &bed, "detach");
    assert_eq!((bed.qdiscs(), links(&bed)), before);
    assert!(!place.store().exists());
    is_free(&bed.free(&bed.sender, "2 1 0 10.97.0.2"), LIMIT_BIT_S);
}

#[test]
fn root_htb_leaves_the_qdiscs_of_others_alone() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    assert!(bed.tc("qdisc add dev eth0 root handle 9: pfifo limit 7").status.success());
    let theirs = bed.qdiscs();
    let words = "limit add up --dev eth0 --scheme htb --egress 20mbit --ingress 20mbit";
    let message = refused(&place, &bed, words);
    assert!(message.contains("`pfifo 9:`") && message.contains("--force"), "{message}");
    assert_eq!(bed.qdiscs(), theirs);
    assert!(!links(&bed).contains("tgifb"), "{}", links(&bed));
    ok(&place, &bed, &format!("{words} --force"));
    assert!(bed.qdiscs().contains("htb 7467:"), "{}", bed.qdiscs());
    // It is not put back: the kernel's default is.
    ok(&place, &bed, "limit del up");
    assert_eq!(bed.qdiscs(), before);
}

#[test]
fn root_htb_says_what_cannot_be() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let cases = [
        ("run --scheme htb --egress 1mbit -- true", "on another cgroup write --scheme"),
        ("limit add a --cgroup / --scheme htb --egress 1mbit", "on another cgroup write --scheme"),
        ("limit add a --dev eth9 --scheme htb --egress 1mbit", "there is no device `eth9`"),
        ("limit add a --dev eth0 --scheme htb --egress 1mbit --rto-min 20ms", "has no `rto-min`"),
        ("limit add a --dev eth0 --scheme htb --egress 1mbit --mark 2ms", "has no `mark`; it has"),
        ("limit add a --dev eth0 --scheme edt --egress 1mbit --ecn 2ms", "has no `ecn`"),
        ("limit add a --dev eth0 --scheme htb --egress 1mbit --ecn 9s", "must be below drop"),
    ];
    for (words, part) in cases {
        let message = refused(&place, &bed, words);
        assert!(message.contains(part), "{words}: {message}");
    }
    ok(&place, &bed, "limit add up --dev eth0 --scheme htb --egress 9mbit --ingress 9mbit");
    let group = place.group.path().trim_matches('/');
    let cases = [
        ("--scheme pace", "in a tree on a device all have `htb`"),
        ("--scheme htb --ingress 1mbit", "has only egress"),
        ("--scheme htb --guarantee 10mbit", "has 9mbit to guarantee"),
    ];
    for (flags, part) in cases {
        let words = format!("limit add in --cgroup {group} --parent up {flags}");
        let message = refused(&place, &bed, &words);
        assert!(message.contains(part), "{words}: {message}");
    }
    let message = refused(&place, &bed, "limit add p --port eth0 --scheme htb --egress 1mbit");
    assert!(message.contains("already has limit `up`"), "{message}");
    ok(&place, &bed, "detach");
}

/// A guest behind a port: both directions, seen from the guest.
#[test]
fn root_htb_limits_a_port_both_ways() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let guest = guest(&bed);
    let words = "limit add guest --port tap0 --scheme htb --egress 20mbit --ingress 5mbit";
    ok(&place, &bed, words);
    let up = bed.free(&guest, "3 2 0 10.97.0.2");
    is_held(&up, LIMIT_BIT_S, BURST_BYTES);
    is_held(&bed.free(&guest, "2 0 60e6 10.97.0.2"), LIMIT_BIT_S, BURST_BYTES);
    // What the host sends to the guest.
    let listener = guest.run(|| TcpListener::bind(("0.0.0.0", PORT)).unwrap()).unwrap();
    let started = Instant::now();
    let stream = bed.sender.run(|| TcpStream::connect(("10.96.0.2", PORT)).unwrap()).unwrap();
    let (mut sink, _) = listener.accept().unwrap();
    let mut writer = stream.try_clone().unwrap();
    let sending = thread::spawn(move || {
        let block = vec![7; 1 << 16];
        while writer.write_all(&block).is_ok() {}
    });
    let mut buffer = vec![0; 1 << 16];
    let mut read = |bytes: usize| {
        let mut left = bytes;
        while left > 0 {
            left = left.saturating_sub(sink.read(&mut buffer).unwrap());
        }
    };
    let parts: Vec<_> = (0..8)
        .map(|_| {
            let begun = Instant::now();
            read(250_000);
            8.0 * 250_000.0 / begun.elapsed().as_secs_f64()
        })
        .collect();
    let mean = 8.0 * 2e6 / started.elapsed().as_secs_f64();
    assert!(mean < 1.1 * 5e6 && parts.iter().any(|bit_s| *bit_s > 0.4 * 5e6), "{mean} {parts:?}");
    drop(sink);
    sending.join().unwrap();
    let status = json(&place, &bed, "status --json");
    let guest_limit = &status["limits"][0];
    assert!(guest_limit["ingress"]["pass_bytes"].as_u64().unwrap() > 2_000_000, "{guest_limit}");
    ok(&place, &bed, "detach");
    assert!(!links(&bed).contains("tgifb"), "{}", links(&bed));
}

/// A guest whose default route leads through the sender to the receiver.
pub fn guest(bed: &Bed) -> NetNs {
    let guest = NetNs::create(&format!("{}-g", bed.sender.name())).unwrap();
    cable(&guest, "eth0", "10.96.0.2", &bed.sender, "tap0", "10.96.0.1");
    route(&guest, "10.96.0.1");
    forward(bed);
    guest
}

/// The sender forwards between the guests of its ports and the receiver.
pub fn forward(bed: &Bed) {
    route(&bed.sender, RECEIVER);
    route(&bed.receiver, "10.97.0.1");
    let forward = || fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    bed.sender.run(forward).unwrap();
}

/// Sends all else by a gateway.
fn route(netns: &NetNs, gateway: &str) {
    let mut netlink = netns.netlink().unwrap();
    let (network, gateway) = ("0.0.0.0".parse().unwrap(), gateway.parse().unwrap());
    add_route(&mut netlink, &Route { network, prefix_len: 0, gateway }).unwrap();
}

/// Sends until it is dropped.
fn greedy(mut command: std::process::Command) -> Guard {
    command.args(["helper", "--exact", "--nocapture"]).env("TIDEGATE_TEST_EDT", "60 2 0 10.97.0.2");
    Guard(command.stdout(Stdio::null()).spawn().unwrap())
}

/// Cgroups, one inside another, and a port in one device's limit: guarantees, weights, ceilings.
#[test]
fn root_htb_shares_a_device() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let guest = guest(&bed);
    let (one, two) = (place.child("one"), place.child("two"));
    let deep = place.hierarchy.create(&one, "deep").unwrap();
    // kbit/s of a part; an emulated machine carries no more.
    let unit: u32 = if is_emulated() { 200 } else { 1000 };
    let spec = |guarantee: u32| {
        let (all, guarantee) = (20 * unit, guarantee * unit);
        format!(
            r#"
            [[limit]]
            name = "up"
            scope = {{ dev = "eth0" }}
            egress = "{all}kbit"
            scheme = "htb"
            [[limit]]
            name = "one"
            scope = {{ cgroup = "{}" }}
            parent = "up"
            scheme = "htb"
            weight = 200
            [[limit]]
            name = "two"
            scope = {{ cgroup = "{}" }}
            parent = "up"
            scheme = "htb"
            guarantee = "{guarantee}kbit"
            ceiling = "{guarantee}kbit"
            [[limit]]
            name = "vm"
            scope = {{ port = "tap0" }}
            parent = "up"
            scheme = "htb"
            "#,
            one.path(),
            two.path()
        )
    };
    assert!(apply(&place, &bed, &spec(8)).contains("4 added"));
    assert!(apply(&place, &bed, &spec(8)).contains("Nothing to do"));
    let _server = bed.serve();
    let program = env::current_exe().unwrap();
    let within = |group: &tidegate_sys::cgroup::Cgroup| {
        let mut command = place.inside(group, "nsenter");
        command.arg(crate::edt::net_of(&bed.sender)).arg(&program);
        command
    };
    // What runs deeper belongs to the limit above it.
    let _traffic = [
        greedy(within(&deep)),
        greedy(within(&two)),
        greedy(into(&guest, program.to_str().unwrap())),
    ];
    let looked_at = || {
        let lines = ok(&place, &bed, "monitor --json --count 1 --interval 2s");
        move |name: &str| {
            lines
                .lines()
                .map(|line| serde_json::from_str::<Value>(line).unwrap())
                .find(|sample| sample["name"] == name)
                .and_then(|sample| sample["egress"]["used_bit_s"].as_f64())
                .unwrap()
        }
    };
    let rates = || ["up", "one", "two", "vm"].map(looked_at());
    let near = |is: f64, mbit: f64| (0.8..1.2).contains(&(is / (mbit * f64::from(unit) * 1e3)));
    // 12 Mbit/s are not guaranteed: two parts and one.
    wait_for("the shares of all", || {
        let [up, one, two, vm] = rates();
        (near(up, 20.0) && near(two, 8.0) && near(one, 8.0) && near(vm, 4.0)).then_some(())
    });
    assert!(apply(&place, &bed, &spec(2)).contains("1 changed"));
    wait_for("the shares after a change", || {
        let [up, one, two, vm] = rates();
        (near(up, 20.0) && near(two, 2.0) && near(one, 12.0) && near(vm, 6.0)).then_some(())
    });
    // One that goes leaves its part to the others.
    ok(&place, &bed, "limit del one");
    wait_for("the shares without it", || {
        let [up, two, vm] = ["up", "two", "vm"].map(looked_at());
        // `one` is now traffic of no limit, of weight 100.
        (near(up, 20.0) && near(two, 2.0) && near(vm, 9.0)).then_some(())
    });
    let (code, _, error) = tidegate(&place, &bed, "limit del up");
    assert!(code != 0 && error.contains("is the parent of two, vm"), "{error}");
    ok(&place, &bed, "detach");
    assert!(!place.store().exists());
}

/// As a group sets it, again and again: the kernel's class has the rate, not the map alone.
#[test]
fn root_htb_has_the_rate_that_a_group_sets() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme htb --egress 20mbit");
    let set = || {
        let (rate, patience) = ("7mbit".parse().unwrap(), Duration::from_secs(20));
        let store = Store::at(place.store());
        store.set_rate(&place.hierarchy, "up", Direction::Egress, rate, None, patience).unwrap()
    };
    assert_eq!(bed.sender.run(set).unwrap(), RateSet::Set);
    let classes = String::from_utf8(bed.tc("class show dev eth0").stdout).unwrap();
    assert!(classes.contains("rate 7Mbit") && !classes.contains("20Mbit"), "{classes}");
    ok(&place, &bed, "detach");
}

/// TCP that speaks ECN is marked at the queue, and the queue stays short.
#[test]
fn root_htb_marks_at_its_queue() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    for netns in [&bed.sender, &bed.receiver] {
        netns.run(|| fs::write("/proc/sys/net/ipv4/tcp_ecn", "1").unwrap()).unwrap();
        let cubic = || fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno");
        netns.run(cubic).unwrap().unwrap();
    }
    ok(
        &place,
        &bed,
        "limit add up --dev eth0 --scheme htb --egress 20mbit --ecn 60kb --drop 500ms",
    );
    let traffic = bed.free(&bed.sender, "3 4 0 10.97.0.2");
    is_held(&traffic, LIMIT_BIT_S, BURST_BYTES);
    let status = json(&place, &bed, "status --json");
    let egress = &status["limits"][0]["egress"];
    let marked = egress["mark_packets"].as_u64().unwrap();
    assert!(marked > 0, "{egress}");
    assert_eq!(egress["drop_full_packets"], 0, "{egress}");
    // Without the threshold it marks no more.
    let changed = ok(&place, &bed, "limit set up --ecn none");
    assert!(changed.contains("egress ecn 60kb -> default"), "{changed}");
    let status = json(&place, &bed, "status --json");
    assert!(status["limits"][0]["egress"]["mark_ns"].is_null());
    ok(&place, &bed, "detach");
}

/// Another kind of queue takes the place of the one that has dropped packets, and the limit counts on.
#[test]
fn root_htb_counts_on_when_its_queue_is_exchanged() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme htb --egress 1mbit");
    // For `fq_codel`, which some kernels lack, any queue stands that is none of a limit with `ecn`.
    for words in [
        "qdisc del dev eth0 parent 7467:10",
        "qdisc add dev eth0 parent 7467:10 handle 7501: pfifo limit 2",
    ] {
        assert!(bed.tc(words).status.success(), "{words}");
    }
    let dropped = || {
        let status = json(&place, &bed, "status --json");
        status["limits"][0]["egress"]["drop_full_packets"].as_u64().unwrap()
    };
    let wait_for_more_than = |before| {
        wait_for("drops", || {
            let send = || {
                // More than the queue and the buffer of one socket hold.
                for _ in 0..4 {
                    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                    for _ in 0..60 {
                        socket.send_to(&[0; 1000], (RECEIVER, PORT)).unwrap();
                    }
                }
            };
            bed.sender.run(send).unwrap();
            Some(dropped()).filter(|now| *now > before)
        })
    };
    let before = wait_for_more_than(0);
    ok(&place, &bed, "limit set up --ecn 60kb");
    assert!(bed.qdiscs().contains("bfifo 7501:"), "{}", bed.qdiscs());
    let now = dropped();
    assert!(now >= before, "{now} after {before}");
    let before = wait_for_more_than(now);
    ok(&place, &bed, "limit set up --ecn 70kb");
    let now = dropped();
    assert!(now >= before, "{now} after {before}");
    ok(&place, &bed, "detach");
}

/// A rate that changes under a transfer: nothing that waits is lost.
#[test]
fn root_htb_a_rate_changes_under_a_transfer() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme htb --egress 20mbit --drop 500ms");
    let listener = bed.receiver.run(|| TcpListener::bind(("0.0.0.0", PORT)).unwrap()).unwrap();
    let stream = bed.sender.run(|| TcpStream::connect((RECEIVER, PORT)).unwrap()).unwrap();
    let (mut sink, _) = listener.accept().unwrap();
    let reader = thread::spawn(move || std::io::copy(&mut sink, &mut std::io::sink()).unwrap());
    let mut writer = stream.try_clone().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let going = stop.clone();
    let sending = thread::spawn(move || {
        let block = vec![7; 1 << 16];
        let mut blocks = 0;
        while !going.load(Ordering::Relaxed) {
            writer.write_all(&block).unwrap();
            blocks += 1;
        }
        blocks << 16
    });
    let sent = || tcp_info(&stream).unwrap().data_segments_sent;
    let dropped =
        || json(&place, &bed, "status --json")["limits"][0]["egress"]["drop_full_packets"].clone();
    // Where there is fq_codel it drops by itself, now and then.
    let is_fifo = !bed.qdiscs().contains("fq_codel");
    for rate in ["10mbit", "40mbit", "20mbit"] {
        let first = sent();
        wait_for("the transfer to go on", || (sent() > first + 500).then_some(()));
        let before = dropped();
        ok(&place, &bed, &format!("limit set up --egress {rate}"));
        let then = sent();
        let more = || (sent() > then + 300).then_some(());
        wait_for("the transfer to go on after the change", more);
        assert!(!is_fifo || dropped() == before, "what waited was dropped");
    }
    stop.store(true, Ordering::Relaxed);
    let written: u64 = sending.join().unwrap();
    drop(stream);
    assert_eq!(reader.join().unwrap(), written);
    ok(&place, &bed, "detach");
}
