//! TCP congestion controls by name: the kernel's own, DCTCP for kernels that have none, and giving one to
//! a cgroup.
//!
//! [`ensure`] resolves a name. `dctcp` is the kernel's where it has the module and else our struct_ops
//! program (`bpf/congestion/dctcp.bpf.c`), registered as [`TG_DCTCP`]. [`attach_to_cgroup`] makes a control
//! the default of the sockets of one cgroup (`bpf/congestion/set_cc.bpf.c`), which no sysctl can: those hold
//! for a whole network namespace.
//!
//! # How long a struct_ops congestion control lives
//!
//! Tried on kernel 6.18; the tests `root_*` repeat it.
//!
//! - The registration is a BPF link. It is gone when its last file descriptor is closed, so also when the
//!   process is killed.
//! - Sockets that use the control at that time keep it, and a listener still hands it to the sockets it
//!   accepts: each socket holds a reference to the programs, which are freed with the last one. No
//!   connection breaks; but nobody can choose the name any more.
//! - So a parent that exits leaves nothing registered, whatever its children do. Their open sockets go
//!   on with DCTCP; what they open later gets the namespace's default.
//! - The name may be registered anew while sockets still use the old programs.
//!
//! One process registers, the others join: they find its link and take a descriptor of their own, so the
//! registration lasts until the last of them ends, in any order. Nothing is pinned.
//!
//! Kernels before 6.4 have no such link: there a registration belongs to nobody and outlives a process
//! that is killed. Such kernels as distributed have the `dctcp` module, which comes first;
//! [`remove_leftover`] is for the rest.
//!
//! # ECN
//!
//! DCTCP needs ECN from the handshake on, at both ends. Both directions of a connection work when both
//! ends' cgroups are attached. If only one is, an attached client meets a listener that refuses ECN to a
//! SYN with ECT, and an attached listener a client that does not ask: the connection runs Reno without ECN.

use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::btf::{Btf, types::Struct};
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{ErrorKind, Link, MapCore, MapHandle, MapType, OpenObject};
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::{
    links::{self, On},
    skel,
};

/// The name under which our DCTCP is registered.
pub const TG_DCTCP: &str = "tg_dctcp";
/// The kernel's DCTCP.
const DCTCP: &str = "dctcp";
/// The controls with TCP_CONG_NEEDS_ECN; the kernel does not tell.
const NEEDS_ECN: [&str; 2] = [DCTCP, TG_DCTCP];

/// Room for a name in the kernel, with the NUL that ends it (TCP_CA_NAME_MAX).
const NAME_MAX: usize = 16;
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";
/// BPF_F_LINK: the struct_ops map is registered through a link.
const BPF_F_LINK: u32 = 1 << 13;
/// How often [`ensure`] looks again when others register and leave at the same time.
const JOIN_TRIES: u32 = 16;

/// Why a congestion control cannot be had. Nothing is left registered or attached.
#[derive(Debug, thiserror::Error)]
pub enum CongestionError {
    #[error("no congestion control `{name}` here; use one of: {available}")]
    Unknown {
        name: String,
        /// What there is, separated by blanks.
        available: String,
    },
    #[error(
        "congestion control `{name}` is restricted; run as root, or add it to \
         net.ipv4.tcp_allowed_congestion_control"
    )]
    Restricted { name: String },
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    #[error(
        "cannot {what}: {source}; run as root on a kernel 6.1 or newer with BTF \
         (check /sys/kernel/btf/vmlinux)"
    )]
    Bpf { what: &'static str, source: libbpf_rs::Error },
    /// Other processes registered and left at every try.
    #[error("`{TG_DCTCP}` was registered and removed by other processes at every try; try again")]
    Contended,
}

/// A congestion control that sockets can choose by [`CongestionControl::name`] while this lives.
#[derive(Debug)]
pub struct CongestionControl {
    name: String,
    registration: Registration,
}

/// What keeps a control registered.
#[derive(Debug)]
enum Registration {
    /// The kernel, or a process before kernel 6.4.
    Others,
    /// A link, until its last descriptor is closed.
    Link { _link: OwnedFd },
    /// This map, before kernel 6.4; removed on drop.
    Map(MapHandle),
}

impl CongestionControl {
    /// The name that TCP_CONGESTION takes; for `dctcp` this is `dctcp` or [`TG_DCTCP`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is kept registered by this process (perhaps among others) rather than by the kernel.
    pub fn is_ours(&self) -> bool {
        !matches!(self.registration, Registration::Others)
    }
}

