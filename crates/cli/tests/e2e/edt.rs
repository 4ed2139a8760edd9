//! Scheme `edt`: what it refuses everywhere, and what it does where the kernel has `fq` (the virtual machines
//! of `make test-vm`). Rates are compared with the limit and delays with those behind one big queue; no
//! time is asked for by itself.

use std::{
    env, fmt,
    io::{self, ErrorKind, Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tidegate_instruments::plumbing::{Route, add_route};
use tidegate_instruments::wire_meter::WireMeter;
use tidegate_sys::net::{NetNs, VethPair};

use crate::{
    common::{PATIENCE, Place, skip, wait_for},
    need_root,
};

pub const HELPER: &str = "TIDEGATE_TEST_EDT";
const DATAGRAM_BYTES: usize = 1200;
const SECOND: Duration = Duration::from_secs(1);
/// What a virtual machine without KVM carries with ease.
const LIMIT: &str = "20mbit";
const LIMIT_BIT_S: f64 = 20e6;
/// What a limit here may let through at once at most.
pub const BURST_BYTES: u32 = 100_000;
/// How long traffic flows before its round trips are looked at.
const WARM_UP: Duration = SECOND;
pub const PORT: u16 = 5300;
/// The receiver of a bed.
pub const RECEIVER: &str = "10.97.0.2";
pub const SENDER: &str = "10.97.0.1";

/// In the process under test: `SECONDS TCP-FLOWS UDP-BIT/S ADDRESS` sends so much for so long, and asks an
/// echo server for the time of day, so to speak, every 20 ms; prints how long it took, sorted, in
/// microseconds.
pub fn help() {
    let Ok(order) = env::var(HELPER) else { return };
    match &order[..] {
        "orders" => crate::vm::take_orders(),
        order => drop(traffic(order).map(|times| println!("\n{times}"))),
    }
}

/// Does what is ordered; the line that tells the probe's times.
pub fn traffic(order: &str) -> Option<String> {
    let [seconds, flows, udp_bit_s, address] = order.split(' ').collect::<Vec<_>>()[..] else {
        return None;
    };
    let end = Instant::now() + Duration::from_secs(seconds.parse().unwrap());
    let udp_bit_s: f64 = udp_bit_s.parse().unwrap();
    const PASSING: [ErrorKind; 2] = [ErrorKind::WouldBlock, ErrorKind::Interrupted];
    let times = thread::scope(|scope| {
        for _ in 0..flows.parse::<u32>().unwrap() {
            scope.spawn(|| {
                let mut stream = TcpStream::connect((address, PORT)).unwrap();
                stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
                while Instant::now() < end {
                    match stream.write(&[7; 65536]) {
                        Err(e) if !PASSING.contains(&e.kind()) => break,
                        _ => {}
                    }
                }
            });
        }
        if udp_bit_s > 0.0 {
            scope.spawn(move || blast(address, PORT + 1, udp_bit_s, end));
        }
        scope.spawn(|| probe(address, end)).join().unwrap()
    });
    let times: Vec<_> = times.iter().map(|us| us.to_string()).collect();
    Some(format!("RTT {}", times.join(" ")))
}

/// Datagrams at a rate, whatever becomes of them.
pub fn blast(address: &str, port: u16, bit_s: f64, end: Instant) {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect((address, port)).unwrap();
    let started = Instant::now();
    let mut sent = 0.0;
    while Instant::now() < end {
        if sent < started.elapsed().as_secs_f64() * bit_s {
            let _ = socket.send(&[7; DATAGRAM_BYTES]);
            sent += 8.0 * (DATAGRAM_BYTES + 42) as f64;
        } else {
            thread::sleep(Duration::from_micros(500));
        }
    }
}

/// Round trips of small datagrams that leave on a schedule, in microseconds, sorted.
fn probe(address: &str, end: Instant) -> Vec<u128> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect((address, PORT + 2)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let started = Instant::now();
    let warm = started + WARM_UP;
    let mut times = Vec::new();
    let mut next = started;
    while Instant::now() < end {
        if Instant::now() >= next {
            let now = u64::try_from(started.elapsed().as_micros()).unwrap();
            let _ = socket.send(&now.to_ne_bytes());
            next += Duration::from_millis(20);
        }
        let mut stamp = [0; 8];
        if socket.recv(&mut stamp).is_ok_and(|n| n == 8) && Instant::now() > warm {
            times.push(started.elapsed().as_micros() - u128::from(u64::from_ne_bytes(stamp)));
        }
    }
    times.sort_unstable();
    times
}

/// A socket at an address that another had before. A process which another test starts has a copy of that
/// for a moment, from its fork until it runs its program.
pub fn bound<T>(bind: impl Fn() -> io::Result<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        match bind() {
            Err(e) if e.kind() == ErrorKind::AddrInUse && Instant::now() < end => {
                thread::sleep(Duration::from_millis(10));
            }
            bound => return bound.unwrap(),
        }
    }
}

/// A sender and a receiver, joined by a cable of `eth0`s; the sender's has `fq` if the kernel knows it.
pub struct Bed {
    pub sender: NetNs,
    pub receiver: NetNs,
}

impl Bed {
    pub fn new() -> Bed {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("tidegate-edt-{}-{number}-{side}", std::process::id());
        let sender = NetNs::create(&name("s")).unwrap();
        let receiver = NetNs::create(&name("r")).unwrap();
        cable(&sender, "eth0", SENDER, &receiver, "eth0", RECEIVER);
        Bed { sender, receiver }
    }

    /// A bed whose sender has `fq`; says SKIP where there is none.
    fn with_fq() -> Option<Bed> {
        let bed = Bed::new();
        if !bed.tc("qdisc replace dev eth0 root fq").status.success() {
            skip("this kernel has no fq; `make test-vm` has some that do");
            return None;
        }
        Some(bed)
    }

    pub fn tc(&self, words: &str) -> Output {
        let mut command = into(&self.sender, "tc");
        command.args(words.split(' ')).output().unwrap()
    }

    pub fn qdiscs(&self) -> String {
        String::from_utf8(self.tc("qdisc show dev eth0").stdout).unwrap()
    }

    /// Takes traffic in for as long as the value lives.
    pub fn serve(&self) -> Server {
        let (tcp, sink, echo) = self
            .receiver
            .run(|| {
                let udp = |port| bound(|| UdpSocket::bind(("0.0.0.0", port)));
                (bound(|| TcpListener::bind(("0.0.0.0", PORT))), udp(PORT + 1), udp(PORT + 2))
            })
            .unwrap();
        tcp.set_nonblocking(true).unwrap();
        for socket in [&sink, &echo] {
            socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        }
        let stop = Arc::new(AtomicBool::new(false));
        let going = || {
            let stop = stop.clone();
            move || !stop.load(Ordering::Relaxed)
        };
        let accepting = going();
        let accept = move || {
            while accepting() {
                match tcp.accept() {
                    Ok((stream, _)) => drop(thread::spawn(move || drain(stream))),
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            }
        };
        let (sinking, echoing) = (going(), going());
        let swallow = move || {
            while sinking() {
                drop(sink.recv(&mut [0; 2048]))
            }
        };
        let answer = move || {
            let mut buffer = [0; 64];
            while echoing() {
                if let Ok((n, from)) = echo.recv_from(&mut buffer) {
                    let _ = echo.send_to(&buffer[..n], from);
                }
            }
        };
        let threads = vec![thread::spawn(accept), thread::spawn(swallow), thread::spawn(answer)];
        Server { stop, threads }
    }

    fn meter(&self) -> WireMeter {
        let mut meter =
            WireMeter::attach(&self.receiver, "eth0", 300, Duration::from_millis(100)).unwrap();
        meter.start().unwrap();
        meter
    }

    /// `tidegate run` of the traffic that is ordered, in the sender's namespace.
    pub fn run(&self, place: &Place, flags: &[&str], order: &str) -> Traffic {
        let _server = self.serve();
        let mut command = place.inside(&place.group, "nsenter");
        command.arg(net_of(&self.sender)).arg(env!("CARGO_BIN_EXE_tidegate")).arg("run");
        command.args(flags).arg("--");
        command.arg(env::current_exe().unwrap()).args(["helper", "--exact", "--nocapture"]);
        self.drive(command, order)
    }

    /// The same without a limit of ours.
    pub fn free(&self, netns: &NetNs, order: &str) -> Traffic {
        let _server = self.serve();
        let mut command = into(netns, env::current_exe().unwrap().to_str().unwrap());
        command.args(["helper", "--exact", "--nocapture"]);
        self.drive(command, order)
    }

    /// Again if the machine stopped the sender so often that nothing can be said of a rate.
    fn drive(&self, mut command: Command, order: &str) -> Traffic {
        /// In so many runs the machine may.
        const RUNS: usize = 4;
        // What waits in sockets and queues when the sender ends leaves without the limit of its `run`: only
        // the time before counts, less half a second that the sender may have begun earlier.
        let seconds: usize = order.split(' ').next().and_then(|word| word.parse().ok()).unwrap();
        let bins = seconds * 10 - 5;
        let mut run = || {
            let mut traffic = self.watch(|| {
                let output = command.env(HELPER, order).output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                String::from_utf8(output.stdout).unwrap()
            });
            traffic.bins.truncate(bins);
            traffic
        };
        let earlier =
            (1..RUNS).find_map(|_| Some(run()).filter(|traffic| traffic.flows_for(bins.min(10))));
        earlier.unwrap_or_else(run)
    }

    /// What arrives while somebody does what is ordered, and tells the probe's times.
    pub fn watch(&self, ordered: impl FnOnce() -> String) -> Traffic {
        let meter = self.meter();
        let text = ordered();
        let times = text.lines().find_map(|line| line.strip_prefix("RTT ")).unwrap();
        let rtt_us = times.split_whitespace().map(|us| us.parse().unwrap()).collect();
        let bins: Vec<_> = meter.bins().unwrap().iter().map(|bin| bin.bytes).collect();
        // Neighbour discovery and what starts up are not yet traffic.
        let first = bins.iter().position(|bytes| *bytes > 10_000).unwrap();
        let last = bins.iter().rposition(|bytes| *bytes > 10_000).unwrap();
        Traffic { rtt_us, bins: bins[first..=last].to_vec() }
    }
}

pub struct Traffic {
    rtt_us: Vec<u64>,
    /// What came over the wire to the receiver in each 100 ms, from the first to the last.
    bins: Vec<u64>,
}

impl fmt::Debug for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rtt = [1, 50, 90, 99].map(|percent| self.rtt_us(percent));
        let (mean, best) = (self.bit_s(), self.best_bit_s());
        write!(f, "{mean:.0} bit/s, best {best:.0}, rtt {rtt:?} us, {:?} bytes", self.bins)
    }
}

