//! The agent as a state machine: events and the time go in, actions come out. It reads and writes nothing.
//!
//! ```text
//! files changed, SIGHUP ───► ReadFiles ─► Read ──► Gate ─┐
//! cgroups, devices changed ► Scan ──────► Scanned ───────┼─► goal ──► Move, Apply ──► Applied ──┐
//! lines of children, the clock ──────────────────────────┘              Decide, Report ◄────────┘
//! ```
//!
//! The gate holds a new cgroup until `Decide` names it (`decisions.rs`).
//!
//! Whoever drives it hands it what happened, then asks for actions until there is none, then waits for the
//! next event or for [`Agent::timeout`].

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use jiff::Zoned;
use tidegate_core::{Scope, selector::SelectorKind};
use tidegate_host::{
    pods::{MAX_PODS, Pod, Pods},
    spec::Spec,
    world::{Container, MAX_CONTAINERS, USER_CONTAINERS, World, is_container_id},
};
use tidegate_sys::cgroup::MAX_CGROUPS;

use crate::{
    child::Line,
    decisions::{Asked, Decisions},
    goal::{Files, Goal, Move, goal},
    report::{GateReport, GateState, LimitState, Report},
};

/// A file is read when nothing has changed in the directory for so long: an editor writes in steps.
pub const SETTLE: Duration = Duration::from_millis(100);
/// ... but not later than this after the first change.
pub const SETTLE_MAX: Duration = Duration::from_secs(2);
/// The shortest time between two scans, so that a flood of cgroups does not fill a CPU.
pub const SCAN_GAP: Duration = Duration::from_millis(20);
/// The shortest time between two goals for what children say, for the same reason.
pub const GOAL_GAP: Duration = Duration::from_millis(20);
/// Scans where events do not tell of every cgroup.
pub const RESCAN: Duration = Duration::from_secs(1);
/// Scans for programs, of which no event tells.
pub const PROGRAMS: Duration = Duration::from_secs(2);
/// Somebody may have taken limits off: they are looked at so often.
pub const CHECK: Duration = Duration::from_secs(30);
/// ... and where limits are many, after so many times as long as the last look took, so that a host at rest
/// stays at rest ...
pub const CHECK_REST: u32 = 400;
/// ... but not later than this.
pub const CHECK_MAX: Duration = Duration::from_secs(300);
/// The clock of the wall may be set: schedules are looked at so often at least.
pub const CLOCK: Duration = Duration::from_secs(60);
/// What was refused is tried again after this, then after twice the time.
pub const RETRY_MIN: Duration = Duration::from_secs(1);
pub const RETRY_MAX: Duration = Duration::from_secs(60);
/// Processes moved for one goal at most.
pub const MOVES_MAX: usize = 1024;

/// The state of an engine, or of the API server, that does not answer begins so.
pub const AWAY: &str = "away: ";
/// Gives Podman its socket.
pub const START_PODMAN: &str = "`systemctl enable --now podman.socket` (rootless: `systemctl --user \
                                enable --now podman.socket`)";
/// The state until the first answer.
const SILENT: &str = "has not answered yet";

/// Whether an engine, or the API server, of this state answers.
pub fn answers(state: &str) -> bool {
    !state.starts_with(AWAY) && state != SILENT
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Something in the directory of the files has changed.
    FilesChanged,
    /// Somebody asks to read the files again.
    Reload,
    /// The files were read: what is good of them, and what is wrong.
    Read(Files),
    /// Cgroups have come or gone.
    CgroupsChanged,
    /// Devices have come or gone, or have other names.
    DevicesChanged,
    /// What runs on the host. Events tell of every change of it from now on, if `whole`.
    Scanned { world: World, whole: bool },
    /// An engine tells its containers; it is a user's, or the host's.
    Engine { socket: String, owner: Option<u32>, line: Line<Container> },
    /// An engine is asked no longer: its user has logged out.
    EngineGone { socket: String, owner: Option<u32> },
    /// The API server tells the pods of this node.
    Pods(Line<Pod>),
    /// The goal was applied; why limits of it were refused, by name.
    Applied(BTreeMap<String, String>),
    /// Nothing of the goal was applied, and why.
    NotApplied(String),
    /// Processes were moved, or could not be; why, by name of the limit's cgroup.
    Moved(BTreeMap<String, String>),
    /// What became of the gate, or of what was decided.
    Gate(GateReport),
    /// The report could not be written.
    NotReported,
    /// End. Limits stay.
    Stop,
}

