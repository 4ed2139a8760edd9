//! What `wheel` claims: Carousel's flatness and cost, and the distance to trees and heaps.

use super::{PAIR, SIZES, Stamping, case};
use crate::context::Context;
use crate::stats;

/// The sizes between which Carousel's figure is flat.
const FLAT: (u32, u32) = (2_000, 20_000_000);
/// Where it is compared with others.
const LARGE: u32 = 2_000_000;
/// How much cheaper than what sorts.
const MUCH: f64 = 20.0;
/// The lower of Carousel's figures with a pool.
const POOL_NS: f64 = 11.0;
/// The goal of the project.
const GOAL_NS: f64 = 10.0;

pub(super) fn claims(ctx: &mut Context) {
    for stamping in [Stamping::Uniform, Stamping::Bursts] {
        let name = stamping.name();
        let cost = |ctx: &Context, queue: &str, elements| {
            ctx.median(queue, PAIR, Some(&case(stamping, elements)))
        };
        if let (Some(few), Some(many)) = (cost(ctx, "wheel", FLAT.0), cost(ctx, "wheel", FLAT.1)) {
            ctx.claim(
                format!("{name}: an element costs at most twice as much among 2e7 as among 2e3"),
                many <= 2.0 * few,
                format!("{many:.1} ns against {few:.1} ns"),
            );
        }
        if let Some(ours) = cost(ctx, "wheel", LARGE) {
            for peer in ["heap", "tree", "fq"] {
                let Some(theirs) = cost(ctx, peer, LARGE) else { continue };
                ctx.claim(
                    format!("{name}: at least {MUCH} times cheaper than {peer} among 2e6"),
                    theirs >= MUCH * ours,
                    format!("{:.0} times: {ours:.1} ns against {theirs:.0} ns", theirs / ours),
                );
            }
            for peer in ["list", "crate"] {
                let Some(theirs) = cost(ctx, peer, LARGE) else { continue };
                ctx.claim(
                    format!("{name}: cheaper than {peer} among 2e6"),
                    ours < theirs,
                    format!("{ours:.1} ns against {theirs:.1} ns"),
                );
            }
        }
        let costs = SIZES.into_iter().filter(|&n| n >= FLAT.0);
        let costs: Vec<f64> = costs.filter_map(|n| cost(ctx, "wheel", n)).collect();
        let Some((least, most)) = stats::range(&costs) else { continue };
        for (text, bound) in [
            ("at most 11 ns, as Carousel published for a pool, at every size from 2e3", POOL_NS),
            ("at most 10 ns, the goal, at every size from 2e3", GOAL_NS),
        ] {
            let measured = format!("{least:.1} to {most:.1} ns");
            ctx.claim(format!("{name}: {text}"), most <= bound, measured);
        }
    }
}
