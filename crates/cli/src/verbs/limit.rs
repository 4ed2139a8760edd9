//! `tidegate limit add|set|del|show`: one limit by hand.

use std::{
    io::{Write, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::{Result, anyhow};
use tidegate_agent::persist::{self, Edit, NewLimit, PersistError};
use tidegate_core::{Scope, choice::Kernel};
use tidegate_host::{
    apply::{Backend, apply},
    auto::{Trees, Written},
    family::FamilyError,
    host::{Host, LockedHost, present},
    plan::{Action, PlanError, State, Wanted, join, plan},
    settings::{SchemeSetting, SettingsProblem, differences},
    spec::{Problem, is_device_name},
};
use tidegate_sys::{
    features,
    store::{self, StoreError},
};

use crate::{
    args::{AddArgs, LimitVerb, SetArgs},
    output,
    refusal::{REFUSED, UsageError, flag_error, say, warn},
    verbs,
};

pub fn run(store: &Path, file: &Path, verb: LimitVerb) -> Result<ExitCode> {
    match verb {
        LimitVerb::Add(args) => add(store, file, &args),
        LimitVerb::Set(args) => set(store, file, &args),
        LimitVerb::Del { name } => del(store, file, &name),
        LimitVerb::Restore { name } => restore(store, name.as_deref()),
        LimitVerb::Show { name, how } => verbs::status::status(store, name.as_deref(), how),
    }
}

/// Does the work with other writers kept out, and lets them in again whatever came of it.
fn locked(host: &Host, work: impl FnOnce(&mut LockedHost) -> Result<String>) -> Result<ExitCode> {
    let mut host = host.lock()?;
    let done = work(&mut host);
    verbs::close(host);
    writeln!(stdout(), "{}", done?)?;
    Ok(ExitCode::SUCCESS)
}

/// Changes the host's file after the host, while other writers are kept out; how that is said.
fn persisted(edit: Option<&Edit>, file: &Path, what: &str) -> Result<String> {
    let Some(edit) = edit else { return Ok(String::new()) };
    edit.store()
        .map_err(|e| anyhow!("the limit in the kernel is changed, the file is not: {e}"))?;
    Ok(format!("; {what} {}", file.display()))
}

fn add(store: &Path, file: &Path, args: &AddArgs) -> Result<ExitCode> {
    store::check_name(&args.name)?;
    let Some(scope) = args.scope.scope() else {
        return Err(UsageError("name one of --cgroup, --dev and --port".to_owned()).into());
    };
    if matches!(&scope, Scope::Cgroup(path) if path.trim().is_empty()) {
        let message = "--cgroup: empty path; write for example system.slice/backup.service, or / \
                       for the whole host";
        return Err(UsageError(message.to_owned()).into());
    }
    if scope.is_device() && !is_device_name(scope.name()) {
        let (kind, problem) = (scope.kind(), Problem::DeviceName(scope.name().to_owned()));
        return Err(UsageError(format!("--{kind}: {problem}")).into());
    }
    args.parent.as_deref().map_or(Ok(()), store::check_name)?;
    let patch = args.limit.patch;
    let (name, parent) = (args.name.as_str(), args.parent.as_deref());
    let written = Written { name, scope: &scope, parent, patch: &patch };
    // What can be refused without the host is refused before that is asked for anything.
    written.options(&Trees::default(), Kernel::WHOLE, None).map_err(flag_error)?;
    let host = verbs::open(store)?;
    let edit = match args.persist {
        true => {
            let given = &args.limit.given;
            persist::add(file, NewLimit { name, scope: &scope, parent, given })?
        }
        false => None,
    };
    locked(&host, |host| {
        host.reserve_journal()?;
        host.force(args.force);
        let name = args.name.clone();
        let scope = host.host().resolve(&scope)?;
        let members = host.host().members(&scope);
        let shown = output::scope_with(&scope, &members);
        let present = host.host().present()?;
        let is = present.iter().find(|limit| limit.name == name);
        let trees = Trees::of(&present);
        let options = written.options(&trees, features::kernel(), is.map(|is| &is.options));
        let options = options.map_err(flag_error)?;
        let (parent, asked) = (args.parent.clone(), patch.asked());
        let (of, scope) = (name.clone(), scope.clone());
        let wanted = Wanted { name: of, scope, members, options, parent, asked };
        is_readable(host.host(), args.parent.as_deref())?;
        let wanted = join(&present, &wanted).map_err(|e| match e.name == name {
            true => flag_error_of(e),
            false => e.into(),
        })?;
        if let Some(limit) = is {
            let same = limit.scope == wanted.scope
                && limit.parent == wanted.parent
                && differences(&limit.options, &wanted.options).is_empty();
            match limit.state {
                State::InForce | State::NoMembers if same => {}
                State::InForce | State::NoMembers | State::NoFq => {
                    return Err(StoreError::Exists(name).into());
                }
                State::ScopeGone | State::Detached | State::Broken => {}
            }
            // With all that is inside it.
            let plan = plan(&present, std::slice::from_ref(&wanted), false)?;
            if plan.actions.is_empty() {
                let written = persisted(edit.as_ref(), file, "written to")?;
                let nothing = if written.is_empty() { "; nothing changed" } else { &written };
                return Ok(format!("limit `{name}` on {shown} is so already{nothing}"));
            }
            apply(host, &plan.actions)?;
        } else {
            host.add(&wanted)?;
        }
        let what = output::describe(&wanted.options, wanted.parent.as_deref());
        let written = persisted(edit.as_ref(), file, "written to")?;
        Ok(format!("limit `{name}` is on {shown}: {what}{written}"))
    })
}

fn set(store: &Path, file: &Path, args: &SetArgs) -> Result<ExitCode> {
    store::check_name(&args.name)?;
    let patch = args.limit.patch;
    if patch.is_empty() {
        let message = "name what to change, for example --egress 100mbit";
        return Err(UsageError(message.to_owned()).into());
    }
    let name = &args.name;
    let host = verbs::open(store)?;
    let edit = persist::set(file, name, &args.limit.given)?;
    locked(&host, |host| {
        host.reserve_journal()?;
        let Some(pinned) = host.host().find(name)? else {
            return Err(verbs::missing(host.host(), name));
        };
        let limit = present(&pinned);
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
                "neither direction would be limited; take the limit off with `tidegate limit del {name}`"
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
            return Ok(format!("limit `{name}` is so already{nothing}"));
        }
        let wanted = Wanted { options, asked: patch.asked(), ..Wanted::again(limit) };
        let present = host.host().present()?;
        let plan = match plan(&present, &[wanted], false) {
            Err(PlanError::Family(e)) if e.name == *name => return Err(flag_error_of(e)),
            plan => plan?,
        };
        // What is inside it may have to change with it.
        match &plan.actions[..] {
            [Action::Change { to, .. }] => host.change(name, to)?,
            actions => apply(host, actions)?,
        }
        let changes: Vec<_> =
            differences.iter().map(|d| format!("{} {} -> {}", d.field, d.from, d.to)).collect();
        let written = persisted(edit.as_ref(), file, "changed in")?;
        Ok(format!("limit `{name}` changed: {}{written}", changes.join(", ")))
    })
}

/// A limit inside one that cannot be read is not changed, and says which one that is.
fn is_readable(host: &Host, parent: Option<&str>) -> Result<(), StoreError> {
    parent.map_or(Ok(()), |parent| host.find(parent).map(drop))
}

/// In a tree it cannot be so; the flag that says it.
fn flag_error_of(FamilyError { field, problem, .. }: FamilyError) -> anyhow::Error {
    UsageError(format!("--{field}: {problem}")).into()
}

/// A limit that is not enforced is put back before it is changed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Unenforced(String);

fn del(store: &Path, file: &Path, name: &str) -> Result<ExitCode> {
    store::check_name(name)?;
    let host = verbs::open(store)?;
    let edit = match persist::del(file, name) {
        // A limit comes off all the same.
        Err(PersistError::Broken(why)) => {
            say(&format!("tidegate: note: {} is not changed: {why}", file.display()));
            None
        }
        edit => edit?,
    };
    // Nothing to take off is what was asked for; but a slip of the pen shall be seen.
    let waits = host.store().waiting().iter().any(|waits| waits.name == name);
    if host.find(name).is_ok_and(|found| found.is_none()) && !waits && edit.is_none() {
        say(&format!("tidegate: note: nothing to take off: {}", verbs::missing(&host, name)));
        return Ok(ExitCode::SUCCESS);
    }
    locked(&host, |host| {
        let is = !matches!(host.host().find(name), Ok(None));
        let waited = host.forget_waiting(name)? && waits;
        if is && !waited {
            host.remove(name)?;
        }
        let written = persisted(edit.as_ref(), file, "taken out of")?;
        let what = if waited { "does not wait any more" } else { "is off" };
        Ok(format!("limit `{name}` {what}{written}"))
    })
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
        let lost;
        (lost, refused) = host.host().lost(name)?;
        if lost.is_empty() {
            return Ok("nothing to restore; nothing changed".to_owned());
        }
        let plan = plan(&host.host().present()?, &lost, false)?;
        apply(host, &plan.actions)?;
        let lines = lost.iter().map(|limit| {
            let what = output::describe(&limit.options, limit.parent.as_deref());
            let on = output::scope_with(&limit.scope, &limit.members);
            format!("limit `{}` is on {on}: {what}", limit.name)
        });
        Ok(lines.collect::<Vec<_>>().join("\n"))
    })?;
    refused.iter().for_each(|e| warn(&e.to_string()));
    Ok(if refused.is_empty() { code } else { ExitCode::from(REFUSED) })
}
