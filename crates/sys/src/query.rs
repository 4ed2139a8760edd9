//! What programs sit on a cgroup or device, ours and others', and what libbpf-rs does not say of them.

use std::{
    ffi::CString,
    io, mem,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use libbpf_rs::{Program, libbpf_sys};
use tidegate_core::{Direction, scheme::SCHEMES};

use crate::{
    cgroup::{Cgroup, Hierarchy},
    net::qdisc::Handle,
};

/// The attach types that a limit uses.
const ATTACH_TYPES: [(libbpf_sys::bpf_attach_type, &str); 3] = [
    (libbpf_sys::BPF_CGROUP_INET_EGRESS, "egress"),
    (libbpf_sys::BPF_CGROUP_INET_INGRESS, "ingress"),
    (libbpf_sys::BPF_CGROUP_SOCK_OPS, "sock_ops"),
];

/// The programs of a gate for packets.
pub(crate) const GATE_PROGRAMS: [&str; 2] = ["gate_out", "gate_in"];

/// The loopback device's index, in every network namespace.
const LOOPBACK: u32 = 1;

/// Programs that one query reads at most.
const MAX_PROGRAMS: usize = 64;

/// Who keeps a cgroup, or one above it, for itself alone, in words; `None` if nobody does.
pub(crate) fn exclusive_holder(cgroup: &Cgroup) -> Option<String> {
    let hierarchy = Hierarchy::find().ok()?;
    let mut path = cgroup.path().to_owned();
    loop {
        let group = hierarchy.open(&path).ok()?;
        for (attach_type, name) in ATTACH_TYPES {
            if let Some(id) = exclusive_program(&group, attach_type) {
                let shown = if path.is_empty() { "the root cgroup" } else { &path };
                let title =
                    program_name(id).map_or_else(String::new, |name| format!(" (`{name}`)"));
                return Some(format!(
                    "program {id}{title} holds the {name} hook of {shown} exclusively"
                ));
            }
        }
        if path.is_empty() {
            return None;
        }
        path = path.rsplit_once('/').map_or_else(String::new, |(parent, _)| parent.to_owned());
    }
}

/// What the program calls itself, cut to 15 bytes by the kernel; `None` if it has no name, or has gone.
pub(crate) fn program_name(id: u32) -> Option<String> {
    let program = Program::fd_from_id(id).ok()?;
    // SAFETY: the struct is integers and arrays of them, for which all zeros is a value.
    let mut info: libbpf_sys::bpf_prog_info = unsafe { mem::zeroed() };
    let mut len = size_of_val(&info) as u32;
    // SAFETY: the descriptor is open, and `info` has `len` bytes; both outlive the call.
    let ret = unsafe {
        libbpf_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &raw mut info, &raw mut len)
    };
    let name = info.name.iter().take_while(|c| **c != 0).map(|c| char::from(*c as u8));
    Some(name.collect()).filter(|name: &String| ret == 0 && !name.is_empty())
}

/// Of the traffic of a device, as the host sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// What leaves by it.
    Out,
    In,
}

impl Side {
    pub(crate) fn of(direction: Direction, is_port: bool) -> Side {
        if (direction == Direction::Egress) == is_port { Side::In } else { Side::Out }
    }

    /// Where its filters hang from.
    pub(crate) fn clsact(self) -> Handle {
        if self == Side::In { Handle::CLSACT_INGRESS } else { Handle::CLSACT_EGRESS }
    }
}

/// Whether a program of this name is one of a limit's on a device.
pub(crate) fn is_on_devices(name: &str) -> bool {
    SCHEMES.iter().any(|info| info.device_programs.contains(&name))
}

/// The same on a cgroup. The gate is the agent's.
pub(crate) fn is_on_cgroups(name: &str) -> bool {
    GATE_PROGRAMS.contains(&name) || SCHEMES.iter().any(|info| info.cgroup_programs.contains(&name))
}

/// The same of a program by the kernel's id.
pub(crate) fn is_of_ours(program: u32) -> bool {
    program_name(program).is_some_and(|name| is_on_devices(&name))
}

/// A program on a side of a device, where tcx is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OnSide {
    /// The kernel's id of the program.
    pub(crate) program: u32,
    /// That of its link; 0 if it is attached without one.
    pub(crate) link: u32,
}

/// The tcx programs on a side of a device of the calling thread's namespace, in the order in which packets
/// meet them; none where the kernel has no tcx (before 6.6).
pub(crate) fn tcx_programs(ifindex: u32, side: Side) -> Vec<OnSide> {
    ask_tcx(ifindex, side).unwrap_or_default()
}

/// Whether the kernel has tcx; it cannot be asked without CAP_NET_ADMIN.
pub(crate) fn has_tcx() -> bool {
    ask_tcx(LOOPBACK, Side::In).is_some()
}

