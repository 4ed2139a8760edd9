//! Starts a process somewhere else: in a network namespace, in a cgroup, tied to its parent's life.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::Command,
};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use super::{NetError, NetNs};

/// Where a process shall start.
#[derive(Debug, Default)]
pub struct SpawnInto<'a> {
    /// The network namespace; none: the caller's.
    pub netns: Option<&'a NetNs>,
    /// `cgroup.procs` of a cgroup v2, open for writing; none: the caller's cgroup.
    pub cgroup_procs: Option<OwnedFd>,
    /// Kill the process when the thread that spawned it ends. (The kernel looks at the thread, not
    /// the process: spawn from a thread that lives long enough.)
    pub die_with_parent: bool,
}

/// Makes `command` start as `into` says. The process is in its cgroup and namespace before its
/// program is loaded, so that nothing it does escapes them.
///
/// Failures of the steps appear as the error of `Command::spawn`.
pub fn prepare(command: &mut Command, into: SpawnInto<'_>) -> Result<(), NetError> {
    let netns = match into.netns {
        Some(netns) => Some(netns.try_clone()?),
        None => None,
    };
    let parent = getpid();
    let hook = move || -> io::Result<()> {
        if let Some(procs) = &into.cgroup_procs {
            // "0" is the writer itself.
            rustix::io::write(procs, b"0")?;
        }
        if let Some(netns) = &netns {
            netns.enter_current_thread()?;
        }
        if into.die_with_parent {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have ended before the line above.
            if getppid() != Some(parent) {
                return Err(rustix::io::Errno::SRCH.into());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the hook makes only system calls (write, setns, prctl,
    // getppid) on descriptors opened before, and allocates nothing: an error is a bare errno.
    unsafe { command.pre_exec(hook) };
    Ok(())
}
