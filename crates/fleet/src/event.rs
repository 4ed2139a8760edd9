//! What an operator wants to know, each in one line.

use std::{fmt, net::SocketAddr};

use tidegate_core::{Rate, fleet::aggregate::VECTOR_MAX};
use tidegate_host::fleet::Algorithm;

use super::{
    group::State,
    seal::{CAUSES, Cause},
};

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A node is there.
    Up(String, SocketAddr),
    /// It does not answer, or has left.
    Down(String, SocketAddr),
    /// Another node has this one's name, and started later: this one stands back.
    StoodBack(String, SocketAddr),
    /// Another node has this one's name, and started earlier.
    SameName(String, SocketAddr),
    /// Two lives of another node run.
    TwoLives {
        node: String,
        /// Where the one is that is heard.
        later: SocketAddr,
        /// Where the other is.
        earlier: SocketAddr,
    },
    /// A node speaks another version of the protocol.
    Version {
        /// The node, as far as it is known.
        node: String,
        from: SocketAddr,
        theirs: u8,
        ours: u8,
    },
    /// Another node has another name of the same number.
    SameNumber(String, String, SocketAddr),
    /// A node has other settings for a group.
    Differs {
        group: String,
        node: String,
        /// Its limit and algorithm.
        theirs: (u64, Algorithm),
        ours: (u64, Algorithm),
    },
    /// It has the same settings again.
    Agrees { group: String, node: String },
    /// A group stands otherwise than before.
    State {
        group: String,
        state: State,
        /// What the host may use, in bit/s.
        part_bit_s: u64,
    },
    /// A group keeps so many bit/s free for nodes that it does not hear.
    KeptFree { group: String, bit_s: u64, nodes: Vec<String> },
    /// So many reports of hosts beyond those that a group can know were refused.
    Full { group: String, reports: u64 },
    /// Limits of a group cannot be set or read.
    Limits { group: String, errors: Vec<String> },
    /// Limits of a group can be set again.
    LimitsGood(String),
    /// Storing failed: this node promises nothing.
    Storage(String),
    /// Storing works again.
    StorageGood,
    /// Datagrams are dropped.
    Dropping { cause: Cause, from: SocketAddr, count: u64 },
    /// A registry, or a name of DNS, cannot be asked.
    Registry {
        which: String,
        why: String,
        /// In so many seconds it is asked again.
        again_s: u64,
    },
    /// It can be asked again.
    RegistryGood(String),
    /// The spec was read again; what changed.
    Reloaded(Vec<String>),
    /// The spec was read again and is not taken.
    NotReloaded(String),
    /// Something that is of one host, such as a socket.
    Warning(String),
}

impl Event {
    pub fn is_warning(&self) -> bool {
        match self {
            Event::State { state, .. } => !matches!(state, State::Sharing | State::Starting),
            Event::Up(..)
            | Event::Agrees { .. }
            | Event::LimitsGood(_)
            | Event::StorageGood
            | Event::RegistryGood(_)
            | Event::Reloaded(_) => false,
            _ => true,
        }
    }
}

fn rate(bit_s: u64) -> String {
    Rate::from_bit_s(bit_s).map_or_else(|| "nothing".to_owned(), |rate| rate.to_string())
}

