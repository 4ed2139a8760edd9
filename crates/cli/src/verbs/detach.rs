//! `tidegate detach`: all limits off, the host as it was.

use std::{
    io::{Write, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use tidegate_core::class::MAX_DEPTH;
use tidegate_node::{apply::Gates, host::Host, nic::state::RunDir, run::sweep};
use tidegate_sys::{congestion, store::StoreError};

use crate::args::DetachArgs;

pub fn run(store: &Path, run_dir: &Path, args: &DetachArgs) -> Result<ExitCode> {
    let host = Host::open(store)?;
    let (names, orphans) = (host.store().names()?, host.store().orphans());
    let mut out = stdout().lock();
    for nic in RunDir::at(run_dir).running() {
        let name = nic["name"].as_str().unwrap_or_default();
        writeln!(out, "nic `{name}` runs (process {0}); `kill {0}` ends it", nic["pid"])?;
    }
    if names.is_empty() {
        writeln!(out, "No limits in {}; nothing to take off.", store.display())?;
    }
    if args.dry_run {
        names.iter().try_for_each(|name| writeln!(out, "would take off limit `{name}`"))?;
        orphans.iter().try_for_each(|orphan| writeln!(out, "would remove from {orphan}"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let _ = sweep(host.hierarchy());
    if congestion::remove_leftover()? {
        writeln!(out, "congestion control `tg_dctcp`, which a killed `run` had left, is removed")?;
    }
    if names.is_empty() && orphans.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let mut host = host.lock()?;
    let mut first_error = None;
    let mut names = host.host().store().names()?;
    // Children come before their parents: in each round one more level of every tree is the lowest.
    for _ in 0..MAX_DEPTH {
        let mut parents = Vec::new();
        for name in names {
            match host.remove(&name) {
                Ok(()) => writeln!(out, "limit `{name}` is off")?,
                Err(StoreError::HasChildren { .. }) => parents.push(name),
                // One that does not come off must not keep the others on.
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        names = parents;
    }
    for orphan in host.remove_orphans() {
        writeln!(out, "removed what a process that died had left on {orphan}")?;
    }
    host.close();
    first_error.map_or(Ok(ExitCode::SUCCESS), |e| Err(e.into()))
}
