//! `tidegate-lab`: see [`tidegate_lab`] for what it is.

use clap::{Parser, Subcommand};
use tidegate_lab::tools::Tool;

/// Measures Tidegate beside the tools people use today, and writes reports.
#[derive(Debug, Parser)]
#[command(name = "tidegate-lab", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run one traffic tool; it prints one JSON object
    #[command(hide = true, subcommand)]
    Tool(Tool),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Verb::Tool(tool) => tool.run(),
    }
}
