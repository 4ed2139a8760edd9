//! TCP's timers of sockets in a limit of scheme `pace`, on loopback: the least time-out holds from the first
//! segment on, and what has nothing in flight does not have to wait for the probe timer.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, BufRead, BufReader, Lines, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, ChildStdout},
    time::{Duration, Instant},
};

use tidegate_core::{Direction, Rate, Scheme, admission, queue_options::VirtualQueueOptions};

use super::{
    tree_tests::{Nest, process_in},
    *,
};
use tidegate_instruments::sock::{syn_retries, tcp_info};

use crate::{
    cgroup::Cgroup, clock::monotonic_ns, intf, limit::AttachedLimit, preflight,
    process::network_namespaces, store::unreadable::release_sockets,
};

/// In the process that the test starts: what it does.
const ROLE: &str = "TIDEGATE_TEST_TIMERS";
const PATIENCE: Duration = Duration::from_secs(120);
/// The kernel's least time-out, and one that is clearly below it.
const KERNELS: Duration = Duration::from_millis(200);
const SHORT: Duration = Duration::from_millis(100);
const REPLY: usize = 3000;
/// The oldest and those that were opened last.
const MOST_LISTENERS: usize = 4;

/// The process in the limit, not a test of its own. `connects`: for each line that it reads it opens one more
/// listener and connects to each that it has, and says the time-outs of both ends, in microseconds.
/// `listens`: for each line it opens one more listener, and says how often the first and the last send a SYN
/// again.
/// `answers`: a server of one connection, which it says the port of; it answers every byte but zeros.
#[test]
fn takes_part() {
    let Ok(role) = env::var(ROLE) else { return };
    let mut listeners = vec![TcpListener::bind("127.0.0.1:0").unwrap()];
    println!("said {}", listeners[0].local_addr().unwrap().port());
    if role == "answers" {
        let (mut stream, _) = listeners[0].accept().unwrap();
        let mut asked = [0];
        while stream.read_exact(&mut asked).is_ok() {
            let reply = [7; REPLY];
            if asked != [0] && stream.write_all(&reply).is_err() {
                break;
            }
        }
        return;
    }
    for _ in io::stdin().lines() {
        if role == "listens" {
            let last = TcpListener::bind("127.0.0.1:0").unwrap();
            let [first, last] = [&listeners[0], &last].map(|one| syn_retries(one).unwrap());
            println!("said {first} {last}");
            continue;
        }
        listeners.push(TcpListener::bind("127.0.0.1:0").unwrap());
        if listeners.len() > MOST_LISTENERS {
            listeners.remove(1);
        }
        let mut said = "said".to_owned();
        for listener in &listeners {
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            for info in [tcp_info(client).unwrap(), tcp_info(server).unwrap()] {
                said += &format!(" {}", info.retransmission_timeout.as_micros());
            }
        }
        println!("{said}");
    }
}

struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(group: &Cgroup, role: &str) -> Process {
        let mut command = process_in(group, concat!(module_path!(), "::takes_part"));
        let mut child = command.env(ROLE, role).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Process { child, lines }
    }

    /// The numbers that it says next.
    fn said(&mut self) -> Vec<u64> {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        let said = lines.find_map(|line| Some(line.split_once("said ")?.1.to_owned()));
        let said = said.expect("the process says something");
        said.split(' ').map(|number| number.parse().unwrap()).collect()
    }

    fn ask(&mut self) -> Vec<u64> {
        writeln!(self.child.stdin.as_ref().unwrap()).unwrap();
        self.said()
    }

    /// The time-outs of new connections.
    fn timeouts(&mut self) -> Vec<Duration> {
        self.ask().into_iter().map(Duration::from_micros).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options(bit_s: u64) -> LimitOptions {
    let queue = Rate::from_bit_s(bit_s).map(VirtualQueueOptions::new);
    LimitOptions { egress: queue, loopback: true, ..LimitOptions::default() }
}

/// Puts the egress queue so far behind, over a path of this round trip. Returns when that was, in ns.
fn set_backlog(limit: &AttachedLimit, rtt: Duration, backlog: Duration) -> u64 {
    let own = limit.maps.own_as::<Sockets>().unwrap();
    let mut queue = own.queues.get(0, 0).unwrap();
    queue.rtt_ns = rtt.as_nanos() as u64;
    let start = monotonic_ns();
    queue.finish_ns = start + backlog.as_nanos() as u64;
    own.queues.set(0, 0, &queue).unwrap();
    start
}

fn dropped(limit: &AttachedLimit) -> u64 {
    let counters = limit.maps.read(Direction::Egress).unwrap().counters;
    let outcomes = intf::OUTCOME_TABLE.iter().zip(counters.packets);
    outcomes.filter(|(outcome, _)| !outcome.passed).map(|(_, packets)| packets).sum()
}

#[test]
fn root_connections_have_the_least_timeout_from_the_first_segment() {
    const TEST: &str = "root_connections_have_the_least_timeout_from_the_first_segment";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let nest = Nest::new("timers", 1);
    let (hierarchy, group) = (&nest.hierarchy, &nest.groups[0]);
    let mut process = Process::start(group, "connects");
    process.said();
    let before = process.timeouts();
    if before.iter().any(|&timeout| timeout < KERNELS) {
        eprintln!("SKIP {TEST}: this host has another least time-out: {before:?}");
        return;
    }
    let options = options(100_000_000);
    let limit = AttachedLimit::attach(hierarchy, group, &options, None).unwrap();
    // The first round trip of a connection counts in its time-out: a busy machine may make it long.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let timeouts = process.timeouts();
        if timeouts.iter().all(|&timeout| timeout < SHORT) {
            break;
        }
        assert!(Instant::now() < deadline, "{timeouts:?}");
    }
    limit.detach(hierarchy, group).unwrap();
    let after = process.timeouts();
    assert!(after.iter().all(|&timeout| timeout >= KERNELS), "{after:?}");
}

/// Listeners that exist when the limit comes, and new ones, get more retries, until the limit goes.
#[test]
fn root_listeners_send_their_answers_more_often() {
    const TEST: &str = "root_listeners_send_their_answers_more_often";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let host = |name: &str| -> u32 {
        let path = format!("/proc/sys/net/ipv4/{name}");
        fs::read_to_string(path).unwrap().trim().parse().unwrap()
    };
    let (answers, syns) = (host("tcp_synack_retries"), u64::from(host("tcp_syn_retries")));
    let Some(more) = admission::answer_retries(0, answers).map(u64::from) else {
        eprintln!("SKIP {TEST}: tcp_synack_retries is {answers}, not 5");
        return;
    };
    // Older kernels show no answers to programs of cgroups, so that none is held.
    let holds = !preflight::is_older_than((6, 13));
    let [in_force, given_back] = if holds { [more, answers.into()] } else { [syns; 2] };
    // Given back by the limit itself, and as if another version had made it.
    for is_readable in [true, false] {
        let nest = Nest::new("listeners", 1);
        let (hierarchy, group) = (&nest.hierarchy, &nest.groups[0]);
        let mut process = Process::start(group, "listens");
        process.said();
        assert_eq!(process.ask(), [syns, syns]);
        let limit = AttachedLimit::attach(hierarchy, group, &options(100_000_000), None).unwrap();
        assert_eq!(process.ask(), [in_force; 2]);
        if is_readable {
            limit.detach(hierarchy, group).unwrap();
        } else {
            let sockets =
                MapHandle::try_from(&limit.maps.own_as::<Sockets>().unwrap().sockets).unwrap();
            drop(limit);
            release_sockets(&sockets, &network_namespaces(hierarchy, group)).unwrap();
        }
        assert_eq!(process.ask(), [given_back, syns]);
    }
}

