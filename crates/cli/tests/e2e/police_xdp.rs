//! `hook = "xdp"` of scheme `police`: what comes in by a device is limited before there are packets, whoever
//! put the limit on; nobody else's program is touched, and the device is as it was afterwards.

use std::{
    fs,
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream, UdpSocket},
    num::NonZeroU32,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketType, recv, socket, sockopt};
use serde_json::Value;
use tidegate_instruments::plumbing::{add_bridge, set_master};
use tidegate_sys::{net::NetNs, xdp::XdpRedirect};

use crate::{
    common::{PATIENCE, Place, wait_for},
    edt::{self, BURST_BYTES, Bed, PORT, into, is_free, is_held},
    need_root,
};

const LIMIT_BIT_S: f64 = 20e6;
const ADD: &str = "limit add down --dev eth0 --scheme police --ingress 20mbit --burst 100kb";
/// Two seconds of 60 Mbit/s, which no socket minds to lose.
const FLOOD: &str = "2 0 60e6 10.97.0.2";

/// `tidegate` in a network namespace: exit code, standard output and error.
fn tidegate(place: &Place, netns: &NetNs, words: &str) -> (i32, String, String) {
    let mut command = into(netns, env!("CARGO_BIN_EXE_tidegate"));
    place.keep_to(&mut command).args(words.split(' '));
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn ok(place: &Place, netns: &NetNs, words: &str) -> String {
    let (code, out, error) = tidegate(place, netns, words);
    assert_eq!(code, 0, "{words}: {error}");
    out
}

fn refused(place: &Place, netns: &NetNs, words: &str) -> String {
    let (code, _, error) = tidegate(place, netns, words);
    assert!(code == 1 || code == 2, "{words}: {code} {error}");
    error
}

/// The only limit.
fn status(place: &Place, netns: &NetNs) -> Value {
    let shown: Value = serde_json::from_str(&ok(place, netns, "status --json")).unwrap();
    shown["limits"][0].clone()
}

fn shown(netns: &NetNs, program: &str, words: &str) -> String {
    let output = into(netns, program).args(words.split(' ')).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Whether `ip` shows a program on the device.
fn has_xdp(netns: &NetNs, device: &str) -> bool {
    shown(netns, "ip", &format!("-d link show dev {device}")).contains("prog/xdp")
}

/// What tc has on the receiver's device.
fn of_tc(bed: &Bed) -> [String; 3] {
    ["qdisc show dev eth0", "filter show dev eth0 ingress", "filter show dev eth0 egress"]
        .map(|words| shown(&bed.receiver, "tc", words))
}

#[test]
fn root_police_xdp_says_what_cannot_be() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let netns = &bed.receiver;
    for words in [
        "limit add a --dev eth0 --scheme police --egress 5mbit --hook xdp",
        "limit add a --port eth0 --scheme police --ingress 5mbit --hook xdp",
        "limit add a --dev eth0 --scheme police --ingress 5mbit --match 10.0.0.0/8 --hook xdp",
        "run --scheme police --ingress 5mbit --hook xdp -- true",
        "run --ingress 5mbit --hook xdp -- true",
    ] {
        let message = refused(&place, netns, words);
        assert!(message.contains("--hook: XDP polices incoming traffic of a device"), "{message}");
    }
    let htb = "limit add a --dev eth0 --scheme htb --ingress 5mbit --hook xdp";
    let message = refused(&place, netns, htb);
    assert!(message.contains("--hook: scheme `htb` has no `hook`"), "{message}");
    let spec = |rest: &str| {
        let text = format!("[[limit]]\nname = \"a\"\nscope = {{ dev = \"eth0\" }}\n{rest}\n");
        let file = place.file("limits.toml", &text);
        refused(&place, netns, &format!("apply {}", file.display()))
    };
    let message = spec("scheme = \"police\"\negress = \"5mbit\"\nhook = \"xdp\"");
    assert!(message.contains("limits.toml:6: limit `a`: hook: XDP polices"), "{message}");
    let message = spec("scheme = \"police\"\ningress = \"5mbit\"\nhook = \"tc\"");
    assert!(message.contains("hook: `tc` is no hook; write auto or xdp"), "{message}");
    assert!(!place.store().exists());

    ok(&place, netns, &format!("{ADD} --hook xdp --egress 10mbit"));
    let message = refused(&place, netns, "limit set down --ingress none");
    assert!(message.contains("XDP polices incoming traffic of a device"), "{message}");
    ok(&place, netns, "limit set down --hook auto --ingress none");
    ok(&place, netns, "detach");
}

/// On by a file, another rate, both directions, and off. Whoever put it on has ended each time.
#[test]
fn root_police_xdp_limits_a_device_and_leaves_no_trace() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let netns = &bed.receiver;
    let before = of_tc(&bed);
    let spec = |rates: &str| {
        let text = format!(
            "[[limit]]\nname = \"down\"\nscope = {{ dev = \"eth0\" }}\nscheme = \"police\"\n\
             {rates}\nburst = \"100kb\"\nhook = \"xdp\"\n"
        );
        place.file("limits.toml", &text).display().to_string()
    };
    let file = spec("ingress = \"20mbit\"");
    let (code, planned, _) = tidegate(&place, netns, &format!("plan {file}"));
    assert!(code == 3 && planned.contains("scheme police, hook xdp"), "{planned}");
    let (_, planned, _) = tidegate(&place, netns, &format!("plan --json {file}"));
    assert!(planned.contains("\"hook\": \"xdp\""), "{planned}");
    ok(&place, netns, &format!("apply {file}"));
    assert_eq!(tidegate(&place, netns, &format!("plan {file}")).0, 0, "it is so already");
    is_held(&bed.free(&bed.sender, FLOOD), LIMIT_BIT_S, BURST_BYTES);
    let limit = status(&place, netns);
    assert_eq!((&limit["state"], &limit["xdp_mode"]), (&"in_force".into(), &"native".into()));
    assert_eq!(limit["hook"], "xdp");
    let table = ok(&place, netns, "status");
    assert!(table.contains("down ingress, hook xdp: native, in the driver"), "{table}");
    let explained = into(netns, "sh")
        .args(["-c", "exec \"$0\" explain $$ --sample 100ms"])
        .arg(env!("CARGO_BIN_EXE_tidegate"))
        .env("TIDEGATE_BPFFS", place.store())
        .output()
        .unwrap();
    let explained = String::from_utf8(explained.stdout).unwrap();
    assert!(explained.contains("police, ingress in XDP (native"), "{explained}");

    ok(&place, netns, "limit set down --ingress 10mbit --egress 50mbit --burst 50kb");
    is_held(&bed.free(&bed.sender, FLOOD), LIMIT_BIT_S / 2.0, 50_000);
    let limit = status(&place, netns);
    // With the first rate a slow machine may send less than it.
    assert!(limit["ingress"]["drop_full_packets"].as_u64().unwrap() > 0, "{limit}");
    assert!(limit["egress"]["pass_packets"].as_u64().unwrap() > 10, "{limit}");
    ok(&place, netns, "detach");
    assert!(!place.store().exists() && !has_xdp(netns, "eth0"));
    assert_eq!(of_tc(&bed), before);
    is_free(&bed.free(&bed.sender, FLOOD), LIMIT_BIT_S / 2.0);
}

