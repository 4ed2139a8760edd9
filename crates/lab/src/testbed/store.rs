//! Limits of Tidegate that stay until they are taken off, made by the commands that a user would type.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tempfile::TempDir;
use tidegate_core::Direction;
use tidegate_sys::{
    bpffs::PrivateBpffs,
    net::{NetNs, SpawnInto, prepare},
};

use super::{Child, Finished, command};

/// How long `tidegate` may take.
const VERB: Duration = Duration::from_secs(60);
/// What says where the limits are kept.
const STORE: &str = "TIDEGATE_BPFFS";

/// A BPF file system for one store. Dropping it unmounts it, and what is still pinned in it goes.
#[derive(Debug)]
pub struct Place {
    // Unmounted before its directory is removed.
    bpffs: PrivateBpffs,
    _dir: TempDir,
}

impl Place {
    /// Mounts it below the directory for temporary files. Needs root.
    pub fn new() -> anyhow::Result<Self> {
        let dir = TempDir::with_prefix("tidegate-lab-")?;
        let bpffs = PrivateBpffs::mount(dir.path()).with_context(|| {
            format!("cannot mount a BPF file system on {}", dir.path().display())
        })?;
        Ok(Self { bpffs, _dir: dir })
    }

    /// What `TIDEGATE_BPFFS` is to name.
    pub fn store(&self) -> PathBuf {
        self.bpffs.path().join("store")
    }
}

/// A store of limits that no other lab has, for one host. Dropping it takes all its limits off.
#[derive(Debug)]
pub struct Store<'a> {
    tidegate: PathBuf,
    host: &'a NetNs,
    used: bool,
    place: Place,
}

impl<'a> Store<'a> {
    /// An empty store; `tidegate` is the binary. It comes into being with its first limit. Needs root.
    pub fn new(tidegate: &Path, host: &'a NetNs) -> anyhow::Result<Self> {
        let place = Place::new()?;
        Ok(Self { tidegate: tidegate.to_owned(), host, used: false, place })
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
        tidegate.args(words).env(STORE, self.place.store());
        Child::spawn(tidegate)?.finish_any(VERB)
    }

    /// Packets that a limit has dropped in one direction, whatever the cause. One that is yet to be segmented
    /// counts once.
    pub fn drops(&self, limit: &str, direction: Direction) -> anyhow::Result<u64> {
        let mut show = command(self.host, &self.tidegate)?;
        show.args(["limit", "show", limit, "--json"]).env(STORE, self.place.store());
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
            eprintln!("warning: {} stays: {error:#}", self.place.store().display());
        }
    }

    fn try_detach(&self) -> anyhow::Result<()> {
        let mut detach = Command::new(&self.tidegate);
        detach.arg("detach").env(STORE, self.place.store());
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
