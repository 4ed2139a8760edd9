//! All that is known of the limits of a host, as data that serializes: what `tidegate status --json` prints
//! and `tidegate web` shows; and what of it somebody should be told.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use jiff::Zoned;
use serde::{Deserialize, Serialize, Serializer, ser::SerializeStruct};
use serde_json::Value;
use tidegate_core::Scope;
use tidegate_fleet::status::NodeStatus;
use tidegate_host::{
    absent,
    host::Host,
    nic::state::RunDir,
    plan::State,
    status::{LimitStatus, hold_ceilings},
};
use tidegate_sys::{
    names,
    schemes::ends_leases,
    store::{Listing, StoreError, Waiting},
};

use crate::{
    directory,
    missed::missed,
    report::{LimitReport, LimitState, Report, RunFiles},
};

/// The state of a limit whose cgroup or device does not exist.
pub const WAITING: &str = "waiting";

/// What holds limits on a host, or keeps them there.
#[derive(Debug)]
pub struct HostStatus {
    /// Those that are on the host, by name.
    pub limits: Vec<LimitStatus>,
    /// Those that wait for their cgroup or device.
    pub waiting: Vec<Waiting>,
    /// Software NICs that run.
    pub nics: Vec<Value>,
    pub fleet: Option<NodeStatus>,
    /// The socket that a daemon of a fleet has left which has died.
    pub fleet_left: Option<PathBuf>,
    pub agent: Option<AgentStatus>,
    /// Why an agent is missed that has not run since the host started.
    pub agent_missed: Option<String>,
}

/// The agent of this host, and what it said last.
#[derive(Debug, Serialize, Deserialize)]
pub struct AgentStatus {
    pub running: bool,
    /// Its process is stopped by a signal, so it does nothing.
    #[serde(default)]
    pub stopped: bool,
    /// It hangs: it has done nothing for so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent_s: Option<u64>,
    #[serde(flatten)]
    pub report: Report,
}

impl AgentStatus {
    /// None if there has been none since the host started.
    pub fn find(run_dir: &Path) -> Option<AgentStatus> {
        let files = RunFiles::at(run_dir);
        let report = files.read()?;
        let running = files.runs();
        let stopped = running && is_stopped(report.pid);
        let silent_s = files.silence().filter(|_| running).map(|silence| silence.as_secs());
        Some(AgentStatus { running, stopped, silent_s, report })
    }

    /// The agent that runs and keeps the limits of a store.
    pub fn running(run_dir: &Path, store: &Path) -> Option<AgentStatus> {
        AgentStatus::find(run_dir).filter(|agent| agent.running && agent.is_of(store))
    }

    /// Whether its limits are those of a store. Agents of earlier versions do not say.
    fn is_of(&self, store: &Path) -> bool {
        self.report.store.is_empty() || Path::new(&self.report.store) == store
    }

    /// Whether it runs, and is neither stopped nor hangs.
    pub fn works(&self) -> bool {
        self.running && !self.stopped && self.silent_s.is_none()
    }

    /// Whether it runs, or its files ask for it.
    pub fn is_wanted(&self) -> bool {
        self.running || self.report.is_missed()
    }

    /// Whether it runs, and keeps what a file says.
    pub fn keeps(&self, file: &Path) -> bool {
        let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let directory = whole(directory::of(file));
        self.running && whole(Path::new(&self.report.directory)) == directory
    }

    /// Compares what it said last with the limits of its store, which others may have changed since.
    /// `names` are those that it has by now: the agent may have put one on after the limits were read.
    fn compare(&mut self, limits: &BTreeMap<&str, (State, String)>, names: &[String]) {
        if !self.running {
            return;
        }
        // Of two limits of one name the other one is on the host.
        let mut seen = BTreeSet::new();
        let twice = self.report.limits.iter().map(|limit| limit.name.clone());
        let twice: BTreeSet<_> = twice.filter(|name| !seen.insert(name.clone())).collect();
        for limit in &mut self.report.limits {
            let is = limits.get(limit.name.as_str());
            let is_there = is.is_some();
            match limit.state {
                LimitState::InForce if !is_there && !names.contains(&limit.name) => {
                    let why = "something has taken it off; the agent puts it back";
                    (limit.state, limit.reason) = (LimitState::Refused, Some(why.to_owned()));
                }
                LimitState::Refused if is_there && !twice.contains(&limit.name) => {
                    let reason = limit.reason.get_or_insert_default();
                    reason.push_str("; the limit of this name on the host stays as it was");
                    limit.stays = true;
                }
                // Who tells what it is on is away, or has not answered an agent that has just started.
                LimitState::Waiting
                    if is.is_some_and(|(is, on)| *is == State::InForce && *on == limit.scope) =>
                {
                    limit.state = LimitState::InForce;
                    let reason = limit.reason.get_or_insert_default();
                    reason.push_str("; the limit on the host stays meanwhile");
                }
                _ => {}
            }
        }
    }

