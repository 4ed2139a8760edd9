//! What a limit did to a command: as data, and in words.

use serde::{Deserialize, Serialize};
use tidegate_core::Rate;

use crate::{
    figures::{rate, size, time},
    status::LimitStatus,
};

/// What a limit did to a command.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// As returned to the shell.
    pub exit_code: u8,
    /// How long the command ran.
    pub elapsed_ns: u64,
    /// Settings and counters at the end; `None` if they could not be read.
    #[serde(flatten)]
    pub limit: Option<LimitStatus>,
}

/// A summary as it is shown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// For people.
    pub lines: Vec<String>,
    /// One object.
    pub json: String,
}

impl Summary {
    pub fn report(&self) -> Report {
        let json = serde_json::to_string(self).unwrap_or_default();
        Report { lines: self.lines(), json }
    }

    fn lines(&self) -> Vec<String> {
        let elapsed = i64::try_from(self.elapsed_ns).unwrap_or(i64::MAX);
        let directions = self.limit.iter().flat_map(LimitStatus::directions);
        let lines = directions.map(|(name, direction)| {
            let counts = &direction.counters;
            let (packets, bytes) = counts.charged();
            let bits = u128::from(bytes) * 8 * 1_000_000_000 / u128::from(self.elapsed_ns.max(1));
            let limit = Rate::from_bit_s(direction.rate_bit_s).map(|rate| rate.to_string());
            let exempt = match counts.packets_of("exempt") {
                0 => String::new(),
                n => format!("; {n} exempt (see --loopback and --exempt)"),
            };
            let at_risk = direction.at_risk.and_then(|at_risk| at_risk.words());
            let at_risk =
                at_risk.map_or_else(String::new, |words| format!("; requests at risk: {words}"));
            format!(
                "{name} {}: {} in {packets} packets over {} = {}; marked {}, slowed {}, dropped \
                 {}{at_risk}{exempt}",
                limit.unwrap_or_default(),
                size(bytes),
                time(elapsed),
                rate(u64::try_from(bits).unwrap_or(u64::MAX)),
                counts.packets_of("mark"),
                counts.packets_of("slow"),
                counts.dropped().0,
            )
        });
        lines.collect()
    }
}
