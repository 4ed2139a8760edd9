//! The local limits never add up to more than the limit. A failure prints the seed that replays it.

use tidegate_core::Nanos;
use tidegate_sim::faults::Storm;

/// Runs storms of all seeds in `seeds`; tells of each that broke the limit or did not mend.
fn storms(seeds: std::ops::Range<u64>, lasts: Nanos) {
    let mut failures = Vec::new();
    let (mut used, mut least) = (0.0, 1.0f64);
    let count = seeds.end - seeds.start;
    for seed in seeds {
        // 0 to 50 %.
        let storm =
            Storm { seed, loss: (seed % 11) as f64 * 0.05, lasts, mends: Nanos(12_000_000_000) };
        let after = storm.run();
        used += after.mean_in_use / count as f64;
        least = least.min(after.in_use);
        if let Some(breach) = after.breach {
            failures.push(format!("the limit is broken: {breach:?} in {storm:?}"));
        }
        if after.in_use < 0.97 {
            failures.push(format!("{:.3} of the limit is in use after {storm:?}", after.in_use));
        }
    }
    println!(
        "{count} storms: {used:.3} of the limit in use meanwhile, {least:.3} at least in the end"
    );
    assert!(failures.is_empty(), "{} failures, of them: {:#?}", failures.len(), failures);
}

#[test]
fn the_limit_holds_in_every_storm() {
    storms(0..60, Nanos(12_000_000_000));
}

#[test]
#[ignore = "1000 seeds: `cargo test --release -p tidegate-sim -- --ignored`"]
fn the_limit_holds_in_a_thousand_storms() {
    storms(0..1_000, Nanos(30_000_000_000));
}
