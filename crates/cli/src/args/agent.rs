//! The command line of `tidegate agent`.

use std::path::PathBuf;

use clap::Args;
use tidegate_agent::engines::SOCKETS;

#[derive(Debug, Args)]
pub struct AgentArgs {
    /// The directory of the spec files; all `*.toml` in it
    #[arg(default_value = "/etc/tidegate", value_name = "DIR")]
    pub directory: PathBuf,
    /// Where Docker and Podman are asked for containers; `*` is a user's number
    #[arg(long = "engine", value_name = "SOCKET", default_values = SOCKETS)]
    pub sockets: Vec<PathBuf>,
}

/// For the agent itself: asks one engine.
#[derive(Debug, Args)]
pub struct ContainersArgs {
    pub socket: PathBuf,
    /// The user to become
    pub uid: u32,
    /// The group to become
    pub gid: u32,
}
