//! `tidegate run`.

use std::{
    env, io,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::Result;
use tidegate_core::{Scope, choice::Kernel};
use tidegate_host::{
    auto::{Trees, Written},
    run::{self, ParentOf, RunError, RunOptions, socket::SOCKET},
    summary::Report,
};
use tidegate_sys::{
    limit::LimitOptions,
    names::{self, User},
    store,
};

use crate::{
    args::RunArgs,
    refusal::{UsageError, flag_error, say},
};

pub fn run(store: &Path, run_dir: &Path, args: &RunArgs) -> Result<ExitCode> {
    let patch = args.limit.patch;
    let (scope, parent) = (Scope::Cgroup(String::new()), args.parent.as_deref());
    let written = Written { name: "", scope: &scope, parent, patch: &patch };
    // No scheme of a cgroup needs something of the kernel that not all have.
    let limit = written.options(&Trees::default(), Kernel::WHOLE, None).map_err(flag_error)?;
    // Its cgroup is in no device's tree.
    if limit.scheme.info().cgroups.is_empty() {
        patch.on(&LimitOptions::default(), &scope).map_err(flag_error)?;
    }
    args.parent.as_deref().map_or(Ok(()), store::check_name)?;
    let parent = args.parent.clone().map(|name| ParentOf {
        store: store.to_owned(),
        name,
        asked: patch.asked(),
    });
    let Some((command, arguments)) = args.command.split_first() else {
        return Err(UsageError("name the command to run, after `--`".to_owned()).into());
    };
    let user = args.user.as_deref().map(user).transpose()?;
    let given = args.limit.given.iter().map(|(key, text)| ((*key).to_owned(), text.clone()));
    let options = RunOptions {
        limit,
        given: given.collect(),
        agent: run_dir.join(SOCKET),
        parent,
        user,
        cc: args.cc.clone(),
        command: command.clone(),
        arguments: arguments.to_vec(),
    };
    let finished = match run::run(&options) {
        Err(RunError::NoCgroup { path, .. }) if may_have_scope(&path) => {
            return Err(in_scope().into());
        }
        finished => finished?,
    };
    for warning in &finished.warnings {
        say(&format!("tidegate: warning: {warning}"));
    }
    if args.stats {
        let Report { lines, json } = &finished.report;
        match args.json {
            true => say(json),
            false => lines.iter().for_each(|line| say(&format!("tidegate: {line}"))),
        }
    }
    Ok(ExitCode::from(finished.exit_code))
}

/// Whether systemd can give this process a scope of the user's. One below `user@` has that already.
fn may_have_scope(path: &str) -> bool {
    let has_systemd = Path::new("/run/systemd/system").exists();
    has_systemd && env::var_os("XDG_RUNTIME_DIR").is_some() && !path.contains("user@")
}

/// Runs this command again in a cgroup that is the user's; only an error returns.
fn in_scope() -> io::Error {
    let mut command = Command::new("systemd-run");
    command.args(["--user", "--scope", "--quiet", "--property=Delegate=yes", "--"]);
    let program = env::current_exe().unwrap_or_else(|_| "tidegate".into());
    let error = command.arg(program).args(env::args_os().skip(1)).exec();
    io::Error::new(error.kind(), format!("systemd-run: {error}; the command was not started"))
}

/// A user by name or number, or the one who has called sudo.
fn user(name: &str) -> Result<User> {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let found = match name {
        "invoker" => {
            let Some(uid) = number("SUDO_UID") else {
                let message = "--user invoker: SUDO_UID is not the number of a user; run it with sudo, or \
                               name a user";
                return Err(UsageError(message.to_owned()).into());
            };
            let user = names::user_of(uid)?;
            user.map(|user| User { gid: number("SUDO_GID").unwrap_or(user.gid), ..user })
        }
        name => match (names::user(name)?, name.parse()) {
            (None, Ok(uid)) => names::user_of(uid)?,
            (found, _) => found,
        },
    };
    let message = || format!("--user {name}: there is no such user; `getent passwd` lists them");
    found.ok_or_else(|| UsageError(message()).into())
}
