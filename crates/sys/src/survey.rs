//! What a host is, and who else is attached to it: what `tidegate doctor` judges. Nothing is changed.
//!
//! What this process may not ask is `None`. Devices are those of the network namespace of the calling thread.
//! Looking takes O(cgroups + devices) system calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use libbpf_rs::ProgramType;
use tidegate_core::scheme::SCHEMES;

use crate::{
    cgroup::{Hierarchy, is_cgroup2, mounts_of},
    device, features,
    mounts::{host_path, of_host_process},
    net::{
        Device, NetError, Netlink,
        qdisc::{Filter, QueueStats},
    },
    preflight::{self, OLDEST_KERNEL},
    query::{self, Side},
    root_qdisc, xdp,
};

/// A host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Survey {
    pub kernel: KernelFacts,
    pub cgroups: CgroupMounts,
    /// Where a BPF file system is mounted on the host.
    pub bpffs: Option<PathBuf>,
    pub root: bool,
    /// Capabilities that limits need and this process lacks; `None` if it cannot tell.
    pub lacking: Option<Vec<&'static str>>,
    /// Kinds of programs and their hooks; `None` if the kernel could not be asked.
    pub hooks: Vec<(Hook, Option<bool>)>,
    /// The qdiscs that schemes need.
    pub qdiscs: BTreeMap<&'static str, Option<bool>>,
    /// Devices of kind ifb.
    pub ifb: Option<bool>,
    /// Programs of others on cgroups; `None` if they could not be listed.
    pub on_cgroups: Option<Vec<OnCgroup>>,
    /// What others have on devices; `None` if it could not be listed.
    pub on_devices: Option<Vec<OnDevice>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelFacts {
    /// As `uname` has it.
    pub release: String,
    /// Older than [`OLDEST_KERNEL`].
    pub old: bool,
    /// `/sys` can be seen.
    pub sys: bool,
    /// `/proc` can be seen.
    pub proc: bool,
    /// It has its types.
    pub btf: bool,
    /// It compiles eBPF programs; `None` if it does not say.
    pub jit: Option<bool>,
}

/// Where cgroups are mounted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CgroupMounts {
    /// Version 2.
    pub v2: Option<PathBuf>,
    /// Version 1.
    pub v1: Vec<PathBuf>,
    /// Without a mount of version 2: it can be reached all the same, or why not.
    pub unmounted: Option<Result<(), String>>,
}

/// What programs are attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// What a cgroup sends and receives.
    Cgroup,
    /// TCP sockets of a cgroup.
    SockOps,
    /// Devices, by a link.
    Tcx,
    /// Devices, by a filter.
    Clsact,
    /// Devices, before the stack.
    Xdp,
}

impl Hook {
    pub fn name(self) -> &'static str {
        match self {
            Hook::Cgroup => "cgroup",
            Hook::SockOps => "sock_ops",
            Hook::Tcx => "tcx",
            Hook::Clsact => "clsact",
            Hook::Xdp => "XDP",
        }
    }
}

/// Programs of others on a hook of a cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnCgroup {
    /// Its path; empty: the root.
    pub cgroup: String,
    /// `egress`, `ingress` or `sock_ops`.
    pub hook: &'static str,
    pub programs: Vec<ForeignProgram>,
    /// Nobody else can attach here or below.
    pub exclusive: bool,
}

/// A program that is not ours.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ForeignProgram {
    /// Its name; empty if it has none.
    pub name: String,
    /// The kernel's id of it.
    pub id: u32,
}

/// What others have on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnDevice {
    pub device: String,
    /// The qdisc that somebody has put at its root, with its handle.
    pub qdisc: Option<String>,
    pub tcx: Vec<ForeignProgram>,
    /// Filters of clsact or ingress: programs, or kinds such as `flower`.
    pub filters: Vec<String>,
    pub xdp: Option<ForeignProgram>,
}

impl OnDevice {
    fn is_empty(&self) -> bool {
        let nothing = self.qdisc.is_none() && self.tcx.is_empty();
        nothing && self.filters.is_empty() && self.xdp.is_none()
    }
}

