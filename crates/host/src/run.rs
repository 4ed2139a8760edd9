//! One command under a limit that lives as long as the command does.
//!
//! The command starts inside a cgroup of its own, made below the caller's, so that whatever limits or
//! accounts for the caller still holds. Nothing is pinned: if this process dies, the kernel takes the
//! limit off and the command runs on without it (fail-open); the empty cgroup that is then left over is
//! swept by the next start.
//!
//! The cgroup's name, `tidegate-run-PID-START`, holds the id of the process that made it and the time at
//! which that process started, in clock ticks since boot, so that an id used again is not taken for it.
//!
//! With a parent, a limit pinned on this host, the command has a part of that one's rate. Its cgroup is then
//! made below the parent's, if the caller's is not there already. The parent does not know of it: it can be
//! taken off meanwhile, and the command then keeps the rate that it had last; and what other runs are
//! guaranteed is not in the sum that may not exceed what the parent has.
//!
//! What the command leaves in the send buffers of its sockets when it ends, and connections that it has
//! handed to processes it leaves behind, go on without the limit.
//!
//! A user without the privileges for that makes the cgroup below their own, and the agent holds the limit,
//! which ends with the connection to it ([`socket`]).
//!
//! The command stays in the caller's process group: keys such as ^C and ^Z reach it from the terminal.
//! Signals that are sent to this process alone are passed on to it.

use std::{
    env,
    ffi::OsString,
    fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, geteuid, getpid, kill_process, waitpid,
};
use tidegate_core::{Scope, scope::shown};
use tidegate_sys::{
    cgroup::{Cgroup, CgroupError, Hierarchy},
    clock::monotonic_ns,
    congestion::{self, CongestionError},
    limit::{AttachedLimit, LimitError, LimitOptions},
    names::User,
    preflight::{PreflightError, preflight},
    process::{Prepared, Received, SignalQueue, SpawnError, process_group},
    store::{PinnedLimit, Store, StoreError, is_above},
};

use crate::{
    family::FamilyError,
    host,
    plan::{Present, State, Wanted, join},
    settings,
    status::{LimitStatus, hold_ceilings},
    summary::{Report, Summary},
};
use socket::{AskError, Asked};

mod environment;
pub mod socket;

/// What the names of the cgroups made here start with.
pub const CGROUP_PREFIX: &str = "tidegate-run-";
/// How long processes that the command has left behind may take to be moved away.
const DISSOLVE_PATIENCE: Duration = Duration::from_secs(2);
/// How long the end of a command waits for the sweep of left-over cgroups, on a host with very many.
const SWEEP_PATIENCE: Duration = Duration::from_millis(500);
/// The command's state is looked at this often even if no signal says that it changed.
const POLL: Duration = Duration::from_secs(5);

/// The signals that are passed on.
const FORWARDED: [Signal; 10] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
    Signal::WINCH,
    Signal::CONT,
    Signal::TSTP,
];

/// What to run, and how to limit it.
#[derive(Debug, Clone)]
pub struct RunOptions {
    pub limit: LimitOptions,
    /// The same as it was written: settings by their names. For the agent.
    pub given: Vec<(String, String)>,
    /// Where the agent is asked by who has not the privileges to hold a limit.
    pub agent: PathBuf,
    /// The limit that it is inside of.
    pub parent: Option<ParentOf>,
    /// The congestion control that the command's TCP sockets use unless they choose one themselves.
    pub cc: Option<String>,
    /// Who runs the command, with groups and environment; `None`: who runs this.
    pub user: Option<User>,
    /// The command, looked for in `PATH`.
    pub command: OsString,
    pub arguments: Vec<OsString>,
}

#[derive(Debug, Clone)]
pub struct ParentOf {
    /// Where limits are pinned.
    pub store: PathBuf,
    pub name: String,
    /// The directions for which the run was given a rate of its own.
    pub asked: settings::Asked,
}

#[derive(Debug)]
pub struct Finished {
    /// The command's exit code, or 128 and the number of the signal that ended it.
    pub exit_code: u8,
    /// What the limit did.
    pub report: Report,
    /// What could not be cleaned up, for the user to know.
    pub warnings: Vec<String>,
}

