//! TAP devices: what a virtual machine or a container behind a bridge sends and receives.
//!
//! With offloads (the usual case) the kernel hands over TCP and UDP segments of up to 64 KB whole, their
//! checksums still to be computed, and takes them so: [`VnetHeader`] says what is to be done, and travels
//! with the packet. Without, the kernel cuts and sums before it hands over; what is written may still have
//! metadata. The names of directions are the port's: what the port *transmits* the kernel's stack receives.
//!
//! A frame that is not read stays in the device's queue (`txqueuelen`); when that is full, the kernel holds
//! or drops. A read takes the frame into a small and a large buffer at once: a frame that fits the small
//! one costs no copy, a long one a copy of the first 2 KB.

use std::{
    collections::VecDeque,
    ffi::{c_int, c_uint, c_ulong},
    fs::OpenOptions,
    io::{self, IoSlice, IoSliceMut},
    mem,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
};

use rustix::io::{Errno, readv, writev};
use tidegate_sys::net::NetNs;

use super::{Port, PortCounters, PortError, is_full, is_gone};
use crate::{buffer::Class, packet::Packet, pool::PacketPool, vnet::VnetHeader};

/// Most queues of a device: the kernel's `MAX_TAP_QUEUES`.
pub const TAP_QUEUES_MAX: usize = 256;

/// Whether the device is to be made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TapOrigin {
    /// Make it; an error if it exists. It goes with the last port, unless `persistent`.
    #[default]
    Create,
    /// Attach to one that exists, such as a persistent one made for a virtual machine; an error if not.
    Existing,
}

/// What a TAP port is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapOptions {
    /// The device's name. A `%d` in it is replaced by the first free number (with [`TapOrigin::Create`]).
    pub name: String,
    /// Whether the device is to be made.
    pub origin: TapOrigin,
    /// The device stays when the last port is dropped. Never set back on a device that exists.
    pub persistent: bool,
    /// The device takes several ports, one a queue; flows are spread over them. Must be as the device was
    /// made.
    pub multi_queue: bool,
    /// Take segments whole and checksums unfinished. Without, the kernel hands over frames of MTU size.
    pub offloads: bool,
}

impl TapOptions {
    /// A device of this name, made for one port, with offloads.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            origin: TapOrigin::Create,
            persistent: false,
            multi_queue: false,
            offloads: true,
        }
    }
}

/// One queue of a TAP device.
#[derive(Debug)]
pub struct TapPort {
    fd: OwnedFd,
    name: String,
    offloads: u32,
    counters: PortCounters,
}

impl TapPort {
    /// Opens a port on a device in `netns`. The port works from any namespace. A device that was made is
    /// down and has no address.
    ///
    /// Errors: the device exists, or does not; it is in use by another program; it was made with another
    /// number of queues; no right to (CAP_NET_ADMIN) or no `/dev/net/tun`.
    pub fn open(netns: &NetNs, options: &TapOptions) -> Result<Self, PortError> {
        let refused = |action| {
            move |source: io::Error| PortError::Refused {
                port: options.name.clone(),
                action,
                source: hint(source),
            }
        };
        if options.origin == TapOrigin::Existing {
            netns.netlink()?.index_of(&options.name)?;
        }
        let mut request = interface_request(options)?;
        // The device's namespace is that of the thread that opens the file.
        let open = || {
            let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
            OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/net/tun")
        };
        let fd = OwnedFd::from(netns.run(open)?.map_err(refused("open /dev/net/tun"))?);
        ioctl_pointer(&fd, libc::TUNSETIFF, &mut request)
            .map_err(refused("open the TAP device"))?;
        let name = text(&request.ifr_name);
        let mut port = Self { fd, name, offloads: 0, counters: PortCounters::default() };
        let mut header_bytes = VnetHeader::BYTES as c_int;
        ioctl_pointer(&port.fd, libc::TUNSETVNETHDRSZ, &mut header_bytes)
            .map_err(refused("set the length of the TAP device's offload header"))?;
        port.offloads = set_offloads(&port.fd, options.offloads)
            .map_err(refused("set the offloads of the TAP device"))?;
        if options.persistent {
            ioctl_value(&port.fd, libc::TUNSETPERSIST, 1)
                .map_err(refused("make the TAP device persistent"))?;
        }
        Ok(port)
    }

