//! A device from which a limit hangs, and the programs on it.
//!
//! A program is a tcx link where the kernel has those (6.6), which is pinned like any other. Before, it is a
//! filter of clsact, which stays by itself and cannot be pinned: then the program is pinned in its place, so
//! that the filter is known by it, and a mark says whether clsact came with it.

use std::{
    collections::BTreeSet,
    fs,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    ptr::NonNull,
};

use libbpf_rs::{
    AsRawLibbpf, Link, Program, ProgramMut, TC_EGRESS, TC_INGRESS, TcHook, TcHookBuilder,
    libbpf_sys, query::LinkTypeInfo,
};
use tidegate_core::{Direction, Scope, queue_options::ConfigError};

use crate::{
    bpf::Links,
    fq::FqError,
    intf::{self, DIRECTIONS},
    limit::{LimitError, LimitOptions},
    net::{
        NetError, NetNs, Netlink,
        qdisc::{Clsact, Filter, Handle, Place, Redirect, Verb},
    },
    query::{self, Side},
};

/// After what others filter with low numbers: of a device, of a port. One limit of a kind a device and side,
/// so one handle.
const PRIORITIES: [u32; 2] = [32_000, 32_001];
/// Of what must see packets before those do: programs on both sides of the device, for each direction.
const PRIORITIES_BEFORE: [u32; DIRECTIONS] = [31_999, 31_998];
/// Of the programs of limits with prefixes: of a device, of a port.
const PRIORITIES_MATCHED: [u32; 2] = [31_997, 31_996];
/// Of what goes to an ifb device, and is met by no filter after that.
const PRIORITY_REDIRECTED: u32 = 32_002;
const HANDLE: u32 = 1;

/// A device in this network namespace, and from which side it is limited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// [`Scope::Dev`] or [`Scope::Port`].
    pub scope: Scope,
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

    pub(crate) fn is_port(&self) -> bool {
        matches!(self.scope, Scope::Port(_))
    }

    /// Where the packets of a direction of the workload pass.
    pub(crate) fn side(&self, direction: Direction) -> Side {
        Side::of(direction, self.is_port())
    }

    /// A limit on it as it lies in the map.
    pub(crate) fn encode(&self, options: &LimitOptions) -> Result<intf::Entry, LimitError> {
        let here = options.scheme.info().on(&self.scope);
        let queues = [(options.egress, Direction::Egress), (options.ingress, Direction::Ingress)];
        if queues.iter().any(|(queue, direction)| queue.is_some() && !here.contains(direction)) {
            return Err(ConfigError::Scheme(options.scheme).into());
        }
        let mut limit = options.encode(self.namespace)?;
        limit.ifindex = self.ifindex;
        if self.is_port() {
            limit.flags |= intf::FLAG_PORT;
        }
        Ok(limit)
    }
}

fn current_namespace() -> Result<u64, NetError> {
    let file = fs::metadata("/proc/thread-self/ns/net");
    file.map(|m| m.ino()).map_err(|e| NetError::refused("ask for the network namespace", e))
}

/// Whether it is the network namespace of the calling thread.
pub(crate) fn is_current_namespace(inode: u64) -> bool {
    current_namespace().is_ok_and(|namespace| namespace == inode)
}

/// Does the work in the network namespace of this inode; `None`, and nothing is done, if it is no more, or
/// nothing that can be seen here is in it.
pub(crate) fn in_namespace<T: Send>(inode: u64, work: impl FnOnce() -> T + Send) -> Option<T> {
    if is_current_namespace(inode) {
        return Some(work());
    }
    NetNs::find(inode)?.run(work).ok()
}

/// The name of a device of this network namespace; `None` if there is none of this index.
pub(crate) fn name_of(ifindex: u32) -> Option<String> {
    let devices = Netlink::open().and_then(|mut netlink| netlink.devices()).ok()?;
    devices.into_iter().find(|device| device.index == ifindex).map(|device| device.name)
}

/// Whether the packets of a device of this network namespace have Ethernet's header; also if nothing tells.
pub(crate) fn is_ethernet(ifindex: u32) -> bool {
    Netlink::open().and_then(|mut netlink| netlink.is_ethernet(ifindex)).unwrap_or(true)
}

/// Whether the device of a limit is, or was, in the network namespace of the calling thread.
pub(crate) fn is_in_this_namespace(limit: &intf::Limit) -> bool {
    is_current_namespace(limit.cgroup_id)
}

