//! Which flows come and go, and when.

use std::time::Duration;

use super::case;
use crate::{
    report::Case,
    systems::System,
    tools::flows::{FlowPlan, Want},
};

const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1000 * MBIT;
/// What the meter counts beyond the flows: their start, and what they left.
const MARGIN: Duration = Duration::from_millis(700);
const FINE: Duration = Duration::from_millis(1);
/// With many flows each sends seldom, and all together have many bins.
const COARSE: Duration = Duration::from_millis(10);
const MANY: usize = 20;
/// Round trips of the paths that are mixed.
const RTTS: [Duration; 4] = [
    Duration::from_micros(100),
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(50),
];
/// Of a path without a link: not more than this.
const NEAR: Duration = Duration::from_micros(100);

const PACE: &[System] = &[System::Pace];
const BOTH: &[System] = &[System::Pace, System::Htb];
const ALL: &[System] = &[System::Pace, System::Htb, System::Nrm];

/// What happens under one limit.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) limit_bit_s: u64,
    pub(super) cc: &'static str,
    pub(super) flows: Vec<FlowPlan>,
    /// Of the links, one a receiver; flows go to the receivers in turn. None: no link, one receiver.
    pub(super) rtts: Vec<Duration>,
    pub(super) systems: &'static [System],
    pub(super) bin: Duration,
    /// Greedy flows join and leave one by one, so that each can be seen to settle.
    pub(super) changes: bool,
}

impl Scenario {
    fn new(name: &'static str, limit_bit_s: u64, flows: Vec<FlowPlan>) -> Scenario {
        let bin = if flows.len() > MANY { COARSE } else { FINE };
        Scenario {
            name,
            limit_bit_s,
            cc: "cubic",
            flows,
            rtts: Vec::new(),
            systems: PACE,
            bin,
            changes: false,
        }
    }

    pub(super) fn case(&self) -> Case {
        case(self)
    }

    pub(super) fn bins(&self) -> u32 {
        let end = self.flows.iter().map(|flow| flow.to).max().unwrap_or_default();
        // Threads of many flows take a while to start.
        let margin = MARGIN + Duration::from_millis(self.flows.len() as u64);
        u32::try_from((end + margin).as_nanos() / self.bin.as_nanos()).unwrap_or(u32::MAX)
    }

    pub(super) fn rtt_of(&self, flow: usize) -> Duration {
        match self.rtts.len() {
            0 => NEAR,
            paths => self.rtts[flow % paths],
        }
    }

    /// As figures name a flow.
    pub(super) fn flow_name(&self, flow: usize) -> String {
        let number = flow + 1;
        match (self.rtts.is_empty(), self.flows[flow].want) {
            (false, _) => format!("{number}, {:?}", self.rtt_of(flow)),
            (true, Want::Greedy) => format!("{number}"),
            (true, Want::Rate(bit_s) | Want::Flood(bit_s)) => {
                format!("{number}, {} Mbit/s", bit_s / MBIT)
            }
            (true, Want::Datagrams(each_second)) => {
                format!("{number}, {each_second} datagrams a second")
            }
            (true, Want::Web) => format!("{number}, on-off"),
        }
    }
}

fn plan(from_ms: u64, to_ms: u64, want: Want) -> FlowPlan {
    FlowPlan { from: Duration::from_millis(from_ms), to: Duration::from_millis(to_ms), want }
}

/// One flow after the other joins; then one after the other leaves, the first first.
fn staircase(limit_bit_s: u64, flows: u64, step_ms: u64) -> Scenario {
    let flow = |index| plan(index * step_ms, (flows + index) * step_ms, Want::Greedy);
    let flows = (0..flows).map(flow).collect();
    Scenario { systems: BOTH, changes: true, ..Scenario::new("staircase", limit_bit_s, flows) }
}

/// A small flow, and one that starts later, beside three greedy ones.
fn small(limit_bit_s: u64, ms: u64) -> Scenario {
    let mut flows = vec![plan(0, ms, Want::Greedy); 3];
    flows.push(plan(0, ms, Want::Rate(limit_bit_s / 20)));
    flows.push(plan(ms / 2, ms, Want::Rate(limit_bit_s / 10)));
    Scenario::new("small flows", limit_bit_s, flows)
}

/// Flows over paths of different length, the longest last.
fn mixed_rtts(limit_bit_s: u64, step_ms: u64, ms: u64) -> Scenario {
    let flow = |index: usize| plan(index as u64 * step_ms, ms, Want::Greedy);
    let flows = (0..RTTS.len()).map(flow).collect();
    let rtts = RTTS.to_vec();
    Scenario { rtts, changes: true, ..Scenario::new("mixed round trips", limit_bit_s, flows) }
}

/// On-off flows beside two greedy ones.
fn web(limit_bit_s: u64, flows: usize, ms: u64) -> Scenario {
    let mut all = vec![plan(0, ms, Want::Greedy); 2];
    all.extend(vec![plan(0, ms, Want::Web); flows]);
    Scenario::new("on-off", limit_bit_s, all)
}

/// So many equal flows.
fn sockets(limit_bit_s: u64, flows: usize, ms: u64) -> Scenario {
    Scenario::new("sockets", limit_bit_s, vec![plan(0, ms, Want::Greedy); flows])
}

/// What an experiment runs.
pub(super) fn all(quick: bool) -> Vec<Scenario> {
    if quick {
        return vec![
            staircase(GBIT, 2, 1000),
            mixed_rtts(200 * MBIT, 600, 3200),
            small(GBIT, 1500),
            web(GBIT, 8, 1500),
            sockets(GBIT, 100, 2200),
        ];
    }
    let mut all = vec![
        Scenario { systems: ALL, ..staircase(GBIT, 5, 1000) },
        Scenario { cc: "bbr", ..staircase(GBIT, 5, 1000) },
        staircase(100 * MBIT, 5, 1000),
        mixed_rtts(200 * MBIT, 1500, 8000),
        small(GBIT, 4000),
        web(GBIT, 8, 4000),
    ];
    all.extend([1, 10, 100, 1000].map(|flows| sockets(GBIT, flows, 4000)));
    all
}

/// Enough to see that it runs.
pub(super) fn tiny() -> Vec<Scenario> {
    vec![
        staircase(200 * MBIT, 2, 300),
        mixed_rtts(50 * MBIT, 150, 700),
        small(200 * MBIT, 1200),
        web(200 * MBIT, 2, 800),
        sockets(200 * MBIT, 30, 2300),
    ]
}

#[cfg(test)]
mod tests {
    use tidegate_instruments::wire_meter::FLOW_BINS_MAX;

    use super::*;

    #[test]
    fn no_scenario_has_more_bins_than_a_meter() {
        for scenario in all(true).into_iter().chain(all(false)).chain(tiny()) {
            let bins = u64::from(scenario.bins()) * scenario.flows.len() as u64;
            assert!(bins <= FLOW_BINS_MAX, "{}: {bins}", scenario.name);
        }
    }

    #[test]
    fn the_quick_form_is_quick() {
        let time = |scenario: &Scenario| {
            let end = scenario.flows.iter().map(|flow| flow.to).max().unwrap_or_default();
            end * scenario.systems.len() as u32
        };
        let sum: Duration = all(true).iter().map(time).sum();
        assert!(sum <= Duration::from_secs(17), "{sum:?} of traffic");
    }
}