pub fn meaning(cause: Cause) -> &'static str {
    CAUSES.iter().find(|(one, ..)| *one == cause).map_or("", |(_, _, meaning)| meaning)
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Up(node, addr) => write!(f, "node `{node}` at {addr} answers"),
            Event::Down(node, addr) => {
                write!(f, "node `{node}` at {addr} does not answer any more")
            }
            Event::StoodBack(name, addr) => write!(
                f,
                "the node at {addr} is also called `{name}` and started later; this one stands back, its \
                 groups have their reserved shares. Give each node its own name ([fleet] node) and restart \
                 this one"
            ),
            Event::SameName(name, addr) => write!(
                f,
                "the node at {addr} is also called `{name}` and started earlier; it stands back for this \
                 one. Give each node its own name ([fleet] node)"
            ),
            Event::TwoLives { node, later, earlier } => write!(
                f,
                "two machines run node `{node}`, at {later} and at {earlier}: one is a copy of the other, or \
                 both have one name; the one that started earlier stands back. Give each node its own name \
                 ([fleet] node) and remove the copied state directory"
            ),
            Event::Version { node, from, theirs, ours } => write!(
                f,
                "node `{node}` at {from} speaks version {theirs} of the fleet's protocol and this one \
                 version {ours}: they cannot share limits. Run one release of tidegate on all nodes"
            ),
            Event::SameNumber(own, other, addr) => write!(
                f,
                "nodes `{own}` (this one) and `{other}` at {addr} have the same number by their names; \
                 rename one ([fleet] node)"
            ),
            Event::Differs { group, node, theirs, ours }
                if theirs == ours
                    && matches!(ours.1, Algorithm::Fps | Algorithm::Gtb | Algorithm::Grd) =>
            {
                write!(
                    f,
                    "node `{node}` has another `interval` or other `hosts` for group `{group}`: their \
                     parts may add up to more than its rate when hosts do not hear each other: apply one \
                     file on all hosts"
                )
            }
            Event::Differs { group, node, theirs, ours } => write!(
                f,
                "node `{node}` has other settings for group `{group}`: {} by {}, here {} by {}{}; what \
                 differs is another group, and each side has its own part only: apply one file on all hosts",
                rate(theirs.0),
                theirs.1,
                rate(ours.0),
                ours.1,
                if theirs == ours { ", but other hosts, reserve, times or acceptors" } else { "" }
            ),
            Event::Agrees { group, node } => {
                write!(f, "node `{node}` has the same settings for group `{group}` again")
            }
            Event::State { group, state, part_bit_s } => {
                let part = rate(*part_bit_s);
                let how = match state {
                    State::Starting => "starts",
                    State::Sharing => "shares",
                    State::Alone => "hears nobody and falls back to this host's reserved share",
                    State::StoodBack => "stands back for another node of this name",
                    State::CannotDrop => {
                        "has limits that cannot drop at random, which grd asks for; use scheme `police` for \
                         them, or another algorithm"
                    }
                };
                write!(f, "group `{group}` {how}: {part} for this host")
            }
            Event::KeptFree { group, bit_s, nodes } => write!(
                f,
                "group `{group}` keeps {} free for `{}`, which it does not hear: limits there may still use \
                 it. If a host is gone for good, give the group another name in the files of all hosts",
                rate(*bit_s),
                nodes.join("`, `")
            ),
            Event::Full { group, reports } => write!(
                f,
                "group `{group}` knows {VECTOR_MAX} hosts, the most of its algorithm, and has refused \
                 {reports} reports of others: what these use does not count here. Use algorithm `share` \
                 for so many hosts. If hosts are gone for good, give the group another name in the files of \
                 all hosts"
            ),
            Event::Limits { group, errors } => {
                write!(f, "group `{group}`: {}", errors.join("; "))
            }
            Event::LimitsGood(group) => write!(f, "group `{group}`: its limits can be set again"),
            Event::Storage(why) => write!(
                f,
                "{why}; until it can be written this node promises nothing, and others decide without it"
            ),
            Event::StorageGood => f.write_str("the state can be written again"),
            Event::Dropping { cause, from, count } => write!(
                f,
                "{count} datagram{} dropped, the last from {from}: {}",
                if *count == 1 { "" } else { "s" },
                meaning(*cause)
            ),
            Event::Registry { which, why, again_s } => write!(
                f,
                "{which}: {why}; known nodes stay known; it is asked again in {again_s} s"
            ),
            Event::RegistryGood(which) => write!(f, "{which}: can be asked again"),
            Event::Reloaded(changes) if changes.is_empty() => {
                f.write_str("the spec was read again: nothing changed")
            }
            Event::Reloaded(changes) => {
                write!(f, "the spec was read again: {}", changes.join(", "))
            }
            Event::NotReloaded(why) => {
                write!(f, "the new spec is refused, the old one stays in force: {why}")
            }
            Event::Warning(text) => f.write_str(text),
        }
    }
}