    /// Its report of a limit of its files.
    pub fn limit(&self, name: &str) -> Option<&LimitReport> {
        self.report.limits.iter().find(|limit| limit.name == name)
    }
}

/// Whether a process is stopped: the state after its name, which may have brackets itself.
fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

#[derive(Serialize)]
#[serde(untagged)]
enum Row<'a> {
    Pinned(&'a LimitStatus),
    Waiting {
        name: &'a str,
        #[serde(flatten, serialize_with = "tidegate_host::status::scope")]
        scope: &'a Scope,
        state: &'static str,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        required: bool,
    },
    Kept(&'a LimitReport),
}

impl Serialize for HostStatus {
    /// What does not exist on the host has no key.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let limits: Vec<_> = self.rows().collect();
        let mut map = serializer.serialize_struct("HostStatus", 4)?;
        map.serialize_field("limits", &limits)?;
        if !self.nics.is_empty() {
            map.serialize_field("nics", &self.nics)?;
        }
        if let Some(fleet) = &self.fleet {
            map.serialize_field("fleet", fleet)?;
        }
        if let Some(agent) = &self.agent {
            map.serialize_field("agent", agent)?;
        }
        map.end()
    }
}

/// What somebody should be told, a sentence each.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Warnings {
    /// Limits that are not in force or not alone on their device, and what else is lost.
    pub alarms: Vec<String>,
    /// Limits that wait, those that a container or pod asked for and cannot have, and those that are not on
    /// cgroups of users.
    pub waiting: Vec<String>,
}

impl HostStatus {
    /// Reads the host. The fleet is what its daemon says.
    ///
    /// # Errors
    /// [`StoreError`] when the store cannot be read.
    pub fn read(
        host: &Host,
        run_dir: &Path,
        fleet: Option<NodeStatus>,
    ) -> Result<HostStatus, StoreError> {
        let listing = host.store().list(host.hierarchy())?;
        Ok(HostStatus::of(host, &listing, run_dir, fleet))
    }

    /// The same of limits that were listed.
    pub fn of(
        host: &Host,
        listing: &Listing,
        run_dir: &Path,
        fleet: Option<NodeStatus>,
    ) -> HostStatus {
        let mut limits = LimitStatus::all(listing);
        // The ceiling of a limit may be that of one above it.
        hold_ceilings(&mut limits);
        let store = host.store().path();
        let mut agent = AgentStatus::find(run_dir).filter(|agent| agent.is_of(&store));
        if let Some(agent) = &mut agent {
            let states = limits.iter().map(|l| (l.name.as_str(), (l.state, l.scope.to_string())));
            agent.compare(&states.collect(), &host.store().names().unwrap_or_default());
        }
        for limit in &mut limits {
            // One that was in force, and that no file of the agent has, must be there.
            let kept = agent.as_ref().and_then(|agent| agent.limit(&limit.name));
            let is_lost = limit.state == State::ScopeGone;
            limit.required = kept.map_or(is_lost, |kept| kept.required);
        }
        let keeps = agent.as_ref().filter(|agent| agent.running);
        // The agent has cgroups join that come after their limit.
        let is_kept = |name: &str| keeps.is_some_and(|agent| agent.limit(name).is_some());
        let mut cgroups = host.cgroups();
        for limit in limits.iter_mut().filter(|limit| !is_kept(&limit.name)) {
            let members = limit.members.as_deref().unwrap_or_default();
            limit.outside = cgroups.outside(&limit.scope, members);
        }
        let (waiting, nics) = (host.store().waiting(), RunDir::at(run_dir).running());
        let (fleet_left, agent_missed) = (None, None);
        HostStatus { limits, waiting, nics, fleet, fleet_left, agent, agent_missed }
    }

