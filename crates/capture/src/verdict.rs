//! What losses look like: a policer's, a shaper's, a congested queue's, or chance.
//!
//! The thresholds are those of Flach et al., "An Internet-Wide Analysis of Traffic Policing" (SIGCOMM
//! 2016), as far as they apply: at least 15 losses and 15 passes, losses in at least three slices of time,
//! fewer tokens at losses than at passes, at least 90 % of the losses at the same level, at least 97 % of
//! the passes above it. Their tokens come from one rate over all losses and have no bucket that can be full;
//! here they are those of the bucket that [`fit`](crate::fit) found, and the level is kept more narrowly:
//! within one and a half packets, or 3 % of the depth. In place of their share of losses after a grown round
//! trip, the [`delay`] right before the losses tells a queue from a policer.

use serde::Serialize;

use crate::{
    delay::{self, Delay, DelaySource},
    fit::{BETWEEN_MAX, Fit, PATH_WITHIN, Series},
    flow::{Flow, Vantage},
    trace::LossSource,
};

/// Losses and passes without which nothing is said.
pub const LOSSES_MIN: usize = 15;
/// Slices of time in which there are losses.
const SLICES_MIN: usize = 3;
/// The share of losses at an empty bucket.
pub const EXPLAINED_MIN: f64 = 0.9;
/// The share of passes that the bucket has no room for.
pub const VIOLATED_MAX: f64 = 0.03;
/// The delay before losses, as a part of the time that the bucket takes to fill, from which on they are a
/// queue's. A queue as long as its shaper's bucket has a half, a policer nothing.
const QUEUE_MIN: f64 = 0.25;
/// Where no bucket explains the losses, a delay of so many packets at the goodput is a queue's.
const GROWN_PACKETS: f64 = 4.0;
/// A queue, too, if a quarter of the losses had twice that delay, and that of so many packets or of the whole
/// bucket.
const SOME_PACKETS: f64 = 8.0;
/// The share of losses at an empty bucket that is enough where packets were seen not to wait.
const EXPLAINED_NO_QUEUE_MIN: f64 = 0.75;
/// No policer has a bucket that takes longer to fill: the deepest rule in use is 3 s (Cisco's CAR, extended).
const BUCKET_MAX_NS: f64 = 4e9;
/// A pace that differs from the rate by less is the rate.
const PACE_WITHIN: f64 = 0.005;
/// Where a quarter of the losses follow packets that came faster than the rate by more than this part, no
/// queue let them out. Another queue behind it moves them by less.
const FASTER_WITHIN: f64 = 0.1;
/// Over so many packets the pace before a loss is taken, and at so many losses.
const PACE_PACKETS: usize = 4;
const PACES_MIN: usize = 5;
/// A gap at a loss of at least so many of the gaps before it was left open by the lost packet.
const GAP_OPEN: f64 = 1.5;
/// Behind the policer, and without time stamps, the path moves packets by an unknown time. There a loss may
/// find tokens that differ from those at the others by [`PATH_WITHIN`], if losses find fewer tokens than
/// passes with this probability, and leave their gaps open.
const LOSS_RANK_MIN: f64 = 0.9;
/// A loss is judged by the packets that passed within this many packet times at the rate before it, or
/// within the time in which the bucket fills.
const BACK_PACKETS: f64 = 8.0;
/// A bucket of so many packets is a shaper's, if packets also leave evenly.
const SHAPER_PACKETS: f64 = 3.0;
/// The share of packets that come faster than the rate, below which they leave evenly.
const FAST_MIN: f64 = 0.05;

/// The cause that the losses of a flow show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Dropped by a token bucket.
    Policed,
    /// Dropped by a queue that was full: it loses as a bucket does, but delays.
    TailDrop,
    /// Dropped before a queue that is drained evenly at a rate.
    Shaped,
    /// Dropped when a queue had grown, by no rule of one bucket or one full queue.
    Congested,
    /// None of these.
    Random,
    /// A bucket explains the losses, and a queue would, too.
    Unclear,
    /// Nothing was lost.
    NoLoss,
    /// Too little was lost to tell.
    TooFew,
    /// Nothing counts the packets.
    Unseen,
}

