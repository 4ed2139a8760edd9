//! Builds testbeds, drives every traffic tool through them without a limit and with the peers, and
//! checks that nothing is left. Needs root.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use tidegate_core::{Bytes, Nanos, Rate, link::LinkOptions};
use tidegate_instruments::wire_meter::WireMeter;
use tidegate_lab::{
    stop::Skip,
    testbed::{
        Cgroup, Child, Family, Joint, LinkSpec, Means, Site, Testbed, TestbedOptions, Topology,
        command,
        peers::{Peer, TbfOptions, receiver_class},
        root_or_skip, set_sysctl,
        wait::wait_until,
    },
    tools::{
        hold::Held,
        iperf::{self, IperfOptions, IperfRun, Load},
        probe, rpc,
        web::WebServer,
    },
};

const SECOND: Duration = Duration::from_secs(1);
const MBIT: u64 = 1_000_000;
/// Payload and headers of a full TCP segment with timestamps, over IPv4 on Ethernet.
const FRAME_PER_PAYLOAD_V4: f64 = 1514.0 / 1448.0;

fn testbed(topology: Topology) -> Testbed {
    let lab_binary = Some(env!("CARGO_BIN_EXE_tidegate-lab").into());
    Testbed::new(TestbedOptions { lab_binary, ..TestbedOptions::new(topology) })
        .expect("a testbed comes up")
}

#[test]
fn root_a_testbed_leaves_nothing() {
    if !root_or_skip("root_a_testbed_leaves_nothing") {
        return;
    }
    let names: Vec<String> = {
        let testbed = testbed(Topology::TwoReceivers);
        assert_eq!(testbed.receiver_count(), 2);
        let hosts =
            [testbed.sender(), testbed.receiver(0), testbed.receiver(1), testbed.router().unwrap()];
        // Both ends of every cable are inside: none is in the namespace of the test.
        let outside = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        assert!(!outside.contains("down0"), "{outside}");
        hosts.map(|host| host.name().to_owned()).into()
    };
    for name in names {
        assert!(!Path::new("/run/netns").join(&name).exists(), "{name}");
    }
}

#[test]
fn root_a_cgroup_holds_its_process_and_goes() {
    if !root_or_skip("root_a_cgroup_holds_its_process_and_goes") {
        return;
    }
    let testbed = testbed(Topology::Pair);
    let cgroup = Cgroup::create().unwrap();
    let path = cgroup.path().to_owned();
    let mut sleep = command(Site::from(testbed.sender()).in_cgroup(&cgroup), "sleep").unwrap();
    sleep.arg("1000");
    let sleep = Child::spawn(sleep).unwrap();
    assert_eq!(cgroup.pids().unwrap(), [sleep.pid()]);
    let netns = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    assert_ne!(netns(&sleep.pid().to_string()), netns("self"));
    drop(sleep);
    drop(cgroup);
    assert!(!path.exists());
}

#[test]
fn root_sysctls_stay_inside() {
    if !root_or_skip("root_sysctls_stay_inside") {
        return;
    }
    let testbed = testbed(Topology::Pair);
    let key = "/proc/sys/net/ipv4/tcp_ecn";
    let before = fs::read_to_string(key).unwrap();
    let other = if before.trim() == "1" { "2" } else { "1" };
    set_sysctl(testbed.sender(), "net.ipv4.tcp_ecn", other).unwrap();
    let inside = testbed.sender().run(|| fs::read_to_string(key).unwrap()).unwrap();
    assert_eq!((inside.trim(), fs::read_to_string(key).unwrap()), (other, before));
    assert!(set_sysctl(testbed.sender(), "net.ipv4.nonsense", "1").is_err());
}