impl Drop for CongestionControl {
    fn drop(&mut self) {
        if let Registration::Map(map) = &self.registration {
            // The one failure is that somebody else has removed it.
            let _ = map.delete(&0u32.to_ne_bytes());
        }
    }
}

/// Makes the congestion control `name` available, and says under which name.
///
/// The kernel loads its module if it has one. `dctcp` falls back on our own, and [`TG_DCTCP`] asks for it.
///
/// # Errors
/// [`CongestionError`]; for a name that nobody knows it lists those that are known.
pub fn ensure(name: &str) -> Result<CongestionControl, CongestionError> {
    if name != TG_DCTCP && selectable(name)? {
        return Ok(CongestionControl { name: name.to_owned(), registration: Registration::Others });
    }
    match name {
        DCTCP | TG_DCTCP => ensure_ours(),
        _ => Err(CongestionError::Unknown { name: name.to_owned(), available: available()? }),
    }
}

/// Removes a registration that a killed process left behind; only kernels before 6.4 allow that to be.
/// Returns whether there was one.
///
/// # Errors
/// [`CongestionError`] when the kernel's maps cannot be listed or changed.
pub fn remove_leftover() -> Result<bool, CongestionError> {
    if links_exist()? || !is_available(TG_DCTCP)? {
        return Ok(false);
    }
    remove_maps()
}

/// Unregisters whatever is registered through a map of our name.
fn remove_maps() -> Result<bool, CongestionError> {
    let mut removed = false;
    for info in MapInfoIter::default() {
        if info.ty == MapType::StructOps && info.name == TG_DCTCP {
            let map = MapHandle::from_map_id(info.id);
            let map = map.map_err(|e| bpf_error("open the struct_ops map", e))?;
            removed |= map.delete(&0u32.to_ne_bytes()).is_ok();
        }
    }
    Ok(removed)
}

/// The names in tcp_available_congestion_control and, if need be, ours; separated by blanks.
fn available() -> Result<String, CongestionError> {
    let list = read_available()?;
    let mut names: Vec<_> = list.split_whitespace().filter(|n| *n != TG_DCTCP).collect();
    if !names.contains(&DCTCP) {
        names.push(DCTCP);
    }
    Ok(names.join(" "))
}

fn is_available(name: &str) -> Result<bool, CongestionError> {
    Ok(read_available()?.split_whitespace().any(|n| n == name))
}

fn read_available() -> Result<String, CongestionError> {
    let what = "read /proc/sys/net/ipv4/tcp_available_congestion_control";
    fs::read_to_string(AVAILABLE).map_err(|source| CongestionError::System { what, source })
}

/// Whether a socket takes the name; for root the kernel loads the module on the way.
fn selectable(name: &str) -> Result<bool, CongestionError> {
    if name.is_empty() || name.len() >= NAME_MAX || name.contains('\0') {
        return Ok(false);
    }
    let system =
        |what| move |e: rustix::io::Errno| CongestionError::System { what, source: e.into() };
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)
        .map_err(system("open a TCP socket"))?;
    match sockopt::set_tcp_congestion(&socket, name) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::NOENT) => Ok(false),
        Err(rustix::io::Errno::PERM) => Err(CongestionError::Restricted { name: name.to_owned() }),
        Err(e) => Err(system("set TCP_CONGESTION")(e)),
    }
}

fn bpf_error(what: &'static str, source: libbpf_rs::Error) -> CongestionError {
    CongestionError::Bpf { what, source }
}

