//! What lies in the maps of the programs that act on ACKs: bindgen's view of `bpf/acks/acks.h`.

use std::net::{Ipv6Addr, SocketAddr};

use tidegate_core::{dem, flow_count, spring, wait};

#[allow(dead_code, missing_docs, non_camel_case_types, clippy::all, clippy::pedantic)]
mod headers {
    include!(concat!(env!("OUT_DIR"), "/acks.rs"));
}
pub use headers::{
    AC_DEM as DEM, AC_NOW as NOW, AC_SPRING as SPRING, AC_THEN as THEN, Account, DemConf, Edge,
    Flow, FlowCount, Key, Limit, Mark, Marker, RoundTrip, SpringConf, State, Sums, WaitConf,
};

/// Connections that are known at once.
pub const FLOWS_MAX: usize = headers::AC_FLOWS as usize;

impl From<spring::Config> for SpringConf {
    fn from(config: spring::Config) -> Self {
        SpringConf { byte_s: config.byte_s, target_ns: config.target.0 }
    }
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

impl From<wait::Config> for WaitConf {
    fn from(config: wait::Config) -> Self {
        WaitConf { cost: config.cost, burst_ns: config.burst.0, longest_ns: config.longest.0 }
    }
}

impl From<Sums> for flow_count::Sums {
    fn from(Sums { parts, squares, cubes, flows }: Sums) -> flow_count::Sums {
        flow_count::Sums { parts, squares, cubes, flows }
    }
}

impl Key {
    /// The workload's address and port, and the other side's.
    pub fn ends(self) -> (SocketAddr, SocketAddr) {
        let end = |ip: [u32; 4], port| {
            let ip: [u8; 16] = bytemuck::cast(ip);
            SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_be(port))
        };
        (end(self.own, self.own_port), end(self.other, self.other_port))
    }
}
