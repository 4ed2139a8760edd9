//! What a spec file says of the fleet: `[fleet]` for the node, a `[[group]]` for each shared limit.

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, str::FromStr};

use tidegate_core::{
    Direction, Nanos, Rate,
    fleet::{
        MemberId,
        aggregate::VECTOR_MAX,
        message::ACCEPTORS_MAX,
        share::{Acceptor, MEMBERS_MAX, OptionsError, Share, ShareOptions, TIME_MAX},
    },
    fnv,
};
use tidegate_sys::store::is_name;

pub mod url;

use url::{Url, UrlError};

/// The port of the gossip, and the one that an address without a port means.
pub const PORT: u16 = 7946;
/// What must survive a restart.
pub const STATE_DIR: &str = "/var/lib/tidegate";
/// The socket that `tidegate status` asks.
pub const API_SOCKET: &str = "/run/tidegate/daemon.sock";
/// The most groups of a host.
pub const GROUPS_MAX: usize = 64;
/// The most static peers.
pub const PEERS_MAX: usize = 256;
/// No limit's fixed part of a group's rate is smaller, and no limit is ever given less: the least rate that
/// every scheme takes.
pub const LEAST_BIT_S: u64 = tidegate_core::units::MIN_RATE_BIT_S;
/// No interval is shorter.
pub const INTERVAL_LEAST: Nanos = Nanos(20_000_000);
/// How wrong the rate of a host's clock may be. NTP corrects by 500 millionths at most.
pub const CLOCK_ERROR_PPM: u32 = 1_000;

/// `[fleet]`: this node, and how it finds and trusts the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetSpec {
    /// The cluster: nodes of others are not heard.
    pub name: String,
    /// This node; none: the host's name.
    pub node: Option<String>,
    /// Where it listens, UDP.
    pub listen: SocketAddr,
    /// Where others reach it; none: what its route to them says.
    pub advertise: Option<SocketAddr>,
    /// Addresses or names of others, with a port or [`PORT`].
    pub peers: Vec<String>,
    /// A name whose addresses are nodes.
    pub dns: Option<String>,
    /// A Redis that nodes enter themselves in.
    pub redis: Option<Url>,
    /// An etcd that nodes enter themselves in.
    pub etcd: Option<Url>,
    /// For registries over TLS.
    pub tls: TlsFiles,
    pub keys: PathBuf,
    /// The nodes that keep the epochs of `share`.
    pub acceptors: Vec<String>,
    /// What must survive a restart.
    pub state: PathBuf,
    /// The socket that `tidegate status` asks.
    pub api: PathBuf,
    /// Its line in the file, from 1.
    pub line: usize,
}

/// Files in PEM for registries over TLS. They are read each time one is asked, so that they may be renewed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of who may sign that of the other side; none: those that the host trusts.
    pub ca: Option<PathBuf>,
    /// The certificate that this node shows, and its private key: both or none.
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

/// How the members of a group come to their rates; see [`tidegate_core::fleet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// One limiter has it all.
    Ctb,
    /// The limit less what the others report.
    Gtb,
    /// One drop probability for all.
    Grd,
    /// Parts as large as the parts of the flows.
    Fps,
    /// Capacity that moves and is conserved.
    Share,
}

/// The algorithms whose hosts gossip along a tree.
pub const GOSSIP: &[Algorithm] = &[Algorithm::Fps, Algorithm::Grd, Algorithm::Gtb];

impl Algorithm {
    /// All, with their names in a spec file.
    pub const ALL: [(Algorithm, &'static str); 5] = [
        (Algorithm::Share, "share"),
        (Algorithm::Fps, "fps"),
        (Algorithm::Grd, "grd"),
        (Algorithm::Gtb, "gtb"),
        (Algorithm::Ctb, "ctb"),
    ];

    /// As in a spec file.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(one, _)| *one == self).map_or("", |(_, name)| name)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = FleetError;

    fn from_str(text: &str) -> Result<Algorithm, FleetError> {
        let found = Self::ALL.iter().find(|(_, name)| *name == text);
        found.map(|(one, _)| *one).ok_or_else(|| FleetError::Algorithm(text.to_owned()))
    }
}

/// `[[group]]`: one rate for limits on many hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// Its name, the same on all hosts.
    pub name: String,
    /// What all together may use.
    pub rate: Rate,
    /// How it is divided.
    pub algorithm: Algorithm,
    /// Limits of this host, by name; may be none at an acceptor.
    pub members: Vec<String>,
    pub direction: Direction,
    /// How often they measure and tell.
    pub interval: Nanos,
    /// How many others a host tells in each interval; `share` asks its leader.
    pub branching: usize,
    /// The greatest number of hosts that there may be.
    pub hosts: u32,
    /// With `share`: the part of the rate, in per cent, that is divided for ever.
    pub reserve_percent: u8,
    /// With `share`: how long what was learnt holds.
    pub lease: Nanos,
    /// With `share`: who is silent for so long is taken for dead.
    pub suspect: Nanos,
    /// With `ctb`: the node that has the limiter.
    pub center: Option<String>,
    /// Its line in the file, from 1.
    pub line: usize,
}

