//! A process that does nothing: it keeps a limit of `tidegate run` in force, while the lab starts
//! its traffic in the same cgroup, until its standard input closes.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

/// What it prints first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staying {
    /// Its process id.
    pub pid: u32,
}

/// Prints [`Staying`] and waits for the end of standard input.
pub fn stay() -> anyhow::Result<()> {
    super::print(&Staying { pid: std::process::id() })?;
    io::stdout().flush()?;
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(())
}
