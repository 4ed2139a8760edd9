//! Real traffic through the programs and a shaper.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;
use tidegate_core::{Rate, dem};

use super::{
    bed::{self, Bed, SERVER},
    *,
};

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn iperf_server(bed: &Bed) -> Running {
    let child = bed.server.run(|| {
        Command::new("iperf3").args(["-s"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    });
    let running = Running(child.unwrap().unwrap());
    let deadline = Instant::now() + Duration::from_secs(10);
    let listens = || {
        bed.guest.run(|| std::net::TcpStream::connect((SERVER, 5201)).map(drop).is_ok()).unwrap()
    };
    while !listens() {
        assert!(Instant::now() < deadline, "iperf3 does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    running
}

/// Goodput in bit/s, retransmissions, median and 99th percentile of a ping in microseconds.
fn measure(bed: &Bed, flows: u32, cc: &str, seconds: u32) -> (f64, u64, f64, f64) {
    let _server = iperf_server(bed);
    let ping = bed.guest.run(|| {
        let count = (seconds * 100).to_string();
        Command::new("ping")
            .args(["-n", "-i", "0.01", "-c", &count, SERVER])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let output = bed.guest.run(|| {
        let words = format!("-c {SERVER} -J -t {seconds} -P {flows} -C {cc} -O 0.5");
        Command::new("iperf3").args(words.split(' ')).output().unwrap()
    });
    let report: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    let ping = ping.unwrap().wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&ping.stdout);
    let mut times: Vec<f64> = text
        .lines()
        .filter_map(|line| line.split("time=").nth(1)?.split(' ').next()?.parse().ok())
        .collect();
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times.get((times.len() as f64 * part) as usize).copied().unwrap_or(0.0);
    let end = &report["end"];
    (
        end["sum_received"]["bits_per_second"].as_f64().unwrap_or(0.0),
        end["sum_sent"]["retransmits"].as_u64().unwrap_or(0),
        at(0.5) * 1000.0,
        at(0.99) * 1000.0,
    )
}

/// A table of what the laws hold, for who asks: `ACKS_TABLE=1`.
#[test]
fn root_acks_table() {
    if std::env::var_os("ACKS_TABLE").is_none() {
        eprintln!("SKIP root_acks_table: set ACKS_TABLE to measure");
        return;
    }
    for gbit in [1u64, 2] {
        let rate = Rate::from_bit_s(gbit * 1_000_000_000).unwrap();
        let Some(bed) = Bed::new(&format!("table{gbit}"), rate) else { return };
        for netns in [&bed.guest, &bed.server] {
            bed::sh(netns, "sysctl -qw net.ipv4.tcp_ecn=1");
        }
        for cc in ["cubic", "reno", "bbr"] {
            for flows in [1, 4, 16] {
                for law in [
                    None,
                    Some(Law::Dem(dem::Law::Step)),
                    Some(Law::Dem(dem::Law::Pi)),
                    Some(Law::Spring),
                ] {
                    let options = law.map(|law| AcksOptions { law, rate, mark: None });
                    let attached = options.map(|options| bed.attach(&options));
                    let (goodput, again, median, p99) = measure(&bed, flows, cc, 3);
                    println!(
                        "{gbit} {cc:5} {flows:2} {:12} {:6.1} Mbit/s {again:5} again {median:7.0} {p99:7.0} us",
                        law.map_or("htb".to_owned(), |law| format!("{law:?}")),
                        goodput / 1e6,
                    );
                    if let Some(attached) = attached {
                        let state = attached.maps.state().unwrap();
                        println!(
                            "    share {:.3} longest {} us flows {} backlog {} us, p {:.4}, {:?} {} connections",
                            state.share as f64 / f64::from(1 << 24),
                            state.longest_before_ns / 1000,
                            state.flows_before,
                            state.backlog_ns / 1000,
                            state.marker.probability as f64 / f64::from(1 << 24),
                            attached.maps.counters().unwrap().packets,
                            attached.maps.connections(),
                        );
                    }
                }
            }
        }
    }
}
