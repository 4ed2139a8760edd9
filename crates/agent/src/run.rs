//! The agent at work: one loop that waits for the kernel, hands the state machine what happened, and does
//! what it says. It opens no network socket.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use jiff::Zoned;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::Signal,
};
use sd_notify::NotifyState;
use tidegate_host::{host::Host, plan::Present, world::World};
use tidegate_sys::{
    cgroup::{Cgroup, CgroupError, Hierarchy},
    files, names,
    net::DeviceChanges,
    preflight::PreflightError,
};

use crate::{
    agent::{Action, Agent, Event},
    apply::{self, Applied},
    cluster::{Cluster, ClusterOptions},
    directory,
    engines::Engines,
    goal::{Files as Loaded, Goal, Move, own_cgroup},
    report::{GateReport, GateState, LimitState, Pulse, Report, RunFiles},
    scan,
    source::{CgroupSource, Files, Held, Inotify},
    users,
};

/// What the agent is told to do.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// The directory of the spec files.
    pub directory: PathBuf,
    /// Where limits are pinned.
    pub store: PathBuf,
    /// Where its own files are.
    pub run_dir: PathBuf,
    /// Sockets of engines of containers; `*` is a user's number.
    pub sockets: Vec<PathBuf>,
    /// Kubernetes, if pods are followed.
    pub cluster: Option<ClusterOptions>,
    /// It follows and holds the cgroups below this one.
    pub below: PathBuf,
    /// How long a new cgroup is held at most.
    pub deadline: Duration,
    /// Members of this group may limit commands of theirs.
    pub group: String,
}

/// Why it did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("another agent{} keeps the limits of {}; end that one first", pid(.0), .1.display())]
    Keeps(Option<u32>, PathBuf),
    #[error(
        "another agent{} has {}; end that one first, or name another --run-dir", pid(.0), .1.display()
    )]
    Runs(Option<u32>, PathBuf),
    #[error("{}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Preflight(#[from] PreflightError),
    #[error(transparent)]
    Below(#[from] CgroupError),
    #[error("the agent cannot wait for events: {0}")]
    Events(io::Error),
}

fn pid(pid: &Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (process {pid})"))
}

struct Shell<'a> {
    host: Host,
    run: RunFiles,
    pulse: Pulse,
    options: &'a AgentOptions,
    top: Cgroup,
    cgroups: Box<dyn CgroupSource>,
    /// The cgroups that the last scan has found.
    known: scan::Cgroups,
    /// Where the kernel tells of devices; without it they are looked for from time to time.
    devices: Option<DeviceChanges>,
    watch: Files,
    engines: Engines,
    cluster: Cluster,
    say: &'a mut dyn FnMut(&str),
    ready: bool,
    said: BTreeMap<String, String>,
}

