//! The links of this host's eBPF programs.
//!
//! A walk that ends at the first link that cannot be opened, as that of `libbpf_rs::query` does, finds less
//! than there is while somebody else attaches a program: the kernel answers EAGAIN for a link that it is
//! about to make.

use std::{
    iter, mem,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use libbpf_rs::libbpf_sys::{
    BPF_LINK_TYPE_CGROUP, BPF_LINK_TYPE_STRUCT_OPS, BPF_LINK_TYPE_XDP, bpf_link_get_fd_by_id,
    bpf_link_get_info_by_fd, bpf_link_get_next_id, bpf_link_info,
};

/// The hook or object to which a link attaches its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    Cgroup {
        id: u64,
        /// One of `BPF_CGROUP_*`.
        attach_type: u32,
    },
    /// A table of functions, such as a congestion control.
    StructOps {
        map: u32,
    },
    Xdp,
    Other,
}

#[derive(Debug)]
pub struct Link {
    pub id: u32,
    /// The id of its program.
    pub program: u32,
    pub on: On,
    fd: OwnedFd,
}

impl Link {
    /// The link's descriptor. The link exists at least as long as this is open.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

/// All that can be opened now, by rising ids. None without the privileges for that.
pub fn all() -> impl Iterator<Item = Link> {
    let mut id = 0;
    let ids = iter::from_fn(move || {
        // SAFETY: the call takes a number and fills another one, which outlives it.
        (unsafe { bpf_link_get_next_id(id, &raw mut id) } == 0).then_some(id)
    });
    ids.filter_map(open)
}

/// `None` if the link is not made yet, or has gone.
fn open(id: u32) -> Option<Link> {
    // SAFETY: the call takes a number and returns a new descriptor or a negative error.
    let fd = unsafe { bpf_link_get_fd_by_id(id) };
    // SAFETY: the descriptor is new and nobody else's.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) }).and_then(of)
}

/// A link that is open.
fn of(fd: OwnedFd) -> Option<Link> {
    // SAFETY: the struct is integers and addresses, for which all zeros is a value.
    let mut info: bpf_link_info = unsafe { mem::zeroed() };
    let mut len = size_of::<bpf_link_info>() as u32;
    // SAFETY: the descriptor is open, and `info` has `len` bytes; both outlive the call.
    let ret =
        unsafe { bpf_link_get_info_by_fd(fd.as_fd().as_raw_fd(), &raw mut info, &raw mut len) };
    if ret != 0 {
        return None;
    }
    // SAFETY: the kernel has filled the member that belongs to the type; all are integers.
    let on = unsafe {
        match info.type_ {
            BPF_LINK_TYPE_CGROUP => {
                let on = info.__bindgen_anon_1.cgroup;
                On::Cgroup { id: on.cgroup_id, attach_type: on.attach_type }
            }
            BPF_LINK_TYPE_STRUCT_OPS => {
                On::StructOps { map: info.__bindgen_anon_1.struct_ops.map_id }
            }
            BPF_LINK_TYPE_XDP => On::Xdp,
            _ => On::Other,
        }
    };
    Some(Link { id: info.id, program: info.prog_id, on, fd })
}

#[cfg(test)]
mod tests;