/// Why a command was not run under its limit. No cgroup and no limit is left.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Preflight(#[from] PreflightError),
    /// The cgroup could not be made.
    #[error("{0}; the command was not started")]
    Cgroup(#[from] CgroupError),
    /// The limit could not be put on.
    #[error("{0}; the command was not started")]
    Limit(#[from] LimitError),
    /// The limits of this host could not be read.
    #[error("{0}; the command was not started")]
    Store(#[from] StoreError),
    /// The limit cannot be inside the one that was named.
    #[error("--{}: {}; the command was not started", .0.field, .0.problem)]
    Family(FamilyError),
    /// The congestion control could not be had.
    #[error("--cc: {0}; the command was not started")]
    Congestion(#[from] CongestionError),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// The agent does not hold the limit.
    #[error("{0}; the command was not started")]
    Agent(#[from] AskError),
    #[error("--{0} needs the privileges of root; run it with sudo")]
    ForRoot(&'static str),
    /// A user may make cgroups in their own part of the tree alone.
    #[error(
        "cgroup `{}` is not this user's, so the command cannot have one of its own in it ({source}); \
         type `systemd-run --user --scope -p Delegate=yes tidegate run ...`, or have root give the user \
         a cgroup",
        shown(path)
    )]
    NoCgroup { path: String, source: CgroupError },
    /// Signals or waiting.
    #[error("cannot wait for the command: {0}")]
    Wait(#[from] io::Error),
}

/// Runs a command under a limit and waits for its end.
///
/// # Errors
/// [`RunError`].
pub fn run(options: &RunOptions) -> Result<Finished, RunError> {
    let hierarchy = match preflight() {
        Err(PreflightError::Privileges(..)) if !geteuid().is_root() => return by_agent(options),
        hierarchy => hierarchy?,
    };
    // Must live as long as the command: without it the name could not be chosen any more.
    let control = options.cc.as_deref().map(congestion::ensure).transpose()?;
    // From here on nobody can end this process and leave the cgroup behind, save by SIGKILL.
    let signals = SignalQueue::block(&FORWARDED.map(Signal::as_raw))?;
    let current = hierarchy.current()?;
    let above =
        options.parent.as_ref().map(|parent| Above::find(&hierarchy, parent)).transpose()?;
    let base = match &above {
        Some(above) => above.base(&hierarchy, current)?,
        None => current,
    };
    let group = Group::create(&hierarchy, base)?;
    let prepared = prepare(options, &signals, &group)?;
    let settings = match &above {
        Some(above) => above.join(&group, options)?,
        None => options.limit,
    };
    let _congestion = control
        .as_ref()
        .map(|control| congestion::attach_to_cgroup(group.cgroup.as_fd(), control.name()))
        .transpose()?;
    let maps = above.as_ref().map(|above| above.limit.maps());
    let limit = AttachedLimit::attach_new(&hierarchy, &group.cgroup, &settings, maps)?;

    let Ended { exit_code, elapsed_ns, swept } = command(prepared, &signals, &group)?;

    let mut warnings = Vec::new();
    let (name, path) = (group.name().to_owned(), group.cgroup.path().to_owned());
    let scope = Scope::Cgroup(path);
    let status = LimitStatus::of_maps(name, scope, State::InForce, limit.maps(), &settings);
    let parent = above.map(|above| above.limit.name);
    let mut status = status.map(|status| LimitStatus { parent, ..status });
    if let (Ok(status), Some(parent)) = (&mut status, &options.parent)
        && let Ok(listing) = Store::at(&parent.store).list(&hierarchy)
    {
        let mut above: Vec<_> = listing.limits.iter().map(LimitStatus::read_or_broken).collect();
        hold_ceilings(above.iter_mut().chain([status]));
    }
    if let Err(e) = &status {
        warnings.push(format!("the counters cannot be read: {e}"));
    }
    if let Err(e) = limit.detach(&hierarchy, &group.cgroup) {
        warnings.push(format!("sockets that the command left open may stay paced: {e}"));
    }
    if let Err(e) = group.dissolve() {
        warnings.push(format!("{e}; the next `tidegate run` tries again"));
    }
    let _ = swept.recv_timeout(SWEEP_PATIENCE);
    let report = Summary { exit_code, elapsed_ns, limit: status.ok() }.report();
    Ok(Finished { exit_code, report, warnings })
}

/// The same for a user who has no privileges: in a cgroup of their own, with a limit that the agent holds.
fn by_agent(options: &RunOptions) -> Result<Finished, RunError> {
    let for_root = [
        ("parent", options.parent.is_some()),
        ("cc", options.cc.is_some()),
        ("user", options.user.is_some()),
    ];
    if let Some((flag, _)) = for_root.into_iter().find(|(_, is_given)| *is_given) {
        return Err(RunError::ForRoot(flag));
    }
    // Without the agent a cgroup is of no use.
    let limit = Asked::connect(&options.agent)?;
    let hierarchy = Hierarchy::find()?;
    let current = hierarchy.current()?;
    let path = current.path().to_owned();
    // Before signals are kept back: where this fails, another program may try it.
    let group =
        Group::create(&hierarchy, current).map_err(|source| RunError::NoCgroup { path, source })?;
    let signals = SignalQueue::block(&FORWARDED.map(Signal::as_raw))?;
    limit.limit(group.cgroup.as_fd(), &options.given)?;
    // Not before: the agent looks for the sockets of a process that is there.
    let prepared = prepare(options, &signals, &group)?;
    let Ended { exit_code, elapsed_ns, swept } = command(prepared, &signals, &group)?;
    let mut warnings = Vec::new();
    let report = limit.end(exit_code, elapsed_ns).unwrap_or_else(|e| {
        warnings.push(format!("the counters cannot be read: {e}"));
        Report::default()
    });
    if let Err(e) = group.dissolve() {
        warnings.push(format!("{e}; the next `tidegate run` tries again"));
    }
    let _ = swept.recv_timeout(SWEEP_PATIENCE);
    Ok(Finished { exit_code, report, warnings })
}

/// How a command has ended.
struct Ended {
    exit_code: u8,
    elapsed_ns: u64,
    /// Hears when left-over cgroups are swept.
    swept: mpsc::Receiver<usize>,
}

/// Has the process of the command wait in its cgroup, while the limit is put on.
fn prepare(
    options: &RunOptions,
    signals: &SignalQueue,
    group: &Group,
) -> Result<Prepared, SpawnError> {
    let mut command = Command::new(&options.command);
    command.args(&options.arguments);
    if let Some(user) = &options.user {
        let names = env::vars_os().map(|(name, _)| name);
        for (name, value) in environment::changes(names, user, Path::new("/run")) {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
    }
    signals.prepare(command, &group.cgroup, options.user.as_ref())
}

/// Runs the command in its cgroup.
fn command(prepared: Prepared, signals: &SignalQueue, group: &Group) -> Result<Ended, RunError> {
    let started = monotonic_ns();
    let child = prepared.start()?;
    let swept = sweep_aside(&group.hierarchy);
    let exit_code = attend(signals, child.id())?;
    Ok(Ended { exit_code, elapsed_ns: monotonic_ns() - started, swept })
}

/// The limit that a run is inside of, among those of the host.
struct Above {
    limit: PinnedLimit,
    present: Vec<Present>,
    asked: settings::Asked,
}

impl Above {
    fn find(hierarchy: &Hierarchy, parent: &ParentOf) -> Result<Above, RunError> {
        let ParentOf { store, name, asked } = parent;
        let listing = Store::at(store).list(hierarchy)?;
        if let Some(broken) = listing.unreadable(name) {
            return Err(broken.error().into());
        }
        let pinned = listing.limits;
        let present = pinned.iter().map(host::present).collect();
        let limit = pinned.into_iter().find(|limit| limit.name == *name);
        let limit = limit.ok_or_else(|| StoreError::Missing(name.clone()))?;
        Ok(Above { limit, present, asked: *asked })
    }

    /// The cgroup below which that of the command is made.
    fn base(&self, hierarchy: &Hierarchy, current: Cgroup) -> Result<Cgroup, CgroupError> {
        match &self.limit.scope {
            Some(Scope::Cgroup(path))
                if path != current.path() && !is_above(path, current.path()) =>
            {
                hierarchy.open(path)
            }
            // What is no cgroup is refused as a parent.
            _ => Ok(current),
        }
    }

    /// The limit of the command, with the directions of its parent.
    fn join(&self, group: &Group, options: &RunOptions) -> Result<LimitOptions, RunError> {
        let wanted = Wanted {
            name: group.name().to_owned(),
            scope: Scope::Cgroup(group.cgroup.path().to_owned()),
            members: Vec::new(),
            options: options.limit,
            parent: Some(self.limit.name.clone()),
            asked: self.asked,
        };
        Ok(join(&self.present, &wanted).map_err(RunError::Family)?.options)
    }
}

/// The command's cgroup; removed when dropped.
struct Group {
    hierarchy: Hierarchy,
    parent: Cgroup,
    cgroup: Cgroup,
    removed: bool,
}

impl Group {
    fn create(hierarchy: &Hierarchy, parent: Cgroup) -> Result<Group, CgroupError> {
        let pid = std::process::id();
        let name = format!("{CGROUP_PREFIX}{pid}-{:x}", start_ticks(pid).unwrap_or(0));
        let cgroup = hierarchy.create(&parent, &name)?;
        // A number of another PID namespace says nothing to who sweeps; the lock does.
        cgroup.try_lock();
        Ok(Group { hierarchy: hierarchy.clone(), parent, cgroup, removed: false })
    }

    fn name(&self) -> &str {
        self.cgroup.path().rsplit('/').next().unwrap_or_default()
    }

    fn dissolve(mut self) -> Result<(), CgroupError> {
        self.removed = true;
        self.remove()
    }

    fn remove(&self) -> Result<(), CgroupError> {
        let deadline = Instant::now() + DISSOLVE_PATIENCE;
        self.hierarchy.dissolve(&self.cgroup, &self.parent, deadline)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.removed {
            let _ = self.remove();
        }
    }
}

/// Passes signals on and waits until the command ends; gives its exit code as a shell would.
fn attend(signals: &SignalQueue, pid: u32) -> Result<u8, RunError> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("no process id"))?;
    loop {
        while let Some((_, status)) =
            waitpid(Some(pid), WaitOptions::NOHANG | WaitOptions::UNTRACED)
                .map_err(io::Error::from)?
        {
            if let Some(code) = exit_code(status) {
                return Ok(code);
            }
            suspend_with(status);
        }
        if let Some(received) = signals.wait(POLL)? {
            forward(received, pid);
        }
    }
}

/// 128 and the signal's number, as shells have it.
fn exit_code(status: WaitStatus) -> Option<u8> {
    let code = status.exit_status().or_else(|| Some(128 + status.terminating_signal()?))?;
    Some(u8::try_from(code).unwrap_or(u8::MAX))
}

/// A command that the user suspends from the terminal takes this process along, so that the shell sees it.
/// One that is stopped by SIGSTOP (a debugger, say) does not: nobody would wake this process with it.
fn suspend_with(status: WaitStatus) {
    let from_terminal = [Signal::TSTP, Signal::TTIN, Signal::TTOU].map(Signal::as_raw);
    if status.stopping_signal().is_some_and(|signal| from_terminal.contains(&signal)) {
        let _ = kill_process(getpid(), Signal::STOP);
    }
}

/// What the terminal sends goes to the whole process group, so the command has it already.
fn forward(received: Received, pid: Pid) {
    let Some(signal) = FORWARDED.into_iter().find(|s| s.as_raw() == received.signal) else {
        return;
    };
    let group = |pid: Pid| process_group(pid.as_raw_nonzero().get().unsigned_abs());
    if !(received.from_kernel && group(pid) == group(getpid())) {
        let _ = kill_process(pid, signal);
    }
}

/// Sweeps in a thread of its own; the receiver hears when it is done.
fn sweep_aside(hierarchy: &Hierarchy) -> mpsc::Receiver<usize> {
    let (sender, receiver) = mpsc::channel();
    let hierarchy = hierarchy.clone();
    thread::spawn(move || sender.send(sweep(&hierarchy)));
    receiver
}

/// Removes the empty cgroups of runs whose process is gone; returns how many.
pub fn sweep(hierarchy: &Hierarchy) -> usize {
    let left_over = hierarchy.find_below("", is_left_over);
    let mut removed = 0;
    for path in left_over {
        let Ok(group) = hierarchy.open(&path) else { continue };
        if !group.try_lock() {
            continue;
        }
        let events = fs::read_to_string(group.absolute().join("cgroup.events"));
        if !events.is_ok_and(|text| text.lines().any(|line| line == "populated 0")) {
            continue;
        }
        let below = hierarchy.find_below(&path, |_| true);
        below.iter().rev().for_each(|path| {
            let _ = fs::remove_dir(hierarchy.mount().join(path));
        });
        removed += usize::from(!group.absolute().exists());
    }
    removed
}

/// Whether a name is of the cgroup of a run whose process is gone.
pub fn is_left_over(name: &str) -> bool {
    maker_of(name).is_some_and(|maker| !maker.lives())
}

/// The process that has made a cgroup.
#[derive(Debug, PartialEq, Eq)]
struct Maker {
    pid: u32,
    start_ticks: u64,
}

impl Maker {
    fn lives(&self) -> bool {
        start_ticks(self.pid) == Some(self.start_ticks)
    }
}

/// The process that holds the limit of a `run`, by the path of its cgroup; `None` if that is another's.
pub fn runner_of(path: &str) -> Option<u32> {
    maker_of(path.rsplit('/').next()?).filter(Maker::lives).map(|maker| maker.pid)
}

fn maker_of(name: &str) -> Option<Maker> {
    let (pid, start) = name.strip_prefix(CGROUP_PREFIX)?.split_once('-')?;
    Some(Maker { pid: pid.parse().ok()?, start_ticks: u64::from_str_radix(start, 16).ok()? })
}

/// When a process started, in clock ticks since boot; `None` if it does not exist.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, which may hold anything; the start is field 22.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroups_name_tells_who_made_it() {
        let me = std::process::id();
        let start = start_ticks(me).unwrap();
        let maker = maker_of(&format!("tidegate-run-{me}-{start:x}")).unwrap();
        assert!(maker.lives());
        assert!(!Maker { start_ticks: start + 1, ..maker }.lives(), "an id used again");
        for other in ["tidegate-run-", "tidegate-run-1", "tidegate-run-x-1", "user.slice"] {
            assert_eq!(maker_of(other), None, "{other}");
        }
    }
}
