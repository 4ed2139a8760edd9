//! What `wheel` claims: Carousel's flatness and cost, and the distance to trees and heaps.

use super::{PAIR, PUBLISHED_POOL_NS, Stamping, case};
use crate::context::Context;

/// The sizes between which Carousel's figure is flat.
const FLAT: (u32, u32) = (2_000, 20_000_000);
/// Where it is compared with others.
const LARGE: u32 = 2_000_000;
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
        let Some(ours) = cost(ctx, "wheel", LARGE) else { continue };
        for (peer, times) in [("heap", 20.0), ("tree", 20.0), ("fq", 20.0)] {
            let Some(theirs) = cost(ctx, peer, LARGE) else { continue };
            ctx.claim(
                format!("{name}: at least {times} times cheaper than {peer} among 2e6"),
                theirs >= times * ours,
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
        let sizes: Vec<u32> = super::SIZES.into_iter().filter(|&n| n >= FLAT.0).collect();
        let costs: Vec<f64> = sizes.iter().filter_map(|&n| cost(ctx, "wheel", n)).collect();
        let most = costs.iter().fold(0.0_f64, |most, &ns| most.max(ns));
        let least = costs.iter().fold(f64::INFINITY, |least, &ns| least.min(ns));
        for (text, bound) in [
            (
                "no more than Carousel published with a pool, at every size from 2e3",
                PUBLISHED_POOL_NS,
            ),
            ("at most 10 ns, at every size from 2e3", GOAL_NS),
        ] {
            ctx.claim(
                format!("{name}: {text}"),
                most <= bound,
                format!("{least:.1} to {most:.1} ns"),
            );
        }
    }
}