/// The hooks of a limit on a device: their direction, and the names under which their links, or the programs
/// of their filters, are pinned.
const HOOKS: [(Direction, &str, &str); 2] = [
    (Direction::Egress, "egress", PROGRAM_PINS[0]),
    (Direction::Ingress, "ingress", PROGRAM_PINS[1]),
];
pub(crate) const PROGRAM_PINS: [&str; 2] = ["program_egress", "program_ingress"];
/// Follows the name of the pin of a program that is about to take the place of that of a filter.
const NEXT: &str = "_next";

/// Whether a pin is that of a filter's program.
pub(crate) fn is_program_pin(name: &str) -> bool {
    PROGRAM_PINS.contains(&name.strip_suffix(NEXT).unwrap_or(name))
}
/// That of the link of a program in XDP.
pub(crate) const XDP_PIN: &str = "xdp";
/// The mark, in a pinned limit's directory, that clsact came with it.
pub(crate) const CLSACT_MARK: &str = "clsact";

/// The filters of a limit; dropped, they are taken off unless they have been [kept](Filters::keep).
#[derive(Debug)]
pub(crate) struct Filters {
    ifindex: u32,
    /// clsact was not there before.
    pub(crate) owns_clsact: bool,
    programs: Vec<(Direction, Side, OwnedFd)>,
    kept: bool,
}

impl Filters {
    /// The programs and the names of their pins.
    pub(crate) fn programs(&self) -> impl Iterator<Item = (&'static str, BorrowedFd<'_>)> {
        self.programs.iter().filter_map(|(direction, _, program)| {
            let (_, _, pin) = HOOKS.iter().find(|(of, ..)| of == direction)?;
            Some((*pin, program.as_fd()))
        })
    }

