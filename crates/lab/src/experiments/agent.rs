//! `agent`: how soon a limit follows a service that starts, how soon the command of `tidegate run` starts,
//! and what a thousand limits cost the agent.
//!
//! - `start`: from before the fork of a process that moves itself into a new cgroup and executes `sleep`,
//!   until the pins of its limit are there. One service at a time, while the agent is idle; the first one
//!   stays, so the programs are loaded.
//! - `run`: from before the fork of `tidegate run` until its command reads the clock, of root by itself and
//!   of a user by the agent.
//! - A thousand limits of `pace` in both directions, each on an empty cgroup of its own, named by its path or
//!   as a unit: `tidegate apply`, the agent's start with all of them in force, its memory and its CPU time at
//!   rest, `tidegate detach`.

mod commands;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tempfile::TempDir;
use tidegate_sys::{
    cgroup::Hierarchy,
    net::{NetNs, SpawnInto, prepare},
};

use super::cpu::process_cpu;
use crate::{
    chart::{Cdf, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    stats,
    testbed::{
        Cgroup, Child, Place,
        wait::{interrupted, pass_time, wait_until},
    },
};
use commands::{BY_AGENT, BY_ITSELF, Commands};

/// Services that start.
const SHARED: &str = "one limit over all services";
const EACH: &str = "a limit for each service";
/// Limits in a file.
const BY_PATH: &str = "cgroups by path";
const BY_UNIT: &str = "cgroups by unit";

/// After which the traffic of a service without a limit passes.
const DEADLINE_NS: &str = "deadline_ns";

/// A service has gone for so long before the next one starts, so that the agent is idle then.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a limit, a report or a verb may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The lab looks for the pins of a limit so often: a start takes some 20 ms.
const LOOK: Duration = Duration::from_micros(50);

/// The claims: root's command starts in this time.
const RUN: Duration = Duration::from_millis(50);
/// A thousand limits are applied in this time, and cost the agent at most this.
const APPLY: Duration = Duration::from_secs(5);
const MEMORY_BYTES: f64 = 60e6;
const REST_PERCENT: f64 = 0.5;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Agent {
    /// For tests: a few of all.
    tiny: bool,
}

/// How much of all.
#[derive(Debug, Clone, Copy)]
struct Amounts {
    /// Services that start under one limit.
    shared: u32,
    /// Services that start with a limit each.
    each: u32,
    /// Commands that start.
    commands: u32,
    /// Limits in a file.
    limits: u32,
    /// How long the agent is watched while it rests.
    rest: Duration,
}

impl Agent {
    /// A few of all.
    pub fn tiny() -> Agent {
        Agent { tiny: true }
    }

    fn amounts(&self, quick: bool) -> Amounts {
        if self.tiny {
            let rest = Duration::from_millis(50);
            return Amounts { shared: 2, each: 2, commands: 2, limits: 3, rest };
        }
        let rest = Duration::from_secs(60);
        match quick {
            true => Amounts { shared: 100, each: 20, commands: 20, limits: 1000, rest },
            false => Amounts { shared: 1000, each: 100, commands: 100, limits: 1000, rest },
        }
    }
}

impl Experiment for Agent {
    fn name(&self) -> &'static str {
        "agent"
    }

    fn summary(&self) -> &'static str {
        "How soon services and commands start under a limit, and what a thousand limits cost the agent"
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let amounts = self.amounts(ctx.quick);
        let mut figure = Cdf {
            title: "From the start of a service to its limit".to_owned(),
            metric: "start_ns".to_owned(),
            series: Vec::new(),
        };
        for (system, starts) in [(SHARED, amounts.shared), (EACH, amounts.each)] {
            let case = Case::new().with("starts", starts);
            let mut all = Vec::new();
            ctx.alternate(&[system], ctx.repeats, |ctx, system, run| {
                let Starts { first_ns, mut others_ns, deadline_ns } =
                    start_services(ctx, system, starts)?;
                let at = |p| stats::percentile(&others_ns, p).unwrap_or(f64::NAN);
                ctx.record(system, &case, run)
                    .value("start_p50_ns", at(50.0))
                    .value("start_p99_ns", at(99.0))
                    .value("start_max_ns", at(100.0))
                    .value("first_start_ns", first_ns)
                    .value(DEADLINE_NS, deadline_ns);
                all.append(&mut others_ns);
                Ok(())
            })?;
            figure.series.push(Series::new(system, stats::cdf(&all)));
        }
        ctx.figure("start", figure);
        let case = Case::new().with("commands", amounts.commands);
        ctx.alternate(&[BY_ITSELF, BY_AGENT], ctx.repeats, |ctx, system, run| {
            let bed = Bed::new(&ctx.tidegate)?;
            let Commands { first_ns, others_ns } = commands::start(&bed, system, amounts.commands)?;
            let at = |p| stats::percentile(&others_ns, p).unwrap_or(f64::NAN);
            let mut record = ctx.record(system, &case, run);
            for (metric, p) in [("run_min_ns", 0.0), ("run_p50_ns", 50.0), ("run_max_ns", 100.0)] {
                record = record.value(metric, at(p));
            }
            if let Some(first_ns) = first_ns {
                record.value("first_run_ns", first_ns);
            }
            Ok(())
        })?;
        let case = Case::new().with("limits", amounts.limits);
        ctx.alternate(&[BY_PATH, BY_UNIT], ctx.repeats, |ctx, system, run| {
            keep_limits(ctx, system, &case, run, amounts)
        })?;
        ctx.note(
            "A start counts from before the fork of the service's process until the pins of its limit are \
             there. The first service stays until the end; with its limit the programs are loaded. \
             `resident` and `peak` are the agent's memory, `rest` its CPU time while nothing happens, in \
             percent of a core; it looks at its schedules and selectors once a minute. A `run` counts from \
             before the fork of `tidegate run`, with a limit in both directions, until its command reads the \
             clock. A user's first command stays until the end.",
        );
        claims(ctx, &case);
        Ok(())
    }
}