impl Verdict {
    /// In a word or two.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Policed => "policed",
            Verdict::TailDrop => "full queue",
            Verdict::Shaped => "shaped",
            Verdict::Congested => "congested",
            Verdict::Random => "random",
            Verdict::Unclear => "cannot tell",
            Verdict::NoLoss => "no loss",
            Verdict::TooFew => "too few losses",
            Verdict::Unseen => "losses unseen",
        }
    }
}

/// The delay before losses, beside the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DelayReport {
    /// The median over the losses.
    pub median_ms: f64,
    /// Three quarters of the losses had no more.
    pub upper_quartile_ms: f64,
    /// It is known so well: the tick of the clock that measured it.
    pub within_ms: f64,
    /// How long the bucket takes to fill: what a queue that loses the same would delay by.
    pub bucket_ms: f64,
    /// The median over that.
    pub share_of_bucket: f64,
    /// Losses of which the delay is known.
    pub losses: usize,
    /// How it was measured.
    pub measured_by: DelaySource,
}

/// The judgement on the losses of a series.
#[derive(Debug, Clone)]
pub struct Judgement {
    /// The cause that its losses show.
    pub verdict: Verdict,
    /// Why, in words.
    pub evidence: Vec<String>,
    /// The delay before the losses, if it could be measured.
    pub delay: Option<DelayReport>,
}

/// Judges what a series shows, of the flows of which it is made. `peers` are those of the capture.
pub fn judge(flows: &[&Flow], peers: &[&Flow], series: &Series, fit: Option<&Fit>) -> Judgement {
    let plain = |verdict, evidence| Judgement { verdict, evidence, delay: None };
    let sources: Vec<_> = flows.iter().map(|flow| flow.source()).collect();
    if sources.iter().all(|(source, _)| *source == LossSource::None) {
        let why = flows.first().map(|flow| flow.vantage_why()).unwrap_or_default();
        return plain(Verdict::Unseen, vec![format!("nothing tells what was lost: {why}")]);
    }
    let losses = series.marks.len();
    if losses == 0 {
        return plain(Verdict::NoLoss, Vec::new());
    }
    let Some(fit) = fit.filter(|_| losses >= LOSSES_MIN && series.passes.len() >= LOSSES_MIN)
    else {
        let why = format!("{losses} places with loss, of {LOSSES_MIN} that are needed");
        return plain(Verdict::TooFew, vec![why]);
    };
    let packet_ns = series.packet() * 8e9 / fit.rate_bit_s;
    let bucket_ns = fit.depth_bytes * 8e9 / fit.rate_bit_s;
    let back_ns = bucket_ns.max(BACK_PACKETS * packet_ns) as u64;
    let delay = delay::before_losses(flows, peers, back_ns);
    let (verdict, evidence) = weigh(flows, series, fit, delay.as_ref());
    let delay = delay.map(|delay| DelayReport {
        median_ms: delay.median_ns / 1e6,
        upper_quartile_ms: delay.upper_ns / 1e6,
        within_ms: delay.within_ns / 1e6,
        bucket_ms: bucket_ns / 1e6,
        share_of_bucket: delay.median_ns / bucket_ns,
        losses: delay.losses,
        measured_by: delay.source,
    });
    Judgement { verdict, evidence, delay }
}

