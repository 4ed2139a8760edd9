//! From what a host measured to what its gate does.

use tidegate_core::{
    Nanos,
    fleet::{
        average::TAU,
        fps::{Fps, FpsInput},
        level::Want,
        share::{Grant, Share},
    },
    water_fill::{GREEDY_PERCENT, HEADROOM_PERCENT},
};

use crate::{clock::Clock, gate::Gate};

/// Over which time `share` averages the rates of flows: what a window of TCP does in a few round trips should
/// not move capacity.
const FLOW_TAU: Nanos = Nanos(700_000_000);

/// What a host measured in an interval, and heard.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured {
    pub demand_bit_s: f64,
    pub largest_bit_s: f64,
    pub typical_bit_s: f64,
    /// The sum of what the others reported.
    pub others: f64,
    pub dropped: bool,
}

#[derive(Debug)]
pub(super) enum Control {
    /// CTB.
    None,
    /// GTB and GRD: tells its demand.
    Demand,
    Fps(Fps),
    FpsShaped(Fps),
    Share(Box<Share>),
}

impl Control {
    pub fn flow_tau(&self) -> Nanos {
        match self {
            Control::FpsShaped(_) | Control::Share(_) => FLOW_TAU,
            _ => TAU,
        }
    }

    /// Sets the gate; what the others are sent.
    pub fn measure(&mut self, now: Nanos, clock: Clock, gate: &mut Gate, seen: &Measured) -> f64 {
        let demand = seen.demand_bit_s;
        let all = demand + seen.others;
        match (self, gate) {
            (Control::Demand, Gate::Global(gtb)) => gtb.set_remote(now, seen.others),
            (Control::Demand, Gate::Random(grd)) => _ = grd.set_demand(all),
            (Control::Fps(fps), Gate::Bucket(bucket)) => {
                let flow_bit_s = seen.largest_bit_s;
                let input =
                    FpsInput { demand_bit_s: demand, flow_bit_s, remote_weight: seen.others };
                bucket.set_rate(now, fps.on_interval(now, &input) as u64);
                return fps.weight();
            }
            (Control::FpsShaped(fps), Gate::Shaper(shaper)) => {
                let flow_bit_s = seen.typical_bit_s;
                let input =
                    FpsInput { demand_bit_s: demand, flow_bit_s, remote_weight: seen.others };
                let bit_s = fps.on_interval(now, &input) as u64;
                let grant = Grant { bit_s, until: Nanos(u64::MAX), floor_bit_s: bit_s };
                shaper.set_grant(clock.reads(now), grant);
                return fps.weight();
            }
            (Control::Share(share), _) => {
                let local = clock.reads(now);
                let rate = share.grant().at(local) as f64;
                share.set_want(local, want(demand, seen.typical_bit_s, rate, seen.dropped));
            }
            _ => {}
        }
        demand
    }
}

/// What to ask for, with a demand, the rate of a flow that takes all it gets, and the present rate, all in
/// bit/s. `dropped`: lately.
fn want(demand: f64, flow: f64, rate: f64, dropped: bool) -> Want {
    if demand <= 0.0 {
        return Want::default();
    }
    let greedy = dropped || demand * 100.0 >= rate * GREEDY_PERCENT as f64;
    // A flow that has just come has no rate from which the demand could be computed.
    let flows = if flow > 0.0 { (demand.min(rate) / flow).max(1.0) } else { 1.0 };
    let demand_bit_s =
        if greedy { u64::MAX } else { (demand * (100 + HEADROOM_PERCENT) as f64 / 100.0) as u64 };
    Want { flows: flows as f32, demand_bit_s }
}
