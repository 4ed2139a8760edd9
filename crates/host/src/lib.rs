//! From a spec to a plan to the limits of one host.
//!
//! ```text
//! limits.toml --spec--> Spec --host--> Wanted --plan--> Plan --apply--> Backend (the pinned limits)
//!                                      Present --^
//! ```
//!
//! - [`settings`]: what a user may set of a limit, from a file or a command line, checked as a whole.
//! - [`spec`]: the file. Parsing is checking: a [`spec::Spec`] is well-formed.
//! - [`plan`]: what must be done so that the host is as the file says. Pure.
//! - [`select`]: the cgroups of a limit that names what runs in them. Pure.
//! - [`family`]: what limits inside limits must keep to. Pure.
//! - [`apply`]: doing it, all or nothing, against a trait, so that it is tested without a kernel.
//! - [`host`]: that trait on the limits pinned on this host.
//! - [`fleet`]: what the file says of a fleet, for the crate of that name.
//! - [`nic`]: a software NIC between two ports, with the limits of scheme `carousel`.
//! - [`run`]: one command under a limit that lives as long as it does.
//! - [`live`]: every limit that holds now, pinned or of a run; [`watch`]: what they do, look by look.
//! - [`tree`]: limits inside limits, for whoever shows them.
//! - [`sockets`]: the TCP sockets of a cgroup and what each moves.
//! - [`auto`]: the scheme of a limit that names none.
//! - [`explain`]: what holds a process, a cgroup or a flow back, from all of these.
//! - [`doctor`]: what this host can and cannot do, and what to do about it. Pure.
//! - [`pods`]: those of Kubernetes, and their cgroups.
//! - [`figures`]: measured figures in units.
//! - [`waiting`]: whose packets wait in queues.
//! - [`status`]: what is in force and what it does, as data that serializes.
//! - [`summary`]: what a limit did to a command.
//!
//! No kernel interface is spoken to but through `tidegate-sys`, and nothing is printed: that is the
//! business of the binary.

#![forbid(unsafe_code)]

pub mod absent;
pub mod apply;
pub mod auto;
pub mod doctor;
pub mod explain;
pub mod family;
pub mod figures;
pub mod fleet;
pub mod host;
pub mod key;
pub mod live;
pub mod nic;
pub mod plan;
pub mod pods;
pub mod risk;
pub mod run;
pub mod schedule;
pub mod select;
pub mod settings;
pub mod sockets;
pub mod spec;
pub mod status;
pub mod summary;
pub mod tree;
pub mod waiting;
pub mod watch;
pub mod world;