/// What is to be done next.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    ReadFiles,
    /// Read what runs on the host; its programs only if a limit asks for them. Limits of `own` may have
    /// processes in cgroups of their own. Those of others go back to where they were.
    Scan {
        programs: bool,
        own: BTreeSet<String>,
        devices: BTreeSet<String>,
    },
    /// Hold new cgroups from now on, or no longer.
    Gate {
        open: bool,
    },
    /// Hold these cgroups no longer.
    Decide(BTreeSet<u64>),
    Move(Vec<Move>),
    Apply {
        files: Files,
        goal: Goal,
        managed: BTreeSet<String>,
    },
    Report(Report),
}

/// The agent.
#[derive(Debug)]
pub struct Agent {
    directory: String,
    pid: u32,
    files: Option<Files>,
    /// What is wrong with the files as they are now.
    errors: Vec<String>,
    world: Option<World>,
    whole: bool,
    /// The containers of each socket, with whose it is.
    engines: BTreeMap<(Option<u32>, String), BTreeMap<String, Container>>,
    engine_states: BTreeMap<String, String>,
    /// The node whose pods are followed.
    node: Option<String>,
    pods: Pods,
    cluster_state: String,
    gate: GateReport,
    /// It is to be opened or closed.
    gate_due: bool,
    decisions: Decisions,
    /// What is to be done before anything else.
    todo: VecDeque<Action>,
    managed: BTreeSet<String>,
    /// Limits of an earlier agent that this one has not seen in its files. They stay while a file has errors,
    /// as it may have named them.
    inherited: BTreeSet<String>,
    goal: Goal,
    refused: BTreeMap<String, String>,
    moves_refused: BTreeMap<String, String>,
    /// What has been moved for the goal at hand.
    moved: Vec<Move>,
    read_due: Option<Duration>,
    read_latest: Option<Duration>,
    scan_due: Option<Duration>,
    scanned: Option<Duration>,
    /// When the goal is to be made anew.
    goal_due: Option<Duration>,
    /// ... but not before this for news of children.
    goal_earliest: Duration,
    /// ... and to be applied even if it is the same.
    force: bool,
    looked: Duration,
    checked: Duration,
    check_after: Duration,
    retry: Option<(Duration, Duration)>,
    reported: Option<Report>,
    /// The report is not written before this.
    report_due: Option<Duration>,
    stopped: bool,
}

impl Agent {
    /// An agent that begins by reading its files. Limits in `managed` are its own to take off. The gate holds
    /// cgroups until `deadline` after their creation.
    pub fn new(directory: &str, pid: u32, managed: BTreeSet<String>, deadline: Duration) -> Agent {
        Agent {
            directory: directory.to_owned(),
            pid,
            files: None,
            errors: Vec::new(),
            world: None,
            whole: true,
            engines: BTreeMap::new(),
            engine_states: BTreeMap::new(),
            node: None,
            pods: Pods::NotAsked,
            cluster_state: "not asked yet".to_owned(),
            gate: GateReport::default(),
            gate_due: false,
            decisions: Decisions::new(deadline),
            todo: VecDeque::new(),
            inherited: managed.clone(),
            managed,
            goal: Goal::default(),
            refused: BTreeMap::new(),
            moves_refused: BTreeMap::new(),
            moved: Vec::new(),
            read_due: Some(Duration::ZERO),
            read_latest: None,
            scan_due: Some(Duration::ZERO),
            scanned: None,
            goal_due: None,
            goal_earliest: Duration::ZERO,
            force: true,
            looked: Duration::ZERO,
            checked: Duration::ZERO,
            check_after: CHECK,
            retry: None,
            reported: None,
            report_due: None,
            stopped: false,
        }
    }

    /// It follows the pods of a node, too.
    pub fn with_pods_of(self, node: &str) -> Agent {
        Agent { node: Some(node.to_owned()), pods: Pods::NotListed, ..self }
    }