impl Traffic {
    /// On the wire, from the first packet to the last.
    pub fn bytes(&self) -> u64 {
        self.bins.iter().sum()
    }

    /// The mean rate.
    pub fn bit_s(&self) -> f64 {
        self.bytes() as f64 * 80.0 / self.bins.len() as f64
    }

    /// Whether something came in each of so many tenths of a second on end.
    fn flows_for(&self, bins: usize) -> bool {
        self.bins.split(|bytes| *bytes == 0).any(|part| part.len() >= bins)
    }

    /// The rate of the busiest second. A machine that stalls for a while does not change it.
    pub fn best_bit_s(&self) -> f64 {
        self.best_of(10)
    }

    /// The rate of the busiest so many tenths of a second.
    fn best_of(&self, bins: usize) -> f64 {
        let parts = self.bins.windows(self.bins.len().min(bins));
        let bit_s = |bins: &[u64]| bins.iter().sum::<u64>() as f64 * 80.0 / bins.len() as f64;
        parts.map(bit_s).fold(0.0, f64::max)
    }

    /// A percentile of the probe's round trips.
    pub fn rtt_us(&self, percent: usize) -> u64 {
        self.rtt_us.get(self.rtt_us.len() * percent / 100).copied().unwrap_or(u64::MAX)
    }
}

