//! The goodput law: the rate that TCP reaches through a policer.

use super::{CongestionControl, Path};
use crate::units::Bytes;

/// CUBIC's factor on loss (RFC 9438).
const BETA: f64 = 0.7;
/// CUBIC's growth in packets/s^3 (RFC 9438).
const C: f64 = 0.4;
/// The increase of CUBIC each round trip where Reno would be faster: 3 (1 - beta) / (1 + beta).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);
/// Cycles to compute; the law settles in the first half.
const CYCLES: u32 = 48;
/// Steps of a cycle.
const STEPS: f64 = 512.0;
/// Longest cycle, in steps.
const STEPS_MAX: u32 = 20_000;
/// BBR probes once in so many round trips, with a quarter more.
const PROBE_EVERY: f64 = 8.0;
const PROBE: f64 = 0.25;

/// The goodput of flows, as a share of the policer's rate, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goodput {
    /// The senders spread their packets over the round trip (`fq`, BBR, `pace`).
    pub paced: f64,
    /// The window of each sender leaves in one piece at line rate: the worst case.
    pub unpaced: f64,
}

/// The share of the rate that long-lived TCP flows reach with a bucket of `burst` bytes, in the long run.
///
/// The law follows the window W through its cycle as a fluid; time is in round trips, P is the
/// bandwidth-delay product and B the bucket in packets. Nothing queues, so a window below P leaves P - W
/// tokens each round trip unused, and one above P takes W - P out of the bucket:
///
/// 1. After a loss the bucket is empty and W is beta x Wm, where Wm is the window at the reduction. It stays
///    so for the round trip in which the losses are sent again. Then it grows: Reno by 1, CUBIC by its curve.
/// 2. While W < P the bucket takes in the *deficit*, the sum of P - W. What does not fit is the *waste*.
/// 3. While W > P the bucket is drained. When the surplus, the sum of W - P, has reached its content, packets
///    are lost. The sender learns of it a round trip later: the new Wm.
///
/// All else passes, so the share is 1 - waste / (P x length of the cycle). For Reno without the round trips
/// of recovery and reaction there is a closed form: the tip is P + sqrt(2 B), the mean three quarters of it,
///
/// ```text
/// share = 3/4 (1 + sqrt(2 B) / P)   until it is 1, at B = P^2 / 18
/// ```
///
/// and for CUBIC, where the surplus up to the plateau is 3/4 (W - P)^(4/3) / (C^(1/3) RTT) packets,
///
/// ```text
/// share = 0.925 (1 + x / P),  x = (4/3 B C^(1/3) RTT)^(3/4)   until B = 0.0357 P^(4/3) / RTT
/// ```
///
/// The code follows the cycle because of short round trips, where CUBIC grows as Reno would, mixtures of the
/// two, fast convergence and the two extra round trips. N flows are assumed to lose together, the worst case:
/// each has P/N and B/N. BBR ignores losses. Each eighth round trip it wastes what of its quarter-BDP drain
/// the bucket cannot hold, and a little in PROBE_RTT.
///
/// A sender that does not pace keeps its window in one clump for ever, because without a queue nothing
/// spreads it. Clumps come at line rate, so a window of P alone takes P (1 - rate / line rate) out of the
/// bucket, and only the rest is left for the law above. With a shallower bucket the clump is cut at W = B /
/// (1 - rate / line rate) < P, and the window swings below that.
///
/// A deeper bucket can get less of CUBIC, by up to 6 % of the rate. The window grows further beyond its
/// plateau before a loss, so the next loss comes below the last one, and fast convergence keeps the window
/// below P for longer than the bucket takes tokens in.
///
/// Time-outs and slow start are not modelled. The law does not apply to a bucket of less than ten packets:
/// there chance decides which packets meet. It was compared with flows simulated packet by packet
/// (`tests/policed_law.rs`), with BDPs of 10, 40 and 150 packets and buckets of ten packets and more. For
/// paced flows it is at most 0.08 too high (0.04 with fifteen packets of bucket) and 0.01 too low; for clumps
/// at most 0.12 too low, where they are cut; for five flows within 0.03; for BBR within 0.01.
#[must_use]
pub fn goodput(path: &Path, burst: Bytes) -> Goodput {
    // A packet passes only if there are tokens for all of it, so on average half a packet is never used.
    let bucket = (burst.0 as f64 / path.packet() - 0.5).max(0.0);
    let flow = Flow::of(path);
    let paced = flow.share(bucket / path.flows());
    let clump = clump(path);
    let unpaced = if bucket >= clump {
        flow.share((bucket - clump) / path.flows())
    } else {
        let cut = bucket / clump;
        cut * Flow { bdp: flow.bdp * cut, ..flow }.share(0.0)
    };
    Goodput { paced, unpaced: unpaced.min(paced) }
}

/// The part of the bucket that unpaced windows take at once, in packets.
pub(super) fn clump(path: &Path) -> f64 {
    path.bdp() * (1.0 - path.line_share())
}

