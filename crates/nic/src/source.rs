//! Where a port comes from: what a user calls it, and how it is opened, and opened again when its device
//! comes back.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use tidegate_sys::net::{NetNs, rx_queues};

use crate::{
    pool::PacketPool,
    port::{
        Port, PortError,
        tap::{TapOptions, TapOrigin, TapPort},
        xdp::{XdpDevice, XdpOptions},
    },
};

/// Frames in each ring of an AF_XDP port.
const XDP_RING_FRAMES: u32 = 512;
/// Small buffers that an AF_XDP port holds at most: two rings to receive, one to send.
const XDP_BUFFERS: u32 = 3 * XDP_RING_FRAMES;

/// Opens a port, again and again if need be.
pub trait PortSource: Send {
    /// As the user knows it.
    fn name(&self) -> &str;

    /// Opens it, for a thread whose packets are in `pool`.
    ///
    /// # Errors
    /// As the port has them; nothing is left behind.
    fn open(&mut self, pool: &mut PacketPool) -> Result<Box<dyn Port>, PortError>;

    /// How many small buffers of the pool it holds at most.
    fn buffers(&self) -> u32 {
        0
    }
}

/// Kinds of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// A TAP device: attached to if it exists, else made.
    Tap,
    /// A device that exists, by AF_XDP.
    Xdp,
}

impl DeviceKind {
    /// Every kind.
    pub const ALL: [DeviceKind; 2] = [DeviceKind::Tap, DeviceKind::Xdp];

    /// As a user writes it.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Tap => "tap",
            DeviceKind::Xdp => "xdp",
        }
    }
}

/// A port as a user writes it: `tap:vm0`, or `tap:eth0@blue` in the network namespace `blue`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PortName {
    /// What it is.
    pub kind: DeviceKind,
    /// The device.
    pub device: String,
    /// The network namespace by its name; none: that of this process.
    pub netns: Option<String>,
}

/// Why a text is no port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortNameError {
    /// No kind before the name.
    #[error("`{0}` has no kind of port; write `tap:{0}` or `xdp:{0}`")]
    NoKind(String),
    /// Another kind.
    #[error(
        "unknown kind of port `{0}`; write `tap:NAME` for a TAP device or `xdp:NAME` for a device that exists"
    )]
    Kind(String),
    /// No name.
    #[error("invalid device name in `{0}`: write 1 to 15 bytes without space, slash, colon or %")]
    Device(String),
    /// No name of a namespace.
    #[error("no network namespace after `@` in `{0}`; write for example `tap:eth0@blue`")]
    Netns(String),
}

impl FromStr for PortName {
    type Err = PortNameError;

    fn from_str(text: &str) -> Result<Self, PortNameError> {
        let (kind, rest) =
            text.split_once(':').ok_or_else(|| PortNameError::NoKind(text.to_owned()))?;
        let known = DeviceKind::ALL.into_iter().find(|known| known.name() == kind);
        let kind = known.ok_or_else(|| PortNameError::Kind(kind.to_owned()))?;
        let (device, netns) = match rest.split_once('@') {
            Some((device, netns)) => (device, Some(netns)),
            None => (rest, None),
        };
        PortName::new(kind, device, netns)
    }
}

impl PortName {
    /// A port of its parts.
    ///
    /// # Errors
    /// If a name cannot be one.
    pub fn new(
        kind: DeviceKind,
        device: &str,
        netns: Option<&str>,
    ) -> Result<PortName, PortNameError> {
        let odd = |c: char| c.is_whitespace() || c.is_control() || "/:%@".contains(c);
        let fits = (1..=15).contains(&device.len()) && ![".", ".."].contains(&device);
        if !fits || device.contains(odd) {
            return Err(PortNameError::Device(device.to_owned()));
        }
        let fits = |netns: &str| {
            (1..=255).contains(&netns.len())
                && !netns.contains(odd)
                && ![".", ".."].contains(&netns)
        };
        if let Some(netns) = netns.filter(|netns| !fits(netns)) {
            return Err(PortNameError::Netns(netns.to_owned()));
        }
        Ok(PortName { kind, device: device.to_owned(), netns: netns.map(str::to_owned) })
    }

    /// Sources of this port for so many threads, each of which has queues of its own.
    pub fn sources(&self, threads: u32, persistent: bool) -> Vec<DeviceSource> {
        let (made, xdp) = (AtomicBool::new(false), Mutex::new((0, Weak::new())));
        let device = Arc::new(Device { made, persistent, threads, xdp });
        let source = |queue| DeviceSource {
            name: self.clone(),
            queue,
            opened: false,
            xdp: None,
            device: Arc::clone(&device),
        };
        (0..threads).map(source).collect()
    }

