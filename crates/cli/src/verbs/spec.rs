//! `tidegate check`, `plan` and `apply`: limits from a file.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use anyhow::{Result, bail};
use jiff::{
    Zoned,
    civil::DateTime,
    tz::{AmbiguousOffset, TimeZone},
};
use serde::Serialize;
use serde_json::Value;
use tidegate_agent::{
    directory,
    goal::{self, Files, Goal},
    report::{LimitReport, LimitState},
    scan,
    status::AgentStatus,
};
use tidegate_core::{Rate, Scope, selector::SelectorKind};
use tidegate_fleet::rates;
use tidegate_host::{
    absent::{self, Waits, is_for_the_agent},
    apply,
    host::{Host, LockedHost},
    nic::{
        NicSpec,
        state::{self, RunDir},
    },
    plan::{self, Action, Plan, PlanError, Present, Reason, Wanted},
    settings::{Difference, is_parents},
    spec::{LimitSpec, Spec},
    status::{self, Settings, thresholds},
};
use tidegate_sys::{limit::LimitOptions, names};

use crate::{
    args::{ApplyArgs, CheckArgs, PlanArgs, PlanAtArgs},
    output::{self, Paint},
    refusal::{self, UsageError, say},
    verbs::{
        self,
        daemon::{GroupJson, GroupPlanJson, Groups},
        keepers::Keepers,
    },
};

pub fn check(args: &CheckArgs) -> Result<ExitCode> {
    if args.file.is_dir() {
        return check_all(&args.file, args.look.json);
    }
    let spec = Spec::read(&args.file)?;
    let mut out = output::stdout();
    match args.look.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&Checked::from(&spec))?)?,
        false => writeln!(out, "{}", checked(&spec))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks the files of a directory as the agent reads them.