/// Why a fleet or group cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    #[error("unknown algorithm `{0}`; use one of share, fps, grd, gtb, ctb")]
    Algorithm(String),
    #[error("`{0}` is no direction; write `egress` or `ingress`")]
    Direction(String),
    /// A name that cannot be a node's, cluster's or group's.
    #[error(
        "`{0}` must be 1 to 63 letters, digits, `-`, `_` or `.`, and start with a letter or digit"
    )]
    Name(String),
    #[error("`{0}` is no address with a port; write for example `10.0.0.1:{PORT}`")]
    Address(String),
    #[error(
        "no node can be reached at `{0}`; write an address of this host, for example `10.0.0.1:{PORT}`"
    )]
    Unspecified(SocketAddr),
    #[error(
        "`{0}` is no peer; write an address or a name, for example `10.0.0.1` or `web-1:{PORT}`"
    )]
    Peer(String),
    #[error("{0} {1}; there may be {2} at most")]
    TooMany(usize, &'static str, usize),
    /// A registry's address that is none, or asks for what is not spoken. It may hold a password, and is not
    /// shown.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// A file for TLS that nothing uses.
    #[error("is for a registry over TLS; write its address as `rediss://...` or `https://...`")]
    NoTls,
    #[error("a group needs a `[fleet]` table; write one with name and keys")]
    NoFleet,
    #[error("a group of this name is on line {0} already; give each its own name")]
    SameName(usize),
    #[error("there is no limit `{0}` in this file that stays on the host")]
    NoLimit(String),
    #[error(
        "limit `{limit}` has no {direction}; write one: the cap on this host, whatever the group's rate"
    )]
    NoDirection { limit: String, direction: &'static str },
    #[error(
        "limit `{limit}` is in group `{group}` already; a direction of a limit is in one group"
    )]
    Taken { limit: String, group: String },
    #[error(
        "no members; name limits of this file (only nodes that are acceptors of `share` may do without)"
    )]
    NoMembers,
    /// `share` without acceptors.
    #[error(
        "algorithm `share` needs acceptors: write in `[fleet]` for example acceptors = [\"web-1\", \
         \"web-2\", \"web-3\"], the same on all hosts, best an odd number"
    )]
    NoAcceptors,
    #[error("name 1 to {ACCEPTORS_MAX} different acceptors")]
    Acceptors,
    #[error("nodes `{0}` and `{1}` have the same number by their names; rename one")]
    SameNumber(String, String),
    /// `ctb` without a center.
    #[error(
        "algorithm `ctb` has its one limiter on one node; write for example center = \"web-1\""
    )]
    NoCenter,
    #[error("is for algorithm {} only", names(.0))]
    NotForThis(&'static [Algorithm]),
    #[error("{0} hosts; write 1 to {1}{2}")]
    Hosts(i64, u32, &'static str),
    #[error("{0} peers an interval; write 1 to 16")]
    Branching(i64),
    #[error(
        "`{0}` is no part of the rate; write a whole percentage, for example `10%`, 1% to 100%"
    )]
    Reserve(String),
    #[error(
        "each of {hosts} hosts would have {bit_s} bit/s for {} when it hears nobody, and below \
         {LEAST_BIT_S} nothing can start: raise the rate{}, or lower hosts{}",
        if *limits > 1 { "each of its limits" } else { "itself" },
        if *reserve { " or the reserve" } else { "" },
        if *limits > 1 { ", or name fewer members" } else { "" }
    )]
    Least {
        hosts: u32,
        /// Limits of this host in the group, at least 1.
        limits: u64,
        /// What each limit of a host would have.
        bit_s: u64,
        /// Whether that is a part of the reserve.
        reserve: bool,
    },
    #[error("the interval is {0}; write {INTERVAL_LEAST} to 1 min, for example 250ms")]
    Interval(Nanos),
    #[error(transparent)]
    Options(#[from] OptionsError),
}

