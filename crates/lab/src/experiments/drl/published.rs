//! Figures of *Cloud Control with Distributed Rate Limiting* (Raghavan et al., SIGCOMM 2007), read off its
//! plots, which is exact to about 0.5 % of an axis.

use std::time::Duration;

/// Figure 8 at so many limiters: what was forwarded of 50 Mbit/s, in bit/s, and Jain's index.
pub(super) fn figure_8(system: &str, limiters: usize) -> Option<(f64, f64)> {
    let at = [7, 70, 490].iter().position(|count| *count == limiters)?;
    let (kbit_s, jain) = match system {
        "ctb" => ([42_604.0, 46_787.0, 48_149.0], [0.969, 0.976, 0.826]),
        "fps-sum, 1 peer" => ([42_119.0, 46_865.0, 58_658.0], [0.919, 0.967, 0.810]),
        "fps-sum, 3 peers" => ([43_325.0, 46_492.0, 50_110.0], [0.906, 0.970, 0.775]),
        "fps-sum, 7 peers" => ([43_385.0, 46_605.0, 46_422.0], [0.904, 0.972, 0.808]),
        _ => return None,
    };
    Some((kbit_s[at] * 1e3, jain[at]))
}

/// Figure 5: the median of Jain's index over ten runs.
pub(super) fn figure_5(system: &str) -> Option<f64> {
    let medians = [("ctb", 0.884), ("gtb", 0.812), ("grd", 0.998), ("fps", 0.907)];
    medians.into_iter().find(|(name, _)| *name == system).map(|(_, jain)| jain)
}

/// How long a new flow takes to its share with FPS.
pub(super) const NEW_FLOW: Duration = Duration::from_secs(8);
