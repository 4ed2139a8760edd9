//! The programs of scheme `edt`: on a cgroup, on what leaves by a device, or on what comes in by a port.
//!
//! On a device the program is a tcx link where the kernel has those (6.6), which is pinned like any other.
//! Before, it is a filter of clsact, which stays by itself and cannot be pinned: then the program is pinned
//! in its place, so that the filter is known by it, and a mark says whether clsact came with it.

use std::{
    fs,
    hash::{BuildHasher, Hasher, RandomState},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    ptr::{self, NonNull},
};

use libbpf_rs::{
    AsRawLibbpf, Link, MapHandle, OpenObject, Program, ProgramMut, TC_EGRESS, TC_INGRESS, TcHook,
    TcHookBuilder,
    query::LinkTypeInfo,
    skel::{OpenSkel, SkelBuilder},
};
use tidegate_core::Scope;

use crate::{
    cgroup::{Cgroup, Hierarchy},
    fq::{self, FqError},
    intf,
    limit::{self, AttachedLimit, LimitError, LimitMaps, LimitOptions},
    net::{
        NetError, Netlink,
        qdisc::{Handle, Place, Qdisc, Verb},
    },
};

mod skel {
    #![allow(
        missing_docs,
        unused_qualifications,
        clippy::all,
        clippy::undocumented_unsafe_blocks,
        clippy::unwrap_used
    )]
    include!(concat!(env!("OUT_DIR"), "/edt.skel.rs"));
}

/// After what others filter with low numbers; one limit a device, so one handle.
const PRIORITY: u32 = 32_000;
const HANDLE: u32 = 1;

/// A device in this network namespace, and from which side it is limited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// [`Scope::Dev`] or [`Scope::Port`].
    pub scope: Scope,
    /// Its index.
    pub ifindex: u32,
    /// The inode of its network namespace.
    pub namespace: u64,
}

impl Target {
    /// Finds the device of a scope in the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`FqError::Missing`] when there is none.
    pub fn find(scope: &Scope) -> Result<Target, FqError> {
        let missing = || FqError::Missing(scope.name().to_owned());
        let ifindex = Netlink::open()?.index_of(scope.name()).map_err(|e| match e.errno() {
            Some(libc::ENODEV) => missing(),
            _ => FqError::Net(e),
        })?;
        if !scope.is_device() {
            return Err(missing());
        }
        Ok(Target { scope: scope.clone(), ifindex, namespace: current_namespace()? })
    }

    fn is_port(&self) -> bool {
        matches!(self.scope, Scope::Port(_))
    }
}

fn current_namespace() -> Result<u64, NetError> {
    let file = fs::metadata("/proc/thread-self/ns/net");
    file.map(|m| m.ino()).map_err(|e| NetError::refused("ask for the network namespace", e))
}

/// Whether the device of a limit is, or was, in the network namespace of the calling thread.
pub(crate) fn is_in_this_namespace(limit: &intf::Limit) -> bool {
    current_namespace().is_ok_and(|namespace| namespace == limit.cgroup_id)
}

/// A filter of clsact; dropped, it is taken off unless it has been [kept](Filter::keep).
#[derive(Debug)]
pub(crate) struct Filter {
    ifindex: u32,
    port: bool,
    /// clsact was not there before.
    pub(crate) owns_clsact: bool,
    pub(crate) program: OwnedFd,
    kept: bool,
}

impl Filter {
    pub(crate) fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        if !self.kept {
            remove_filter(self.ifindex, self.port, self.owns_clsact, self.program.as_fd());
        }
    }
}

