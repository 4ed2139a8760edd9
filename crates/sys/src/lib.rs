//! placeholder
pub mod congestion;
pub mod paper;
