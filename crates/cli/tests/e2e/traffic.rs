//! Limits on real traffic, over loopback. Only lower bounds on time: noise makes things slow, never fast.

use std::{
    env,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    common::{Guard, PATIENCE, Place, refused, skip, wait_for},
    need_root,
};

const HELPER: &str = "TIDEGATE_TEST_HELPER";
const DATAGRAM_BYTES: usize = 1200;
/// At 50 Mbit/s, 1.28 s.
const TRANSFER_BYTES: usize = 8_000_000;
/// A flood from outside lasts at least so long.
const FLOOD: Duration = Duration::from_secs(1);

/// In the process under test: `tcp ADDR BYTES` or `udp ADDR BYTES` sends so much, `stream ADDR BYTES` sends
/// pieces of so much until it is killed, `idle ADDR 0` connects and sends nothing until it is killed,
/// `datagrams ADDR 0` sends one each millisecond until it is killed,
/// `listen ADDR 0` says hello and receives until it is killed,
/// `cc ADDR NAME` asks a socket for its congestion control.
pub fn help() {
    let Ok(order) = env::var(HELPER) else { return };
    let [kind, address, bytes] = order.split(' ').collect::<Vec<_>>()[..] else { return };
    if kind == "cc" {
        let stream = TcpStream::connect(address).unwrap();
        return assert_eq!(rustix::net::sockopt::tcp_congestion(stream).unwrap(), bytes);
    }
    let bytes: usize = bytes.parse().unwrap();
    if kind == "listen" {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.send_to(&[7], address).unwrap();
        while socket.recv(&mut [0]).is_ok() {}
    } else if kind == "datagrams" {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        loop {
            // Where nobody listens yet, an answer of ICMP is an error.
            let _ = socket.send_to(&[7; DATAGRAM_BYTES], address);
            std::thread::sleep(Duration::from_millis(1));
        }
    } else if kind == "idle" {
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.read(&mut [0]);
    } else if kind == "stream" {
        let mut stream = TcpStream::connect(address).unwrap();
        while stream.write_all(&vec![7; bytes]).is_ok() {}
    } else if kind == "tcp" {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&vec![7; bytes]).unwrap();
        // What is still in the send buffer when the command ends leaves without its limit: see it out.
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    } else {
        let any = if address.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
        let socket = UdpSocket::bind(any).unwrap();
        for _ in 0..bytes / DATAGRAM_BYTES {
            socket.send_to(&[7; DATAGRAM_BYTES], address).unwrap();
        }
    }
}

/// This very program as the sender.
pub fn sender(command: &mut Command, order: &str) {
    command.arg(env::current_exe().unwrap()).args(["helper", "--exact"]).env(HELPER, order);
    command.stdout(std::process::Stdio::null());
}

/// The next connection, which must come.
pub fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let (stream, _) = wait_for("a connection", || listener.accept().ok());
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Reads all of one connection; gives its length and how long it took.
pub fn receive(listener: &TcpListener) -> (usize, Duration) {
    let mut stream = accept(listener);
    let started = Instant::now();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    (bytes.len(), started.elapsed())
}

pub fn counter(direction: &Value, suffix: &str) -> u64 {
    let outcomes = ["pass", "mark", "slow"];
    outcomes.iter().map(|name| direction[format!("{name}_{suffix}")].as_u64().unwrap()).sum()
}

fn dropped(direction: &Value) -> u64 {
    let causes = ["full", "reserve", "early"];
    causes.iter().filter_map(|name| direction[format!("drop_{name}_packets")].as_u64()).sum()
}

fn tcp_is_limited(place: &Place, host: &str) {
    let Ok(listener) = TcpListener::bind(format!("{host}:0")) else { return skip("no IPv6") };
    let order = format!("tcp {} {TRANSFER_BYTES}", listener.local_addr().unwrap());
    let mut command = place.run(&["--egress", "50mbit", "--loopback", "--stats", "--json"]);
    sender(&mut command, &order);
    command.stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let (bytes, elapsed) = receive(&listener);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(bytes, TRANSFER_BYTES);
    assert!(elapsed > Duration::from_secs(1), "{elapsed:?}");
    let stats: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(counter(&stats["egress"], "bytes") > TRANSFER_BYTES as u64, "{stats}");
}

