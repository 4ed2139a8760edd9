//! The one setting of ethtool that is needed: whether a device may leave checksums unfinished.

use std::{io, os::fd::AsRawFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::{NetError, NetNs, link::check_name};

/// `ETHTOOL_STXCSUM`.
const SET_TX_CHECKSUM: u32 = 0x17;

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Sets whether the stack may leave checksums, and with them segmentation, to the device (`ethtool -K
/// DEVICE tx on|off`). A veth device passes such packets on as they are, and whoever reads its other end by
/// AF_XDP cannot know: switch it off there.
pub fn set_tx_offload(netns: &NetNs, device: &str, on: bool) -> Result<(), NetError> {
    check_name(device)?;
    let action = format!("switch the tx offload of device {device:?}");
    let refused = |e: io::Error| NetError::refused(&action, e);
    let open = || socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let socket = netns.run(open)?.map_err(|e| refused(e.into()))?;
    let mut value = Value { command: SET_TX_CHECKSUM, data: on.into() };
    // SAFETY: `ifreq` is integers and pointers, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.as_bytes()) {
        *to = *from as _;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the kernel reads `request` and the `ethtool_value` that it points to; both are alive.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &mut request) };
    if done < 0 { Err(refused(io::Error::last_os_error())) } else { Ok(()) }
}
