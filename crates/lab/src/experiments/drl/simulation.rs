//! Runs in virtual time: what is asked of `tidegate-sim`, and what it gives in the words of this module.

use std::time::Duration;

use tidegate_core::Nanos;
use tidegate_sim::{
    measure::{BIN as SIM_BIN, Bins},
    world::{World, WorldOptions},
};

use super::forwarded::{BIN, Forwarded};

/// What a run gave.
#[derive(Debug)]
pub(super) struct Simulated {
    pub(super) forwarded: Forwarded,
    /// What limiters told each other, with all headers and seals, as a part of the limit.
    pub(super) overhead_percent: f64,
    /// Of the packets that came.
    pub(super) drops_percent: f64,
}

pub(super) fn run(options: WorldOptions) -> Simulated {
    let limiter = options.flows.iter().map(|flow| flow.host).collect();
    let (lasts, limit_bit_s) = (options.lasts, options.limit.bit_s() as f64);
    gather(&World::new(options).finished(), limiter, lasts, limit_bit_s)
}

fn gather(world: &World, limiter: Vec<usize>, lasts: Nanos, limit_bit_s: f64) -> Simulated {
    let flows = world.flows().map(|bins| bytes(bins, lasts)).collect();
    Simulated {
        forwarded: Forwarded { flows, limiter, limit_bit_s },
        overhead_percent: world.overhead() * 100.0,
        drops_percent: world.drops() * 100.0,
    }
}

fn bytes(bins: &Bins, lasts: Nanos) -> Vec<u64> {
    debug_assert_eq!(u128::from(SIM_BIN.0), BIN.as_nanos());
    let starts = (0..lasts.0).step_by(SIM_BIN.0 as usize);
    let of = |at: u64| {
        let bit_s = bins.rate(Nanos(at), Nanos(at + SIM_BIN.0));
        (bit_s * BIN.as_secs_f64() / 8.0).round() as u64
    };
    starts.map(of).collect()
}

/// A time of the simulation.
pub(super) fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