fn ask_tcx(ifindex: u32, side: Side) -> Option<Vec<OnSide>> {
    let hook = match side {
        Side::In => libbpf_sys::BPF_TCX_INGRESS,
        Side::Out => libbpf_sys::BPF_TCX_EGRESS,
    };
    let (mut programs, mut links) = ([0u32; MAX_PROGRAMS], [0u32; MAX_PROGRAMS]);
    let mut query = libbpf_sys::bpf_prog_query_opts {
        sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as _,
        prog_ids: programs.as_mut_ptr(),
        link_ids: links.as_mut_ptr(),
        ..Default::default()
    };
    query.__bindgen_anon_1.count = MAX_PROGRAMS as u32;
    // SAFETY: the struct says its own size, and both arrays have room for as many entries as it says; all
    // outlive the call.
    let ret = unsafe { libbpf_sys::bpf_prog_query_opts(ifindex as i32, hook, &raw mut query) };
    if ret != 0 {
        return None;
    }
    // SAFETY: both members of the union are the same number.
    let count = unsafe { query.__bindgen_anon_1.count } as usize;
    let found = programs.into_iter().zip(links).take(count);
    Some(found.map(|(program, link)| OnSide { program, link }).collect())
}

/// Takes a link off at once, whoever holds it.
pub(crate) fn detach_link(id: u32) -> io::Result<()> {
    let of = |ret: i32| if ret < 0 { Err(io::Error::from_raw_os_error(-ret)) } else { Ok(ret) };
    // SAFETY: a system call with a number, which returns a new descriptor or an error.
    let fd = of(unsafe { libbpf_sys::bpf_link_get_fd_by_id(id) })?;
    // SAFETY: a new descriptor that nobody else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the descriptor is open.
    of(unsafe { libbpf_sys::bpf_link_detach(fd.as_raw_fd()) }).map(drop)
}

/// The programs attached to a cgroup itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OnHook {
    /// The kernel's ids of them, in the order in which it runs them.
    pub(crate) programs: Vec<u32>,
    /// Others may be attached beside them.
    pub(crate) multi: bool,
}

/// Those of each hook that a limit uses, with its name.
///
/// # Errors
/// What the kernel says: `EPERM`, or `EINVAL` if it has no such hook.
pub(crate) fn on_cgroup(cgroup: &Cgroup) -> io::Result<Vec<(&'static str, OnHook)>> {
    ATTACH_TYPES.into_iter().map(|(hook, name)| Ok((name, on_hook(cgroup, hook)?))).collect()
}

/// The programs at the hook of a limit's link, in the order in which the kernel runs them.
///
/// # Errors
/// As [`on_cgroup`].
pub(crate) fn in_order(cgroup: &Cgroup, link: &str) -> io::Result<Vec<u32>> {
    Ok(on_hook(cgroup, hook_of(link))?.programs)
}

/// The hook of a limit's link.
pub(crate) fn hook_of(link: &str) -> libbpf_sys::bpf_attach_type {
    match link {
        "egress" => libbpf_sys::BPF_CGROUP_INET_EGRESS,
        "ingress" => libbpf_sys::BPF_CGROUP_INET_INGRESS,
        _ => libbpf_sys::BPF_CGROUP_SOCK_OPS,
    }
}

/// The first program attached here without BPF_F_ALLOW_MULTI.
fn exclusive_program(cgroup: &Cgroup, hook: libbpf_sys::bpf_attach_type) -> Option<u32> {
    let on_hook = on_hook(cgroup, hook).ok().filter(|on_hook| !on_hook.multi)?;
    on_hook.programs.first().copied()
}

fn on_hook(cgroup: &Cgroup, hook: libbpf_sys::bpf_attach_type) -> io::Result<OnHook> {
    let mut ids = [0u32; MAX_PROGRAMS];
    let mut count = MAX_PROGRAMS as u32;
    let mut flags = 0u32;
    // SAFETY: the descriptor is open; `ids` has room for the `count` entries that the kernel may write, and
    // all pointers outlive the call.
    let ret = unsafe {
        libbpf_sys::bpf_prog_query(
            cgroup.as_fd().as_raw_fd(),
            hook,
            0,
            &raw mut flags,
            ids.as_mut_ptr(),
            &raw mut count,
        )
    };
    if ret < 0 {
        return Err(io::Error::from_raw_os_error(-ret));
    }
    let multi = flags & libbpf_sys::BPF_F_ALLOW_MULTI != 0;
    let programs = ids.into_iter().take(count as usize).filter(|id| *id != 0).collect();
    Ok(OnHook { programs, multi })
}

/// Pins a program, or a link, of which only the descriptor is left.
pub(crate) fn pin(held: impl AsFd, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the descriptor is open and the path ends with a zero; both outlive the call.
    let ret = unsafe { libbpf_sys::bpf_obj_pin(held.as_fd().as_raw_fd(), path.as_ptr()) };
    if ret == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-ret)) }
}