    /// Takes what happened. `now` is monotonic, from the same start as in all other calls.
    pub fn handle(&mut self, event: Event, now: Duration) {
        match event {
            Event::FilesChanged => {
                let latest = *self.read_latest.get_or_insert(now + SETTLE_MAX);
                self.read_due = Some((now + SETTLE).min(latest));
            }
            Event::Reload => (self.read_due, self.force) = (Some(now), true),
            Event::Read(files) => {
                self.errors.clone_from(&files.errors);
                // An error leaves the running state, if there is one.
                if files.errors.is_empty() || self.files.is_none() {
                    if self.files.as_ref() != Some(&files) {
                        self.scan_due = Some(now);
                    }
                    self.force |= !self.inherited.is_empty();
                    self.files = Some(files);
                    self.gate_due = true;
                }
                self.goal_due = Some(now);
            }
            Event::DevicesChanged if self.devices().next().is_none() => {}
            Event::CgroupsChanged | Event::DevicesChanged => {
                let earliest = self.scanned.map_or(now, |scanned| scanned + SCAN_GAP).max(now);
                self.scan_due = Some(self.scan_due.map_or(earliest, |due| due.min(earliest)));
            }
            Event::Scanned { world, whole } => {
                self.whole = whole;
                self.scanned = Some(now);
                let every = match (self.asks_for_programs(), whole) {
                    (true, _) => Some(PROGRAMS),
                    (false, false) => Some(RESCAN),
                    (false, true) => None,
                };
                let next = every.map(|every| now + every);
                self.scan_due =
                    self.scan_due.filter(|due| *due > now).into_iter().chain(next).min();
                if self.world.as_ref() != Some(&world) {
                    self.goal_due = Some(now);
                }
                self.decisions.retain(&world);
                self.world = Some(world);
            }
            Event::Engine { socket, owner, line } => self.engine(socket, owner, line, now),
            Event::EngineGone { socket, owner } => {
                self.engine_states.remove(&socket);
                if self.engines.remove(&(owner, socket)).is_some() {
                    self.changed(now);
                }
            }
            Event::Pods(line) => self.cluster(line, now),
            Event::Applied(refused) => {
                let took = now.saturating_sub(self.checked);
                self.check_after = (took * CHECK_REST).clamp(CHECK, CHECK_MAX);
                self.checked = now;
                let wait = match self.retry {
                    Some((_, wait)) if refused == self.refused => (wait * 2).min(RETRY_MAX),
                    _ => RETRY_MIN,
                };
                self.retry = (!refused.is_empty()).then_some((now + wait, wait));
                let goal = &self.goal;
                let may_stay = goal.unsure || !goal.unlisted.is_empty();
                self.managed.retain(|name| {
                    may_stay
                        || goal.has(name)
                        || refused.contains_key(name)
                        || self.inherited.contains(name)
                });
                // What could not be moved may be, the next time.
                self.moved.retain(|one| !self.moves_refused.contains_key(&one.into));
                self.refused = refused;
                self.decide(&BTreeSet::new(), now);
            }
            Event::NotApplied(why) => {
                let asked = self.goal.limits.iter().map(|goal| &goal.limit.name);
                // What was to come off is still there.
                let gone = self.managed.difference(&self.inherited);
                let names = asked.chain(gone.filter(|name| !self.goal.has(name)));
                let refused = names.map(|name| (name.clone(), why.clone())).collect();
                self.handle(Event::Applied(refused), now);
            }
            Event::Gate(report) => {
                if report.state != self.gate.state {
                    self.decisions.clear();
                    (self.scan_due, self.goal_due) = (Some(now), Some(now));
                }
                self.gate = report;
            }
            Event::Moved(refused) => {
                self.moves_refused = refused;
                self.scan_due = Some(now);
            }
            Event::NotReported => {
                (self.reported, self.report_due) = (None, Some(now + RETRY_MIN));
            }
            Event::Stop => self.stopped = true,
        }
    }

    /// A child's news has changed the goal. It may have much news, so goals for it have a gap between them.
    fn changed(&mut self, now: Duration) {
        if self.goal_due.is_none() {
            let due = self.goal_earliest.max(now);
            (self.goal_due, self.goal_earliest) = (Some(due), due + GOAL_GAP);
        }
    }

