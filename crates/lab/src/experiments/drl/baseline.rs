//! The baseline of Cloud Control, and who limits in it: two limiters, three flows and seven, 10 Mbit/s, 40
//! ms.

use std::{fmt, time::Duration};

use tidegate_sim::world::{Scheme, WorldOptions};

use super::{
    daemons::{At, Daemons, Plan},
    fleet::{self, Flow},
    simulation::nanos,
};
use crate::{context::Context, report::Case, testbed::Sites};

/// The limit of all together.
pub(super) const LIMIT_BIT_S: u64 = 10_000_000;
/// The published bucket.
pub(super) const BURST_BYTES: u64 = 75_000;
pub(super) const FLOWS: [usize; 2] = [3, 7];
/// Where a case was run: daemons in namespaces, and virtual time.
pub(super) const KERNEL: &str = "namespaces";
pub(super) const VIRTUAL: &str = "simulation";

/// One who limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Setup {
    pub(super) name: &'static str,
    pub(super) algorithm: Option<&'static str>,
    at: At,
    interval: Duration,
    pub(super) scheme: Scheme,
}

const fn published(name: &'static str, scheme: Scheme) -> Setup {
    let interval = Duration::from_millis(50);
    Setup { name, algorithm: Some(name), at: At::Router, interval, scheme }
}

/// How often `share` asks.
const ASKS: Duration = Duration::from_millis(100);

const FPS_SHAPED: Setup = published("fps", Scheme::FpsShaped);
const SHARE: Setup = Setup { interval: ASKS, ..published("share", Scheme::Share) };

pub(super) const SETUPS: [Setup; 8] = [
    Setup { algorithm: None, ..published("ctb", Scheme::Ctb) },
    published("gtb", Scheme::Gtb),
    published("grd", Scheme::Grd),
    published("fps", Scheme::Fps),
    Setup { name: "fps, spring", at: At::Windows, ..FPS_SHAPED },
    SHARE,
    Setup { name: "share, spring", at: At::Windows, ..SHARE },
    Setup { name: "share, pace", at: At::Sockets, ..SHARE },
];

/// Those of the published tables, and ours.
pub(super) fn of_tables() -> Vec<Setup> {
    let wanted = ["ctb", "grd", "fps", "share", "share, spring"];
    SETUPS.into_iter().filter(|setup| wanted.contains(&setup.name)).collect()
}

/// Those of `setups` that are run with daemons, in namespaces. The tiny form of an experiment only shows that
/// it runs. It has a plain limit, one published algorithm and ours; that of `drl-fig3` has all.
pub(super) fn with_daemons(setups: &[Setup], tiny: bool) -> Vec<Setup> {
    let few = |setup: &&Setup| !tiny || ["ctb", "fps", "share"].contains(&setup.name);
    setups.iter().filter(few).copied().collect()
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl Setup {
    /// Whether more is asked of it than what was published.
    pub(super) fn is_ours(self) -> bool {
        matches!(self.algorithm, Some("fps" | "share"))
    }

    pub(super) fn plan(self, hosts: usize) -> Plan {
        Plan {
            algorithm: self.algorithm,
            at: self.at,
            limit_bit_s: LIMIT_BIT_S,
            burst_bytes: self.burst_bytes(hosts),
            interval: self.interval,
            hosts,
        }
    }

    /// The published bucket; for `share`, whose limits are to hold together, all buckets together are as
    /// deep.
    fn burst_bytes(self, hosts: usize) -> u64 {
        match self.algorithm {
            Some("share") => BURST_BYTES / hosts.max(1) as u64,
            _ => BURST_BYTES,
        }
    }

    /// The site of a limiter: CTB has all at the first.
    pub(super) fn site_of(self, limiter: usize) -> usize {
        if self.algorithm.is_some() { limiter } else { 0 }
    }
}

/// The baseline in simulation.
pub(super) fn world(setup: Setup, lasts: Duration, run: u32) -> WorldOptions {
    WorldOptions::two_limiters(u64::from(run), setup.scheme, nanos(lasts), FLOWS)
}

/// The baseline with daemons.
pub(super) fn measure(
    ctx: &Context,
    sites: &Sites,
    setup: Setup,
    lasts: Duration,
) -> anyhow::Result<fleet::Ran> {
    let mut daemons = Daemons::start(ctx, sites, setup.plan(sites.count()), sites.count())?;
    let flow =
        |limiter| Flow { site: setup.site_of(limiter), limiter, from: Duration::ZERO, to: lasts };
    let counts = FLOWS.iter().enumerate();
    let plan: Vec<Flow> =
        counts.flat_map(|(limiter, count)| (0..*count).map(move |_| flow(limiter))).collect();
    fleet::run(sites, &mut daemons, &plan, LIMIT_BIT_S, |_| Ok(()))
}

pub(super) fn case(world: &str) -> Case {
    Case::new().with("limit_bit_s", LIMIT_BIT_S).with("in", world)
}