    /// Opens one port for each of `queues` queues of a device; more than one need
    /// [`multi_queue`](TapOptions::multi_queue), which is then assumed.
    pub fn open_queues(
        netns: &NetNs,
        options: &TapOptions,
        queues: usize,
    ) -> Result<Vec<Self>, PortError> {
        if !(1..=TAP_QUEUES_MAX).contains(&queues) {
            return Err(PortError::Invalid {
                port: options.name.clone(),
                field: "the number of queues",
                read: queues.to_string(),
                expected: "use 1 to 256",
            });
        }
        let mut options = options.clone();
        options.multi_queue |= queues > 1;
        let mut ports = Vec::with_capacity(queues);
        for _ in 0..queues {
            let port = Self::open(netns, &options)?;
            options.name.clone_from(&port.name);
            options.origin = TapOrigin::Existing;
            ports.push(port);
        }
        Ok(ports)
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True if the kernel hands over TCP segments whole.
    pub fn takes_segments(&self) -> bool {
        self.offloads & libc::TUN_F_TSO4 != 0
    }

    fn gone(&self) -> PortError {
        PortError::Gone { port: self.name.clone() }
    }

    /// A device that is down refuses with the error of one that was deleted; only the latter has forgotten
    /// us.
    fn is_deleted(&self) -> bool {
        let mut request = empty_request();
        ioctl_pointer(&self.fd, libc::TUNGETIFF, &mut request).is_err()
    }
}

impl Port for TapPort {
    fn receive(
        &mut self,
        pool: &mut PacketPool,
        frames: &mut Vec<Packet>,
        max: usize,
    ) -> Result<usize, PortError> {
        let before = frames.len();
        let done = self.receive_into(pool, frames, max);
        done.map(|()| frames.len() - before)
    }

