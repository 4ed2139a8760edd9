//! The gate before cgroups with traffic. What passes is counted where it arrives.

use std::{
    env,
    io::{self, BufRead, BufReader, Lines, Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    process::{Child, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
};

use tidegate_core::gate::BYTES;

use super::{
    tests::{LONG, PATIENCE, gated, make, remove_last, root, wait_until},
    *,
};
use crate::{
    clock::monotonic_ns,
    net::{NetNs, SpawnInto, VethPair, prepare},
    schemes::nrm::tree_tests::{Nest, test_name},
};

/// In the process that a test starts: what it does.
const ROLE: &str = "TIDEGATE_TEST_GATE";
const INSIDE: &str = "10.95.0.1";
const OUTSIDE: &str = "10.95.0.2";
const PORT: u16 = 4000;
/// Bytes of a datagram, and on the wire with the headers of UDP, IPv4 and Ethernet.
const DATAGRAM: usize = 1000;
const WIRE: u64 = 1000 + 8 + 20 + 14;
/// Datagrams that fit.
const FIT: u64 = BYTES / WIRE;
const TCP_BYTES: usize = 1 << 20;

/// The process in a cgroup, not a test of its own. `udp`: for each line, `send N` or `receive N`, it does so
/// with datagrams and says so. `tcp`: it sends, and ends.
#[test]
fn takes_part() {
    let Ok(role) = env::var(ROLE) else { return };
    if role == "tcp" {
        let mut stream = TcpStream::connect((OUTSIDE, PORT)).unwrap();
        stream.write_all(&vec![7; TCP_BYTES]).unwrap();
        return;
    }
    let socket = UdpSocket::bind((INSIDE, PORT)).unwrap();
    println!("said ready");
    for line in io::stdin().lines() {
        let line = line.unwrap();
        let (what, count) = line.split_once(' ').unwrap();
        for _ in 0..count.parse::<u64>().unwrap() {
            let done = match what {
                // A dropped datagram is no error: the sender sees a full queue, at worst.
                "send" => socket.send_to(&[7; DATAGRAM], (OUTSIDE, PORT)).map(|_| ()),
                _ => socket.recv_from(&mut [0; 2 * DATAGRAM]).map(|_| ()),
            };
            assert!(done.is_ok() || what == "send", "{done:?}");
        }
        println!("said {line}");
    }
}

struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(group: &Cgroup, netns: &NetNs, role: &str) -> Process {
        let mut command = Command::new(env::current_exe().unwrap());
        let test = concat!(module_path!(), "::takes_part");
        command.args([test_name(test), "--exact", "--nocapture"]).env(ROLE, role);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let cgroup_procs = Some(group.open_procs().unwrap().into());
        let into = SpawnInto { netns: Some(netns), cgroup_procs, die_with_parent: false };
        prepare(&mut command, into).unwrap();
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = Process { child, lines };
        if role == "udp" {
            process.hears("ready");
        }
        process
    }

    fn hears(&mut self, word: &str) {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        let said = lines.find_map(|line| Some(line.split_once("said ")?.1.to_owned()));
        assert_eq!(said.as_deref(), Some(word));
    }

    /// Has it done something, and waits until it is done.
    fn does(&mut self, what: &str) {
        writeln!(self.child.stdin.as_ref().unwrap(), "{what}").unwrap();
        self.hears(what);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two namespaces with a cable between them, whose ends have found each other.
struct Net {
    inside: NetNs,
    outside: NetNs,
}

impl Net {
    fn new(name: &str) -> Net {
        let netns = |side| NetNs::create(&format!("tidegate-{}-{name}{side}", std::process::id()));
        let net = Net { inside: netns("i").unwrap(), outside: netns("o").unwrap() };
        let mut netlink = net.inside.netlink().unwrap();
        let pair = VethPair { name: "v0", peer: "v0", peer_netns: Some(&net.outside) };
        netlink.add_veth(&pair).unwrap();
        for (side, address) in [(&net.inside, INSIDE), (&net.outside, OUTSIDE)] {
            let mut netlink = side.netlink().unwrap();
            let index = netlink.index_of("v0").unwrap();
            netlink.add_address(index, address.parse().unwrap(), 24).unwrap();
            netlink.set_up(index, true).unwrap();
        }
        // Else datagrams that wait for the neighbour's address could be dropped there.
        let hello = || UdpSocket::bind((INSIDE, 9)).unwrap().send_to(&[0], (OUTSIDE, 9)).unwrap();
        net.inside.run(hello).unwrap();
        net.outside
            .run(|| UdpSocket::bind((OUTSIDE, 9)).unwrap().send_to(&[0], (INSIDE, 9)).unwrap())
            .unwrap();
        let knows = |side: &NetNs, other: &str| {
            let table = side.run(|| std::fs::read_to_string("/proc/thread-self/net/arp").unwrap());
            table.unwrap().lines().any(|line| line.contains(other) && line.contains(" 0x2 "))
        };
        wait_until("both ends know each other", || {
            knows(&net.inside, OUTSIDE) && knows(&net.outside, INSIDE)
        });
        net
    }

    /// A socket at the outer end that does not wait.
    fn socket(&self) -> UdpSocket {
        let bind = || UdpSocket::bind((OUTSIDE, PORT)).unwrap();
        let socket = self.outside.run(bind).unwrap();
        socket.set_nonblocking(true).unwrap();
        // Room for all datagrams of a test.
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 1 << 20).unwrap();
        socket
    }
}

/// What has come and was not yet counted, in datagrams.
fn arrived(socket: &UdpSocket) -> u64 {
    let next = || socket.recv(&mut [0; 2 * DATAGRAM]);
    std::iter::from_fn(|| next().ok()).inspect(|bytes| assert_eq!(*bytes, DATAGRAM)).count() as u64
}

/// Waits until so many datagrams have come, and no more.
fn arrive(socket: &UdpSocket, count: u64) {
    let mut sum = 0;
    wait_until("datagrams arrive", || {
        sum += arrived(socket);
        sum >= count
    });
    assert_eq!(sum, count);
}

fn send(socket: &UdpSocket, count: u64) {
    for _ in 0..count {
        socket.send_to(&[7; DATAGRAM], (INSIDE, PORT)).unwrap();
    }
}

/// Nobody decides: the agent is stopped.
#[test]
fn root_64_kb_pass_until_a_cgroup_is_decided() {
    if !root("root_64_kb_pass_until_a_cgroup_is_decided") {
        return;
    }
    let net = Net::new("gate");
    let (mut nest, mut gate) = gated("gate-udp", LONG);
    let id = make(&mut nest, 0, "new");
    let socket = net.socket();
    let mut process = Process::start(&nest.groups[1], &net.inside, "udp");
    // Both directions share the bytes.
    send(&socket, 20);
    process.does("receive 20");
    process.does("send 100");
    arrive(&socket, FIT - 20);
    let counters = gate.counters().unwrap();
    assert_eq!(counters.passed_bytes, FIT * WIRE);
    assert_eq!(counters.dropped_packets, 100 - (FIT - 20));
    send(&socket, 10);
    wait_until("the gate drops what comes in", || {
        gate.counters().unwrap().dropped_packets == 110 - (FIT - 20)
    });

    gate.decide(id).unwrap();
    process.does("send 100");
    arrive(&socket, 100);
    send(&socket, 10);
    process.does("receive 10");
    let after = gate.counters().unwrap();
    assert_eq!(after, GateCounters { dropped_packets: 110 - (FIT - 20), ..counters });
}

/// It begins before its cgroup is decided, and goes on after that: the agent is slow.
#[test]
fn root_tcp_gets_64_kb_until_its_cgroup_is_decided() {
    if !root("root_tcp_gets_64_kb_until_its_cgroup_is_decided") {
        return;
    }
    let net = Net::new("gatet");
    let (mut nest, mut gate) = gated("gate-tcp", LONG);
    let id = make(&mut nest, 0, "new");
    let listener = net.outside.run(|| TcpListener::bind((OUTSIDE, PORT)).unwrap()).unwrap();
    let got = AtomicU64::new(0);
    let _process = Process::start(&nest.groups[1], &net.inside, "tcp");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(2 * PATIENCE)).unwrap();
            let mut buffer = vec![0; 1 << 16];
            while let Ok(bytes @ 1..) = stream.read(&mut buffer) {
                got.fetch_add(bytes as u64, Ordering::Relaxed);
            }
        });
        // The first time-outs of TCP, too.
        wait_until("several packets do not fit", || gate.counters().unwrap().dropped_packets >= 3);
        let counters = gate.counters().unwrap();
        assert!(counters.passed_bytes <= BYTES, "{counters:?}");
        let before = got.load(Ordering::Relaxed);
        assert!(before <= BYTES, "{before}");
        gate.decide(id).unwrap();
    });
    assert_eq!(got.into_inner(), TCP_BYTES as u64);
    assert_eq!(gate.counters().unwrap().late_bytes, 0);
}