pub struct Server {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Reads to the end; gives the number of bytes.
fn drain(mut stream: TcpStream) -> usize {
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut buffer = vec![0; 1 << 16];
    let mut total = 0;
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        total += n;
    }
    total
}

pub fn cable(
    left: &NetNs,
    left_dev: &str,
    left_ip: &str,
    right: &NetNs,
    right_dev: &str,
    right_ip: &str,
) {
    let mut netlink = left.netlink().unwrap();
    let pair = VethPair { name: left_dev, peer: right_dev, peer_netns: Some(right) };
    netlink.add_veth(&pair).unwrap();
    for (netns, dev, ip) in [(left, left_dev, left_ip), (right, right_dev, right_ip)] {
        let mut netlink = netns.netlink().unwrap();
        let index = netlink.index_of(dev).unwrap();
        netlink.add_address(index, ip.parse().unwrap(), 24).unwrap();
        netlink.set_up(index, true).unwrap();
    }
}

pub fn net_of(netns: &NetNs) -> String {
    format!("--net=/run/netns/{}", netns.name())
}

pub fn into(netns: &NetNs, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(net_of(netns)).arg(program).stdin(Stdio::null());
    command
}

/// `tidegate` in the sender's namespace: exit code, standard output and error.
pub fn tidegate(place: &Place, bed: &Bed, words: &str) -> (i32, String, String) {
    let mut command = into(&bed.sender, env!("CARGO_BIN_EXE_tidegate"));
    place.keep_to(&mut command).args(words.split(' '));
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

pub fn ok(place: &Place, bed: &Bed, words: &str) -> String {
    let (code, out, error) = tidegate(place, bed, words);
    assert_eq!(code, 0, "{words}: {error}");
    out
}

pub fn refused(place: &Place, bed: &Bed, words: &str) -> String {
    let (code, _, error) = tidegate(place, bed, words);
    assert!(code == 1 || code == 2, "{words}: {code} {error}");
    error
}

/// All that came is no more than the rate gives in that time, and the bucket at once.
pub fn is_at_most(traffic: &Traffic, bit_s: f64, burst_bytes: u32) {
    // A packet may wait for the receiver's CPU, so that what follows seems to come faster.
    const LATE_BYTES: f64 = 30_000.0;
    let seconds = traffic.bins.len() as f64 / 10.0;
    let allowed = bit_s / 8.0 * seconds * 1.02 + f64::from(burst_bytes) + LATE_BYTES;
    assert!(traffic.bytes() as f64 <= allowed, "more than {allowed} bytes: {traffic:?}");
}

/// The same; and one second at least comes near the rate, however busy the machine is.
pub fn is_held(traffic: &Traffic, bit_s: f64, burst_bytes: u32) {
    is_at_most(traffic, bit_s, burst_bytes);
    // For so long that a burst alone is not enough.
    let bins = 2 + (f64::from(burst_bytes) * 160.0 / bit_s).ceil() as usize;
    assert!(traffic.best_of(bins) > bit_s / 2.0, "less than half of {bit_s}: {traffic:?}");
}

/// More came than a limit of that rate passes, with all that [`is_held`] allows. Ask it of the least rate
/// that the limit had: a slow machine does not send much more.
pub fn is_free(traffic: &Traffic, bit_s: f64) {
    assert!(traffic.best_bit_s() > 1.2 * bit_s, "{bit_s} bit/s still hold: {traffic:?}");
}

#[test]
fn root_edt_is_refused_without_fq() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    let message = refused(&place, &bed, "run --scheme edt --egress 1mbit -- true");
    // A command that cannot work here is no advice.
    let has_fq = bed.tc("qdisc replace dev lo root fq").status.success();
    bed.tc("qdisc del dev lo root");
    let advice = if has_fq { "tc qdisc replace dev eth0 root fq" } else { "modprobe sch_fq" };
    assert!(message.contains(advice), "{message}");
    assert_eq!(message.contains("noqueue"), has_fq, "{message}");
    for scope in ["--dev eth0", "--port eth0"] {
        let words = format!("limit add a {scope} --scheme edt --egress 1mbit");
        let message = refused(&place, &bed, &words);
        // A port's packets leave by other devices, and there are none.
        let part =
            if scope.contains("dev") { "(or use scheme `police`" } else { "none but the loopback" };
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(bed.qdiscs(), before);
    assert!(!place.store().exists());
}

#[test]
fn root_edt_says_what_cannot_be() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let message = refused(&place, &bed, "run --scheme edt --ingress 1mbit -- true");
    assert!(
        message.contains("--ingress: on a cgroup, scheme `edt` limits egress only"),
        "{message}"
    );
    let message = refused(&place, &bed, "limit add a --dev eth9 --scheme edt --egress 1mbit");
    assert!(message.contains("there is no device `eth9`"), "{message}");
    let message = refused(&place, &bed, "limit add a --dev eth0 --scheme pace --egress 1mbit");
    assert!(message.contains("write --scheme edt"), "{message}");
    let message = refused(&place, &bed, "run --scheme edt --egress 1mbit --rto-min 20ms -- true");
    assert!(message.contains("scheme `edt` has no `rto-min`"), "{message}");
}

