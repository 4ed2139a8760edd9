//! Backpressure from a shaper to a TCP stack in user space: smoltcp connections, each paced at its own
//! rate, with completions that come when a packet leaves, and with completions that come at once.
//!
//!     cargo run --release -p tidegate-nic --example backpressure [FLOWS]

mod stacks;

use std::{env, process::ExitCode, time::Duration};

use stacks::{Load, run};
use tidegate_core::{Nanos, Rate};
use tidegate_nic::nic::Completions;

const FLOWS_MAX: usize = 4_000;
/// What all flows send together, in bit/s.
const TOTAL_BIT_S: u64 = 400_000_000;

fn main() -> ExitCode {
    let flows = env::args().nth(1).map_or(Ok(500), |text| text.parse::<usize>());
    let Some(flows) = flows.ok().filter(|flows| (1..=FLOWS_MAX).contains(flows)) else {
        eprintln!("usage: backpressure [FLOWS], 1 to {FLOWS_MAX}");
        return ExitCode::from(1);
    };
    // From half to one and a half of the average, so that no two are alike.
    let average = TOTAL_BIT_S / flows as u64;
    let rate = |flow: usize| average / 2 + average * flow as u64 / flows as u64;
    let rates: Vec<_> = (0..flows).filter_map(|flow| Rate::from_bit_s(rate(flow))).collect();
    println!("{flows} connections, {} Mbit/s together, for two seconds\n", TOTAL_BIT_S / 1_000_000);
    println!("completions   in shaper: of a flow   median   most   dropped   goodput   sent twice");
    for completions in [Completions::Deferred, Completions::Immediate] {
        let load = Load {
            rates: rates.clone(),
            time: Nanos(2_000_000_000),
            completions,
            capacity: 4_096,
            patience: Duration::from_secs(60),
        };
        let Some(outcome) = run(&load) else {
            eprintln!("a connection did not get through in a minute");
            return ExitCode::FAILURE;
        };
        let counters = &outcome.counters;
        let (mut goodput, mut bytes, mut wire) = (0.0, 0, 0);
        for transfer in &outcome.transfers {
            let seconds = transfer.time.0 as f64 / 1e9;
            goodput += transfer.bytes as f64 * 8.0 / seconds / transfer.rate.bit_s() as f64;
            bytes += transfer.bytes;
            wire += transfer.wire_bytes;
        }
        let most = outcome.transfers.iter().map(|t| t.in_shaper_max).max().unwrap_or(0);
        // With immediate completion nobody knows what a flow has there.
        let most = match completions {
            Completions::Deferred => most.to_string(),
            Completions::Immediate => "-".into(),
        };
        // 54 bytes of headers in a frame of 1514.
        let once = bytes as f64 * 1_514.0 / 1_460.0;
        println!(
            "{:<24} {most:>11} {:>8} {:>6} {:>9} {:>8.1}% {:>11.1}%",
            format!("{completions:?}"),
            outcome.held_median,
            counters.held_packets_max,
            counters.drop_full,
            goodput / flows as f64 * 100.0,
            (wire as f64 / once - 1.0).max(0.0) * 100.0,
        );
    }
    println!("\ngoodput: of the flow's rate, headers and the start of the connection included");
    ExitCode::SUCCESS
}