/// The verdict on losses that are enough, and the evidence in words.
fn weigh(
    flows: &[&Flow],
    series: &Series,
    fit: &Fit,
    delay: Option<&Delay>,
) -> (Verdict, Vec<String>) {
    let mut evidence = Vec::new();
    let percent = |share: f64| 100.0 * share;
    evidence.push(format!(
        "{:.0} % of {} places with loss lie at an empty bucket ({:.0} % are needed), and {:.1} % \
         of the passes had no tokens ({:.0} % may)",
        percent(fit.explained),
        series.marks.len(),
        percent(EXPLAINED_MIN),
        percent(fit.violated),
        percent(VIOLATED_MAX),
    ));
    let tokens = fit.tokens;
    evidence.push(format!(
        "tokens at losses: mean {:.0}, median {:.0} bytes; at passes: mean {:.0}, median {:.0} bytes",
        tokens.loss_mean, tokens.loss_median, tokens.pass_mean, tokens.pass_median,
    ));
    let base_ns = flows.iter().find_map(|f| f.tcp.as_ref()?.trips.quantile_ns(0.1));
    let bucket_ns = fit.depth_bytes * 8e9 / fit.rate_bit_s;
    let slice_ns = base_ns.unwrap_or(bucket_ns).max(1e6);
    let slices = slices(series, slice_ns);
    evidence.push(format!("losses in {slices} slices of {:.1} ms", slice_ns / 1e6));
    let waited = delay.map(|delay| Waited::weigh(delay, series, fit));
    evidence.push(match (delay, waited) {
        (Some(delay), Some(waited)) => waited.words(delay, bucket_ns),
        _ => "the delay before the losses is not known: it needs acknowledgements where the capture was \
              taken before the loss, and TCP time stamps where it was taken behind it"
            .to_owned(),
    });
    if slices < SLICES_MIN {
        evidence.push(format!(
            "all losses lie in {slices} slices of {:.1} ms, of {SLICES_MIN} that are needed: one burst of \
             losses shows no rate",
            slice_ns / 1e6
        ));
        return (Verdict::TooFew, evidence);
    }
    // That nothing waited is evidence of its own, and what the path did to the packets blurs the level.
    let no_queue =
        waited == Some(Waited::Nothing) && fit.depth_bytes > SHAPER_PACKETS * series.packet();
    let enough = if no_queue { EXPLAINED_NO_QUEUE_MIN } else { EXPLAINED_MIN };
    // Flows of which nothing was lost may be among them.
    let seen = |side| flows.iter().any(|flow| flow.source().1 == side);
    let behind = seen(Vantage::Receiver) && !seen(Vantage::Sender);
    let pace = Some(fit.rate_bit_s).filter(|_| behind && waited != Some(Waited::Nothing));
    let pace = pace.and_then(|rate| Pace::before_losses(series, rate, flows.len()));
    // Time stamps show what the path did.
    let path_moves = delay.is_none()
        && holds_loosely(fit, series)
        && pace.is_some_and(|pace| pace.empties_a_bucket());
    if path_moves && fit.explained < enough {
        evidence.push(format!(
            "nothing tells how long the path delayed packets after the loss: at {:.0} % of the losses the \
             tokens differ by at most {:.0} % of the depth, and a loss finds fewer than a pass with a \
             probability of {:.2} ({LOSS_RANK_MIN} is needed)",
            percent(fit.explained_loosely),
            percent(PATH_WITHIN),
            fit.loss_rank,
        ));
    }
    // A bucket that holds no packet passes none.
    let level = (fit.explained >= enough || path_moves)
        && fit.violated <= VIOLATED_MAX
        && fit.depth_bytes >= series.packet();
    let fewer = tokens.loss_mean <= tokens.pass_mean && tokens.loss_median <= tokens.pass_median;
    if !(level && fewer) {
        evidence.push("no single token bucket explains these losses".to_owned());
        let packet_ns = series.packet() * 8e9 / fit.rate_bit_s;
        let grown = delay.filter(|delay| delay.median_ns > GROWN_PACKETS * packet_ns);
        let Some(delay) = grown else { return (Verdict::Random, evidence) };
        evidence.push(format!(
            "a queue of {:.1} ms stood when they were lost: {:.0} packets at the rate",
            delay.median_ns / 1e6,
            delay.median_ns / packet_ns
        ));
        return (Verdict::Congested, evidence);
    }
    if waited == Some(Waited::Queue) {
        evidence.push(
            "so a queue was full when they were lost: a policer does not delay. Rate and bucket are those of \
             the queue"
                .to_owned(),
        );
        return (Verdict::TailDrop, evidence);
    }
    if bucket_ns > BUCKET_MAX_NS {
        evidence.push(format!(
            "a bucket that takes {:.0} s to fill is none that a policer has",
            bucket_ns / 1e9
        ));
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
    if waited == Some(Waited::Little) {
        evidence.push(
            "packets waited before some losses: longer than a policer makes them wait, and not as long as \
             a full queue of that size"
                .to_owned(),
        );
        return (Verdict::Unclear, evidence);
    }
    if let Some(pace) = pace {
        evidence.push(pace.words());
        if pace.is_of_a_queue() {
            return (Verdict::TailDrop, evidence);
        }
        if pace.is_of_both() {
            evidence.push("that fits a bucket and a queue".to_owned());
            return (Verdict::Unclear, evidence);
        }
    } else if behind && waited == Some(Waited::Coarse) {
        evidence.push(
            "the clock is too coarse, and the spacing of packets before the losses is unknown: a bucket and \
             a queue would lose the same"
                .to_owned(),
        );
        return (Verdict::Unclear, evidence);
    }
    // The depth is chosen so that it fits what may be lost, so it is no evidence: nothing may have waited.
    let packet_ns = series.packet() * 8e9 / fit.rate_bit_s;
    if series.lacks_losses()
        && delay.is_some_and(|delay| delay.median_ns - delay.within_ns > packet_ns)
    {
        evidence.push(
            "packets waited longer than one takes at the rate, and nobody knows which datagrams were lost: \
             that fits a bucket and a queue"
                .to_owned(),
        );
        return (Verdict::Unclear, evidence);
    }
    evidence.push(format!("{:.0} % of the packets come faster than the rate", percent(fast)));
    (Verdict::Policed, evidence)
}

/// The answer of the delay before losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waited {
    /// A queue stood.
    Queue,
    /// Packets waited before a quarter of the losses, but not as long as a full queue makes them wait.
    Little,
    /// None did.
    Nothing,
    /// The clock is too coarse for a bucket that fills so fast.
    Coarse,
}

