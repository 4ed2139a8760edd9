//! `tidegate agent`, and its children that ask engines of containers and the API server of Kubernetes.

use std::{path::Path, process::ExitCode};

use anyhow::Result;
use tidegate_agent::{
    cluster::{self, ClusterOptions},
    run::{self, AgentOptions},
};

use crate::{
    args::{AgentArgs, ContainersArgs, PodsArgs},
    refusal::{UsageError, say},
};

pub fn run(store: &Path, run_dir: &Path, args: &AgentArgs) -> Result<ExitCode> {
    let options = AgentOptions {
        directory: args.directory.clone(),
        store: store.to_owned(),
        run_dir: run_dir.to_owned(),
        sockets: args.sockets.clone(),
        cluster: cluster_of(args)?,
        below: args.below.clone(),
        deadline: args.deadline,
        group: args.group.clone(),
    };
    run::run(&options, |text| say(&format!("tidegate: {text}")))?;
    Ok(ExitCode::SUCCESS)
}

/// The node whose pods are followed, if they are.
fn cluster_of(args: &AgentArgs) -> Result<Option<ClusterOptions>> {
    if !args.kubernetes {
        return Ok(None);
    }
    let node = args.node.clone().unwrap_or_else(cluster::host_name);
    if !cluster::is_node(&node) {
        let text =
            format!("`{node}` is no name of a node; write it as `kubectl get nodes` shows it");
        return Err(UsageError(text).into());
    }
    Ok(Some(ClusterOptions { node, kubeconfig: args.kubeconfig.clone() }))
}

#[cfg(feature = "containers")]
pub fn containers(args: &ContainersArgs) -> Result<ExitCode> {
    use tidegate_agent::{containers, rights::Identity};

    containers::run(&args.socket, Identity { uid: args.uid, gid: args.gid })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(not(feature = "containers"))]
pub fn containers(_: &ContainersArgs) -> Result<ExitCode> {
    anyhow::bail!(
        "this build cannot ask engines of containers; build it with the feature `containers`"
    )
}

#[cfg(feature = "kubernetes")]
pub fn pods(args: &PodsArgs) -> Result<ExitCode> {
    use tidegate_agent::{kubernetes, rights::Identity};

    let who = Identity { uid: args.uid, gid: args.gid };
    kubernetes::run(&args.node, args.kubeconfig.as_deref(), who)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(not(feature = "kubernetes"))]
pub fn pods(_: &PodsArgs) -> Result<ExitCode> {
    anyhow::bail!("this build cannot ask Kubernetes; build it with the feature `kubernetes`")
}
