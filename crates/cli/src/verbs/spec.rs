//! `tidegate check`, `plan` and `apply`: limits from a file.

use std::{
    io::{self, Write, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use serde::{Serialize, Serializer};
use tidegate_core::Scope;
use tidegate_node::{
    apply,
    host::Host,
    plan::{self, Action, Plan},
    settings::Difference,
    spec::Spec,
    status,
};
use tidegate_sys::limit::LimitOptions;

use crate::{
    args::{CheckArgs, PlanArgs},
    output::{self, Paint},
    refusal,
};

pub fn check(args: &CheckArgs) -> Result<ExitCode> {
    let spec = Spec::read(&args.file)?;
    let mut out = stdout().lock();
    if args.look.json {
        let limits = spec.limits.iter().map(|limit| CheckedLimit {
            name: &limit.name,
            scope: ScopeJson(&limit.scope),
            settings: LimitJson::from(&limit.options),
            line: limit.line,
        });
        let checked = Checked { file: &spec.file, limits: limits.collect() };
        writeln!(out, "{}", serde_json::to_string_pretty(&checked)?)?;
    } else {
        let n = spec.limits.len();
        writeln!(
            out,
            "{}: well-formed, {n} {}",
            spec.file,
            if n == 1 { "limit" } else { "limits" }
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

pub fn plan(store: &Path, args: &PlanArgs) -> Result<ExitCode> {
    let spec = Spec::read(&args.file)?;
    let host = Host::open(store)?;
    let plan = plan::plan(&host.present()?, &host.wanted(&spec)?, args.prune)?;
    print(&spec, &plan, args.look.json, false)?;
    Ok(if plan.actions.is_empty() { ExitCode::SUCCESS } else { refusal::CHANGES.into() })
}

pub fn apply(store: &Path, args: &PlanArgs) -> Result<ExitCode> {
    let spec = Spec::read(&args.file)?;
    let host = Host::open(store)?;
    let wanted = host.wanted(&spec)?;
    let mut host = host.lock()?;
    let planned = host.host().present().map_err(anyhow::Error::from);
    let planned = planned.and_then(|present| Ok(plan::plan(&present, &wanted, args.prune)?));
    let done = planned.and_then(|plan| {
        apply::apply(&mut host, &plan.actions)?;
        Ok(plan)
    });
    host.close();
    print(&spec, &done?, args.look.json, true)?;
    Ok(ExitCode::SUCCESS)
}

fn print(spec: &Spec, plan: &Plan, json: bool, applied: bool) -> Result<()> {
    let mut out = stdout().lock();
    if json {
        let actions = plan.actions.iter().map(ActionJson::from).collect();
        let plan = PlanJson { file: &spec.file, actions, unmanaged: &plan.unmanaged };
        writeln!(out, "{}", serde_json::to_string_pretty(&plan)?)?;
    } else {
        print_text(&mut out, spec, plan, applied)?;
    }
    Ok(())
}

fn print_text(out: &mut impl Write, spec: &Spec, plan: &Plan, applied: bool) -> io::Result<()> {
    let paint = Paint::stdout();
    for action in &plan.actions {
        match action {
            Action::Add { limit } => {
                let (name, on) = (&limit.name, output::scope(&limit.scope));
                let what = output::describe(&limit.options);
                writeln!(out, "{}", paint.green(&format!("+ {name} on {on}: {what}")))?;
            }
            Action::Change { name, .. } => {
                let changes = action.differences();
                let changes = changes.iter().map(|d| format!("{} {} -> {}", d.field, d.from, d.to));
                let changes = changes.collect::<Vec<_>>().join(", ");
                writeln!(out, "{}", paint.yellow(&format!("~ {name}: {changes}")))?;
            }
            Action::Remove { limit, reason } => {
                let (name, on) = (&limit.name, output::scope(&limit.scope));
                writeln!(out, "{}", paint.red(&format!("- {name} on {on} ({reason})")))?;
            }
        }
    }
    for name in &plan.unmanaged {
        writeln!(out, "  {name}: not in the file, left alone (--prune takes it off)")?;
    }
    if plan.actions.is_empty() {
        return writeln!(out, "Nothing to do: the limits are as {} says.", spec.file);
    }
    let count = |verb| plan.actions.iter().filter(|action| action.verb() == verb).count();
    let (add, change, remove) = (count("add"), count("change"), count("remove"));
    if applied {
        writeln!(out, "Done: {add} added, {change} changed, {remove} removed.")
    } else {
        writeln!(out, "Plan: {add} to add, {change} to change, {remove} to remove.")
    }
}

#[derive(Serialize)]
struct Checked<'a> {
    file: &'a str,
    limits: Vec<CheckedLimit<'a>>,
}

#[derive(Serialize)]
struct CheckedLimit<'a> {
    name: &'a str,
    #[serde(flatten)]
    scope: ScopeJson<'a>,
    #[serde(flatten)]
    settings: LimitJson,
    line: usize,
}

/// `"cgroup": "..."`, `"dev": "..."` or `"port": "..."`.
struct ScopeJson<'a>(&'a Scope);

impl Serialize for ScopeJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        status::scope(self.0, serializer)
    }
}