/// What iperf3 says arrived, and what was on the wire, are the same but for the headers.
#[test]
fn root_iperf_and_the_wire_agree() {
    if !root_or_skip("root_iperf_and_the_wire_agree") {
        return;
    }
    let testbed = testbed(Topology::Pair);
    // At a rate at which a busy or emulated test machine loses nothing and every segment is full.
    let alone = IperfOptions::tcp(testbed.addr(0, Family::V4), SECOND);
    let alone = iperf::run(testbed.sender(), testbed.receiver(0), &alone).unwrap();
    let rate_bit_s = (alone.received_bit_s as u64 / 2).min(100 * MBIT);
    let _peer = Peer::htb(&testbed, rate_bit_s).unwrap();
    let bin = Duration::from_millis(100);
    let mut meter =
        WireMeter::attach(testbed.receiver(0), testbed.receiver_dev(0), 600, bin).unwrap();
    let mut options = IperfOptions::tcp(testbed.addr(0, Family::V4), 3 * SECOND);
    options.load = Load::Tcp { cc: Some("cubic".into()) };
    meter.start().unwrap();
    let report = iperf::run(testbed.sender(), testbed.receiver(0), &options).unwrap();
    let bins = meter.bins().unwrap();
    let wire_bytes: u64 = bins.iter().map(|bin| bin.bytes).sum();
    let resent_bytes = report.retransmits.unwrap() as f64 * 1514.0;
    // What is in buffers at the end has been written and perhaps been on the wire, and did not arrive.
    let [arrived, written] = [report.received_bytes, report.sent_bytes]
        .map(|payload_bytes| payload_bytes as f64 * FRAME_PER_PAYLOAD_V4);
    let once_bytes = wire_bytes as f64 - resent_bytes;
    assert!(
        (arrived * 0.999..=written * 1.001).contains(&once_bytes),
        "{once_bytes} once on the wire, {report:?}"
    );
    assert_eq!(report.cc.as_deref(), Some("cubic"));
    assert!(report.intervals_bit_s.len() >= 10, "{report:?}");

    // HTB holds its rate on the wire. A machine that is busy fills some bins less, and the next ones more.
    let full = rate_bit_s as f64 / 8.0 * bin.as_secs_f64();
    let shares: Vec<f64> = bins.iter().map(|bin| bin.bytes as f64 / full).collect();
    let first = shares.iter().position(|share| *share > 0.1).unwrap();
    let last = shares.iter().rposition(|share| *share > 0.1).unwrap();
    let mean = shares[first..=last].iter().sum::<f64>() / (last - first + 1) as f64;
    assert!(mean < 1.05 && shares.iter().any(|share| *share > 0.8), "{mean} {shares:?}");
}

#[test]
fn root_iperf_reports_an_absent_server_and_runs_in_parallel() {
    if !root_or_skip("root_iperf_reports_an_absent_server_and_runs_in_parallel") {
        return;
    }
    let testbed = testbed(Topology::TwoReceivers);
    let mut options = IperfOptions::tcp(testbed.addr(0, Family::V6), SECOND);
    options.parallel = 2;
    let first = IperfRun::start(testbed.sender(), testbed.receiver(0), &options).unwrap();
    let udp = IperfOptions {
        server: testbed.addr(1, Family::V4),
        port: 5202,
        load: Load::Udp { rate_bit_s: 5 * MBIT, payload_bytes: Some(1000) },
        ..options.clone()
    };
    let second = IperfRun::start(testbed.sender(), testbed.receiver(1), &udp).unwrap();
    let (first, second) = (first.finish().unwrap(), second.finish().unwrap());
    assert_eq!((first.streams.len(), second.streams.len()), (2, 2));
    assert!(first.received_bit_s > 0.0, "{first:?}");
    // Datagrams that a busy machine sends late it sends all the same, or not at all.
    assert!(second.sent_bit_s > 0.0 && second.sent_bit_s < 11e6, "{second:?}");
    assert!(second.lost.unwrap().sent > 100, "{second:?}");

    // The client has the address of a host without a server.
    options.server = testbed.addr(1, Family::V4);
    let run = IperfRun::start(testbed.sender(), testbed.receiver(0), &options).unwrap();
    let error = run.finish().unwrap_err().to_string();
    assert!(error.contains("unable to connect"), "{error}");
}

#[test]
fn root_rpcs_flow_both_ways() {
    if !root_or_skip("root_rpcs_flow_both_ways") {
        return;
    }
    let testbed = testbed(Topology::Pair);
    let cgroup = Cgroup::create().unwrap();
    for (family, direction) in
        [(Family::V4, rpc::Direction::Send), (Family::V6, rpc::Direction::Receive)]
    {
        let at = SocketAddr::new(testbed.addr(0, family), 7000);
        let _server = rpc::start_server(&testbed, testbed.receiver(0), at).unwrap();
        let mut args = rpc::ClientArgs::new(at, vec![1 << 20, 10_240, 10_240], SECOND);
        args.warmup = SECOND / 5;
        args.cc = Some("reno".into());
        args.direction = direction;
        let site = Site::from(testbed.sender()).in_cgroup(&cgroup);
        let client = rpc::start_client(&testbed, site, &args).unwrap();
        assert_eq!(cgroup.pids().unwrap(), [client.pid()]);
        let report = rpc::finish_client(client, &args).unwrap();
        let [small, large] = &report.classes[..] else { panic!("{report:?}") };
        assert_eq!((small.request_bytes, small.flows, large.flows), (10_240, 2, 1));
        assert!(report.goodput_bit_s > 0.0, "{report:?}");
        assert!(small.latency.p50_us < large.latency.p50_us, "{report:?}");
        assert!(small.latency.p99_9_us >= small.latency.p99_us, "{report:?}");
    }
}

