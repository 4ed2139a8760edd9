//! `hierarchy`: HTB's class tree beside Tidegate's tree of limits: who has which part, how soon a class that
//! comes back has what it is guaranteed, and what a packet waits meanwhile.
//!
//! The leaves go through the same steps under each system (`tree`). Each class sends to an address of its
//! own, by which HTB knows it, from a cgroup of its own, by which Tidegate does, and from ports of its own,
//! by which the meter on the receiver's device does.

mod claims;
mod force;
mod idle;
mod tree;

use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use tidegate_instruments::wire_meter::{FlowPorts, WireMeter};

use super::wire::Wire;
use crate::{
    chart::{BarsOf, Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    systems::System,
    testbed::{Testbed, TestbedOptions, Topology, wait::pass_time},
    tools::{
        flows::{self, FlowPlan, FlowsArgs},
        probe::{self, ProbeReport},
        rpc,
    },
};
use force::Force;
use tree::{PHASES, Phase, Sends, Tree, sends};

const PORT: u16 = 7000;
const PROBE_PORT: u16 = 7001;
const FIRST_PORT: u16 = 20_000;
/// Of one class.
const PORTS: u16 = 16;
const BIN: Duration = Duration::from_millis(5);
/// Bins over which a class that is back is looked at, and those of the figure.
const BACK_BINS: usize = 4;
/// For how long it must have that.
const KEPT: Duration = Duration::from_millis(200);
const SHOWN: Duration = Duration::from_millis(50);
const SECOND: Duration = Duration::from_secs(1);
/// What a step needs to settle, and what the flows of the next one may be early.
const SETTLED: Duration = Duration::from_millis(400);
const EARLY: Duration = Duration::from_millis(40);
/// What waits longest, the queue of an HTB class at its guarantee, waits less.
const DRAIN: Duration = Duration::from_millis(400);
/// Beyond the last step.
const MARGIN: Duration = Duration::from_secs(2);
/// Of what is guaranteed.
const BACK: f64 = 0.9;

const SYSTEMS: [System; 3] = [System::Pace, System::Nrm, System::Htb];
/// The name under which what the rule says is recorded.
const RULE: &str = "rule";

const CLASS: &str = "class_bit_s";
const GUARANTEE: &str = "of_guarantee_percent";
const SPARE: &str = "spare_error_percent";
const BACK_MS: &str = "back_ms";
const USED: &str = "used_percent";
const MOST: &str = "max_1s_percent";
const P50: &str = "rtt_p50_us";
const P99: &str = "rtt_p99_us";
const DROPS: &str = "drops";
const LOST: &str = "probes_lost_percent";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Hierarchy {
    /// For tests: short steps, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl Hierarchy {
    /// The steps of the quick form, shorter; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> Hierarchy {
        Hierarchy { tiny: Some(lab_binary) }
    }
}