fn check_all(directory: &Path, json: bool) -> Result<ExitCode> {
    let Files { specs, errors } = directory::read(directory);
    errors.iter().for_each(|error| say(&format!("tidegate: error: {error}")));
    if !errors.is_empty() {
        return Ok(refusal::USAGE.into());
    }
    let mut out = output::stdout();
    if json {
        let files = specs.iter().map(Checked::from).collect();
        let all = CheckedFiles { directory: directory.display().to_string(), files };
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    } else if specs.is_empty() {
        writeln!(out, "{}: no files, no limits", directory.display())?;
    }
    for spec in specs.iter().filter(|_| !json) {
        writeln!(out, "{}", checked(spec))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The contents of a file, in a line.
fn checked(spec: &Spec) -> String {
    let count = |n: usize, what| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let of_nics = spec.nics.iter().map(|nic| nic.limits.len()).sum::<usize>();
    let mut said =
        format!("{}: well-formed, {}", spec.file, count(spec.limits.len() + of_nics, "limit"));
    if !spec.groups.is_empty() {
        said += &format!(", {}", count(spec.groups.len(), "group"));
    }
    if !spec.nics.is_empty() {
        let nics = count(spec.nics.len(), "nic");
        said += &format!(
            ", {nics}; limits of scheme carousel ({of_nics}) are in force only while `tidegate nic` runs"
        );
    }
    said
}

pub fn plan(store: &Path, run_dir: &Path, args: &PlanAtArgs) -> Result<ExitCode> {
    let PlanAtArgs { plan: args, at } = args;
    let spec = Spec::read(&args.file)?;
    let at = at.map_or_else(|| Ok(Zoned::now()), moment)?;
    let host = verbs::open(store)?;
    let present = host.present()?;
    let keepers = Keepers::find(run_dir, &host.store().path(), &spec, &present);
    let now = resolved(spec.clone(), &host, &at)?;
    let is_followed = is_followed(run_dir, args);
    let (wanted, waiting) = now.wanted(&host, &present, is_followed)?;
    let prune = Prune { is_asked: args.prune, keepers: &keepers };
    let plan = planned(&now.spec, &present, &wanted, (&waiting, &now.goal.off), prune)?;
    let groups = Groups::look(&spec, false);
    let reports = &now.goal.reports;
    print(&spec, run_dir, (&plan, &keepers), (&waiting, reports), args, (&groups, false))?;
    let is_same = plan.actions.is_empty() && groups.is_same();
    Ok(if is_same { ExitCode::SUCCESS } else { refusal::CHANGES.into() })
}

/// A local time as a moment; of one that comes twice, the first.
fn moment(at: DateTime) -> Result<Zoned> {
    let moment = TimeZone::system().to_ambiguous_zoned(at);
    if matches!(moment.offset(), AmbiguousOffset::Gap { .. }) {
        let message = format!("--at: there is no {at} here: clocks go forward then");
        return Err(UsageError(message).into());
    }
    Ok(moment.compatible()?)
}

pub fn apply(store: &Path, run_dir: &Path, args: &ApplyArgs) -> Result<ExitCode> {
    let ApplyArgs { plan: args, force } = args;
    let spec = Spec::read(&args.file)?;
    let host = verbs::open(store)?;
    let agent = AgentStatus::running(run_dir, &host.store().path());
    let mut host = host.lock()?;
    host.force(*force);
    let done = apply_locked(&mut host, &spec, run_dir, args);
    verbs::close(host);
    let Applied { plan, now, waiting, keepers } = done?;
    let groups = Groups::look(&spec, true);
    let reports = &now.goal.reports;
    print(&spec, run_dir, (&plan, &keepers), (&waiting, reports), args, (&groups, true))?;
    if let Some(agent) = agent.filter(|agent| !agent.keeps(&args.file)) {
        let kept = plan.actions.iter().filter_map(|action| agent.limit(action.name()));
        for LimitReport { name, file, .. } in kept {
            refusal::warn(&format!(
                "the agent keeps limit `{name}` as {file} says, and puts that back"
            ));
        }
    }
    if let Some(why) = &groups.refused {
        let file = &spec.file;
        bail!("the daemon refused {file}, and its groups stay as they were: {why}");
    }
    Ok(ExitCode::SUCCESS)
}

/// What was done.
struct Applied<'a> {
    plan: Plan,
    now: Resolved,
    waiting: Vec<Waits>,
    keepers: Keepers<'a>,
}

/// Looks at the host, which nobody else changes now, and makes it as the spec says.
fn apply_locked<'a>(
    host: &mut LockedHost,
    spec: &'a Spec,
    run_dir: &Path,
    args: &PlanArgs,
) -> Result<Applied<'a>> {
    let now = resolved(spec.clone(), host.host(), &Zoned::now())?;
    let present = host.host().present()?;
    let keepers = Keepers::find(run_dir, &host.host().store().path(), spec, &present);
    let (wanted, waiting) = now.wanted(host.host(), &present, is_followed(run_dir, args))?;
    let prune = Prune { is_asked: args.prune, keepers: &keepers };
    let plan = planned(&now.spec, &present, &wanted, (&waiting, &now.goal.off), prune)?;
    if !plan.actions.is_empty() {
        host.reserve_journal()?;
    }
    apply::apply(host, &plan.actions)?;
    host.note_waiting(spec, &waiting, |name| prune.takes(name))?;
    Ok(Applied { plan, now, waiting, keepers })
}

/// Which limits go that are not in the file.
#[derive(Clone, Copy)]
struct Prune<'a> {
    is_asked: bool,
    keepers: &'a Keepers<'a>,
}

impl Prune<'_> {
    fn takes(self, name: &str) -> bool {
        self.is_asked && self.keepers.of(name).is_none()
    }
}

/// A spec as it is now on this host: selectors have found their cgroups.
pub(super) struct Resolved {
    pub(super) spec: Spec,
    goal: Goal,
    /// The limits whose schedule will give them other rates.
    scheduled: BTreeSet<String>,
}

impl Resolved {
    /// The limits that can be, and those that wait. They note it if nobody follows their schedules.
    fn wanted(
        &self,
        host: &Host,
        present: &[Present],
        is_followed: bool,
    ) -> Result<(Vec<Wanted>, Vec<Waits>)> {
        let (mut wanted, mut waiting) = host.wanted(&self.spec, present)?;
        for limit in &mut wanted {
            limit.options.unfollowed = !is_followed && self.scheduled.contains(&limit.name);
        }
        goal::set_members(&self.goal, present, &mut wanted);
        waiting.extend(self.goal.waiting.iter().cloned());
        Ok((wanted, waiting))
    }
}