    fn engine(&mut self, socket: String, owner: Option<u32>, line: Line<Container>, now: Duration) {
        // Engines of users take no place of others.
        let of_owner = self.engines.iter().filter(|((other, _), _)| *other == owner);
        let known: usize = of_owner.map(|(_, containers)| containers.len()).sum();
        let containers = self.engines.entry((owner, socket.clone())).or_default();
        let max = if owner.is_some() { USER_CONTAINERS } else { MAX_CONTAINERS };
        let places = max.saturating_sub(known - containers.len());
        let full = || format!("more than {max} containers; the rest is left out");
        let strange = || "lists ids that no container has; they are left out".to_owned();
        // Of what was left out nobody hears again before the next list.
        let before = self.engine_states.get(&socket);
        let running = || "running".to_owned();
        let mut state = before.filter(|state| answers(state)).cloned().unwrap_or_else(running);
        let changed = match line {
            Line::Asked => {
                state = asked(before);
                false
            }
            Line::Listed(mut all) => {
                let listed = all.len();
                all.retain(|id, _| is_container_id(id));
                state = match all.len() {
                    good if good > places => full(),
                    good if good < listed => strange(),
                    _ => running(),
                };
                let all = all.into_iter().take(places).collect();
                let changed = *containers != all;
                *containers = all;
                changed
            }
            Line::Changed(id, _) if !is_container_id(&id) => {
                state = strange();
                false
            }
            Line::Changed(id, container) => {
                if containers.len() < places || containers.contains_key(&id) {
                    let changed = containers.get(&id) != Some(&container);
                    containers.insert(id, container);
                    changed
                } else {
                    state = full();
                    false
                }
            }
            Line::Gone(id) => containers.remove(&id).is_some(),
            Line::Away(reason) => {
                state = format!("{AWAY}{reason}");
                false
            }
        };
        self.engine_states.insert(socket, state);
        if changed {
            self.changed(now);
        }
    }

    fn cluster(&mut self, line: Line<Pod>, now: Duration) {
        let mut state = "connected".to_owned();
        let changed = match (line, &mut self.pods) {
            (Line::Asked, _) => {
                state = asked(Some(&self.cluster_state));
                false
            }
            (Line::Away(reason), _) => {
                state = format!("{AWAY}{reason}");
                false
            }
            (Line::Listed(all), pods) if all.len() <= MAX_PODS => {
                let before = std::mem::replace(pods, Pods::Known(all));
                before != *pods
            }
            (Line::Changed(uid, pod), Pods::Known(pods))
                if pods.len() < MAX_PODS || pods.contains_key(&uid) =>
            {
                pods.insert(uid, pod);
                true
            }
            (Line::Gone(uid), Pods::Known(pods)) => pods.remove(&uid).is_some(),
            _ => {
                state = format!("more than {MAX_PODS} pods; some are left out");
                false
            }
        };
        self.cluster_state = state;
        if changed {
            self.changed(now);
        }
    }

    /// What to do next; call again until there is nothing. Each action but `Report` is answered by an event.
    pub fn next(&mut self, now: Duration, wall: &Zoned) -> Option<Action> {
        if self.stopped {
            return None;
        }
        if self.read_due.is_some_and(|due| due <= now) {
            (self.read_due, self.read_latest) = (None, None);
            return Some(Action::ReadFiles);
        }
        self.files.as_ref()?;
        // Before the scan: what is made after it is held.
        if std::mem::take(&mut self.gate_due) {
            let open = self.asks_for_cgroups();
            if open || self.gate.state != GateState::Unneeded {
                return Some(Action::Gate { open });
            }
        }
        if let Some(action) = self.todo.pop_front() {
            return Some(action);
        }
        if self.scan_due.is_some_and(|due| due <= now) {
            self.scan_due = None;
            let limits =
                self.files.iter().flat_map(|files| &files.specs).flat_map(|spec| &spec.limits);
            let own = limits.filter(|limit| limit.follow.moves).map(|limit| limit.name.clone());
            let mut own: BTreeSet<_> = own.collect();
            if !self.errors.is_empty() {
                own.extend(self.inherited.iter().cloned());
            }
            let devices = self.devices().map(str::to_owned).collect();
            return Some(Action::Scan { programs: self.asks_for_programs(), own, devices });
        }
        let boundary = self.goal.next.is_some_and(|next| next <= wall.timestamp());
        let check = self.checked + self.check_after <= now;
        let retry = self.retry.is_some_and(|(due, _)| due <= now);
        let due = self.goal_due.is_some_and(|due| due <= now);
        if due || boundary || check || retry || self.looked + CLOCK <= now {
            (self.goal_due, self.looked) = (None, now);
            self.reach(check || retry, now, wall);
        }
        if self.decisions.due().is_some_and(|due| due <= now) {
            self.decide(&BTreeSet::new(), now);
        }
        if let Some(action) = self.todo.pop_front() {
            return Some(action);
        }
        if self.report_due.is_some_and(|due| due > now) {
            return None;
        }
        let report = self.report();
        if self.reported.as_ref() != Some(&report) {
            (self.reported, self.report_due) = (Some(report.clone()), None);
            return Some(Action::Report(report));
        }
        None
    }

