//! `tidegate completions`, `man` and `schema`: what the tables of flags and settings yield.

use std::{
    io::{Write, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::{args::Cli, refusal::UsageError};

pub fn completions(shell: Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tidegate", &mut script);
    stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

pub fn schema() -> Result<ExitCode> {
    writeln!(stdout().lock(), "{}", serde_json::to_string_pretty(&tidegate_host::spec::schema())?)?;
    Ok(ExitCode::SUCCESS)
}

pub fn man(dir: &Path) -> Result<ExitCode> {
    clap_mangen::generate_to(Cli::command(), dir)
        .map_err(|e| UsageError(format!("{}: {e}; name a directory that exists", dir.display())))?;
    Ok(ExitCode::SUCCESS)
}