    /// Looks whether the files of a directory ask for an agent that has not run since the host started.
    pub fn look_for_agent(&mut self, run_dir: &Path, directory: &Path) {
        if RunFiles::at(run_dir).is_new() {
            let names = self.limits.iter().map(|limit| &*limit.name);
            let names = names.chain(self.waiting.iter().map(|waits| &*waits.name)).collect();
            self.agent_missed = missed(directory, &names, &Zoned::now());
        }
    }

    /// Leaves what is known of one limit.
    pub fn keep(&mut self, name: &str) {
        self.limits.retain(|limit| limit.name == name);
        self.waiting.retain(|waits| waits.name == name);
        self.nics.clear();
        if let Some(AgentStatus { report, .. }) = &mut self.agent {
            report.errors.clear();
            report.limits.retain(|limit| limit.name == name);
        }
        // Whose limit it is not has nothing to say of it.
        self.agent.take_if(|agent| agent.report.limits.is_empty());
    }

    /// Whether no limit is known.
    pub fn is_empty(&self) -> bool {
        self.limits.is_empty() && self.waiting.is_empty() && self.agent.is_none()
    }

    /// The first limit, as one of the list is written; else what the agent says of its first one.
    pub fn first(&self) -> Option<impl Serialize + '_> {
        let kept = || Some(Row::Kept(self.agent.as_ref()?.report.limits.first()?));
        self.rows().next().or_else(kept)
    }

    fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        let waits = self.waiting.iter().map(|waits| Row::Waiting {
            name: &waits.name,
            scope: &waits.scope,
            state: WAITING,
            required: waits.required,
        });
        self.limits.iter().map(Row::Pinned).chain(waits)
    }

    pub fn warnings(&self) -> Warnings {
        let agent = self.agent.as_ref();
        let keeps = agent.filter(|agent| agent.running);
        let is_refused = |name: &str| {
            let kept = keeps.and_then(|agent| agent.limit(name));
            kept.is_some_and(|limit| limit.state == LimitState::Refused)
        };
        // Who waits is nothing to cry about, unless it must be there.
        let (mut waiting, mut required) = (Vec::new(), Vec::new());
        let users = names::users();
        let waits = self.waiting.iter().filter(|waits| !is_refused(&waits.name));
        for Waiting { name, scope, required: is_required } in waits {
            let missing = || absent::missing(scope, &users);
            let line = match keeps.and_then(|agent| agent.limit(name)) {
                Some(LimitReport { reason, .. }) => {
                    let why = reason.clone().unwrap_or_else(missing);
                    format!("limit `{name}` waits: {why}; the agent puts it on when it can")
                }
                None if absent::is_for_the_agent(scope) => {
                    format!("limit `{name}` waits: {}, and puts it on", missing())
                }
                None => format!(
                    "limit `{name}` waits: {}; `tidegate apply FILE` puts it on once it can",
                    missing()
                ),
            };
            if *is_required { required.push(line) } else { waiting.push(line) }
        }
        for LimitStatus { name, scope, state, outside, required: is_required, .. } in &self.limits {
            let line = match state {
                State::NoMembers if is_refused(name) => continue,
                State::NoMembers if outside.is_empty() => {
                    format!("limit `{name}` waits: {}", absent::nothing_on(scope, &users))
                }
                State::ScopeGone if !is_required => {
                    format!("limit `{name}` waits: {scope} is gone")
                }
                _ => continue,
            };
            if *is_required { required.push(line) } else { waiting.push(line) }
        }
        let mut alarms: Vec<_> = self
            .limits
            .iter()
            .filter(|l| l.state != State::ScopeGone || l.required)
            .filter_map(|l| {
                let alarm = self.taken(l).or_else(|| alarm(&l.name, &l.scope, l.state))?;
                Some(l.why.as_ref().map_or(alarm.clone(), |why| format!("{alarm} ({why})")))
            })
            .collect();
        alarms.extend(self.limits.iter().filter_map(of_outside));
        alarms.extend(self.limits.iter().flat_map(programs_before));
        alarms.extend(required);
        alarms.extend(agent.into_iter().flat_map(of_agent));
        alarms.extend(self.agent_missed.iter().map(|why| {
            format!(
                "no agent has run since the host started, and {why}; start it with `systemctl enable --now \
                 tidegate-agent`"
            )
        }));
        // Whoever may start a container, a pod or a program may not make a host's check fail.
        waiting.extend(agent.into_iter().flat_map(|agent| refused(&agent.report, true)));
        waiting.extend(agent.into_iter().flat_map(|agent| left_out(&agent.report, false)));
        let left = self.fleet_left.iter().filter(|_| !self.limits.is_empty());
        alarms.extend(left.map(|socket| of_daemon(socket, &self.limits)));
        alarms.extend(self.nics.iter().flat_map(of_nic));
        Warnings { alarms, waiting }
    }

    /// The alarm for a limit whose device was made anew, and has another limit by now.
    fn taken(&self, lost: &LimitStatus) -> Option<String> {
        let LimitStatus { name, scope, .. } = lost;
        let is_whole = |l: &LimitStatus| {
            l.scope == *scope && l.settings.options.as_ref().is_some_and(|o| o.matched.is_empty())
        };
        let has_it = |l: &&LimitStatus| l.name != *name && l.state == State::InForce && is_whole(l);
        let is_lost = lost.state == State::Anew && scope.is_device() && is_whole(lost);
        let other = &self.limits.iter().filter(|_| is_lost).find(has_it)?.name;
        Some(format!(
            "limit `{name}` is NOT ENFORCED: {scope} was removed, and another one has its name and limit \
             `{other}`; take `{name}` off with `tidegate limit del {name}`"
        ))
    }
}

