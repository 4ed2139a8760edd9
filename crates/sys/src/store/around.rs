//! What is around the limits of a store: programs of others that meet packets first, and what processes that
//! died have left on devices.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use serde::Serialize;
use tidegate_core::Direction;

use super::{PinnedLimit, Store, StoreLock, unreadable::programs_in};
use crate::{
    device, intf,
    query::{self, Side},
    remains::{self, Hooked, OnDevice},
};

/// The inode of the PID namespace of a host (`PROC_PID_INIT_INO`): whoever is in it sees all processes.
const FIRST_PID_NAMESPACE: u64 = 0xefff_fffc;

/// A program of somebody else that meets the packets of a limit on a device before that does. One that does
/// not pass them on keeps them from the limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Before {
    /// The kernel's id of it.
    pub id: u32,
    /// Its name; empty if it has none.
    pub name: String,
    /// The direction of the workload: `egress` or `ingress`.
    pub direction: &'static str,
}

impl PinnedLimit {
    /// The programs of others that run before it on its device; none on a cgroup, where no program keeps
    /// packets from another one, and none if the device is gone.
    #[must_use]
    pub fn programs_before(&self) -> Vec<Before> {
        if self.limit.ifindex == 0 || self.scope.is_none() {
            return Vec::new();
        }
        let ours = programs_in(&self.hooks);
        let is_port = self.limit.flags & intf::FLAG_PORT != 0;
        let mut found = Vec::new();
        for direction in Direction::BOTH {
            if self.limit.rate(direction).is_none() {
                continue;
            }
            let side = Side::of(direction, is_port);
            let before = device::programs_before(self.limit.ifindex, side, &ours);
            found.extend(before.into_iter().map(|id| Before {
                id,
                name: query::program_name(id).unwrap_or_default(),
                direction: direction.name(),
            }));
        }
        found
    }
}

impl Store {
    /// What processes that died have left on devices of this network namespace, a phrase for each device.
    #[must_use]
    pub fn orphans(&self) -> Vec<String> {
        left().orphans.iter().map(ToString::to_string).collect()
    }

    /// The same of what may just as well be a limit of a store that is not to be seen from this container.
    #[must_use]
    pub fn perhaps_orphans(&self) -> Vec<String> {
        left().perhaps.iter().map(ToString::to_string).collect()
    }

    /// Takes it off; says what. A clsact stays: it does nothing, and may be somebody else's.
    #[must_use]
    pub fn remove_orphans(&self, _lock: &StoreLock) -> Vec<String> {
        let removed = left().orphans.into_iter().filter(|device| device.remove(false).is_ok());
        removed.map(|device| device.to_string()).collect()
    }

    /// Whether a device of this network namespace has a qdisc of ours or ifb device that is neither this
    /// store's nor left by a process that died.
    pub(super) fn has_qdisc_of_others(&self, ifindex: u32) -> bool {
        let own = programs_in(&self.root);
        let is_it = |device: &OnDevice| {
            let has_qdisc = device.qdisc.is_some() || device.ifb.is_some();
            let is_own = device.hooked.iter().any(|hooked| own.contains(&hooked.program));
            device.ifindex == ifindex && has_qdisc && !is_own
        };
        let there = remains::on_devices().unwrap_or_default().iter().any(is_it);
        there && !left().orphans.iter().any(|device| device.ifindex == ifindex)
    }
}

/// Qdiscs, filters and ifb devices of ours of which no store that is to be seen knows.
#[derive(Default)]
struct Left {
    /// No living store has them.
    orphans: Vec<OnDevice>,
    /// One that cannot be seen from here may have them.
    perhaps: Vec<OnDevice>,
}

fn left() -> Left {
    let mut devices = remains::on_devices().unwrap_or_default();
    if devices.is_empty() {
        return Left::default();
    }
    let known: BTreeSet<u32> = bpf_mounts().iter().flat_map(|mount| programs_in(mount)).collect();
    // What a process that lives holds has a link.
    let is_held = |h: &Hooked| h.is_link() || known.contains(&h.program);
    devices.retain(|device| !device.hooked.iter().any(is_held));
    match shares_network() {
        true => Left { perhaps: devices, ..Left::default() },
        false => Left { orphans: devices, ..Left::default() },
    }
}

/// Whether processes that cannot be seen here may be in this network namespace: it is the one in which a
/// container began, which may be its host's or that of other containers.
fn shares_network() -> bool {
    let is_host = fs::metadata("/proc/self/ns/pid").is_ok_and(|m| m.ino() == FIRST_PID_NAMESPACE);
    let network = |path| fs::metadata(path).map(|m| m.ino()).ok();
    let first = network(PathBuf::from("/proc/1/ns/net"));
    !is_host && (first.is_none() || network("/proc/thread-self/ns/net".into()) == first)
}