/// Whether this kernel registers struct_ops through links (6.4).
fn links_exist() -> Result<bool, CongestionError> {
    let btf = Btf::from_vmlinux().map_err(|e| bpf_error("read the kernel's BTF", e))?;
    Ok(btf.type_by_name::<Struct<'_>>("bpf_struct_ops_link").is_some())
}

/// Joins the registration of our DCTCP, or begins it.
fn ensure_ours() -> Result<CongestionControl, CongestionError> {
    let with_link = links_exist()?;
    for _ in 0..JOIN_TRIES {
        if let Some(registration) = join(with_link)? {
            return Ok(CongestionControl { name: TG_DCTCP.to_owned(), registration });
        }
        if let Some(registration) = register(with_link)? {
            return Ok(CongestionControl { name: TG_DCTCP.to_owned(), registration });
        }
    }
    Err(CongestionError::Contended)
}

/// Takes part in a registration of another process.
fn join(with_link: bool) -> Result<Option<Registration>, CongestionError> {
    if !with_link {
        return Ok(is_available(TG_DCTCP)?.then_some(Registration::Others));
    }
    let ours = links::all().find(|link| match link.on {
        // Whatever cannot be opened any more has just ended.
        On::StructOps { map } => {
            MapHandle::from_map_id(map).is_ok_and(|map| map.name() == TG_DCTCP)
        }
        _ => false,
    });
    Ok(ours.map(|link| Registration::Link { _link: link.into_fd() }))
}

/// Loads and registers our DCTCP; `None` when another process was faster.
fn register(with_link: bool) -> Result<Option<Registration>, CongestionError> {
    let mut storage = MaybeUninit::<OpenObject>::uninit();
    let open = skel::dctcp::DctcpSkelBuilder::default().open(&mut storage);
    let mut open = open.map_err(|e| bpf_error("open the DCTCP programs", e))?;
    if !with_link {
        let flags = open.maps.tg_dctcp.map_flags() & !BPF_F_LINK;
        let set = open.maps.tg_dctcp.set_map_flags(flags);
        set.map_err(|e| bpf_error("prepare the DCTCP programs", e))?;
    }
    let mut loaded = open.load().map_err(|e| bpf_error("load the DCTCP programs", e))?;
    let mut link = match loaded.maps.tg_dctcp.attach_struct_ops() {
        Ok(link) => link,
        Err(e) if e.kind() == ErrorKind::AlreadyExists => return Ok(None),
        Err(e) => return Err(bpf_error("register the DCTCP programs", e)),
    };
    if with_link {
        let link = link.as_fd().try_clone_to_owned();
        let what = "keep the registration of DCTCP";
        let link = link.map_err(|source| CongestionError::System { what, source })?;
        return Ok(Some(Registration::Link { _link: link }));
    }
    let map = MapHandle::try_from(&loaded.maps.tg_dctcp);
    let map = map.map_err(|e| bpf_error("keep the registration of DCTCP", e))?;
    // From here on the handle's owner unregisters.
    link.disconnect();
    Ok(Some(Registration::Map(map)))
}

/// A cgroup whose TCP sockets begin with a congestion control; ends when dropped. Sockets that have it
/// keep it.
#[derive(Debug)]
pub struct CgroupCongestion {
    _links: [Link; 3],
}

/// Makes `name` the default congestion control of TCP sockets in the cgroup and those below it, from
/// their next connect(2), listen(2) or accepted connection on.
///
/// A program's own choice (TCP_CONGESTION) stands. `name` is what [`CongestionControl::name`] says, and
/// that guard must live as long: without it new sockets silently keep the default.
///
/// # Errors
/// [`CongestionError`]: the name does not exist, or the kernel refused the programs. No program stays
/// attached.
pub fn attach_to_cgroup(
    cgroup: BorrowedFd<'_>,
    name: &str,
) -> Result<CgroupCongestion, CongestionError> {
    if !selectable(name)? {
        let available = read_available()?.trim().to_owned();
        return Err(CongestionError::Unknown { name: name.to_owned(), available });
    }
    let mut storage = MaybeUninit::<OpenObject>::uninit();
    let open = skel::set_cc::SetCcSkelBuilder::default().open(&mut storage);
    let mut open = open.map_err(|e| bpf_error("open the set_cc programs", e))?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        // `selectable` has bounded the length.
        for (to, from) in rodata.cc.iter_mut().zip(name.bytes()) {
            *to = from as _;
        }
        rodata.needs_ecn = NEEDS_ECN.contains(&name);
    }
    let loaded = open.load().map_err(|e| bpf_error("load the set_cc programs", e))?;
    let attach = |program: &libbpf_rs::ProgramMut<'_>| {
        let link = program.attach_cgroup(cgroup.as_raw_fd());
        link.map_err(|e| bpf_error("attach the set_cc programs to the cgroup", e))
    };
    let progs = &loaded.progs;
    let links =
        [attach(&progs.set_cc)?, attach(&progs.set_cc_connect4)?, attach(&progs.set_cc_connect6)?];
    Ok(CgroupCongestion { _links: links })
}

#[cfg(test)]
mod tests;