fn of_outside(LimitStatus { name, outside, .. }: &LimitStatus) -> Option<String> {
    let first = outside.first()?;
    let more = match outside.len() - 1 {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(format!(
        "limit `{name}` is NOT ENFORCED on cgroup `{first}`{more}, which came after it, as no agent keeps \
         it; type `tidegate limit restore {name}`"
    ))
}

fn programs_before(limit: &LimitStatus) -> impl Iterator<Item = String> {
    limit.programs_before.iter().map(|p| {
        format!(
            "a program `{}` (id {}) runs before the {} limit `{}` on {} and may end the chain: packets \
             that it does not pass on are not limited; `bpftool net show` lists the order",
            p.name, p.id, p.direction, limit.name, limit.scope
        )
    })
}

fn of_agent(agent: &AgentStatus) -> Vec<String> {
    let AgentStatus { running, stopped, silent_s, report } = agent;
    let mut alarms = Vec::new();
    let pid = report.pid;
    if *stopped {
        alarms.push(format!(
            "the agent (process {pid}) is stopped by a signal; what comes is not limited; `kill -CONT {pid}` \
             has it go on"
        ));
    } else if let Some(silent_s) = silent_s {
        alarms.push(format!(
            "the agent (process {pid}) has done nothing for {} min; what comes is not limited; end it with \
             `kill -KILL {pid}` and start it again: limits stay in force meanwhile",
            silent_s / 60
        ));
    }
    if !running && report.is_missed() {
        let directory = &report.directory;
        alarms.push(format!("the agent of {directory} does not run; what comes is not limited"));
    }
    alarms.extend(report.errors.iter().map(|error| format!("agent: {error}")));
    alarms.extend(refused(report, false));
    alarms.extend(left_out(report, true));
    alarms
}

/// Limits in force that are not on all cgroups of their program: not on some of the host, or of users alone.
fn left_out(report: &Report, of_host: bool) -> impl Iterator<Item = String> {
    let limits = report.limits.iter();
    let limits = limits.filter(move |limit| limit.leaves_out_a_host_cgroup() == of_host);
    limits.filter_map(LimitReport::left_out_words)
}

/// Limits that the agent refuses: those of `guest`s that asked for them themselves, or all others.
fn refused(report: &Report, guest: bool) -> impl Iterator<Item = String> {
    let refused = report.limits.iter().filter(|limit| limit.state == LimitState::Refused);
    refused.filter(move |limit| limit.guest == guest).map(move |limit| {
        let LimitReport { name, file, reason, stays, .. } = limit;
        let reason = reason.as_deref().unwrap_or_default();
        let reason = reason.strip_prefix(&format!("limit `{name}`: ")).unwrap_or(reason);
        let is = if guest { "not used" } else { "NOT ENFORCED" };
        let as_written = if *stays { " as written" } else { "" };
        format!("limit `{name}` of {file} is {is}{as_written}: {reason}")
    })
}

fn of_daemon(socket: &Path, limits: &[LimitStatus]) -> String {
    let keeps = |limit: &&LimitStatus| {
        limit.settings.options.is_some_and(|options| !ends_leases(options.scheme))
    };
    let names = |limits: &mut dyn Iterator<Item = &LimitStatus>| {
        limits.map(|limit| format!("`{}`", limit.name)).collect::<Vec<_>>().join(", ")
    };
    let lent = names(&mut limits.iter().filter(|limit| limit.lent));
    died(socket, &lent, &names(&mut limits.iter().filter(keeps)))
}

/// `lent` and `keep` are names of limits: whose rates end, and whose schemes know no end of a rate.
fn died(socket: &Path, lent: &str, keep: &str) -> String {
    let before = |start: &str, names: &str, end: &str| match names {
        "" => String::new(),
        names => format!("{start}{names}{end}"),
    };
    format!(
        "the daemon of the fleet has died. Without it limits of its groups fall back to this host's reserved \
         share{}.{} Start it again, or remove {} if this host has left the fleet",
        before(": ", lent, ""),
        before(
            " Of ",
            keep,
            ", those in a group keep their rates until `tidegate daemon --stand-down FILE`."
        ),
        socket.display()
    )
}

fn of_nic(nic: &Value) -> impl Iterator<Item = String> {
    gone(nic).map(move |port| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (nic, port) = (text(&nic["name"]), text(&port["port"]));
        format!("port {port} of nic `{nic}` is gone; packets for it are dropped until it is back")
    })
}

