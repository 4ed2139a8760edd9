//! `tidegate burst`: tables, captures, and files that are none. Needs no privileges.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use tidegate_core::Nanos;

use crate::captures::{Body, Capture, Packet, Udp, bucket};

fn tidegate(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(args).stdin(Stdio::null()).output().unwrap()
}

fn text(args: &[&str]) -> String {
    let done = tidegate(args);
    assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&text(args)).unwrap()
}

fn refusal(args: &[&str]) -> String {
    let done = tidegate(args);
    let message = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{args:?}: {message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with("tidegate: error: "), "{message}");
    message
}

fn article(dir: &Path) -> String {
    let mut capture = Capture::plain().snaplen(42);
    Udp::iperf3(150_000).write(&mut capture, 1);
    let path = dir.join("slow.pcap");
    fs::write(&path, capture.bytes).unwrap();
    path.display().to_string()
}

#[test]
fn size_says_what_a_burst_does() {
    let table = text(&["burst", "size", "--rate", "50mbit", "--burst", "15kb"]);
    for words in ["10 MTU", "CIR / 32", "--burst", "UNPACED", "Recommended: "] {
        assert!(table.contains(words), "{words}: {table}");
    }
    assert!(!table.contains("UDP"));
    let args = [
        "burst",
        "size",
        "--rate",
        "50mbit",
        "--udp",
        "1270000b/100ms",
        "--burst",
        "15000b",
        "--json",
    ];
    let size = json(&args);
    assert_eq!(size["rate_bit_s"], 50_000_000);
    let given = size["bursts"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&given["rule"], &given["burst_bytes"]), (&"--burst".into(), &15_000.into()));
    let passed = given["udp_passed_bit_s"].as_u64().unwrap();
    assert!((6_200_000..6_300_000).contains(&passed), "{passed}");
    assert!(size["recommended"]["goodput_unpaced_bit_s"].as_f64().unwrap() >= 0.95 * 50e6);
}

#[test]
fn size_refuses_what_cannot_be() {
    for (args, says) in [
        (&["--rate", "50"][..], "has no unit"),
        (&["--rate", "1gbit", "--interface", "100mbit"], "--interface: 100mbit is slower"),
        (&["--rate", "1gbit", "--rtt", "0ms"], "write 1us to 100s"),
        (&["--rate", "1gbit", "--burst", "1499b"], "a bucket of 1499b; write 1500b or more"),
        (&["--rate", "1gbit", "--mtu", "9000", "--burst", "8kb"], "write 9000b or more"),
        (&["--rate", "1gbit", "--udp", "1mb"], "has no `/`"),
        (&["--rate", "1gbit", "--udp", "0b/1ms"], "sends nothing"),
        (
            &["--rate", "1gbit", "--udp", "1mb/1ms", "--burst", "3gb"],
            "--burst: burst 3gb is out of range",
        ),
    ] {
        let args: Vec<&str> = ["burst", "size"].iter().chain(args).copied().collect();
        let done = tidegate(&args);
        let message = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{message}");
        assert!(message.contains(says), "{args:?}: {message}");
    }
}

#[test]
fn analyze_finds_the_policer() {
    let dir = tempfile::tempdir().unwrap();
    let file = article(dir.path());
    let svg = dir.path().join("tokens.svg").display().to_string();
    let report = text(&["burst", "analyze", &file, "--svg", &svg]);
    for words in
        ["udp 10.0.1.100:40001 > 10.0.2.100:5201", "policed", "captured at the receiver's side"]
    {
        assert!(report.contains(words), "{words}: {report}");
    }
    assert!(fs::read_to_string(&svg).unwrap().contains("packets lost"));
    let report = json(&["burst", "analyze", &file, "--json", "--flow", ":5201", "--top", "1"]);
    let flow = &report["flows"][0];
    assert_eq!(flow["verdict"], "policed");
    let rate = flow["estimate"]["rate_bit_s"].as_f64().unwrap();
    assert!((rate / 50e6 - 1.0).abs() < 0.02, "{rate}");
    // From a pipe it is the same.
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let piped =
        command.args(["burst", "analyze", "-", "--json"]).stdin(fs::File::open(&file).unwrap());
    let piped: serde_json::Value = serde_json::from_slice(&piped.output().unwrap().stdout).unwrap();
    assert_eq!(piped["flows"][0]["estimate"], flow["estimate"]);
}

