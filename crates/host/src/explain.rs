//! What holds a process, a cgroup or a flow back: the limits on its cgroup and on those above, what each did
//! in a short sample, the TCP sockets that use them, and one sentence.
//!
//! A socket belongs to the cgroup in which it was made, which need not be the one its process is in now. So a
//! process or a flow may have more than one [`Place`].

pub mod flow;
pub mod verdict;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    os::unix::fs::MetadataExt,
    thread,
    time::{Duration, Instant},
};

use serde::{Serialize, Serializer};
use tidegate_core::Scope;
use tidegate_sys::{
    cgroup::{Cgroup, CgroupError},
    clock::monotonic_ns,
    limit::LimitError,
    net::{NetError, NetNs, diag, holders},
    store::StoreError,
};

pub use self::{flow::Flow, verdict::Verdict};
use crate::{
    host::Host,
    live::{Live, LiveError, Origin, live},
    plan::State,
    risk::AtRisk,
    sockets::{Sampler, SocketSample, Sockets},
    status::{Counts, DirectionStatus, LimitSample, LimitStatus, Settings},
    tree::{Parents, ancestors, lineage},
    waiting::{self, Passing},
};

/// Cgroups that one explanation looks at, at most.
pub const MAX_PLACES: usize = 8;

/// Pairs of addresses whose way out is looked up, at most.
const MAX_ENDS: usize = 64;

/// What is asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// A process.
    Process(u32),
    /// A cgroup by its path.
    Cgroup(String),
    /// A TCP connection.
    Flow(Flow),
}

impl Subject {
    /// Digits are a process, addresses a flow, all else a cgroup. A cgroup whose name looks like one of the
    /// others is written with a slash before it.
    ///
    /// # Errors
    /// [`ExplainError::NoPort`], [`ExplainError::BadPort`].
    pub fn parse(text: &str) -> Result<Subject, ExplainError> {
        if let Ok(pid) = text.parse() {
            return Ok(Subject::Process(pid));
        }
        if let Some(flow) = Flow::parse(text) {
            return Ok(Subject::Flow(flow));
        }
        match flow::without_port(text) {
            Some((address, "")) => Err(ExplainError::NoPort(address.to_owned())),
            Some((_, port)) => Err(ExplainError::BadPort(port.to_owned())),
            None => Ok(Subject::Cgroup(text.to_owned())),
        }
    }
}

/// How closely to look.
#[derive(Debug, Clone, Copy)]
pub struct ExplainOptions {
    /// How long to watch.
    pub sample: Duration,
    /// How many sockets to report of each cgroup, the fastest.
    pub sockets: usize,
}

/// What was asked about, as it was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Asked {
    /// A process.
    Process { pid: u32, comm: String },
    /// A cgroup.
    Cgroup { path: String },
    /// Connections.
    Flow {
        /// As asked for.
        #[serde(serialize_with = "display")]
        flow: Flow,
    },
}

fn display<S: Serializer>(
    value: &impl std::fmt::Display,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Explanation {
    /// What was asked about.
    pub asked: Asked,
    /// How long it was watched.
    pub sample_ns: u64,
    /// The cgroups that matter; that of a process first, then those of its sockets.
    pub places: Vec<Place>,
    /// Cgroups left out beyond [`MAX_PLACES`].
    pub more_places: usize,
    /// Of a flow: the limits with a queue that it passes, and what waits of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub passing: Vec<Passing>,
}

/// One cgroup with what applies to it.
#[derive(Debug, Clone, Serialize)]
pub struct Place {
    /// Its path; empty for the root.
    pub cgroup: String,
    /// The limits that apply, innermost first; then those of devices and ports, at the far end last.
    pub limits: Vec<Applied>,
    /// The TCP sockets at and below the cgroup: those that were asked about first, then the fastest.
    pub sockets: Vec<SocketSample>,
    /// How many there are.
    pub sockets_total: usize,
    /// All of them were seen.
    pub sockets_whole: bool,
    /// What holds it back.
    pub verdict: Verdict,
    /// The same in words.
    pub sentence: String,
}

/// A limit that applies, and what it did in the sample.
#[derive(Debug, Clone, Serialize)]
pub struct Applied {
    pub name: String,
    #[serde(flatten, serialize_with = "crate::status::scope")]
    pub scope: Scope,
    /// With a selector: its cgroups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub members: Option<Vec<String>>,
    /// Who keeps it on.
    #[serde(flatten)]
    pub origin: Origin,
    /// Whether it is enforced.
    pub state: State,
    /// It is on the port that leads to the other end: its ingress is what is sent from here.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub far_end: bool,
    /// The name of the limit that it is inside of.
    pub parent: Option<String>,
    /// What it has of that at least.
    pub guarantee_bit_s: Option<u64>,
    /// Its part of what that does not guarantee.
    pub weight: Option<u32>,
    #[serde(flatten)]
    pub settings: Settings,
    /// From the workload.
    pub egress: Option<AppliedDirection>,
    /// To the workload.
    pub ingress: Option<AppliedDirection>,
}

/// One direction of a limit that applies.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct AppliedDirection {
    /// What passed in the sample, as a rate on the wire.
    pub used_bit_s: u64,
    /// As it is.
    #[serde(flatten)]
    pub now: DirectionStatus,
    /// What it did in the sample.
    pub sample: Counts,
    /// The same of packets for which TCP waits for a timer.
    pub sample_at_risk: Option<AtRisk>,
}

