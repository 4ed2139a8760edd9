//! Storms over whole nodes: sessions, membership, groups, gates and storage of many hosts, in seeded virtual
//! time, while everything goes wrong.
//!
//! Two kinds of rules. **Safety**, after every event, with `share`: what all gates may pass is never above
//! the limit, those of dead, paused and cut off hosts included; no host has less than its own part; no rate
//! is asked for that a scheme refuses. **Liveness**: some leases after the last fault limits that want all
//! there is have it.
//!
//! A run is a function of its seed. A failure prints the seed, and
//! `TIDEGATE_STORM_SEED=SEED cargo test -p tidegate-node --test storm` replays it with all that went wrong.
//! `TIDEGATE_STORMS=1000` runs so many of each; best with `--release`.

mod faults;
mod host;
mod world;

use std::env;

use faults::Storm;
use tidegate_core::Nanos;
use tidegate_node::fleet::config::Algorithm;
use world::MS;

/// The part of the limit that greedy limits must have in the calm: the rest is the reserve of hosts that
/// want nothing, and differences that are not worth a message.
const USED_LEAST: f64 = 0.97;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// Storms of all these seeds; tells of each that broke a rule.
fn storms(algorithm: Algorithm, seeds: std::ops::Range<u64>, lasts: Nanos) {
    let (seeds, replays) = match number("TIDEGATE_STORM_SEED") {
        Some(seed) => (seed..seed + 1, true),
        None => (seeds, false),
    };
    let (mut failures, mut least) = (Vec::new(), f64::MAX);
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let storm = Storm { seed, algorithm, lasts };
        let after = storm.run();
        least = after.used.iter().copied().fold(least, f64::min);
        if replays {
            for (at, what) in &after.log {
                println!("{:9.3} s  {what}", at.0 as f64 / 1e9);
            }
            println!("{:?} {:.3?}", after.breach, after.used);
        }
        if let Some((at, breach)) = after.breach {
            failures.push(format!("{breach:?} after {:.3} s of {storm:?}", at.0 as f64 / 1e9));
        }
        // What the published algorithms need to follow loads that change is measured elsewhere.
        let looks = if algorithm == Algorithm::Share { after.used.len() } else { 1 };
        if after.used[..looks].iter().any(|used| *used < USED_LEAST) {
            let used = &after.used;
            failures.push(format!("{used:.3?} of the limit in use after {storm:?}"));
        }
    }
    println!("{count} storms of {algorithm}: {least:.3} of the limit in use at least, in the calm");
    let shown = &failures[..failures.len().min(20)];
    assert!(failures.is_empty(), "{} of {count} storms failed: {shown:#?}", failures.len());
}

/// How many storms: few in `make test`.
fn count(few: u64) -> u64 {
    number("TIDEGATE_STORMS").unwrap_or(few)
}

#[test]
fn share_keeps_its_rules_in_every_storm() {
    storms(Algorithm::Share, 0..count(24), Nanos(10_000 * MS));
}

#[test]
fn the_other_algorithms_ask_for_legal_rates_and_come_back() {
    for algorithm in [Algorithm::Ctb, Algorithm::Fps, Algorithm::Gtb, Algorithm::Grd] {
        storms(algorithm, 0..count(1), Nanos(6_000 * MS));
    }
}
