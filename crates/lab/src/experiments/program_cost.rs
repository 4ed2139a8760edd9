//! `program-cost`: what a packet costs in the loaded programs, ours beside NRM as published, on one CPU and
//! on two that contend for one limit.
//!
//! The figure is the kernel's run-time statistics less what the empty program shows, which is the clock.

use std::{ffi::OsStr, os::fd::AsFd, time::Duration};

use anyhow::Context as _;
use tidegate_core::{Direction, Rate, police::Hook};
use tidegate_instruments::cost::{Asked, Program, QueueState, measure};
use tidegate_instruments::cost_on_device::{Policers, cost_on_device};
use tidegate_instruments::paper::{NrmPaper, PaperOptions};
use tidegate_instruments::run_time::{mean_in_traffic, mean_run_time, tcp_frame};
use tidegate_sys::cgroup::Hierarchy;

use crate::chart::BarsOf;
use crate::context::Context;
use crate::experiment::Experiment;
use crate::host::{self, Need};
use crate::report::Case;
use crate::testbed::{
    Cgroup, Child, Family, Site, Store, Testbed, TestbedOptions, Topology, command,
    wait::wait_until,
};
use crate::tools::udp::{self, SourceArgs};

/// The experiment.
pub struct ProgramCost;

const METRIC: &str = "cost_ns";
/// What leaves by a device with so many policers.
const ON_DEVICE: &str = "on_device_ns";
const BY_PREFIX: &str = "one program, by prefix";
const PROGRAMS: &str = "a program each";
/// A thousand cost at most so much of what ten cost, and XDP of what tc does: noise.
const AS_TEN: f64 = 1.1;
/// What comes in by a device, by the hook that meets it.
const AT_TC: &str = "police, in by tc";
const IN_XDP: &str = "police, in by XDP";
/// The published one is none of the loaded programs.
const SYSTEMS: [(&str, Option<Program>); 10] = [
    ("nrm", Some(Program::Nrm)),
    ("pace", Some(Program::Pace)),
    ("nrm-paper", None),
    ("police", Some(Program::Police)),
    (AT_TC, Some(Program::Incoming(Hook::Auto))),
    (IN_XDP, Some(Program::Incoming(Hook::Xdp))),
    ("police-meter", Some(Program::Meter)),
    ("police, random drop", Some(Program::Grouped(Asked::Drop))),
    ("police, flow counted", Some(Program::Grouped(Asked::KnownFlow))),
    ("police, flow not held", Some(Program::Grouped(Asked::NewFlow))),
];
/// In traffic: limits that share programs, and one of `tidegate run`, which has its own.
const IN_TRAFFIC: &str = "in_traffic_ns";
const SHARED: &str = "shared programs";
const OWN: &str = "programs of its own";
/// More than a cgroup sends here, so that the queue is idle.
const FAST: &str = "100gbit";
/// How long a command may take to start.
const START: Duration = Duration::from_secs(60);
const DATAGRAM_BYTES: usize = 1400;
const PERIOD_NS: u64 = 10_000;
/// Nobody listens there.
const DISCARD: u16 = 9;
/// An idle queue and a full frame; the paper's limit is so fast that its queue is idle too.
const FRAME_BYTES: u16 = 1500;
const PAPER_RATE: &str = "100gbit";

impl Experiment for ProgramCost {
    fn name(&self) -> &'static str {
        "program-cost"
    }

    fn summary(&self) -> &'static str {
        "Nanoseconds a packet in the eBPF programs, on one CPU and on two"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let runs = if ctx.quick { 200_000 } else { 2_000_000 };
        let repeats = ctx.repeats;
        for cpus in (1..=host::cores().min(2)).map(|count| (0..count).collect::<Vec<_>>()) {
            ctx.step(format!("{} CPUs", cpus.len()));
            for (name, state) in
                [("idle", QueueState::Idle), ("busy", QueueState::Busy), ("full", QueueState::Full)]
            {
                let case = Case::new().with("cpus", cpus.len()).with("queue", name);
                let names = SYSTEMS.map(|(name, _)| name);
                ctx.alternate(&names, repeats, |ctx, system, run| {
                    let program = SYSTEMS.iter().find(|(name, _)| name == system);
                    let cost = match program.and_then(|(_, program)| *program) {
                        Some(program) => net_cost(program, state, &cpus, runs)?,
                        // Its credit cannot be held below zero: it is measured idle alone.
                        None if state != QueueState::Idle => return Ok(()),
                        None => net(paper(&cpus, runs)?, state, &cpus, runs)?,
                    };
                    ctx.record(system, &case, run).value(METRIC, cost);
                    Ok(())
                })?;
            }
        }
        on_devices(ctx, runs)?;
        in_traffic(ctx, runs / 10)?;
        ctx.note(
            "The kernel's test packet belongs to a socket that is told no share, so `pace` shows what a \
             packet of such a sender costs. In a full queue each run is a call of its own, with a new \
             socket: there `pace` includes the making of that socket's record.",
        );
        ctx.note(
            "What comes in by a device is policed at tc or in XDP. The figures are those of the programs; \
             that XDP comes before the kernel has made a packet, which then need not be made and thrown \
             away, is in none of them.",
        );
        ctx.bars(
            "cost",
            BarsOf { title: "Cost of a packet in the program", metric: METRIC, points: None },
        );
        claims(ctx);
        police_claims(ctx);
        hook_claims(ctx);
        device_claims(ctx);
        Ok(())
    }
}

