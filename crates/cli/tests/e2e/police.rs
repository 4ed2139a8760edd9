//! Scheme `police` on every scope: rates are compared with the limit; nothing is asked of times.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use tidegate_instruments::plumbing::{Route, add_route};
use tidegate_sys::net::NetNs;

use crate::{
    common::{Place, wait_for},
    edt::{self, Bed, PORT, into, is_at_most, is_free, is_held, ok, refused},
    need_root,
};

const LIMIT: &str = "20mbit";
const LIMIT_BIT_S: f64 = 20e6;

#[test]
fn root_police_says_what_cannot_be() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let add = |flags: &str| {
        let words = format!("limit add a --dev eth0 --scheme police --egress 20mbit {flags}");
        refused(&place, &bed, &words)
    };
    assert!(add("--mark 1ms").contains("--mark: scheme `police` has no `mark`; it has"));
    assert!(add("--drop 1ms").contains("--drop: scheme `police` has no `drop`"));
    assert!(add("--rto-min 20ms").contains("scheme `police` has no `rto-min`"));
    assert!(add("--burst 0b").contains("--burst: burst 0b is out of range"));
    assert!(add("--loopback").contains("a limit on a device has no loopback traffic"));
    assert!(!place.store().exists());
}

#[test]
fn root_police_a_command_over_udp() {
    need_root!();
    let bed = Bed::new();
    let flags = ["--scheme", "police", "--egress", LIMIT, "--burst", "250kb"];
    is_held(&bed.run(&Place::new(), &flags, "2 0 60e6 10.97.0.2"), LIMIT_BIT_S, 250_000);
}

/// Both directions of a device, a rate that changes, and the device as it was.
#[test]
fn root_police_limits_a_device_and_leaves_no_trace() {
    need_root!();
    let bed = Bed::new();
    let place = Place::new();
    let qdiscs = || String::from_utf8(bed.tc("qdisc show dev eth0").stdout).unwrap();
    let before = qdiscs();
    ok(&place, &bed, "limit add up --dev eth0 --scheme police --egress 20mbit --ingress 10mbit");
    assert!(ok(&place, &bed, "status").contains("in force"));
    let same = "limit add up --dev eth0 --scheme police --egress 20mbit --ingress 10mbit";
    assert!(ok(&place, &bed, same).contains("nothing changed"));
    // Without a burst the bucket first gives a quarter of a second.
    is_held(&bed.free(&bed.sender, "2 0 60e6 10.97.0.2"), LIMIT_BIT_S, 625_000);
    ok(&place, &bed, "limit set up --egress 10mbit --burst 50kb");
    is_held(&bed.free(&bed.sender, "2 0 60e6 10.97.0.2"), LIMIT_BIT_S / 2.0, 50_000);
    let status: serde_json::Value =
        serde_json::from_str(&ok(&place, &bed, "status --json")).unwrap();
    let limit = &status["limits"][0];
    assert_eq!((&limit["dev"], &limit["scheme"]), (&"eth0".into(), &"police".into()));
    for threshold in ["mark_ns", "drop_ns"] {
        assert!(limit["egress"][threshold].is_null(), "it has no queue: {limit}");
    }
    assert!(limit["egress"]["drop_full_packets"].as_u64().unwrap() > 0, "{limit}");
    assert!(limit["egress"]["backlog_ns"].as_i64().unwrap() <= 0, "{limit}");
    assert!(limit["ingress"]["pass_packets"].as_u64().unwrap() > 10, "{limit}");
    ok(&place, &bed, "detach");
    assert_eq!(qdiscs(), before);
    is_free(&bed.free(&bed.sender, "2 0 60e6 10.97.0.2"), LIMIT_BIT_S / 2.0);
}

/// What a machine sends and what it receives, from the host's side of its interface.
#[test]
fn root_police_limits_a_port_in_both_directions() {
    need_root!();
    let bed = Bed::new();
    let guest = NetNs::create(&format!("{}-g", bed.sender.name())).unwrap();
    edt::cable(&guest, "eth0", "10.96.0.2", &bed.sender, "tap0", "10.96.0.1");
    let via = |netns: &NetNs, gateway: &str| {
        let mut netlink = netns.netlink().unwrap();
        let (network, gateway) = ("0.0.0.0".parse().unwrap(), gateway.parse().unwrap());
        add_route(&mut netlink, &Route { network, prefix_len: 0, gateway }).unwrap();
    };
    via(&guest, "10.96.0.1");
    via(&bed.sender, "10.97.0.2");
    via(&bed.receiver, "10.97.0.1");
    bed.sender.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap()).unwrap();

    let place = Place::new();
    let add =
        "limit add guest --port tap0 --scheme police --egress 20mbit --ingress 5mbit --burst 250kb";
    ok(&place, &bed, add);
    is_held(&bed.free(&guest, "2 0 60e6 10.97.0.2"), LIMIT_BIT_S, 250_000);
    let status: serde_json::Value =
        serde_json::from_str(&ok(&place, &bed, "status --json")).unwrap();
    let limit = &status["limits"][0];
    let egress = limit["egress"]["pass_bytes"].as_u64().unwrap();
    let ingress = limit["ingress"]["pass_bytes"].as_u64().unwrap();
    assert!(egress > 20 * ingress, "{limit}");
    ok(&place, &bed, "detach");
}