    /// Makes the goal, and notes what must be done for it.
    fn reach(&mut self, again: bool, now: Duration, wall: &Zoned) {
        let (Some(files), Some(world)) = (&self.files, &mut self.world) else { return };
        let of = self.engines.iter().flat_map(|((owner, _), containers)| {
            containers.iter().map(|(id, c)| ((*owner, id.clone()), c.clone()))
        });
        world.containers = of.collect();
        world.pods = self.pods.clone();
        let goal = goal(files, world, wall);
        // Nobody asks for it any more.
        let tried = self.moves_refused.len();
        self.moves_refused.retain(|into, _| goal.moves.iter().any(|one| one.into == *into));
        if self.moves_refused.len() != tried {
            self.goal_due = Some(now);
        }
        let mut moves = goal.moves.clone();
        // One that could not be moved is not tried again before something else changes. One that was moved,
        // and has gone back since, is.
        self.moved.retain(|one| goal.moves.contains(one));
        moves.retain(|one| !self.moved.contains(one));
        if !moves.is_empty() {
            moves.truncate(MOVES_MAX);
            self.moved.extend(moves.iter().cloned());
            self.goal_due = Some(now);
            return self.todo.push_back(Action::Move(moves));
        }
        let same = Goal { next: self.goal.next, moves: self.goal.moves.clone(), ..goal.clone() }
            == self.goal;
        self.goal = goal;
        if same && !again && !self.force {
            return self.decide(&BTreeSet::new(), now);
        }
        // Nobody else waits while limits are put on.
        let limited = self.goal.limits.iter().flat_map(|goal| &goal.cgroups);
        let limited = limited.map(|(_, id)| *id).collect();
        let files = files.clone();
        self.inherited.retain(|name| !files.errors.is_empty() && !self.goal.has(name));
        let managed = self.managed.difference(&self.inherited).cloned().collect();
        self.decide(&limited, now);
        self.force = false;
        // Until it is known what became of it.
        self.checked = now;
        self.managed.extend(self.goal.limits.iter().map(|goal| goal.limit.name.clone()));
        self.managed.extend(self.goal.waiting.iter().map(|waits| waits.name.clone()));
        self.todo.push_back(Action::Apply { files, goal: self.goal.clone(), managed });
    }

    /// Notes that all known cgroups are decided that can be. Those of `limited` have limits still to be put
    /// on.
    fn decide(&mut self, limited: &BTreeSet<u64>, now: Duration) {
        let asked = Asked { engines: self.asks_for_containers(), cluster: self.asks_for_pods() };
        let Some(world) = self.world.as_ref().filter(|_| self.gate.state == GateState::Open) else {
            return;
        };
        let decided = self.decisions.take(world, limited, asked, now);
        if !decided.is_empty() {
            self.todo.push_back(Action::Decide(decided));
        }
    }

    /// How long nothing has to be done if nothing happens; `None` before the files were read.
    pub fn timeout(&self, now: Duration, wall: &Zoned) -> Duration {
        let next = self.goal.next.map(|next| {
            let left = next.duration_since(wall.timestamp());
            now + Duration::try_from(left).unwrap_or_default()
        });
        let retry = self.retry.map(|(due, _)| due);
        let looks = [self.checked + self.check_after, self.looked + CLOCK];
        let unknown = self.decisions.due();
        let due =
            [self.read_due, self.scan_due, self.goal_due, next, retry, unknown, self.report_due];
        let due = due.into_iter().flatten().chain(looks).min();
        due.map_or(CLOCK, |due| due.saturating_sub(now)).min(CLOCK)
    }

    /// Whether it is over.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Whether engines of containers are to be asked.
    pub fn asks_for_containers(&self) -> bool {
        self.files.as_ref().is_some_and(Files::ask_for_containers)
    }