/// What a full frame costs in a program, without the clock that is part of every figure, in nanoseconds.
pub(super) fn net_cost(
    program: Program,
    state: QueueState,
    cpus: &[usize],
    runs: u32,
) -> anyhow::Result<f64> {
    let cost = measure(program, state, &tcp_frame(FRAME_BYTES), cpus, runs)?;
    net(cost, state, cpus, runs)
}

/// Policers of one device: each for a host, and as many programs.
fn on_devices(ctx: &mut Context, runs: u32) -> anyhow::Result<()> {
    for count in [1, 10, 1000] {
        let case = Case::new().with("policers", count);
        ctx.step(format!("{count} policers on a device"));
        ctx.alternate(&[BY_PREFIX, PROGRAMS], ctx.repeats, |ctx, system, run| {
            let (policers, programs) = match *system {
                BY_PREFIX => (Policers::Hosts(count), 1),
                // They add up; a thousand are not worth the wait.
                _ if count > 10 => return Ok(()),
                _ => (Policers::Programs(count), count),
            };
            let (frame, cpus) = (tcp_frame(FRAME_BYTES), [0]);
            let nothing = measure(Program::Nothing, QueueState::Idle, &frame, &cpus, runs)?;
            let cost = cost_on_device(policers, &frame, &cpus, runs)?;
            let cost = cost.as_secs_f64() - f64::from(programs) * nothing.as_secs_f64();
            ctx.record(system, &case, run).value(ON_DEVICE, cost * 1e9);
            Ok(())
        })?;
    }
    ctx.note(
        "On a device: the buckets are full, one CPU, the mean over up to ten hosts. One program finds the \
         policer of a host; of a program each a packet meets all.",
    );
    Ok(())
}

/// Limits of `limit add`, which share programs, beside one that has its own: UDP leaves a cgroup. The
/// kernel's test packets are of no cgroup, so they cannot show it.
fn in_traffic(ctx: &mut Context, datagrams: u32) -> anyhow::Result<()> {
    let testbed = Testbed::new(TestbedOptions::new(Topology::Pair))?;
    for scheme in ["nrm", "pace"] {
        let case = Case::new().with("scheme", scheme);
        ctx.step(format!("{scheme} in traffic"));
        ctx.alternate(&[SHARED, OWN], ctx.repeats, |ctx, system, run| {
            let made = Cgroup::create()?;
            let mut store = Store::new(&ctx.tidegate, testbed.sender())?;
            let words = ["--scheme", scheme, "--egress", FAST].map(OsStr::new);
            // One of `run` ends with its command.
            let (cgroup, _run) = if *system == SHARED {
                let limit = ["limit", "add", "x", "--cgroup", made.name()].map(OsStr::new);
                store.tidegate(limit.into_iter().chain(words))?;
                (made, None)
            } else {
                let runner = [ctx.tidegate.as_os_str(), "run".as_ref()].into_iter().chain(words);
                let runner: Vec<_> = runner.chain(["--".as_ref()]).map(OsStr::to_owned).collect();
                let mut shell = command(Site::from(testbed.sender()).under(&runner), "sh")?;
                shell.args(["-c", "echo $$; exec sleep 600"]);
                let run = Child::spawn(shell)?;
                let pid = wait_until("the command of `tidegate run`", START, || {
                    Ok(run.stdout_so_far().trim().parse().ok())
                })?;
                (Cgroup::of_process(pid)?, Some(run))
            };
            let args = SourceArgs {
                to: (testbed.addr(0, Family::V4), DISCARD).into(),
                payload_bytes: DATAGRAM_BYTES,
                burst_datagrams: 1,
                period_ns: PERIOD_NS,
                gap_ns: 0,
                bursts: datagrams.into(),
            };
            let site = Site::from(testbed.sender()).in_cgroup(&cgroup);
            let mut sent = None;
            let on = Hierarchy::find()?.open(cgroup.name())?;
            let cost = mean_in_traffic(on.id(), || {
                sent = Some(udp::start(&testbed, site, args).and_then(|it| udp::finish(it, args)));
            })?;
            sent.context("no traffic")??;
            let nothing = measure(
                Program::Nothing,
                QueueState::Idle,
                &tcp_frame(FRAME_BYTES),
                &[0],
                datagrams,
            )?;
            let cost = cost.as_secs_f64() - nothing.as_secs_f64();
            ctx.record(system, &case, run).value(IN_TRAFFIC, cost * 1e9);
            Ok(())
        })?;
    }
    ctx.note(
        "In traffic: a source of UDP in a cgroup, 10 µs apart, whose limit is never reached. The programs \
         meet packets with cold caches there.",
    );
    Ok(())
}

