//! `pace-dynamics`: how fast a limit's flows find their shares when they come and go, and how equal:
//! flows that join and leave every second, small flows beside greedy ones, paths of several round trips,
//! on-off traffic, and up to a thousand sockets.
//!
//! Each flow has a source port of its own, and a meter counts its bytes in fine bins where they have passed
//! the limit: on the receiver's device, or on that of the router before the links.

mod claims;
mod scenario;
mod settling;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use tidegate_instruments::wire_meter::{FlowPorts, WireMeter};

use super::wire::Wire;
use crate::{
    chart::{BarsOf, Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    systems::{LimitCase, System},
    testbed::{Child, Family, Testbed, TestbedOptions, Topology},
    tools::{
        flows::{self, FlowTimes, FlowsArgs, Want},
        rpc,
    },
};
use scenario::Scenario;
use settling::{Flow, Flows, Settling};

const PORT: u16 = 7000;
const FIRST_PORT: u16 = 20_000;
/// What the figures show.
const SHOWN: Duration = Duration::from_millis(20);
const SECOND: Duration = Duration::from_secs(1);
/// All flows run and TCP's start is over.
const SETTLED: Duration = Duration::from_millis(500);
/// Flows of a figure; of more, one would see none.
const SHOWN_FLOWS: usize = 10;

const USED: &str = "used_percent";
const MOST: &str = "max_1s_percent";
const JAIN: &str = "least_jain_1s";
const JOIN: &str = "slowest_join_ms";
const LEAVE: &str = "slowest_leave_ms";
const DEMAND: &str = "small_flow_percent";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct PaceDynamics {
    /// For tests: short scenarios, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl PaceDynamics {
    /// Short forms of some scenarios; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> PaceDynamics {
        PaceDynamics { tiny: Some(lab_binary) }
    }
}

impl Experiment for PaceDynamics {
    fn name(&self) -> &'static str {
        "pace-dynamics"
    }

    fn summary(&self) -> &'static str {
        "Flows that come and go under one limit: how soon each has its share, and how equal the shares are"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        ctx.note(
            "Rates are on the wire behind the limit, whole frames counted, flow by flow. A newcomer has its \
             share from when on its mean over 20 ms is 90 % of an equal part of what small flows leave of \
             the limit; a leaver's share is used again from when on the others have 90 % of it besides what \
             they had, both as means over 20 ms. Flows end with a reset. `least jain 1s` is of the worst \
             second, of flows that ran for a second before it. Small flows and on-off traffic are not in it.",
        );
        let scenarios = match self.tiny {
            Some(_) => scenario::tiny(),
            None => scenario::all(ctx.quick),
        };
        let mut settlings = Vec::new();
        for scenario in &scenarios {
            let testbed = self.testbed(ctx, scenario)?;
            ctx.step(scenario.name);
            let case = scenario.case();
            ctx.alternate(scenario.systems, ctx.repeats, |ctx, &system, run| {
                let measured = measure(ctx, &testbed, scenario, system)?;
                measured.record(ctx, scenario, system, run);
                if run == 1 {
                    measured.figure(ctx, scenario, system);
                }
                let Flows { flows, .. } = &measured.flows;
                if scenario.changes && system == System::Pace && !flows.is_empty() {
                    let (joins, leaves) = (measured.flows.joins(), measured.flows.leaves());
                    settlings.push((case.clone(), joins, leaves));
                }
                Ok(())
            })?;
        }
        for (file, title, metric) in [
            ("jain", "Jain's index of the worst second, greedy flows", JAIN),
            ("join", "Time until the slowest newcomer had its share", JOIN),
        ] {
            ctx.bars(file, BarsOf { title, metric, points: None });
        }
        claims::record(ctx, &settlings);
        Ok(())
    }
}

impl PaceDynamics {
    fn testbed(&self, ctx: &Context, scenario: &Scenario) -> anyhow::Result<Testbed> {
        let links: Vec<_> = scenario.rtts.iter().map(|rtt| ctx.link(*rtt)).collect();
        let topology = match u8::try_from(links.len())? {
            0 => Topology::Pair,
            count => Topology::Spread(count),
        };
        let lab_binary = self.tiny.clone();
        Testbed::new(TestbedOptions { links, lab_binary, ..TestbedOptions::new(topology) })
    }
}

/// What a run showed.
struct Measured {
    flows: Flows,
    wire: Wire,
}