impl Waited {
    fn weigh(delay: &Delay, series: &Series, fit: &Fit) -> Waited {
        let packet_ns = series.packet() * 8e9 / fit.rate_bit_s;
        let limit_ns = (QUEUE_MIN * fit.depth_bytes * 8e9 / fit.rate_bit_s).max(packet_ns);
        // A queue that was full at some of the losses, and others came by chance.
        let bucket_ns = fit.depth_bytes * 8e9 / fit.rate_bit_s;
        let some_ns = (2.0 * limit_ns).max(bucket_ns.min(SOME_PACKETS * packet_ns));
        if delay.median_ns - delay.within_ns > limit_ns
            || delay.upper_ns - delay.within_ns > some_ns
        {
            Waited::Queue
        } else if delay.upper_ns - delay.within_ns > QUEUE_MIN * bucket_ns {
            Waited::Little
        } else if delay.median_ns + delay.within_ns <= limit_ns {
            Waited::Nothing
        } else {
            Waited::Coarse
        }
    }

    fn words(self, delay: &Delay, bucket_ns: f64) -> String {
        let by = match delay.source {
            DelaySource::RoundTrips => "round trips",
            DelaySource::TimeStamps => "the sender's time stamps",
        };
        let says = match self {
            Waited::Queue => "a policer has at most",
            Waited::Little => "a quarter of the losses has more, as behind no policer, than",
            Waited::Nothing => "a full queue has more than",
            Waited::Coarse => {
                "the clock is too coarse for a bucket that fills so fast; the limit is"
            }
        };
        format!(
            "delay before loss: median {:.2} ms of {} losses, a quarter above {:.2} ms, by {by}: {:.2} of \
             the {:.1} ms in which the bucket fills; {says} {QUEUE_MIN}",
            delay.median_ns / 1e6,
            delay.losses,
            delay.upper_ns / 1e6,
            delay.median_ns / bucket_ns,
            bucket_ns / 1e6,
        )
    }
}

/// Whether a bucket explains the losses but for a path that moves packets by an unknown time.
pub(crate) fn holds_loosely(fit: &Fit, series: &Series) -> bool {
    fit.explained_loosely >= EXPLAINED_MIN
        && fit.loss_rank >= LOSS_RANK_MIN
        && fit.violated <= VIOLATED_MAX
        && fit.depth_bytes > SHAPER_PACKETS * series.packet()
}

/// In how many slices of time there is a loss.
fn slices(series: &Series, slice_ns: f64) -> usize {
    let slice = (slice_ns as u64).max(1);
    let time = |after: usize| series.passes.get(after).map_or(0, |pass| pass.time_ns);
    let mut slices: Vec<u64> = series.marks.iter().map(|mark| time(mark.after) / slice).collect();
    slices.dedup();
    slices.len()
}

/// The packets right before losses.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pace {
    /// How fast they came, as a part of the rate: the quartiles over the losses.
    quartiles: [f64; 3],
    /// The median of the gap at the loss over the mean gap before it.
    gap: f64,
    /// All packets are of one flow. Else others come in the gap, and the longest of many tells less.
    is_alone: bool,
}

