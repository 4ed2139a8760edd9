//! What lies in the maps of the programs that act on ACKs: `bpf/acks/acks.h`.

use std::net::{Ipv6Addr, SocketAddr};

use bytemuck::{Pod, Zeroable};
use tidegate_core::{dem, flow_count, spring, wait};

/// Connections that are known at once.
pub const FLOWS_MAX: usize = 16_384;
/// `AC_NOW`.
pub const NOW: u32 = 0;
/// `AC_THEN`.
pub const THEN: u32 = 1;
/// `AC_DEM`.
pub const DEM: u32 = 0;
/// `AC_SPRING`.
pub const SPRING: u32 = 1;

/// `struct sp_conf`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct SpringConf {
    /// Rate on the wire in bytes a second.
    pub byte_s: u64,
    /// How much shall wait.
    pub target_ns: u64,
}

impl From<spring::Config> for SpringConf {
    fn from(config: spring::Config) -> Self {
        SpringConf { byte_s: config.byte_s, target_ns: config.target.0 }
    }
}

/// `struct dem_conf`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct DemConf {
    /// K.
    pub threshold_bytes: u64,
    /// `enum dem_law`.
    pub law: u32,
    /// Zero.
    pub pad: u32,
}

impl From<dem::Config> for DemConf {
    fn from(config: dem::Config) -> Self {
        let law = match config.law {
            dem::Law::Step => 0,
            dem::Law::Pi => 1,
        };
        DemConf { threshold_bytes: config.threshold_bytes, law, pad: 0 }
    }
}

/// `struct wt_conf`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct WaitConf {
    /// Cost of a byte in 2^-24 ns.
    pub cost: u64,
    /// What the queue saves up.
    pub burst_ns: u64,
    /// The time of the longest packet.
    pub longest_ns: u64,
}

impl From<wait::Config> for WaitConf {
    fn from(config: wait::Config) -> Self {
        WaitConf { cost: config.cost, burst_ns: config.burst.0, longest_ns: config.longest.0 }
    }
}

/// `struct wt_account`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Account {
    /// When all that came will be paid.
    pub finish_ns: u64,
    /// The part of a nanosecond that is still to be charged.
    pub carry: u32,
    /// Zero.
    pub pad: u32,
    /// What a byte adds to the debt; 0: nothing is known.
    pub cost: u64,
}

/// `struct ac_limit`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Limit {
    /// The windows.
    pub spring: SpringConf,
    /// The marks.
    pub dem: DemConf,
    /// How long packets wait.
    pub wait: WaitConf,
    /// Until when it is good, by `CLOCK_BOOTTIME`; 0: for ever.
    pub until_ns: u64,
    /// Of [`THEN`]: the largest debt; 0: HTB has the rate.
    pub most_ns: u64,
    /// [`DEM`] or [`SPRING`].
    pub scheme: u32,
    /// Zero.
    pub pad: u32,
}

/// `struct dem_marker`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Marker {
    /// When the probability was last set.
    pub updated_ns: u64,
    /// In 2^-24.
    pub probability: u64,
    /// The queue then.
    pub before_bytes: u64,
}

/// `struct ac_state`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct State {
    /// Every byte that came to the queue.
    pub in_bytes: u64,
    /// What waits.
    pub account: Account,
    /// Zero.
    pub unused: [u64; 4],
    /// Smoothed, as a time at the limit's rate.
    pub backlog_ns: u64,
    /// Of each flow, of the limit in 2^-24.
    pub share: u64,
    /// When this epoch began.
    pub epoch_start_ns: u64,
    /// How long it must last.
    pub epoch_ns: u64,
    /// What had come then.
    pub epoch_in_bytes: u64,
    /// What waited then.
    pub epoch_backlog_bytes: u64,
    /// The longest round trip of this epoch.
    pub longest_ns: u64,
    /// Of the one before.
    pub longest_before_ns: u64,
    /// Number of this epoch.
    pub epoch: u32,
    /// Flows in it so far.
    pub flows: u32,
    /// Flows in the one before.
    pub flows_before: u32,
    /// 1 while a CPU changes what is kept of the epoch.
    pub entered: u32,
    /// Of `dem`.
    pub marker: Marker,
    /// How many flows take all they get.
    pub flow_count: FlowCount,
}

