//! One message on standard error, and the exit code that says whose turn it is: the user's or the host's.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Error;
use clap::error::ErrorKind;
use tidegate_agent::persist::PersistError;
use tidegate_fleet::{daemon::DaemonError, http::HttpError};
use tidegate_host::{
    absent::ScopeError, apply::ApplyError, explain::ExplainError, family::FamilyError,
    nic::run::NicRunError, plan::PlanError, run::RunError, settings::SettingsError,
    spec::SpecError,
};
use tidegate_sys::{
    cgroup::CgroupError, congestion::CongestionError, fq::FqError, limit::LimitError,
    process::SpawnError, store::StoreError,
};

use crate::output::Paint;

/// Usage or spec error.
pub const USAGE: u8 = 1;
/// The kernel refused.
pub const REFUSED: u8 = 2;
/// `plan` found changes.
pub const CHANGES: u8 = 3;
/// As shells have it: the command cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// As shells have it: there is no such command.
const NOT_FOUND: u8 = 127;

/// What the user typed cannot be; the message says what to type instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// A flag whose value cannot be: the fields of a spec file are the flags of the command line.
pub fn flag_error(SettingsError { field, problem }: SettingsError) -> Error {
    UsageError(format!("--{}: {}", field.replace('_', "-"), problem.as_flags())).into()
}

/// Help and version are no errors; the rest is shown as ours.
pub fn usage(error: &clap::Error) -> ExitCode {
    let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    let bare = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if asked || bare {
        let _ = error.print();
        return if asked { ExitCode::SUCCESS } else { ExitCode::from(USAGE) };
    }
    let text = error.render().to_string();
    // The usage would show what the environment sets as if it had to be given, the verbs those that are
    // hidden; and what begins with `-` is no value after `--` either.
    let wrong = ["Usage: ", "  tip: to pass '-", "  [subcommands: "];
    let lines = text.lines().filter(|line| !wrong.iter().any(|wrong| line.starts_with(wrong)));
    let mut lines: Vec<_> = lines.collect();
    lines.dedup_by(|line, before| line.is_empty() && before.is_empty());
    let text = lines.join("\n");
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    say(&format!("tidegate: error: {text}"));
    ExitCode::from(USAGE)
}

/// Says what went wrong; a reader who has gone away is nothing wrong.
pub fn report(error: &Error) -> ExitCode {
    let io_error = error.downcast_ref::<io::Error>();
    if io_error.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    say(&format!("tidegate: error: {error}"));
    ExitCode::from(exit_code(error))
}

/// A line on standard error, whether or not somebody reads it. It is one write: lines of several processes
/// do not run into each other.
pub fn say(text: &str) {
    let line = Paint::plain().harmless(text) + "\n";
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Something went wrong that keeps nobody from going on.
pub fn warn(text: &str) {
    say(&format!("tidegate: warning: {text}"));
}

fn exit_code(error: &Error) -> u8 {
    let nic_is_users = |e: &NicRunError| {
        use NicRunError::{NoNic, NoSuchNic, Spec, WhichNic};
        matches!(e, NoNic(_) | NoSuchNic { .. } | Spec(_) | WhichNic { .. })
    };
    let daemon_is_users = |e: &DaemonError| {
        use DaemonError::{HostName, Keys, NoFleet, Node, Spec};
        matches!(e, HostName(..) | Keys(_) | NoFleet(_) | Node(_) | Spec(_))
    };
    let users = error.is::<UsageError>()
        || error.downcast_ref().is_some_and(daemon_is_users)
        || error.downcast_ref().is_some_and(nic_is_users)
        || matches!(error.downcast_ref(), Some(HttpError::Unknown(_)))
        || error.is::<SpecError>()
        || error.downcast_ref().is_some_and(|e| !matches!(e, PersistError::Io(..)))
        || error.is::<PlanError>()
        || error.is::<FamilyError>()
        || error.downcast_ref::<CgroupError>().is_some_and(cgroup_is_users)
        || error.downcast_ref::<ExplainError>().is_some_and(explain_is_users)
        || error.downcast_ref::<ScopeError>().is_some_and(scope_is_users)
        || error.downcast_ref::<StoreError>().is_some_and(store_is_users);
    let applied = error.downcast_ref::<ApplyError<StoreError>>();
    let users = users
        || matches!(applied, Some(ApplyError::RolledBack { source }) if store_is_users(source));
    if let Some(signal) = error.downcast_ref().and_then(stopping) {
        return signal;
    }
    if let Some(ApplyError::RolledBack { source }) = applied
        && let Some(signal) = stopping(source)
    {
        return signal;
    }
    match error.downcast_ref::<RunError>() {
        Some(RunError::Spawn(SpawnError::NotFound(_))) => NOT_FOUND,
        Some(RunError::Spawn(SpawnError::NotExecutable { .. })) => NOT_EXECUTABLE,
        Some(RunError::Congestion(CongestionError::Unknown { .. }) | RunError::Family(_)) => USAGE,
        Some(RunError::Store(e)) if store_is_users(e) => USAGE,
        _ if users => USAGE,
        _ => REFUSED,
    }
}

/// As shells have it: 128 and the number of the signal.
fn stopping(error: &StoreError) -> Option<u8> {
    match error {
        StoreError::Stopped { signal, .. } => u8::try_from(128 + signal).ok(),
        _ => None,
    }
}

fn cgroup_is_users(error: &CgroupError) -> bool {
    matches!(
        error,
        CgroupError::Missing { .. } | CgroupError::NotADirectory(_) | CgroupError::BadPath(_)
    )
}

fn explain_is_users(error: &ExplainError) -> bool {
    match error {
        ExplainError::NoProcess(_)
        | ExplainError::NoPort(_)
        | ExplainError::BadPort(_)
        | ExplainError::NoFlow(_) => true,
        ExplainError::Cgroup(e) => cgroup_is_users(e),
        _ => false,
    }
}

fn scope_is_users(error: &ScopeError) -> bool {
    match error {
        ScopeError::Cgroup(e) => cgroup_is_users(e),
        ScopeError::Device(e) => matches!(e, FqError::Missing(_)),
    }
}

fn store_is_users(error: &StoreError) -> bool {
    match error {
        StoreError::BadName(_)
        | StoreError::Missing(_)
        | StoreError::Exists(_)
        | StoreError::NoParent { .. }
        | StoreError::NotAbove { .. }
        | StoreError::TooDeep(_)
        | StoreError::HasChildren { .. }
        | StoreError::OtherParent(_)
        | StoreError::ScopeTaken { .. }
        | StoreError::PrefixTaken { .. } => true,
        StoreError::Limit { source: LimitError::Config(_), .. } => true,
        StoreError::Limit { source: LimitError::Cgroup(e), .. } => cgroup_is_users(e),
        StoreError::Limit { source: LimitError::Fq(FqError::Missing(_)), .. } => true,
        _ => false,
    }
}