impl Survey {
    /// Looks at this host, for limits that are pinned in this directory.
    pub fn take(store: &Path) -> Survey {
        let qdiscs: BTreeSet<_> = SCHEMES.iter().filter_map(|info| info.qdisc).collect();
        let mut netlink = Netlink::open().ok();
        Survey {
            kernel: kernel(),
            cgroups: cgroups(),
            bpffs: bpffs(store),
            root: rustix::process::geteuid().is_root(),
            lacking: preflight::lacking(),
            hooks: hooks(),
            qdiscs: qdiscs.into_iter().map(|kind| (kind, features::has_qdisc(kind))).collect(),
            ifb: features::has_ifb(),
            on_cgroups: on_cgroups().ok(),
            on_devices: netlink.as_mut().and_then(|netlink| on_devices(netlink).ok()),
        }
    }
}

fn kernel() -> KernelFacts {
    // 0 is off; 1 and 2 are on, without and with a log.
    let jit = fs::read_to_string("/proc/sys/net/core/bpf_jit_enable").ok();
    KernelFacts {
        release: preflight::release(),
        old: preflight::is_older_than(OLDEST_KERNEL),
        sys: Path::new("/sys/kernel").exists(),
        proc: Path::new("/proc/self/status").exists(),
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        jit: jit.and_then(|text| Some(text.trim().parse::<u32>().ok()? > 0)),
    }
}

fn cgroups() -> CgroupMounts {
    let read = |file: &Path| fs::read_to_string(file).unwrap_or_default();
    let mut mounts = read(Path::new("/proc/self/mountinfo"));
    let mut v2 = mounts_of(&mounts, "cgroup2").find(|mount| is_cgroup2(mount));
    // What hides the host's mounts from this process hides none of its cgroups.
    if v2.is_none() {
        mounts = read(&of_host_process("mountinfo"));
        v2 = mounts_of(&mounts, "cgroup2").find(|mount| is_cgroup2(&host_path(mount)));
    }
    let mut v1: Vec<_> = mounts_of(&mounts, "cgroup").collect();
    v1.sort();
    let unmounted =
        v2.is_none().then(|| Hierarchy::find().map(drop).map_err(|why| why.to_string()));
    CgroupMounts { v2, v1, unmounted }
}

/// The BPF file system in which a directory is. The host's is where process 1 sees it.
fn bpffs(store: &Path) -> Option<PathBuf> {
    let is_default = store.starts_with("/sys/fs/bpf");
    let of = if is_default { of_host_process("mountinfo") } else { "/proc/self/mountinfo".into() };
    let mounts = fs::read_to_string(of).unwrap_or_default();
    mounts_of(&mounts, "bpf").find(|at| store.starts_with(at))
}

fn hooks() -> Vec<(Hook, Option<bool>)> {
    // Without the privilege nothing can be loaded, which says nothing of the kernel.
    let may_load = preflight::lacking().is_some_and(|lacking| lacking.is_empty());
    let loads = |kind: ProgramType| kind.is_supported().ok().filter(|_| may_load);
    let sched = loads(ProgramType::SchedCls);
    let all = [
        (Hook::Cgroup, loads(ProgramType::CgroupSkb)),
        (Hook::SockOps, loads(ProgramType::SockOps)),
        (Hook::Tcx, sched.map(|loads| loads && query::has_tcx())),
        (Hook::Clsact, sched.and_then(|loads| Some(loads && features::has_qdisc("clsact")?))),
        (Hook::Xdp, loads(ProgramType::Xdp)),
    ];
    all.into_iter().collect()
}

fn program(id: u32) -> ForeignProgram {
    ForeignProgram { name: query::program_name(id).unwrap_or_default(), id }
}