fn measure(
    ctx: &Context,
    testbed: &Testbed,
    scenario: &Scenario,
    system: System,
) -> anyhow::Result<Measured> {
    let receivers = 0..testbed.receiver_count();
    let at = |index| SocketAddr::new(testbed.addr(index, Family::V4), PORT);
    let servers = receivers
        .clone()
        .map(|index| rpc::start_server(testbed, testbed.receiver(index), at(index)));
    let servers: Vec<Child> = servers.collect::<anyhow::Result<_>>()?;
    let (netns, dev) = match testbed.router() {
        Some(router) => (router, testbed.router_dev()),
        None => (testbed.receiver(0), testbed.receiver_dev(0)),
    };
    let args = FlowsArgs {
        servers: receivers.map(at).collect(),
        first_port: FIRST_PORT,
        cc: scenario.cc.to_owned(),
        seed: ctx.links.seed,
        flows: scenario.flows.clone(),
    };
    let applied = system.apply(ctx, testbed, &LimitCase::egress(scenario.limit_bit_s))?;
    let ports = FlowPorts { first: FIRST_PORT, count: u16::try_from(args.flows.len())? };
    let mut meter = WireMeter::attach_flows(netns, dev, scenario.bins(), scenario.bin, ports)?;
    meter.start()?;
    let client = flows::start(testbed, applied.site(testbed.sender()), &args)?;
    let times = flows::finish(client, &args)?;
    // Counts are read before the system goes, which takes time; the flows have ended.
    let (bytes, total) = (meter.flow_bins()?, meter.bins()?);
    applied.finish()?;
    drop(servers);

    let bin_of = |ns: u64| {
        (ns.saturating_sub(meter.started_ns()) / scenario.bin.as_nanos().max(1) as u64) as usize
    };
    let flow = |(index, (bytes, times)): (usize, (Vec<u64>, FlowTimes))| Flow {
        bytes,
        began: bin_of(times.began_ns),
        ended: bin_of(times.ended_ns),
        greedy: scenario.flows[index].want == Want::Greedy,
        rtt: scenario.rtt_of(index),
    };
    let flows = bytes.into_iter().zip(times).enumerate().map(flow).collect();
    let limit_bit_s = scenario.limit_bit_s as f64;
    let total = total.iter().map(|bin| bin.bytes).collect();
    Ok(Measured {
        flows: Flows { flows, bin: scenario.bin, limit_bit_s },
        wire: Wire::new(total, scenario.bin),
    })
}

impl Measured {
    fn record(&self, ctx: &mut Context, scenario: &Scenario, system: System, run: u32) {
        let percent = |bit_s: f64| bit_s / scenario.limit_bit_s as f64 * 100.0;
        let mut values = Vec::new();
        let used = match scenario.changes {
            // Some always run.
            true => self.wire.mean_bit_s(SETTLED, Duration::MAX),
            false => self.flows.all_bit_s(SETTLED),
        };
        values.extend(used.map(|rate| (USED, percent(rate))));
        values.extend(self.wire.peak(SECOND).map(|peak| (MOST, percent(peak.bit_s))));
        values.extend(self.flows.least_jain().map(|index| (JAIN, index)));
        if scenario.changes {
            let slowest = |all: Vec<Settling>| {
                let took = all.iter().filter_map(|one| one.took);
                Some(took.max()?.as_secs_f64() * 1e3)
            };
            values.extend(slowest(self.flows.joins()).map(|ms| (JOIN, ms)));
            values.extend(slowest(self.flows.leaves()).map(|ms| (LEAVE, ms)));
        }
        for (flow, plan) in self.flows.flows.iter().zip(&scenario.flows) {
            if let Want::Rate(bit_s) = plan.want {
                let got = flow.bit_s(flow.began, flow.ended, scenario.bin);
                values.push((DEMAND, got / bit_s as f64 * 100.0));
            }
        }
        let mut record = ctx.record(system, &scenario.case(), run);
        for (metric, value) in values {
            record = record.value(metric, value);
        }
    }

    /// The rates of the flows over time.
    fn figure(&self, ctx: &mut Context, scenario: &Scenario, system: System) {
        let Flows { flows, bin, .. } = &self.flows;
        let per_point = (SHOWN.as_nanos() / bin.as_nanos()).max(1) as usize;
        let series = |name: String, from: usize, to: usize, rate: &dyn Fn(usize, usize) -> f64| {
            let starts = (from..to.saturating_sub(per_point)).step_by(per_point);
            let point = |at: usize| {
                let middle = bin.as_secs_f64() * (at as f64 + per_point as f64 / 2.0);
                (middle, rate(at, at + per_point))
            };
            Series::new(name, starts.map(point).collect())
        };
        let begun = flows.iter().map(|flow| flow.began).min().unwrap_or(0);
        let ended = flows.iter().map(|flow| flow.ended).max().unwrap_or(0);
        let shown = flows.iter().take(SHOWN_FLOWS).enumerate();
        let mut lines: Vec<Series> = shown
            .map(|(index, flow)| {
                let name = scenario.flow_name(index);
                series(name, flow.began, flow.ended, &|from, to| flow.bit_s(from, to, *bin))
            })
            .filter(|series| !series.points.is_empty())
            .collect();
        let all = |from, to| flows.iter().map(|flow| flow.bit_s(from, to, *bin)).sum::<f64>();
        lines.push(series("all".to_owned(), begun, ended, &all));
        for series in &mut lines {
            for point in &mut series.points {
                point.0 -= begun as f64 * bin.as_secs_f64();
            }
        }
        let of = if flows.len() > SHOWN_FLOWS {
            format!(", {SHOWN_FLOWS} of {} flows", flows.len())
        } else {
            String::new()
        };
        let lines = Lines {
            title: format!("{}, {system}: rates on the wire in bins of 20 ms{of}", scenario.name),
            x: "time_s".to_owned(),
            y: "wire_bit_s".to_owned(),
            logarithmic: false,
            limit: Some(scenario.limit_bit_s as f64),
            series: lines,
        };
        let name = scenario.name.replace(' ', "-");
        ctx.figure(&format!("{name}-{}-{system}", flows.len()), lines);
    }
}

/// The case of rows of a scenario.
fn case(scenario: &Scenario) -> Case {
    Case::new()
        .with("scenario", scenario.name)
        .with("limit_bit_s", scenario.limit_bit_s)
        .with("flows", scenario.flows.len())
}