/// From tc to XDP and back under a transfer: the connection goes on, and its packets are held by either.
#[test]
fn root_police_xdp_comes_and_goes_under_a_transfer() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let netns = &bed.receiver;
    let before = of_tc(&bed);
    ok(&place, netns, ADD);
    let listener = netns.run(|| edt::bound(|| TcpListener::bind(("0.0.0.0", PORT)))).unwrap();
    let stream = bed.sender.run(|| TcpStream::connect((edt::RECEIVER, PORT)).unwrap()).unwrap();
    let (mut sink, _) = listener.accept().unwrap();
    let mut writer = stream.try_clone().unwrap();
    // Ends when the connection is shut down.
    let sending = thread::spawn(move || while writer.write_all(&[7; 1 << 14]).is_ok() {});
    sink.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut read = |bytes: usize| {
        let (mut buffer, mut total) = (vec![0; 1 << 16], 0);
        while total < bytes {
            total += sink.read(&mut buffer).expect("the transfer goes on");
        }
    };
    let charged = || status(&place, netns)["ingress"]["pass_bytes"].as_u64().unwrap();
    for hook in ["xdp", "auto", "xdp", "auto"] {
        let changed = ok(&place, netns, &format!("limit set down --hook {hook}"));
        assert!(changed.contains(&format!("-> {hook}")), "{changed}");
        // One of them, and not both.
        assert_eq!(has_xdp(netns, "eth0"), hook == "xdp");
        let pinned = |pin: &str| place.store().join("down").join(pin).exists();
        assert_eq!(pinned("ingress") || pinned("program_ingress"), hook == "auto");
        // What came in before may fill the receiver's buffer.
        let before = charged();
        wait_for("packets that this hook charges", || {
            read(100_000);
            (charged() - before > 100_000).then_some(())
        });
        assert_eq!(status(&place, netns)["state"], "in_force");
    }
    stream.shutdown(Shutdown::Both).unwrap();
    sending.join().unwrap();
    ok(&place, netns, "detach");
    assert_eq!(of_tc(&bed), before);
}

