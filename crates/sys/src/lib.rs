//! placeholder
pub mod net;
pub mod sched;
pub mod wire_meter;
