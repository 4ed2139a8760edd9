//! How long packets waited right before a loss: what tells a queue from a policer.
//!
//! A queue of D bytes that is emptied at R and drops what does not fit loses what a token bucket (R, D)
//! loses. But what passed right before such a loss waited behind D bytes, so D / R; behind a policer it
//! waited for nothing. A queue behind a shaper whose own bucket holds B loses as a bucket of B + D does, and
//! delays by D / R.
//!
//! So of each loss the last packet is taken that was sent before it and arrived. Captured before the loss its
//! delay is its round trip less the least of the flow. Captured behind it a round trip shows nothing of the
//! queue; there the sender's time stamps (RFC 7323) say when each packet was sent, by a clock with ticks of 1
//! us to 100 ms, and the delay is how much later it came than the fastest one. A stamp is rounded down to a
//! tick, so half of one is taken off.
//!
//! A flow that begins while a queue stands never sees it empty. So the least delay is that of all flows
//! between its hosts, where their stamps come from one clock.
//!
//! A receiver may keep its acknowledgement of every other packet back for 40 ms or more (RFC 1122), so of the
//! last two packets the one with the smaller delay counts.

use serde::Serialize;

use crate::{
    flow::Flow,
    trace::{Event, LossSource},
};

/// Losses of which the delay must be known, and the share of all.
const TIMED_MIN: usize = 5;
const TIMED_SHARE_MIN: f64 = 0.1;
/// By how much two good clocks differ.
const DRIFT: f64 = 20e-6;

/// How a delay was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DelaySource {
    /// By round trips.
    RoundTrips,
    /// By the sender's time stamps.
    TimeStamps,
}

/// The delay before losses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Delay {
    /// The median over the losses, ns.
    pub median_ns: f64,
    /// Three quarters of the losses had no more, ns.
    pub upper_ns: f64,
    /// It is known so well, ns.
    pub within_ns: f64,
    /// Losses of which it is known.
    pub losses: usize,
    /// How it was measured.
    pub source: DelaySource,
}

/// When each packet of a flow would have come without the delay that its time stamp shows, and how well that
/// is known; none if the flow was captured before the loss, or without time stamps.
///
/// A bucket was filled and emptied when packets passed it. What delayed them on the way from there to the
/// capture, and made them come closer together or further apart, is taken out as far as the clock's tick
/// allows.
pub fn undelayed(flow: &Flow) -> Option<(Vec<u64>, f64)> {
    let source = flow.source().0;
    let tick_ns = flow.clock.tick_ns().filter(|_| source == LossSource::TcpHoles)?;
    let least = flow.clock.least_ns(flow.trace.events(), tick_ns)?;
    let mut noise: Vec<u64> = Vec::with_capacity(flow.trace.len());
    let mut last = 0;
    let times = flow.trace.events().map(|event| {
        let late = flow.clock.late_ns(event, tick_ns).unwrap_or(least);
        let late = (late - least).max(0) as u64;
        noise.push(late.min(tick_ns));
        last = event.time_ns.saturating_sub(late.saturating_sub(tick_ns)).max(last);
        last
    });
    let times = times.collect();
    let middle = noise.len() / 2;
    let within = *noise.select_nth_unstable(middle).1;
    Some((times, within as f64))
}

/// The delays before the losses of a flow, ns.
struct Delays {
    all: Vec<f64>,
    within_ns: f64,
    source: DelaySource,
}

/// A flow and its peers: those between the same hosts.
fn between<'a>(flow: &'a Flow, peers: &'a [&Flow]) -> impl Iterator<Item = &'a Flow> {
    let hosts = |flow: &Flow| (flow.key.source, flow.key.destination);
    let others = peers.iter().copied().filter(move |other| hosts(other) == hosts(flow));
    std::iter::once(flow).chain(others)
}

/// Of a flow, seen before the loss.
fn by_round_trips(flow: &Flow, peers: &[&Flow], back_ns: u64) -> Option<Delays> {
    let least = between(flow, peers).filter_map(|flow| flow.tcp.as_ref()?.trips.least_ns()).min();
    let least_ns = least? as f64;
    let delay = |event: &Event| (f64::from(event.round_trip_us) * 1e3 - least_ns).max(0.0);
    let mut all = Vec::new();
    let mut last: [Option<&Event>; 2] = [None, None];
    for event in flow.trace.events() {
        if event.resent {
            let near = |before: &&Event| event.time_ns - before.time_ns <= back_ns;
            let before = last.into_iter().flatten().filter(near).map(delay);
            all.extend(before.reduce(f64::min));
        } else if event.round_trip_us > 0 {
            last = [Some(event), last[0]];
        }
    }
    // A host answers when it comes to it.
    Some(Delays { all, within_ns: 0.0, source: DelaySource::RoundTrips })
}

/// Of a flow, seen behind the loss.
fn by_stamps(flow: &Flow, peers: &[&Flow]) -> Option<Delays> {
    let tick_ns = flow.clock.tick_ns()?;
    let late = |event: &Event| flow.clock.late_ns(event, tick_ns);
    let leasts = between(flow, peers).filter_map(|other| {
        let ahead = flow.clock.ahead_of(&other.clock, tick_ns)?;
        Some(other.clock.least_ns(other.trace.events(), tick_ns)? + ahead)
    });
    let least = leasts.min()?;
    let half_tick = tick_ns as f64 / 2.0;
    let mut all = Vec::new();
    let mut last: [Option<i64>; 2] = [None, None];
    for event in flow.trace.events() {
        if event.gap_seq > 0 {
            all.extend(
                last.into_iter()
                    .flatten()
                    .min()
                    .map(|late| ((late - least) as f64 - half_tick).max(0.0)),
            );
        }
        last = [late(event).or(last[0]), last[0]];
    }
    let drift_ns = DRIFT * (flow.last_ns - flow.first_ns) as f64;
    Some(Delays { all, within_ns: half_tick + drift_ns, source: DelaySource::TimeStamps })
}

/// The median delay before the losses of some flows, over the least between their hosts, of all `peers`; none
/// if too few could be timed. What passed more than `back_ns` before a loss says nothing of it.
pub fn before_losses(flows: &[&Flow], peers: &[&Flow], back_ns: u64) -> Option<Delay> {
    let (mut all, mut within_ns, mut source, mut losses) = (Vec::new(), 0.0_f64, None, 0);
    for flow in flows {
        let (seen, _) = flow.source();
        let delays = match seen {
            LossSource::TcpRetransmissions => by_round_trips(flow, peers, back_ns),
            LossSource::TcpHoles => by_stamps(flow, peers),
            _ => None,
        };
        losses += flow.trace.events().filter(|event| event.losses(seen) > 0).count();
        if let Some(delays) = delays.filter(|delays| !delays.all.is_empty()) {
            all.extend(delays.all);
            within_ns = within_ns.max(delays.within_ns);
            source = Some(delays.source);
        }
    }
    if all.len() < TIMED_MIN || (all.len() as f64) < TIMED_SHARE_MIN * losses as f64 {
        return None;
    }
    all.sort_by(f64::total_cmp);
    let (median_ns, upper_ns) = (all[all.len() / 2], all[all.len() * 3 / 4]);
    Some(Delay { median_ns, upper_ns, within_ns, losses: all.len(), source: source? })
}
