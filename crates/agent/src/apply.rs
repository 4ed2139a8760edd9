//! Puts the limits of a goal on the host. Whatever cannot be put on is left out alone, with the reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
};

use sd_notify::NotifyState;
use tidegate_core::Scope;
use tidegate_fleet::rates;
use tidegate_host::{
    absent::{self, Waits},
    apply::{self, ApplyError},
    host::{Host, LockedHost},
    plan::{Action, Plan, Present, Reason, State, Wanted, plan_pruning},
    spec::{LimitSpec, Spec},
};
use tidegate_sys::store::StoreError;

use crate::{
    goal::{self, Files, Goal},
    report::Pulse,
};

/// What one step may take while the agent starts, in microseconds.
const STEP_US: u32 = 30_000_000;

/// What became of a goal.
#[derive(Debug, Default)]
pub struct Applied {
    /// Why limits are not in force, by name.
    pub refused: BTreeMap<String, String>,
    /// What else went wrong, a sentence each.
    pub problems: Vec<String>,
    /// Which limits have other settings now, a sentence each.
    pub changes: Vec<String>,
    /// A signal that came meanwhile.
    pub signal: Option<i32>,
}

/// Applies a goal. Of the limits that only the host has those go that are `managed` and not asked for any
/// more.
///
/// # Errors
/// [`StoreError`] when nothing could be done.
pub fn apply(
    host: &Host,
    files: &Files,
    goal: &Goal,
    managed: &BTreeSet<String>,
    pulse: &Pulse,
) -> Result<Applied, StoreError> {
    let mut host = host.lock()?;
    let applied = within(&mut host, files, goal, managed, pulse);
    let problems = host.problems();
    host.close_and_go_on();
    applied.map(|mut applied| {
        applied.problems.extend(problems);
        applied
    })
}

fn within(
    host: &mut LockedHost,
    files: &Files,
    goal: &Goal,
    managed: &BTreeSet<String>,
    pulse: &Pulse,
) -> Result<Applied, StoreError> {
    let mut applied = Applied::default();
    let present = host.host().present()?;
    let mut spec = spec_of(files, goal);
    let (wanted, gone) = loop {
        match host.host().wanted(&spec, &present) {
            Ok(wanted) => break wanted,
            Err(error) => {
                let name = error.limit.clone().unwrap_or_default();
                let before = spec.limits.len();
                spec.limits.retain(|limit| limit.name != name);
                if spec.limits.len() == before {
                    applied.problems.push(error.to_string());
                    return Ok(applied);
                }
                applied.refused.insert(name, error.to_string());
            }
        }
    };
    let mut wanted = rates::kept(&spec, &present, &wanted);
    goal::set_members(goal, &present, &mut wanted);
    let waits: Vec<_> = goal.waiting.iter().cloned().chain(gone).collect();
    let is_over = |name: &str| {
        let is = present.iter().find(|is| is.name == name);
        let members = is.iter().flat_map(|is| is.members.iter().map(String::as_str));
        let mut on = is.iter().map(|is| is.scope.name()).chain(members);
        managed.contains(name) && goal.is_over(name, &mut on)
    };
    let prune = |name: &str| goal.off.contains(name) || is_over(name);
    let mut plan = planned(present.clone(), wanted, &waits, goal, prune, &mut applied);
    rates::begin_alone(&spec, &mut plan);
    if !plan.actions.is_empty() {
        host.reserve_journal()?;
        perform(host, &plan, &mut applied, pulse);
        // Made by hand, inside a limit that was put on again.
        applied.problems.extend(plan.actions.iter().filter_map(|action| match action {
            Action::Remove { limit, reason: reason @ Reason::ScopeGone }
                if !managed.contains(&limit.name) =>
            {
                Some(format!("limit `{}` is off: {reason}", limit.name))
            }
            _ => None,
        }));
    }
    let named = Spec { limits: named(files, goal), ..spec };
    let noted = host.note_waiting(&named, &waits, |_| false);
    // Nobody asks any more for what has waited in vain.
    let mut gone = managed.iter().filter(|name| !goal.has(name));
    let forget = |name: &String| host.forget_waiting(name).map(drop);
    let noted = noted.and_then(|()| gone.try_for_each(forget));
    if let Err(error) = noted {
        applied.problems.push(error.to_string());
    }
    Ok(applied)
}

/// The limits of a goal as one file.
fn spec_of(files: &Files, goal: &Goal) -> Spec {
    let limits = goal.limits.iter().map(|goal| goal.limit.clone()).collect();
    let groups = files.specs.iter().flat_map(|spec| spec.groups.clone()).collect();
    let file = "the files of the agent".to_owned();
    let (nics, fleet, blank, labels, annotations) = (Vec::new(), None, false, false, false);
    Spec { file, limits, nics, fleet, groups, labels, annotations, blank }
}

