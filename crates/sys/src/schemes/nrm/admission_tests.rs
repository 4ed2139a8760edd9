//! Connections that are held before they begin: the header against its model, and the loaded programs with
//! connections over loopback.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use tidegate_core::{
    Class, Direction, Nanos, Rate, admission, queue_options::VirtualQueueOptions, virtual_queue,
};

use super::{
    tree_tests::{Nest, process_in, queue_of},
    *,
};
use crate::{cgroup::Cgroup, clock::monotonic_ns, intf, limit::AttachedLimit};

unsafe extern "C" {
    fn native_ad_ended(turns: *mut intf::Turns, bytes: u64);
    fn native_ad_ask(turns: *mut intf::Turns, now: u64, backlog: i64, cost: u64, paced: u32)
    -> u64;
    fn native_ad_only_asks(turns: *const intf::Turns) -> i32;
    fn native_ad_ends_soon(turns: *const intf::Turns, segments: u32) -> i32;
    fn native_ad_hold_ticks(wait_ns: u64, retries: u32, rtt_ns: u64, tick_ns: u64) -> u32;
    fn native_ad_syn_ticks(wait_ns: u64, rtt_ns: u64, tick_ns: u64) -> u32;
    fn native_ad_syn_retries(ticks: u32, tick_ns: u64, retries: u32) -> u32;
    fn native_ad_answer_retries(chosen: u32, host: u32) -> u32;
    fn native_ad_asked(now: u64, port: u32) -> u32;
    fn native_ad_is_asked(asked: u32, now: u64, port: u32) -> i32;
}

proptest! {
    /// Connections of any size that are asked for and end at any times, at any rate.
    #[test]
    fn turns_are_the_model_s(
        bit_s in 8_000u64..=100_000_000_000,
        steps in proptest::collection::vec(
            (any::<bool>(), 0u64..3_000_000_000, any::<i64>(), any::<u32>(), 0u64..1 << 40), 1..200,
        ),
    ) {
        let cost = virtual_queue::cost_of_byte(Rate::from_bit_s(bit_s).unwrap());
        let (mut model, mut c) = (admission::Turns::default(), intf::Turns::default());
        let mut now = 1;
        for (asks, later, backlog, paced, bytes) in steps {
            now += later >> (later % 30);
            let backlog = backlog >> (later % 60);
            let paced = paced >> (later % 32);
            if asks {
                let wait = model.ask(Nanos(now), backlog, cost, paced);
                // SAFETY: the turns are live; the rest are numbers.
                let got = unsafe { native_ad_ask(&raw mut c, now, backlog, cost, paced) };
                prop_assert_eq!(got, wait.0);
                prop_assert!(wait <= admission::MOST);
            } else {
                model.ended(bytes >> (later % 40));
                // SAFETY: as above.
                unsafe { native_ad_ended(&raw mut c, bytes >> (later % 40)) };
            }
            prop_assert_eq!((c.next_ns, c.average), (model.next.0, model.average));
            // SAFETY: as above.
            prop_assert_eq!(unsafe { native_ad_only_asks(&raw const c) } != 0, model.only_asks());
            let segments = paced % 32;
            // SAFETY: as above.
            let ends = unsafe { native_ad_ends_soon(&raw const c, segments) } != 0;
            prop_assert_eq!(ends, model.ends_soon(segments));
        }
    }

    /// Any wait, however often and fast the kernel sends an answer again.
    #[test]
    fn held_times_are_the_model_s(
        wait_ns in 0u64..=1_000_000_000, retries in 0u32..300, rtt_ns in 0u64..1 << 40,
        tick_ns in prop_oneof![Just(1_000_000u64), Just(4_000_000), Just(10_000_000), 0u64..1 << 40],
    ) {
        let (wait, rtt, tick) = (Nanos(wait_ns), Nanos(rtt_ns), Nanos(tick_ns));
        let model = admission::hold_ticks(wait, retries, rtt, tick);
        // SAFETY: plain numbers.
        let got = unsafe { native_ad_hold_ticks(wait_ns, retries, rtt_ns, tick_ns) };
        prop_assert_eq!(got, model.unwrap_or(0));
        let (chosen, host) = (retries % 3, rtt_ns as u32 % 16);
        // SAFETY: plain numbers.
        let got = unsafe { native_ad_answer_retries(chosen, host) };
        prop_assert_eq!(got, admission::answer_retries(chosen, host).unwrap_or(0));
    }

    /// Any wait and round trip: how long a SYN is held, and how often it is sent.
    #[test]
    fn held_syns_are_the_model_s(
        wait_ns in 0u64..=850_000_000, rtt_ns in prop_oneof![0u64..1 << 30, 0u64..1 << 40],
        tick_ns in prop_oneof![Just(1_000_000u64), Just(4_000_000), Just(10_000_000), 0u64..1 << 40],
        retries in 0u32..300,
    ) {
        let (wait, rtt, tick) = (Nanos(wait_ns), Nanos(rtt_ns), Nanos(tick_ns));
        // SAFETY: plain numbers.
        let ticks = unsafe { native_ad_syn_ticks(wait_ns, rtt_ns, tick_ns) };
        prop_assert_eq!(ticks, admission::syn_ticks(wait, rtt, tick).unwrap_or(0));
        // SAFETY: plain numbers.
        let got = unsafe { native_ad_syn_retries(ticks, tick_ns, retries) };
        prop_assert_eq!(got, admission::syn_retries(ticks, tick, retries));
    }

    /// An answer that follows at once is known by its port, whatever the time, and no later one is.
    #[test]
    fn an_answer_is_known_for_a_millisecond(
        now in any::<u64>(), port in 1u32..1 << 16, after in 0u64..2_000_000_000,
    ) {
        // SAFETY: plain numbers.
        let is_asked = |after: u64, port| unsafe {
            native_ad_is_asked(native_ad_asked(now, port), now.wrapping_add(after), port) != 0
        };
        prop_assert!(is_asked(after % 1_000_000, port));
        prop_assert!(!is_asked(1_200_000 + after, port));
        // SAFETY: plain numbers.
        let other = unsafe { native_ad_is_asked(native_ad_asked(now, port), now, port ^ 1) };
        prop_assert_eq!(other, 0);
    }
}

