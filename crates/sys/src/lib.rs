//! placeholder
pub mod net;
pub mod sched;
