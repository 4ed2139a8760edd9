//! What other programs sit on a cgroup, and what libbpf-rs does not say of ours.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use crate::cgroup::{Cgroup, Hierarchy};

/// The attach types that a limit uses.
const ATTACH_TYPES: [(libbpf_rs::libbpf_sys::bpf_attach_type, &str); 3] = [
    (libbpf_rs::libbpf_sys::BPF_CGROUP_INET_EGRESS, "egress"),
    (libbpf_rs::libbpf_sys::BPF_CGROUP_INET_INGRESS, "ingress"),
    (libbpf_rs::libbpf_sys::BPF_CGROUP_SOCK_OPS, "sock_ops"),
];

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

/// What the program calls itself, cut to 15 bytes by the kernel.
pub(crate) fn program_name(id: u32) -> Option<String> {
    let info = libbpf_rs::query::ProgInfoIter::default().find(|info| info.id == id)?;
    info.name.to_str().filter(|name| !name.is_empty()).map(str::to_owned)
}

/// The first program attached here without BPF_F_ALLOW_MULTI.
fn exclusive_program(
    cgroup: &Cgroup,
    attach_type: libbpf_rs::libbpf_sys::bpf_attach_type,
) -> Option<u32> {
    let mut ids = [0u32; MAX_PROGRAMS];
    let mut count = MAX_PROGRAMS as u32;
    let mut flags = 0u32;
    // SAFETY: the descriptor is open; `ids` has room for the `count` entries that the kernel may write, and
    // all pointers outlive the call.
    let ret = unsafe {
        libbpf_rs::libbpf_sys::bpf_prog_query(
            cgroup.as_fd().as_raw_fd(),
            attach_type,
            0,
            &raw mut flags,
            ids.as_mut_ptr(),
            &raw mut count,
        )
    };
    let multi = flags & libbpf_rs::libbpf_sys::BPF_F_ALLOW_MULTI != 0;
    (ret == 0 && count > 0 && !multi).then_some(ids[0])
}

/// Pins a program, or a link, of which only the descriptor is left.
pub(crate) fn pin(held: impl AsFd, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the descriptor is open and the path ends with a zero; both outlive the call.
    let ret =
        unsafe { libbpf_rs::libbpf_sys::bpf_obj_pin(held.as_fd().as_raw_fd(), path.as_ptr()) };
    if ret == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-ret)) }
}
