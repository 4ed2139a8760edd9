//! AF_XDP: a queue of a network device, past the host's stack.
//!
//! The UMEM is the pool's stock of small buffers, so a frame is written by the device (or, in copy mode, by
//! the kernel) into the buffer in which it stays until the device has sent it: the port copies nothing.
//! Only a frame from another pool or in a large buffer is copied on its way out.
//!
//! **The ports own the device.** Every frame, of whatever EtherType, comes to the port: ARP, neighbour
//! discovery, spanning tree and all. The host's own addresses on this device stop answering. A queue
//! without a port goes on to the host's stack, so open one port for each queue, or set the device to one
//! queue.
//!
//! What AF_XDP cannot do, and what becomes of it:
//! - Frames are at most [`XDP_FRAME_BYTES_MAX`] long, so a device with a larger MTU is refused; there is no
//!   multi-buffer.
//! - Segmentation and checksums are done here, in software, before a frame leaves: see [`crate::segment`].
//! - What arrives has no offload metadata. A veth peer leaves checksums unfinished, and nothing says so:
//!   switch that off on the peer (`ethtool -K DEVICE tx off`). Frames from a wire are always finished.
//! - poll(2) does not tell when the device is deleted. [`receive`](Port::receive) does, on one call in
//!   [`GONE_CHECK_EVERY`] that finds nothing: call it now and then on a quiet port too.

mod device;
mod rings;
mod umem;

use std::{
    collections::VecDeque,
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

pub use device::{XdpCopy, XdpDevice, XdpOptions};
use rings::{Consumer, Place, Producer};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send,
        socket_with, sockopt,
        xdp::{
            SocketAddrXdp, SocketAddrXdpFlags, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING,
            XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpDesc, XdpDescOptions,
            XdpOptionsFlags, XdpUmemReg, XdpUmemRegFlags,
        },
    },
};
use tidegate_sys::xdp::{XDP_QUEUES_MAX, XdpRedirect};
use umem::Umem;

use super::{Port, PortCounters, PortError, is_gone};
use crate::{
    buffer::{Class, SMALL_BUFFER_BYTES},
    checksum,
    packet::Packet,
    pool::PacketPool,
    segment::{self, SEGMENTS_MAX},
};

/// What the kernel keeps free before each frame that it receives, in bytes (`XDP_PACKET_HEADROOM`).
const HEADROOM_BYTES: usize = 256;
/// The longest frame, in bytes, without FCS.
pub const XDP_FRAME_BYTES_MAX: usize = SMALL_BUFFER_BYTES - HEADROOM_BYTES;
/// Fewest and most entries of a ring.
const RING_FRAMES: std::ops::RangeInclusive<u32> = 64..=32_768;
/// The kernel is asked whether the device still exists on one in so many receives that find nothing.
pub const GONE_CHECK_EVERY: u32 = 8;
/// Most system calls to get the kernel to take the transmit ring; it takes 32 frames in each.
const KICKS_MAX: u32 = 64;

/// One queue of an [`XdpDevice`].
pub struct XdpPort {
    name: String,
    /// Before `umem`: fields are dropped in order, and buffers must not come home while the kernel has
    /// them.
    socket: OwnedFd,
    umem: Umem,
    fill: Producer<u64>,
    completion: Consumer<u64>,
    rx: Consumer<XdpDesc>,
    tx: Producer<XdpDesc>,
    /// Room for the segments of one frame.
    segments: VecDeque<Packet>,
    ring_frames: u32,
    idle_receives: u32,
    counters: PortCounters,
    /// Keeps the program on the device.
    _redirect: Arc<XdpRedirect>,
}