#[test]
fn root_tcp_over_ipv4_is_limited() {
    need_root!();
    tcp_is_limited(&Place::new(), "127.0.0.1");
}

#[test]
fn root_tcp_over_ipv6_is_limited() {
    need_root!();
    tcp_is_limited(&Place::new(), "[::1]");
}

fn udp_is_limited(host: &str) {
    let place = Place::new();
    let Ok(socket) = UdpSocket::bind(format!("{host}:0")) else { return skip("no IPv6") };
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let order = format!("udp {} {}", socket.local_addr().unwrap(), 10 * TRANSFER_BYTES);
    let mut command = place.run(&["--egress", "50mbit", "--loopback"]);
    sender(&mut command, &order);
    let started = Instant::now();
    let mut child = Guard(command.spawn().unwrap());
    let (mut received, mut buffer) = (0, [0; 2 * DATAGRAM_BYTES]);
    let status = loop {
        if let Ok((bytes, _)) = socket.recv_from(&mut buffer) {
            received += bytes;
        } else if let Some(status) = child.0.try_wait().unwrap() {
            break status;
        }
    };
    assert!(status.success(), "a sender sees no error when the limit drops");
    // And 40 ms of the rate at once.
    let allowed = 50e6 / 8.0 * (started.elapsed().as_secs_f64() + 0.04);
    assert!(received > 0 && (received as f64) < allowed, "{received} of {allowed}");
}

#[test]
fn root_udp_over_ipv4_is_limited() {
    need_root!();
    udp_is_limited("127.0.0.1");
}

#[test]
fn root_udp_over_ipv6_is_limited() {
    need_root!();
    udp_is_limited("[::1]");
}

#[test]
fn root_loopback_is_free_unless_asked_for() {
    need_root!();
    let place = Place::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let order = format!("tcp {} 1000000", listener.local_addr().unwrap());
    // The pacing ceiling is a property of a socket, whatever its packets are charged for.
    let flags =
        ["--egress", "8kbit", "--scheme", "nrm", "--pace-ceiling=false", "--stats", "--json"];
    let mut command = place.run(&flags);
    sender(&mut command, &order);
    command.stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    assert_eq!(receive(&listener).0, 1_000_000, "at 8 kbit/s this would take a quarter of an hour");
    let output = child.wait_with_output().unwrap();
    let stats: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(counter(&stats["egress"], "packets"), 0);
    assert!(stats["egress"]["exempt_bytes"].as_u64() > Some(1_000_000), "{stats}");
}

#[test]
fn root_ingress_is_limited() {
    need_root!();
    let place = Place::new();
    let flags = ["--cgroup", place.group.path(), "--ingress", "5mbit", "--loopback"];
    place.ok(&[&["limit", "add", "a"], &flags[..]].concat());
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = place.inside(&place.group, "env");
    sender(&mut command, &format!("listen {} 0", socket.local_addr().unwrap()));
    let _child = Guard(command.spawn().unwrap());
    let (_, listener) = socket.recv_from(&mut [0]).unwrap();

    // Until time has passed and much has been dropped: what the limit lets through at first is then little
    // beside the whole, however fast or slow the machine is.
    let started = Instant::now();
    let ingress = wait_for("a flood that is dropped", || {
        for _ in 0..1000 {
            socket.send_to(&[7; DATAGRAM_BYTES], listener).unwrap();
        }
        let status = place.json(&["limit", "show", "a", "--json"]);
        let dropped = dropped(&status["ingress"]);
        (started.elapsed() > FLOOD && dropped > 1000).then(|| status["ingress"].clone())
    });
    // What the rate gives, and what a queue holds at most.
    let ahead_ns = ingress["burst_ns"].as_f64().unwrap() + ingress["drop_ns"].as_f64().unwrap();
    let seconds = started.elapsed().as_secs_f64() + ahead_ns / 1e9;
    let allowed = 5e6 / 8.0 * seconds + (DATAGRAM_BYTES + 42) as f64;
    let passed = counter(&ingress, "bytes");
    assert!(passed > 0 && passed as f64 <= allowed, "{passed} of {allowed}: {ingress}");
}

