//! `tidegate web`: a page, metrics for Prometheus and an hour of history of the limits of a host. Two
//! processes:
//!
//! ```text
//! kernel, store ── reader (root) ══ sockets ══ server (no rights) ─ Unix socket, port ── browser, Prometheus
//!                  reads when asked            asks every second
//! ```
//!
//! [`reader`] may read limits and answers two questions, [`link::Request`]. It listens to nobody else.
//! [`server`] talks to whoever connects, and may do nothing else. Neither can make the agent or the daemon
//! wait. What the server makes of a reading needs no operating system: [`snapshot`], [`history`],
//! [`metrics`], [`routes`].

#![forbid(unsafe_code)]

pub mod history;
pub mod link;
pub mod metrics;
pub mod reader;
pub mod routes;
pub mod server;
pub mod snapshot;

/// The socket of the server, in the directory of what runs.
pub const SOCKET: &str = "web.sock";
