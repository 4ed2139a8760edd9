//! Where frames come from and go to.
//!
//! A [`Port`] moves frames between packets and a device, in batches, and never waits: a loop that has
//! nothing to do waits on [`Port::as_fd`] instead. It decides nothing: what it may not send stays with the
//! caller, what it cannot take in stays in the kernel's queue before it, where the sender notices.
//!
//! - [`tap`]: TAP devices, with whole segments.
//! - [`xdp`]: queues of network devices, past the host's stack.
//! - [`memory`]: pairs inside this process.
//! - [`sink`]: counts and discards.

pub mod memory;
pub mod sink;
pub mod tap;
pub mod xdp;

use std::{collections::VecDeque, io, os::fd::BorrowedFd};

use tidegate_sys::{net::NetError, xdp::XdpError};

use crate::{packet::Packet, pool::PacketPool};

/// Where frames come from and go to. See the [module](self).
pub trait Port: Send {
    /// Takes up to `max` frames that have arrived into packets of `pool` and appends them to `frames`.
    /// Returns how many. Fewer than `max`: no more are there, or the pool is empty.
    ///
    /// On error the frames that were appended before it stay appended.
    fn receive(
        &mut self,
        pool: &mut PacketPool,
        frames: &mut Vec<Packet>,
        max: usize,
    ) -> Result<usize, PortError>;

    /// Sends from the front of `frames` what the device takes now; the rest stays. Returns how many left
    /// the queue, among them those that the port had to drop (and counted): a frame never blocks those
    /// behind it for good. `pool` is the one that buffers are taken from if a frame must be copied.
    ///
    /// On error the frame at the front and all behind it stay.
    fn transmit(
        &mut self,
        frames: &mut VecDeque<Packet>,
        pool: &mut PacketPool,
    ) -> Result<usize, PortError>;

    /// What poll(2) can wait on: for arrivals (`POLLIN`), for room (`POLLOUT`), for the device's end
    /// (`POLLERR`, `POLLHUP`). None: the port must be asked.
    fn as_fd(&self) -> Option<BorrowedFd<'_>>;

    /// What happened since the port was opened.
    fn counters(&self) -> PortCounters;
}

/// Why a port does not work. Nothing transient is an error.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The device was deleted. The port is of no more use; a new one may be opened when there is a device
    /// again.
    #[error("the device of port {port} is gone")]
    Gone {
        /// The port's name.
        port: String,
    },
    /// The kernel refused for another reason.
    #[error("port {port}: cannot {action}: {source}")]
    Refused {
        /// The port's name.
        port: String,
        /// What was asked, as a phrase that follows "cannot".
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A namespace or a device could not be found.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A device does not give its frames to AF_XDP.
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// An option is out of range, or does not fit the device.
    #[error("port {port}: {field} is {read}: {expected}")]
    Invalid {
        /// The port's name.
        port: String,
        /// Which option.
        field: &'static str,
        /// What was given.
        read: String,
        /// What to give instead.
        expected: &'static str,
    },
}

impl PortError {
    /// True if the device was deleted.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}

/// What the kernel says when the device behind a descriptor is no more.
fn is_gone(error: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(error, Errno::BADFD | Errno::NXIO | Errno::NODEV)
}

/// What the kernel says when it has no room at the moment.
fn is_full(error: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(error, Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM | Errno::BUSY)
}

crate::counters::counter_table! {
    /// What happened at a port since it was opened. Direction is the port's: `rx` came in from the
    /// device, `tx` went out to it. A segment that stays whole is one frame; its `wire_bytes` are those
    /// of all its segments.
    PortCounters, PortCounter:
    rx_frames: "frames that came in",
    rx_wire_bytes: "their bytes on the wire",
    rx_no_buffer: "times that receiving stopped because the pool was empty; the frames wait in the kernel",
    rx_drop_too_long: "frames dropped on arrival: longer than any buffer of the pool",
    rx_drop_malformed: "frames dropped on arrival: shorter than their headers",
    rx_drop_kernel: "frames that the kernel dropped before the port: its queue was full or its buffers short",
    tx_frames: "frames that the device took",
    tx_wire_bytes: "their bytes on the wire",
    tx_full: "times that sending stopped because the device was full",
    tx_drop_down: "frames dropped on departure: the device is down",
    tx_drop_refused: "frames dropped on departure: the device refused their form",
    tx_drop_too_long: "frames dropped on departure: longer than the device can send",
    tx_drop_offload: "frames dropped on departure: to be segmented in a way that the device does not know",
}

impl PortCounters {
    fn received(&mut self, packet: &Packet) {
        self.rx_frames += 1;
        self.rx_wire_bytes += packet.wire_bytes();
    }

    fn sent(&mut self, wire_bytes: u64) {
        self.tx_frames += 1;
        self.tx_wire_bytes += wire_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_counter_once() {
        let bytes = size_of::<PortCounters>();
        assert_eq!(PortCounters::TABLE.len() * size_of::<u64>(), bytes);
        let counters = PortCounters { tx_full: 7, ..PortCounters::default() };
        let named = PortCounters::TABLE.iter().find(|c| c.name == "tx_full").unwrap();
        assert_eq!((named.value)(&counters), 7);
    }
}