/// A program that somebody else has there is left alone, and so is the limit that wanted its place.
#[test]
fn root_police_xdp_is_refused_beside_anothers_program() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let netns = &bed.receiver;
    // It hands frames on while nobody has asked for them.
    let other = XdpRedirect::attach(netns, "eth0", None).unwrap();
    let message = refused(&place, netns, &format!("{ADD} --hook xdp"));
    assert!(
        message.contains("device `eth0` has an XDP program already: program ")
            && message.contains("(`xdp_port`)"),
        "{message}"
    );
    assert!(!place.store().exists() && has_xdp(netns, "eth0"));
    ok(&place, netns, ADD);
    let message = refused(&place, netns, "limit set down --hook xdp");
    assert!(message.contains("has an XDP program already"), "{message}");
    let limit = status(&place, netns);
    assert_eq!((&limit["state"], &limit["hook"]), (&"in_force".into(), &"auto".into()));
    assert!(shown(netns, "ip", "-d link show dev eth0").contains("name xdp_port"));
    drop(other);
    wait_for("the end of the other program", || (!has_xdp(netns, "eth0")).then_some(()));
    ok(&place, netns, "limit set down --hook xdp");
    // Now it is ours that is in the way.
    assert!(XdpRedirect::attach(netns, "eth0", None).is_err());

    // Somebody takes it off.
    fs::remove_file(place.store().join("down/xdp")).unwrap();
    wait_for("the end of the program", || (!has_xdp(netns, "eth0")).then_some(()));
    assert_eq!(status(&place, netns)["state"], "detached");
    ok(&place, netns, &format!("{ADD} --hook xdp"));
    assert!(has_xdp(netns, "eth0") && status(&place, netns)["state"] == "in_force");
    ok(&place, netns, "detach");
    assert!(!has_xdp(netns, "eth0"));
}

