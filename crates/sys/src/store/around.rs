//! What is around the limits of a store: programs of others that meet packets first, and what processes that
//! died have left on devices.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::{PinnedLimit, Store, StoreLock, unreadable::programs_in};
use crate::{
    device::{self, Side},
    intf,
    mounts::{host_path, of_host_process},
    query,
    remains::{self, Hooked, OnDevice},
};

/// A program of somebody else that meets the packets of a limit on a device before that does. One that does
/// not pass them on keeps them from the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
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
        let ours = programs_in(&self.hooks, 0);
        let is_port = self.limit.flags & intf::FLAG_PORT != 0;
        let mut found = Vec::new();
        for (direction, name) in device::DIRECTION_NAMES {
            if self.limit.rate(direction).is_none() {
                continue;
            }
            let side = Side::of(direction, is_port);
            let before = device::programs_before(self.limit.ifindex, side, &ours);
            found.extend(before.into_iter().map(|id| Before {
                id,
                name: query::program_name(id).unwrap_or_default(),
                direction: name,
            }));
        }
        found
    }
}

impl Store {
    /// What processes that died have left on devices of this network namespace, a phrase for each device.
    #[must_use]
    pub fn orphans(&self) -> Vec<String> {
        orphans().iter().map(ToString::to_string).collect()
    }

    /// Takes it off; says what. A clsact stays: it does nothing, and may be somebody else's.
    #[must_use]
    pub fn remove_orphans(&self, _lock: &StoreLock) -> Vec<String> {
        let removed = orphans().into_iter().filter(|device| device.remove(false).is_ok());
        removed.map(|device| device.to_string()).collect()
    }
}

/// Qdiscs, filters and ifb devices of ours of which no store that is to be seen knows.
fn orphans() -> Vec<OnDevice> {
    let mut devices = remains::on_devices().unwrap_or_default();
    if !devices.is_empty() {
        let known: BTreeSet<u32> =
            bpf_mounts().iter().flat_map(|mount| programs_in(mount, 0)).collect();
        // What a process that lives holds has a link.
        let is_held = |h: &Hooked| h.is_link() || known.contains(&h.program);
        devices.retain(|device| !device.hooked.iter().any(is_held));
    }
    devices
}

/// The BPF file systems that this process or the host's first one sees.
fn bpf_mounts() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let hosts = of_host_process("mountinfo");
    for (file, is_hosts) in [(Path::new("/proc/self/mountinfo"), false), (&hosts, true)] {
        for line in fs::read_to_string(file).unwrap_or_default().lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let Some(mount) = left.split(' ').nth(4).filter(|_| right.starts_with("bpf ")) else {
                continue;
            };
            let mount = Path::new(mount);
            found.insert(if is_hosts { host_path(mount) } else { mount.to_owned() });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use libbpf_rs::libbpf_sys;
    use tidegate_core::{Scheme, Scope, virtual_queue::VirtualQueueOptions};

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
            // Another limit of ours is nobody else's.
            let both = Scope::Port("lo".to_owned());
            store.install(&lock, &hierarchy, "b", &both, &options(Scheme::Police), None).unwrap();
            assert_eq!(before(), []);
            let (theirs, too) = (foreign_program(), foreign_program());
            if !put_first(&theirs, target.ifindex, libbpf_sys::BPF_TCX_INGRESS) {
                eprintln!("SKIP {TEST}: the kernel has no tcx");
                return;
            }
            let found: Vec<_> = before().into_iter().map(|b| (b.name, b.direction)).collect();
            assert_eq!(found, [("accept_all".to_owned(), "ingress")]);
            // What comes in by a device with HTB passes a filter, after all of tcx.
            store.remove(&lock, &hierarchy, "b").unwrap();
            store.remove(&lock, &hierarchy, "a").unwrap();
            store.install(&lock, &hierarchy, "a", &scope, &options(Scheme::Htb), None).unwrap();
            let found: Vec<_> = before().into_iter().map(|b| b.direction).collect();
            assert_eq!(found, ["ingress"]);
            assert!(put_first(&too, target.ifindex, libbpf_sys::BPF_TCX_EGRESS));
            assert_eq!(before().len(), 2);
            store.remove(&lock, &hierarchy, "a").unwrap();
            store.close(lock);
        };
        netns.run(check).unwrap();
    }
}