/// The cgroups, directories and limits of one run. Dropping it takes the limits off.
struct Bed {
    tidegate: PathBuf,
    host: NetNs,
    dir: TempDir,
    // The limits end before their cgroups.
    place: Place,
    slice: Cgroup,
}

impl Bed {
    fn new(tidegate: &Path) -> anyhow::Result<Bed> {
        let dir = TempDir::with_prefix("tidegate-lab-")?;
        for name in ["etc", "run"] {
            fs::create_dir(dir.path().join(name))?;
        }
        Ok(Bed {
            tidegate: tidegate.to_owned(),
            host: NetNs::current()?,
            dir,
            place: Place::new()?,
            slice: Cgroup::create_slice()?,
        })
    }

    /// A word that no other cgroup's name begins with.
    fn word(&self) -> &str {
        self.slice.name().trim_end_matches(".slice")
    }

    fn command(&self, words: &[&str]) -> anyhow::Result<Command> {
        let mut command = crate::testbed::command(&self.host, &self.tidegate)?;
        self.keep_to(&mut command).args(words);
        Ok(command)
    }

    /// Has `tidegate` work here alone.
    fn keep_to<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.env("TIDEGATE_BPFFS", self.place.store());
        command.env("TIDEGATE_RUN_DIR", self.dir.path().join("run"))
    }

    /// Runs a verb to its end; how long it took.
    fn verb(&self, words: &[&str]) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        Child::spawn(self.command(words)?)?.finish(PATIENCE)?;
        Ok(begun.elapsed())
    }

    /// The file of limits that the agent keeps.
    fn file(&self, text: &str) -> anyhow::Result<String> {
        let path = self.dir.path().join("etc/limits.toml");
        fs::write(&path, text)?;
        path.into_os_string().into_string().ok().context("a path that is not Unicode")
    }

    /// Starts the agent, without an engine, and returns its first report that is what is waited for.
    fn agent(
        &self,
        flags: &[&str],
        is_ready: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<(Child, Value)> {
        let path = |name: &str| self.dir.path().join(name);
        let mut command = self.command(&["agent"])?;
        command.arg(path("etc")).args(["--below", self.slice.name()]);
        command.arg("--engine").arg(path("none.sock")).args(flags);
        let mut agent = Child::spawn(command)?;
        let report = wait_until("the agent's report", PATIENCE, || {
            agent.check_running()?;
            let text = fs::read(path("run/agent.json")).unwrap_or_default();
            Ok(serde_json::from_slice(&text).ok().filter(&is_ready))
        })?;
        Ok((agent, report))
    }
}

