//! What a node knows and does, as data that serializes: keys in snake case that carry their unit.

use std::{collections::BTreeMap, net::SocketAddr};

use serde::{Deserialize, Serialize};

use tidegate_host::fleet::{FleetSpec, member_id};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeStatus {
    pub node: String,
    pub id: u32,
    pub cluster: String,
    pub pid: u32,
    /// The spec file.
    pub file: String,
    /// Where others reach it.
    pub addr: SocketAddr,
    /// How long it runs.
    pub up_ns: u64,
    /// Another node has its name, and it stands back.
    pub stood_back: bool,
    /// What is not as it should be, a sentence each.
    pub alerts: Vec<String>,
    /// The version of the protocol that it speaks.
    #[serde(default)]
    pub protocol: u8,
    pub peers: Vec<PeerStatus>,
    /// Nodes that speak another version of the protocol, as they say; heard in the last minute.
    #[serde(default)]
    pub other_versions: Vec<VersionStatus>,
    pub groups: Vec<GroupStatus>,
    /// What was sent and heard.
    pub traffic: Traffic,
    /// Datagrams that were dropped, by cause.
    pub dropped: Vec<DropStatus>,
    /// Where peers are found.
    pub sources: Vec<SourceStatus>,
}

impl NodeStatus {
    /// That of a daemon that waits for something before it can begin, and `why`.
    pub fn waits(node: &str, fleet: &FleetSpec, file: &str, why: &str) -> NodeStatus {
        NodeStatus {
            node: node.to_owned(),
            id: member_id(node).0,
            cluster: fleet.name.clone(),
            pid: std::process::id(),
            file: file.to_owned(),
            addr: fleet.listen,
            up_ns: 0,
            stood_back: false,
            alerts: vec![why.to_owned()],
            protocol: super::seal::VERSION,
            peers: Vec::new(),
            other_versions: Vec::new(),
            groups: Vec::new(),
            traffic: Traffic::default(),
            dropped: Vec::new(),
            sources: Vec::new(),
        }
    }
}

/// What was sent and heard, in datagrams and in bytes with the headers of UDP and IP.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    pub sent_datagrams: u64,
    pub sent_bytes: u64,
    /// Heard, whether taken or not.
    pub heard_datagrams: u64,
    /// Heard, whether taken or not.
    pub heard_bytes: u64,
    /// Messages for nodes whose address is not known.
    pub nowhere_messages: u64,
}

/// Datagrams that were dropped.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DropStatus {
    pub cause: String,
    pub datagrams: u64,
}

/// Another node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PeerStatus {
    pub node: String,
    pub id: u32,
    pub addr: SocketAddr,
    /// Whether it answers, by all that is known.
    pub up: bool,
    /// How long ago it was heard; none: never directly.
    pub heard_ago_ns: Option<u64>,
}

/// A node that speaks another version of the protocol.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VersionStatus {
    /// Its name, or its number where that is not known.
    pub node: String,
    pub addr: SocketAddr,
    pub protocol: u8,
    /// What was heard of it.
    pub datagrams: u64,
    /// How long ago that was.
    pub heard_ago_ns: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GroupStatus {
    pub name: String,
    /// How it is divided.
    pub algorithm: String,
    pub direction: String,
    /// The limit of all.
    pub rate_bit_s: u64,
    /// How it stands here: `starting`, `sharing`, `alone`, `stood_back`, `cannot_drop`.
    pub state: String,
    /// What this host may use.
    pub share_bit_s: u64,
    /// What it may use if it hears nobody.
    pub alone_bit_s: u64,
    /// What arrives at its limits here.
    pub demand_bit_s: u64,
    /// With `grd`: the part of packets that is dropped.
    pub drop_probability: Option<f64>,
    /// With `share`: the number of its epoch.
    pub epoch: Option<u64>,
    /// With `share`: who divides.
    pub leader: Option<String>,
    /// With `share`: how long what it holds is good.
    pub lease_ns: Option<u64>,
    /// The settings that its daemon has read, by the names and in the form of a spec file.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    pub limits: Vec<LimitStatus>,
    /// The last reports of other nodes.
    pub members: Vec<MemberStatus>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LimitStatus {
    pub limit: String,
    /// What it is set to; none: it is not there.
    pub rate_bit_s: Option<u64>,
    /// The most that the file lets it have.
    pub ceiling_bit_s: u64,
    /// What arrives.
    pub demand_bit_s: u64,
    /// Flows that take all they get.
    pub flows: f64,
    /// Why it could not be set or read, if so.
    pub error: Option<String>,
}

/// Another node in a group.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemberStatus {
    pub node: String,
    pub share_bit_s: u64,
    /// What arrives there.
    pub demand_bit_s: u64,
    /// How long ago it said so.
    pub age_ns: u64,
    /// It has other settings: this is another group.
    pub differs: bool,
}

/// Where peers are found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SourceStatus {
    pub source: String,
    /// Addresses that it gave.
    pub addresses: usize,
    /// Why it cannot be asked, if so.
    pub error: Option<String>,
}
