//! The daemon: groups of limits that share one rate over many hosts.
//!
//! ```text
//!   [fleet] [[group]] ───spec───► Node ◄── datagrams, discovered addresses, time
//!                                  │ ▲
//!            rates, drops, promises▼ │samples
//!                          GroupBackend, Storage
//! ```
//!
//! What needs no operating system, and is driven in virtual time by tests:
//!
//! - [`rates`]: the rates of limits whose group decides them, as a plan sees them.
//! - [`keys`]: the keys that datagrams are sealed with.
//! - [`seal`]: a datagram's form; [`session`]: whose datagrams are taken, and that none is taken twice.
//! - [`frame`]: what is in a datagram.
//! - [`membership`]: who is there, by SWIM.
//! - [`backend`]: what a group reads and sets in a limit of this host.
//! - [`group`]: from what it measured to its rate.
//! - [`node`]: all of it, as one state machine. It sends nothing and reads no clock.
//!
//! What does:
//!
//! - [`storage`]: what must survive a restart, in files.
//! - [`local`]: that on the limits pinned on this host.
//! - [`discovery`]: addresses of peers, from DNS and registries.
//! - [`api`]: status on a Unix socket; [`http`]: the server and client beneath; [`daemon`]: the loop that
//!   has the sockets and the clock.
//!
//! [`status`] and [`event`] are what people see of it. What a spec file says of the fleet is in
//! [`tidegate_host::fleet`].
//!
//! The algorithms are those of [`tidegate_core::fleet`]; `docs/fleet-design.md` says why they are right.

#![forbid(unsafe_code)]

pub mod api;
pub mod backend;
pub mod daemon;
pub mod discovery;
pub mod event;
pub mod frame;
mod gauge;
pub mod group;
pub mod http;
pub mod keys;
pub mod local;
pub mod membership;
pub mod node;
pub mod rates;
pub mod seal;
pub mod session;
pub mod status;
pub mod storage;