    fn open_netns(&self) -> Result<NetNs, PortError> {
        let netns = self.netns.as_deref();
        Ok(netns.map_or_else(NetNs::current, NetNs::open)?)
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.device)?;
        self.netns.as_ref().map_or(Ok(()), |netns| write!(f, "@{netns}"))
    }
}

/// What the sources of one device share.
#[derive(Debug)]
struct Device {
    /// A TAP device that was made here is made again when somebody has deleted it.
    made: AtomicBool,
    persistent: bool,
    threads: u32,
    /// The AF_XDP device that the queues are of, by its index: one that was made again has another.
    xdp: Mutex<(u32, Weak<XdpDevice>)>,
}

/// One queue of a device.
#[derive(Debug)]
pub struct DeviceSource {
    name: PortName,
    queue: u32,
    /// It was there before.
    opened: bool,
    xdp: Option<Arc<XdpDevice>>,
    device: Arc<Device>,
}

impl PortSource for DeviceSource {
    fn name(&self) -> &str {
        &self.name.device
    }

    fn open(&mut self, pool: &mut PacketPool) -> Result<Box<dyn Port>, PortError> {
        let netns = self.name.open_netns()?;
        let port = match self.name.kind {
            DeviceKind::Tap => Box::new(self.open_tap(&netns)?) as Box<dyn Port>,
            DeviceKind::Xdp => self.open_xdp(&netns, pool)?,
        };
        self.opened = true;
        Ok(port)
    }

    fn buffers(&self) -> u32 {
        match self.name.kind {
            DeviceKind::Tap => 0,
            DeviceKind::Xdp => XDP_BUFFERS,
        }
    }
}

impl DeviceSource {
    fn open_tap(&self, netns: &NetNs) -> Result<TapPort, PortError> {
        let name = &self.name.device;
        let mut options = TapOptions {
            multi_queue: self.device.threads > 1,
            origin: TapOrigin::Existing,
            ..TapOptions::new(name)
        };
        let mut netlink = netns.netlink()?;
        if netlink.index_of(name).is_ok() {
            return TapPort::open(netns, &options);
        }
        if self.opened && !self.device.made.load(Ordering::Relaxed) {
            // Somebody else's: it is for them to make it again.
            return Err(PortError::Gone { port: name.clone() });
        }
        options.origin = TapOrigin::Create;
        options.persistent = self.device.persistent;
        let port = TapPort::open(netns, &options)?;
        self.device.made.store(true, Ordering::Relaxed);
        let index = netlink.index_of(name)?;
        netlink.set_up(index, true)?;
        Ok(port)
    }

    /// One thread takes one queue; a device with more would hand the rest to the host.
    fn open_xdp(
        &mut self,
        netns: &NetNs,
        pool: &mut PacketPool,
    ) -> Result<Box<dyn Port>, PortError> {
        let name = &self.name.device;
        let index = netns.netlink()?.index_of(name)?;
        let queues = rx_queues(netns, name)?.unwrap_or(1);
        if queues != self.device.threads {
            return Err(PortError::Invalid {
                port: name.clone(),
                field: "the number of its queues",
                read: queues.to_string(),
                expected: "run as many shapers as it has queues (--shapers), or set its queues (ethtool -L)",
            });
        }
        let mut shared = self.device.xdp.lock().unwrap_or_else(PoisonError::into_inner);
        let device = match shared.1.upgrade().filter(|_| shared.0 == index) {
            Some(device) => device,
            None => {
                // Ours alone may still hold the program of an attempt that failed.
                self.xdp = None;
                let device = Arc::new(XdpDevice::open(netns, name, XdpOptions::default())?);
                *shared = (index, Arc::downgrade(&device));
                device
            }
        };
        self.xdp = Some(Arc::clone(&device));
        Ok(Box::new(device.port(self.queue, XDP_RING_FRAMES, pool)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_read_as_they_are_written() {
        for text in ["tap:vm0", "xdp:eth1", "tap:eth0@blue"] {
            assert_eq!(text.parse::<PortName>().unwrap().to_string(), text);
        }
        let says = |text: &str| text.parse::<PortName>().unwrap_err().to_string();
        assert_eq!(says("vm0"), "`vm0` has no kind of port; write `tap:vm0` or `xdp:vm0`");
        assert!(says("veth:a").starts_with("unknown kind of port `veth`; write `tap:NAME`"));
        for text in ["tap:", "tap:a b", "tap:sixteen-bytes-ab", "tap:tap%d", "tap:..", "xdp:a/b"] {
            assert!(says(text).contains("invalid device name"), "{text}");
        }
        for text in ["tap:a@", "tap:a@b/c", "tap:a@b@c"] {
            assert!(says(text).contains("after `@`"), "{text}");
        }
    }
}