    /// Whether the API server is to be asked.
    pub fn asks_for_pods(&self) -> bool {
        self.node.is_some() && self.files.as_ref().is_some_and(Files::ask_for_pods)
    }

    /// Whether there is a limit on what may come and go.
    fn asks_for_cgroups(&self) -> bool {
        let mut specs = self.files.iter().flat_map(|files| &files.specs);
        let by_itself = |spec: &Spec| spec.labels || spec.annotations;
        specs
            .any(|spec| by_itself(spec) || spec.limits.iter().any(|limit| !limit.scope.is_device()))
    }

    /// The devices that have limits.
    fn devices(&self) -> impl Iterator<Item = &str> {
        let limits = self.files.iter().flat_map(|files| &files.specs).flat_map(|spec| &spec.limits);
        limits.map(|limit| &limit.scope).filter(|scope| scope.is_device()).map(Scope::name)
    }

    fn asks_for_programs(&self) -> bool {
        self.selects(&[SelectorKind::Exe])
    }

    fn selects(&self, kinds: &[SelectorKind]) -> bool {
        self.files.as_ref().is_some_and(|files| files.select(kinds))
    }

    /// Which engines of containers do not answer, in words; `None` if all do.
    fn silent_engines(&self) -> Option<String> {
        if self.engine_states.is_empty() {
            return Some(format!("no engine of containers answers; for Podman: {START_PODMAN}"));
        }
        let silent = self.engine_states.iter().filter(|(_, state)| !answers(state));
        let silent = silent.map(|(socket, state)| {
            let is = if state.starts_with(AWAY) { "is " } else { "" };
            format!("{socket} {is}{state}")
        });
        let silent: Vec<_> = silent.collect();
        (!silent.is_empty()).then(|| silent.join(", "))
    }

    fn report(&self) -> Report {
        let mut limits = self.goal.reports.clone();
        for report in &mut limits {
            if let Some(reason) = self.refused.get(&report.name) {
                (report.state, report.reason) = (LimitState::Refused, Some(reason.clone()));
            }
        }
        let on_containers = self.goal.waiting.iter().filter(|waits| is_on_containers(&waits.scope));
        let on_containers: BTreeSet<_> = on_containers.map(|waits| waits.name.as_str()).collect();
        let silent = self.silent_engines();
        for report in limits.iter_mut().filter(|report| on_containers.contains(&*report.name)) {
            if let (Some(reason), Some(silent)) = (&mut report.reason, &silent) {
                *reason += &format!("; {silent}");
            }
        }
        // It is in no file any more, and does not come off: a limit made by hand is inside it.
        let is_known = |name: &str| limits.iter().any(|limit| limit.name == name);
        let stays = self.refused.iter().filter(|(name, _)| !is_known(name));
        let stays = stays.map(|(name, why)| format!("limit `{name}`, which is in no file: {why}"));
        let moves = self.moves_refused.iter().map(|(into, why)| format!("cgroup `{into}`: {why}"));
        let more = self.world.as_ref().filter(|world| world.has_more);
        let more = more.map(|_| {
            format!("there are more than {MAX_CGROUPS} cgroups; new ones among the deepest get no limits")
        });
        let errors = self.errors.iter().cloned().chain(moves).chain(stays).chain(more).collect();
        let mut engines = self.engine_states.clone();
        if let Some(node) = self.node.as_ref().filter(|_| self.asks_for_pods()) {
            let unknown = match self.world.as_ref().map_or(0, World::unknown_pods) {
                0 => String::new(),
                n => format!("; {n} pods here are not known yet"),
            };
            let state = format!("{}{unknown}", self.cluster_state);
            engines.insert(format!("pods of node {node}"), state);
        }
        Report {
            pid: self.pid,
            directory: self.directory.clone(),
            // Whoever writes it knows.
            store: String::new(),
            errors,
            limits,
            managed: self.managed.clone(),
            engines,
            gate: self.gate.clone(),
        }
    }
}

/// The state when one is asked. One that was away stays away until it answers.
fn asked(before: Option<&String>) -> String {
    before.filter(|state| state.starts_with(AWAY)).cloned().unwrap_or_else(|| SILENT.to_owned())
}

fn is_on_containers(scope: &Scope) -> bool {
    use SelectorKind::{Container, Labels};
    matches!(scope, Scope::Select(selector) if matches!(selector.kind, Container | Labels))
}

#[cfg(test)]
mod tests;