/// Follows selectors and schedules as the agent does. Containers are known to the agent alone.
pub(super) fn resolved(mut spec: Spec, host: &Host, at: &Zoned) -> Result<Resolved> {
    let is_exe =
        |limit: &LimitSpec| matches!(&limit.scope, Scope::Select(s) if s.kind == SelectorKind::Exe);
    let programs = spec.limits.iter().any(is_exe);
    let world = scan::scan(host.hierarchy(), "", programs, &scan::Cgroups::new());
    scan::relative(host.hierarchy(), &mut spec);
    let files = Files { specs: vec![spec.clone()], errors: Vec::new() };
    let goal = goal::goal(&files, &world, at);
    if let Some(refused) = goal.reports.iter().find(|report| report.state == LimitState::Refused) {
        let reason = refused.reason.as_deref().unwrap_or_default();
        let limit = spec.limits.iter().find(|limit| limit.name == refused.name);
        let line = limit.map(|limit| format!(":{}", limit.line)).unwrap_or_default();
        let (file, name) = (&spec.file, &refused.name);
        return Err(UsageError(format!("{file}{line}: limit `{name}`: {reason}")).into());
    }
    spec.limits = goal.limits.iter().map(|goal| goal.limit.clone()).collect();
    let changes = |limit: &&LimitSpec| limit.follow.schedule.change(at).is_some();
    let scheduled = spec.limits.iter().filter(changes).map(|limit| limit.name.clone()).collect();
    Ok(Resolved { spec, goal, scheduled })
}

/// Whether the agent keeps the file, and so follows its schedules.
fn is_followed(run_dir: &Path, args: &PlanArgs) -> bool {
    AgentStatus::find(run_dir).is_some_and(|agent| agent.keeps(&args.file))
}

/// The plan, or where in the file the reason is that there is none.
fn planned(
    spec: &Spec,
    present: &[Present],
    wanted: &[Wanted],
    (waiting, off): (&[Waits], &BTreeSet<String>),
    prune: Prune<'_>,
) -> Result<Plan> {
    if prune.is_asked && spec.blank {
        let (file, must) = (&spec.file, "write `limit = []` if this host shall have no limits");
        return Err(UsageError(format!("{file}: nothing is written in it; {must}")).into());
    }
    let wanted = rates::kept(spec, present, wanted);
    let goes = |name: &str| prune.takes(name) || off.contains(name);
    let present = absent::set_aside(present, &wanted, waiting, goes);
    let mut plan = plan::plan_pruning(&present, &wanted, goes).map_err(|e| match e {
        PlanError::Family(e) => spec.locate(e).map_or_else(anyhow::Error::from, Into::into),
        e => kept(&e, prune.keepers).map_or_else(|| e.into(), |kept| UsageError(kept).into()),
    })?;
    rates::begin_alone(spec, &mut plan);
    Ok(plan)
}

/// That the place of a limit is taken by one that somebody keeps: pruning would not remove it.
fn kept(error: &PlanError, keepers: &Keepers<'_>) -> Option<String> {
    let (name, scope, other, prefix) = match error {
        PlanError::ScopeTaken { name, scope, other } => (name, scope, other, String::new()),
        PlanError::PrefixTaken { name, scope, prefix, other } => {
            (name, scope, other, format!(" for {prefix}"))
        }
        _ => return None,
    };
    let keeper = keepers.of(other)?;
    let until = keeper.until();
    Some(format!(
        "limit `{name}`: {scope} already has limit `{other}`{prefix}, which {keeper} removes {until}"
    ))
}

