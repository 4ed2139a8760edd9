//! The agent: keeps the limits of a host as the files of a directory say, while services, users, containers
//! and programs come and go.
//!
//! ```text
//! files ─┐
//! cgroups, programs, users ─ scan ─┼─► agent (state machine) ─► goal ─► apply ─► the store
//! engines, API server (children) ──┘                                └─► report (for `tidegate status`)
//! ```
//!
//! [`agent`] and [`goal`] are pure: events and the time are arguments. [`run`] is the loop around them.

#![forbid(unsafe_code)]

pub mod agent;
pub mod apply;
pub mod child;
pub mod cluster;
#[cfg(feature = "containers")]
pub mod containers;
pub mod decisions;
pub mod directory;
pub mod engines;
pub mod goal;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod missed;
pub mod persist;
mod quantity;
pub mod report;
pub mod rights;
pub mod run;
pub mod scan;
pub mod source;
pub mod status;
pub mod users;