impl XdpPort {
    fn open(
        device: &XdpDevice,
        queue: u32,
        ring_frames: u32,
        pool: &mut PacketPool,
    ) -> Result<Self, PortError> {
        let name = format!("{}/{queue}", device.name);
        let invalid = |field, read: u32, expected| PortError::Invalid {
            port: name.clone(),
            field,
            read: read.to_string(),
            expected,
        };
        if !RING_FRAMES.contains(&ring_frames) || !ring_frames.is_power_of_two() {
            let expected = "use a power of two from 64 to 32768";
            return Err(invalid("the number of frames in a ring", ring_frames, expected));
        }
        if queue >= XDP_QUEUES_MAX {
            return Err(invalid("the queue", queue, "use 0 to 255"));
        }
        let mut umem = Umem::of(pool).ok_or_else(|| {
            invalid(
                "the number of free small buffers",
                0,
                "use a larger pool, or drop packets first",
            )
        })?;
        let refused = |action| {
            let port = name.clone();
            move |e: Errno| PortError::Refused { port, action, source: e.into() }
        };
        let open = || socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None);
        let socket = device.netns.run(open)?.map_err(refused("open an AF_XDP socket"))?;
        let (memory, memory_bytes) = pool.small_memory();
        let register = || {
            sockopt::set_xdp_umem_reg(
                &socket,
                XdpUmemReg {
                    addr: memory.as_ptr().expose_provenance() as u64,
                    len: memory_bytes as u64,
                    chunk_size: SMALL_BUFFER_BYTES as u32,
                    headroom: 0,
                    flags: XdpUmemRegFlags::empty(),
                    tx_metadata_len: 0,
                },
            )?;
            sockopt::set_xdp_umem_fill_ring_size(&socket, ring_frames)?;
            sockopt::set_xdp_umem_completion_ring_size(&socket, ring_frames)?;
            sockopt::set_xdp_rx_ring_size(&socket, ring_frames)?;
            sockopt::set_xdp_tx_ring_size(&socket, ring_frames)
        };
        register().map_err(refused("give the packet memory to AF_XDP"))?;
        let layout = sockopt::xdp_mmap_offsets(&socket).map_err(refused("map the AF_XDP rings"))?;
        let place = |page_offset, layout| Place {
            socket: socket.as_fd(),
            page_offset,
            layout,
            size: ring_frames,
        };
        let map = || {
            // SAFETY: addresses are u64 and descriptors are numbers; each ring is mapped once.
            Ok(unsafe {
                (
                    Producer::map(place(XDP_UMEM_PGOFF_FILL_RING, &layout.fr))?,
                    Consumer::map(place(XDP_UMEM_PGOFF_COMPLETION_RING, &layout.cr))?,
                    Consumer::map(place(XDP_PGOFF_RX_RING, &layout.rx))?,
                    Producer::map(place(XDP_PGOFF_TX_RING, &layout.tx))?,
                )
            })
        };
        let (fill, completion, rx, tx) = map().map_err(refused("map the AF_XDP rings"))?;
        let flags = SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP
            | match device.options.copy {
                XdpCopy::Auto => SocketAddrXdpFlags::empty(),
                XdpCopy::ZeroCopy => SocketAddrXdpFlags::XDP_ZEROCOPY,
                XdpCopy::Copy => SocketAddrXdpFlags::XDP_COPY,
            };
        bind(&socket, &SocketAddrXdp::new(flags, device.redirect.ifindex(), queue))
            .map_err(refused("bind the AF_XDP socket (is there such a queue, and is it free?)"))?;
        let options =
            sockopt::xdp_options(&socket).map_err(refused("ask how frames are copied"))?;
        umem.zero_copy = options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY);
        let mut port = Self {
            name: name.clone(),
            socket,
            umem,
            fill,
            completion,
            rx,
            tx,
            segments: VecDeque::with_capacity(SEGMENTS_MAX.min(ring_frames) as usize),
            ring_frames,
            idle_receives: 0,
            counters: PortCounters::default(),
            _redirect: Arc::clone(&device.redirect),
        };
        // Frames must find buffers from the first one on.
        port.refill(pool);
        device.redirect.add_socket(queue, port.socket.as_fd())?;
        Ok(port)
    }

    /// The device's name and the queue.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn gone(&self) -> PortError {
        PortError::Gone { port: self.name.clone() }
    }

    fn check(&self, pool: &PacketPool) -> Result<(), PortError> {
        if self.umem.is_of(pool) {
            return Ok(());
        }
        Err(PortError::Invalid {
            port: self.name.clone(),
            field: "the pool",
            read: "another one".into(),
            expected: "use the pool that the AF_XDP port was opened with",
        })
    }

    /// Lends the kernel buffers to receive into, as many as it has places for.
    fn refill(&mut self, pool: &mut PacketPool) {
        let room = self.fill.room(self.ring_frames);
        let mut lent = 0;
        while lent < room {
            let Some(packet) = pool.take_class(Class::Small) else { break };
            let Ok(address) = self.umem.lend(packet) else { break };
            self.fill.push(address);
            lent += 1;
        }
        if lent > 0 {
            self.fill.publish();
        } else if room == self.ring_frames {
            self.counters.rx_no_buffer += 1;
        }
    }

    /// Takes back what was sent.
    fn reap(&mut self, pool: &mut PacketPool) {
        let mut reaped = false;
        while let Some(address) = self.completion.pop() {
            reaped = true;
            if let Some(packet) = self.umem.take_back(address) {
                pool.recycle(packet);
            }
        }
        if reaped {
            self.completion.release();
        }
    }

    /// Gets the kernel to look at the transmit ring, if it wants a call for that.
    fn kick(&mut self) -> Result<(), PortError> {
        let mut pending = self.tx.pending();
        for _ in 0..KICKS_MAX {
            if pending == 0 || !self.tx.needs_wakeup() {
                break;
            }
            match send(&self.socket, &[], SendFlags::DONTWAIT) {
                Err(e) if is_gone(e) => return Err(self.gone()),
                // In copy mode `EAGAIN` may mean that there is more to take.
                Ok(_) | Err(_) => {}
            }
            let rest = self.tx.pending();
            if rest >= pending {
                break;
            }
            pending = rest;
        }
        Ok(())
    }

    /// Hands one frame, which is not to be cut, to the transmit ring, in which there is room. What cannot
    /// be sent now comes back; what can never be sent is counted.
    fn push(&mut self, mut packet: Packet, pool: &mut PacketPool) -> Result<(), Packet> {
        if packet.vnet().needs_checksum() {
            let (start, offset) = (packet.vnet().csum_start, packet.vnet().csum_offset);
            if !checksum::complete(packet.frame_mut(), start.into(), offset.into()) {
                self.counters.tx_drop_refused += 1;
                return Ok(());
            }
            *packet.vnet_mut() = Default::default();
        }
        let bytes = packet.frame().len();
        if bytes > SMALL_BUFFER_BYTES {
            self.counters.tx_drop_too_long += 1;
            return Ok(());
        }
        let address = match self.umem.lend(packet) {
            Ok(address) => address,
            Err(foreign) => {
                let Some(copy) = pool.packet(foreign.frame()) else { return Err(foreign) };
                let Ok(address) = self.umem.lend(copy) else { return Err(foreign) };
                address
            }
        };
        let options = XdpDescOptions::empty();
        self.tx.push(XdpDesc { addr: address, len: bytes as u32, options });
        self.counters.sent(bytes as u64);
        Ok(())
    }

    /// Cuts a frame and hands all of its segments to the transmit ring, or none. False: not now.
    fn push_segments(&mut self, packet: &Packet, pool: &mut PacketPool) -> bool {
        let segments = packet.segments();
        if segments > SEGMENTS_MAX.min(self.ring_frames) {
            self.counters.tx_drop_offload += 1;
            return true;
        }
        if self.tx.room(segments) < segments {
            return false;
        }
        match segment::cut(packet, pool, &mut self.segments) {
            Ok(()) => {}
            Err(segment::CutError::NoBuffer) => return false,
            Err(segment::CutError::TooLong) => {
                self.counters.tx_drop_too_long += 1;
                return true;
            }
            Err(segment::CutError::Unknown) => {
                self.counters.tx_drop_offload += 1;
                return true;
            }
        }
        let before = self.counters;
        while let Some(segment) = self.segments.pop_front() {
            // They are of this UMEM, finished, and there is room.
            let _ = self.push(segment, pool);
        }
        self.counters = before;
        self.counters.sent(packet.wire_bytes());
        true
    }
}