/// Runs until SIGTERM or SIGINT. Limits stay in force.
///
/// # Errors
/// [`AgentError`].
pub fn run(options: &AgentOptions, mut say: impl FnMut(&str)) -> Result<(), AgentError> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| AgentError::Io { path, source }
    };
    let signals = signals().map_err(AgentError::Events)?;
    let host = Host::open(&options.store)?;
    let path = host.store().agent_lock();
    let Some(mut kept) = files::lock(&path).map_err(at(&path))? else {
        let pid = fs::read_to_string(path).ok().and_then(|pid| pid.trim().parse().ok());
        return Err(AgentError::Keeps(pid, host.store().path()));
    };
    // For who is refused.
    let _ = kept.set_len(0).and_then(|()| writeln!(kept, "{}", std::process::id()));
    let run = RunFiles::at(&options.run_dir);
    let lock = run.lock().map_err(at(&options.run_dir))?;
    let earlier = run.read();
    let Some(pulse) = lock else {
        let pid = earlier.map(|report| report.pid);
        return Err(AgentError::Runs(pid, options.run_dir.clone()));
    };
    let problems = host.problems().iter().map(ToString::to_string).chain(scan::zone_problem());
    problems.for_each(|problem| say(&format!("warning: {problem}")));
    // Without the group `tidegate run` is for root alone.
    let group = names::group(&options.group);
    if let Err(e) = users::serve(host.clone(), &options.run_dir, group) {
        say(&format!("warning: users cannot limit commands: {}: {e}", options.run_dir.display()));
    }
    let program = std::env::current_exe().map_err(AgentError::Events)?;
    let below = host.hierarchy().relative(&options.below);
    let top = host.hierarchy().open(&below)?;
    let devices = DeviceChanges::open()
        .inspect_err(|e| say(&format!("warning: limits on devices may come late: {e}")))
        .ok();
    let mut shell = Shell {
        devices,
        host,
        top,
        run,
        pulse,
        options,
        cgroups: Box::new(Inotify::new().map_err(AgentError::Events)?),
        known: BTreeMap::new(),
        watch: Files::watch(&options.directory).map_err(at(&options.directory))?,
        engines: Engines::new(program.clone(), options.sockets.clone()),
        cluster: Cluster::new(program, options.cluster.clone()),
        say: &mut say,
        ready: false,
        said: BTreeMap::new(),
    };
    shell.run.keep_room();
    let managed = earlier.map(|report| report.managed).unwrap_or_default();
    let directory = options.directory.display().to_string();
    let mut agent = Agent::new(&directory, std::process::id(), managed, options.deadline);
    if let Some(cluster) = &options.cluster {
        agent = agent.with_pods_of(&cluster.node);
    }
    let start = Instant::now();
    let mut watchdog_us = 0;
    let watchdog = sd_notify::watchdog_enabled(false, &mut watchdog_us);
    let watchdog = watchdog.then(|| Duration::from_micros(watchdog_us) / 3);
    let period = watchdog.map_or(Pulse::PERIOD, |watchdog| watchdog.min(Pulse::PERIOD));
    loop {
        while let Some(action) = agent.next(start.elapsed(), &Zoned::now()) {
            if let Some(event) = shell.act(action) {
                agent.handle(event, start.elapsed());
            }
            shell.pulse.beat(&[]);
        }
        if agent.is_stopped() {
            let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
            return Ok(());
        }
        // The files, which are read by now, say who is asked.
        let away = shell.keep(&agent, start.elapsed());
        if !away.is_empty() {
            away.into_iter().for_each(|event| agent.handle(event, start.elapsed()));
            continue;
        }
        let now = start.elapsed();
        let timeout = agent.timeout(now, &Zoned::now());
        let children = [shell.engines.timeout(now), shell.cluster.timeout(now)];
        let timeout = children.into_iter().flatten().chain([period]).fold(timeout, Duration::min);
        shell.wait(&signals, timeout).map_err(AgentError::Events)?;
        shell.pulse.beat(&[]);
        for event in shell.events(&signals, start.elapsed()).map_err(AgentError::Events)? {
            agent.handle(event, start.elapsed());
        }
    }
}

/// What tells of signals: readable when one has come.
struct Signals {
    stop: UnixStream,
    reload: UnixStream,
}

fn signals() -> io::Result<Signals> {
    let on = |signals: &[Signal]| {
        let (read, write) = UnixStream::pair()?;
        read.set_nonblocking(true)?;
        for signal in signals {
            signal_hook::low_level::pipe::register(signal.as_raw(), write.try_clone()?)?;
        }
        Ok::<_, io::Error>(read)
    };
    Ok(Signals { stop: on(&[Signal::TERM, Signal::INT])?, reload: on(&[Signal::HUP])? })
}

/// Whether one has come; takes all.
fn has_come(mut pipe: &UnixStream) -> bool {
    let mut buffer = [0; 64];
    let mut any = false;
    while matches!(io::Read::read(&mut pipe, &mut buffer), Ok(n) if n > 0) {
        any = true;
    }
    any
}

