//! One limit over many hosts: from local demand and the reports of peers to the limit of each host.
//!
//! Nothing here sends a packet, reads a clock or draws a random number. Controllers take measurements and
//! give a rate or a drop probability. Aggregates and [`share`] are state machines that take and give messages
//! ([`message`]), which a transport seals and carries.
//!
//! From Cloud Control (Raghavan et al., SIGCOMM 2007):
//! - [`ctb`]: a central bucket, the reference for all others.
//! - [`gtb`]: a bucket at each limiter, less what the others report.
//! - [`grd`]: one drop probability for all.
//! - [`fps`]: a part of the limit for each, as large as its part of the flows.
//!
//! Their inputs:
//! - [`average`]: rates, averaged by elapsed time.
//! - [`flows`]: a sample of flows of constant size.
//! - [`aggregate`]: sums over the fleet: push-sum, a versioned vector.
//!
//! New:
//! - [`share`]: capacity that moves between members and is conserved, so that the local limits never add up
//!   to more than the limit, whatever is lost, delayed, duplicated, cut or dead.
//! - [`level`]: the target of each member: weighted max-min.

pub mod aggregate;
pub mod average;
pub mod ctb;
pub mod flows;
pub mod fps;
pub mod grd;
pub mod gtb;
pub mod level;
pub mod message;
pub mod share;

/// A member of a fleet: one number for each host, for ever.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u32);