/// All limits of the files, in whatever state.
fn named(files: &Files, goal: &Goal) -> Vec<LimitSpec> {
    let all = files.specs.iter().flat_map(|spec| spec.limits.iter());
    all.chain(goal.limits.iter().map(|goal| &goal.limit)).cloned().collect()
}

/// A plan without the limits that have no place in one.
fn planned(
    mut present: Vec<Present>,
    mut wanted: Vec<Wanted>,
    waits: &[Waits],
    goal: &Goal,
    prune: impl Fn(&str) -> bool,
    applied: &mut Applied,
) -> Plan {
    let aside = |scope: &Scope, name: &str| Waits {
        name: name.to_owned(),
        scope: scope.clone(),
        parent: None,
    };
    loop {
        let nowhere = Scope::Cgroup(String::new());
        let kept = goal.kept().map(|report| report.name.as_str());
        let kept = kept.chain(applied.refused.keys().map(String::as_str));
        let mut waits = waits.to_vec();
        waits.extend(kept.map(|name| aside(&nowhere, name)));
        // Inside one that was refused just now.
        absent::with_parents(&mut wanted, &mut waits);
        let is = absent::set_aside(&present, &wanted, &waits, &prune);
        let error = match plan_pruning(&is, &wanted, &prune) {
            Ok(plan) => return plan,
            Err(error) => error,
        };
        if let Some(at) = wanted.iter().position(|limit| limit.name == error.limit()) {
            let refused = wanted.remove(at).name;
            applied.refused.insert(refused, error.to_string());
            continue;
        }
        applied.problems.push(error.to_string());
        let before = present.len();
        // A limit made by hand whose place is gone does not block the others.
        present.retain(|limit| limit.name != error.limit());
        if present.len() == before {
            let over = present.iter().map(|limit| &limit.name).filter(|name| prune(name));
            let names = wanted.iter().map(|limit| &limit.name).chain(over);
            applied.refused.extend(names.map(|name| (name.clone(), error.to_string())));
            return Plan::default();
        }
    }
}

/// Carries a plan out: as a whole where limits take the place of others, else step by step.
fn perform(host: &mut LockedHost, plan: &Plan, applied: &mut Applied, pulse: &Pulse) {
    let holds = |limit: &Present| !limit.state.is_gone() && limit.state != State::NoMembers;
    let takes = |action: &Action| match action {
        Action::Remove { limit, .. } => holds(limit),
        Action::Replace { reason, .. } => matches!(reason, Reason::Moved | Reason::OtherParent),
        _ => false,
    };
    if plan.actions.iter().any(takes) && plan.actions.len() > 1 {
        match apply::apply(host, &plan.actions) {
            Ok(()) => {
                applied.changes.extend(plan.actions.iter().filter_map(changed));
                return;
            }
            Err(error) => {
                if is_stop(&error, applied) {
                    return;
                }
            }
        }
    }
    for action in &plan.actions {
        // Many limits take longer than a watchdog waits.
        pulse.beat(&[NotifyState::ExtendTimeoutUsec(STEP_US)]);
        let parent = match action {
            Action::Add { limit } | Action::Replace { to: limit, .. } => limit.parent.as_ref(),
            _ => None,
        };
        if let Some(parent) = parent.filter(|parent| applied.refused.contains_key(*parent)) {
            let why = format!("its parent `{parent}` is refused");
            applied.refused.insert(action.name().to_owned(), why);
            continue;
        }
        if let Err(error) = apply::apply(host, slice::from_ref(action)) {
            if is_stop(&error, applied) {
                return;
            }
            let source = match error {
                ApplyError::RolledBack { source } => source.to_string(),
                error => error.to_string(),
            };
            applied.refused.insert(action.name().to_owned(), source);
        } else {
            applied.changes.extend(changed(action));
        }
    }
}

/// The settings that an action has changed, as a sentence.
fn changed(action: &Action) -> Option<String> {
    let changes: Vec<_> = action.differences().iter().map(ToString::to_string).collect();
    (!changes.is_empty())
        .then(|| format!("limit `{}` changed: {}", action.name(), changes.join(", ")))
}

/// Whether a signal came between two steps.
fn is_stop(error: &ApplyError<StoreError>, applied: &mut Applied) -> bool {
    let (ApplyError::RolledBack { source } | ApplyError::HalfApplied { source, .. }) = error;
    if let StoreError::Stopped { signal, .. } = source {
        applied.signal = Some(*signal);
    }
    applied.signal.is_some()
}
