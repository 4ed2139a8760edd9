//! The experiments, one a file.

use crate::experiment::Experiment;

/// All experiments, in the order in which `tidegate-lab list` shows them.
pub fn all() -> Vec<Box<dyn Experiment>> {
    Vec::new()
}

#[cfg(test)]
pub(crate) mod example;