    fn transmit(
        &mut self,
        frames: &mut VecDeque<Packet>,
        pool: &mut PacketPool,
    ) -> Result<usize, PortError> {
        let mut left = 0;
        while let Some(packet) = frames.front() {
            let header = bytemuck::bytes_of(packet.vnet());
            match writev(&self.fd, &[IoSlice::new(header), IoSlice::new(packet.frame())]) {
                Ok(_) => self.counters.sent(packet.wire_bytes()),
                Err(Errno::INTR) => continue,
                Err(e) if is_full(e) => {
                    self.counters.tx_full += 1;
                    break;
                }
                Err(e) if is_gone(e) => return Err(self.gone()),
                Err(Errno::IO) if self.is_deleted() => return Err(self.gone()),
                Err(Errno::IO) => self.counters.tx_drop_down += 1,
                Err(_) => self.counters.tx_drop_refused += 1,
            }
            if let Some(packet) = frames.pop_front() {
                pool.recycle(packet);
            }
            left += 1;
        }
        Ok(left)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }
}

impl TapPort {
    fn receive_into(
        &mut self,
        pool: &mut PacketPool,
        frames: &mut Vec<Packet>,
        max: usize,
    ) -> Result<(), PortError> {
        let wants_large = pool.size().large > 0;
        // Without large buffers, one more byte than fits tells a frame that is too long.
        let mut excess = [0; 1];
        let mut large = None;
        for _ in 0..max {
            let Some(mut small) = pool.take_class(Class::Small) else {
                self.counters.rx_no_buffer += 1;
                break;
            };
            if large.is_none() && wants_large {
                large = pool.take_class(Class::Large);
                if large.is_none() {
                    self.counters.rx_no_buffer += 1;
                    break;
                }
            }
            let room_bytes = small.room_mut().len();
            let rest = match &mut large {
                // The first part is copied here if it must be.
                Some(large) => &mut large.room_mut()[room_bytes..],
                None => &mut excess[..],
            };
            let mut header = [0; VnetHeader::BYTES];
            let read = loop {
                let mut parts = [
                    IoSliceMut::new(&mut header),
                    IoSliceMut::new(small.room_mut()),
                    IoSliceMut::new(&mut *rest),
                ];
                match readv(&self.fd, &mut parts) {
                    Err(Errno::INTR) => {}
                    read => break read,
                }
            };
            let bytes = match read {
                Ok(bytes) => bytes,
                Err(e) if is_full(e) => {
                    pool.recycle(small);
                    break;
                }
                Err(e) if is_gone(e) => return Err(self.gone()),
                Err(_) if self.is_deleted() => return Err(self.gone()),
                Err(e) => {
                    let (port, action) = (self.name.clone(), "read from the TAP device");
                    return Err(PortError::Refused { port, action, source: e.into() });
                }
            };
            let Some(frame_bytes) = bytes.checked_sub(VnetHeader::BYTES) else {
                self.counters.rx_drop_malformed += 1;
                continue;
            };
            let mut packet = if frame_bytes <= room_bytes {
                small
            } else if let Some(mut large) = large.take() {
                large.room_mut()[..room_bytes].copy_from_slice(small.room_mut());
                pool.recycle(small);
                large
            } else {
                self.counters.rx_drop_too_long += 1;
                continue;
            };
            packet.set_len(frame_bytes);
            *packet.vnet_mut() = bytemuck::pod_read_unaligned(&header);
            self.counters.received(&packet);
            frames.push(packet);
        }
        if let Some(large) = large {
            pool.recycle(large);
        }
        Ok(())
    }
}

fn interface_request(options: &TapOptions) -> Result<libc::ifreq, PortError> {
    let name = options.name.as_bytes();
    let mut request = empty_request();
    // The last byte stays zero.
    let fits = !name.is_empty() && name.len() < request.ifr_name.len();
    if !fits || name.iter().any(|b| b"/: \0".contains(b)) {
        return Err(PortError::Invalid {
            port: options.name.clone(),
            field: "the name of the TAP device",
            read: format!("{:?}", options.name),
            expected: "use 1 to 15 bytes without space, slash or colon",
        });
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = *from as _;
    }
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if options.multi_queue {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    if options.origin == TapOrigin::Create {
        flags |= libc::IFF_TUN_EXCL;
    }
    // The kernel reads the 16 bits as unsigned.
    request.ifr_ifru.ifru_flags = flags as i16;
    Ok(request)
}

fn empty_request() -> libc::ifreq {
    // SAFETY: `ifreq` is integers and pointers, for which all zeros is a value.
    unsafe { mem::zeroed() }
}

/// Asks for the most that the kernel has; returns what it took.
fn set_offloads(fd: &OwnedFd, wanted: bool) -> io::Result<c_uint> {
    const TCP: c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    const TCP_ECN: c_uint = TCP | libc::TUN_F_TSO_ECN;
    const UDP: c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let choices: &[c_uint] = if wanted { &[TCP_ECN | UDP, TCP_ECN, TCP] } else { &[0] };
    let mut result = Ok(0);
    for &choice in choices {
        result = ioctl_value(fd, libc::TUNSETOFFLOAD, choice.into()).map(|()| choice);
        if result.is_ok() {
            break;
        }
    }
    result
}

fn ioctl_pointer<T>(fd: &impl AsRawFd, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: each request in this file takes a pointer to what it is called with, alive for the call.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn ioctl_value(fd: &OwnedFd, request: libc::Ioctl, value: c_ulong) -> io::Result<()> {
    // SAFETY: each request in this file takes the value itself.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request, value) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The device's name, up to its final zero.
fn text(name: &[libc::c_char]) -> String {
    let bytes: Vec<u8> = name.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Says what to do about the errors that a user meets.
fn hint(error: io::Error) -> io::Error {
    let hint = match error.raw_os_error() {
        Some(libc::EBUSY) => "it exists already, or another program has it open",
        Some(libc::EINVAL) => {
            "it is no TAP device, or one of one queue where several are wanted, or the reverse; set \
             multi_queue as it was made (with `tidegate nic`: --shapers above 1)"
        }
        Some(libc::EPERM | libc::EACCES) => "run as root: this needs CAP_NET_ADMIN",
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            "the kernel lacks TUN, or /dev/net/tun is missing"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error} ({hint})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_before_the_kernel_sees_them() {
        for name in ["", "sixteen-bytes-ab", "a b", "a/b", "a:b", "a\0"] {
            assert!(interface_request(&TapOptions::new(name)).is_err(), "{name:?}");
        }
        let request = interface_request(&TapOptions::new("tap%d")).unwrap();
        assert_eq!(text(&request.ifr_name), "tap%d");
    }

    #[test]
    fn queues_are_bounded() {
        let here = NetNs::current().unwrap();
        for queues in [0, TAP_QUEUES_MAX + 1] {
            let error = TapPort::open_queues(&here, &TapOptions::new("tap0"), queues).unwrap_err();
            assert!(error.to_string().contains("use 1 to 256"), "{error}");
        }
    }
}
