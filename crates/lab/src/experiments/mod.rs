//! The experiments, one a file.

use crate::experiment::Experiment;

mod bed;
mod mix;
mod nrm_egress;
mod published;
mod wire;

pub use nrm_egress::NrmEgress;

/// All experiments, in the order in which `tidegate-lab list` shows them.
pub fn all() -> Vec<Box<dyn Experiment>> {
    vec![Box::new(NrmEgress::default())]
}

#[cfg(test)]
pub(crate) mod example;