#[test]
fn root_nested_limits_each_hold() {
    need_root!();
    let place = Place::new();
    let outer = ["--cgroup", place.group.path(), "--egress", "200mbit", "--loopback"];
    place.ok(&[&["limit", "add", "outer"], &outer[..]].concat());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let order = format!("tcp {} 40000000", listener.local_addr().unwrap());
    let mut command = place.run(&["--egress", "500mbit", "--loopback", "--stats", "--json"]);
    sender(&mut command, &order);
    command.stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let (bytes, elapsed) = receive(&listener);
    let output = child.wait_with_output().unwrap();
    assert_eq!(bytes, 40_000_000);
    assert!(elapsed > Duration::from_millis(1300), "1.6 s at 200 Mbit/s: {elapsed:?}");
    let inner: Value = serde_json::from_slice(&output.stderr).unwrap();
    let outer = place.json(&["limit", "show", "outer", "--json"]);
    assert!(counter(&inner["egress"], "bytes") > 40_000_000, "{inner}");
    assert!(counter(&outer["egress"], "bytes") > 40_000_000, "{outer}");
}

#[test]
fn root_a_rate_changes_under_a_transfer() {
    need_root!();
    let place = Place::new();
    place.ok(&[
        "limit",
        "add",
        "a",
        "--cgroup",
        place.group.path(),
        "--egress",
        "1mbit",
        "--loopback",
    ]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let mut command = place.inside(&place.group, "env");
    sender(&mut command, &format!("tcp {address} {TRANSFER_BYTES}"));
    let mut child = Guard(command.spawn().unwrap());
    let mut stream = accept(&listener);
    let mut buffer = vec![0; 1 << 16];
    let mut received = 0;
    while received < 200_000 {
        received += stream.read(&mut buffer).unwrap();
    }
    // At 1 Mbit/s the rest would take more than a minute.
    place.ok(&["limit", "set", "a", "--egress", "400mbit"]);
    let changed = Instant::now();
    loop {
        match stream.read(&mut buffer).unwrap() {
            0 => break drop(stream),
            n => received += n,
        }
    }
    assert_eq!(received, TRANSFER_BYTES, "not a byte lost, no reset");
    assert_eq!(child.exit_code(), 0);
    assert!(changed.elapsed() < Duration::from_secs(60), "the transfer runs at the new rate");
    wait_for("counters", || {
        let status = place.json(&["limit", "show", "a", "--json"]);
        (counter(&status["egress"], "bytes") > TRANSFER_BYTES as u64).then_some(())
    });
}

#[test]
fn root_run_gives_the_command_a_congestion_control() {
    need_root!();
    let place = Place::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = place.run(&["--egress", "1gbit", "--cc", "reno"]);
    sender(&mut command, &format!("cc {} reno", listener.local_addr().unwrap()));
    assert!(command.status().unwrap().success());

    let (code, message) = refused(place.run(&["--egress", "1gbit", "--cc", "warp"]).arg("true"));
    assert_eq!(code, 1);
    assert!(message.contains("--cc: no congestion control `warp` here; use one of: "), "{message}");
    assert!(place.run_group().is_none());
}

#[test]
fn root_run_brings_dctcp_and_takes_it_away() {
    need_root!();
    let place = Place::new();
    let mut command = place.run(&["--egress", "1gbit", "--cc", "dctcp"]);
    let status = command.args(["sh", "-c", "exit 3"]).status();
    assert_eq!(status.unwrap().code(), Some(3));
    assert!(place.run_group().is_none());
}
