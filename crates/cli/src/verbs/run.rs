//! `tidegate run`.

use std::{path::Path, process::ExitCode};

use anyhow::Result;
use tidegate_core::{Rate, Scheme, Scope, choice::Kernel};
use tidegate_host::{
    auto::{Trees, Written},
    run::{self, ParentOf, RunOptions, Summary},
    settings::{SettingsError, SettingsProblem},
};
use tidegate_sys::{
    names::{self, User},
    store,
};

use crate::{
    args::RunArgs,
    output,
    refusal::{UsageError, flag_error, say},
};

pub fn run(store: &Path, args: &RunArgs) -> Result<ExitCode> {
    let patch = args.limit.patch;
    let (scope, parent) = (Scope::Cgroup(String::new()), args.parent.as_deref());
    let written = Written { name: "", scope: &scope, parent, patch: &patch };
    // No scheme of a cgroup needs something of the kernel that not all have.
    let limit = written.options(&Trees::default(), Kernel::WHOLE, None).map_err(flag_error)?;
    if limit.scheme == Scheme::Htb {
        let (field, problem) = ("scheme", SettingsProblem::HtbNeedsADevice);
        return Err(flag_error(SettingsError { field, problem }));
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
    let options = RunOptions {
        limit,
        parent,
        user,
        cc: args.cc.clone(),
        command: command.clone(),
        arguments: arguments.to_vec(),
    };
    let finished = run::run(&options)?;
    for warning in &finished.warnings {
        say(&format!("tidegate: warning: {warning}"));
    }
    if args.stats {
        if args.json {
            say(&serde_json::to_string(&finished.summary)?);
        } else {
            summarize(&finished.summary);
        }
    }
    Ok(ExitCode::from(finished.exit_code))
}

/// A user by name or number, or the one who has called sudo.
fn user(name: &str) -> Result<User> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let found = match name {
        "invoker" => {
            let (Some(uid), Some(gid)) = (number("SUDO_UID"), number("SUDO_GID")) else {
                let message = "--user invoker: SUDO_UID and SUDO_GID are not set; run it with sudo, or name a user";
                return Err(UsageError(message.to_owned()).into());
            };
            names::user_of(uid)?.map(|user| User { gid, ..user })
        }
        name => match (names::user(name)?, name.parse()) {
            (None, Ok(uid)) => names::user_of(uid)?,
            (found, _) => found,
        },
    };
    let message = || format!("--user {name}: there is no such user; `getent passwd` lists them");
    found.ok_or_else(|| UsageError(message()).into())
}

fn summarize(summary: &Summary) {
    let elapsed = i64::try_from(summary.elapsed_ns).unwrap_or(i64::MAX);
    for (name, direction) in summary.limit.iter().flat_map(|limit| limit.directions()) {
        let counts = &direction.counters;
        let (packets, bytes) = counts.charged();
        let bits = u128::from(bytes) * 8 * 1_000_000_000 / u128::from(summary.elapsed_ns.max(1));
        let limit = Rate::from_bit_s(direction.rate_bit_s).map(|rate| rate.to_string());
        let exempt = match counts.packets_of("exempt") {
            0 => String::new(),
            n => format!("; {n} exempt (see --loopback and --exempt)"),
        };
        let at_risk = output::at_risk(direction.at_risk);
        let at_risk =
            at_risk.map_or_else(String::new, |words| format!("; requests at risk: {words}"));
        say(&format!(
            "tidegate: {name} {}: {} in {packets} packets over {} = {}; marked {}, slowed {}, \
             dropped {}{at_risk}{exempt}",
            limit.unwrap_or_default(),
            output::size(bytes),
            output::time(elapsed),
            output::rate(u64::try_from(bits).unwrap_or(u64::MAX)),
            counts.packets_of("mark"),
            counts.packets_of("slow"),
            counts.dropped().0,
        ));
    }
}
