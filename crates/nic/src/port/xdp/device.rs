//! The device of AF_XDP ports, and how it is opened.

use std::sync::Arc;

use tidegate_sys::{
    net::NetNs,
    xdp::{XdpMode, XdpRedirect},
};

use super::{XDP_FRAME_BYTES_MAX, XdpPort};
use crate::{headers::ETHERNET_BYTES, pool::PacketPool, port::PortError};

/// Bytes of one VLAN tag, which the MTU does not count.
const VLAN_TAG_BYTES: usize = 4;

/// How an AF_XDP device is to be opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct XdpOptions {
    /// Where the program runs; none: in the driver if it can.
    pub mode: Option<XdpMode>,
    /// How frames get from the device into the UMEM.
    pub copy: XdpCopy,
}

/// How frames get from the device into the UMEM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum XdpCopy {
    /// The device writes them there if the driver can, else the kernel copies.
    #[default]
    Auto,
    /// The device writes them there, or the port is an error.
    ZeroCopy,
    /// The kernel copies.
    Copy,
}

/// A device that gives its frames to AF_XDP ports, while it or a port of it lives.
#[derive(Debug)]
pub struct XdpDevice {
    pub(super) redirect: Arc<XdpRedirect>,
    pub(super) netns: NetNs,
    pub(super) name: String,
    pub(super) options: XdpOptions,
}

impl XdpDevice {
    /// Attaches to the device `name` of `netns`.
    ///
    /// Errors: no such device; its packets have no Ethernet header; its MTU is too large; it has an XDP
    /// program already.
    pub fn open(netns: &NetNs, name: &str, options: XdpOptions) -> Result<Self, PortError> {
        let mut netlink = netns.netlink()?;
        let index = netlink.index_of(name)?;
        if !netlink.is_ethernet(index)? {
            return Err(PortError::Invalid {
                port: name.into(),
                field: "the type of the AF_XDP device",
                read: "without Ethernet's header".to_owned(),
                expected: "use a device that carries Ethernet",
            });
        }
        let mtu = netlink.mtu(index)? as usize;
        if mtu + ETHERNET_BYTES + VLAN_TAG_BYTES > XDP_FRAME_BYTES_MAX {
            return Err(PortError::Invalid {
                port: name.into(),
                field: "the MTU of the AF_XDP device",
                read: mtu.to_string(),
                expected: "set it to 1774 bytes or less",
            });
        }
        let redirect = Arc::new(XdpRedirect::attach(netns, name, options.mode)?);
        Ok(Self { redirect, netns: netns.try_clone()?, name: name.into(), options })
    }

    /// Where the program runs.
    pub fn mode(&self) -> XdpMode {
        self.redirect.mode()
    }

    /// Opens the port of a queue. Its UMEM is the stock of small buffers of `pool`, which must be the pool
    /// that the port is used with. The port lends the kernel up to `2 * ring_frames` of them to receive
    /// into (and as many as the device has descriptors), and `ring_frames` while they are being sent.
    ///
    /// Errors: `ring_frames` is no power of two from 64 to 32768; the queue does not exist or has a socket
    /// already; zero copy was demanded and the driver cannot; memory may not be locked.
    pub fn port(
        &self,
        queue: u32,
        ring_frames: u32,
        pool: &mut PacketPool,
    ) -> Result<XdpPort, PortError> {
        XdpPort::open(self, queue, ring_frames, pool)
    }
}