/// A limit of `pace` in both directions.
fn limit(name: &str, scope: &str, more: &str) -> String {
    format!(
        "[[limit]]\nname = \"{name}\"\nscope = {{ {scope} }}\nscheme = \"pace\"\negress = \"50mbit\"\n\
         ingress = \"50mbit\"\n{more}\n"
    )
}

/// The starts of services, one after the other, in nanoseconds.
struct Starts {
    /// How long the first one had no limit: its programs were loaded meanwhile.
    first_ns: f64,
    /// The others, while the first one runs.
    others_ns: Vec<f64>,
    /// After this time their traffic would have passed.
    deadline_ns: f64,
}

fn start_services(ctx: &Context, system: &str, starts: u32) -> anyhow::Result<Starts> {
    let bed = Bed::new(&ctx.tidegate)?;
    let is_each = system == EACH;
    let more = if is_each { "each = true" } else { "" };
    bed.file(&limit("services", &format!("unit = \"{}-*.service\"", bed.word()), more))?;
    let (agent, report) = bed.agent(&[], |report| report["gate"]["state"] == "open")?;
    let deadline_ms = report["gate"]["deadline_ms"].as_f64().context("no deadline")?;
    let first = Service::start(&bed, is_each, 0)?;
    let mut others_ns = Vec::new();
    for number in 1..=starts {
        let Service { process, cgroup, pins, took_ns } = Service::start(&bed, is_each, number)?;
        others_ns.push(took_ns);
        process.kill()?;
        drop(cgroup);
        if is_each {
            wait_until("the end of the limit", PATIENCE, || Ok((!pins.exists()).then_some(())))?;
        }
        pass_time(PAUSE)?;
    }
    first.process.kill()?;
    agent.stop()?;
    bed.verb(&["detach"])?;
    Ok(Starts { first_ns: first.took_ns, others_ns, deadline_ns: deadline_ms * 1e6 })
}

/// A service with its limit.
struct Service {
    process: Child,
    cgroup: Cgroup,
    /// Pins that exist while the limit is on the cgroup.
    pins: PathBuf,
    /// From before the fork until its limit was there, in nanoseconds.
    took_ns: f64,
}

impl Service {
    fn start(bed: &Bed, is_each: bool, number: u32) -> anyhow::Result<Service> {
        let name = format!("{}-{number}.service", bed.word());
        let cgroup = bed.slice.create_below(&name)?;
        let pins = match is_each {
            true => format!("services-{}", name.replace('.', "_")),
            false => format!("services/members/{}", Hierarchy::find()?.open(cgroup.name())?.id()),
        };
        let pins = bed.place.store().join(pins);
        let mut sleep = Command::new("sleep");
        sleep.arg("infinity");
        let cgroup_procs = Some(cgroup.open_procs()?);
        prepare(&mut sleep, SpawnInto { netns: None, cgroup_procs, die_with_parent: true })?;
        let begun = Instant::now();
        let process = Child::spawn(sleep)?;
        while !pins.exists() {
            ensure!(!interrupted() && begun.elapsed() < PATIENCE, "no limit came for {name}");
            thread::sleep(LOOK);
        }
        let took_ns = begun.elapsed().as_nanos() as f64;
        Ok(Service { process, cgroup, pins, took_ns })
    }
}