/// `struct fc_count`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowCount {
    /// When this period began.
    pub start_ns: u64,
    /// How long it lasts.
    pub period_ns: u64,
    /// Of this period.
    pub sums: Sums,
    /// Of the one before.
    pub before: Sums,
    /// Of this period.
    pub number: u32,
    /// Zero.
    pub pad: u32,
}

/// `struct fc_sums`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Sums {
    /// Of the flows' parts.
    pub parts: u64,
    /// Of their squares.
    pub squares: u64,
    /// Of their cubes.
    pub cubes: u64,
    /// How many were counted.
    pub flows: u64,
}

impl From<Sums> for flow_count::Sums {
    fn from(Sums { parts, squares, cubes, flows }: Sums) -> flow_count::Sums {
        flow_count::Sums { parts, squares, cubes, flows }
    }
}

/// `struct fc_mark`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Mark {
    /// When the flow was last counted.
    pub at_ns: u64,
    /// What was acknowledged to it then.
    pub acked: u32,
    /// One more than the number of the period; 0: never.
    pub number: u32,
}

/// `struct ac_flow`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Flow {
    /// The round trip behind the queue.
    pub rtt: RoundTrip,
    /// Its windows.
    pub edge: Edge,
    /// When it was counted.
    pub mark: Mark,
    /// `enum ac_flow_flags`.
    pub flags: u32,
    /// How far the workload has sent.
    pub sent: u32,
    /// What it last acknowledged.
    pub own_ack: u32,
    /// What was acknowledged to it.
    pub acked: u32,
    /// The part of a mark that is due.
    pub due: u32,
    /// A constant of its own.
    pub hash: u32,
    /// The last epoch that it was seen in.
    pub epoch: u32,
    /// Payload of a full segment.
    pub mss: u16,
    /// In the handshake under way.
    pub syn_mss: u16,
    /// Of the other side's windows.
    pub scale: u16,
    /// In the handshake under way.
    pub syn_scale: u16,
    /// How far the other side has sent.
    pub other_sent: u32,
}

/// `struct sp_rtt`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct RoundTrip {
    /// When what is waited for came; 0: nothing is.
    pub sent_ns: u64,
    /// What it had to wait.
    pub wait_ns: u64,
    /// The least.
    pub least_ns: u64,
    /// The least of this window.
    pub recent_ns: u64,
    /// When this window began.
    pub since_ns: u64,
    /// What a byte cost then.
    pub cost: u64,
    /// What is waited for.
    pub probe: u32,
    /// Zero.
    pub pad: u32,
}

/// `struct sp_edge`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Edge {
    /// The furthest that was said.
    pub edge: u32,
    /// The number of the last ACK.
    pub ack: u32,
    /// The window that it came with.
    pub raw: u16,
    /// That it went on with.
    pub said: u16,
    /// There was one.
    pub known: u32,
}

/// `struct tcp_key`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Key {
    /// The workload's address, as on the wire; IPv4 as mapped into IPv6.
    pub own: [u8; 16],
    /// The other side's.
    pub other: [u8; 16],
    /// The workload's port, as on the wire.
    pub own_port: [u8; 2],
    /// The other side's.
    pub other_port: [u8; 2],
}

impl Key {
    /// The workload's address and port, and the other side's.
    #[must_use]
    pub fn ends(self) -> (SocketAddr, SocketAddr) {
        let end = |ip: [u8; 16], port| {
            SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_be_bytes(port))
        };
        (end(self.own, self.own_port), end(self.other, self.other_port))
    }
}
