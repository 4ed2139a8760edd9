//! Where limits are put in force to be measured, and their programs found: a cgroup, or a device with a
//! store, that nobody else has.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    process,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use libbpf_rs::{
    MapCore, MapHandle, Program,
    query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo},
};
use tidegate_core::Scope;
use tidegate_sys::{
    bpffs::PrivateBpffs,
    cgroup::{Cgroup, CgroupError, Hierarchy},
    limit::{LimitError, LimitOptions},
    net::{NetError, NetNs, Netlink, VethPair},
    store::{PinnedLimit, Store, StoreError, StoreLock},
};

use crate::run_time::{RunTimeError, refused_by_libbpf};

/// How long the kernel may take to let go of an empty cgroup.
const REMOVAL: Duration = Duration::from_secs(10);
const DEVICE: &str = "out";
/// So much of a name the kernel keeps.
const NAME_BYTES: usize = 15;

/// A name that no other scene of this or another process has.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("tidegate-cost-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Why a cost could not be measured. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum CostError {
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Net(#[from] NetError),
    #[error(transparent)]
    Limit(#[from] LimitError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    RunTime(#[from] RunTimeError),
    #[error("cannot make a BPF file system: {0}")]
    Bpffs(#[from] io::Error),
    #[error("the program of the limit is not loaded")]
    NoProgram,
    #[error("the program of the limit has no map `{0}`")]
    NoMap(&'static str),
    #[error("the queue did not keep its state: {passed} packets passed, {dropped} were dropped")]
    State { passed: u64, dropped: u64 },
}

/// A cgroup without processes, which goes when dropped.
pub(crate) struct OwnCgroup {
    pub(crate) hierarchy: Hierarchy,
    pub(crate) group: Cgroup,
}

impl OwnCgroup {
    pub(crate) fn create() -> Result<OwnCgroup, CgroupError> {
        let hierarchy = Hierarchy::find()?;
        let group = hierarchy.create(&hierarchy.open("")?, &unique())?;
        Ok(OwnCgroup { hierarchy, group })
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        let _ = self.group.remove(Instant::now() + REMOVAL);
    }
}

/// A store with limits on one device.
pub(crate) struct DeviceStore {
    pub(crate) hierarchy: Hierarchy,
    root: PathBuf,
    store: Store,
    lock: StoreLock,
}

impl DeviceStore {
    /// Does `work` with a new one, in a network namespace of its own. All of it goes afterwards.
    pub(crate) fn with<T: Send>(
        work: impl FnOnce(&DeviceStore) -> Result<T, CostError> + Send,
    ) -> Result<T, CostError> {
        let directory = tempfile::tempdir()?;
        let bpffs = PrivateBpffs::mount(directory.path())?;
        let netns = NetNs::create(&unique())?;
        netns.run(|| {
            let pair = VethPair { name: DEVICE, peer: "in", peer_netns: None };
            Netlink::open()?.add_veth(&pair)?;
            let root = bpffs.path().join("limits");
            let store = Store::at(&root);
            let lock = store.lock()?;
            work(&DeviceStore { hierarchy: Hierarchy::find()?, root, store, lock })
        })?
    }

    /// Puts a limit on the device.
    pub(crate) fn install(&self, name: &str, options: &LimitOptions) -> Result<(), CostError> {
        let device = Scope::Dev(DEVICE.to_owned());
        Ok(self.store.install(&self.lock, &self.hierarchy, name, &device, options, None)?)
    }

    pub(crate) fn open(&self, name: &str) -> Result<PinnedLimit, CostError> {
        Ok(self.store.open(&self.hierarchy, name)?)
    }

    pub(crate) fn remove(&self, name: &str) -> Result<(), CostError> {
        Ok(self.store.remove(&self.lock, name)?)
    }

    /// The program of this name that runs for a limit, by the pin of a map that it has.
    pub(crate) fn program(
        &self,
        name: &str,
        limit: &str,
        pin: &str,
    ) -> Result<LoadedProgram, CostError> {
        // Limits with prefixes share maps; a link names the directory of these.
        let shared = fs::read_link(self.root.join(limit).join("room"));
        let pin = self.root.join(shared.unwrap_or_else(|_| limit.into())).join(pin);
        let map = MapHandle::from_pinned_path(pin).and_then(|map| map.info());
        let id = map.map_err(refused_by_libbpf("open a map of the limit"))?.info.id;
        LoadedProgram::find(|program| program.name == name && program.map_ids.contains(&id))
    }
}

/// A program of a limit in force.
pub(crate) struct LoadedProgram {
    fd: OwnedFd,
    maps: Vec<u32>,
}

impl LoadedProgram {
    pub(crate) fn find(is_it: impl Fn(&ProgramInfo) -> bool) -> Result<LoadedProgram, CostError> {
        let options = ProgInfoQueryOptions::default().include_map_ids(true);
        let found = ProgInfoIter::with_query_opts(options).find(is_it);
        let found = found.ok_or(CostError::NoProgram)?;
        let fd = Program::fd_from_id(found.id).map_err(refused_by_libbpf("open a program"))?;
        Ok(LoadedProgram { fd, maps: found.map_ids })
    }

    /// Its map of this name.
    pub(crate) fn map(&self, name: &'static str) -> Result<MapHandle, CostError> {
        let mut maps = self.maps.iter().filter_map(|id| MapHandle::from_map_id(*id).ok());
        let kept = &name[..name.len().min(NAME_BYTES)];
        maps.find(|map| map.name() == kept).ok_or(CostError::NoMap(name))
    }
}

impl AsFd for LoadedProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
