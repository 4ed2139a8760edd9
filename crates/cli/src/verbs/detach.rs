//! `tidegate detach`: all limits off, the host as it was.

use std::{io::Write, path::Path, process::ExitCode};

use anyhow::Result;
use tidegate_agent::{
    report::RunFiles,
    run::{give_back_from, moved_for},
    status::AgentStatus,
};
use tidegate_core::class::MAX_DEPTH;
use tidegate_host::{apply::Backend, nic::state::RunDir, run::sweep};
use tidegate_sys::{congestion, store::StoreError};

use crate::{args::DetachArgs, output, refusal::say, verbs};

pub fn run(store: &Path, run_dir: &Path, args: &DetachArgs) -> Result<ExitCode> {
    let host = verbs::open(store)?;
    let (names, orphans) = (host.store().names()?, host.store().orphans());
    let waiting = host.store().waiting();
    // Limits whose cgroups nobody can tell come off, too.
    let present = host.present().unwrap_or_default();
    let mut out = output::stdout();
    for nic in RunDir::at(run_dir).running() {
        let name = nic["name"].as_str().unwrap_or_default();
        writeln!(out, "nic `{name}` runs (process {0}); `kill {0}` ends it", nic["pid"])?;
    }
    if names.is_empty() && waiting.is_empty() {
        writeln!(out, "No limits in {}; nothing to remove.", store.display())?;
    }
    for device in host.store().perhaps_orphans() {
        say(&format!(
            "tidegate: note: {device} is no limit's of this store, and may be another store's that this \
             container does not see; if it is left over, `tidegate detach` on the host removes it"
        ));
    }
    if args.dry_run {
        names.iter().try_for_each(|name| writeln!(out, "would remove limit `{name}`"))?;
        orphans.iter().try_for_each(|orphan| writeln!(out, "would remove from {orphan}"))?;
        present.iter().flat_map(moved_for).try_for_each(|path| {
            writeln!(out, "would move the processes of {path} to the cgroup above")
        })?;
        waiting.iter().try_for_each(|waits| {
            writeln!(out, "would forget that limit `{}` waits", waits.name)
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let _ = sweep(host.hierarchy());
    if congestion::remove_leftover()? {
        writeln!(out, "congestion control `tg_dctcp`, which a killed `run` had left, is removed")?;
    }
    let agent = RunFiles::at(run_dir);
    let store_path = host.store().path();
    if let Some(keeper) = AgentStatus::running(run_dir, &store_path)
        && !keeper.report.limits.is_empty()
    {
        say(&format!(
            "tidegate: note: the agent (process {}) attaches limits of {} again; stop it first: \
             systemctl stop tidegate-agent",
            keeper.report.pid, keeper.report.directory
        ));
    }
    if names.is_empty() && orphans.is_empty() && waiting.is_empty() {
        agent.forget(&store_path);
        return Ok(ExitCode::SUCCESS);
    }
    let mut host = host.lock()?;
    let (mut first_error, mut off) = (None, Vec::new());
    let mut names = host.host().store().names()?;
    host.leaving(names.iter().cloned().collect());
    // Children come before their parents: in each round one more level of every tree is the lowest.
    for _ in 0..MAX_DEPTH {
        let mut parents = Vec::new();
        for name in names {
            if let Some(stopped) = host.stopped() {
                let left = host.host().store().names()?.len();
                verbs::close(host);
                writeln!(out, "{left} limits are still on")?;
                return Err(stopped.into());
            }
            match host.remove(&name) {
                Ok(()) => {
                    writeln!(out, "limit `{name}` is off")?;
                    off.push(name);
                }
                Err(StoreError::HasChildren { .. }) => parents.push(name),
                // One that does not come off must not keep the others on.
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        names = parents;
    }
    let hierarchy = host.host().hierarchy();
    let off = present.iter().filter(|limit| off.contains(&limit.name));
    for path in off.flat_map(moved_for).filter(|path| give_back_from(hierarchy, path)) {
        writeln!(out, "the processes of {path} are in the cgroup above again")?;
    }
    for orphan in host.remove_orphans() {
        writeln!(out, "removed what a process that died had left on {orphan}")?;
    }
    for waits in waiting {
        if host.forget_waiting(&waits.name)? {
            writeln!(out, "limit `{}` does not wait any more", waits.name)?;
        }
    }
    if first_error.is_none() {
        agent.forget(&store_path);
    }
    verbs::close(host);
    first_error.map_or(Ok(ExitCode::SUCCESS), |e| Err(e.into()))
}
