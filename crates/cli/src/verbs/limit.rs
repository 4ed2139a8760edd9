//! `tidegate limit add|set|del|show`: one limit by hand.

use std::{
    io::Write,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use jiff::Zoned;
use tidegate_agent::{
    persist::{self, Edit, NewLimit, PersistError},
    report::{LimitReport, LimitState},
    run::{give_back_from, moved_for},
    scan,
    status::AgentStatus,
};
use tidegate_core::{Scope, choice::Kernel, selector::SelectorKind};
use tidegate_fleet::{api, status::GroupStatus};
use tidegate_host::{
    absent,
    apply::{Backend, apply},
    auto::{Trees, Written},
    family::{FamilyError, FamilyProblem},
    host::{Host, LockedHost, present},
    plan::{Action, PlanError, State, Wanted, join, plan},
    select,
    settings::{Difference, Patch, SchemeSetting, SettingsProblem, differences},
    spec::{Spec, scope_of},
    world::is_pattern,
};
use tidegate_sys::{
    features, names,
    store::{self, StoreError},
};

use crate::{
    args::{AddArgs, LimitVerb, SetArgs},
    output,
    refusal::{REFUSED, UsageError, flag_error, say, warn},
    verbs::{self, spec::resolved},
};

/// A limit that is only written is looked for in what the agent says for so long.
const AGENT_PATIENCE: Duration = Duration::from_secs(2);
const AGENT_POLL: Duration = Duration::from_millis(50);

pub fn run(
    store: &Path,
    run_dir: &Path,
    daemon: &Path,
    file: &Path,
    verb: LimitVerb,
) -> Result<ExitCode> {
    match verb {
        LimitVerb::Add(args) => add(store, run_dir, file, &args),
        LimitVerb::Set(args) => set(store, run_dir, daemon, file, &args),
        LimitVerb::Del { name } => del(store, run_dir, file, &name),
        LimitVerb::Restore { name } => restore(store, name.as_deref()),
        LimitVerb::Show { name, how } => {
            verbs::status::status(store, run_dir, name.as_deref(), how)
        }
    }
}

/// Does the work with other writers kept out, and lets them in again whatever came of it. An edit of the
/// host's file begins here, too: of two at once the later one must find what the earlier one has written.
fn locked(host: &Host, work: impl FnOnce(&mut LockedHost) -> Result<String>) -> Result<ExitCode> {
    let mut host = host.lock()?;
    let done = work(&mut host);
    verbs::close(host);
    writeln!(output::stdout(), "{}", done?)?;
    Ok(ExitCode::SUCCESS)
}

/// Changes the host's file after the host, while other writers are kept out; how that is said.
fn persisted(edit: Option<&Edit>, file: &Path, what: &str) -> Result<String> {
    let Some(edit) = edit else { return Ok(String::new()) };
    edit.store()
        .map_err(|e| anyhow!("the limit in the kernel is changed, the file is not: {e}"))?;
    Ok(format!("; {what} {}", file.display()))
}

/// The scope of a limit as it is now, with the members of a selector; or why there is none.
fn found(host: &Host, scope: &Scope) -> Result<Result<(Scope, Vec<String>), String>> {
    let scope = match host.resolve(scope) {
        Err(e) if e.is_missing() => return Ok(Err(e.to_string())),
        scope => scope?,
    };
    let members = match &scope {
        Scope::Select(selector) if selector.kind != SelectorKind::Cgroup => {
            let world = scan::scan(host.hierarchy(), "", false, &scan::Cgroups::new());
            let found = select::members(&world, selector);
            let is_open = is_pattern(&selector.value) && !absent::is_for_the_agent(&scope);
            if found.is_empty() && !is_open {
                return Ok(Err(absent::missing(&scope, &world.users)));
            }
            found
        }
        scope => host.members(scope),
    };
    Ok(Ok((scope, members)))
}

/// The limits that one of the host's file makes with `each`, one for each match.
fn made_by(host: &Host, file: &Path, name: &str) -> Vec<String> {
    let Ok(mut spec) = Spec::read(file) else { return Vec::new() };
    spec.limits.retain(|limit| limit.name == name && limit.follow.each);
    let resolved = resolved(spec, host, &Zoned::now());
    let limits = resolved.into_iter().flat_map(|resolved| resolved.spec.limits);
    limits.map(|limit| limit.name).collect()
}

/// Says that the agent undoes a change by hand, if its files have the limit.
fn reverted(host: &Host, run_dir: &Path, name: &str) -> String {
    let agent = AgentStatus::running(run_dir, &host.store().path());
    let kept = agent.as_ref().and_then(|agent| agent.limit(name));
    kept.map_or_else(String::new, |LimitReport { file, .. }| {
        format!("; the agent keeps it as {file} says, and puts that back: change it there")
    })
}

/// Says that the daemon of a fleet decides a rate, if it runs.
fn of_group(daemon: &Path, name: &str, changes: &[Difference]) -> String {
    let Ok(Some(node)) = api::status(daemon) else { return String::new() };
    let has = |group: &&GroupStatus| {
        changes.iter().any(|change| change.field == group.direction)
            && group.limits.iter().any(|member| member.limit == name)
    };
    node.groups.iter().find(has).map_or_else(String::new, |group| {
        format!(
            "; the daemon decides this rate for group `{}`, and puts its own back: change {}",
            group.name, node.file
        )
    })
}

/// The state of a limit by the agent's report; `None` if no agent keeps the file. One that waits may be put
/// on at any moment.
fn by_agent(run_dir: &Path, file: &Path, name: &str) -> Option<String> {
    let deadline = Instant::now() + AGENT_PATIENCE;
    loop {
        let agent = AgentStatus::find(run_dir).filter(|agent| agent.keeps(file))?;
        let limit = agent.limit(name);
        let is_late = Instant::now() >= deadline;
        if let Some(limit) = limit.filter(|limit| is_late || limit.state == LimitState::InForce) {
            return Some(limit.words());
        }
        if is_late {
            return None;
        }
        std::thread::sleep(AGENT_POLL);
    }
}

/// Says that nobody puts on again what a file says, if no agent does.
fn unkept(run_dir: &Path, file: &Path) -> &'static str {
    match AgentStatus::find(run_dir).is_some_and(|agent| agent.keeps(file)) {
        true => "",
        false => "; no agent keeps it: systemctl enable --now tidegate-agent",
    }
}

