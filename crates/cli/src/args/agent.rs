//! The command line of `tidegate agent`.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use tidegate_agent::{decisions::DEADLINE, engines::SOCKETS};
use tidegate_host::run::socket::GROUP;

#[derive(Debug, Args)]
pub struct AgentArgs {
    /// The directory of the spec files; all `*.toml` in it
    #[arg(default_value = "/etc/tidegate", value_name = "DIR")]
    pub directory: PathBuf,
    /// Sockets of Docker and Podman; `*` stands for a user id
    #[arg(long = "engine", value_name = "SOCKET", default_values = SOCKETS)]
    pub sockets: Vec<PathBuf>,
    /// Follow the pods of this node of Kubernetes
    #[arg(long)]
    pub kubernetes: bool,
    /// The node whose pods are followed [default: the host's name]
    #[arg(long, value_name = "NAME", env = "NODE_NAME", hide_env_values = true)]
    pub node: Option<String>,
    /// How to reach the API server [default: the pod's service account, or what KUBECONFIG names]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Keep to the cgroups below this one
    #[arg(long, value_name = "CGROUP", default_value = "/")]
    pub below: PathBuf,
    /// How long a new cgroup may pass only 64 KiB while the agent has not decided its limits
    #[arg(long, value_name = "TIME", default_value = DEADLINE, value_parser = super::interval)]
    pub deadline: Duration,
    /// Members of this group may use `tidegate run`
    #[arg(long, value_name = "NAME", default_value = GROUP)]
    pub group: String,
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

/// For the agent itself: asks the API server of Kubernetes.
#[derive(Debug, Args)]
pub struct PodsArgs {
    pub node: String,
    /// The user to become
    pub uid: u32,
    /// The group to become
    pub gid: u32,
    pub kubeconfig: Option<PathBuf>,
}