    pub(crate) fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Filters {
    fn drop(&mut self) {
        if !self.kept {
            let programs = self.programs.iter().map(|(_, side, program)| (*side, program.as_fd()));
            remove_filters(self.ifindex, self.owns_clsact, programs);
        }
    }
}

/// What holds the programs of a limit on a device.
#[derive(Debug, Default)]
pub(crate) struct Hooked {
    pub(crate) links: Links,
    pub(crate) filters: Option<Filters>,
}

/// Puts programs on a device, each for its direction of the workload.
pub(crate) fn attach(
    target: &Target,
    programs: &[(Direction, &ProgramMut<'_>)],
) -> Result<Hooked, LimitError> {
    attach_at(target, programs, PRIORITIES[usize::from(target.is_port())], false)
}

/// The same, where they see packets before the programs of a limit do. Both act on one `direction`.
pub(crate) fn attach_before(
    target: &Target,
    direction: Direction,
    programs: &[(Direction, &ProgramMut<'_>)],
) -> Result<Hooked, LimitError> {
    attach_at(target, programs, PRIORITIES_BEFORE[intf::index(direction)], true)
}

/// The same of the programs that all limits with prefixes share.
pub(crate) fn attach_matched(
    target: &Target,
    programs: &[(Direction, &ProgramMut<'_>)],
) -> Result<Hooked, LimitError> {
    attach_at(target, programs, PRIORITIES_MATCHED[usize::from(target.is_port())], true)
}

/// Puts a program on a device that says which packets go to another device's egress (-1), and which go on
/// (0). Always a filter of clsact: what a program redirects by itself is lost in the ifb device of Linux
/// 6.1.
pub(crate) fn attach_redirecting(
    target: &Target,
    direction: Direction,
    program: &ProgramMut<'_>,
    to: u32,
    hooked: &mut Hooked,
) -> Result<(), LimitError> {
    add_filter(program, target, direction, PRIORITY_REDIRECTED, Some(to), &mut hooked.filters)
}

fn attach_at(
    target: &Target,
    programs: &[(Direction, &ProgramMut<'_>)],
    priority: u32,
    before: bool,
) -> Result<Hooked, LimitError> {
    let mut hooked = Hooked::default();
    for (direction, program) in programs {
        let name = if *direction == Direction::Egress { "egress" } else { "ingress" };
        match tcx(program, target.ifindex, before) {
            Some(link) => hooked.links.push((name, link)),
            None => add_filter(program, target, *direction, priority, None, &mut hooked.filters)?,
        }
    }
    Ok(hooked)
}

/// A tcx link; `None` where the kernel has none.
fn tcx(program: &ProgramMut<'_>, ifindex: u32, before: bool) -> Option<OwnedFd> {
    // SAFETY: a C struct of integers, for which zero is "not given".
    let mut opts: libbpf_sys::bpf_tcx_opts = unsafe { std::mem::zeroed() };
    opts.sz = size_of_val(&opts) as _;
    if before {
        opts.flags = libbpf_sys::BPF_F_BEFORE;
    }
    // SAFETY: the program is loaded and, as the options do, outlives the call.
    let link = unsafe {
        libbpf_sys::bpf_program__attach_tcx(
            program.as_libbpf_object().as_ptr(),
            ifindex as i32,
            &raw const opts,
        )
    };
    // SAFETY: libbpf gives a link that the caller owns, or null.
    let link = NonNull::new(link).map(|link| unsafe { Link::from_ptr(link) })?;
    link.as_fd().try_clone_to_owned().ok()
}

fn add_filter(
    program: &ProgramMut<'_>,
    target: &Target,
    direction: Direction,
    priority: u32,
    redirected_to: Option<u32>,
    filters: &mut Option<Filters>,
) -> Result<(), LimitError> {
    let refused =
        |source| LimitError::AttachDevice { device: target.scope.name().to_owned(), source };
    let own_error = |e: std::io::Error| refused(libbpf_rs::Error::from(e));
    let fd = program.as_fd().try_clone_to_owned().map_err(own_error)?;
    let filters = match filters {
        Some(filters) => filters,
        none => none.insert(Filters {
            ifindex: target.ifindex,
            owns_clsact: add_clsact(target.ifindex)?,
            programs: Vec::new(),
            kept: false,
        }),
    };
    let side = target.side(direction);
    match redirected_to {
        None => {
            hook(fd.as_fd(), target.ifindex, side, priority).attach().map(drop).map_err(refused)?
        }
        Some(to) => add_redirect(fd.as_fd(), target.ifindex, side, priority, to, Verb::Add)?,
    }
    filters.programs.push((direction, side, fd));
    Ok(())
}

fn add_clsact(ifindex: u32) -> Result<bool, LimitError> {
    let place = Place { ifindex, parent: Handle::CLSACT, handle: Handle::new(0xffff, 0) };
    let mut netlink = Netlink::open().map_err(FqError::from)?;
    match netlink.set_qdisc(Verb::Add, place, &Clsact) {
        Ok(()) => Ok(true),
        Err(e) if e.is_exists() => Ok(false),
        Err(e) => Err(FqError::from(e).into()),
    }
}

fn add_redirect(
    program: BorrowedFd<'_>,
    ifindex: u32,
    side: Side,
    priority: u32,
    to: u32,
    verb: Verb,
) -> Result<(), LimitError> {
    let parent = side.clsact();
    let redirect =
        Redirect { ifindex, parent, priority: priority as u16, handle: HANDLE as u16, program, to };
    Netlink::open()?.add_redirect(&redirect, verb).map_err(|e| match e.is_absent() {
        true => LimitError::NoMirred,
        false => e.into(),
    })
}

fn hook(program: BorrowedFd<'_>, ifindex: u32, side: Side, priority: u32) -> TcHook {
    let side = if side == Side::In { TC_INGRESS } else { TC_EGRESS };
    let mut builder = TcHookBuilder::new(program);
    builder.ifindex(ifindex as i32).priority(priority).handle(HANDLE);
    builder.hook(side)
}

/// The programs of others that meet packets on a side of a device before the first of `ours` there does: tcx
/// programs before a link, and before a filter of clsact all of tcx and the filters of lower priority.
pub(crate) fn programs_before(ifindex: u32, side: Side, ours: &BTreeSet<u32>) -> Vec<u32> {
    let is_theirs = |id: &u32| !ours.contains(id) && !query::is_of_ours(*id);
    let tcx: Vec<_> = query::tcx_programs(ifindex, side).into_iter().map(|on| on.program).collect();
    if let Some(at) = tcx.iter().position(|id| ours.contains(id)) {
        return tcx[..at].iter().copied().filter(is_theirs).collect();
    }
    let filters = Netlink::open().and_then(|mut netlink| netlink.filters(ifindex, side.clsact()));
    let filters: Vec<_> = filters.unwrap_or_default().into_iter().map(|f| f.program).collect();
    let is_ours = |program: &Option<u32>| program.is_some_and(|id| ours.contains(&id));
    let Some(at) = filters.iter().position(is_ours) else { return Vec::new() };
    let before = filters[..at].iter().copied().flatten();
    tcx.iter().copied().chain(before).filter(is_theirs).collect()
}

/// Whether a filter has a priority and the handle that those of limits have.
pub(crate) fn is_our_place(filter: &Filter) -> bool {
    let all = [PRIORITIES, PRIORITIES_BEFORE, PRIORITIES_MATCHED].concat();
    let priority = u32::from(filter.priority);
    let is_ours = all.contains(&priority) || priority == PRIORITY_REDIRECTED;
    is_ours && filter.handle == Handle::new(0, HANDLE as u16)
}

/// Our filters on a device of this namespace, each with its side and the id of its program.
fn our_filters(netlink: &mut Netlink, ifindex: u32) -> Vec<(Side, u32, Filter)> {
    let on = |side: Side| {
        let filters = netlink.filters(ifindex, side.clsact()).unwrap_or_default().into_iter();
        let ours = filters.filter(is_our_place);
        ours.filter_map(move |filter| Some((side, filter.program?, filter)))
    };
    [Side::In, Side::Out].into_iter().flat_map(on).collect()
}

/// The priority of a filter that is known by its program alone.
fn priority_of(ifindex: u32, side: Side, program: BorrowedFd<'_>) -> Option<u32> {
    let wanted = Program::id_from_fd(program).ok()?;
    let mut filters = our_filters(&mut Netlink::open().ok()?, ifindex).into_iter();
    let (_, _, filter) = filters.find(|(on, id, _)| (*on, *id) == (side, wanted))?;
    Some(filter.priority.into())
}

/// Takes filters off where they are these programs', and clsact if it came with them and nobody else uses it.
fn remove_filters<'a>(
    ifindex: u32,
    owns_clsact: bool,
    programs: impl Iterator<Item = (Side, BorrowedFd<'a>)>,
) {
    let ids = programs.filter_map(|(side, fd)| Some((side, Program::id_from_fd(fd).ok()?)));
    let ids: Vec<_> = ids.collect();
    remove_filters_where(ifindex, |side, id| ids.contains(&(side, id)));
    if owns_clsact {
        remove_unused_clsact(ifindex);
    }
}

fn remove_filters_where(ifindex: u32, is_wanted: impl Fn(Side, u32) -> bool) {
    let Ok(mut netlink) = Netlink::open() else { return };
    for (side, id, filter) in our_filters(&mut netlink, ifindex) {
        if is_wanted(side, id) {
            let _ = netlink.delete_filter(ifindex, side.clsact(), &filter);
        }
    }
}

/// The ids of the programs of our filters on a device of this namespace.
pub(crate) fn filters(ifindex: u32) -> Vec<u32> {
    let filters = Netlink::open().map(|mut netlink| our_filters(&mut netlink, ifindex));
    filters.unwrap_or_default().into_iter().map(|(_, id, _)| id).collect()
}

/// Removes our filters from a device, but for those whose program's id stays.
pub(crate) fn remove_filters_but(ifindex: u32, stays: impl Fn(u32) -> bool) {
    remove_filters_where(ifindex, |_, id| !stays(id));
}

/// Whether a device has the qdisc clsact.
pub(crate) fn has_clsact(ifindex: u32) -> bool {
    let qdiscs = Netlink::open().and_then(|mut netlink| netlink.qdisc_stats(ifindex));
    qdiscs.is_ok_and(|qdiscs| qdiscs.iter().any(|qdisc| qdisc.kind == "clsact"))
}

/// Whether a device has clsact, and no filter is there.
pub(crate) fn has_unused_clsact(netlink: &mut Netlink, ifindex: u32) -> bool {
    let mut is_free = |side: Side| {
        netlink.filters(ifindex, side.clsact()).is_ok_and(|filters| filters.is_empty())
    };
    has_clsact(ifindex) && is_free(Side::In) && is_free(Side::Out)
}

/// Removes clsact from a device if no filter is there.
pub(crate) fn remove_unused_clsact(ifindex: u32) {
    let Ok(mut netlink) = Netlink::open() else { return };
    if has_unused_clsact(&mut netlink, ifindex) {
        let _ = netlink.delete_qdisc(ifindex, Handle::CLSACT);
    }
}

/// The names, among those of a limit's links, whose program is on the device no more.
pub(crate) fn unhooked(
    dir: &Path,
    limit: &intf::Limit,
    names: &[&'static str],
) -> Vec<&'static str> {
    let is_hooked = |name: &&str| {
        if *name == XDP_PIN {
            let info = Link::open(dir.join(name)).and_then(|link| link.info());
            return matches!(info.map(|i| i.info), Ok(LinkTypeInfo::Xdp(x)) if x.ifindex == limit.ifindex);
        }
        let Some((direction, _, pin)) = HOOKS.iter().find(|(_, link, _)| link == name) else {
            return true;
        };
        let next = format!("{pin}{NEXT}");
        let mut programs = [*pin, &next]
            .into_iter()
            .filter_map(|pin| Program::fd_from_pinned_path(dir.join(pin)).ok())
            .peekable();
        if programs.peek().is_some() {
            let side = Side::of(*direction, limit.flags & intf::FLAG_PORT != 0);
            return programs.any(|p| priority_of(limit.ifindex, side, p.as_fd()).is_some());
        }
        let info = Link::open(dir.join(name)).and_then(|link| link.info());
        matches!(info.map(|i| i.info), Ok(LinkTypeInfo::Tcx(t)) if t.ifindex == limit.ifindex)
    };
    names.iter().copied().filter(|name| !is_hooked(name)).collect()
}

/// Has the filter of a direction whose program is pinned in `dir` run another program: a packet meets one or
/// the other. False if no program of a filter is pinned there.
///
/// # Errors
/// [`LimitError::AttachDevice`]; the earlier one runs.
pub(crate) fn replace_filter(
    dir: &Path,
    limit: &intf::Limit,
    link: &str,
    program: BorrowedFd<'_>,
    redirected_to: Option<u32>,
) -> Result<bool, LimitError> {
    let Some((direction, _, pin)) = HOOKS.iter().find(|(_, name, _)| *name == link) else {
        return Ok(false);
    };
    let (pin, next) = (dir.join(pin), dir.join(format!("{pin}{NEXT}")));
    if !pin.exists() {
        return Ok(false);
    }
    let refused = |source| LimitError::AttachDevice { device: limit.ifindex.to_string(), source };
    let io_refused = |e: std::io::Error| refused(e.into());
    let side = Side::of(*direction, limit.flags & intf::FLAG_PORT != 0);
    let is_at = |pin: &Path| {
        let program = Program::fd_from_pinned_path(pin).ok()?;
        priority_of(limit.ifindex, side, program.as_fd())
    };
    // A writer that died may have been here.
    match is_at(&next) {
        Some(_) => fs::rename(&next, &pin).map_err(io_refused)?,
        None => drop(fs::remove_file(&next)),
    }
    let Some(priority) = is_at(&pin) else { return Ok(true) };
    query::pin(program, &next).map_err(io_refused)?;
    let done = match redirected_to {
        None => hook(program, limit.ifindex, side, priority)
            .replace(true)
            .attach()
            .map(drop)
            .map_err(refused),
        Some(to) => add_redirect(program, limit.ifindex, side, priority, to, Verb::Replace),
    };
    if done.is_err() {
        let _ = fs::remove_file(&next);
        return done.map(|()| true);
    }
    fs::rename(&next, &pin).map(|()| true).map_err(io_refused)
}

/// Takes the filters off that are known by the programs pinned in `dir`, in the network namespace of the
/// device.
pub(crate) fn remove_pinned_filters(dir: &Path, limit: &intf::Limit) {
    remove_pinned_filters_of(dir, limit, &PROGRAM_PINS);
}

/// The same of some of the [`PROGRAM_PINS`].
pub(crate) fn remove_pinned_filters_of(dir: &Path, limit: &intf::Limit, pins: &[&str]) {
    let is_port = limit.flags & intf::FLAG_PORT != 0;
    let programs: Vec<_> = HOOKS
        .iter()
        .filter(|(_, _, pin)| pins.contains(pin))
        .filter_map(|(direction, _, pin)| {
            let program = Program::fd_from_pinned_path(dir.join(pin)).ok()?;
            Some((Side::of(*direction, is_port), program))
        })
        .collect();
    if programs.is_empty() {
        return;
    }
    let owns_clsact = fs::symlink_metadata(dir.join(CLSACT_MARK)).is_ok();
    let _ = in_namespace(limit.cgroup_id, || {
        let programs = programs.iter().map(|(side, program)| (*side, program.as_fd()));
        remove_filters(limit.ifindex, owns_clsact, programs);
    });
}

/// Whether the device of a limit is there: in this network namespace, of this name and index.
pub(crate) fn is_there(scope: &Scope, limit: &intf::Limit) -> bool {
    Target::find(scope)
        .is_ok_and(|target| target.ifindex == limit.ifindex && target.namespace == limit.cgroup_id)
}