impl Shell<'_> {
    /// Waits until something happens.
    fn wait(&self, signals: &Signals, timeout: Duration) -> io::Result<()> {
        let fds =
            [signals.stop.as_fd(), signals.reload.as_fd(), self.watch.fd(), self.cgroups.fd()];
        let devices = self.devices.iter().map(DeviceChanges::fd);
        let fds = fds.into_iter().chain(devices).chain(self.engines.fds()).chain(self.cluster.fd());
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // A moment is not cut to nothing, or the loop would turn until it has passed.
        let timeout = timeout.max(Duration::from_millis(1));
        let timeout = Timespec::try_from(timeout).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Starts the children that are due, and ends those that nobody asks for. Those that could not be started
    /// are away for a while.
    fn keep(&mut self, agent: &Agent, now: Duration) -> Vec<Event> {
        let engines = self.engines.keep(agent.asks_for_containers(), now).into_iter();
        let cluster = self.cluster.keep(agent.asks_for_pods(), now);
        engines.chain(cluster.map(Event::Pods)).collect()
    }

    /// What has happened.
    fn events(&mut self, signals: &Signals, now: Duration) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        if has_come(&signals.stop) {
            events.push(Event::Stop);
        }
        if has_come(&signals.reload) {
            events.push(Event::Reload);
        }
        if self.watch.take()? {
            events.push(Event::FilesChanged);
        }
        if self.cgroups.take()? {
            events.push(Event::CgroupsChanged);
        }
        if self.devices.as_ref().is_some_and(DeviceChanges::take) {
            events.push(Event::DevicesChanged);
        }
        events.extend(self.engines.take(now));
        events.extend(self.cluster.take(now).into_iter().map(Event::Pods));
        Ok(events)
    }

    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::ReadFiles => {
                let mut files = directory::read(&self.options.directory);
                let hierarchy = self.host.hierarchy();
                files.specs.iter_mut().for_each(|spec| scan::relative(hierarchy, spec));
                Some(Event::Read(files))
            }
            Action::Scan { programs, own, devices } => {
                let mount = self.host.hierarchy().mount();
                let top = self.top.path();
                let before = std::mem::take(&mut self.known);
                let mut world = scan::scan(self.host.hierarchy(), top, programs, &before);
                let paths = |world: &World| {
                    let paths = world.cgroups.keys().cloned();
                    std::iter::once(String::new()).chain(paths).collect::<Vec<_>>()
                };
                let known = paths(&world);
                if self.cgroups.follow(mount, &mut known.iter().map(String::as_str)) {
                    // What has come below a new cgroup before it was watched.
                    world = scan::scan(self.host.hierarchy(), top, programs, &world.cgroups);
                }
                world.devices = scan::devices(devices.into_iter());
                give_back(self.host.hierarchy(), &world, &own);
                self.known.clone_from(&world.cgroups);
                Some(Event::Scanned { world, whole: self.cgroups.is_whole() })
            }
            Action::Gate { open } => Some(Event::Gate(self.gate(open))),
            Action::Decide(cgroups) => {
                if let Err(e) = self.cgroups.decide(&cgroups) {
                    (self.say)(&format!("warning: new cgroups are held until their deadline: {e}"));
                }
                Some(Event::Gate(self.cgroups.gate()))
            }
            Action::Move(moves) => Some(Event::Moved(self.moves(&moves))),
            Action::Apply { files, goal, managed } => Some(self.apply(&files, &goal, &managed)),
            Action::Report(report) => {
                let store = self.host.store().path().display().to_string();
                self.report(&Report { store, ..report }).err().map(|_| Event::NotReported)
            }
        }
    }

    /// Opens or closes the gate. Where it cannot be had cgroups are followed by inotify.
    fn gate(&mut self, open: bool) -> GateReport {
        let is_open = self.cgroups.gate().state == GateState::Open;
        if open == is_open {
            return self.cgroups.gate();
        }
        let reason = if open {
            match Held::open(&self.top, self.options.deadline) {
                Ok(held) => {
                    self.cgroups = Box::new(held);
                    return self.cgroups.gate();
                }
                Err(e) => Some(e.to_string()),
            }
        } else {
            None
        };
        let state = if open { GateState::Unavailable } else { GateState::Unneeded };
        if is_open {
            match Inotify::new() {
                Ok(inotify) => self.cgroups = Box::new(inotify),
                Err(e) => (self.say)(&format!("warning: new cgroups stay held: {e}")),
            }
        }
        GateReport { state, reason, ..GateReport::default() }
    }

    fn apply(&mut self, files: &Loaded, goal: &Goal, managed: &BTreeSet<String>) -> Event {
        self.run.give_room();
        let applied = apply::apply(&self.host, files, goal, managed, &self.pulse);
        self.run.keep_room();
        match applied {
            Ok(Applied { refused, problems, changes, signal }) => {
                changes.iter().for_each(|change| (self.say)(change));
                problems.iter().for_each(|problem| (self.say)(&format!("warning: {problem}")));
                match signal {
                    Some(signal) if signal != Signal::HUP.as_raw() => Event::Stop,
                    Some(_) => Event::Reload,
                    None => Event::Applied(refused),
                }
            }
            Err(error) => Event::NotApplied(error.to_string()),
        }
    }

    /// Moves processes; why one could not be moved, by the cgroup.
    fn moves(&self, moves: &[Move]) -> BTreeMap<String, String> {
        let hierarchy = self.host.hierarchy();
        let mut refused = BTreeMap::new();
        for Move { pid, into } in moves {
            let path = hierarchy.mount().join(into);
            let made = match fs::create_dir(&path) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
                _ => Ok(()),
            };
            let moved = made.and_then(|()| fs::write(path.join("cgroup.procs"), pid.to_string()));
            match moved {
                // It has ended.
                Err(e) if e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                Err(e) => drop(
                    refused.insert(into.clone(), format!("process {pid} cannot be moved: {e}")),
                ),
                Ok(()) => {}
            }
        }
        refused
    }

    /// Writes it for `tidegate status`, and tells systemd and the journal what has changed.
    fn report(&mut self, report: &Report) -> io::Result<()> {
        let in_force = |report: &Report| {
            report.limits.iter().filter(|limit| limit.state == LimitState::InForce).count()
        };
        let written = self.run.write(report);
        // Each is said once.
        let mut now = BTreeMap::new();
        if let Err(e) = &written {
            let text = format!("warning: {}: {e}", self.options.run_dir.display());
            now.insert("the report".to_owned(), text);
        }
        for (at, error) in report.errors.iter().enumerate() {
            now.insert(format!("error {at}"), error.clone());
        }
        for limit in &report.limits {
            let said = format!("limit `{}` {}", limit.name, limit.words());
            now.insert(format!("{LIMIT}{} of {}", limit.name, limit.file), said);
        }
        if let Some(reason) = &report.gate.reason {
            now.insert("gate".to_owned(), format!("new cgroups are not held: {reason}"));
        }
        for (socket, state) in &report.engines {
            now.insert(format!("engine {socket}"), format!("{socket}: {state}"));
        }
        for (_, text) in now.iter().filter(|(key, text)| self.said.get(*key) != Some(text)) {
            (self.say)(text);
        }
        // A limit with `each` is listed under its own name only while nothing matches.
        let has_matches = |key: &str| {
            let Some((limit, file)) = key.split_once(" of ") else { return false };
            let (one, of) = (format!("{limit}-"), format!(" of {file}"));
            let is_new = |key: &&String| !self.said.contains_key(*key);
            now.keys().filter(is_new).any(|key| key.starts_with(&one) && key.ends_with(&of))
        };
        let gone = self.said.keys().filter(|key| key.starts_with(LIMIT) && !now.contains_key(*key));
        let gone: Vec<_> = gone.filter(|key| !has_matches(key)).collect();
        gone.into_iter().for_each(|key| (self.say)(&format!("{key}: it is asked for no longer")));
        self.said = now;
        let errors = if report.errors.is_empty() { "" } else { "; the files have errors" };
        let status =
            format!("{} of {} limits in force{errors}", in_force(report), report.limits.len());
        let mut states = vec![NotifyState::Status(&status)];
        if !self.ready {
            states.push(NotifyState::Ready);
            self.ready = true;
        }
        let _ = sd_notify::notify(false, &states);
        written
    }
}