/// Loads the program of one place and hands it to `attach`.
fn load<T>(
    place: Hook,
    limit: &intf::Limit,
    attach: impl FnOnce(&ProgramMut<'_>) -> Result<T, LimitError>,
) -> Result<(LimitMaps, T), LimitError> {
    limit::quiet_libbpf();
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let mut open =
        skel::EdtSkelBuilder::default().open(&mut storage).map_err(limit::load_error("edt"))?;
    open.progs.edt_cgroup.set_autoload(place == Hook::Cgroup);
    open.progs.edt_device.set_autoload(place == Hook::Device);
    open.progs.edt_port.set_autoload(place == Hook::Port);
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.seed = random_seed();
    }
    let edt = open.load().map_err(limit::load_error("edt"))?;
    let handle =
        |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(limit::load_error("edt"));
    let maps = LimitMaps {
        limit: handle(&edt.maps.limit)?,
        queues: handle(&edt.maps.queues_of_limit)?,
        counters: handle(&edt.maps.counters)?,
        sockets: None,
        parent: None,
        seat: None,
    };
    maps.write(limit)?;
    let program = match place {
        Hook::Cgroup => &edt.progs.edt_cgroup,
        Hook::Device => &edt.progs.edt_device,
        Hook::Port => &edt.progs.edt_port,
    };
    let attached = attach(program)?;
    Ok((maps, attached))
}

/// Where the program sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hook {
    Cgroup,
    Device,
    Port,
}

/// So that nobody outside can choose flows that meet in one place.
fn random_seed() -> u32 {
    RandomState::new().build_hasher().finish() as u32
}

/// Puts a limit on a cgroup.
pub(crate) fn attach_cgroup(
    hierarchy: &Hierarchy,
    cgroup: &Cgroup,
    options: &LimitOptions,
) -> Result<AttachedLimit, LimitError> {
    let scope = Scope::Cgroup(cgroup.path().to_owned());
    fq::check(hierarchy, &scope, Some(cgroup))?;
    let limit = options.encode(cgroup.id())?;
    let attach = |program: &ProgramMut<'_>| limit::attach(program, "edt_cgroup", cgroup);
    let (maps, link) = load(Hook::Cgroup, &limit, attach)?;
    Ok(AttachedLimit { maps, links: vec![("egress", link)], filter: None })
}

/// Puts a limit on a device.
pub(crate) fn attach_device(
    hierarchy: &Hierarchy,
    target: &Target,
    options: &LimitOptions,
) -> Result<AttachedLimit, LimitError> {
    fq::check(hierarchy, &target.scope, None)?;
    let limit = encode(target, options)?;
    let hook = if target.is_port() { Hook::Port } else { Hook::Device };
    let (maps, (link, filter)) =
        load(hook, &limit, |program| match tcx(program, target.ifindex) {
            Some(link) => Ok((Some(link), None)),
            None => add_filter(program, target).map(|filter| (None, Some(filter))),
        })?;
    Ok(AttachedLimit {
        maps,
        links: link.map(|link| ("egress", link)).into_iter().collect(),
        filter,
    })
}

/// The limit of a device as it lies in the map.
pub(crate) fn encode(target: &Target, options: &LimitOptions) -> Result<intf::Limit, LimitError> {
    let mut limit = options.encode(target.namespace)?;
    limit.ifindex = target.ifindex;
    if target.is_port() {
        limit.flags |= intf::FLAG_PORT;
    }
    Ok(limit)
}

/// A tcx link; `None` where the kernel has none.
pub(crate) fn tcx(program: &ProgramMut<'_>, ifindex: u32) -> Option<Link> {
    // SAFETY: the program is loaded and outlives the call; no options is a valid choice.
    let link = unsafe {
        libbpf_rs::libbpf_sys::bpf_program__attach_tcx(
            program.as_libbpf_object().as_ptr(),
            ifindex as i32,
            ptr::null(),
        )
    };
    // SAFETY: libbpf gives a link that the caller owns, or null.
    NonNull::new(link).map(|link| unsafe { Link::from_ptr(link) })
}