#[test]
fn root_edt_holds_one_flow() {
    need_root!();
    let Some(bed) = Bed::with_fq() else { return };
    let traffic =
        bed.run(&Place::new(), &["--scheme", "edt", "--egress", LIMIT], "5 1 0 10.97.0.2");
    is_held(&traffic, LIMIT_BIT_S, BURST_BYTES);
}

/// A round trip of 40 ms, by netem on the way back.
#[test]
fn root_edt_holds_a_flow_over_a_long_path() {
    need_root!();
    let Some(bed) = Bed::with_fq() else { return };
    let netem = ["qdisc", "replace", "dev", "eth0", "root", "netem", "delay", "40ms"];
    if !into(&bed.receiver, "tc").args(netem).output().unwrap().status.success() {
        return skip("this kernel has no netem");
    }
    let flags = ["--scheme", "edt", "--egress", LIMIT];
    let traffic = bed.run(&Place::new(), &flags, "8 1 0 10.97.0.2");
    assert!(traffic.rtt_us(1) > 40_000, "{traffic:?}");
    is_held(&traffic, LIMIT_BIT_S, BURST_BYTES);
}

#[test]
fn root_edt_holds_udp() {
    need_root!();
    let Some(bed) = Bed::with_fq() else { return };
    // Three times the limit. An emulated machine stalls for longer than 10 ms: what waits must last.
    let order = "5 0 60e6 10.97.0.2";
    let flags = ["--scheme", "edt", "--egress", LIMIT, "--drop", "100ms"];
    let traffic = bed.run(&Place::new(), &flags, order);
    is_held(&traffic, LIMIT_BIT_S, BURST_BYTES);
    println!(
        "root_edt_holds_udp: {:.2} Mbit/s, a newcomer's rtt {} us",
        traffic.bit_s() / 1e6,
        traffic.rtt_us(50)
    );
}

