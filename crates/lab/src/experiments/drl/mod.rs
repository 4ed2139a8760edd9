//! One limit over many hosts, beside what Cloud Control published (Raghavan et al., SIGCOMM 2007).
//!
//! ```text
//! scale -----------------------> simulation (hosts with limiters and flows, in virtual time)
//! fig3, fairness, dynamic -----> baseline (who limits what) -> simulation, fleet
//! rtt ---------------------------------------------------> simulation, fleet
//! failures, web, cost --------------------------------------> fleet (flows through sites) -> daemons
//! all -> forwarded (what passed, flow by flow), published
//! ```

use std::time::Duration;

mod baseline;
pub mod cost;
mod daemons;
pub mod dynamic;
pub mod failures;
pub mod fairness;
pub mod fig3;
mod fleet;
mod forwarded;
mod published;
pub mod rtt;
pub mod scale;
mod simulation;
pub mod web;

/// Between routers, and between senders and the receiver, as published.
const RTT: Duration = Duration::from_millis(40);

/// What rows of a simulation and of daemons have in common with each other.
const FIRST: &str = "first_bit_s";
const SECOND: &str = "second_bit_s";
const TOTAL: &str = "total_bit_s";
const JAIN: &str = "jain";
const LEAST: &str = "min_1s_percent";
const MOST: &str = "max_1s_percent";
const OVERHEAD: &str = "gossip_percent";
