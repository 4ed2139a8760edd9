//! What is asked of every row: no request waits for a timer, no peer is faster, the limit is used and
//! kept.

use super::PEERS;
use crate::{
    context::Context,
    experiments::requests::{LATE, Row, TIMER},
    report::Case,
    systems::System,
};

/// Of the requests, the share that may be late.
const LATE_MOST: f64 = 1.0 / 10_000.0;
/// Percent of the limit.
const USED_LEAST: f64 = 97.0;
const SECOND_MOST: f64 = 101.0;
const TENTH_MOST: f64 = 105.0;

/// Records the claims of a row, as far as its systems were run.
pub(super) fn record(ctx: &mut Context, row: &Row, case: &Case) {
    let ours = System::Pace.name();
    let of = |system: &str, metric: &str| ctx.median(system, metric, Some(case));
    let ms = |us: f64| us / 1000.0;
    let mut claims = Vec::new();
    if let (Some(late), Some(requests), Some(fair_us)) =
        (of(ours, "late_10ms_requests"), of(ours, "requests"), of(ours, "fair_us"))
    {
        let claim = format!(
            "pace, {row}: no request waits for a timer (at most 1 in 10 000 above its fair time + {} ms)",
            LATE.as_millis()
        );
        let timers = of(ours, "late_150ms_requests").unwrap_or(0.0);
        let measured = format!(
            "{late:.0} of {requests:.0} above {:.1} ms, {timers:.0} above {:.1} ms",
            ms(fair_us) + LATE.as_secs_f64() * 1e3,
            ms(fair_us) + TIMER.as_secs_f64() * 1e3
        );
        claims.push((claim, late <= requests * LATE_MOST, measured));
    }
    let figures =
        |system: &str| Some((of(system, "latency_p50_us")?, of(system, "latency_p99_us")?));
    if let Some((p50, p99)) = figures(ours) {
        let peers = PEERS.iter().filter_map(|peer| Some((peer.name(), figures(peer.name())?)));
        let peers: Vec<_> = peers.collect();
        if !peers.is_empty() {
            let holds = peers.iter().all(|(_, (peer50, peer99))| p50 < *peer50 && p99 < *peer99);
            let words = |name: &str, (p50, p99)| format!("{name} {:.2}, {:.2}", ms(p50), ms(p99));
            let words = peers.iter().fold(words(ours, (p50, p99)), |text, (name, both)| {
                format!("{text}; {}", words(name, *both))
            });
            let claim = format!("pace, {row}: p50 and p99 below those of every peer");
            claims.push((claim, holds, format!("p50, p99 in ms: {words}")));
        }
    }
    if let (Some(used), Some(second), Some(tenth)) =
        (of(ours, "used_percent"), of(ours, "max_1s_percent"), of(ours, "max_100ms_percent"))
    {
        let kept = second <= SECOND_MOST && tenth <= TENTH_MOST;
        let most = format!("at most {SECOND_MOST} % over 1 s and {TENTH_MOST} % over 100 ms");
        let measured = format!("{used:.1} %, {second:.1} %, {tenth:.1} %");
        // Requests alone need not fill it.
        let (claim, holds) = match row.bulk {
            0 => (format!("pace, {row}: {most}"), kept),
            _ => (
                format!("pace, {row}: at least {USED_LEAST} % of the limit used, {most}"),
                kept && used >= USED_LEAST,
            ),
        };
        claims.push((claim, holds, measured));
    }
    for (claim, holds, measured) in claims {
        ctx.claim(claim, holds, measured);
    }
}