/// Four greedy flows, and small datagrams of the same limit: here and behind one big queue of the same rate.
#[test]
fn root_edt_a_newcomer_does_not_wait_for_greedy_flows() {
    need_root!();
    let Some(bed) = Bed::with_fq() else { return };
    let order = "6 4 0 10.97.0.2";
    let ours = bed.run(&Place::new(), &["--scheme", "edt", "--egress", LIMIT], order);
    let fifo = format!("qdisc replace dev eth0 root tbf rate {LIMIT} burst 70kb limit 1mb");
    assert!(bed.tc(&fifo).status.success());
    let theirs = bed.free(&bed.sender, order);
    println!(
        "root_edt_a_newcomer_does_not_wait_for_greedy_flows: edt {:.2} Mbit/s, rtt {} us, 99 % {} us; one \
         queue (tbf) {:.2} Mbit/s, rtt {} us, 99 % {} us",
        ours.bit_s() / 1e6,
        ours.rtt_us(50),
        ours.rtt_us(99),
        theirs.bit_s() / 1e6,
        theirs.rtt_us(50),
        theirs.rtt_us(99),
    );
    is_held(&ours, LIMIT_BIT_S, BURST_BYTES);
    assert!(4 * ours.rtt_us(50) < theirs.rtt_us(50), "{ours:?} {theirs:?}");
    assert!(ours.rtt_us(90) < theirs.rtt_us(50), "{ours:?} {theirs:?}");
}

#[test]
fn root_edt_limits_a_device_and_leaves_no_trace() {
    need_root!();
    let Some(bed) = Bed::with_fq() else { return };
    let place = Place::new();
    let before = bed.qdiscs();
    ok(&place, &bed, "limit add up --dev eth0 --scheme edt --egress 20mbit");
    assert!(ok(&place, &bed, "status").contains("in force"));
    let same = ok(&place, &bed, "limit add up --dev eth0 --scheme edt --egress 20mbit");
    assert!(same.contains("nothing changed"), "{same}");
    is_held(&bed.free(&bed.sender, "5 4 0 10.97.0.2"), LIMIT_BIT_S, BURST_BYTES);
    ok(&place, &bed, "limit set up --egress 10mbit");
    is_held(&bed.free(&bed.sender, "5 1 0 10.97.0.2"), LIMIT_BIT_S / 2.0, BURST_BYTES);
    let status = ok(&place, &bed, "status --json");
    assert!(status.contains("\"dev\": \"eth0\"") && status.contains("in_force"), "{status}");

    // Without fq the limit is still one, and says so.
    assert!(bed.tc("qdisc del dev eth0 root").status.success());
    let (_, table, _) = tidegate(&place, &bed, "status");
    assert!(table.contains("NO FQ") && table.contains("NOT ENFORCED"), "{table}");
    let policed = bed.free(&bed.sender, "4 0 30e6 10.97.0.2");
    is_at_most(&policed, LIMIT_BIT_S / 2.0, BURST_BYTES);
    assert!(bed.tc("qdisc replace dev eth0 root fq").status.success());
    assert!(ok(&place, &bed, "status").contains("in force"));

    ok(&place, &bed, "detach");
    let without_handle = |text: &str| text.replace(|c: char| c.is_ascii_hexdigit(), "");
    assert_eq!(without_handle(&bed.qdiscs()), without_handle(&before));
    let filters =
        into(&bed.sender, "tc").args(["filter", "show", "dev", "eth0", "egress"]).output();
    assert!(filters.unwrap().stdout.is_empty());
    is_free(&bed.free(&bed.sender, "3 1 0 10.97.0.2"), LIMIT_BIT_S / 2.0);
}