/// A rate that goes down and up under a transfer: the connection goes on.
#[test]
fn root_police_a_rate_changes_under_a_transfer() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme police --egress 20mbit");
    let listener = bed.receiver.run(|| TcpListener::bind(("0.0.0.0", PORT)).unwrap()).unwrap();
    let stream = bed.sender.run(|| TcpStream::connect(("10.97.0.2", PORT)).unwrap()).unwrap();
    let (mut sink, _) = listener.accept().unwrap();
    let mut writer = stream.try_clone().unwrap();
    // Ends when the connection is shut down.
    let sending = thread::spawn(move || while writer.write_all(&[7; 1 << 14]).is_ok() {});
    let mut total = 0;
    let mut read = |bytes: usize| {
        let mut buffer = vec![0; 1 << 16];
        let target = total + bytes;
        sink.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        while total < target {
            total += sink.read(&mut buffer).expect("the transfer goes on");
        }
    };
    for rate in ["2mbit --burst 20kb", "50mbit", "5mbit", "20mbit --burst 100ms"] {
        ok(&place, &bed, &format!("limit set up --egress {rate}"));
        read(400_000);
    }
    stream.shutdown(Shutdown::Both).unwrap();
    sending.join().unwrap();
    ok(&place, &bed, "detach");
}

#[test]
fn root_police_takes_off_its_filters_when_the_limit_is_deleted() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme police --ingress 10mbit");
    ok(&place, &bed, "limit del up");
    for side in ["ingress", "egress"] {
        wait_for("the end of the filters", || {
            let mut tc = into(&bed.sender, "tc");
            let shown = tc.args(["filter", "show", "dev", "eth0", side]).output();
            shown.unwrap().stdout.is_empty().then_some(())
        });
    }
}

/// trTCM: the committed rate is green, up to the peak rate yellow, the rest is dropped; TCP goes on through
/// packets that are written to.
#[test]
fn root_police_colours_what_it_passes() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let spec = |actions: &str| {
        let text = format!(
            "[[limit]]\nname = \"up\"\nscope = {{ dev = \"eth0\" }}\nscheme = \"police\"\n\
             egress = \"5mbit\"\nburst = \"50kb\"\n\
             meter = {{ type = \"trtcm\", pir = \"20mbit\", pbs = \"100kb\" }}\n\
             actions = {{ {actions} }}\n"
        );
        let file = place.file("limits.toml", &text);
        ok(&place, &bed, &format!("apply {}", file.display()))
    };
    let done = spec("green = \"dscp af11\", yellow = \"dscp af12\"");
    assert!(done.contains("meter trtcm,pir=20mbit,pbs=100kb"), "{done}");
    is_held(&bed.free(&bed.sender, "2 0 60e6 10.97.0.2"), LIMIT_BIT_S, 100_000);
    let status: serde_json::Value =
        serde_json::from_str(&ok(&place, &bed, "status --json")).unwrap();
    let limit = &status["limits"][0];
    assert_eq!(limit["actions"][1], "yellow=dscp af12");
    let bytes = |key: &str| limit["egress"]["colours"][key].as_f64().unwrap();
    let (green, yellow) = (bytes("green_bytes"), bytes("yellow_bytes"));
    // 5 and 15 Mbit/s, and bursts.
    assert!((2.0..4.0).contains(&(yellow / green)), "{green} {yellow}");
    assert!(bytes("red_bytes") > 0.5 * (green + yellow));
    let table = ok(&place, &bed, "status");
    assert!(table.contains("up egress, trtcm: green "), "{table}");
    assert!(table.contains("(dscp af12), red "), "{table}");
    let tcp = bed.free(&bed.sender, "3 4 0 10.97.0.2");
    is_at_most(&tcp, LIMIT_BIT_S, 100_000);
    // More than first windows, so ACKs came back. How much TCP can use, losing to a small bucket on a busy
    // machine, is for the lab.
    assert!(tcp.bytes() > 200_000, "{tcp:?}");

    let changed = spec("green = \"pass\"");
    assert!(changed.contains("actions green=dscp af11,yellow=dscp af12,red=drop -> green"));
    let blind = ok(&place, &bed, "limit set up --meter none");
    assert!(blind.contains("meter trtcm,pir=20mbit,pbs=100kb -> none"), "{blind}");
    is_held(&bed.free(&bed.sender, "2 0 30e6 10.97.0.2"), LIMIT_BIT_S / 4.0, 50_000);
    let explained = ok(&place, &bed, "limit show up");
    assert!(!explained.contains("trtcm"), "{explained}");
    ok(&place, &bed, "detach");
}

