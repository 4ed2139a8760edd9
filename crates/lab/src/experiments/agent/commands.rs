//! How soon the command of `tidegate run` starts: of root, where that process makes the limit by itself, and
//! of a user, whose limit the agent makes.
//!
//! A start counts from before the fork of `tidegate run` until its command, `date`, reads the clock. A user's
//! first command stays until the end, as the programs of its limit are loaded for all; root's are loaded for
//! each.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use tidegate_sys::names;

use super::{Bed, PATIENCE, PAUSE};
use crate::testbed::{
    self, Cgroup, Child, Site,
    wait::{pass_time, wait_until},
};

pub(super) const BY_ITSELF: &str = "run of root";
pub(super) const BY_AGENT: &str = "run of a user, with the agent";

/// A user that every distribution has.
const USER: &str = "daemon";
const RATES: [&str; 4] = ["--egress", "100mbit", "--ingress", "100mbit"];
/// The mode of the agent's socket once members of the group may use it.
const SERVED: u32 = 0o660;

/// Starts of commands, one after the other, in nanoseconds.
pub(super) struct Commands {
    /// The first one of a user.
    pub first_ns: Option<f64>,
    pub others_ns: Vec<f64>,
}

pub(super) fn start(bed: &Bed, system: &str, starts: u32) -> anyhow::Result<Commands> {
    let group = bed.slice.create_below("commands")?;
    let (user, agent) = match system {
        BY_AGENT => {
            let user = User::new(bed, &group)?;
            let (agent, _) = bed.agent(&["--group", &user.group], |_| true)?;
            let socket = bed.dir.path().join("run/agent.sock");
            wait_until("the agent's socket", PATIENCE, || {
                let mode = fs::metadata(&socket).map_or(0, |socket| socket.permissions().mode());
                Ok((mode & 0o777 == SERVED).then_some(()))
            })?;
            (Some(user), Some(agent))
        }
        _ => (None, None),
    };
    let begin = |words: &[&str]| -> anyhow::Result<(Child, u128)> {
        let site = Site::from(&bed.host).in_cgroup(&group);
        let mut command = match &user {
            None => testbed::command(site, &bed.tidegate)?,
            Some(user) => {
                let mut command = testbed::command(site, "setpriv")?;
                command.args(&user.flags).arg(&user.tidegate).env_remove("XDG_RUNTIME_DIR");
                command
            }
        };
        bed.keep_to(&mut command).arg("run").args(RATES).arg("--").args(words);
        let begun_ns = now_ns()?;
        Ok((Child::spawn(command)?, begun_ns))
    };
    let mut first = None;
    if user.is_some() {
        let (mut child, begun_ns) = begin(&["sh", "-c", "date +%s%N; exec sleep infinity"])?;
        let said = wait_until("the first command", PATIENCE, || {
            child.check_running()?;
            Ok(Some(child.stdout_so_far()).filter(|said| said.ends_with('\n')))
        })?;
        first = Some((child, since(begun_ns, &said)?));
    }
    let mut others_ns = Vec::new();
    for _ in 0..starts {
        let (child, begun_ns) = begin(&["date", "+%s%N"])?;
        others_ns.push(since(begun_ns, &child.finish(PATIENCE)?.stdout)?);
        pass_time(PAUSE)?;
    }
    let first_ns = first.as_ref().map(|(_, took_ns)| *took_ns);
    first.map(|(child, _)| child.stop()).transpose()?;
    agent.map(Child::stop).transpose()?;
    Ok(Commands { first_ns, others_ns })
}

/// Who may use the agent, with a program that they may execute.
struct User {
    tidegate: PathBuf,
    group: String,
    /// Of `setpriv`, which takes the signal of a parent that dies away, and gives it back.
    flags: [String; 5],
}

impl User {
    /// Gives the user the cgroup, as systemd does.
    fn new(bed: &Bed, cgroup: &Cgroup) -> anyhow::Result<User> {
        let found = names::user(USER)?.with_context(|| format!("there is no user {USER}"))?;
        let group = names::group_name(found.gid).context("the user's group has no name")?;
        for file in ["", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"] {
            chown(cgroup.path().join(file), Some(found.uid), Some(found.gid))?;
        }
        let tidegate = bed.dir.path().join("tidegate");
        fs::copy(&bed.tidegate, &tidegate)?;
        for path in [bed.dir.path(), &tidegate] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        }
        let [user, group_id] = [("reuid", found.uid), ("regid", found.gid)]
            .map(|(flag, number)| format!("--{flag}={number}"));
        let [clear, signal, end] = ["--clear-groups", "--pdeathsig=TERM", "--"].map(str::to_owned);
        Ok(User { tidegate, group, flags: [user, group_id, clear, signal, end] })
    }
}

/// The output of `date +%s%N`.
fn now_ns() -> anyhow::Result<u128> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos())
}

fn since(begun_ns: u128, said: &str) -> anyhow::Result<f64> {
    let read_ns: u128 = said.trim().parse().with_context(|| format!("no time: {said:?}"))?;
    Ok(read_ns.saturating_sub(begun_ns) as f64)
}
