//! Everything in Tidegate that is Linux.
//!
//! Algorithms do not live here: the kernel's copies are pure C headers in `bpf/`, their models in
//! `tidegate-core`. This crate loads the programs, speaks to their maps, and knows cgroups, network
//! namespaces and netlink. It, the software NIC and the instruments are the only crates with `unsafe`.
//!
//! - [`preflight`]: what the host must have, asked before anything is changed.
//! - [`features`]: what the kernel has of what schemes need.
//! - [`survey`]: what a host is and who else is attached to it, for `tidegate doctor`.
//! - [`cgroup`]: the hierarchy and its groups.
//! - [`limit`]: one limit: what it does, its maps, and its programs, attached while a value lives.
//! - [`device`]: programs on devices.
//! - [`schemes`]: the programs of each scheme; [`fq`]: the qdisc that keeps the packets of `edt`.
//! - [`group`]: what a limit does for a group of hosts.
//! - [`gate`]: cgroups as they come and go, and what a new one may send until it is decided.
//! - [`attached`]: limits as the kernel has them, whoever holds them.
//! - [`mounts`]: the host's mounts, as a process that has some of its own reaches them.
//! - [`files`]: files that are written as a whole, or locked.
//! - [`names`]: names of hosts and users in a static binary.
//! - `root_qdisc`: the qdisc at the root of a limited device.
//! - `remains`: what is ours in the kernel, found without a limit's maps.
//! - [`store`]: limits that stay, pinned in the BPF file system; [`bpffs`]: one for tests and the laboratory.
//! - [`process`]: a command started inside a cgroup, and the signals passed on to it.
//! - [`congestion`]: congestion controls for a cgroup, DCTCP among them.
//! - [`net`]: network namespaces, links, qdiscs; [`sched`].
//! - [`backlog`]: where the packets of a limiter wait, for programs that read how much that is; [`waiting`]:
//!   whose they are.
//! - [`xdp`]: a device's frames for AF_XDP sockets.
//! - [`clock`]: the clocks by which programs work.
//! - [`intf`]: what the programs and this crate share.

pub mod attached;
pub mod backlog;
mod bpf;
pub mod bpffs;
pub mod cgroup;
pub mod clock;
pub mod congestion;
pub mod descriptors;
pub mod device;
mod exempt;
pub mod features;
pub mod files;
pub mod fq;
pub mod gate;
pub mod group;
pub mod intf;
mod kernel_types;
pub mod limit;
pub mod links;
pub mod mounts;
pub mod names;
pub mod net;
pub mod preflight;
pub mod process;
mod query;
mod remains;
mod root_qdisc;
pub mod sched;
pub mod schemes;
mod shared;
pub mod store;
pub mod survey;
pub mod waiting;
pub mod xdp;

/// The version, and a number that is another one when the eBPF programs are others.
pub const BUILD: &str = env!("TIDEGATE_BUILD");

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

pub use libbpf_rs;
