//! What losses look like: a policer's, a shaper's, a congested queue's, or chance.
//!
//! The thresholds are those of Flach et al., "An Internet-Wide Analysis of Traffic Policing" (SIGCOMM
//! 2016), as far as they apply: at least 15 losses and 15 passes, losses in at least three slices of time,
//! fewer tokens at losses than at passes, at least 90 % of the losses at the same level, at least 97 % of
//! the passes above it, at most 20 % of the losses after a round trip that had grown. Their tokens come
//! from one rate over all losses and have no bucket that can be full; here they are those of the bucket
//! that [`fit`](crate::fit) found, and the level is kept more narrowly: within one and a half packets, or 3
//! % of the depth.

use serde::Serialize;

use crate::{
    fit::{Fit, Series},
    flow::{Flow, LossSource, Vantage},
};

/// Losses and passes without which nothing is said.
pub const LOSSES_MIN: usize = 15;
/// Slices of time in which there are losses.
const SLICES_MIN: usize = 3;
/// The share of losses at an empty bucket.
pub const EXPLAINED_MIN: f64 = 0.9;
/// The share of passes that the bucket has no room for.
pub const VIOLATED_MAX: f64 = 0.03;
/// The share of losses after a grown round trip, and by how much it had grown.
const LATE_MAX: f64 = 0.2;
const LATE_FACTOR: f64 = 1.3;
/// And by at least so many packets at the rate, or half of the depth: less is not the queue that would lose
/// these.
const LATE_PACKETS: f64 = 4.0;
/// A bucket of so many packets is a shaper's, if packets also leave evenly.
const SHAPER_PACKETS: f64 = 3.0;
/// The share of packets that come faster than the rate, below which they leave evenly.
const FAST_MIN: f64 = 0.05;

/// What the losses of a flow look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Dropped by a token bucket.
    Policed,
    /// Dropped before a queue that is drained evenly at a rate.
    Shaped,
    /// Dropped by a queue that had grown.
    Congested,
    /// None of these.
    Random,
    /// Nothing was lost.
    NoLoss,
    /// Too little was lost to tell.
    TooFew,
    /// Nothing counts the packets.
    Unseen,
}

impl Verdict {
    /// In a word or two.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Policed => "policed",
            Verdict::Shaped => "shaped",
            Verdict::Congested => "congested",
            Verdict::Random => "random",
            Verdict::NoLoss => "no loss",
            Verdict::TooFew => "too few losses",
            Verdict::Unseen => "losses unseen",
        }
    }
}

/// Judges what a series shows; the evidence in words.
#[must_use]
pub fn judge(flows: &[&Flow], series: &Series, fit: Option<&Fit>) -> (Verdict, Vec<String>) {
    let sources: Vec<_> = flows.iter().map(|flow| flow.source()).collect();
    if sources.iter().all(|(source, _)| *source == LossSource::None) {
        let why = flows.first().map(|flow| flow.vantage_why()).unwrap_or_default();
        return (Verdict::Unseen, vec![format!("nothing tells what was lost: {why}")]);
    }
    let losses = series.marks.len();
    if losses == 0 {
        return (Verdict::NoLoss, Vec::new());
    }
    let Some(fit) = fit.filter(|_| losses >= LOSSES_MIN && series.passes.len() >= LOSSES_MIN)
    else {
        let why = format!("{losses} places with loss, of {LOSSES_MIN} that are needed");
        return (Verdict::TooFew, vec![why]);
    };
    let mut evidence = Vec::new();
    let percent = |share: f64| 100.0 * share;
    evidence.push(format!(
        "{:.0} % of {losses} places with loss lie at an empty bucket ({:.0} % are needed), and {:.1} % \
         of the passes had no tokens ({:.0} % may)",
        percent(fit.explained),
        percent(EXPLAINED_MIN),
        percent(fit.violated),
        percent(VIOLATED_MAX),
    ));
    let tokens = fit.tokens;
    evidence.push(format!(
        "tokens at losses: mean {:.0}, median {:.0} bytes; at passes: mean {:.0}, median {:.0} bytes",
        tokens.loss_mean, tokens.loss_median, tokens.pass_mean, tokens.pass_median,
    ));
    let base_ns = flows.iter().find_map(|f| f.tcp.as_ref()?.base_round_trip_ns());
    let slice_ns = base_ns.unwrap_or(fit.depth_bytes * 8e9 / fit.rate_bit_s).max(1e6);
    let slices = slices(series, slice_ns);
    evidence.push(format!("losses in {slices} slices of {:.1} ms", slice_ns / 1e6));

    // Behind the loss the round trip to the receiver says nothing of the queue.
    let at_sender = |flow: &&&Flow| flow.source().1 == Vantage::Sender;
    // Before the loss a queue that is as long as the bucket is deep loses the same packets; but it makes
    // them wait.
    let queue_bytes = (LATE_PACKETS * series.packet()).max(fit.depth_bytes / 2.0);
    let queue_ns = queue_bytes * 8e9 / fit.rate_bit_s;
    let late = flows.iter().filter(at_sender).find_map(|flow| {
        let tcp = flow.tcp.as_ref()?;
        let base_ns = tcp.base_round_trip_ns()?;
        let limit_ns = (base_ns * LATE_FACTOR).max(base_ns + queue_ns);
        Some((tcp.losses_after_round_trips_above(limit_ns)?, limit_ns))
    });
    if let Some((late, limit_ns)) = late {
        evidence.push(format!(
            "{:.0} % of the losses came when the round trip had grown above {:.1} ms, of {:.0} % \
             that a policer may have",
            percent(late),
            limit_ns / 1e6,
            percent(LATE_MAX),
        ));
    }
    if late.is_some_and(|(late, _)| late > LATE_MAX) {
        return (Verdict::Congested, evidence);
    }
    let level = fit.explained >= EXPLAINED_MIN && fit.violated <= VIOLATED_MAX;
    let fewer = tokens.loss_mean <= tokens.pass_mean && tokens.loss_median <= tokens.pass_median;
    if !(level && fewer && slices >= SLICES_MIN) {
        evidence.push("no single token bucket explains these losses".to_owned());
        return (Verdict::Random, evidence);
    }
    let fast = fast(series, fit.rate_bit_s);
    let packets = fit.depth_bytes / series.packet();
    if packets <= SHAPER_PACKETS && fast < FAST_MIN {
        evidence.push(format!(
            "packets leave evenly at the rate ({:.0} % come faster), so a queue is drained; a policer with a \
             bucket of {packets:.0} packets before an even source would look the same",
            percent(fast)
        ));
        return (Verdict::Shaped, evidence);
    }
    evidence.push(format!("{:.0} % of the packets come faster than the rate", percent(fast)));
    (Verdict::Policed, evidence)
}

/// In how many slices of time there is a loss.
fn slices(series: &Series, slice_ns: f64) -> usize {
    let slice = (slice_ns as u64).max(1);
    let time = |after: usize| series.passes.get(after).map_or(0, |pass| pass.time_ns);
    let mut slices: Vec<u64> = series.marks.iter().map(|mark| time(mark.after) / slice).collect();
    slices.dedup();
    slices.len()
}

/// The share of packets that come sooner after their predecessor than the rate takes for them.
fn fast(series: &Series, rate_bit_s: f64) -> f64 {
    let fast = series.passes.windows(2).filter(|pair| {
        let gap = pair[1].time_ns.saturating_sub(pair[0].time_ns) as f64;
        gap < 0.8 * f64::from(pair[1].bytes) * 8e9 / rate_bit_s
    });
    fast.count() as f64 / series.passes.len().max(1) as f64
}