fn print(
    spec: &Spec,
    run_dir: &Path,
    (plan, keepers): (&Plan, &Keepers<'_>),
    (waiting, reports): (&[Waits], &[LimitReport]),
    args: &PlanArgs,
    (groups, applied): (&Groups<'_>, bool),
) -> Result<()> {
    let mut out = output::stdout();
    if reports.iter().any(|report| report.next_change.is_some()) {
        scan::zone_problem().iter().for_each(|problem| refusal::warn(problem));
    }
    let is_followed = is_followed(run_dir, args);
    let run_dir = RunDir::at(run_dir);
    let nics: Vec<_> = spec.nics.iter().map(|nic| (nic, run_dir.find(&nic.name))).collect();
    if args.look.json {
        let actions: Vec<_> = plan.actions.iter().flat_map(parts).collect();
        let actions = actions.iter().map(ActionJson::from).collect();
        let nics = nics.iter().map(|(nic, runs)| NicPlanJson {
            name: &nic.name,
            pid: runs.as_ref().and_then(|runs| runs["pid"].as_u64()),
            limits_in_force: runs.as_ref().is_some_and(|runs| is_as_in_file(nic, runs)),
        });
        let nics = nics.collect();
        let groups = groups.json();
        let waiting = waiting.iter().map(|w| WaitsJson {
            name: &w.name,
            scope: &w.scope,
            parent: w.parent.as_deref(),
            reason: why(spec, reports, w),
        });
        let waiting = waiting.collect();
        let left_out = reports.iter().filter(|report| report.left_out_words().is_some());
        let left_out = left_out.map(|report| LeftOutJson {
            name: &report.name,
            cgroups: &report.left_out,
            reason: report.reason.as_deref(),
        });
        let left_out = left_out.collect();
        let schedules = reports.iter().filter(|report| report.schedule_words().is_some());
        let schedules = schedules.map(|report| ScheduleJson {
            name: &report.name,
            off: report.state == LimitState::Off,
            row: report.schedule.as_deref(),
            next_change: report.next_change.as_deref(),
            next_rates: report.next_rates.as_deref(),
        });
        let schedules = schedules.collect();
        let (file, unmanaged) = (spec.file.as_str(), plan.unmanaged.as_slice());
        let plan =
            PlanJson { file, actions, waiting, left_out, schedules, unmanaged, nics, groups };
        writeln!(out, "{}", serde_json::to_string_pretty(&plan)?)?;
    } else {
        print_text(&mut out, spec, (plan, keepers), (waiting, reports), (groups, applied))?;
        if !is_followed && reports.iter().any(|report| report.next_change.is_some()) {
            let line = "! nobody follows these schedules: apply the file again at each change, or have \
                        `tidegate agent` keep it";
            writeln!(out, "{}", Paint::stdout().yellow(line))?;
        }
        for (nic, runs) in &nics {
            writeln!(out, "{}", of_nic(spec, nic, runs.as_ref()))?;
        }
        groups.print(&mut out)?;
    }
    Ok(())
}

fn print_text(
    out: &mut impl Write,
    spec: &Spec,
    (plan, keepers): (&Plan, &Keepers<'_>),
    (waiting, reports): (&[Waits], &[LimitReport]),
    (groups, applied): (&Groups<'_>, bool),
) -> io::Result<()> {
    let paint = Paint::stdout();
    for action in plan.actions.iter().flat_map(parts) {
        match &action {
            Action::Add { limit } => {
                let on = output::scope_with(&limit.scope, &limit.members);
                let name = &limit.name;
                let what = output::describe(&limit.options, limit.parent.as_deref());
                writeln!(out, "{}", paint.green(&format!("+ {name} on {on}: {what}")))?;
            }
            Action::Change { name, .. } => {
                let changes = action.differences();
                let changes = changes.iter().map(ToString::to_string);
                let changes = changes.collect::<Vec<_>>().join(", ");
                writeln!(out, "{}", paint.yellow(&format!("~ {name}: {changes}")))?;
            }
            Action::Members { name, join, leave, .. } => {
                let joins = join.iter().map(|path| format!("+ {path}"));
                let leaves = leave.iter().map(|path| format!("- {path}"));
                let all = joins.chain(leaves).collect::<Vec<_>>().join(", ");
                writeln!(out, "{}", paint.yellow(&format!("~ {name}: {all}")))?;
            }
            Action::TakeOver { limit } => {
                let build = limit.other_build.as_deref().unwrap_or_default();
                let line =
                    format!("~ {}: new programs (made by another build, {build})", limit.name);
                writeln!(out, "{}", paint.yellow(&line))?;
            }
            Action::Remove { limit, reason } => {
                let (name, on) = (&limit.name, output::scope(&limit.scope));
                let why = match reason {
                    Reason::OtherParent => other_parent(limit, plan),
                    reason => reason.to_string(),
                };
                writeln!(out, "{}", paint.red(&format!("- {name} on {on} ({why})")))?;
            }
            // In two lines, as `parts` has it.
            Action::Replace { .. } => {}
        }
    }
    groups.print_changes(out)?;
    for waits in waiting {
        let then = match is_for_the_agent(&waits.scope) || is_moved(spec, waits) {
            true => ", and attaches it".to_owned(),
            false => format!("; `tidegate apply {}` attaches it once it can", spec.file),
        };
        let line = format!("! {} waits: {}{then}", waits.name, why(spec, reports, waits));
        writeln!(out, "{}", paint.yellow(&line))?;
    }
    for report in reports.iter().filter(|report| report.left_out_words().is_some()) {
        let reason = report.reason.as_deref().unwrap_or_default();
        writeln!(out, "{}", paint.yellow(&format!("! {}: {reason}", report.name)))?;
    }
    for report in reports {
        if let Some(words) = report.schedule_words() {
            writeln!(out, "  {}: {words}", report.name)?;
        }
    }
    for name in plan.unmanaged.iter().filter(|name| keepers.of(name).is_none()) {
        writeln!(out, "  {name}: not in the file, left alone (--prune removes it)")?;
    }
    if let Some(kept) = keepers.words(plan.unmanaged.iter().map(String::as_str)) {
        writeln!(out, "  {kept}")?;
    }
    let is_same = plan.actions.is_empty() && groups.is_same();
    if is_same && !waiting.is_empty() {
        return writeln!(
            out,
            "Nothing to do until then: the other limits are as {} says.",
            spec.file
        );
    }
    if is_same {
        return writeln!(out, "Nothing to do: the limits are as {} says.", spec.file);
    }
    let parts = || plan.actions.iter().flat_map(parts);
    let count = |verb| {
        parts().filter(|action| action.verb() == verb).count() + groups.changed(verb).count()
    };
    let (add, remove) = (count("add"), count("remove"));
    // One may get and lose cgroups, get other programs, and change besides.
    let is_change = |action: &&Action| matches!(action.verb(), "change" | "members" | "take_over");
    let changed = plan.actions.iter().filter(is_change).map(Action::name);
    let change = changed.collect::<BTreeSet<_>>().len() + groups.changed("change").count();
    if applied {
        writeln!(out, "Done: {add} added, {change} changed, {remove} removed.")
    } else {
        writeln!(out, "Plan: {add} to add, {change} to change, {remove} to remove.")
    }
}

/// Whether the processes of a limit are to be moved.
fn is_moved(spec: &Spec, waits: &Waits) -> bool {
    waits.parent.is_none()
        && spec.limits.iter().any(|limit| limit.name == waits.name && limit.follow.moves)
}

/// Why a limit waits.
fn why(spec: &Spec, reports: &[LimitReport], waits: &Waits) -> String {
    let said = reports.iter().find(|report| report.name == waits.name);
    let said = said.filter(|report| report.state == LimitState::Waiting);
    match (&waits.parent, said.and_then(|report| report.reason.clone())) {
        (Some(parent), _) => format!("its parent `{parent}` waits"),
        (None, _) if is_moved(spec, waits) => "only `tidegate agent` moves processes".to_owned(),
        (None, Some(reason)) if !is_for_the_agent(&waits.scope) => reason,
        (None, _) => absent::missing(&waits.scope, &names::users()),
    }
}

/// A limit that is replaced is shown as the one that goes and the one that comes.
fn parts(action: &Action) -> Vec<Action> {
    match action.clone() {
        Action::Replace { from, reason, to } => {
            vec![Action::Remove { limit: from, reason }, Action::Add { limit: to }]
        }
        action => vec![action],
    }
}

fn other_parent(limit: &Present, plan: &Plan) -> String {
    let to = plan.actions.iter().find_map(|action| match action {
        Action::Add { limit: to } | Action::Replace { to, .. } if to.name == limit.name => {
            to.parent.as_deref()
        }
        _ => None,
    });
    let from = limit.parent.as_deref();
    format!("parent {} -> {}", from.unwrap_or("none"), to.unwrap_or("none"))
}

/// What is true of the limits of a software NIC, which no `apply` can put in force.
fn of_nic(spec: &Spec, nic: &NicSpec, runs: Option<&Value>) -> String {
    let (paint, names) = (Paint::stdout(), nic.limits.iter().map(|limit| limit.name.as_str()));
    let names = names.collect::<Vec<_>>().join(", ");
    let what = if names.is_empty() { String::new() } else { format!("{names}: ") };
    match runs {
        None => paint.yellow(&format!(
            "! {what}nic `{}` does not run, and its limits are not in force; start `tidegate nic \
             --spec {}{}`",
            nic.name,
            spec.file,
            if spec.nics.len() > 1 { format!(" --name {}", nic.name) } else { String::new() }
        )),
        Some(runs) if is_as_in_file(nic, runs) => {
            format!("  {what}in force, by nic `{}` (process {})", nic.name, runs["pid"])
        }
        Some(runs) => paint.yellow(&format!(
            "! {what}nic `{0}` runs with other limits or ports; if it was started with this file, \
             `kill -HUP {1}` has it read again",
            nic.name, runs["pid"]
        )),
    }
}

/// Whether a NIC that runs has the ports and limits that the file says.
fn is_as_in_file(nic: &NicSpec, runs: &Value) -> bool {
    let ports = nic.ports.iter().zip([&runs["ports"][0], &runs["ports"][1]]);
    ports.into_iter().all(|(port, is)| is["port"] == port.to_string())
        && serde_json::to_value(state::LimitState::of(nic))
            .is_ok_and(|limits| limits == runs["limits"])
}

/// The files of a directory.
#[derive(Serialize)]
struct CheckedFiles<'a> {
    directory: String,
    files: Vec<Checked<'a>>,
}

#[derive(Serialize)]
struct Checked<'a> {
    file: &'a str,
    limits: Vec<CheckedLimit<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nics: Vec<NicJson<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    groups: Vec<GroupJson<'a>>,
}

impl<'a> From<&'a Spec> for Checked<'a> {
    fn from(spec: &'a Spec) -> Checked<'a> {
        let limits = spec.limits.iter().map(|limit| CheckedLimit {
            name: &limit.name,
            scope: &limit.scope,
            parent: limit.parent.as_deref(),
            settings: LimitJson::from(&limit.options),
            line: limit.line,
        });
        let nics = spec.nics.iter().map(NicJson::from).collect();
        let groups = spec.groups.iter().map(GroupJson::from).collect();
        Checked { file: &spec.file, limits: limits.collect(), nics, groups }
    }
}

#[derive(Serialize)]
struct NicJson<'a> {
    name: &'a str,
    ports: [String; 2],
    limits: Vec<state::LimitState<'a>>,
    line: usize,
}

impl<'a> From<&'a NicSpec> for NicJson<'a> {
    fn from(nic: &'a NicSpec) -> NicJson<'a> {
        let NicSpec { name, ports, line, .. } = nic;
        let ports = ports.each_ref().map(ToString::to_string);
        NicJson { name, ports, limits: state::LimitState::of(nic), line: *line }
    }
}

/// A software NIC of the file.
#[derive(Serialize)]
struct NicPlanJson<'a> {
    name: &'a str,
    /// Its process; none: it does not run.
    pid: Option<u64>,
    /// It runs, with the limits of the file.
    limits_in_force: bool,
}