#[test]
fn root_all_passes_after_the_deadline_and_is_counted() {
    if !root("root_all_passes_after_the_deadline_and_is_counted") {
        return;
    }
    let net = Net::new("gatel");
    let (mut nest, gate) = gated("gate-late", GateSettings { deadline: Duration::from_millis(1) });
    let id = make(&mut nest, 0, "new");
    let until_ns = gate.held(id).unwrap().unwrap().until_ns;
    wait_until("the deadline is over", || monotonic_ns() >= until_ns);
    let socket = net.socket();
    let mut process = Process::start(&nest.groups[1], &net.inside, "udp");
    process.does("send 100");
    arrive(&socket, 100);
    let late = GateCounters { cgroups: 1, late_bytes: 100 * WIRE, ..GateCounters::default() };
    assert_eq!(gate.counters().unwrap(), late);
    assert_eq!(gate.undecided().unwrap(), [id], "it still waits for a decision");
}

/// A socket stays in the cgroup in which it was made. Its process has left, and nobody has decided when the
/// cgroup is removed.
#[test]
fn root_what_is_left_in_a_removed_cgroup_passes() {
    if !root("root_what_is_left_in_a_removed_cgroup_passes") {
        return;
    }
    let net = Net::new("gater");
    let (mut nest, gate) = gated("gate-removed", LONG);
    let id = make(&mut nest, 0, "new");
    let socket = net.socket();
    let mut process = Process::start(&nest.groups[1], &net.inside, "udp");
    nest.groups[0].add(process.child.id()).unwrap();
    process.does("send 100");
    arrive(&socket, FIT);
    assert_eq!(gate.undecided().unwrap(), [id], "the socket is still in it");
    let counters = gate.counters().unwrap();

    remove_last(&mut nest);
    assert_eq!(gate.undecided().unwrap(), [0; 0]);
    process.does("send 100");
    arrive(&socket, 100);
    send(&socket, 10);
    process.does("receive 10");
    assert_eq!(gate.counters().unwrap(), counters);
}

/// What is not below the chosen cgroup, what was there before the gate, and what is left when the gate goes.
#[test]
fn root_others_are_not_held_and_nobody_without_a_gate() {
    if !root("root_others_are_not_held_and_nobody_without_a_gate") {
        return;
    }
    let net = Net::new("gateo");
    let mut nest = Nest::new("gate-others", 2);
    let gate = Gate::attach(&nest.groups[0], LONG).unwrap();
    let other = Nest::new("gate-outside", 2);
    let socket = net.socket();
    for group in [&nest.groups[0], &nest.groups[1], &other.groups[1]] {
        let mut process = Process::start(group, &net.inside, "udp");
        process.does("send 100");
        arrive(&socket, 100);
    }
    assert_eq!(gate.counters().unwrap(), GateCounters::default());

    make(&mut nest, 0, "new");
    let mut process = Process::start(&nest.groups[2], &net.inside, "udp");
    process.does("send 100");
    arrive(&socket, FIT);
    drop(gate);
    process.does("send 100");
    arrive(&socket, 100);
}
