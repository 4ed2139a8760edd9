//! The laws that act on ACKs ([`tidegate_core::dem`], [`tidegate_core::spring`]) with simulated senders over
//! paths of 0.1 to 10 ms. The table of results is a snapshot.
//!
//! Columns: what acts on ACKs; the senders; the limit in Gbit/s; the round trip behind the queue in ms;
//! flows; the part of the limit that is used in the second half; mean and 99th percentile of the queue in
//! microseconds; Jain's index.
//!
//! A row of many flows on a short path has the queue of two segments each, which no law can take away.

mod ports;

use std::fmt::Write as _;

use ports::{Law, Outcome, Plan, Sender, run};
use tidegate_core::dem;

const MS: u64 = 1_000_000;
const GBIT: u64 = 125_000_000;

fn greedy(sender: Sender, rtt_us: u64, flows: u64) -> Vec<Plan> {
    // Not all at one instant.
    let plan =
        |i| Plan { sender, rtt: rtt_us * 1000, wants: None, from: rtt_us * 1000 + 1 + i * MS / 3 };
    (0..flows).map(plan).collect()
}

fn simulate(law: Law, plans: &[Plan], gbit: u64) -> Outcome {
    let end = if plans[0].rtt > MS { 1000 * MS } else { 200 * MS };
    run(gbit * GBIT, law, plans, end / 2, end)
}

#[test]
fn every_law_on_every_path() {
    const ECN: &[Sender] = &[Sender::Reno, Sender::Cubic, Sender::Dctcp];
    let laws = [
        ("dem step", Law::Dem(dem::Law::Step), ECN, &[1][..]),
        ("dem PI", Law::Dem(dem::Law::Pi), ECN, &[1]),
        ("ac/dc", Law::AcDc, &[Sender::Deaf], &[1]),
        ("spring", Law::Spring, &[Sender::Deaf, Sender::Cubic], &[1, 2]),
    ];
    let mut table = String::from("\n");
    for (name, law, senders, rates) in laws {
        for (sender, gbit) in senders.iter().flat_map(|s| rates.iter().map(move |r| (s, r))) {
            for (rtt_us, flows) in
                [100, 1000, 10_000].into_iter().flat_map(|r| [1, 4, 16].map(|f| (r, f)))
            {
                let plans = greedy(*sender, rtt_us, flows);
                let outcome = simulate(law, &plans, *gbit);
                let _ = writeln!(
                    table,
                    "{name:8} {:6} {gbit} {:4.1} {flows:2} {:5.1} % {:4.0} {:4.0}  {:.2}",
                    format!("{sender:?}"),
                    rtt_us as f64 / 1000.0,
                    outcome.used * 100.0,
                    outcome.queue_us,
                    outcome.queue_p99_us,
                    outcome.jain(&plans),
                );
                if law == Law::Spring {
                    assert!(outcome.used > 0.99 && outcome.jain(&plans) > 0.99, "{table}");
                }
            }
        }
    }
    insta::assert_snapshot!(table);
}

/// Bandwidth that one flow leaves goes to the others, and makes no queue.
#[test]
fn what_a_flow_leaves_others_take() {
    let mut plans = greedy(Sender::Deaf, 1000, 4);
    plans[0].wants = Some(GBIT / 20);
    plans[1].wants = Some(GBIT / 10);
    let outcome = simulate(Law::Spring, &plans, 1);
    assert!(outcome.used > 0.99, "{}", outcome.used);
    assert!(outcome.queue_p99_us < 300.0, "{}", outcome.queue_p99_us);
    assert!(outcome.jain(&plans) > 0.99);
    let wanted = |i: usize| plans[i].wants.unwrap_or(0) as f64 / 10.0;
    for i in 0..2 {
        let has = outcome.bytes[i] as f64;
        assert!((has / wanted(i) - 1.0).abs() < 0.05, "flow {i}: {has} of {}", wanted(i));
    }
}

/// Each its share, whatever its path; but a window of few segments is not fully used, as one waits for the
/// other half of its ACK.
#[test]
fn long_and_short_paths_share_alike() {
    let plans: Vec<_> = [100, 1000, 10_000]
        .map(|rtt_us| Plan {
            sender: Sender::Deaf,
            rtt: rtt_us * 1000,
            wants: None,
            from: 10 * MS + rtt_us,
        })
        .into();
    let outcome = run(GBIT, Law::Spring, &plans, 500 * MS, 1500 * MS);
    assert!(outcome.used > 0.99, "{}", outcome.used);
    assert!(outcome.jain(&plans) > 0.95, "{:?}", outcome.bytes);
}