fn on_cgroups() -> io::Result<Vec<OnCgroup>> {
    let hierarchy = Hierarchy::find().map_err(io::Error::other)?;
    let mut found = Vec::new();
    for path in hierarchy.find_below("", |_| true) {
        // One that goes while we look has nothing any more.
        let Ok(cgroup) = hierarchy.open(&path) else { continue };
        for (hook, on_hook) in query::on_cgroup(&cgroup)? {
            let mut programs: Vec<_> = on_hook.programs.into_iter().map(program).collect();
            programs.retain(|program| !query::is_on_cgroups(&program.name));
            if !programs.is_empty() {
                let exclusive = !on_hook.multi;
                found.push(OnCgroup { cgroup: path.clone(), hook, programs, exclusive });
            }
        }
    }
    Ok(found)
}

fn on_devices(netlink: &mut Netlink) -> Result<Vec<OnDevice>, NetError> {
    let mut qdiscs: BTreeMap<u32, Vec<QueueStats>> = BTreeMap::new();
    for (ifindex, qdisc) in netlink.qdiscs()? {
        qdiscs.entry(ifindex).or_default().push(qdisc);
    }
    let devices = netlink.devices()?;
    let all = devices.iter().map(|device| {
        on_device(netlink, device, qdiscs.get(&device.index).map_or(&[], Vec::as_slice))
    });
    Ok(all.filter(|on_device| !on_device.is_empty()).collect())
}

fn on_device(netlink: &mut Netlink, device: &Device, qdiscs: &[QueueStats]) -> OnDevice {
    let index = device.index;
    let mut found = OnDevice {
        device: device.name.clone(),
        qdisc: root_qdisc::foreign(qdiscs).map(|q| format!("{} {}", q.kind, q.handle)),
        ..OnDevice::default()
    };
    let has_filters = qdiscs.iter().any(|q| q.kind == "clsact" || q.kind == "ingress");
    for side in [Side::In, Side::Out] {
        let tcx = query::tcx_programs(index, side).into_iter().map(|on| program(on.program));
        found.tcx.extend(tcx.filter(|program| !query::is_on_devices(&program.name)));
        let filters =
            has_filters.then(|| netlink.filters(index, side.clsact()).unwrap_or_default());
        let filters = filters.into_iter().flatten().filter(|filter| !is_ours(filter));
        found.filters.extend(filters.map(|filter| match filter.program {
            Some(id) => program(id).name,
            None => filter.kind,
        }));
    }
    let xdp = xdp::on_device(index).map(|on| program(on.program));
    found.xdp = xdp.filter(|program| !query::is_on_devices(&program.name));
    found.tcx.sort();
    found.tcx.dedup();
    found.filters.sort();
    found.filters.dedup();
    found
}

fn is_ours(filter: &Filter) -> bool {
    device::is_our_place(filter) && filter.program.is_some_and(query::is_of_ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{
        NetNs,
        qdisc::{Handle, Htb, Place, Verb},
    };

    #[test]
    fn whoever_asks_is_told_what_can_be_seen() {
        let survey = Survey::take(Path::new(crate::store::DEFAULT_ROOT));
        assert!(survey.kernel.release.starts_with(|c: char| c.is_ascii_digit()), "{survey:?}");
        assert!(survey.kernel.proc && survey.lacking.is_some());
        let known: Vec<_> = survey.qdiscs.keys().copied().collect();
        assert_eq!(known, ["fq", "htb", "tbf"]);
    }

    #[test]
    fn root_a_qdisc_of_somebody_else_is_seen_and_the_kernels_own_is_not() {
        if !rustix::process::geteuid().is_root() {
            return println!("SKIP root_a_qdisc_of_somebody_else_is_seen: needs root");
        }
        let netns = NetNs::create(&format!("tg-survey-{}", std::process::id())).unwrap();
        let mut netlink = netns.netlink().unwrap();
        let mut look = || netns.run(|| on_devices(&mut netlink)).unwrap().unwrap();
        assert_eq!(look(), []);
        let place = Place { ifindex: 1, parent: Handle::ROOT, handle: Handle::new(7, 0) };
        let mut other = netns.netlink().unwrap();
        other.set_qdisc(Verb::Add, place, &Htb::new(1)).unwrap();
        let qdisc = Some("htb 7:".to_owned());
        assert_eq!(look(), [OnDevice { device: "lo".into(), qdisc, ..OnDevice::default() }]);
    }
}