impl Experiment for Hierarchy {
    fn name(&self) -> &'static str {
        "hierarchy"
    }

    fn summary(&self) -> &'static str {
        "Classes with guarantees, weights and a ceiling inside one limit: who has which part, how soon a \
         class that comes back has its guarantee, and the delay, beside HTB's class tree"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 3 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let tree = Tree::new(ctx.quick);
        let step = match (&self.tiny, ctx.quick) {
            (Some(_), _) => Duration::from_millis(600),
            (None, true) => Duration::from_secs(1),
            (None, false) => Duration::from_secs(4),
        };
        ctx.note(
            "Rates are on the wire, whole frames counted, from 0.4 s after the begin of a step to its end. \
             `rule` is what guarantee, weight and ceiling give of the whole root. `spare error` is how far \
             what a class has beyond its guarantee is from its weight's part of what all had beyond theirs. \
             `back` is from a class's first connection to the end of the first 20 ms over which it had 90 % \
             of its guarantee and from which on it had as much over 200 ms. `used` is of what the classes \
             may have, and the probe's datagrams are in it; the probe is in bulk while bulk is alone, and \
             otherwise in web. `drops` are of the whole run, the flood's among them. HTB's quantum is 150 \
             bytes for each unit of weight, and its queues are of 1000 packets. Last, in a tree of its \
             own, one class is greedy beside many that send ten datagrams of 100 bytes a second each.",
        );
        let lab_binary = self.tiny.clone();
        let testbed =
            Testbed::new(TestbedOptions { lab_binary, ..TestbedOptions::new(Topology::Pair) })?;
        force::add_addresses(&testbed, tree.classes.len().max(idle::CLASSES + 1))?;
        let parts = |phase: usize| tree.parts(tree.root_bit_s as f64, &active(&tree, phase));
        for (at, phase) in PHASES.iter().enumerate() {
            for leaf in tree.leaves() {
                let case = class_case(&tree, phase, leaf);
                ctx.record(RULE, &case, 1).value(CLASS, parts(at)[leaf]);
            }
        }
        ctx.alternate(&SYSTEMS, ctx.repeats, |ctx, &system, run| {
            let measured = measure(ctx, &testbed, &tree, system, step)?;
            measured.record(ctx, &tree, system, run);
            if run == 1 {
                measured.figure(ctx, &tree, system);
            }
            idle::measure(ctx, &testbed, system, run, step * 3)
        })?;
        for (file, title, metric, points) in [
            ("rtt", "Round trip inside a class, p99, and median (diamonds)", P99, Some(P50)),
            ("back", "Time until a class that is back has 90 % of its guarantee", BACK_MS, None),
        ] {
            ctx.bars(file, BarsOf { title, metric, points });
        }
        claims::record(ctx, &tree);
        Ok(())
    }
}

/// The leaves, by their place in the tree, that send in a step.
fn active(tree: &Tree, phase: usize) -> Vec<usize> {
    let (all, step) = (sends(tree.root_bit_s), phase as u32);
    let sends = |leaf| move |one: &Sends| one.leaf == leaf && one.from <= step && step < one.to;
    let leaves = tree.leaves().into_iter().enumerate();
    leaves.filter(|(leaf, _)| all.iter().any(sends(*leaf))).map(|(_, class)| class).collect()
}

fn phase_case(tree: &Tree, phase: &Phase) -> Case {
    Case::new().with("limit_bit_s", tree.root_bit_s).with("step", phase.name)
}

fn class_case(tree: &Tree, phase: &Phase, class: usize) -> Case {
    phase_case(tree, phase).with("class", tree.classes[class].name.as_str())
}

/// What a run showed.
struct Measured {
    /// By leaf: what it sent in each bin.
    bytes: Vec<Vec<u64>>,
    /// What all sent, and the probe.
    total: Vec<u64>,
    /// By leaf: the bin in which each step's first connection was made, where one was.
    began: Vec<Vec<Option<usize>>>,
    /// By class, the root last, in the whole run.
    drops: Vec<u64>,
    /// By step.
    probes: Vec<ProbeReport>,
    /// The bin of the common start, and how many a step has.
    start: usize,
    step: usize,
}

