//! The goodput law of `burst` against TCP flows through a token bucket, packet by packet.
//!
//! The results are printed as a table (`--nocapture`), and the bounds of the error are asserted.

mod policed;

use policed::{Scene, run};
use tidegate_core::{
    Bytes, Nanos, Rate,
    burst::{CongestionControl, Path, goodput},
};

const MTU: u32 = 1_500;

fn scene(
    bdp: u64,
    rtt_ms: u64,
    flows: usize,
    cc: CongestionControl,
    paced: bool,
    bucket: f64,
) -> Scene {
    // A rate whose BDP is so many packets.
    let rate = bdp * u64::from(MTU) * 8_000 / rtt_ms;
    Scene {
        rate: Rate::from_bit_s(rate).expect("a rate"),
        bucket: Bytes((bucket * f64::from(MTU)) as u64),
        rtt: Nanos(rtt_ms * 1_000_000),
        flows,
        cc,
        paced,
        line: Rate::from_bit_s(rate * 20).expect("a rate"),
        mtu: MTU,
        // Fifteen of the longest cycles, and more.
        duration: Nanos((bdp * rtt_ms * 15).max(8_000) * 1_000_000).min(Nanos(40_000_000_000)),
        seed: 7,
        slow_start: false,
    }
}

/// The share of the rate that arrived, each packet once, in the last two thirds.
fn simulated(scene: &Scene) -> f64 {
    let from = scene.duration.0 / 3;
    let mut passed = 0_u64;
    run(scene, |sent| passed += u64::from(sent.passed && sent.at.0 >= from));
    let rate = passed as f64 * f64::from(MTU) * 8e9 / (scene.duration.0 - from) as f64;
    rate / scene.rate.bit_s() as f64
}

fn law(scene: &Scene) -> f64 {
    let path = Path {
        rate: scene.rate,
        rtt: scene.rtt,
        flows: scene.flows as u32,
        cc: scene.cc,
        interface: scene.line,
        mtu: MTU,
    };
    let share = goodput(&path, scene.bucket);
    if scene.paced { share.paced } else { share.unpaced }
}

/// The largest errors of the law, above and below what was simulated.
fn errors(scenes: impl IntoIterator<Item = Scene>) -> (f64, f64) {
    let (mut above, mut below) = (0.0_f64, 0.0_f64);
    for scene in scenes {
        let (law, found) = (law(&scene), simulated(&scene));
        let packets = scene.bucket.0 as f64 / f64::from(MTU);
        println!(
            "{:?} {} flows, paced {}, {} over {} ms, bucket {packets:.0} packets: law {law:.3}, \
             simulated {found:.3}",
            scene.cc,
            scene.flows,
            scene.paced,
            scene.rate,
            scene.rtt.0 / 1_000_000,
        );
        above = above.max(law - found);
        below = below.max(found - law);
    }
    println!("law above by {above:.3}, below by {below:.3} at most");
    (above, below)
}

fn grid(
    cc: CongestionControl,
    flows: usize,
    paced: bool,
    bdps: &[u64],
    rtts: &[u64],
) -> Vec<Scene> {
    let mut scenes = Vec::new();
    for &bdp in bdps {
        for &rtt in rtts {
            let p = bdp as f64;
            for bucket in [
                2.0,
                p / 10.0,
                p * p / 18.0 / 4.0,
                p / 2.0,
                p,
                p * p / 18.0,
                1.3 * p * p / 18.0 + 1.2 * p,
            ] {
                scenes.push(scene(bdp, rtt, flows, cc, paced, bucket.max(10.0)));
            }
            scenes.dedup_by_key(|scene| scene.bucket);
        }
    }
    scenes
}

#[test]
fn reno_paced() {
    let (above, below) = errors(grid(CongestionControl::Reno, 1, true, &[10, 40, 150], &[20]));
    assert!(above < 0.08 && below < 0.01, "{above} {below}");
}

#[test]
fn cubic_paced() {
    let (above, below) = errors(grid(CongestionControl::Cubic, 1, true, &[10, 40, 150], &[10, 60]));
    assert!(above < 0.08 && below < 0.01, "{above} {below}");
}

#[test]
fn bbr_paced() {
    let (above, below) = errors(grid(CongestionControl::Bbr, 1, true, &[10, 40, 150], &[20]));
    assert!(above < 0.01 && below < 0.01, "{above} {below}");
}

#[test]
fn in_clumps() {
    let reno = grid(CongestionControl::Reno, 1, false, &[40, 150], &[20]);
    let (above, below) =
        errors(reno.into_iter().chain(grid(CongestionControl::Cubic, 1, false, &[40, 150], &[20])));
    assert!(above < 0.01 && below < 0.12, "{above} {below}");
}

#[test]
fn several_flows() {
    let reno = grid(CongestionControl::Reno, 5, true, &[150], &[20]);
    let (above, below) =
        errors(reno.into_iter().chain(grid(CongestionControl::Cubic, 5, true, &[150], &[20])));
    assert!(above < 0.03 && below < 0.01, "{above} {below}");
}