/// In the process that the test starts: where it serves, and where it sends all it can.
const HOST: &str = "TIDEGATE_TEST_SERVES_AT";
const BULK: &str = "TIDEGATE_TEST_SERVES_BESIDE";
const PATIENCE: Duration = Duration::from_secs(120);
const REPLY: usize = 10_000;
const CLIENTS: usize = 10;
const CONNECTIONS: usize = 10;

/// The process in the limit, not a test of its own: a server with a connection for each reply, beside a
/// transfer if it is given one. It says its port, and ends with its input.
#[test]
fn serves() {
    let Ok(host) = env::var(HOST) else { return };
    let listener = TcpListener::bind((host, 0)).unwrap();
    println!("port {}", listener.local_addr().unwrap().port());
    if let Ok(bulk) = env::var(BULK) {
        let mut bulk = TcpStream::connect(bulk).unwrap();
        thread::spawn(move || while bulk.write_all(&[7; 50_000]).is_ok() {});
    }
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            thread::spawn(move || {
                let mut asked = [0];
                if stream.read_exact(&mut asked).is_ok() {
                    let _ = stream.write_all(&[7; REPLY]);
                }
            });
        }
    });
    let _ = io::stdin().read(&mut [0]);
    std::process::exit(0);
}

struct Server(Child, u16);

