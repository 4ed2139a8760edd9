//! placeholder
pub mod congestion;