#[derive(Serialize)]
struct CheckedLimit<'a> {
    name: &'a str,
    #[serde(flatten, serialize_with = "status::scope")]
    scope: &'a Scope,
    parent: Option<&'a str>,
    #[serde(flatten)]
    settings: LimitJson,
    line: usize,
}

/// A limit's settings with their units.
#[derive(Serialize)]
struct LimitJson {
    guarantee_bit_s: Option<u64>,
    weight: Option<u32>,
    egress: Option<QueueJson>,
    ingress: Option<QueueJson>,
    #[serde(flatten)]
    settings: Settings,
}

#[derive(Serialize)]
struct QueueJson {
    /// None: a ceiling that is the parent's.
    rate_bit_s: Option<u64>,
    burst_ns: u64,
    mark_ns: Option<u64>,
    drop_ns: Option<u64>,
}

impl From<&LimitOptions> for LimitJson {
    fn from(options: &LimitOptions) -> LimitJson {
        let queue = |queue: Option<tidegate_core::queue_options::VirtualQueueOptions>| {
            let queue = queue?;
            let config = queue.config().ok()?;
            let [mark_ns, drop_ns] = thresholds(options.scheme, config.mark.0, config.drop.0);
            Some(QueueJson {
                rate_bit_s: (!is_parents(options, queue.rate)).then_some(queue.rate.bit_s()),
                burst_ns: config.burst.0,
                mark_ns,
                drop_ns,
            })
        };
        let guarantee = options.class.and_then(|class| class.guarantee);
        LimitJson {
            guarantee_bit_s: guarantee.map(Rate::bit_s),
            weight: options.class.map(|class| class.weight),
            egress: queue(options.egress),
            ingress: queue(options.ingress),
            settings: (*options).into(),
        }
    }
}

