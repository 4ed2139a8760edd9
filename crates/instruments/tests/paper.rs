//! The published NRM on the wire, for senders without ECN. With DCTCP the lab has it: over a path with a
//! round trip.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../../sys/tests/bed/mod.rs"]
mod bed;

use std::os::fd::AsFd;

use bed::{Cgroup, Net, SERVER, iperf3_server, root};
use tidegate_core::{Direction, Rate};
use tidegate_instruments::paper::{NrmPaper, PaperCounters, PaperOptions};
use tidegate_sys::congestion::attach_to_cgroup;

/// What an iperf3 of a few seconds and the limit's counters say.
#[derive(Debug)]
struct Outcome {
    goodput_mbit_s: f64,
    counters: PaperCounters,
}

/// One flow against the limit on the client's side; `None` leaves the namespace's congestion control.
fn measure(direction: Direction, rate: Rate, control: Option<&str>, flows: u32) -> Outcome {
    let net = Net::new();
    let (limited, peer) = (Cgroup::new(), Cgroup::new());
    let _attached = control.map(|name| {
        [&limited, &peer].map(|cgroup| attach_to_cgroup(cgroup.open().as_fd(), name).unwrap())
    });
    let options = match direction {
        Direction::Egress => PaperOptions { egress: Some(rate), ingress: None },
        Direction::Ingress => PaperOptions { egress: None, ingress: Some(rate) },
    };
    let paper = NrmPaper::attach(limited.open().as_fd(), options).unwrap();
    let _server = iperf3_server(&net, &peer);
    let reverse = if direction == Direction::Ingress { " -R" } else { "" };
    let command = format!("iperf3 -c {SERVER} -t 3 -O 1 -f k -P {flows}{reverse}");
    let report = limited.spawn(&net.client, &command).output();
    let total = report.lines().rfind(|l| l.contains("receiver")).expect("a summary");
    let words: Vec<_> = total.split_whitespace().collect();
    let at = words.iter().position(|w| *w == "Kbits/sec").expect("a rate");
    let goodput_mbit_s = words[at - 1].parse::<f64>().unwrap() / 1e3;
    let outcome = Outcome { goodput_mbit_s, counters: paper.counters(direction).unwrap() };
    eprintln!("{direction:?} {rate} {} x{flows}: {outcome:?}", control.unwrap_or("default"));
    outcome
}

#[test]
fn root_egress_without_ecn_is_recognised_by_cn() {
    if !root("root_egress_without_ecn_is_recognised_by_cn") {
        return;
    }
    let rate: Rate = "200mbit".parse().unwrap();
    let outcome = measure(Direction::Egress, rate, Some("reno"), 1);
    assert!(outcome.goodput_mbit_s < 210.0, "{outcome:?}");
    assert!(outcome.counters.slowed.packets > 0, "{outcome:?}");
    assert_eq!(outcome.counters.marked.packets, 0);
}