/// Applies limits, and has the agent keep them.
fn keep_limits(
    ctx: &mut Context,
    system: &str,
    case: &Case,
    run: u32,
    amounts: Amounts,
) -> anyhow::Result<()> {
    let bed = Bed::new(&ctx.tidegate)?;
    let (mut cgroups, mut text) = (Vec::new(), String::new());
    for number in 0..amounts.limits {
        let name = format!("{}-{number}.service", bed.word());
        let cgroup = bed.slice.create_below(&name)?;
        let scope = match system {
            BY_UNIT => format!("unit = \"{name}\""),
            _ => format!("cgroup = \"{}\"", cgroup.name()),
        };
        let _ = write!(text, "{}", limit(&format!("l{number}"), &scope, ""));
        cgroups.push(cgroup);
    }
    let file = bed.file(&text)?;
    let applied = bed.verb(&["apply", &file])?;
    let begun = Instant::now();
    let (agent, _) = bed.agent(&[], |report| {
        let limits = report["limits"].as_array();
        limits.is_some_and(|limits| {
            limits.len() == amounts.limits as usize
                && limits.iter().all(|l| l["state"] == "in_force")
        })
    })?;
    let started = begun.elapsed();
    let (begun, before) = (Instant::now(), process_cpu(agent.pid())?);
    pass_time(amounts.rest)?;
    let used = process_cpu(agent.pid())?.saturating_sub(before);
    let rest_percent = 100.0 * used.as_secs_f64() / begun.elapsed().as_secs_f64();
    let [resident, peak] = [memory(agent.pid(), "VmRSS:")?, memory(agent.pid(), "VmHWM:")?];
    agent.stop()?;
    let detached = bed.verb(&["detach"])?;
    ctx.record(system, case, run)
        .value("apply_s", applied.as_secs_f64())
        .value("start_of_agent_s", started.as_secs_f64())
        .value("resident_bytes", resident)
        .value("peak_bytes", peak)
        .value("rest_percent", rest_percent)
        .value("detach_s", detached.as_secs_f64());
    Ok(())
}

/// A line of `/proc/PID/status`, in bytes.
fn memory(pid: u32, line: &str) -> anyhow::Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let found = text.lines().find_map(|text| text.strip_prefix(line));
    let kib = found.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
    Ok(1024.0 * kib.with_context(|| format!("no {line} in /proc/{pid}/status"))?)
}

fn claims(ctx: &mut Context, case: &Case) {
    for system in [SHARED, EACH] {
        let most = |metric| stats::range(&ctx.values(system, metric, None)).map(|range| range.1);
        let all = [most("start_max_ns"), most("first_start_ns"), most(DEADLINE_NS)];
        let [Some(max), Some(first), Some(deadline)] = all else { continue };
        ctx.claim(
            format!(
                "{system}: each start has its limit before the deadline of {} s",
                deadline / 1e9
            ),
            max.max(first) < deadline,
            format!("{:.1} ms at most, {:.0} ms the first one", max / 1e6, first / 1e6),
        );
    }
    let values = |metric| ctx.values(BY_ITSELF, metric, None);
    let median = stats::median(&values("run_p50_ns"));
    let range = (stats::range(&values("run_min_ns")), stats::range(&values("run_max_ns")));
    if let (Some(median), (Some((least, _)), Some((_, most)))) = (median, range) {
        ctx.claim(
            format!("{BY_ITSELF}: the command starts in less than {} ms", RUN.as_millis()),
            median < RUN.as_nanos() as f64,
            format!("median {:.1} ms, {:.1} to {:.1} ms", median / 1e6, least / 1e6, most / 1e6),
        );
    }
    for system in [BY_PATH, BY_UNIT] {
        let limits = case.0.get("limits").map(ToString::to_string).unwrap_or_default();
        let most = |metric| stats::range(&ctx.values(system, metric, Some(case))).map(|r| r.1);
        let all = [most("apply_s"), most("peak_bytes"), most("rest_percent")];
        let [Some(apply), Some(peak), Some(rest)] = all else { continue };
        ctx.claim(
            format!("{limits} {system}: applied in less than {} s", APPLY.as_secs()),
            apply < APPLY.as_secs_f64(),
            format!("{apply:.1} s"),
        );
        ctx.claim(
            format!("{limits} {system}: the agent takes less than {} MB", MEMORY_BYTES / 1e6),
            peak < MEMORY_BYTES,
            format!("{:.1} MB at most", peak / 1e6),
        );
        ctx.claim(
            format!("{limits} {system}: the agent rests at less than {REST_PERCENT} % of a core"),
            rest < REST_PERCENT,
            format!("{rest:.2} %"),
        );
    }
}
