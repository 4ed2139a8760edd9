//! The experiments, one a file.

use crate::experiment::Experiment;

pub mod program_cost;

/// All experiments, in the order in which `tidegate-lab list` shows them.
pub fn all() -> Vec<Box<dyn Experiment>> {
    vec![Box::new(program_cost::ProgramCost)]
}

#[cfg(test)]
pub(crate) mod example;