/// One flow through a queue of 60 kB at 20 Mbit/s, captured before it: bursts, each packet acknowledged when
/// it has left the queue.
fn queued(dir: &Path) -> String {
    let mut packets = vec![Packet {
        time_ns: 0,
        flow: 1,
        ip_bytes: 60,
        id: 0,
        body: Body::Tcp { seq: 0, syn: true },
    }];
    let seq = |number: u32| 21 + number * 1_460;
    let (mut bucket, mut next) = (bucket(20_000_000, 60_000), 0_u32);
    for burst in 0..60_u64 {
        let begin = 20_000_000 + burst * 100_000_000;
        let mut lost = Vec::new();
        for at in 0..100_u64 {
            let time_ns = begin + at * 120_000;
            let body = Body::Tcp { seq: seq(next), syn: false };
            packets.push(Packet { time_ns, flow: 1, ip_bytes: 1_500, id: 0, body });
            let backlog = 60_000 - bucket.tokens(Nanos(time_ns)).0;
            if !bucket.on_packet(Nanos(time_ns), 1_500) {
                lost.push(next);
            } else if lost.is_empty() {
                let time_ns = time_ns + 5_000_000 + backlog * 400;
                let body = Body::Ack(seq(next + 1));
                packets.push(Packet { time_ns, flow: 1, ip_bytes: 40, id: 0, body });
            }
            next += 1;
        }
        for (at, number) in (0_u64..).zip(lost) {
            let time_ns = begin + 60_000_000 + at * 900_000;
            let body = Body::Tcp { seq: seq(number), syn: false };
            packets.push(Packet { time_ns, flow: 1, ip_bytes: 1_500, id: 0, body });
            bucket.on_packet(Nanos(time_ns), 1_500);
        }
        let (time_ns, body) = (begin + 99_500_000, Body::Ack(seq(next)));
        packets.push(Packet { time_ns, flow: 1, ip_bytes: 40, id: 0, body });
    }
    packets.sort_by_key(|packet| packet.time_ns);
    let mut capture = Capture::plain();
    packets.iter().for_each(|packet| capture.packet(packet));
    let path = dir.join("queued.pcap");
    fs::write(&path, capture.bytes).unwrap();
    path.display().to_string()
}

#[test]
fn analyze_tells_a_full_queue_by_its_delay() {
    let dir = tempfile::tempdir().unwrap();
    let file = queued(dir.path());
    let svg = dir.path().join("tokens.svg").display().to_string();
    let report = text(&["burst", "analyze", &file, "--svg", &svg]);
    for words in ["full queue", "DELAY", "delay before loss: median 2", "a policer does not delay"]
    {
        assert!(report.contains(words), "{words}: {report}");
    }
    assert!(fs::read_to_string(&svg).unwrap().contains("delay before loss 2"));
    let report = json(&["burst", "analyze", &file, "--json"]);
    let flow = &report["flows"][0];
    assert_eq!(flow["verdict"], "tail_drop");
    let delay = &flow["delay_before_loss"];
    assert_eq!(delay["measured_by"], "round_trips");
    let share = delay["share_of_bucket"].as_f64().unwrap();
    assert!((0.8..1.1).contains(&share), "{delay}");
}

#[test]
fn analyze_says_what_is_wrong_with_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let good = article(dir.path());
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let analyze = |file: &str| refusal(&["burst", "analyze", file]);
    assert!(analyze(&write("empty", b"")).contains("is empty; capture with: tcpdump"));
    assert!(analyze(&write("text", b"Not a capture, but a text")).contains("is not a capture"));
    assert!(analyze(&write("gz", &[0x1f, 0x8b, 8, 0])).contains("zcat FILE"));
    assert!(analyze(&dir.path().display().to_string()).contains("is a directory"));
    assert!(analyze("/nonexistent/x.pcap").contains("cannot be read: No such file"));
    assert!(
        refusal(&["burst", "analyze", &good, "--flow", "10.9.9.9"])
            .contains("there are `udp 10.0.1.100")
    );
    let svg = dir.path().join("no/such/x.svg").display().to_string();
    assert!(refusal(&["burst", "analyze", &good, "--svg", &svg]).contains("--svg: "));
    // What was cut off is analyzed as far as it goes, with a warning.
    let bytes = fs::read(&good).unwrap();
    let done = tidegate(&["burst", "analyze", &write("cut", &bytes[..bytes.len() - 7])]);
    assert!(done.status.success());
    let warning = String::from_utf8(done.stderr).unwrap();
    assert!(
        warning.starts_with("tidegate: warning: ") && warning.contains("in the middle of packet"),
        "{warning}"
    );
    let damaged = [&bytes[..1_000], &[0xff; 200], &bytes[1_000..]].concat();
    let done = tidegate(&["burst", "analyze", &write("damaged", &damaged)]);
    assert!(String::from_utf8(done.stderr).unwrap().contains("is damaged after packet"));
}

#[test]
fn size_names_the_bound_and_what_is_too_deep() {
    let why = |size: &serde_json::Value| size["recommended"]["why"].as_str().unwrap().to_owned();
    let fast = json(&["burst", "size", "--rate", "100gbit", "--json"]);
    assert_eq!(fast["recommended"]["burst_bytes"], 1_u64 << 31);
    assert!(why(&fast).starts_with("the deepest bucket that there is"), "{fast}");
    let args =
        ["burst", "size", "--rate", "1gbit", "--rtt", "50ms", "--interface", "10gbit", "--json"];
    let long = json(&args);
    assert!(why(&long).starts_with("a quarter of a second"), "{long}");
    let rows = long["bursts"].as_array().unwrap();
    let of = |rule: &str| rows.iter().find(|row| row["rule"] == rule).unwrap();
    let [paced, car] = ["TCP, paced", "CIR x 1.5 s"].map(of);
    let gets = |row: &serde_json::Value| row["goodput_paced_bit_s"].as_f64().unwrap();
    assert!(gets(car) < gets(paced), "{long}");
    assert!(car["why"].as_str().unwrap().ends_with("; a shallower one gets more"), "{long}");
    assert!(!paced["why"].as_str().unwrap().contains("shallower"), "{long}");
}
