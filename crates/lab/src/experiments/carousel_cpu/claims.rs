//! What is claimed of the costs, case by case. No paper has figures for this path.

use super::{
    AGAINST_HTB, Cell, LANE, LIMITERS, Limiter, PER_FRAME, SHAPING, WIRE, case_in_words, nic::Wait,
};
use crate::{
    context::Context,
    report::{Case, Row},
    stats,
    systems::System,
};

/// A limiter that sends less is not compared: it had less to do.
const USED_LEAST: f64 = 0.95;
const USED_MOST: f64 = 1.01;

const HTB: Limiter = Limiter::Kernel(System::Htb);
const PACE: Limiter = Limiter::Kernel(System::Pace);
const AUTO: Limiter = Limiter::Carousel(Wait::Auto);
const POLL: Limiter = Limiter::Carousel(Wait::Poll);
const SLEEP: Limiter = Limiter::Carousel(Wait::Sleep);

/// Records the cost of a frame as a share of HTB's in the same round.
pub(super) fn against_htb(ctx: &mut Context, plan: &[Cell]) {
    for cell in plan {
        let case = cell.case();
        let in_run = |ctx: &Context, limiter: Limiter, run: u32| {
            let name = limiter.to_string();
            let is = |row: &&Row| {
                row.system == name && row.metric == PER_FRAME && row.case == case && row.run == run
            };
            ctx.rows().iter().find(is).map(|row| row.value)
        };
        for limiter in LIMITERS {
            for run in 1..=ctx.repeats {
                let (ours, htb) = (in_run(ctx, limiter, run), in_run(ctx, HTB, run));
                if let Some((ours, htb)) = ours.zip(htb) {
                    ctx.record(limiter, &case, run).value(AGAINST_HTB, ours / htb * 100.0);
                }
            }
        }
    }
}

pub(super) fn record(ctx: &mut Context, plan: &[Cell]) {
    for cell in plan {
        let case = cell.case();
        let words = case_in_words(&case);
        for limiter in [PACE, AUTO, POLL, SLEEP] {
            let Some(wire) = ctx.median(&limiter.to_string(), WIRE, Some(&case)) else { continue };
            let used = wire / cell.limit_bit_s as f64;
            ctx.claim(
                format!("{limiter}, {words}: the limit is used, and held"),
                (USED_LEAST..=USED_MOST).contains(&used),
                format!("{:.1} % of the limit on the wire", used * 100.0),
            );
        }
        less(ctx, &case, (PACE, HTB), "no more CPU time a frame than htb");
        less(ctx, &case, (AUTO, POLL), "no more CPU time a frame than carousel-poll");
        less(ctx, &case, (SLEEP, AUTO), "no more CPU time a frame than carousel-auto");
        shaping(ctx, &case);
    }
}

/// `what` holds if the first costs no more than the second, median by median.
fn less(ctx: &mut Context, case: &Case, (ours, theirs): (Limiter, Limiter), what: &str) {
    let of = |limiter: Limiter| {
        let values = ctx.values(&limiter.to_string(), PER_FRAME, Some(case));
        Some((stats::median(&values)?, stats::range(&values)?))
    };
    let Some((our, their)) = of(ours).zip(of(theirs)) else { return };
    let words =
        |(median, (low, high)): (f64, (f64, f64))| format!("{median:.0} ns ({low:.0}–{high:.0})");
    let measured = format!("{} against {}", words(our), words(their));
    ctx.claim(format!("{ours}, {}: {what}", case_in_words(case)), our.0 <= their.0, measured);
}

/// The decision alone, beside what HTB adds to a path without a limit.
fn shaping(ctx: &mut Context, case: &Case) {
    let Some(lane) = ctx.median(LANE, SHAPING, Some(case)) else { return };
    let frame = |limiter: Limiter| ctx.median(&limiter.to_string(), PER_FRAME, Some(case));
    let Some((htb, pfifo)) = frame(HTB).zip(frame(Limiter::Pfifo)) else { return };
    let adds = htb - pfifo;
    ctx.claim(
        format!("lane, {}: shapes a frame for less than htb adds to pfifo", case_in_words(case)),
        lane < adds,
        format!("{lane:.0} ns against {adds:.0} ns"),
    );
}