/// The ports of a software NIC that are not open.
pub fn gone(nic: &Value) -> impl Iterator<Item = &Value> {
    nic["ports"].as_array().into_iter().flatten().filter(|port| port["up"] == false)
}

/// The cry for a limit that is not enforced, with what to do; `None` when all is well.
pub fn alarm(name: &str, scope: &Scope, state: State) -> Option<String> {
    let back = format!(
        "put it back with `tidegate limit restore {name}` when there is one again, or take it off with \
         `tidegate limit del {name}`"
    );
    let restore = format!(
        "put it back with `tidegate limit restore {name}`, or take it off with `tidegate limit del {name}`"
    );
    let gone = match scope {
        Scope::Cgroup(_) => "removed (a service that restarts gets a new one)",
        _ => "removed, or is in another network namespace",
    };
    match state {
        State::InForce | State::NoMembers => None,
        State::ScopeGone => {
            Some(format!("limit `{name}` is NOT ENFORCED: {scope} was {gone}; {back}"))
        }
        State::Anew => Some(format!(
            "limit `{name}` is NOT ENFORCED: {scope} was removed, and another one has its name; {restore}"
        )),
        State::Detached => Some(format!(
            "limit `{name}` is NOT ENFORCED: something took its programs off {scope}; {restore}"
        )),
        State::Broken => Some(format!(
            "limit `{name}` on {scope} is BROKEN: it cannot be read, so nobody knows what it does; put it \
             back with `tidegate limit restore {name}`, or with `tidegate apply` if its request cannot be \
             read, or take it off with `tidegate limit del {name}`"
        )),
        State::NoFq => Some(format!(
            "limit `{name}` on {scope} is NOT ENFORCED as written: a device by which its packets leave has \
             no `fq` any more, so they are not delayed, only dropped beyond the horizon; `tidegate plan` and \
             `tc qdisc show` tell which; type: tc qdisc replace dev DEVICE root fq"
        )),
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::scheme::SCHEMES;

    use super::*;

    fn waiting(name: &str) -> LimitReport {
        LimitReport {
            name: name.to_owned(),
            file: "a.toml".to_owned(),
            scope: "pod `prod`".to_owned(),
            state: LimitState::Waiting,
            reason: Some("the API server is away".to_owned()),
            stays: false,
            guest: false,
            required: false,
            schedule: None,
            next_change: None,
            next_rates: None,
            cgroups: Vec::new(),
            left_out: Vec::new(),
        }
    }

    /// As after its restart, while the API server is away.
    #[test]
    fn what_waits_for_an_answer_and_is_on_the_host_is_in_force() {
        let limits = ["on", "empty", "elsewhere", "none"].map(waiting).to_vec();
        let report = Report { limits, ..Report::default() };
        let mut agent = AgentStatus { running: true, stopped: false, silent_s: None, report };
        let is = |state, scope: &str| (state, scope.to_owned());
        let host = BTreeMap::from([
            ("on", is(State::InForce, "pod `prod`")),
            ("empty", is(State::NoMembers, "pod `prod`")),
            ("elsewhere", is(State::InForce, "device `eth1`")),
        ]);
        agent.compare(&host, &[]);
        let said: Vec<_> = agent.report.limits.iter().map(LimitReport::words).collect();
        let waits = "waiting: the API server is away";
        let in_force = "in force: the API server is away; the limit on the host stays meanwhile";
        assert_eq!(said, [in_force, waits, waits, waits]);
    }

    /// Whoever may start a container must not be able to make the check of a host fail.
    #[test]
    fn what_a_container_asks_for_itself_is_named_and_no_alarm() {
        let report = |name: &str, guest| LimitReport {
            name: name.to_owned(),
            state: LimitState::Refused,
            reason: Some("why".to_owned()),
            guest,
            ..waiting(name)
        };
        let limits = vec![report("tier", false), report("container-web", true)];
        let report = Report { limits, ..Report::default() };
        let agent = AgentStatus { running: true, stopped: false, silent_s: None, report };
        let status = HostStatus {
            limits: Vec::new(),
            waiting: Vec::new(),
            nics: Vec::new(),
            fleet: None,
            fleet_left: None,
            agent: Some(agent),
            agent_missed: None,
        };
        let Warnings { alarms, waiting } = status.warnings();
        assert_eq!(alarms, ["limit `tier` of a.toml is NOT ENFORCED: why"]);
        assert_eq!(waiting, ["limit `container-web` of a.toml is not used: why"]);
    }

    /// Nor whoever may run a program.
    #[test]
    fn a_limit_that_is_not_on_cgroups_of_users_is_named_and_of_the_host_an_alarm() {
        let report = |name: &str, left_out: &[&str]| LimitReport {
            name: name.to_owned(),
            state: LimitState::InForce,
            reason: Some("not on these".to_owned()),
            left_out: left_out.iter().map(|path| (*path).to_owned()).collect(),
            ..waiting(name)
        };
        let session = "user.slice/user-1000.slice/session-1.scope";
        let limits = vec![report("host", &["a.service", session]), report("users", &[session])];
        let mut status = HostStatus {
            limits: Vec::new(),
            waiting: Vec::new(),
            nics: Vec::new(),
            fleet: None,
            fleet_left: None,
            agent_missed: None,
            agent: Some(AgentStatus {
                running: true,
                stopped: false,
                silent_s: None,
                report: Report { limits, ..Report::default() },
            }),
        };
        let Warnings { alarms, waiting } = status.warnings();
        assert_eq!(alarms, ["limit `host` of a.toml is in force, but not on these"]);
        assert_eq!(waiting, ["limit `users` of a.toml is in force, but not on these"]);
        // One that is refused by now has its own reason.
        let limits = &mut status.agent.as_mut().unwrap().report.limits;
        limits.iter_mut().for_each(|limit| limit.state = LimitState::Refused);
        let Warnings { alarms, waiting } = status.warnings();
        assert!(alarms.len() == 2 && waiting.is_empty(), "{alarms:?} {waiting:?}");
    }

    #[test]
    fn an_agent_that_does_nothing_is_an_alarm() {
        let report = Report { pid: 7, ..Report::default() };
        let agent = |running, stopped, silent_s| AgentStatus {
            running,
            stopped,
            silent_s,
            report: report.clone(),
        };
        let works = agent(true, false, None);
        assert!(works.works() && of_agent(&works).is_empty());
        let stopped = agent(true, true, Some(400));
        let hangs = agent(true, false, Some(400));
        for (agent, advice) in [(stopped, "`kill -CONT 7`"), (hangs, "for 6 min")] {
            let alarms = of_agent(&agent);
            assert!(
                !agent.works() && alarms.len() == 1 && alarms[0].contains(advice),
                "{alarms:?}"
            );
        }
    }

    #[test]
    fn what_a_dead_daemon_leaves_is_said_by_limit() {
        let kept = SCHEMES.iter().filter(|info| !ends_leases(info.scheme));
        assert_eq!(kept.map(|info| info.name).collect::<Vec<_>>(), ["htb", "tbf"]);
        let said = |lent, keep| died(Path::new("s"), lent, keep);
        let all = "reserved share. Start it again, or remove s if ";
        assert!(said("", "").contains(all), "{}", said("", ""));
        let some = "share: `a`. Of `b`, those in a group keep their rates until `tidegate daemon \
                    --stand-down FILE`. Start";
        assert!(said("`a`", "`b`").contains(some), "{}", said("`a`", "`b`"));
    }
}
