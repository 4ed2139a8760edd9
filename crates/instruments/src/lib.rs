//! Measuring instruments for tests and the lab, and what their networks are made of. The product does not
//! contain them.
//!
//! - [`wire_meter`]: exact rates on a wire.
//! - [`softirq_meter`]: CPU time that the network takes outside of any process.
//! - [`paper`]: NRM as published, to compare with.
//! - [`sharing`]: ways in which limits can share programs.
//! - [`sock`]: what a socket says of itself, and of what it receives.
//! - [`run_time`]: what a loaded program takes by the kernel's statistics.
//! - [`plumbing`]: bridges, routes, settings of devices; [`qdiscs`]: queues that no limit puts on a device.
//! - [`cost`]: what a packet costs in the programs of a limit; [`cost_on_device`]: in many of one device.

pub mod cost;
pub mod cost_on_device;
pub mod paper;
pub mod plumbing;
pub mod qdiscs;
pub mod run_time;
mod scene;
pub mod sharing;
pub mod sock;
pub mod softirq_meter;
pub mod wire_meter;

/// The objects of `bpf/`, as libbpf-cargo turned them into Rust.
mod skel {
    #![allow(
        unused_qualifications,
        clippy::all,
        clippy::undocumented_unsafe_blocks,
        clippy::unwrap_used,
        reason = "generated"
    )]
    include!(concat!(env!("OUT_DIR"), "/skel.rs"));
}