fn add(store: &Path, run_dir: &Path, file: &Path, args: &AddArgs) -> Result<ExitCode> {
    store::check_name(&args.name)?;
    let Some((flag, text)) = args.scope.given() else {
        return Err(UsageError("name what to limit, for example by --cgroup".to_owned()).into());
    };
    // A slice is a unit, too, but all below it is meant.
    let kind = if flag == "unit" && text.ends_with(".slice") { "slice" } else { flag };
    let scope = scope_of(kind, text).map_err(|e| UsageError(format!("--{flag}: {e}")))?;
    args.parent.as_deref().map_or(Ok(()), store::check_name)?;
    let patch = args.limit.patch;
    let (name, parent) = (args.name.as_str(), args.parent.as_deref());
    let written = Written { name, scope: &scope, parent, patch: &patch };
    // What can be refused without the host is refused before that is asked for anything.
    written.options(&Trees::default(), Kernel::WHOLE, None).map_err(flag_error)?;
    let host = verbs::open(store)?;
    let given = &args.limit.given;
    let in_file = NewLimit { name, scope: &scope, parent, given };
    let edit =
        || args.persist.then(|| persist::add(file, in_file)).transpose().map(Option::flatten);
    let (found, members) = match found(&host, &scope)? {
        Ok(found) => found,
        Err(why) if args.persist => {
            let locked = host.lock()?;
            let written = edit().and_then(|edit| edit.as_ref().map_or(Ok(()), Edit::store));
            verbs::close(locked);
            written?;
            let state = by_agent(run_dir, file, name)
                .unwrap_or_else(|| format!("waiting: {why}{}", unkept(run_dir, file)));
            let file = file.display();
            writeln!(output::stdout(), "limit `{name}` is in {file}, and is {state}")?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(why) => {
            let then = "; with --persist the agent attaches the limit as soon as it can";
            return Err(UsageError(why + then).into());
        }
    };
    let unkept = if args.persist { unkept(run_dir, file) } else { "" };
    locked(&host, |host| {
        let edit = edit()?;
        host.reserve_journal()?;
        host.force(args.force);
        let name = args.name.clone();
        let shown = output::scope_with(&found, &members);
        let present = host.host().present()?;
        let is = present.iter().find(|limit| limit.name == name);
        let trees = Trees::of(&present);
        let options = written.options(&trees, features::kernel(), is.map(|is| &is.options));
        let options = options.map_err(flag_error)?;
        let (parent, asked) = (args.parent.clone(), patch.asked());
        let (of, scope) = (name.clone(), found.clone());
        let wanted = Wanted { name: of, scope, members, options, parent, asked };
        is_readable(host.host(), args.parent.as_deref())?;
        let wanted = join(&present, &wanted).map_err(|e| match is_of(&e, &name, &patch) {
            true => flag_error_of(e),
            false => e.into(),
        })?;
        let mut others = String::new();
        if let Some(limit) = is {
            let same = limit.scope == wanted.scope
                && limit.parent == wanted.parent
                && differences(&limit.options, &wanted.options).is_empty();
            match limit.state {
                State::InForce | State::NoMembers if same => {}
                State::InForce | State::NoMembers | State::NoFq => {
                    return Err(StoreError::Exists(name).into());
                }
                State::ScopeGone | State::Anew | State::Detached | State::Broken => {}
            }
            // With all that is inside it.
            let plan =
                plan(&present, std::slice::from_ref(&wanted), false).map_err(without_file)?;
            if plan.actions.is_empty() {
                let written = persisted(edit.as_ref(), file, "written to")?;
                let nothing = if written.is_empty() { "; nothing changed" } else { &written };
                return Ok(format!("limit `{name}` on {shown} is so already{nothing}{unkept}"));
            }
            apply(host, &plan.actions)?;
            let gone = plan.actions.iter().filter_map(|action| match action {
                Action::Remove { limit, reason } if limit.name != name => {
                    Some(format!("limit `{}` is off: {reason}\n", limit.name))
                }
                _ => None,
            });
            others = gone.collect();
        } else {
            host.add(&wanted)?;
        }
        let what = output::describe(&wanted.options, wanted.parent.as_deref());
        let written = persisted(edit.as_ref(), file, "written to")?;
        Ok(format!("{others}limit `{name}` is on {shown}: {what}{written}{unkept}"))
    })
}

fn set(
    store: &Path,
    run_dir: &Path,
    daemon: &Path,
    file: &Path,
    args: &SetArgs,
) -> Result<ExitCode> {
    store::check_name(&args.name)?;
    let mut patch = args.limit.patch;
    if patch.is_empty() {
        let message = "name what to change, for example --egress 100mbit";
        return Err(UsageError(message.to_owned()).into());
    }
    let name = &args.name;
    let host = verbs::open(store)?;
    let each = made_by(&host, file, name);
    locked(&host, |host| {
        let edit = persist::set(file, name, &args.limit.given)?;
        // The schedule of the file says what holds now.
        let row = edit.as_ref().and_then(|edit| edit.row(name, &Zoned::now()));
        let row = row.filter(|row| {
            let (egress, ingress) = (patch.egress.is_some(), patch.ingress.is_some());
            patch.egress = patch.egress.and(row.egress).or(patch.egress);
            patch.ingress = patch.ingress.and(row.ingress).or(patch.ingress);
            (egress && row.egress.is_some()) || (ingress && row.ingress.is_some())
        });
        let has_rate = row.is_none() && (patch.egress.is_some() || patch.ingress.is_some());
        let row = row.map(|row| format!("; its schedule ({row}) holds now")).unwrap_or_default();
        host.reserve_journal()?;
        let found = host.host().find(name)?;
        let limit = found.as_ref().map(present);
        let Some(limit) = limit.filter(|is| edit.is_none() || !is.state.is_gone()) else {
            let Some(edit) = &edit else { return Err(not_in_force(host.host(), name)) };
            let written = persisted(Some(edit), file, "changed in")?;
            let agent = AgentStatus::find(run_dir).filter(|agent| agent.keeps(file));
            let kept = agent.as_ref().and_then(|agent| agent.limit(name));
            let words = match kept {
                // It has not looked yet; without a row that holds, the new rate does.
                Some(kept)
                    if kept.state == LimitState::InForce
                        || kept.state == LimitState::Off && has_rate =>
                {
                    "off until the agent attaches it".to_owned()
                }
                Some(kept) => kept.words(),
                None if !each.is_empty() => {
                    format!(
                        "one for each match; the agent or `tidegate apply` changes {}",
                        each.join(", ")
                    )
                }
                None => "not on this host".to_owned(),
            };
            return Ok(format!("limit `{name}` is {words}{written}"));
        };
        is_readable(host.host(), limit.parent.as_deref())?;
        let options = match patch.scheme {
            Some(SchemeSetting::Auto) => {
                let (scope, parent) = (&limit.scope, limit.parent.as_deref());
                let trees = Trees::of(&host.host().present()?);
                let written = Written { name, scope, parent, patch: &patch };
                written.options_on(limit.options, &trees, features::kernel(), None)
            }
            _ => patch.on(&limit.options, &limit.scope),
        };
        let options = options.map_err(|e| match e.problem {
            SettingsProblem::NoDirection => UsageError(format!(
                "neither direction would be limited; remove the limit with `tidegate limit del {name}`"
            ))
            .into(),
            _ => flag_error(e),
        })?;
        let alarm = output::alarm(name, &limit.scope, limit.state);
        if let Some(alarm) = alarm.filter(|_| limit.state != State::NoFq) {
            return Err(Unenforced(alarm).into());
        }
        let differences = differences(&limit.options, &options);
        if differences.is_empty() {
            let written = persisted(edit.as_ref(), file, "written to")?;
            let nothing = if written.is_empty() { "; nothing changed" } else { &written };
            return Ok(format!("limit `{name}` is so already{nothing}{row}"));
        }
        let wanted = Wanted { options, asked: patch.asked(), ..Wanted::again(limit) };
        let present = host.host().present()?;
        let plan = match plan(&present, &[wanted], false) {
            Err(PlanError::Family(e)) if is_of(&e, name, &patch) => return Err(flag_error_of(e)),
            plan => plan.map_err(without_file)?,
        };
        // What is inside it may have to change with it.
        match &plan.actions[..] {
            [Action::Change { to, .. }] => host.change(name, to)?,
            actions => apply(host, actions)?,
        }
        let changes: Vec<_> = differences.iter().map(ToString::to_string).collect();
        let mut written = persisted(edit.as_ref(), file, "changed in")?;
        if edit.is_none() {
            written = reverted(host.host(), run_dir, name);
        }
        written += &of_group(daemon, name, &differences);
        Ok(format!("limit `{name}` changed: {}{written}{row}", changes.join(", ")))
    })
}

/// A limit that is not on this host: it waits, or there is none of this name.
fn not_in_force(host: &Host, name: &str) -> anyhow::Error {
    let waiting = host.store().waiting();
    let Some(waits) = waiting.iter().find(|waits| waits.name == name) else {
        return verbs::missing(host, name);
    };
    let why = absent::missing(&waits.scope, &names::users());
    UsageError(format!("limit `{name}` waits: {why}; change it in its file, and apply that")).into()
}

/// A limit inside one that cannot be read is not changed, and says which one that is.
fn is_readable(host: &Host, parent: Option<&str>) -> Result<(), StoreError> {
    parent.map_or(Ok(()), |parent| host.find(parent).map(drop))
}

/// Whether what was asked of a limit is wrong: of guarantees that are too much together the one that was
/// given.
fn is_of(error: &FamilyError, name: &str, asked: &Patch) -> bool {
    let is_too_much = matches!(error.problem, FamilyProblem::Reserved { .. });
    error.name == name || is_too_much && asked.guarantee.is_some()
}

/// In a tree it cannot be so; the flag that says it.
fn flag_error_of(FamilyError { field, problem, .. }: FamilyError) -> anyhow::Error {
    UsageError(format!("--{field}: {problem}")).into()
}

/// A limit that is not enforced is put back before it is changed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Unenforced(String);

fn del(store: &Path, run_dir: &Path, file: &Path, name: &str) -> Result<ExitCode> {
    store::check_name(name)?;
    let host = verbs::open(store)?;
    let edit = || match persist::del(file, name) {
        // A limit comes off all the same.
        Err(PersistError::Broken(why)) => {
            say(&format!("tidegate: note: {} is not changed: {why}", file.display()));
            Ok(None)
        }
        edit => edit,
    };
    // Nothing to take off is what was asked for; but a slip of the pen shall be seen.
    let waits = host.store().waiting().iter().any(|waits| waits.name == name);
    if host.find(name).is_ok_and(|found| found.is_none()) && !waits && edit()?.is_none() {
        say(&format!("tidegate: note: nothing to remove: {}", verbs::missing(&host, name)));
        return Ok(ExitCode::SUCCESS);
    }
    let each = made_by(&host, file, name);
    locked(&host, |host| {
        let edit = edit()?;
        let is = host.host().find(name);
        let waited = host.forget_waiting(name)? && waits;
        if !matches!(is, Ok(None)) && !waited {
            host.remove(name)?;
        }
        let mut made = Vec::new();
        for one in &each {
            if host.host().find(one)?.is_some() {
                host.remove(one)?;
                made.push(format!("`{one}`"));
            }
        }
        let with = if made.is_empty() { "" } else { " with " };
        let mut written = persisted(edit.as_ref(), file, "taken out of")?;
        if edit.is_none() {
            written = reverted(host.host(), run_dir, name);
        }
        let what = if waited { "does not wait any more" } else { "is off" };
        // An agent that has ended cannot do it.
        let is = is.ok().flatten().as_ref().map(present);
        let moved = is.iter().flat_map(moved_for);
        let back = moved.filter(|path| give_back_from(host.host().hierarchy(), path));
        let back: String = back
            .map(|path| format!("\nthe processes of {path} are in the cgroup above again"))
            .collect();
        Ok(format!("limit `{name}` {what}{with}{}{written}{back}", made.join(", ")))
    })
}

/// Puts limits on again, all or none.
fn put_back(host: &mut LockedHost, lost: &[Wanted]) -> Result<()> {
    let plan = plan(&host.host().present()?, lost, false).map_err(|e| match e {
        PlanError::ScopeTaken { name, scope, other } => anyhow!(
            "{scope} has limit `{other}` by now; remove `{name}` with `tidegate limit del {name}`"
        ),
        PlanError::PrefixTaken { name, scope, prefix, other } => anyhow!(
            "{scope} has limit `{other}` for {prefix} by now; remove `{name}` with `tidegate limit del \
             {name}`"
        ),
        e => e.into(),
    })?;
    Ok(apply(host, &plan.actions)?)
}

/// A plan without a file that one could apply.
fn without_file(error: PlanError) -> anyhow::Error {
    match error {
        PlanError::ScopeTaken { scope, other: name, .. } => {
            StoreError::ScopeTaken { scope, name }.into()
        }
        PlanError::PrefixTaken { scope, prefix, other: name, .. } => {
            StoreError::PrefixTaken { scope, prefix, name }.into()
        }
        e => e.into(),
    }
}

fn restore(store: &Path, name: Option<&str>) -> Result<ExitCode> {
    name.map_or(Ok(()), store::check_name)?;
    let host = verbs::open(store)?;
    if let Some(name) = name
        && host.store().list_above(host.hierarchy(), name).is_err()
    {
        return Err(verbs::missing(&host, name));
    }
    let mut refused = Vec::new();
    let code = locked(&host, |host| {
        host.reserve_journal()?;
        let (mut lost, not_there) = host.host().lost(name)?;
        refused.extend(not_there.iter().map(ToString::to_string));
        if lost.is_empty() {
            return Ok("nothing to restore; nothing changed".to_owned());
        }
        if let Err(e) = put_back(host, &lost) {
            if name.is_some() {
                return Err(e);
            }
            // One that cannot be put back keeps no other one off. One inside another may have to wait for
            // that.
            let mut left = std::mem::take(&mut lost);
            while !left.is_empty() {
                let (before, mut errors) = (lost.len(), Vec::new());
                for limit in std::mem::take(&mut left) {
                    if let Some(stopped) = host.stopped() {
                        return Err(stopped.into());
                    }
                    match put_back(host, std::slice::from_ref(&limit)) {
                        Ok(()) => lost.push(limit),
                        Err(e) => {
                            errors.push(format!("limit `{}` is not restored: {e}", limit.name));
                            left.push(limit);
                        }
                    }
                }
                if lost.len() == before {
                    refused.extend(errors);
                    break;
                }
            }
            if lost.is_empty() {
                return Ok("nothing was restored; nothing changed".to_owned());
            }
        }
        let lines = lost.iter().map(|limit| {
            let what = output::describe(&limit.options, limit.parent.as_deref());
            let on = output::scope_with(&limit.scope, &limit.members);
            format!("limit `{}` is on {on}: {what}", limit.name)
        });
        Ok(lines.collect::<Vec<_>>().join("\n"))
    })?;
    refused.iter().for_each(|e| warn(e));
    Ok(if refused.is_empty() { code } else { ExitCode::from(REFUSED) })
}