fn measure(
    ctx: &Context,
    testbed: &Testbed,
    tree: &Tree,
    system: System,
    step: Duration,
) -> anyhow::Result<Measured> {
    let leaves = tree.leaves();
    let any = SocketAddr::from(([0, 0, 0, 0], PORT));
    let to = testbed.receiver(0);
    let _server = rpc::start_server(testbed, to, any)?;
    let echoes = leaves.iter().map(|leaf| {
        // A reply must come from the address that was asked.
        probe::start_server(testbed, to, SocketAddr::new(force::addr(*leaf), PROBE_PORT))
    });
    let _echoes = echoes.collect::<anyhow::Result<Vec<_>>>()?;
    let mut force = Force::apply(ctx, testbed, tree, system)?;

    let steps = PHASES.len() as u32;
    let bins = ((step * steps + MARGIN).as_nanos() / BIN.as_nanos()) as u32;
    let ports = FlowPorts { first: FIRST_PORT, count: PORTS * leaves.len() as u16 };
    let mut meter = WireMeter::attach_flows(to, testbed.receiver_dev(0), bins, BIN, ports)?;
    meter.start()?;
    let all = sends(tree.root_bit_s);
    let plans = leaves.iter().enumerate().map(|(leaf, class)| {
        let own: Vec<Sends> = all.iter().copied().filter(|one| one.leaf == leaf).collect();
        let plan =
            |one: &Sends| FlowPlan { from: step * one.from, to: step * one.to, want: one.want };
        let args = FlowsArgs {
            servers: vec![SocketAddr::new(force::addr(*class), PORT)],
            first_port: FIRST_PORT + PORTS * leaf as u16,
            cc: "cubic".to_owned(),
            seed: ctx.links.seed,
            flows: own.iter().map(plan).collect(),
        };
        (own, args)
    });
    let plans: Vec<(Vec<Sends>, FlowsArgs)> = plans.collect();
    let started = Instant::now();
    let clients = plans.iter().zip(&leaves);
    let clients =
        clients.map(|((_, args), leaf)| flows::start(testbed, force.site(testbed, *leaf), args));
    let clients: Vec<_> = clients.collect::<anyhow::Result<_>>()?;
    let mut probers = Vec::new();
    for (at, phase) in PHASES.iter().enumerate() {
        let due = started + step * at as u32 + SETTLED;
        pass_time(due.saturating_duration_since(Instant::now()))?;
        let class = leaves[phase.probe];
        let server = SocketAddr::new(force::addr(class), PROBE_PORT);
        let mut args = probe::ClientArgs::new(server, step - SETTLED - EARLY);
        args.may_lose_all = true;
        args.drain = DRAIN;
        probers.push((probe::start_client(testbed, force.site(testbed, class), args)?, args));
    }
    let probes = probers.into_iter().map(|(client, args)| probe::finish_client(client, args));
    let probes = probes.collect::<anyhow::Result<Vec<_>>>()?;
    let times =
        clients.into_iter().zip(&plans).map(|(client, (_, args))| flows::finish(client, args));
    let times = times.collect::<anyhow::Result<Vec<_>>>()?;
    let (of_flows, total) = (meter.flow_bins()?, meter.bins()?);
    let drops = force.drops(tree)?;

    let sum = |flows: &[Vec<u64>]| -> Vec<u64> {
        (0..bins as usize).map(|at| flows.iter().map(|flow| flow[at]).sum()).collect()
    };
    let began = |((own, _), times): (&(Vec<Sends>, FlowsArgs), &Vec<flows::FlowTimes>)| {
        let first = |step: usize| {
            let of_step = own.iter().zip(times).filter(|(one, _)| one.from as usize == step);
            of_step.map(|(_, times)| bin_of(&meter, times.began_ns)).min()
        };
        (0..PHASES.len()).map(first).collect()
    };
    let began: Vec<Vec<Option<usize>>> = plans.iter().zip(&times).map(began).collect();
    Ok(Measured {
        bytes: of_flows.chunks(PORTS.into()).map(sum).collect(),
        total: total.iter().map(|bin| bin.bytes).collect(),
        start: began.iter().filter_map(|began| began[0]).max().unwrap_or(0),
        began,
        drops,
        probes,
        step: (step.as_nanos() / BIN.as_nanos()) as usize,
    })
}

/// The mean rate of some bins.
fn bit_s(bytes: &[u64]) -> f64 {
    bytes.iter().sum::<u64>() as f64 * 8.0 / (BIN.as_secs_f64() * bytes.len().max(1) as f64)
}

/// The bin of a time of `CLOCK_MONOTONIC`.
fn bin_of(meter: &WireMeter, ns: u64) -> usize {
    (ns.saturating_sub(meter.started_ns()) / BIN.as_nanos() as u64) as usize
}

fn bins_in(time: Duration) -> usize {
    (time.as_nanos() / BIN.as_nanos()) as usize
}

impl Measured {
    /// The bins of a step in which it has settled.
    fn settled(&self, phase: usize) -> std::ops::Range<usize> {
        let from = self.start + self.step * phase;
        from + bins_in(SETTLED)..from + self.step - bins_in(EARLY)
    }

