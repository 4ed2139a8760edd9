//! Clocks of hosts: they start anywhere and run a little fast or slow.

use tidegate_core::Nanos;

use crate::random::Random;

/// A host's clock.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: u64,
    /// What it counts in a second, in nanoseconds.
    per_second: u64,
}

impl Clock {
    /// A clock that runs wrong by at most `error_ppm` either way.
    pub fn new(random: &mut Random, error_ppm: u32) -> Self {
        let slow = 1e9 / (1.0 + f64::from(error_ppm) / 1e6);
        let fast = 1e9 * (1.0 + f64::from(error_ppm) / 1e6);
        let per_second = slow + (fast - slow) * random.unit();
        Self { start: random.below(1 << 50), per_second: per_second as u64 }
    }

    /// What it shows at a time of the simulation.
    pub fn reads(&self, at: Nanos) -> Nanos {
        let run = u128::from(at.0) * u128::from(self.per_second) / 1_000_000_000;
        Nanos(self.start + run as u64)
    }

    /// When, in the simulation, it will show `reading` or more.
    pub fn shows(&self, reading: Nanos) -> Nanos {
        let run = u128::from(reading.0.saturating_sub(self.start)) * 1_000_000_000;
        Nanos(u64::try_from(run.div_ceil(u128::from(self.per_second))).unwrap_or(u64::MAX))
    }
}