/// A limit's settings with their units.
#[derive(Serialize)]
struct LimitJson {
    egress: Option<QueueJson>,
    ingress: Option<QueueJson>,
    scheme: &'static str,
    loopback: bool,
    pace_ceiling: bool,
    rto_min_ns: u64,
    delack_max_ns: u64,
}

#[derive(Serialize)]
struct QueueJson {
    rate_bit_s: u64,
    burst_ns: u64,
    mark_ns: u64,
    drop_ns: u64,
}

impl From<&LimitOptions> for LimitJson {
    fn from(options: &LimitOptions) -> LimitJson {
        let queue = |queue: Option<tidegate_core::virtual_queue::VirtualQueueOptions>| {
            let queue = queue?;
            let config = queue.config().ok()?;
            Some(QueueJson {
                rate_bit_s: queue.rate.bit_s(),
                burst_ns: config.burst.0,
                mark_ns: config.mark.0,
                drop_ns: config.drop.0,
            })
        };
        LimitJson {
            egress: queue(options.egress),
            ingress: queue(options.ingress),
            scheme: options.scheme.name(),
            loopback: options.loopback,
            pace_ceiling: options.pace_ceiling,
            rto_min_ns: options.rto_min.0,
            delack_max_ns: options.delack_max.0,
        }
    }
}

#[derive(Serialize)]
struct PlanJson<'a> {
    file: &'a str,
    actions: Vec<ActionJson<'a>>,
    unmanaged: &'a [String],
}

#[derive(Serialize)]
struct ActionJson<'a> {
    action: &'static str,
    name: &'a str,
    #[serde(flatten)]
    scope: ScopeJson<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<LimitJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    differences: Vec<DifferenceJson>,
}

#[derive(Serialize)]
struct DifferenceJson {
    field: &'static str,
    from: String,
    to: String,
}

impl From<Difference> for DifferenceJson {
    fn from(Difference { field, from, to }: Difference) -> Self {
        DifferenceJson { field, from, to }
    }
}

impl<'a> From<&'a Action> for ActionJson<'a> {
    fn from(action: &'a Action) -> ActionJson<'a> {
        let (scope, reason, limit) = match action {
            Action::Remove { limit, reason } => (&limit.scope, Some(reason.to_string()), None),
            Action::Change { scope, to, .. } => (scope, None, Some(to)),
            Action::Add { limit } => (&limit.scope, None, Some(&limit.options)),
        };
        ActionJson {
            action: action.verb(),
            name: action.name(),
            scope: ScopeJson(scope),
            reason,
            limit: limit.map(LimitJson::from),
            differences: action.differences().into_iter().map(DifferenceJson::from).collect(),
        }
    }
}
