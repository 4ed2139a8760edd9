//! The laboratory: it measures Tidegate beside the tools people use today.

pub mod testbed;
pub mod tools;
