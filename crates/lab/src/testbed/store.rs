//! Limits of Tidegate that stay until they are taken off, made by the commands that a user would type.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tidegate_core::Direction;
use tidegate_sys::net::{NetNs, SpawnInto, prepare};

use super::{Child, Finished, command, unique_name};

/// How long `tidegate` may take.
const VERB: Duration = Duration::from_secs(60);
/// What says where the limits are kept.
const STORE: &str = "TIDEGATE_BPFFS";

/// A store of limits that no other lab has, for one host. Dropping it takes all its limits off.
#[derive(Debug)]
pub struct Store<'a> {
    path: PathBuf,
    tidegate: PathBuf,
    host: &'a NetNs,
    used: bool,
}

impl<'a> Store<'a> {
    /// An empty store; `tidegate` is the binary. It comes into being with its first limit.
    pub fn new(tidegate: &Path, host: &'a NetNs) -> Self {
        let path = PathBuf::from("/sys/fs/bpf").join(unique_name("store"));
        Self { path, tidegate: tidegate.to_owned(), host, used: false }
    }

    /// Runs `tidegate` with these words on the host. Errors if it does not end well.
    pub fn tidegate<S: AsRef<OsStr>>(
        &mut self,
        words: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<()> {
        let (status, said) = self.try_tidegate(words)?;
        ensure!(status.success(), "tidegate ended with {status}: {}", said.stderr.trim());
        Ok(())
    }

    /// The same, whatever its exit code, which is returned with what it wrote.
    pub fn try_tidegate<S: AsRef<OsStr>>(
        &mut self,
        words: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<(ExitStatus, Finished)> {
        self.used = true;
        let mut tidegate = command(self.host, &self.tidegate)?;
        tidegate.args(words).env(STORE, &self.path);
        Child::spawn(tidegate)?.finish_any(VERB)
    }

    /// Packets that a limit has dropped in one direction, whatever the cause. One that is yet to be segmented
    /// counts once.
    pub fn drops(&self, limit: &str, direction: Direction) -> anyhow::Result<u64> {
        let mut show = command(self.host, &self.tidegate)?;
        show.args(["limit", "show", limit, "--json"]).env(STORE, &self.path);
        let shown: Value = Child::spawn(show)?.finish(VERB)?.json()?;
        let direction = match direction {
            Direction::Egress => "egress",
            Direction::Ingress => "ingress",
        };
        let counters = shown[direction].as_object().with_context(|| format!("no {direction}"))?;
        let is_drop = |key: &str| key.starts_with("drop_") && key.ends_with("_packets");
        let drops = counters.iter().filter(|(key, _)| is_drop(key));
        Ok(drops.filter_map(|(_, count)| count.as_u64()).sum())
    }

    /// Takes its limits off; not even an interrupt keeps it from that. What cannot be done is said on
    /// standard error.
    pub fn detach(&mut self) {
        if !std::mem::take(&mut self.used) {
            return;
        }
        if let Err(error) = self.try_detach() {
            eprintln!("warning: {} stays: {error:#}", self.path.display());
        }
    }

    fn try_detach(&self) -> anyhow::Result<()> {
        let mut detach = Command::new(&self.tidegate);
        detach.arg("detach").env(STORE, &self.path);
        // It must not end with this thread: what it does not take off stays.
        let into = SpawnInto { netns: Some(self.host), ..SpawnInto::default() };
        prepare(&mut detach, into)?;
        let mut detach = Child::spawn(detach)?;
        let status = detach.wind_up(VERB)?.context("tidegate detach did not end")?;
        ensure!(status.success(), "tidegate detach: {}", detach.output().stderr.trim());
        Ok(())
    }
}

impl Drop for Store<'_> {
    fn drop(&mut self) {
        self.detach();
    }
}
