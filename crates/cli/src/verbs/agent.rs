//! `tidegate agent`, and the child that asks engines of containers.

use std::{path::Path, process::ExitCode};

use anyhow::Result;
use tidegate_agent::run::{self, AgentOptions};

use crate::{
    args::{AgentArgs, ContainersArgs},
    refusal::say,
};

pub fn run(store: &Path, run_dir: &Path, args: &AgentArgs) -> Result<ExitCode> {
    let options = AgentOptions {
        directory: args.directory.clone(),
        store: store.to_owned(),
        run_dir: run_dir.to_owned(),
        sockets: args.sockets.clone(),
        below: args.below.clone(),
        deadline: args.deadline,
        group: args.group.clone(),
    };
    run::run(&options, |text| say(&format!("tidegate: {text}")))?;
    Ok(ExitCode::SUCCESS)
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