impl Server {
    /// Starts it in a cgroup, beside a transfer to `bulk`, and waits until it has a port.
    fn start(group: &Cgroup, host: &str, bulk: Option<&TcpListener>) -> Server {
        let mut command = process_in(group, concat!(module_path!(), "::serves"));
        command.env(HOST, host);
        if let Some(bulk) = bulk {
            command.env(BULK, bulk.local_addr().unwrap().to_string());
        }
        let mut server = Server(command.spawn().unwrap(), 0);
        let lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        server.1 = lines
            .find_map(|line| Some(line.split_once("port ")?.1.parse().unwrap()))
            .expect("the server says its port");
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn root_short_connections_beside_a_transfer_are_held_and_whole() {
    const TEST: &str = "root_short_connections_beside_a_transfer_are_held_and_whole";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let retries = fs::read_to_string("/proc/sys/net/ipv4/tcp_synack_retries").unwrap();
    if retries.trim().parse::<u32>().unwrap() < 5 {
        eprintln!("SKIP {TEST}: tcp_synack_retries is {}, not 5", retries.trim());
        return;
    }
    are_held("127.0.0.1");
    are_held("::1");
}

fn are_held(host: &'static str) {
    const TEST: &str = "root_short_connections_beside_a_transfer_are_held_and_whole";
    let nest = Nest::new("held", 1);
    let (hierarchy, group) = (&nest.hierarchy, &nest.groups[0]);
    let rate = Rate::from_bit_s(5_000_000).unwrap();
    let queue = Some(VirtualQueueOptions::new(rate));
    let options = LimitOptions { egress: queue, loopback: true, ..LimitOptions::default() };
    let limit = AttachedLimit::attach(hierarchy, group, &options, None).unwrap();
    let started = Instant::now();

    let bulk = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(group, host, Some(&bulk));
    let port = server.1;
    thread::spawn(move || {
        let (mut stream, _) = bulk.accept().unwrap();
        let _ = io::copy(&mut stream, &mut io::sink());
    });

    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                for _ in 0..CONNECTIONS {
                    let mut stream = TcpStream::connect((host, port)).unwrap();
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    stream.write_all(&[1]).unwrap();
                    let mut reply = Vec::new();
                    stream.read_to_end(&mut reply).unwrap();
                    assert_eq!(reply.len(), REPLY);
                }
            });
        }
    });

    let reading = limit.maps.read(Direction::Egress).unwrap();
    let turns = queue_of(&limit.maps, 0).turns;
    if turns.retries == 0 {
        eprintln!("SKIP {TEST}: programs of cgroups see no SYN-ACK on this kernel");
        return;
    }
    assert!(turns.held > 0, "nobody was held: {turns:?}");
    let average = u64::from(turns.average >> 6);
    assert!((REPLY as u64 / 2..=2 * REPLY as u64).contains(&average), "{turns:?}");
    // However fast the machine: with the credit of those that begin.
    // Passed, marked or slowed.
    let passed: u64 = reading.counters.bytes[..3].iter().sum();
    let most = rate.bit_s() as f64 / 8.0 * (started.elapsed().as_secs_f64() + 0.3);
    assert!((passed as f64) < most, "{passed} bytes, at most {most}");
    drop(server);
    limit.detach(hierarchy, group).unwrap();
}

/// The parent is behind by more than all other packets may find it, and less than new connections may.
#[test]
fn root_a_parent_does_not_drop_the_answers_of_its_child() {
    const TEST: &str = "root_a_parent_does_not_drop_the_answers_of_its_child";
    const BACKLOG: Duration = Duration::from_millis(80);
    const NOT_DRAINED: Duration = Duration::from_millis(50);
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let nest = Nest::new("answers", 2);
    let hierarchy = &nest.hierarchy;
    let rate = Rate::from_bit_s(5_000_000).unwrap();
    let queue = Some(VirtualQueueOptions::new(rate));
    let mut options = LimitOptions { egress: queue, loopback: true, ..LimitOptions::default() };
    let parent = AttachedLimit::attach(hierarchy, &nest.groups[0], &options, None).unwrap();
    options.class = Some(Class { guarantee: None, weight: 50 });
    let above = Some(parent.maps());
    let child = AttachedLimit::attach(hierarchy, &nest.groups[1], &options, above).unwrap();
    let server = Server::start(&nest.groups[1], "127.0.0.1", None);

    let deadline = Instant::now() + PATIENCE;
    loop {
        let own = parent.maps.own_as::<Sockets>().unwrap();
        let mut queue = own.queues.get(0, 0).unwrap();
        let start = monotonic_ns();
        queue.finish_ns = start + BACKLOG.as_nanos() as u64;
        own.queues.set(0, 0, &queue).unwrap();
        let stream = TcpStream::connect_timeout(
            &(Ipv4Addr::LOCALHOST, server.1).into(),
            Duration::from_millis(500),
        );
        let counters = parent.maps.read(Direction::Egress).unwrap().counters;
        let drained_ns = start + NOT_DRAINED.as_nanos() as u64;
        let early = intf::OUTCOME_TABLE
            .iter()
            .zip(counters.last_ns)
            .filter(|(outcome, at)| !outcome.passed && (start..drained_ns).contains(at));
        assert_eq!(early.count(), 0, "{counters:?}");
        if stream.is_ok() && monotonic_ns() < drained_ns {
            break;
        }
        assert!(Instant::now() < deadline, "this machine needs 50 ms for a connection");
    }
    drop(server);
    child.detach(hierarchy, &nest.groups[1]).unwrap();
    parent.detach(hierarchy, &nest.groups[0]).unwrap();
}