/// Algorithms in quotes, as in a sentence.
fn names(algorithms: &[Algorithm]) -> String {
    let names: Vec<_> = algorithms.iter().map(|one| format!("`{one}`")).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => names.concat(),
    }
}

/// A node's number: the same wherever its name is known.
pub fn member_id(node: &str) -> MemberId {
    MemberId(number(&[node]))
}

/// FNV-1a over texts that cannot run into each other, folded to 32 bits.
pub fn number(texts: &[&str]) -> u32 {
    let hash = fnv(texts.iter().flat_map(|text| text.bytes().chain([0])));
    (hash ^ (hash >> 32)) as u32
}

/// Whether a text can be the name of a node, cluster or group. Host names can.
///
/// # Errors
/// [`FleetError::Name`].
pub fn check_name(name: &str) -> Result<(), FleetError> {
    if is_name(name, 63, "-_.") { Ok(()) } else { Err(FleetError::Name(name.to_owned())) }
}

impl FleetSpec {
    /// Who keeps, one vote each.
    pub fn acceptor_list(&self) -> Vec<Acceptor> {
        self.acceptors.iter().map(|name| Acceptor { id: member_id(name), votes: 1 }).collect()
    }

    /// Checks the acceptors, which all groups have in common.
    ///
    /// # Errors
    /// [`FleetError`].
    pub fn check_acceptors(&self) -> Result<(), FleetError> {
        self.acceptors.iter().try_for_each(|name| check_name(name))?;
        if self.acceptors.len() > ACCEPTORS_MAX {
            return Err(FleetError::Acceptors);
        }
        for (i, one) in self.acceptors.iter().enumerate() {
            for other in &self.acceptors[..i] {
                if one == other {
                    return Err(FleetError::Acceptors);
                }
                if member_id(one) == member_id(other) {
                    return Err(FleetError::SameNumber(other.clone(), one.clone()));
                }
            }
        }
        Ok(())
    }
}

impl GroupSpec {
    /// A group without members, all else by default.
    pub fn new(name: String, rate: Rate, algorithm: Algorithm) -> GroupSpec {
        GroupSpec {
            name,
            rate,
            algorithm,
            members: Vec::new(),
            direction: Direction::Egress,
            interval: Nanos(250_000_000),
            branching: 3,
            hosts: 16,
            reserve_percent: 10,
            lease: Nanos(3_000_000_000),
            suspect: Nanos(3_000_000_000),
            center: None,
            line: 0,
        }
    }

