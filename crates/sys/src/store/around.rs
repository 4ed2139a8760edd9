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

use super::{PinnedLimit, Store, StoreError, StoreLock, limit_error, pins::programs_in};
use crate::{
    device::{self, Target},
    intf,
    query::{self, Side},
    remains::{self, Hooked, InTheWay, OnDevice},
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
    pub fn orphans(&self) -> Vec<String> {
        left().orphans.iter().map(ToString::to_string).collect()
    }

    /// The same of what may just as well be a limit of a store that is not to be seen from this container.
    pub fn perhaps_orphans(&self) -> Vec<String> {
        left().perhaps.iter().map(ToString::to_string).collect()
    }

    /// Takes it off; says what. A clsact stays: it does nothing, and may be somebody else's.
    pub fn remove_orphans(&self, _lock: &StoreLock) -> Vec<String> {
        let removed = left().orphans.into_iter().filter(|device| device.remove(false).is_ok());
        removed.map(|device| device.to_string()).collect()
    }

    /// The objects that make way for a limit that begins on a device: remains of a process that died or of a
    /// lost BPF file system. Another store's qdisc goes, with all of its limit, only with force, and for a
    /// limit that `has_qdisc`.
    pub(super) fn in_the_way(
        &self,
        name: &str,
        target: &Target,
        has_qdisc: bool,
    ) -> Result<InTheWay, StoreError> {
        let force = self.force;
        let nothing = InTheWay { force, ..InTheWay::default() };
        let refused = || limit_error(name);
        let mut there = remains::on_device(target.ifindex).map_err(|e| refused()(e.into()))?;
        // Links go with their store.
        let outlives = |hooked: &Hooked| !hooked.is_link();
        if there.qdisc.is_none() && there.ifb.is_none() && !there.hooked.iter().any(outlives) {
            return Ok(nothing);
        }
        let own = programs_in(&self.root);
        let is_own = |hooked: &Hooked| own.contains(&hooked.program);
        let is_own_root = |limit: &intf::Limit| {
            (limit.ifindex, limit.cgroup_id) == (target.ifindex, target.namespace)
        };
        let has_root = |there: &OnDevice| there.qdisc.is_some() || there.ifb.is_some();
        if there.hooked.iter().any(|hooked| is_own(hooked) && hooked.comes_with_qdisc())
            || has_root(&there) && self.roots().iter().any(is_own_root)
        {
            (there.qdisc, there.ifb) = (None, None);
        }
        there.hooked.retain(|hooked| !is_own(hooked));
        if there.is_empty() {
            return Ok(nothing);
        }
        let is_left = !is_held(&there, &known_programs()) && !shares_network();
        if !is_left && has_qdisc && has_root(&there) {
            if !self.force {
                return Err(StoreError::OtherStore { scope: target.scope.clone() });
            }
            there.hooked.retain(Hooked::is_of_limit_with_qdisc);
        } else if !is_left {
            return Ok(nothing);
        }
        Ok(InTheWay { there, force })
    }

    /// Whether the qdisc of a device, and its ifb device, belong to a limit of another store.
    pub(super) fn has_qdisc_of_others(&self, ifindex: u32) -> bool {
        let mut programs = remains::on_device(ifindex).unwrap_or_default().hooked;
        programs.retain(Hooked::comes_with_qdisc);
        if programs.is_empty() {
            return false;
        }
        let own = programs_in(&self.root);
        programs.retain(|hooked| !own.contains(&hooked.program));
        if programs.is_empty() {
            return false;
        }
        let known = known_programs();
        programs.iter().any(|hooked| known.contains(&hooked.program))
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
    let known = known_programs();
    devices.retain(|device| !is_held(device, &known));
    match shares_network() {
        true => Left { perhaps: devices, ..Left::default() },
        false => Left { orphans: devices, ..Left::default() },
    }
}

/// Whether a store, or a process that lives, has something on a device.
pub(super) fn is_held(device: &OnDevice, known: &BTreeSet<u32>) -> bool {
    // What a process that lives holds has a link.
    device.hooked.iter().any(|h| h.is_link() || known.contains(&h.program))
        // The program of a scheme that this version does not know has any name.
        || remains::programs_on(device.ifindex).iter().any(|program| known.contains(program))
}

/// The programs of all stores that are to be seen.
pub(super) fn known_programs() -> BTreeSet<u32> {
    bpf_mounts().iter().flat_map(|mount| programs_in(mount)).collect()
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
pub(super) mod tests {
    use std::{
        os::fd::{AsRawFd, FromRawFd, OwnedFd},
        time::{Duration, Instant},
    };

    use libbpf_rs::libbpf_sys;
    use rustix::{
        mount::{MountPropagationFlags, mount_change},
        thread::{UnshareFlags, unshare_unsafe},
    };
    use tidegate_core::{Scheme, Scope, queue_options::VirtualQueueOptions};

    use super::*;
    use crate::{bpffs::PrivateBpffs, cgroup::Hierarchy, limit::LimitOptions, net::NetNs};

    /// Somebody's program, which has every packet accepted and ends the chain.
    pub(in crate::store) fn foreign_program() -> OwnedFd {
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

    /// A device with a limit in both directions, which has a qdisc, an ifb device, a filter and a link.
    fn put_on_lo(store: &Store, name: &str) -> Result<(), StoreError> {
        let rate = VirtualQueueOptions::new("1gbit".parse().unwrap());
        let scheme = Scheme::Spring;
        let (egress, ingress) = (Some(rate), Some(rate));
        let options = LimitOptions { egress, ingress, scheme, ..LimitOptions::default() };
        let (lock, hierarchy) = (store.lock()?, Hierarchy::find().unwrap());
        let done =
            store.install(&lock, &hierarchy, name, &Scope::Port("lo".to_owned()), &options, None);
        store.close(lock);
        done
    }

    fn take_off(store: &Store, name: &str) {
        let lock = store.lock().unwrap();
        store.remove(&lock, name).unwrap();
        store.close(lock);
    }

    pub(in crate::store) fn on_lo() -> OnDevice {
        remains::on_device(Target::find(&Scope::Dev("lo".to_owned())).unwrap().ifindex).unwrap()
    }

    /// All that is on the device is this store's, once.
    fn is_alone(store: &Store) {
        let (own, there) = (programs_in(&store.root), on_lo());
        assert!(there.hooked.iter().all(|hooked| own.contains(&hooked.program)), "{there}");
        assert!(there.qdisc.is_some() && there.ifb.is_some(), "{there}");
        let redirects = there.hooked.iter().filter(|hooked| hooked.name == "htb_in").count();
        assert_eq!(redirects, 1, "{there}");
    }

    #[test]
    fn root_what_a_lost_store_has_left_makes_way() {
        const TEST: &str = "root_what_a_lost_store_has_left_makes_way";
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP {TEST}: needs root");
            return;
        }
        let netns = NetNs::create(&format!("tidegate-lost-{}", std::process::id())).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let check = || {
            // Nobody else gets a copy of these mounts.
            // SAFETY: unsharing mounts touches no memory; only this thread, which ends, changes namespace.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            let lose = |name: &str| {
                let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
                put_on_lo(&Store::at(bpffs.path().join("t")), name).unwrap();
                drop(bpffs);
                // The kernel takes links off a moment after their last pin.
                let deadline = Instant::now() + Duration::from_secs(120);
                while on_lo().hooked.iter().any(Hooked::is_link) {
                    assert!(Instant::now() < deadline, "{}", on_lo());
                    std::thread::sleep(Duration::from_millis(5));
                }
                assert!(!on_lo().hooked.is_empty(), "the filter stays: {}", on_lo());
            };
            lose("a");
            let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
            let store = Store::at(bpffs.path().join("t"));
            put_on_lo(&store, "b").unwrap();
            is_alone(&store);
            take_off(&store, "b");
            assert!(on_lo().is_empty(), "{}", on_lo());
            drop(bpffs);

            // A limit without a qdisc is not behind a lost one that has one.
            lose("a");
            let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
            let store = Store::at(bpffs.path().join("t"));
            let (lock, hierarchy) = (store.lock().unwrap(), Hierarchy::find().unwrap());
            let egress = Some(VirtualQueueOptions::new("1gbit".parse().unwrap()));
            let options =
                LimitOptions { egress, scheme: Scheme::Police, ..LimitOptions::default() };
            let scope = Scope::Dev("lo".to_owned());
            store.install(&lock, &hierarchy, "b", &scope, &options, None).unwrap();
            store.close(lock);
            assert!(on_lo().qdisc.is_none() && on_lo().ifb.is_none(), "{}", on_lo());
            assert!(!on_lo().hooked.is_empty());
            take_off(&store, "b");
        };
        netns.run(check).unwrap();
    }

    #[test]
    fn root_force_replaces_all_of_another_stores_qdisc() {
        const TEST: &str = "root_force_replaces_all_of_another_stores_qdisc";
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP {TEST}: needs root");
            return;
        }
        let netns = NetNs::create(&format!("tidegate-force-{}", std::process::id())).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
        let check = || {
            let theirs = Store::at(bpffs.path().join("theirs"));
            let mut ours = Store::at(bpffs.path().join("ours"));
            put_on_lo(&theirs, "a").unwrap();
            let before = on_lo();
            let refused = put_on_lo(&ours, "b");
            assert!(matches!(refused, Err(StoreError::OtherStore { .. })), "{refused:?}");
            assert_eq!(on_lo(), before);
            ours.force(true);
            put_on_lo(&ours, "b").unwrap();
            is_alone(&ours);
            take_off(&theirs, "a");
            is_alone(&ours);
            take_off(&ours, "b");
            assert!(on_lo().is_empty(), "{}", on_lo());
        };
        netns.run(check).unwrap();
    }

    #[test]
    fn root_force_takes_nothing_off_for_a_limit_that_is_refused() {
        const TEST: &str = "root_force_takes_nothing_off_for_a_limit_that_is_refused";
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP {TEST}: needs root");
            return;
        }
        let netns = NetNs::create(&format!("tidegate-refused-{}", std::process::id())).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
        let check = || {
            let theirs = Store::at(bpffs.path().join("theirs"));
            let mut ours = Store::at(bpffs.path().join("ours"));
            ours.force(true);
            let hierarchy = Hierarchy::find().unwrap();
            let scope = Scope::Port("lo".to_owned());
            let queue = VirtualQueueOptions::new("1gbit".parse().unwrap());
            let put = |name: &str, scheme, egress: bool| {
                let egress = Some(queue).filter(|_| egress);
                let options = LimitOptions {
                    egress,
                    ingress: Some(queue),
                    scheme,
                    ..LimitOptions::default()
                };
                let lock = ours.lock().unwrap();
                let done = ours.install(&lock, &hierarchy, name, &scope, &options, None);
                ours.close(lock);
                done
            };
            put_on_lo(&theirs, "a").unwrap();
            // Before Linux 6.6 no other limit has a place beside it.
            if on_lo().hooked.iter().any(Hooked::is_link) {
                put("police", Scheme::Police, true).unwrap();
                let before = on_lo();
                // The scope has a limit.
                for (scheme, egress) in [(Scheme::Tbf, false), (Scheme::Htb, true)] {
                    let refused = put("b", scheme, egress);
                    assert!(matches!(refused, Err(StoreError::ScopeTaken { .. })), "{refused:?}");
                    assert_eq!(on_lo(), before);
                    assert!(theirs.open(&hierarchy, "a").unwrap().unhooked.is_empty());
                }
                take_off(&ours, "police");
            }
            let before = on_lo();
            // `tbf` cannot hold what comes in.
            let refused = put("b", Scheme::Tbf, true);
            assert!(matches!(refused, Err(StoreError::Limit { .. })), "{refused:?}");
            assert_eq!(on_lo(), before);
            // Now it can be.
            put("b", Scheme::Tbf, false).unwrap();
            assert_eq!(on_lo().qdisc.as_deref(), Some("tbf"));
            assert!(on_lo().ifb.is_none(), "{}", on_lo());
            take_off(&ours, "b");
            assert!(on_lo().is_empty(), "{}", on_lo());
            take_off(&theirs, "a");
        };
        netns.run(check).unwrap();
    }
}