/// ECN-capable packets are marked instead of dropped, so a limit on a cgroup takes `ce`, but no code point.
#[test]
fn root_police_marks_on_cgroups() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let run =
        |actions: &str| format!("run --scheme police --egress 20mbit --actions {actions} -- true");
    ok(&place, &bed, &run("red=ce"));
    let message = refused(&place, &bed, &run("red=dscp:ef"));
    assert!(message.contains("--actions: the kernel lets no program on a cgroup"), "{message}");
    ok(&place, &bed, "run --egress 20mbit --actions red=ce -- true");
    let pace = "run --scheme pace --egress 20mbit --actions red=ce -- true";
    let message = refused(&place, &bed, pace);
    assert!(message.contains("--actions: scheme `pace` has no `actions`"), "{message}");
}

/// Whom a limit exempts it leaves alone, whatever its scheme: TCP sockets, too.
#[test]
fn root_exempt_traffic_is_not_limited() {
    need_root!();
    for scheme in ["pace", "nrm", "police"] {
        let bed = Bed::new();
        let place = Place::new();
        let run = |exempt: &str, order: &str| {
            let flags = ["--scheme", scheme, "--egress", "5mbit", "--exempt", exempt];
            bed.run(&place, &flags, order)
        };
        let free = run("10.97.0.0/24,dscp:ef", "2 0 30e6 10.97.0.2");
        is_free(&free, 8e6);
        let free = run("::/0,10.97.0.2", "2 1 0 10.97.0.2");
        is_free(&free, 8e6);
        let held = run("10.98.0.0/16,::/0", "2 0 30e6 10.97.0.2");
        assert!(held.bit_s() < 8e6, "{scheme}: {held:?}");
    }
}

/// Programs of parents and children, with all that they can have, must get past the kernel's verifier.
#[test]
fn root_exempt_goes_with_trees() {
    need_root!();
    let place = Place::new();
    let (parent, child) = (place.child("a"), place.child("a/b"));
    let exempt = "10.0.0.0/8,2001:db8::/32,dscp:ef";
    let add = |name, path, rest: &[&str]| {
        let words = ["limit", "add", name, "--cgroup", path, "--exempt", exempt];
        place.ok(&[&words[..], rest].concat())
    };
    let done = add("a", parent.path(), &["--egress", "50mbit", "--ingress", "50mbit"]);
    assert!(done.contains("exempt 10.0.0.0/8,2001:db8::/32,dscp:ef"), "{done}");
    add("b", child.path(), &["--parent", "a", "--guarantee", "10mbit"]);
    let status = place.json(&["status", "--json"]);
    assert_eq!(status["limits"][1]["exempt"][2], "dscp:ef", "{status}");
    place.ok(&["limit", "set", "b", "--exempt", "none"]);
    place.ok(&["limit", "set", "a", "--exempt", "192.0.2.0/24"]);
    place.ok(&["detach"]);
}

#[test]
fn root_exempt_lists_change_in_place() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme police --egress 5mbit --exempt 10.1.0.0/16");
    let changed = ok(&place, &bed, "limit set up --exempt 10.97.0.0/24");
    assert!(changed.contains("exempt 10.1.0.0/16 -> 10.97.0.0/24"), "{changed}");
    is_free(&bed.free(&bed.sender, "2 0 30e6 10.97.0.2"), 8e6);
    ok(&place, &bed, "limit set up --exempt none");
    assert!(bed.free(&bed.sender, "2 0 30e6 10.97.0.2").bit_s() < 8e6);
    let message = refused(&place, &bed, "limit set up --exempt 10.97.0.1/24");
    assert!(message.contains("write 10.97.0.0/24, or a longer prefix"), "{message}");
    ok(&place, &bed, "detach");
}