#[derive(Serialize)]
struct PlanJson<'a> {
    file: &'a str,
    actions: Vec<ActionJson<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    waiting: Vec<WaitsJson<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<LeftOutJson<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    schedules: Vec<ScheduleJson<'a>>,
    unmanaged: &'a [String],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nics: Vec<NicPlanJson<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    groups: Vec<GroupPlanJson<'a>>,
}

/// A limit of the file that waits for its cgroup or device, or with its parent.
#[derive(Serialize)]
struct WaitsJson<'a> {
    name: &'a str,
    #[serde(flatten, serialize_with = "status::scope")]
    scope: &'a Scope,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<&'a str>,
    reason: String,
}

/// A limit that is not on all cgroups of its program.
#[derive(Serialize)]
struct LeftOutJson<'a> {
    name: &'a str,
    /// The first ones.
    cgroups: &'a [String],
    reason: Option<&'a str>,
}

/// The schedule of a limit at a moment.
#[derive(Serialize)]
struct ScheduleJson<'a> {
    name: &'a str,
    off: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_change: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_rates: Option<&'a str>,
}

#[derive(Serialize)]
struct ActionJson<'a> {
    action: &'static str,
    name: &'a str,
    #[serde(flatten, serialize_with = "status::scope")]
    scope: &'a Scope,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<LimitJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    differences: Vec<Difference>,
    /// The cgroups that join and leave a limit with a selector.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    join: &'a [String],
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    leave: &'a [String],
}