/// The queue is too far behind for a usual packet. If the reply were dropped, the kernel would treat it as
/// never sent, and with nothing in flight it would try again after 200 ms.
#[test]
fn root_what_has_nothing_in_flight_passes_on_credit() {
    const TEST: &str = "root_what_has_nothing_in_flight_passes_on_credit";
    // The round trip, a backlog beyond what all others may find, and what the machine may take for a reply
    // until no more is left.
    const ROWS: [[Duration; 3]; 2] = [
        [Duration::ZERO, Duration::from_millis(60), Duration::from_millis(25)],
        // Who hears of its share later has more room.
        [Duration::from_secs(1), Duration::from_millis(79), Duration::from_millis(10)],
    ];
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let nest = Nest::new("alone", 1);
    let (hierarchy, group) = (&nest.hierarchy, &nest.groups[0]);
    let limit = AttachedLimit::attach(hierarchy, group, &options(50_000_000), None).unwrap();
    let mut server = Process::start(group, "answers");
    let port = u16::try_from(server.said()[0]).unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut ask = || {
        stream.write_all(&[1]).unwrap();
        stream.read_exact(&mut [0; REPLY]).unwrap();
    };
    // It is beyond its first ten segments.
    (0..20).for_each(|_| ask());
    for [rtt, backlog, not_drained] in ROWS {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let before = dropped(&limit);
            let start = set_backlog(&limit, rtt, backlog);
            ask();
            let in_time = monotonic_ns() < start + not_drained.as_nanos() as u64;
            assert_eq!(dropped(&limit), before, "{rtt:?}");
            if in_time {
                break;
            }
            assert!(Instant::now() < deadline, "this machine needs {not_drained:?} for a reply");
        }
    }
    // The credit has an end.
    let before = dropped(&limit);
    set_backlog(&limit, Duration::ZERO, Duration::from_secs(2));
    ask();
    assert!(dropped(&limit) > before);
    drop(server);
    limit.detach(hierarchy, group).unwrap();
}

/// The limit is further behind than anything may be: requests wait for TCP's timers, each for a known cause.
#[test]
fn root_what_waits_for_a_timer_is_counted_by_cause() {
    const TEST: &str = "root_what_waits_for_a_timer_is_counted_by_cause";
    const BACKLOG: Duration = Duration::from_secs(2);
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let nest = Nest::new("risk", 1);
    let (hierarchy, group) = (&nest.hierarchy, &nest.groups[0]);
    for (scheme, cause) in [(Scheme::Pace, "credit_used"), (Scheme::Nrm, "not_paced")] {
        let options = LimitOptions { scheme, ..options(50_000_000) };
        let limit = AttachedLimit::attach(hierarchy, group, &options, None).unwrap();
        let at_risk = || {
            let counted = limit.maps.read(Direction::Egress).unwrap().at_risk.unwrap();
            intf::RISK_TABLE.iter().map(|risk| risk.name).zip(counted).collect::<BTreeMap<_, _>>()
        };
        let mut server = Process::start(group, "answers");
        let port = u16::try_from(server.said()[0]).unwrap();
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let ask = |mut stream: &TcpStream| {
            stream.write_all(&[1]).unwrap();
            stream.read_exact(&mut [0; REPLY]).unwrap();
        };
        (0..20).for_each(|_| ask(&stream));
        // An ACK alone is no request.
        let (before, deadline) = (dropped(&limit), Instant::now() + PATIENCE);
        while dropped(&limit) == before {
            assert!(Instant::now() < deadline, "no ACK was dropped");
            set_backlog(&limit, Duration::ZERO, BACKLOG);
            stream.write_all(&[0]).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(at_risk().values().sum::<u64>(), 0, "{}: {:?}", scheme.name(), at_risk());

        // A machine that stands still for as long as the backlog drops nothing: then once more.
        let until_counted = |cause: &str, act: &mut dyn FnMut()| {
            let deadline = Instant::now() + PATIENCE;
            while at_risk()[cause] == 0 {
                assert!(Instant::now() < deadline, "{}, {cause}: {:?}", scheme.name(), at_risk());
                set_backlog(&limit, Duration::ZERO, BACKLOG);
                act();
            }
        };
        until_counted(cause, &mut || ask(&stream));
        let counted = at_risk();
        let others = counted.values().sum::<u64>() - counted[cause];
        assert_eq!(others, 0, "{}: {counted:?}", scheme.name());
        drop(server);

        let mut client = Process::start(group, "connects");
        client.said();
        until_counted("connecting", &mut || drop(client.timeouts()));
        drop(client);
        limit.detach(hierarchy, group).unwrap();
    }
}
