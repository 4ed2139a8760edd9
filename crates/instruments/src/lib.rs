//! Measuring instruments for tests and the lab. The product does not contain them.
//!
//! - [`wire_meter`]: exact rates on a wire.
//! - [`softirq_meter`]: CPU time that the network takes outside of any process.
//! - [`paper`]: NRM as published, to compare with.
//! - [`sharing`]: ways in which limits can share programs.
//!
//! The cost of a loaded program is measured by `tidegate_sys::cost`, which loads programs that are private to
//! that crate.

pub mod paper;
pub mod sharing;
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