pub(crate) fn add_filter(program: &ProgramMut<'_>, target: &Target) -> Result<Filter, LimitError> {
    let refused =
        |source| LimitError::AttachDevice { device: target.scope.name().to_owned(), source };
    let own_error = |e: std::io::Error| refused(libbpf_rs::Error::from(e));
    let fd = program.as_fd().try_clone_to_owned().map_err(own_error)?;
    let mut netlink = Netlink::open().map_err(FqError::from)?;
    let place =
        Place { ifindex: target.ifindex, parent: Handle::CLSACT, handle: Handle::new(0xffff, 0) };
    let owns_clsact = match netlink.set_qdisc(Verb::Add, place, &Qdisc::Clsact) {
        Ok(()) => true,
        Err(e) if e.is_exists() => false,
        Err(e) => return Err(FqError::from(e).into()),
    };
    let mut tc = hook(fd.as_fd(), target.ifindex, target.is_port());
    if let Err(source) = tc.attach() {
        if owns_clsact {
            let _ = netlink.delete_qdisc(target.ifindex, Handle::CLSACT);
        }
        return Err(refused(source));
    }
    let (ifindex, port) = (target.ifindex, target.is_port());
    Ok(Filter { ifindex, port, owns_clsact, program: fd, kept: false })
}

fn hook(program: std::os::fd::BorrowedFd<'_>, ifindex: u32, port: bool) -> TcHook {
    let side = if port { TC_INGRESS } else { TC_EGRESS };
    let mut builder = TcHookBuilder::new(program);
    builder.ifindex(ifindex as i32).priority(PRIORITY).handle(HANDLE);
    builder.hook(side)
}

/// Whether the filter on the device runs this program.
pub(crate) fn filter_is(ifindex: u32, port: bool, program: std::os::fd::BorrowedFd<'_>) -> bool {
    let wanted = Program::id_from_fd(program).ok();
    wanted.is_some() && hook(program, ifindex, port).query().ok() == wanted
}

/// Takes the filter off if it is this program's, and clsact if it came with it and nobody else uses it.
pub(crate) fn remove_filter(
    ifindex: u32,
    port: bool,
    owns_clsact: bool,
    program: std::os::fd::BorrowedFd<'_>,
) {
    if !filter_is(ifindex, port, program) {
        return;
    }
    let _ = hook(program, ifindex, port).detach();
    let Ok(mut netlink) = Netlink::open() else { return };
    let mut in_use =
        |parent| netlink.count_filters(ifindex, parent).map_or(true, |filters| filters > 0);
    if owns_clsact && !in_use(Handle::CLSACT_INGRESS) && !in_use(Handle::CLSACT_EGRESS) {
        let _ = netlink.delete_qdisc(ifindex, Handle::CLSACT);
    }
}

/// The file names, in a pinned limit's directory, of a filter's program and of the mark that clsact came
/// with it.
pub(crate) const PROGRAM_PIN: &str = "program";
pub(crate) const CLSACT_MARK: &str = "clsact";

/// Whether the program of a limit on a device, pinned in `dir`, is on the device.
pub(crate) fn is_hooked(dir: &Path, limit: &intf::Limit) -> bool {
    let port = limit.flags & intf::FLAG_PORT != 0;
    if let Ok(program) = Program::fd_from_pinned_path(dir.join(PROGRAM_PIN)) {
        return filter_is(limit.ifindex, port, program.as_fd());
    }
    let info = Link::open(dir.join("egress")).and_then(|link| link.info());
    matches!(info.map(|i| i.info), Ok(LinkTypeInfo::Tcx(t)) if t.ifindex == limit.ifindex)
}

/// Takes the filter off that is known by the program pinned in `dir`.
pub(crate) fn remove_pinned_filter(dir: &Path, limit: &intf::Limit) {
    let port = limit.flags & intf::FLAG_PORT != 0;
    if let Ok(program) = Program::fd_from_pinned_path(dir.join(PROGRAM_PIN)) {
        let owns_clsact = fs::symlink_metadata(dir.join(CLSACT_MARK)).is_ok();
        remove_filter(limit.ifindex, port, owns_clsact, program.as_fd());
    }
}

/// Whether the device of a limit is there: in this network namespace, of this name and index.
pub(crate) fn is_there(scope: &Scope, limit: &intf::Limit) -> bool {
    Target::find(scope)
        .is_ok_and(|target| target.ifindex == limit.ifindex && target.namespace == limit.cgroup_id)
}

#[cfg(test)]
mod kernel_tests;
