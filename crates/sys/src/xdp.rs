//! XDP on a device: which programs are there, and one that takes its frames from the host's stack and gives
//! them to AF_XDP sockets.
//!
//! The program of [`XdpRedirect`] sends **every** frame, of whatever EtherType, to the socket of the queue on
//! which it arrived: ARP, neighbour discovery, spanning tree and all. The host's stack no longer hears the
//! device: its addresses there stop answering. It sits on the device through a link that the kernel removes
//! with the last descriptor, so nothing is left behind, also when the process is killed.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, libbpf_sys,
    skel::{OpenSkel, SkelBuilder},
};

use crate::{
    net::{NetError, NetNs},
    skel,
};

/// Most queues of a device that can have a socket.
pub const XDP_QUEUES_MAX: u32 = 256;

/// Where the program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver, before the kernel makes a packet buffer.
    Native,
    /// In the stack: works with every device, and costs a copy.
    Generic,
}

impl XdpMode {
    pub fn name(self) -> &'static str {
        match self {
            XdpMode::Native => "native",
            XdpMode::Generic => "generic",
        }
    }
}

/// Why a device's frames cannot be taken. Nothing is attached.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    #[error("cannot {action}: {source} (this needs root and Linux 6.1 or newer with AF_XDP)")]
    Bpf {
        /// What was asked, as a phrase that follows "cannot".
        action: &'static str,
        source: libbpf_rs::Error,
    },
    #[error("cannot attach XDP to {device}: {source}{hint}")]
    Attach {
        device: String,
        source: io::Error,
        /// What to do, in parentheses; may be empty.
        hint: &'static str,
    },
    #[error(transparent)]
    Net(#[from] NetError),
}

/// A device whose frames go to AF_XDP sockets while this value lives.
#[derive(Debug)]
pub struct XdpRedirect {
    /// Holding it keeps the program on the device.
    _link: OwnedFd,
    sockets: MapHandle,
    ifindex: u32,
    mode: XdpMode,
}

impl XdpRedirect {
    /// Attaches the program to the device `ifname` of `netns`. With no `mode`: in the driver if it can,
    /// else in the stack. Frames go on to the host's stack until [`add_socket`](Self::add_socket).
    ///
    /// Errors: among others, if the device has an XDP program already.
    pub fn attach(netns: &NetNs, ifname: &str, mode: Option<XdpMode>) -> Result<Self, XdpError> {
        let refused = |action| move |source| XdpError::Bpf { action, source };
        let ifindex = netns.netlink()?.index_of(ifname)?;
        let mut object = MaybeUninit::uninit();
        let open = skel::xdp_port::XdpPortSkelBuilder::default()
            .open(&mut object)
            .map_err(refused("open the XDP program"))?;
        let loaded = open.load().map_err(refused("load the XDP program"))?;
        let sockets = MapHandle::try_from(&loaded.maps.xdp_sockets)
            .map_err(refused("keep the XDP program's map"))?;
        let program = loaded.progs.xdp_port.as_fd();

        let linked = netns.run(|| match mode {
            None => link_in_any(program, ifindex),
            Some(mode) => link(program, ifindex, mode).map(|link| (link, mode)),
        })?;
        let refusal = match linked {
            Ok((link, mode)) => return Ok(Self { _link: link, sockets, ifindex, mode }),
            Err(e) => e,
        };
        let hint = match refusal.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => {
                " (it has an XDP program: `ip link set dev DEVICE xdp off` removes one without owner)"
            }
            Some(libc::EPERM) => " (run as root: this needs CAP_NET_ADMIN and CAP_BPF)",
            Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ERANGE) => {
                " (the driver cannot, with this MTU or these offloads: try the generic mode)"
            }
            _ => "",
        };
        Err(XdpError::Attach { device: ifname.into(), source: refusal, hint })
    }

    /// Sends the frames of a queue to a bound AF_XDP socket. The kernel forgets it when it is closed.
    ///
    /// Errors: the queue is [`XDP_QUEUES_MAX`] or more, or the descriptor is no AF_XDP socket.
    pub fn add_socket(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), XdpError> {
        self.sockets
            .update(&queue.to_ne_bytes(), &socket.as_raw_fd().to_ne_bytes(), MapFlags::ANY)
            .map_err(|source| XdpError::Bpf { action: "give the queue to the socket", source })
    }

    /// The device's index in its namespace.
    pub fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// Where the program runs.
    pub fn mode(&self) -> XdpMode {
        self.mode
    }
}

/// A program that is on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OnDevice {
    /// The kernel's id of it.
    pub(crate) program: u32,
    /// `None`: in the hardware.
    pub(crate) mode: Option<XdpMode>,
}

/// The program on a device of the calling thread's namespace; `None` if there is none, or nobody can say.
pub(crate) fn on_device(ifindex: u32) -> Option<OnDevice> {
    let mut found = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as _,
        ..Default::default()
    };
    // SAFETY: the struct lives through the call and says its own size.
    let ret = unsafe { libbpf_sys::bpf_xdp_query(ifindex as i32, 0, &raw mut found) };
    let places = [
        (found.drv_prog_id, Some(XdpMode::Native)),
        (found.skb_prog_id, Some(XdpMode::Generic)),
        (found.hw_prog_id, None),
    ];
    let (program, mode) = places.into_iter().find(|(id, _)| ret == 0 && *id != 0)?;
    Some(OnDevice { program, mode })
}

/// Whether a device was refused because another program is there.
pub(crate) fn is_taken(refusal: &io::Error) -> bool {
    matches!(refusal.raw_os_error(), Some(libc::EBUSY | libc::EEXIST))
}

/// The same as [`link`] in the driver if it can, else in the stack.
pub(crate) fn link_in_any(program: BorrowedFd<'_>, ifindex: u32) -> io::Result<(OwnedFd, XdpMode)> {
    match link(program, ifindex, XdpMode::Native) {
        // Another mode would meet the same.
        Err(e) if is_taken(&e) || e.raw_os_error() == Some(libc::EPERM) => Err(e),
        Err(_) => link(program, ifindex, XdpMode::Generic).map(|link| (link, XdpMode::Generic)),
        Ok(link) => Ok((link, XdpMode::Native)),
    }
}

/// Puts the program on a device of the calling thread's namespace.
fn link(program: BorrowedFd<'_>, ifindex: u32, mode: XdpMode) -> io::Result<OwnedFd> {
    let flags = match mode {
        XdpMode::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
        XdpMode::Generic => libbpf_sys::XDP_FLAGS_SKB_MODE,
    };
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as _,
        flags,
        ..Default::default()
    };
    // SAFETY: the program's descriptor is open and `options` outlives the call.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(
            program.as_raw_fd(),
            ifindex as i32,
            libbpf_sys::BPF_XDP,
            &options,
        )
    };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