/// The probe sees HTB's queue, which is what it is for.
#[test]
fn root_the_probe_sees_the_queue() {
    if !root_or_skip("root_the_probe_sees_the_queue") {
        return;
    }
    let testbed = testbed(Topology::Pair);
    let at = SocketAddr::new(testbed.addr(0, Family::V4), 7001);
    let _server = probe::start_server(&testbed, testbed.receiver(0), at).unwrap();
    let args = probe::ClientArgs::new(at, 2 * SECOND);
    let run = || {
        let client = probe::start_client(&testbed, testbed.sender(), args).unwrap();
        probe::finish_client(client, args).unwrap()
    };
    let idle = run();
    assert_eq!((idle.sent, idle.lost, idle.refused), (1000, 0, 0), "{idle:?}");
    assert!(idle.realtime);

    let mut peer = Peer::htb(&testbed, 200 * MBIT).unwrap();
    // Until it is stopped.
    let mut options = IperfOptions::tcp(testbed.addr(0, Family::V4), 300 * SECOND);
    options.load = Load::Tcp { cc: Some("cubic".into()) };
    options.parallel = 4;
    let load = IperfRun::start(testbed.sender(), testbed.receiver(0), &options).unwrap();
    // The queue is there before the probe is.
    let started = Instant::now();
    while peer.class_stats().unwrap()[0].backlog_bytes < 100_000 {
        assert!(started.elapsed() < 60 * SECOND, "no queue: {:?}", peer.class_stats());
        thread::sleep(Duration::from_millis(5));
    }
    let loaded = run();
    drop(load);
    assert!(loaded.rtt.p50_us > 10.0 * idle.rtt.p50_us, "{idle:?} {loaded:?}");
    assert!(loaded.rtt.p50_us > 2000.0, "{loaded:?}");
    assert_eq!(loaded.sent, 1000, "the schedule holds whatever the queue: {loaded:?}");
}

