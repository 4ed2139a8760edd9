//! Tells that devices of a network namespace have come, gone or changed.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use netlink_sys::{Socket, protocols::NETLINK_ROUTE};

use super::NetError;

/// Messages that one look takes; the rest is for the next one.
const READS_MAX: usize = 1024;

/// A socket on which the kernel tells of devices.
#[derive(Debug)]
pub struct DeviceChanges(Socket);

impl DeviceChanges {
    /// Follows the namespace of the calling thread, from now on.
    ///
    /// # Errors
    /// [`NetError::Refused`] when the kernel gives no socket.
    pub fn open() -> Result<DeviceChanges, NetError> {
        let refused = |e: io::Error| NetError::refused("follow the devices", e);
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(refused)?;
        socket.set_non_blocking(true).map_err(refused)?;
        socket.bind_auto().map_err(refused)?;
        socket.add_membership(libc::RTNLGRP_LINK).map_err(refused)?;
        Ok(DeviceChanges(socket))
    }

    /// Readable when there is a change.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Takes the changes; true if there was one. Which one it was is not read: messages are lost when many
    /// come at once, so whoever asks has to look at the devices anyway.
    pub fn take(&self) -> bool {
        let mut any = false;
        for _ in 0..READS_MAX {
            // The rest of a message that does not fit is dropped.
            let mut start = [0; 16];
            match self.0.recv(&mut &mut start[..], 0) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // Some were lost.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => any = true,
                Err(_) => break,
                Ok(_) => any = true,
            }
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::NetNs;

    /// More changes than the kernel keeps for a socket of this size.
    const CHANGES_MAX: usize = 10_000;
    const KEPT_BYTES: usize = 16 << 10;

    /// Messages that the kernel has dropped, of all sockets of the namespace.
    fn dropped() -> u64 {
        let table = std::fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
        let drops = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(8));
        drops.map(|drops| drops.parse::<u64>().unwrap()).sum()
    }

    #[test]
    fn root_changes_that_are_lost_are_told() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_changes_that_are_lost_are_told: needs root");
            return;
        }
        let netns = NetNs::create(&format!("tidegate-changes-{}", std::process::id())).unwrap();
        let check = || {
            let mut netlink = netns.netlink().unwrap();
            let lo = netlink.index_of("lo").unwrap();
            let changes = DeviceChanges::open().unwrap();
            rustix::net::sockopt::set_socket_recv_buffer_size(changes.fd(), KEPT_BYTES).unwrap();
            assert!(!changes.take(), "nothing has changed");
            let change = |at: usize| netlink.set_up(lo, at.is_multiple_of(2)).unwrap();
            let mut at = (0..CHANGES_MAX).map(change);
            while dropped() == 0 {
                at.next().expect("some to be lost");
            }
            // The kernel says first that some are lost.
            assert!(changes.take());
            assert!(!changes.take(), "all was taken");
            at.next();
            assert!(changes.take(), "it goes on");
        };
        netns.run(check).unwrap();
    }
}