/// Processes that are killed while they move a limit, each at another moment.
#[test]
fn root_police_xdp_outlives_who_is_killed() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let netns = &bed.receiver;
    let before = of_tc(&bed);
    ok(&place, netns, &format!("{ADD} --hook xdp"));
    for (i, hook) in ["auto", "xdp"].into_iter().cycle().take(12).enumerate() {
        let mut command = into(netns, env!("CARGO_BIN_EXE_tidegate"));
        command.env("TIDEGATE_BPFFS", place.store());
        command.args(["limit", "set", "down", "--hook", hook]);
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        // Not to wait for something: so late the blow falls.
        thread::sleep(Duration::from_millis(4 * i as u64));
        let _ = child.kill();
        child.wait().unwrap();
    }
    // The next writer puts right what was left half done.
    let rate = "limit set down --ingress 10mbit --burst 50kb";
    ok(&place, netns, rate);
    let limit = status(&place, netns);
    assert_eq!(limit["state"], "in_force");
    assert_eq!(has_xdp(netns, "eth0"), limit["hook"] == "xdp");
    is_held(&bed.free(&bed.sender, FLOOD), LIMIT_BIT_S / 2.0, 50_000);
    ok(&place, netns, "detach");
    assert!(!has_xdp(netns, "eth0") && !place.store().exists());
    assert_eq!(of_tc(&bed), before);
}

/// What a meter of XDP writes is on the wire: committed packets keep their code point, others get another,
/// and those of an exempt host are left alone.
#[test]
fn root_police_xdp_colours_both_versions_of_ip() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let netns = &bed.receiver;
    let v6 = |netns: &NetNs, address: &str| {
        shown(netns, "ip", &format!("address add {address}/64 dev eth0 nodad"));
    };
    v6(&bed.sender, "fd97::1");
    v6(netns, "fd97::2");
    let hosts = [("10.97.0.1", "10.97.0.2"), ("fd97::1", "fd97::2")];
    // A bucket of two datagrams, and 1000 bytes more each second.
    let meter = "--ingress 8kbit --burst 3000b --meter srtcm,ebs=1b --actions \
                 green=dscp:af11,red=dscp:af13 --hook xdp";
    let add = format!("limit add down --dev eth0 --scheme police {meter}");
    for (i, (from, to)) in hosts.into_iter().enumerate() {
        meet(&bed, from, to);
        ok(&place, netns, &add);
        let started = Instant::now();
        let seen = marks(netns, || send(&bed.sender, from, to, 8));
        let committed_bytes = 3001.0 + 1000.0 * started.elapsed().as_secs_f64();
        let counted = |dscp: u8| seen.iter().filter(|mark| **mark == dscp).count();
        let green_most = (committed_bytes / 1242.0) as usize;
        assert!((1..=green_most).contains(&counted(10)), "{to}: {seen:?} of {committed_bytes}");
        assert_eq!((counted(10) + counted(14), seen.len()), (8, 8), "{to}: {seen:?}");
        let exempt = ["10.97.0.1", "fd97::/64"][i];
        ok(&place, netns, "limit del down");
        ok(&place, netns, &format!("{add} --exempt {exempt}"));
        let seen = marks(netns, || send(&bed.sender, from, to, 8));
        assert_eq!(seen, [0; 8], "{to}: exempt");
        assert!(status(&place, netns)["ingress"]["exempt_packets"].as_u64().unwrap() >= 8);
        ok(&place, netns, "detach");
    }
}