    /// How long a leaf that connects in a step takes to have what it is guaranteed, and to keep it: a burst
    /// that is followed by silence is not it. None: never in the step.
    fn back(&self, leaf: usize, phase: usize, guarantee_bit_s: u64) -> Option<Duration> {
        let began = self.began[leaf][phase]?;
        let bins = self.bytes[leaf].get(began..began + self.step - bins_in(EARLY))?;
        let has = |bins: &[u64]| bit_s(bins) >= guarantee_bit_s as f64 * BACK;
        let kept = |bins: &[u64]| has(&bins[..BACK_BINS]) && has(bins);
        let at = bins.windows(bins_in(KEPT)).position(kept)?;
        Some(BIN * (at + BACK_BINS) as u32)
    }

    fn record(&self, ctx: &mut Context, tree: &Tree, system: System, run: u32) {
        let leaves = tree.leaves();
        let root = tree.root_bit_s as f64;
        for (at, phase) in PHASES.iter().enumerate() {
            let (settled, active) = (self.settled(at), active(tree, at));
            let rates: Vec<f64> =
                self.bytes.iter().map(|bytes| bit_s(&bytes[settled.clone()])).collect();
            let fair = tree.parts(rates.iter().sum(), &active);
            for (leaf, &class) in leaves.iter().enumerate() {
                let guarantee = tree.classes[class].guarantee_bit_s as f64;
                let mut values = vec![(CLASS, rates[leaf])];
                if active.contains(&class) {
                    values.push((GUARANTEE, rates[leaf] / guarantee * 100.0));
                    let (got, due) = (rates[leaf] - guarantee, fair[class] - guarantee);
                    // Where one is alone there is nobody to share with.
                    if active.len() > 1 {
                        values.push((SPARE, (got / due - 1.0) * 100.0));
                    }
                }
                if phase.back.contains(&leaf) {
                    let took = self.back(leaf, at, tree.classes[class].guarantee_bit_s);
                    // Never: longer than was looked.
                    let took = took.unwrap_or(BIN * self.step as u32);
                    values.push((BACK_MS, took.as_secs_f64() * 1e3));
                }
                let case = class_case(tree, phase, class);
                let record = ctx.record(system, &case, run);
                let _ = values.iter().fold(record, |record, (metric, v)| record.value(metric, *v));
            }
            let may: f64 = {
                let parts = tree.parts(root, &active);
                leaves.iter().map(|leaf| parts[*leaf]).sum()
            };
            let used = bit_s(&self.total[settled]) / may * 100.0;
            let probe = &self.probes[at];
            let case = phase_case(tree, phase);
            let mut record =
                ctx.record(system, &case, run).value(USED, used).value(LOST, probe.lost_percent());
            if probe.received > 0 {
                record = record.value(P50, probe.rtt.p50_us).value(P99, probe.rtt.p99_us);
            }
            let _ = record;
        }
        let whole = Case::new().with("limit_bit_s", tree.root_bit_s);
        let names = tree.classes.iter().map(|class| class.name.as_str()).chain([force::ROOT]);
        for (name, drops) in names.zip(&self.drops) {
            let case = whole.clone().with("class", name);
            ctx.record(system, &case, run).value(DROPS, *drops as f64);
        }
        let wire = Wire::new(self.total.clone(), BIN);
        if let Some(peak) = wire.peak(SECOND) {
            ctx.record(system, &whole, run).value(MOST, peak.bit_s / root * 100.0);
        }
    }

    /// The rates of the classes over time.
    fn figure(&self, ctx: &mut Context, tree: &Tree, system: System) {
        let series = |name: &str, bytes: &[u64]| {
            let shown =
                &bytes[self.start..(self.start + self.step * PHASES.len()).min(bytes.len())];
            let rates: Vec<f64> = shown.chunks_exact(bins_in(SHOWN)).map(bit_s).collect();
            Series::every(name, SHOWN.as_secs_f64(), &rates)
        };
        let leaves = tree.leaves().into_iter().zip(&self.bytes);
        let mut lines: Vec<Series> =
            leaves.map(|(class, bytes)| series(&tree.classes[class].name, bytes)).collect();
        lines.push(series("all", &self.total));
        let lines = Lines {
            title: format!("{system}: rates of the classes on the wire in bins of 50 ms"),
            x: "time_s".to_owned(),
            y: "wire_bit_s".to_owned(),
            logarithmic: false,
            limit: Some(tree.root_bit_s as f64),
            series: lines,
        };
        ctx.figure(&format!("classes-{system}"), lines);
    }
}