impl<'a> From<&'a Action> for ActionJson<'a> {
    fn from(action: &'a Action) -> ActionJson<'a> {
        let none: &[String] = &[];
        let base = ActionJson {
            action: action.verb(),
            name: action.name(),
            scope: action.scope(),
            parent: None,
            reason: None,
            limit: None,
            differences: action.differences(),
            join: none,
            leave: none,
        };
        match action {
            Action::Remove { limit, reason } => ActionJson {
                parent: limit.parent.as_deref(),
                reason: Some(reason.to_string()),
                ..base
            },
            Action::Change { to, .. } => ActionJson { limit: Some(to.into()), ..base },
            Action::Members { join, leave, .. } => ActionJson { join, leave, ..base },
            Action::TakeOver { .. } => {
                ActionJson { reason: Some("made by another build".to_owned()), ..base }
            }
            Action::Replace { to: limit, .. } | Action::Add { limit } => ActionJson {
                parent: limit.parent.as_deref(),
                limit: Some((&limit.options).into()),
                join: &limit.members,
                ..base
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::{Scheme, queue_options::VirtualQueueOptions, scheme::SCHEMES};

    use super::*;

    #[test]
    fn what_a_scheme_does_not_have_is_null() {
        let rate = Rate::from_bit_s(100_000_000).unwrap();
        for info in &SCHEMES {
            let queue =
                VirtualQueueOptions { kind: info.queues[0], ..VirtualQueueOptions::new(rate) };
            let options = LimitOptions {
                scheme: info.scheme,
                egress: Some(queue),
                ..LimitOptions::default()
            };
            let json = serde_json::to_value(LimitJson::from(&options)).unwrap();
            let egress = &json["egress"];
            assert_eq!(egress["mark_ns"].is_null(), !info.fields.contains(&"mark"), "{json}");
            assert_eq!(egress["drop_ns"].is_null(), info.scheme == Scheme::Police, "{json}");
        }
    }
}