/// Sends datagrams until one is answered. From then on the neighbours know each other's addresses.
fn meet(bed: &Bed, from: &str, to: &str) {
    let bind = |netns: &NetNs, address: &str| {
        let socket = netns.run(|| UdpSocket::bind((address, 0)).unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        socket
    };
    let (near, far) = (bind(&bed.sender, from), bind(&bed.receiver, to));
    wait_for("an answer", || {
        near.send_to(&[7], far.local_addr().unwrap()).ok()?;
        let (_, back) = far.recv_from(&mut [0]).ok()?;
        far.send_to(&[7], back).ok()?;
        near.recv(&mut [0]).ok()
    });
}

/// Datagrams of 1200 bytes, one after the other.
fn send(netns: &NetNs, from: &str, to: &str, count: usize) {
    let sending = || {
        let socket = UdpSocket::bind((from, 0)).unwrap();
        // Not connected: nobody listens there, and nobody needs to hear of it.
        (0..count).for_each(|_| _ = socket.send_to(&[7; 1200], (to, PORT)).unwrap());
    };
    netns.run(sending).unwrap();
}

/// The code points of the datagrams to [`PORT`] that come into a network namespace meanwhile.
fn marks(netns: &NetNs, meanwhile: impl FnOnce()) -> Vec<u8> {
    // ETH_P_ALL.
    const EVERY_TYPE: NonZeroU32 = NonZeroU32::new(3u16.to_be() as u32).unwrap();
    const LEAST_BYTES: usize = 1200;
    let all = Some(Protocol::from_raw(EVERY_TYPE));
    let tap = netns.run(|| socket(AddressFamily::PACKET, SocketType::RAW, all).unwrap()).unwrap();
    sockopt::set_socket_timeout(&tap, sockopt::Timeout::Recv, Some(Duration::from_millis(100)))
        .unwrap();
    meanwhile();
    let (mut seen, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    while seen.len() < 8 && Instant::now() < deadline {
        let mut frame = [0; 2048];
        let Ok((n, _)) = recv(&tap, &mut frame[..], RecvFlags::empty()) else { continue };
        let (traffic_class, port) = match frame[12..14] {
            _ if n < LEAST_BYTES => continue,
            [0x08, 0x00] => (frame[15], 36),
            [0x86, 0xdd] => (frame[14] << 4 | frame[15] >> 4, 56),
            _ => continue,
        };
        if frame[port..port + 2] == PORT.to_be_bytes() {
            seen.push(traffic_class >> 2);
        }
    }
    seen
}

/// A device whose driver has no XDP is limited in the stack, aggregates and all.
#[test]
fn root_police_xdp_falls_back_to_the_stack() {
    need_root!();
    let place = Place::new();
    let bed = Bed::new();
    let guest = NetNs::create(&format!("{}-g", bed.sender.name())).unwrap();
    edt::cable(&guest, "eth1", "10.95.0.2", &bed.receiver, "port", "10.94.0.1");
    let netns = &bed.receiver;
    let mut netlink = netns.netlink().unwrap();
    add_bridge(&mut netlink, "br0").unwrap();
    let bridge = netlink.index_of("br0").unwrap();
    let port = netlink.index_of("port").unwrap();
    set_master(&mut netlink, port, bridge).unwrap();
    netlink.add_address(bridge, "10.95.0.1".parse().unwrap(), 24).unwrap();
    netlink.set_up(bridge, true).unwrap();
    let add = "limit add down --dev br0 --scheme police --ingress 20mbit --burst 250kb --hook xdp";
    ok(&place, netns, add);
    assert_eq!(status(&place, netns)["xdp_mode"], "generic");
    let listener = netns.run(|| edt::bound(|| TcpListener::bind(("0.0.0.0", PORT)))).unwrap();
    let connect = || TcpStream::connect(("10.95.0.1", PORT)).unwrap();
    let started = Instant::now();
    let mut stream = guest.run(connect).unwrap();
    let (mut sink, _) = listener.accept().unwrap();
    let sending = thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(4);
        stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        while Instant::now() < end {
            let _ = stream.write(&[7; 1 << 16]);
        }
    });
    sink.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let (mut total, mut buffer) = (0, vec![0; 1 << 16]);
    while let Ok(n @ 1..) = sink.read(&mut buffer) {
        total += n;
    }
    let allowed = LIMIT_BIT_S / 8.0 * started.elapsed().as_secs_f64() + 250e3;
    sending.join().unwrap();
    assert!(total > 500_000 && total as f64 <= allowed, "{total} of {allowed} bytes");
    let ingress = status(&place, netns)["ingress"].clone();
    assert!(ingress["drop_full_packets"].as_u64().unwrap() > 0, "{ingress}");
    // Payload, and the headers of each segment.
    let charged = ingress["pass_bytes"].as_f64().unwrap();
    assert!((1.02..1.15).contains(&(charged / total as f64)), "{charged} for {total}");
    ok(&place, netns, "detach");
    assert!(!has_xdp(netns, "br0"));
}