/// A rate that changes under a transfer: the connection goes on, and nothing is sent twice for it.
#[test]
fn root_edt_a_rate_changes_under_a_transfer() {
    need_root!();
    let Some(bed) = Bed::with_fq() else { return };
    let place = Place::new();
    ok(&place, &bed, "limit add up --dev eth0 --scheme edt --egress 20mbit");
    let listener = bed.receiver.run(|| TcpListener::bind(("0.0.0.0", PORT)).unwrap()).unwrap();
    let stream = bed.sender.run(|| TcpStream::connect(("10.97.0.2", PORT)).unwrap()).unwrap();
    let (sink, _) = listener.accept().unwrap();
    let reader = thread::spawn(move || drain(sink));
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
    let resent = || tidegate_instruments::sock::tcp_info(&stream).unwrap().retransmitted_segments;
    let sent = || tidegate_instruments::sock::tcp_info(&stream).unwrap().data_segments_sent;
    for rate in ["10mbit", "40mbit", "20mbit"] {
        let first = sent();
        wait_for("the transfer to go on", || (sent() > first + 500).then_some(()));
        let before = resent();
        ok(&place, &bed, &format!("limit set up --egress {rate}"));
        let then = sent();
        wait_for("the transfer to go on after the change", || (sent() > then + 500).then_some(()));
        assert!(resent() - before <= 3, "{} segments were sent again", resent() - before);
    }
    stop.store(true, Ordering::Relaxed);
    let written: usize = sending.join().unwrap();
    drop(stream);
    assert_eq!(reader.join().unwrap(), written);
    ok(&place, &bed, "detach");
}

/// What a guest sends through this host: stamped as it comes in, kept by the uplink's `fq`.
#[test]
fn root_edt_limits_a_port() {
    need_root!();
    let Some(bed) = Bed::with_fq() else { return };
    let guest = NetNs::create(&format!("{}-g", bed.sender.name())).unwrap();
    cable(&guest, "eth0", "10.96.0.2", &bed.sender, "tap0", "10.96.0.1");
    let via = |netns: &NetNs, gateway: &str| {
        let mut netlink = netns.netlink().unwrap();
        let (network, gateway) = ("0.0.0.0".parse().unwrap(), gateway.parse().unwrap());
        add_route(&mut netlink, &Route { network, prefix_len: 0, gateway }).unwrap();
    };
    via(&guest, "10.96.0.1");
    via(&bed.sender, "10.97.0.2");
    via(&bed.receiver, "10.97.0.1");
    let forward = PathBuf::from("/proc/sys/net/ipv4/ip_forward");
    bed.sender.run(|| std::fs::write(&forward, "1").unwrap()).unwrap();

    let place = Place::new();
    ok(&place, &bed, "limit add guest --port tap0 --scheme edt --egress 20mbit --drop 100ms");
    let udp = bed.free(&guest, "5 0 60e6 10.97.0.2");
    is_held(&udp, LIMIT_BIT_S, BURST_BYTES);
    let tcp = bed.free(&guest, "5 4 0 10.97.0.2");
    is_held(&tcp, LIMIT_BIT_S, BURST_BYTES);
    let kept = String::from_utf8(bed.tc("-s qdisc show dev eth0").stdout).unwrap();
    let throttled = kept.split_whitespace().skip_while(|w| *w != "throttled").nth(1);
    assert!(throttled.is_some_and(|n| n != "0"), "fq has kept nothing: {kept}");
    println!(
        "root_edt_limits_a_port: udp {:.2}, tcp {:.2} Mbit/s",
        udp.bit_s() / 1e6,
        tcp.bit_s() / 1e6
    );
    ok(&place, &bed, "detach");
}
