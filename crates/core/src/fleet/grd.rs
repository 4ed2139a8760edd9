//! GRD, global random drop: every limiter drops with the same probability, the one that reduces the global
//! demand to the limit (Cloud Control, SIGCOMM 2007).
//!
//! ```text
//!   demand > limit:  p = (demand - limit) / demand, else 0
//! ```
//!
//! All flows see one loss rate wherever they are, so it is the fairest of the published three. Demand is
//! measured on arrival, before drops. Nothing is added to the law; `docs/fleet-design.md` discusses why a
//! copy of it was reported to swing.
//!
//! In the kernel a packet is dropped by [`Grd::threshold`], of 32 random bits: `bpf/common/sample.h`.

use crate::{
    units::Rate,
    verdict::{DropReason, Verdict},
};

/// A limiter of GRD. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grd {
    limit: Rate,
    probability: f64,
}

impl Grd {
    /// A limiter that knows of no demand.
    #[must_use]
    pub fn new(limit: Rate) -> Self {
        Self { limit, probability: 0.0 }
    }

    /// Sets the probability for `demand_bit_s`, that of all limiters together, and returns it.
    pub fn set_demand(&mut self, demand_bit_s: f64) -> f64 {
        let limit = self.limit.bit_s() as f64;
        let excess = demand_bit_s > limit;
        self.probability = if excess { 1.0 - limit / demand_bit_s } else { 0.0 };
        self.probability
    }

    /// The probability with which a packet is dropped.
    #[must_use]
    pub fn probability(&self) -> f64 {
        self.probability
    }

    /// The probability in units of 2^-32.
    #[must_use]
    pub fn threshold(&self) -> u32 {
        threshold(self.probability)
    }

    /// Passes or drops a packet; `random` is 32 uniform bits, fresh for each.
    #[must_use]
    pub fn on_packet(&self, random: u32) -> Verdict {
        if random < self.threshold() { Verdict::Drop(DropReason::Early) } else { Verdict::Pass }
    }
}

/// A probability in units of 2^-32, rounded. Below 0 and NaN are 0; 1 is all but one of 2^32.
#[must_use]
pub fn threshold(probability: f64) -> u32 {
    // `as` saturates, and converts NaN to 0.
    (probability * 4_294_967_296.0 + 0.5) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lets_the_limit_pass() {
        let mut grd = Grd::new(Rate::from_bit_s(10_000_000).unwrap());
        assert_eq!(grd.set_demand(9e6), 0.0);
        assert!(grd.on_packet(0).passes());
        assert!((grd.set_demand(40e6) - 0.75).abs() < 1e-12);
        assert!(!grd.on_packet(u32::MAX / 4 * 3 - 9).passes());
        assert!(grd.on_packet(u32::MAX / 4 * 3 + 9).passes());
        assert_eq!(grd.set_demand(f64::NAN), 0.0);
        let thresholds = [0.0, 0.25, 1.0, 2.0, -1.0, f64::NAN].map(threshold);
        assert_eq!(thresholds, [0, 1 << 30, u32::MAX, u32::MAX, 0, 0]);
    }
}
