//! What an experiment is.

use crate::context::Context;
use crate::host::Need;

/// A comparison of systems that leaves a report.
///
/// # Errors
///
/// `run` returns [`Skip`](crate::stop::Skip) for what this machine lacks, and any other error when it could
/// not measure.
/// What it recorded before stays in the report, with a note.
pub trait Experiment {
    /// The name to type; lower case, words joined by hyphens.
    fn name(&self) -> &'static str;

    /// What it measures, in one line.
    fn summary(&self) -> &'static str;

    /// What it cannot do without. Checked before `run`.
    fn needs(&self) -> Vec<Need> {
        Vec::new()
    }

    /// Whether `tidegate-lab demo` shows it.
    fn in_demo(&self) -> bool {
        false
    }

    /// Whether it runs over the links that the user wants.
    fn takes_links(&self) -> bool {
        true
    }

    /// Whether it can measure only these rows and systems; none of either: all.
    ///
    /// # Errors
    ///
    /// What to type instead.
    fn check_choice(&self, only: &[String], systems: &[String]) -> Result<(), String> {
        match only.is_empty() && systems.is_empty() {
            true => Ok(()),
            false => {
                let why = "is run as a whole: leave out --only and --systems";
                Err(format!("{} {why}", self.name()))
            }
        }
    }

    /// How often each system is run in each case, unless the user says.
    fn repeats(&self, quick: bool) -> u32 {
        if quick { 3 } else { 5 }
    }

    /// Measures, and records into the context.
    fn run(&self, context: &mut Context) -> anyhow::Result<()>;
}
