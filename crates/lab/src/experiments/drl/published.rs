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

/// Table 1: a figure for `ctb`, `grd` and `fps`, in this order.
fn of_three(system: &str, figures: [f64; 3]) -> Option<f64> {
    let at = ["ctb", "grd", "fps"].iter().position(|name| *name == system)?;
    Some(figures[at])
}

/// Table 1: what bulk flows and web traffic had, in bit/s, and Jain's index of the bulk flows.
pub(super) fn table_1(system: &str) -> Option<(f64, f64, f64)> {
    let bulk = of_three(system, [6900.90e3, 7257.87e3, 6989.76e3])?;
    let web = of_three(system, [1796.06e3, 1974.35e3, 2090.25e3])?;
    Some((bulk, web, of_three(system, [0.971, 0.997, 0.962])?))
}

/// Table 1: the sizes of things, in bytes, from which a class of them begins.
pub(super) const SIZES: [u64; 4] = [0, 5_000, 50_000, 500_000];

/// Table 1: the harmonic mean of the rates of things of a class, in bit/s.
pub(super) fn table_1_class(system: &str, class: usize) -> Option<f64> {
    const KBIT_S: [[f64; 3]; 4] = [
        [28.17, 25.84, 25.71],
        [276.18, 342.96, 335.80],
        [472.09, 612.08, 571.40],
        [695.40, 751.98, 765.26],
    ];
    of_three(system, *KBIT_S.get(class)?).map(|kbit_s| kbit_s * 1e3)
}

/// Table 2: what passed in all, and what a flow over 10 ms and one over 100 ms had, in bit/s.
pub(super) fn table_2(system: &str) -> Option<(f64, f64, f64)> {
    let total = of_three(system, [10.57e6, 10.63e6, 10.43e6])?;
    let short = of_three(system, [1.41e6, 1.35e6, 0.92e6])?;
    Some((total, short, of_three(system, [0.10e6, 0.16e6, 0.57e6])?))
}