/// Gives back the processes that were moved into a cgroup for a limit, but for those of `own` limits, and
/// removes such cgroups that are empty. Units of systemd may have names like theirs, and are left alone.
fn give_back(hierarchy: &Hierarchy, world: &World, own: &BTreeSet<String>) {
    let own: BTreeSet<_> = own.iter().map(|limit| own_cgroup(limit)).collect();
    for path in world.cgroups.keys() {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let is_unit = [".service", ".scope", ".slice"].iter().any(|kind| name.ends_with(kind));
        if !name.starts_with(&own_cgroup("")) || is_unit && !own.contains(name) {
            continue;
        }
        if !own.contains(name) {
            move_up(hierarchy, path, above);
        }
        // The kernel keeps one that is not empty.
        let _ = fs::remove_dir(hierarchy.mount().join(path));
    }
}

/// How the key of a limit begins, among what has been said.
const LIMIT: &str = "limit ";
/// Tries to empty a cgroup, each for so long. A process may fork while others are moved, and one that ends
/// is in it a little longer.
const GIVE_BACK_TRIES: usize = 10;
const GIVE_BACK_PATIENCE: Duration = Duration::from_millis(100);

/// The cgroups of a limit into which an agent has moved its processes. A limit of the same name in another
/// store is on others.
pub fn moved_for(limit: &Present) -> impl Iterator<Item = &str> {
    let own = own_cgroup(&limit.name);
    let on = std::iter::once(limit.scope.name()).chain(limit.members.iter().map(String::as_str));
    on.filter(move |path| path.rsplit('/').next() == Some(&own))
}

