//! The verbs, one a file.

pub mod burst;
pub mod daemon;
pub mod detach;
pub mod explain;
pub mod generate;
pub mod limit;
pub mod monitor;
pub mod nic;
pub mod run;
pub mod spec;
pub mod status;
pub mod top;