impl Port for XdpPort {
    fn receive(
        &mut self,
        pool: &mut PacketPool,
        frames: &mut Vec<Packet>,
        max: usize,
    ) -> Result<usize, PortError> {
        self.check(pool)?;
        self.reap(pool);
        let before = frames.len();
        while frames.len() - before < max
            && let Some(arrived) = self.rx.pop()
        {
            // The kernel names what was lent to it, and a place within; else there is nothing to be had.
            let Some(mut packet) = self.umem.take_back(arrived.addr) else { continue };
            let start = arrived.addr as usize % SMALL_BUFFER_BYTES;
            if packet.set_place(start, arrived.len as usize) {
                self.counters.received(&packet);
                frames.push(packet);
            } else {
                self.counters.rx_drop_malformed += 1;
            }
        }
        let received = frames.len() - before;
        self.rx.release();
        self.refill(pool);
        self.kick()?;
        if received > 0 {
            self.idle_receives = 0;
            return Ok(received);
        }
        self.idle_receives = self.idle_receives.wrapping_add(1);
        // A driver that wants a call for new buffers gets it here.
        if (self.umem.zero_copy && self.fill.needs_wakeup())
            || self.idle_receives.is_multiple_of(GONE_CHECK_EVERY)
        {
            match recv(&self.socket, &mut [0u8; 0][..], RecvFlags::DONTWAIT) {
                Err(e) if is_gone(e) => return Err(self.gone()),
                // Nothing there, or the device is down for now.
                Ok(_) | Err(_) => {}
            }
        }
        Ok(0)
    }

    fn transmit(
        &mut self,
        frames: &mut VecDeque<Packet>,
        pool: &mut PacketPool,
    ) -> Result<usize, PortError> {
        self.check(pool)?;
        self.reap(pool);
        let mut left = 0;
        while let Some(packet) = frames.pop_front() {
            let back = if packet.vnet().segmentation().is_some() {
                if self.push_segments(&packet, pool) {
                    pool.recycle(packet);
                    Ok(())
                } else {
                    Err(packet)
                }
            } else if self.tx.room(1) == 0 {
                Err(packet)
            } else {
                self.push(packet, pool)
            };
            if let Err(packet) = back {
                frames.push_front(packet);
                self.counters.tx_full += 1;
                break;
            }
            left += 1;
        }
        self.tx.publish();
        self.kick()?;
        self.reap(pool);
        Ok(left)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn counters(&self) -> PortCounters {
        let mut counters = self.counters;
        if let Ok(kernel) = sockopt::xdp_statistics(&self.socket) {
            counters.rx_drop_kernel = kernel.rx_dropped + kernel.rx_ring_full.unwrap_or(0);
        }
        counters
    }
}

impl fmt::Debug for XdpPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XdpPort").field("name", &self.name).finish_non_exhaustive()
    }
}