/// A thousand beside ten.
fn device_claims(ctx: &mut Context) {
    let cost = |system, count: u32| {
        ctx.median(system, ON_DEVICE, Some(&Case::new().with("policers", count)))
    };
    if let (Some(ten), Some(thousand)) = (cost(BY_PREFIX, 10), cost(BY_PREFIX, 1000)) {
        let programs = cost(PROGRAMS, 10).unwrap_or_default();
        ctx.claim(
            "1000 policers on a device cost a packet at most what 10 cost, by 10 %",
            thousand <= AS_TEN * ten,
            format!("{thousand:.0} ns against {ten:.0} ns; ten programs {programs:.0} ns"),
        );
    }
}

/// A run time less that of the empty program, in nanoseconds.
fn net(cost: Duration, state: QueueState, cpus: &[usize], runs: u32) -> anyhow::Result<f64> {
    let nothing = measure(Program::Nothing, state, &tcp_frame(FRAME_BYTES), cpus, runs)?;
    Ok((cost.as_secs_f64() - nothing.as_secs_f64()) * 1e9)
}

/// The published program, on a cgroup that nobody is in.
fn paper(cpus: &[usize], runs: u32) -> anyhow::Result<Duration> {
    let cgroup = Cgroup::create()?;
    let dir = Hierarchy::find()?.open(&cgroup.path().to_string_lossy())?;
    let rate: Rate = PAPER_RATE.parse().context("the paper's rate")?;
    let limit = NrmPaper::attach(dir.as_fd(), PaperOptions { egress: Some(rate), ingress: None })?;
    let frame = tcp_frame(FRAME_BYTES);
    Ok(mean_run_time(limit.program(Direction::Egress), &frame, cpus, runs)?)
}

/// A bucket beside the virtual queue.
fn police_claims(ctx: &mut Context) {
    for (cpus, queue) in [(1usize, "idle"), (1, "busy"), (2, "busy")] {
        let case = Case::new().with("cpus", cpus).with("queue", queue);
        let [ours, theirs] =
            ["police", "nrm"].map(|system| ctx.median(system, METRIC, Some(&case)));
        if let (Some(ours), Some(theirs)) = (ours, theirs) {
            ctx.claim(
                format!("police, {queue}, {cpus} CPUs: no more ns a packet than the virtual queue"),
                ours <= theirs,
                format!("{ours:.0} ns against {theirs:.0} ns"),
            );
        }
    }
}

/// The two hooks of a device.
fn hook_claims(ctx: &mut Context) {
    for queue in ["idle", "busy", "full"] {
        let case = Case::new().with("cpus", 1usize).with("queue", queue);
        let [tc, xdp] = [AT_TC, IN_XDP].map(|system| ctx.median(system, METRIC, Some(&case)));
        if let Some((tc, xdp)) = tc.zip(xdp) {
            ctx.claim(
                format!("police in XDP, {queue}: at most a tenth more ns a frame than at tc"),
                xdp <= AS_TEN * tc,
                format!("{xdp:.0} ns against {tc:.0} ns"),
            );
        }
    }
}

/// The published program has one path whatever its credit is, so its idle figure stands beside both of ours.
fn claims(ctx: &mut Context) {
    for (cpus, part, text) in [
        (1usize, 1.0, "no more ns a packet than NRM as published, on one CPU"),
        (2, 0.5, "at most half the ns a packet of NRM as published, two CPUs contending"),
    ] {
        let case = |queue| Case::new().with("cpus", cpus).with("queue", queue);
        let Some(theirs) = ctx.median("nrm-paper", METRIC, Some(&case("idle"))) else { continue };
        for (system, queue) in
            [("nrm", "idle"), ("nrm", "busy"), ("pace", "idle"), ("pace", "busy")]
        {
            if let Some(ours) = ctx.median(system, METRIC, Some(&case(queue))) {
                let measured = format!("{ours:.0} ns against {theirs:.0} ns");
                ctx.claim(
                    format!("{system}, queue {queue}: {text}"),
                    ours <= part * theirs,
                    measured,
                );
            }
        }
    }
}