impl Applied {
    /// The limited directions with their names.
    pub fn directions(&self) -> impl Iterator<Item = (&'static str, &AppliedDirection)> {
        let egress = self.egress.iter().map(|d| ("egress", d));
        egress.chain(self.ingress.iter().map(|d| ("ingress", d)))
    }
}

/// Why there is no explanation.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// No such process.
    #[error("there is no process {0}; `ps -e` shows those there are")]
    NoProcess(u32),
    /// No address of a flow.
    #[error("`{0}` has no port; write a number up to 65535 after the colon")]
    NoPort(String),
    /// Something else than a port.
    #[error("`{0}` is no port; write a number up to 65535 after the colon")]
    BadPort(String),
    /// No such connection.
    #[error(
        "no TCP connection has {0}, and nothing of it waits in a queue; `ss -tn` shows those there are (in \
         each network namespace its own); of UDP ask for the process or the cgroup"
    )]
    NoFlow(Flow),
    /// The connection's cgroup has gone, and with it its name.
    #[error("the cgroup in which {0} was made has been removed, so its limits are unknown")]
    CgroupGone(Flow),
    /// The cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The limits.
    #[error(transparent)]
    Limits(#[from] LiveError),
    /// The sockets.
    #[error(transparent)]
    Sockets(#[from] NetError),
    /// The limits that stay.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What waits in their queues.
    #[error("cannot look at what waits: {0}")]
    Waiting(#[from] LimitError),
}

/// Which sockets were asked about.
enum Wanted {
    All,
    /// The sockets of a process, which is in this network namespace.
    Inodes(BTreeSet<u64>, Option<u64>),
    Flow(Flow),
}

impl Wanted {
    fn wants(&self, inode: u64, local: SocketAddr, remote: SocketAddr) -> bool {
        match self {
            Wanted::All => true,
            Wanted::Inodes(inodes, _) => inodes.contains(&inode),
            Wanted::Flow(flow) => flow.is(local, remote),
        }
    }

    /// The network namespaces of all that was asked about: what a port that leads there limits is all of it.
    fn namespaces(&self, sockets: &Sockets) -> BTreeSet<u64> {
        let own = match self {
            Wanted::All if sockets.namespaces.len() > 1 => return BTreeSet::new(),
            Wanted::All => return sockets.namespaces.iter().copied().collect(),
            Wanted::Inodes(_, own) => *own,
            Wanted::Flow(_) => None,
        };
        let asked = sockets.list.iter().filter(|socket| socket.asked);
        own.into_iter().chain(asked.map(|socket| socket.namespace)).collect()
    }
}

/// Looks at the subject twice, `options.sample` apart, and says what holds it back.
///
/// # Errors
/// [`ExplainError`].
pub fn explain(
    host: &Host,
    subject: &Subject,
    options: &ExplainOptions,
) -> Result<Explanation, ExplainError> {
    let passing = passing(host, subject)?;
    let (asked, wanted, mut groups) = match find(host, subject) {
        // The sockets of what is behind a port are another kernel's.
        Err(ExplainError::NoFlow(flow)) if !passing.is_empty() => {
            let (places, more_places, sample_ns) = (Vec::new(), 0, 0);
            return Ok(Explanation {
                asked: Asked::Flow { flow },
                sample_ns,
                places,
                more_places,
                passing,
            });
        }
        found => found?,
    };
    let more_places = groups.len().saturating_sub(MAX_PLACES);
    groups.truncate(MAX_PLACES);
    let around = |group: &Cgroup| Around::of(host, group, matches!(wanted, Wanted::All));
    let around: Vec<_> = groups.iter().map(around).collect();
    let ids: BTreeSet<u64> = around.iter().flat_map(Around::ids).collect();
    let read = || {
        let mut limits = live(host, |id| ids.contains(&id))?;
        limits.unread.pop().map_or(Ok(limits.list), Err)
    };

    let start = Instant::now();
    let samplers = groups.into_iter().map(|group| Sampler::start(host.hierarchy(), group));
    let mut samplers = samplers.collect::<Result<Vec<_>, _>>()?;
    let (earlier, earlier_ns) = (read()?, monotonic_ns());
    thread::sleep((start + options.sample).saturating_duration_since(Instant::now()));
    let (now, now_ns) = (read()?, monotonic_ns());
    let sample_ns = now_ns - earlier_ns;
    let limits: Vec<_> = now.iter().map(|limit| applied(limit, &earlier, sample_ns)).collect();

    let mut places = Vec::new();
    for (sampler, around) in samplers.iter_mut().zip(&around) {
        let path = sampler.cgroup().path().to_owned();
        let mut found = sampler.look()?;
        for socket in &mut found.list {
            let here = matches!(wanted, Wanted::All) || socket.cgroup.as_ref() == Some(&path);
            socket.asked = here && wanted.wants(socket.inode, socket.local, socket.remote);
        }
        let ports = [ports_of(&now, &wanted.namespaces(&found)), ports_towards(&now, &found.list)];
        let Sockets { list: mut sockets, whole, namespaces } = found;
        let inside = around.inside(&now, &limits);
        let passed = passed(&passing, &limits);
        let limits = around.pick(&now, &limits, &namespaces, &ports);
        // Stable: among those asked about, and among the others, the fastest stay first.
        sockets.sort_by_key(|socket| !socket.asked);
        // Of a process without TCP all that is known is what its cgroup does.
        let of_cgroup = matches!(wanted, Wanted::All) || !sockets.iter().any(|s| s.asked);
        let verdict = verdict::judge(&limits, &inside, &sockets, of_cgroup);
        let verdict = match &passed {
            Some(passed) => verdict::or_of_queue(verdict, passed),
            None => verdict,
        };
        let sockets_total = sockets.len();
        sockets.truncate(options.sockets);
        sampler.name_holders(&mut sockets);
        places.push(Place {
            cgroup: path,
            limits,
            sockets,
            sockets_total,
            sockets_whole: whole,
            sentence: verdict.to_string(),
            verdict,
        });
    }
    if matches!(wanted, Wanted::Flow(_)) {
        // Of the two ends of a connection the one that is limited matters more.
        places.sort_by_key(|place| Reverse(place.limits.len()));
    }
    Ok(Explanation { asked, sample_ns, places, more_places, passing })
}

/// Where a flow passes limits with a queue.
fn passing(host: &Host, subject: &Subject) -> Result<Vec<Passing>, ExplainError> {
    let Subject::Flow(flow) = subject else { return Ok(Vec::new()) };
    Ok(waiting::passing(&host.store().list(host.hierarchy())?.limits, flow)?)
}

/// The limit with most of what waits of a flow, in the direction that the flow passes.
fn passed(passing: &[Passing], limits: &[Applied]) -> Option<Applied> {
    let most = passing.iter().max_by_key(|passing| passing.queue.bytes)?;
    let mut limit = limits.iter().find(|limit| limit.name == most.limit)?.clone();
    let other = if most.direction == "egress" { &mut limit.ingress } else { &mut limit.egress };
    *other = None;
    Some(limit)
}

/// The names of the limits on ports that lead into one of these network namespaces.
fn ports_of(live: &[Live], namespaces: &BTreeSet<u64>) -> BTreeSet<String> {
    let mut by_place: BTreeMap<u64, BTreeMap<u32, Vec<&str>>> = BTreeMap::new();
    for limit in live.iter().filter(|limit| matches!(limit.status.scope, Scope::Port(_))) {
        let place = limit.place_ids.first().filter(|_| !limit.status.state.is_gone());
        let Some(place) = place else { continue };
        let devices = by_place.entry(*place).or_default();
        devices.entry(limit.ifindex).or_default().push(&limit.status.name);
    }
    let mut found = BTreeSet::new();
    for (place, devices) in by_place {
        let Some(mut netlink) = NetNs::find(place).and_then(|netns| netns.netlink().ok()) else {
            continue;
        };
        let indices = devices.keys().copied().collect();
        for netns in namespaces.iter().filter_map(|inode| NetNs::find(*inode)) {
            let there = netlink.leading_into(&indices, &netns).unwrap_or_default();
            let names = there.iter().filter_map(|index| devices.get(index)).flatten();
            found.extend(names.map(|name| (*name).to_owned()));
        }
    }
    found
}

/// The names of the limits on ports by which all leaves that the sockets asked about send: a guest or a pod
/// behind it has the other end.
fn ports_towards(live: &[Live], sockets: &[SocketSample]) -> BTreeSet<String> {
    let is_port = |limit: &&Live| {
        matches!(limit.status.scope, Scope::Port(_)) && !limit.status.state.is_gone()
    };
    let mut ports: Vec<_> = live.iter().filter(is_port).collect();
    let asked = || sockets.iter().filter(|socket| socket.asked);
    let is_idle = asked().all(|socket| socket.moved_bit_s() == 0);
    let moving = asked().filter(|socket| is_idle || socket.moved_bit_s() > 0);
    let ends = moving.map(|socket| (socket.namespace, socket.local.ip(), socket.remote.ip()));
    let ends: BTreeSet<_> = ends.collect();
    if ends.is_empty() || ends.len() > MAX_ENDS {
        return BTreeSet::new();
    }
    let mut handles = BTreeMap::new();
    for (namespace, local, remote) in ends {
        if ports.is_empty() {
            break;
        }
        let open = || NetNs::find(namespace).and_then(|netns| netns.netlink().ok());
        let netlink = handles.entry(namespace).or_insert_with(open).as_mut();
        let way = netlink.and_then(|netlink| netlink.way_out(local, remote).ok());
        let way = way.unwrap_or_default();
        let octets = match remote {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        ports.retain(|limit| {
            let matched = limit.status.settings.matched();
            let mut prefixes = matched.as_slice().iter();
            limit.place_ids.first() == Some(&namespace)
                && way.contains(&limit.ifindex)
                && (matched.is_empty() || prefixes.any(|prefix| prefix.contains(octets)))
        });
    }
    ports.into_iter().map(|limit| limit.status.name.clone()).collect()
}

/// What is asked about, its sockets, and its cgroups.
fn find(host: &Host, subject: &Subject) -> Result<(Asked, Wanted, Vec<Cgroup>), ExplainError> {
    let hierarchy = host.hierarchy();
    match subject {
        Subject::Cgroup(path) => {
            let group = hierarchy.open(path)?;
            let path = group.path().to_owned();
            Ok((Asked::Cgroup { path }, Wanted::All, vec![group]))
        }
        Subject::Process(pid) => {
            let comm = holders::comm(*pid).ok_or(ExplainError::NoProcess(*pid))?;
            let own = hierarchy.of_process(&pid.to_string())?;
            let inodes = holders::sockets_of(*pid);
            let keep = |socket: &diag::TcpSocket| inodes.contains(&socket.inode);
            let found = diag::tcp_sockets(hierarchy, &own, keep)?;
            let mut groups = made_in(host, &found.sockets);
            groups.retain(|group| group.id() != own.id());
            groups.insert(0, own);
            let namespace = std::fs::metadata(format!("/proc/{pid}/ns/net"));
            let wanted = Wanted::Inodes(inodes, namespace.ok().map(|file| file.ino()));
            Ok((Asked::Process { pid: *pid, comm }, wanted, groups))
        }
        Subject::Flow(flow) => {
            let root = hierarchy.open("")?;
            let keep = |socket: &diag::TcpSocket| flow.is(socket.local, socket.remote);
            let found = diag::tcp_sockets(hierarchy, &root, keep)?;
            if found.sockets.is_empty() {
                return Err(ExplainError::NoFlow(*flow));
            }
            let groups = made_in(host, &found.sockets);
            if groups.is_empty() {
                return Err(ExplainError::CgroupGone(*flow));
            }
            Ok((Asked::Flow { flow: *flow }, Wanted::Flow(*flow), groups))
        }
    }
}

/// The cgroups in which sockets were made, as far as they still exist.
fn made_in(host: &Host, sockets: &[diag::TcpSocket]) -> Vec<Cgroup> {
    let ids: BTreeSet<u64> = sockets.iter().map(|socket| socket.cgroup_id).collect();
    let open = |id: u64| host.hierarchy().open(&host.hierarchy().path_of(id)?).ok();
    ids.into_iter().filter_map(open).collect()
}

/// The cgroups around one.
struct Around {
    /// It and those above it, innermost first: their ids and paths.
    above: Vec<(u64, String)>,
    /// The ids of those below it, where they matter.
    below: BTreeSet<u64>,
}

impl Around {
    fn of(host: &Host, group: &Cgroup, with_below: bool) -> Around {
        let hierarchy = host.hierarchy();
        let open = |path: &str| Some((hierarchy.open(path).ok()?.id(), path.to_owned()));
        let below =
            if with_below { hierarchy.find_below(group.path(), |_| true) } else { Vec::new() };
        let below = below.iter().filter_map(|path| open(path)).map(|(id, _)| id);
        Around {
            above: ancestors(group.path()).filter_map(open).collect(),
            below: below.filter(|id| *id != group.id()).collect(),
        }
    }

    fn ids(&self) -> impl Iterator<Item = u64> {
        self.above.iter().map(|(id, _)| *id).chain(self.below.iter().copied())
    }

    /// The limits on cgroups below this one.
    fn inside(&self, live: &[Live], limits: &[Applied]) -> Vec<Applied> {
        let below = live.iter().zip(limits).filter(|(live, limit)| {
            !limit.scope.is_device() && live.place_ids.iter().any(|id| self.below.contains(id))
        });
        below.map(|(_, limit)| limit.clone()).collect()
    }

    /// The limits that apply here: of cgroups from the inside out, also those that are pinned to one of these
    /// but not enforced; then those of devices in the network namespaces of the processes, of `ports` that
    /// lead there, and of those that lead to the other end.
    fn pick(
        &self,
        live: &[Live],
        limits: &[Applied],
        namespaces: &[u64],
        [near, far]: &[BTreeSet<String>; 2],
    ) -> Vec<Applied> {
        let pairs = || live.iter().zip(limits);
        let parents: Parents<'_> =
            limits.iter().map(|limit| (limit.name.as_str(), limit.parent.as_deref())).collect();
        let mut picked = Vec::new();
        for (id, path) in &self.above {
            let here = pairs().filter(|(live, limit)| match &limit.scope {
                Scope::Cgroup(on) if limit.state.is_gone() => on == path,
                Scope::Cgroup(_) | Scope::Select(_) => live.place_ids.contains(id),
                _ => false,
            });
            let mut here: Vec<_> = here.map(|(_, limit)| limit.clone()).collect();
            here.sort_by_key(|limit| Reverse(lineage(&limit.name, &parents).count()));
            picked.extend(here);
        }
        let device = pairs().filter(|(live, limit)| {
            matches!(limit.scope, Scope::Dev(_))
                && !limit.state.is_gone()
                && live.place_ids.iter().any(|id| namespaces.contains(id))
        });
        picked.extend(device.map(|(_, limit)| limit.clone()));
        let on = |ports: &BTreeSet<String>| {
            limits.iter().filter(|limit| ports.contains(&limit.name)).cloned().collect::<Vec<_>>()
        };
        picked.extend(on(near));
        let far = far.difference(near).cloned().collect();
        picked.extend(on(&far).into_iter().map(|limit| Applied { far_end: true, ..limit }));
        picked
    }
}

fn applied(limit: &Live, earlier: &[Live], sample_ns: u64) -> Applied {
    // Limits with prefixes share maps.
    let same = |other: &&Live| {
        let is_it = other.id == limit.id && other.status.name == limit.status.name;
        is_it && other.id.is_some()
    };
    let then = earlier.iter().find(same).map(|live| &live.status);
    let LimitStatus {
        name,
        scope,
        members,
        state,
        required: _,
        parent,
        guarantee_bit_s,
        weight,
        settings,
        egress,
        ingress,
        lent: _,
        waiting: _,
        why: _,
        outside: _,
        programs_before: _,
        other_build: _,
    } = limit.status.clone();
    let sample = LimitSample::between(then, &limit.status, sample_ns, 0);
    let direction = |now: Option<DirectionStatus>,
                     sample: Option<crate::status::DirectionSample>| {
        let (now, sample) = (now?, sample?);
        Some(AppliedDirection {
            used_bit_s: sample.used_bit_s,
            now,
            sample: sample.counters,
            sample_at_risk: sample.at_risk,
        })
    };
    Applied {
        name,
        scope,
        members,
        origin: limit.origin,
        state,
        far_end: false,
        parent,
        guarantee_bit_s,
        weight,
        settings,
        egress: direction(egress, sample.egress),
        ingress: direction(ingress, sample.ingress),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_a_process_addresses_a_flow_and_all_else_a_cgroup() {
        assert_eq!(Subject::parse("42").unwrap(), Subject::Process(42));
        assert!(matches!(Subject::parse("[::1]:80"), Ok(Subject::Flow(_))));
        for text in ["/42", "system.slice/a.service", "99999999999", "/"] {
            assert_eq!(Subject::parse(text).unwrap(), Subject::Cgroup(text.to_owned()));
        }
        let error = Subject::parse("10.0.0.1:5 10.0.0.2:99999").unwrap_err().to_string();
        assert_eq!(error, "`99999` is no port; write a number up to 65535 after the colon");
    }
}
