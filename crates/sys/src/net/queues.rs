//! How many receive queues a device has.

use std::{io, os::fd::AsRawFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::{NetError, NetNs, link::check_name};

/// `ETHTOOL_GCHANNELS`.
const GET_CHANNELS: u32 = 0x3c;

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

/// How many queues a device receives on (`ethtool -l DEVICE`); none if its driver does not say.
///
/// Errors: no such device.
pub fn rx_queues(netns: &NetNs, device: &str) -> Result<Option<u32>, NetError> {
    check_name(device)?;
    let action = format!("ask device {device:?} for its queues");
    let refused = |e: io::Error| NetError::refused(&action, e);
    let open = || socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let socket = netns.run(open)?.map_err(|e| refused(e.into()))?;
    let mut channels = Channels { command: GET_CHANNELS, ..Channels::default() };
    // SAFETY: `ifreq` is integers and pointers, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.as_bytes()) {
        *to = *from as _;
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: the kernel reads and writes `request` and the `ethtool_channels` that it points to; both live.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &mut request) } < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => Ok(None),
            _ => Err(refused(error)),
        };
    }
    Ok(Some(channels.rx + channels.combined).filter(|queues| *queues > 0))
}
