//! The laboratory: it measures Tidegate beside the tools people use today, and says what came out.
//!
//! An [`experiment::Experiment`] gets a [`context::Context`], runs the systems it compares one after
//! the other, again and again ([`context::Context::alternate`]), and records tidy rows, claims and
//! figures. The lab turns them into a report ([`report::Report`]): JSON for tools, Markdown and SVG
//! for people. A claim that does not hold is printed as such; the lab tells the truth, it does not
//! gate.
//!
//! ```text
//! cli -> run -> experiments/* -> context -> report -> table, chart -> stats, units
//! ```
//!
//! Imports point to the right only. What touches a network lives apart, and only experiments call it:
//! [`testbed`] builds namespaces, links and peers, [`tools`] drives traffic between them, [`systems`]
//! puts the limits that are compared on them, [`stalls`] notices when the machine stands still. The library
//! exists for this crate's binary and its tests; no other crate imports it.

mod awake;
pub mod chart;
pub mod cli;
pub mod context;
pub mod experiment;
pub mod experiments;
pub mod host;
mod page;
pub mod progress;
pub mod report;
pub mod run;
pub mod stalls;
pub mod stats;
pub mod stop;
pub mod systems;
pub mod table;
pub mod terminal;
pub mod testbed;
pub mod tools;

pub use tidegate_chart::units;
