//! TCP flows of unequal round trips and congestion control through one policer, plain and `fair`, packet by
//! packet. The table of results is a snapshot: the part of the rate that each flow has, what they use
//! together, and Jain's index.

mod policed;

use std::fmt::Write as _;

use policed::{Scene, run_each};
use tidegate_core::{
    Nanos, Rate, TokenBucket,
    burst::{CongestionControl, policer_burst},
    fair_police::{FairConfig, FairPolice},
    fleet::flows::flow_hash,
    token_bucket::BucketConfig,
};

use CongestionControl::{Bbr, Cubic, Reno};

const MTU: u32 = 1_500;

#[derive(Debug, Clone, Copy)]
struct Kind {
    cc: CongestionControl,
    rtt_ms: u64,
    paced: bool,
}

fn flow(cc: CongestionControl, rtt_ms: u64) -> Kind {
    Kind { cc, rtt_ms, paced: true }
}

/// A span of a run that is judged, in seconds.
#[derive(Debug, Clone, Copy)]
struct Window {
    from: u64,
    to: u64,
    slow_start: bool,
}

const LONG_RUN: Window = Window { from: 15, to: 45, slow_start: false };
const FROM_THE_START: Window = Window { from: 1, to: 5, slow_start: true };

struct Outcome {
    shares: Vec<f64>,
    used: f64,
    jain: f64,
    /// Packets that were dropped before the window and in it.
    lost: [u32; 2],
}

fn outcome(kinds: &[Kind], rate: Rate, fair: bool, window: Window) -> Outcome {
    let bucket = policer_burst(rate);
    let scenes: Vec<Scene> = kinds
        .iter()
        .map(|kind| Scene {
            rate,
            bucket,
            rtt: Nanos(kind.rtt_ms * 1_000_000),
            flows: kinds.len(),
            cc: kind.cc,
            paced: kind.paced,
            line: Rate::from_bit_s(rate.bit_s() * 20).expect("a rate"),
            mtu: MTU,
            duration: Nanos(window.to * 1_000_000_000),
            seed: 7,
            slow_start: window.slow_start,
        })
        .collect();
    let config = BucketConfig::new(rate, bucket).expect("a bucket");
    let mut common = TokenBucket::new(config, Nanos(0));
    let mut police = FairPolice::new(FairConfig::new(&config));
    let gate = |now: Nanos, flow: usize| {
        if !fair {
            return common.on_packet(now, MTU);
        }
        let fit = police.fit(now, common.full_at(now), flow_hash(1, &[flow as u64]), MTU);
        let passes = fit.fits && common.on_part(now, MTU);
        if passes {
            police.charge(fit);
        }
        passes
    };
    let from = Nanos(window.from * 1_000_000_000);
    let (mut passed, mut lost) = (vec![0u64; kinds.len()], [0; 2]);
    run_each(&scenes, gate, |sent| {
        let counts = sent.at >= from;
        passed[sent.flow] += u64::from(sent.passed && counts);
        lost[usize::from(counts)] += u32::from(!sent.passed);
    });
    let whole = rate.bit_s() as f64 * (window.to - window.from) as f64 / 8.0 / f64::from(MTU);
    let shares: Vec<f64> = passed.iter().map(|packets| *packets as f64 / whole).collect();
    let used: f64 = shares.iter().sum();
    let jain = used * used / shares.iter().map(|x| x * x).sum::<f64>() / shares.len() as f64;
    Outcome { shares, used, jain, lost }
}

#[test]
fn unequal_flows_have_equal_parts() {
    let cases: Vec<(&str, u64, Vec<Kind>)> = vec![
        ("one CUBIC, 10 ms", 100, vec![flow(Cubic, 10)]),
        ("one Reno, 10 ms", 100, vec![flow(Reno, 10)]),
        ("CUBIC 10 and 100 ms", 50, vec![flow(Cubic, 10), flow(Cubic, 100)]),
        ("Reno 10 and 100 ms", 20, vec![flow(Reno, 10), flow(Reno, 100)]),
        ("Reno and CUBIC, 40 ms", 50, vec![flow(Reno, 40), flow(Cubic, 40)]),
        ("BBR and CUBIC, 20 ms", 50, vec![flow(Bbr, 20), flow(Cubic, 20)]),
        (
            "2 BBR, 2 CUBIC, 20 ms",
            100,
            vec![flow(Bbr, 20), flow(Bbr, 20), flow(Cubic, 20), flow(Cubic, 20)],
        ),
        ("BBR and 9 CUBIC, 20 ms", 100, [vec![flow(Bbr, 20)], vec![flow(Cubic, 20); 9]].concat()),
        ("10 CUBIC, 10 to 100 ms", 100, (1..=10).map(|i| flow(Cubic, 10 * i)).collect()),
        (
            "CUBIC unpaced, 10, 20 ms",
            50,
            vec![
                Kind { paced: false, ..flow(Cubic, 10) },
                Kind { paced: false, ..flow(Cubic, 20) },
            ],
        ),
    ];
    let mut table = String::new();
    for (what, mbit, kinds) in cases {
        let rate = Rate::from_bit_s(mbit * 1_000_000).expect("a rate");
        for fair in [false, true] {
            let got = outcome(&kinds, rate, fair, LONG_RUN);
            // What the policer is for: equal parts where the plain bucket has none, and all of the rate.
            assert!(!fair || got.jain > 0.95 && got.used > 0.94, "{what}: {:?}", got.shares);
            let shares: Vec<String> =
                got.shares.iter().map(|s| format!("{:.0}", s * 100.0)).collect();
            let name = if fair { "fair" } else { "plain" };
            writeln!(
                table,
                "{what:26} {name:5} used {:5.1} %  Jain {:.3}  {}",
                got.used * 100.0,
                got.jain,
                shares.join(" "),
            )
            .unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

/// The losses of slow start at an empty bucket do not cost the rate afterwards, over the round trip
/// that the bucket is meant for and below.
#[test]
fn one_flow_uses_the_rate_from_the_first_second_on() {
    let mut table = String::new();
    for (cc, rtt_ms, mbit) in
        [(Cubic, 10, 100), (Reno, 10, 100), (Cubic, 20, 100), (Cubic, 50, 100), (Cubic, 10, 1000)]
    {
        let rate = Rate::from_bit_s(mbit * 1_000_000).expect("a rate");
        for (paced, fair) in [(true, false), (true, true), (false, false), (false, true)] {
            let got = outcome(&[Kind { cc, rtt_ms, paced }], rate, fair, FROM_THE_START);
            assert!(
                got.used > 0.97 || rtt_ms > 20 || mbit > 100,
                "{cc:?}, {rtt_ms} ms: {}",
                got.used
            );
            writeln!(
                table,
                "{:5} {rtt_ms} ms, {mbit:4} Mbit/s, {:7} {:5} used {:5.1} %  lost {:5} before, {:3}",
                format!("{cc:?}"),
                if paced { "paced" } else { "unpaced" },
                if fair { "fair" } else { "plain" },
                got.used * 100.0,
                got.lost[0],
                got.lost[1],
            )
            .unwrap();
        }
    }
    insta::assert_snapshot!(table);
}
