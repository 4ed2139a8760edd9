//! The command line of `tidegate daemon`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The spec file, with a `[fleet]` table and `[[group]]` tables
    #[arg(required_unless_present = "new_key", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Print a line for the key file, with a new key of this number
    #[arg(long, value_name = "ID", conflicts_with_all = ["file", "stand_down"])]
    #[arg(value_parser = clap::value_parser!(u8).range(1..))]
    pub new_key: Option<u8>,
    /// Lower the limits of groups to this host's reserved share, after a daemon has died
    #[arg(long)]
    pub stand_down: bool,
}