/// The BPF file systems that any process here sees.
fn bpf_mounts() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.map(|entry| entry.path());
    for process in [PathBuf::from("/proc/self")].into_iter().chain(processes) {
        // Those of one mount namespace see the same, but for another root.
        let of = |link: &str| fs::read_link(process.join(link)).ok();
        let Some(mounts) = of("ns/mnt") else { continue };
        if !seen.insert((mounts, of("root"))) {
            continue;
        }
        let is_self = process == Path::new("/proc/self");
        let mountinfo = fs::read_to_string(process.join("mountinfo")).unwrap_or_default();
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let mount = left.split(' ').nth(4).filter(|_| right.starts_with("bpf "));
            let Some(mount) = mount.map(Path::new) else { continue };
            found.insert(match is_self {
                true => mount.to_owned(),
                false => process.join("root").join(mount.strip_prefix("/").unwrap_or(mount)),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use libbpf_rs::libbpf_sys;
    use tidegate_core::{Scheme, Scope, queue_options::VirtualQueueOptions};

    use super::*;
    use crate::{
        bpffs::PrivateBpffs, cgroup::Hierarchy, device::Target, limit::LimitOptions, net::NetNs,
    };

    /// Somebody's program, which has every packet accepted and ends the chain.
    fn foreign_program() -> OwnedFd {
        let insn = |code, imm| libbpf_sys::bpf_insn { code, imm, ..Default::default() };
        // r0 = TC_ACT_OK; exit
        let program = [insn(0xb7, 0), insn(0x95, 0)];
        // SAFETY: name and licence end with a zero, and there are as many instructions as is said; all
        // outlive the call.
        let fd = unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
                c"accept_all".as_ptr(),
                c"GPL".as_ptr(),
                program.as_ptr(),
                program.len() as _,
                std::ptr::null_mut(),
            )
        };
        assert!(fd >= 0, "{fd}");
        // SAFETY: a new descriptor that nobody else owns.
        unsafe { OwnedFd::from_raw_fd(fd) }
    }

    /// Puts it before all others on a side; false where the kernel has no tcx.
    fn put_first(program: &OwnedFd, ifindex: u32, hook: libbpf_sys::bpf_attach_type) -> bool {
        let options = libbpf_sys::bpf_prog_attach_opts {
            sz: size_of::<libbpf_sys::bpf_prog_attach_opts>() as _,
            flags: libbpf_sys::BPF_F_BEFORE,
            ..Default::default()
        };
        // SAFETY: the descriptor is open, and the options outlive the call.
        let ret = unsafe {
            libbpf_sys::bpf_prog_attach_opts(
                program.as_raw_fd(),
                ifindex as i32,
                hook,
                &raw const options,
            )
        };
        ret == 0
    }

    #[test]
    fn root_a_program_that_runs_before_a_limit_is_found() {
        const TEST: &str = "root_a_program_that_runs_before_a_limit_is_found";
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP {TEST}: needs root");
            return;
        }
        let netns = NetNs::create(&format!("tidegate-around-{}", std::process::id())).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
        let check = || {
            let (store, hierarchy) =
                (Store::at(bpffs.path().join("t")), Hierarchy::find().unwrap());
            let scope = Scope::Dev("lo".to_owned());
            let target = Target::find(&scope).unwrap();
            let rate = VirtualQueueOptions::new("1gbit".parse().unwrap());
            let options = |scheme| LimitOptions {
                egress: Some(rate),
                ingress: Some(rate),
                scheme,
                ..LimitOptions::default()
            };
            let before = || store.open(&hierarchy, "a").unwrap().programs_before();
            let lock = store.lock().unwrap();
            store.install(&lock, &hierarchy, "a", &scope, &options(Scheme::Police), None).unwrap();
            assert_eq!(before(), []);
            let (theirs, too) = (foreign_program(), foreign_program());
            if !put_first(&theirs, target.ifindex, libbpf_sys::BPF_TCX_INGRESS) {
                eprintln!("SKIP {TEST}: the kernel has no tcx");
                return;
            }
            assert_eq!(before().len(), 1);
            // Another limit of ours is nobody else's.
            let both = Scope::Port("lo".to_owned());
            store.install(&lock, &hierarchy, "b", &both, &options(Scheme::Police), None).unwrap();
            let found: Vec<_> = before().into_iter().map(|b| (b.name, b.direction)).collect();
            assert_eq!(found, [("accept_all".to_owned(), "ingress")]);
            // What comes in by a device with HTB passes a filter, after all of tcx.
            store.remove(&lock, "b").unwrap();
            store.remove(&lock, "a").unwrap();
            store.install(&lock, &hierarchy, "a", &scope, &options(Scheme::Htb), None).unwrap();
            let found: Vec<_> = before().into_iter().map(|b| b.direction).collect();
            assert_eq!(found, ["ingress"]);
            assert!(put_first(&too, target.ifindex, libbpf_sys::BPF_TCX_EGRESS));
            assert_eq!(before().len(), 2);
            store.remove(&lock, "a").unwrap();
            store.close(lock);
        };
        netns.run(check).unwrap();
    }
}