#[test]
fn root_nginx_serves_curl_in_both_families() {
    if !root_or_skip("root_nginx_serves_curl_in_both_families") {
        return;
    }
    let testbed = testbed(Topology::Pair);
    let file_bytes = 50 << 20;
    for family in [Family::V4, Family::V6] {
        let at = SocketAddr::new(testbed.addr(0, family), 8080);
        let server = WebServer::start(testbed.receiver(0), at, file_bytes).unwrap();
        let pid = server.pid();
        let curl = server.start_fetch(testbed.sender()).unwrap();
        let fetched = server.finish_fetch(curl, 120 * SECOND).unwrap();
        assert_eq!(fetched.bytes, file_bytes);
        assert!(fetched.goodput_bit_s > 0.0, "{fetched:?}");
        drop(server);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}

#[test]
fn root_tbf_holds_and_goes() {
    if !root_or_skip("root_tbf_holds_and_goes") {
        return;
    }
    let testbed = testbed(Topology::Pair);
    // So low that every machine fills it.
    let rate = 20 * MBIT;
    let mut peer = Peer::tbf(&testbed, rate, TbfOptions::usual(rate)).unwrap();
    let options = IperfOptions::tcp(testbed.addr(0, Family::V4), 2 * SECOND);
    let report = iperf::run(testbed.sender(), testbed.receiver(0), &options).unwrap();
    assert!(report.received_bit_s > 0.0 && report.received_bit_s < rate as f64, "{report:?}");
    assert!(peer.qdisc_stats().unwrap().iter().any(|q| q.kind == "tbf" && q.overlimits > 0));
    drop(peer);
    let show = || Command::new("tc").args(["qdisc", "show", "dev", "eth0"]).output().unwrap();
    let left = String::from_utf8(testbed.sender().run(show).unwrap().stdout).unwrap();
    assert!(!left.contains("tbf"), "{left}");
}

/// Two receivers behind one device: each class gets its minimum, and lends what it does not use.
#[test]
fn root_htb_minimums_share_one_device() {
    if !root_or_skip("root_htb_minimums_share_one_device") {
        return;
    }
    let testbed = testbed(Topology::TwoReceivers);
    let mut peer = Peer::htb_minimums(&testbed, 40 * MBIT, &[30 * MBIT, 10 * MBIT]).unwrap();
    let runs = [0, 1].map(|receiver| {
        // One by IPv4, one by IPv6: both filters are in use.
        let family = if receiver == 0 { Family::V4 } else { Family::V6 };
        let mut options = IperfOptions::tcp(testbed.addr(receiver, family), 3 * SECOND);
        options.port += receiver as u16;
        options.omit = SECOND;
        options.load = Load::Tcp { cc: Some("cubic".into()) };
        IperfRun::start(testbed.sender(), testbed.receiver(receiver), &options).unwrap()
    });
    let [first, second] = runs.map(|run| run.finish().unwrap().received_bit_s);
    // Where one stalls the other may borrow; what the queue held at the begin of the count comes on top.
    assert!(first > 1.5 * second && second > 0.0 && first + second < 44e6, "{first} {second}");
    let classes = peer.class_stats().unwrap();
    let sent = |receiver| {
        classes.iter().find(|c| c.handle == receiver_class(receiver)).unwrap().sent_bytes
    };
    assert!(sent(0) > sent(1) && sent(1) > 0, "{classes:?}");

    let mut options = IperfOptions::tcp(testbed.addr(1, Family::V4), 2 * SECOND);
    options.load = Load::Tcp { cc: Some("cubic".into()) };
    let alone = iperf::run(testbed.sender(), testbed.receiver(1), &options).unwrap();
    assert!(alone.received_bit_s > 20e6, "{alone:?}");
    assert!(Peer::htb_minimums(&testbed, 100, &[1]).is_err());
}

/// SIGTERM ends a run early, and its testbed goes with it.
#[test]
fn root_a_signal_takes_the_testbed_down() {
    if !root_or_skip("root_a_signal_takes_the_testbed_down") {
        return;
    }
    let mut hold = Command::new(env!("CARGO_BIN_EXE_tidegate-lab"));
    hold.args(["tool", "hold", "--topology=two-receivers"]);
    let mut hold = Child::spawn(hold).unwrap();
    let held: Held = wait_until("a testbed", 30 * SECOND, || {
        hold.check_running()?;
        let said = hold.stdout_so_far();
        Ok(said.ends_with('\n').then(|| serde_json::from_str(&said)).transpose()?)
    })
    .unwrap();
    assert_eq!(held.receivers.len(), 2);
    let name = Path::new("/run/netns").join(&held.sender);
    assert!(name.exists());
    hold.stop().unwrap();
    let prefix = held.sender.strip_suffix("sender").unwrap().to_owned();
    let left: Vec<_> = fs::read_dir("/run/netns")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
        .filter(|name| name.starts_with(&prefix))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Processes do not outlive the thread that started them, even if nobody ends them.
#[test]
fn root_a_lost_parent_takes_its_children_along() {
    if !root_or_skip("root_a_lost_parent_takes_its_children_along") {
        return;
    }
    let testbed = testbed(Topology::Pair);
    let pid = thread::scope(|scope| {
        scope
            .spawn(|| {
                let mut sleep = command(testbed.sender(), "sleep").unwrap();
                sleep.arg("1000");
                let child = Child::spawn(sleep).unwrap();
                let pid = child.pid();
                // As after a crash: nobody kills it.
                std::mem::forget(child);
                pid
            })
            .join()
            .unwrap()
    });
    let state = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let started = Instant::now();
    while !state().is_empty() && !state().contains(") Z ") {
        assert!(started.elapsed() < 60 * SECOND, "{}", state());
        thread::sleep(Duration::from_millis(5));
    }
}

/// A testbed whose paths have a round trip of 20 ms; none, and a line that says so, where the means are
/// missing.
fn far_testbed(test: &str, topology: Topology, means: Means) -> Option<Testbed> {
    let lab_binary = Some(env!("CARGO_BIN_EXE_tidegate-lab").into());
    let link = Some(LinkSpec { means, ..LinkSpec::rtt(Duration::from_millis(20)) });
    match Testbed::new(TestbedOptions { lab_binary, link, ..TestbedOptions::new(topology) }) {
        Err(error) if error.is::<Skip>() => {
            eprintln!("SKIP {test}: {error:#}");
            None
        }
        testbed => Some(testbed.expect("a testbed comes up")),
    }
}

/// The longest of some round trips to a server of probes. A slow machine makes each of them longer; where a
/// link's thread stalls it also makes some shorter, by what the link dates the arrival back.
fn longest_rtt(testbed: &Testbed, server: SocketAddr) -> Duration {
    let trip = |number: u64| {
        // A socket of its own gets no late answer to an earlier one.
        let socket = testbed.sender().run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
        socket.connect(server).unwrap();
        socket.set_read_timeout(Some(SECOND)).unwrap();
        let started = Instant::now();
        socket.send(&number.to_ne_bytes()).unwrap();
        socket.recv(&mut [0; 64]).ok().map(|_| started.elapsed())
    };
    (0..20).filter_map(trip).max().expect("an answer")
}

/// Every receiver is 20 ms away, also with a limiter on the sender's device.
fn is_far(testbed: &Testbed) {
    let _peer = Peer::htb(testbed, 100 * MBIT).unwrap();
    for index in 0..testbed.receiver_count() {
        let at = SocketAddr::new(testbed.addr(index, Family::V4), 7001);
        let _server = probe::start_server(testbed, testbed.receiver(index), at).unwrap();
        let args = probe::ClientArgs::new(at, Duration::from_millis(500));
        let client = probe::start_client(testbed, testbed.sender(), args).unwrap();
        let report = probe::finish_client(client, args).unwrap();
        assert!(report.received > 0, "{report:?}");
        assert!(longest_rtt(testbed, at) >= Duration::from_millis(18));
        let options = IperfOptions::tcp(testbed.addr(index, Family::V6), SECOND);
        let report = iperf::run(testbed.sender(), testbed.receiver(index), &options).unwrap();
        assert!(report.received_bytes > 0, "{report:?}");
    }
    // Probes may be lost while devices come up, and where a link's thread stalls; else the link loses none.
    for counters in testbed.joints().iter().filter_map(Joint::counters) {
        for lane in [counters.rightward, counters.leftward] {
            assert_eq!((lane.drop_queue, lane.drop_lost), (0, 0), "{counters:?}");
        }
    }
}

#[test]
fn root_links_have_their_round_trip() {
    let test = "root_links_have_their_round_trip";
    if !root_or_skip(test) {
        return;
    }
    for (topology, links) in [(Topology::Pair, 1), (Topology::TwoReceivers, 2)] {
        let Some(testbed) = far_testbed(test, topology, Means::Cable) else { return };
        is_far(&testbed);
        assert_eq!(testbed.joints().len(), links);
        for joint in testbed.joints() {
            let counters = joint.counters().unwrap();
            assert!(counters.rightward.packets_out > 0 && counters.leftward.packets_out > 0);
        }
    }
}

/// A link with everything, and twice as much as it carries.
#[test]
fn root_a_link_has_a_rate_a_queue_loss_and_reordering() {
    if !root_or_skip("root_a_link_has_a_rate_a_queue_loss_and_reordering") {
        return;
    }
    let way = LinkOptions {
        delay: Nanos(5_000_000),
        rate: Rate::from_bit_s(10 * MBIT),
        queue: Some(Bytes(20_000)),
        loss: 0.1,
        reorder: 0.1,
        reorder_by: Nanos(10_000_000),
    };
    let lab_binary = Some(env!("CARGO_BIN_EXE_tidegate-lab").into());
    // What is lost on the way back is no business of this test.
    let link = Some(LinkSpec { back: LinkOptions::default(), ..LinkSpec::symmetric(way) });
    let options = TestbedOptions { lab_binary, link, ..TestbedOptions::new(Topology::Pair) };
    let testbed = Testbed::new(options).unwrap();
    let load = Load::Udp { rate_bit_s: 20 * MBIT, payload_bytes: Some(1000) };
    let server = testbed.addr(0, Family::V4);
    let options = IperfOptions { load, ..IperfOptions::tcp(server, SECOND) };
    // Where its first datagram is lost iperf3 gives up: one time in ten.
    let runs =
        std::iter::repeat_with(|| iperf::run(testbed.sender(), testbed.receiver(0), &options));
    let report = runs.take(8).find_map(Result::ok).expect("one of eight");
    assert!(report.lost.unwrap().lost > 0, "{report:?}");
    let counters = testbed.joints()[0].counters().unwrap();
    let lane = counters.rightward;
    assert!(lane.drop_queue > 0 && lane.drop_lost > 0 && lane.packets_out > 0, "{counters:?}");
    assert_eq!((lane.drop_no_room, counters.leftward.drop_lost), (0, 0), "{counters:?}");
    // Of what the queue took, a tenth is lost: within ten standard deviations.
    let carried = (lane.packets_out + lane.drop_lost) as f64;
    let most = 0.1 + 10.0 * (0.09 / carried).sqrt();
    assert!(lane.drop_lost as f64 / carried < most, "{counters:?}");
}

#[test]
fn root_netem_makes_links_where_there_is_netem() {
    let test = "root_netem_makes_links_where_there_is_netem";
    if !root_or_skip(test) {
        return;
    }
    let Some(testbed) = far_testbed(test, Topology::Pair, Means::Netem) else { return };
    is_far(&testbed);
}