/// Moves the processes of a cgroup to the one above, and removes it. Returns whether it is gone: what cannot
/// go stays where it is.
pub fn give_back_from(hierarchy: &Hierarchy, path: &str) -> bool {
    let (above, _) = path.rsplit_once('/').unwrap_or(("", path));
    (0..GIVE_BACK_TRIES).any(|_| {
        move_up(hierarchy, path, above);
        let patience = Instant::now() + GIVE_BACK_PATIENCE;
        hierarchy.open(path).is_ok_and(|cgroup| cgroup.remove(patience).is_ok())
    })
}

fn move_up(hierarchy: &Hierarchy, path: &str, above: &str) {
    if let (Ok(cgroup), Ok(above)) = (hierarchy.open(path), hierarchy.open(above)) {
        for pid in cgroup.processes().unwrap_or_default() {
            let _ = above.add(pid);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// As with a program in the root of a container's own tree of cgroups.
    #[test]
    fn root_processes_go_back_to_the_root_too() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_processes_go_back_to_the_root_too: needs root");
            return;
        }
        let hierarchy = Hierarchy::find().unwrap();
        let path = own_cgroup(&format!("test-{}", std::process::id()));
        let cgroup = hierarchy.create(&hierarchy.open("").unwrap(), &path).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        cgroup.add(child.id()).unwrap();
        let is_gone = give_back_from(&hierarchy, &path);
        let lies_in = hierarchy.of_process(&child.id().to_string()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let _ = cgroup.remove(Instant::now());
        assert_eq!((is_gone, lies_in.path()), (true, ""));
    }
}