impl Pace {
    /// Measures it at the losses that no other preceded by [`PACE_PACKETS`]; none if those are too few.
    fn before_losses(series: &Series, rate_bit_s: f64, flows: usize) -> Option<Pace> {
        let passes = &series.passes;
        let (mut paces, mut gaps, mut last) = (Vec::new(), Vec::new(), 0);
        for mark in &series.marks {
            let first = mark.after.saturating_sub(PACE_PACKETS);
            let last_before = last;
            last = mark.after.max(last);
            if first < last_before
                || first + PACE_PACKETS != mark.after
                || mark.after >= passes.len()
            {
                continue;
            }
            let bytes: u64 =
                passes[first + 1..=mark.after].iter().map(|p| u64::from(p.bytes)).sum();
            let time_ns = (passes[mark.after].time_ns - passes[first].time_ns).max(1) as f64;
            paces.push(bytes as f64 * 8e9 / time_ns / rate_bit_s);
            let end = mark.before.min(mark.after + BETWEEN_MAX).min(passes.len() - 1);
            let here = passes[mark.after..=end.max(mark.after)].windows(2);
            let longest = here.map(|pair| pair[1].time_ns - pair[0].time_ns).max().unwrap_or(0);
            gaps.push(longest as f64 * PACE_PACKETS as f64 / time_ns);
        }
        if paces.len() < PACES_MIN {
            return None;
        }
        paces.sort_by(f64::total_cmp);
        gaps.sort_by(f64::total_cmp);
        let at = |quarter: usize| paces[paces.len() * quarter / 4];
        Some(Pace {
            quartiles: [at(1), at(2), at(3)],
            gap: gaps[gaps.len() / 2],
            is_alone: flows == 1,
        })
    }

    /// Whether a full queue let them out.
    ///
    /// A queue that is full lets packets out at its rate, and closes the gap that a lost packet leaves: the
    /// next one follows as its predecessors did. The rate that was fitted may be below that of the queue, if
    /// the queue is empty at times. A bucket that gets empty is emptied by packets that come faster than its
    /// rate; the place of a lost one stays empty.
    fn is_of_a_queue(&self) -> bool {
        let [lower, pace, upper] = self.quartiles;
        let steady = pace - lower < PACE_WITHIN * pace && upper < (1.0 + FASTER_WITHIN) * pace;
        let at_the_rate = (pace - 1.0).abs() < PACE_WITHIN && upper < 1.0 + FASTER_WITHIN;
        let closed = self.gap < GAP_OPEN;
        // Between two packets of one of several flows there are many gaps: the longest tells less.
        if closed { steady || at_the_rate } else { steady && at_the_rate }
    }

    /// Whether a bucket and a queue let packets out like this: none comes faster than the rate, so none
    /// empties a bucket; or they come at about the rate and no gap shows a bucket; or half of them come at
    /// one pace and the gaps are closed, and some come faster.
    fn is_of_both(&self) -> bool {
        let [lower, pace, upper] = self.quartiles;
        let open = self.gap >= GAP_OPEN;
        upper < 1.0
            || (upper < 1.0 + FASTER_WITHIN && !(open && self.is_alone))
            || (pace - lower < PACE_WITHIN * pace && !open)
    }

    /// Whether they emptied a bucket: lost ones left gaps.
    fn empties_a_bucket(&self) -> bool {
        !self.is_of_a_queue() && self.gap >= GAP_OPEN
    }

    fn words(&self) -> String {
        let [lower, pace, upper] = self.quartiles;
        format!(
            "{PACE_PACKETS} packets right before a loss came at {pace:.3} times the rate, at half of the \
             losses at {lower:.3} to {upper:.3} times, and the gap at the loss is {:.1} times those before \
             it; a full queue lets packets out at one pace and closes the gap",
            self.gap
        )
    }
}

/// The share of packets that come sooner after their predecessor than the rate takes for them.
fn fast(series: &Series, rate_bit_s: f64) -> f64 {
    let fast = series.passes.windows(2).filter(|pair| {
        let gap = pair[1].time_ns.saturating_sub(pair[0].time_ns) as f64;
        gap < 0.8 * f64::from(pair[1].bytes) * 8e9 / rate_bit_s
    });
    fast.count() as f64 / series.passes.len().max(1) as f64
}

#[cfg(test)]
mod tests;