    /// The group's number on the wire: another rate, algorithm or division is another group, whose messages
    /// are no news to this one.
    pub fn number(&self, fleet: &FleetSpec) -> u32 {
        let GroupSpec { name, rate, hosts, reserve_percent, lease, suspect, .. } = self;
        let mut texts = vec![name.clone(), rate.bit_s().to_string(), self.algorithm.to_string()];
        if self.algorithm == Algorithm::Share {
            let numbers = [u64::from(*hosts), u64::from(*reserve_percent), lease.0, suspect.0];
            texts.extend(numbers.map(|number| number.to_string()));
            texts.extend(fleet.acceptors.iter().cloned());
        }
        number(&texts.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The number of all that must be the same at all members: the one on the wire, and with `fps`, `gtb` and
    /// `grd` also how many hosts there may be and the interval. Members that differ in these two hear each
    /// other all the same, or each side would take the whole rate.
    pub fn settings_number(&self, fleet: &FleetSpec) -> u32 {
        let wire = self.number(fleet);
        match self.algorithm {
            Algorithm::Share | Algorithm::Ctb => wire,
            Algorithm::Fps | Algorithm::Gtb | Algorithm::Grd => {
                let texts = [u64::from(wire), u64::from(self.hosts), self.interval.0];
                let texts = texts.map(|number| number.to_string());
                number(&texts.each_ref().map(String::as_str))
            }
        }
    }

    /// All its settings as a spec file would have them, with the defaults.
    pub fn settings(&self, fleet: &FleetSpec) -> BTreeMap<String, String> {
        let of_all = [
            ("rate", self.rate.to_string()),
            ("algorithm", self.algorithm.to_string()),
            ("members", self.members.join(", ")),
            ("direction", self.direction.name().to_owned()),
            ("interval", self.interval.to_string()),
            ("hosts", self.hosts.to_string()),
        ];
        let of_share = [
            ("reserve", format!("{}%", self.reserve_percent)),
            ("lease", self.lease.to_string()),
            ("suspect", self.suspect.to_string()),
            ("acceptors", fleet.acceptors.join(", ")),
        ];
        let of_share = of_share.into_iter().filter(|_| self.algorithm == Algorithm::Share);
        let branching = GOSSIP.contains(&self.algorithm);
        let branching = branching.then(|| ("branching", self.branching.to_string()));
        let center = self.center.iter().map(|center| ("center", center.clone()));
        let all = of_all.into_iter().chain(of_share).chain(branching).chain(center);
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// What a host may use that hears of nobody, in bit/s: parts that never add up to more than the rate.
    pub fn alone_bit_s(&self) -> u64 {
        let hosts = u64::from(self.hosts.max(1));
        match self.algorithm {
            Algorithm::Ctb => self.rate.bit_s(),
            Algorithm::Share => {
                let reserve =
                    u128::from(self.rate.bit_s()) * u128::from(self.reserve_percent) / 100;
                (reserve / u128::from(hosts)) as u64
            }
            Algorithm::Gtb | Algorithm::Grd | Algorithm::Fps => self.rate.bit_s() / hosts,
        }
    }

    /// What `share` is run with; the same at all members but for `node` and `incarnation`.
    pub fn share_options(&self, fleet: &FleetSpec, node: &str, incarnation: u64) -> ShareOptions {
        ShareOptions {
            group: self.number(fleet),
            id: member_id(node),
            incarnation,
            limit: self.rate,
            reserve_per_mille: u16::from(self.reserve_percent) * 10,
            members_max: self.hosts,
            acceptors: fleet.acceptor_list(),
            interval: self.interval,
            lease: self.lease,
            suspect: self.suspect,
            rate_error_ppm: CLOCK_ERROR_PPM,
        }
    }

    /// Checks a group with its fleet; the field to blame and why.
    ///
    /// # Errors
    /// [`FleetError`] with the name of the field.
    pub fn check(&self, fleet: &FleetSpec) -> Result<(), (&'static str, FleetError)> {
        let (most, why) = match self.algorithm {
            Algorithm::Share => (MEMBERS_MAX, ""),
            _ => (VECTOR_MAX as u32, "; beyond, use algorithm `share`"),
        };
        if self.hosts == 0 || self.hosts > most {
            return Err(("hosts", FleetError::Hosts(self.hosts.into(), most, why)));
        }
        if !(INTERVAL_LEAST.0..=60_000_000_000).contains(&self.interval.0) {
            return Err(("interval", FleetError::Interval(self.interval)));
        }
        let limits = self.members.len().max(1) as u64;
        if self.alone_bit_s() / limits < LEAST_BIT_S {
            let reserve = self.algorithm == Algorithm::Share;
            let (hosts, bit_s) = (self.hosts, self.alone_bit_s() / limits);
            return Err(("rate", FleetError::Least { hosts, limits, bit_s, reserve }));
        }
        match self.algorithm {
            Algorithm::Ctb if self.center.is_none() => Err(("center", FleetError::NoCenter)),
            Algorithm::Share if fleet.acceptors.is_empty() => {
                Err(("algorithm", FleetError::NoAcceptors))
            }
            Algorithm::Share => {
                let options = self.share_options(fleet, &fleet.acceptors[0], 1);
                let least = self.interval.0.saturating_mul(2);
                let field = |e: &OptionsError| match e {
                    OptionsError::Times if self.lease.0.max(self.suspect.0) < least => "interval",
                    OptionsError::Times if (least..=TIME_MAX.0).contains(&self.lease.0) => {
                        "suspect"
                    }
                    OptionsError::Times => "lease",
                    _ => "algorithm",
                };
                Share::new(Nanos(0), options, None)
                    .map(drop)
                    .map_err(|e| (field(&e), FleetError::Options(e)))
            }
            _ if self.members.is_empty() => Err(("members", FleetError::NoMembers)),
            _ => Ok(()),
        }
    }
}