/// The bucket with which paced flows just fill the rate, in packets.
pub(super) fn full(path: &Path) -> f64 {
    let bdp = path.bdp() / path.flows();
    let reno = |beta: f64, alpha: f64| {
        // The mean of beta x Wm to Wm is P, and the tip above P a triangle.
        let tip = bdp * (2.0 / (1.0 + beta) - 1.0);
        tip * tip / (2.0 * alpha)
    };
    let each = match path.cc {
        CongestionControl::Reno => reno(0.5, 1.0),
        CongestionControl::Cubic => {
            let rtt_s = (path.rtt.0 as f64 / 1e9).max(1e-9);
            (0.0357 * bdp * root3(bdp) / rtt_s).min(reno(BETA, ALPHA))
        }
        CongestionControl::Bbr => PROBE * bdp,
    };
    each * path.flows()
}

/// One flow of several.
#[derive(Clone, Copy)]
struct Flow {
    cc: CongestionControl,
    /// Its part of the bandwidth-delay product, packets.
    bdp: f64,
    rtt_s: f64,
}

/// The window of a flow after it was reduced.
#[derive(Clone, Copy)]
struct Growth {
    cc: CongestionControl,
    rtt_s: f64,
    /// Right after the reduction.
    start: f64,
    /// Where CUBIC's curve is flat, and when, in s.
    plateau: f64,
    flat_at_s: f64,
    /// Where Reno's way speeds up.
    before: f64,
}

impl Growth {
    fn after_loss(flow: &Flow, peak: f64, last_plateau: f64) -> Growth {
        let Flow { cc, rtt_s, .. } = *flow;
        let beta = if cc == CongestionControl::Reno { 0.5 } else { BETA };
        let start = (peak * beta).max(1.0);
        // Fast convergence: a flow that loses below its last loss gives way.
        let plateau = if peak < last_plateau { peak * (1.0 + BETA) / 2.0 } else { peak };
        let flat_at_s = root3((plateau - start).max(0.0) / C);
        Growth { cc, rtt_s, start, plateau, flat_at_s, before: peak }
    }

    /// The window after this many round trips.
    fn window(&self, round_trips: f64) -> f64 {
        if self.cc == CongestionControl::Reno {
            return self.start + round_trips;
        }
        let away_s = round_trips * self.rtt_s - self.flat_at_s;
        let cubic = self.plateau + C * away_s * away_s * away_s;
        let slow = ALPHA * round_trips;
        let friendly = if self.start + slow <= self.before {
            self.start + slow
        } else {
            self.before + (round_trips - (self.before - self.start) / ALPHA)
        };
        cubic.max(friendly)
    }

    /// About how many round trips until the window is `target`.
    fn time_to(&self, target: f64) -> f64 {
        let mut high = 1.0;
        while self.window(high) < target && high < 1e12 {
            high *= 2.0;
        }
        let mut low = 0.0;
        for _ in 0..40 {
            let middle = (low + high) / 2.0;
            if self.window(middle) < target { low = middle } else { high = middle }
        }
        high
    }
}

impl Flow {
    fn of(path: &Path) -> Flow {
        let bdp = (path.bdp() / path.flows()).max(1e-6);
        Flow { cc: path.cc, bdp, rtt_s: (path.rtt.0 as f64 / 1e9).max(1e-9) }
    }

    /// The share of its rate that the flow reaches with a bucket of this many packets.
    fn share(&self, bucket: f64) -> f64 {
        if self.cc == CongestionControl::Bbr {
            let spilt = (PROBE - bucket / self.bdp).max(0.0);
            return 1.0 - spilt / PROBE_EVERY;
        }
        let (mut peak, mut plateau) = (self.bdp, 0.0);
        let (mut wasted, mut time) = (0.0, 0.0);
        for cycle in 0..CYCLES {
            let growth = Growth::after_loss(self, peak, plateau);
            plateau = growth.plateau;
            let done = self.cycle(&growth, bucket);
            peak = done.peak;
            if cycle >= CYCLES / 2 {
                wasted += done.wasted;
                time += done.round_trips;
            }
        }
        (1.0 - wasted / (self.bdp * time)).clamp(0.0, 1.0)
    }

    fn cycle(&self, growth: &Growth, bucket: f64) -> Cycle {
        let step = (growth.time_to(self.bdp) / STEPS).max(1.0 / 64.0);
        let (mut tokens, mut wasted) = (0.0_f64, 0.0);
        let mut fill = |window: f64, time: f64| {
            let after = tokens + (self.bdp - window) * time;
            tokens = after.min(bucket);
            wasted += (after - bucket).max(0.0);
            after
        };
        // The lost packets are sent again.
        fill(growth.start, 1.0);
        let mut grown = 0.0;
        for _ in 0..STEPS_MAX {
            let window = growth.window(grown + step / 2.0);
            grown += step;
            if fill(window, step) <= 0.0 && window > self.bdp {
                break;
            }
        }
        Cycle { peak: growth.window(grown + 1.0), wasted, round_trips: grown + 2.0 }
    }
}

/// The result of a cycle.
struct Cycle {
    /// The window when the sender learns of the loss.
    peak: f64,
    /// Packets of tokens that found the bucket full.
    wasted: f64,
    round_trips: f64,
}

/// The cube root: `core` has none. Newton's method, from a power of two nearby.
fn root3(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return 0.0;
    }
    let exponent = ((value.to_bits() >> 52) as i64 - 1023).div_euclid(3);
    let mut root = f64::from_bits(((exponent + 1023).clamp(1, 2046) as u64) << 52);
    for _ in 0..8 {
        root = (2.0 * root + value / (root * root)) / 3.0;
    }
    root
}
