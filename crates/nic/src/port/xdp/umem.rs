//! The pool's small buffers as AF_XDP's UMEM, and which of them the kernel has.

use std::ptr::NonNull;

use crate::{
    buffer::{Class, Head, SMALL_BUFFER_BYTES},
    packet::Packet,
    pool::PacketPool,
};

/// Buffers are named by their distance in bytes from the first one.
pub(super) struct Umem {
    /// Never used: while a buffer is abroad, the memory lives.
    anchor: Packet,
    heads: NonNull<Head>,
    count: usize,
    /// One bit a buffer: the kernel has it. What the kernel says is believed only where a bit is set.
    lent: Vec<u64>,
    /// The device reads and writes the buffers itself.
    pub zero_copy: bool,
}

// SAFETY: `heads` is only used for buffers whose bit is set, which belong to this value alone.
unsafe impl Send for Umem {}

impl Umem {
    /// None if the pool has no free buffer.
    pub fn of(pool: &mut PacketPool) -> Option<Self> {
        let anchor = pool.take_class(Class::Small)?;
        let count = pool.size().small as usize;
        let lent = vec![0; count.div_ceil(64)];
        Some(Self { anchor, heads: pool.small_heads(), count, lent, zero_copy: false })
    }

    /// True if the UMEM is of this pool.
    pub fn is_of(&self, pool: &PacketPool) -> bool {
        // The memory of the anchor's pool lives, so no other pool can have it.
        self.heads == pool.small_heads()
    }

    /// Gives a packet's buffer to the kernel: the address of its frame. A packet of another pool or in a
    /// large buffer comes back.
    pub fn lend(&mut self, packet: Packet) -> Result<u64, Packet> {
        let head = NonNull::from(packet.head());
        let first = self.heads.addr().get();
        let distance = head.addr().get().wrapping_sub(first) / size_of::<Head>();
        if head.addr().get() < first || distance >= self.count {
            return Err(packet);
        }
        let address = distance * SMALL_BUFFER_BYTES + packet.head().start as usize;
        // The bit stands for it from here on.
        let _ = packet.into_head();
        self.lent[distance / 64] |= 1 << (distance % 64);
        Ok(address as u64)
    }

    /// Takes a buffer back from the kernel; none if the kernel does not have it.
    pub fn take_back(&mut self, address: u64) -> Option<Packet> {
        let index = usize::try_from(address).ok()? / SMALL_BUFFER_BYTES;
        let word = self.lent.get_mut(index / 64)?;
        let bit = 1 << (index % 64);
        if *word & bit == 0 {
            return None;
        }
        *word &= !bit;
        // SAFETY: bits are only set for the `count` heads of the pool, and one that was set stood for the
        // only use of its buffer.
        Some(unsafe { Packet::from_head(self.heads.add(index)) })
    }
}

impl Drop for Umem {
    /// The socket is closed by now, and the kernel no longer copies into or out of the buffers. A device in
    /// zero-copy mode may still write into them until the kernel's clean-up has run, which nothing tells:
    /// its buffers are never used again.
    fn drop(&mut self) {
        if !self.zero_copy {
            for index in 0..self.count {
                drop(self.take_back((index * SMALL_BUFFER_BYTES) as u64));
            }
        }
        // The anchor goes with the fields, last.
        debug_assert!(self.anchor.frame().is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PoolSize;

    #[test]
    fn only_what_was_lent_comes_back() {
        let mut pool = PacketPool::new(PoolSize { small: 100, large: 1 }).unwrap();
        let mut umem = Umem::of(&mut pool).unwrap();
        let mut packet = pool.packet(b"frame").unwrap();
        assert!(packet.set_place(300, 5));
        let address = umem.lend(packet).unwrap();
        assert_eq!(address % 2048, 300);
        for wrong in [address + 2048, 100 * 2048, 127 * 2048, u64::MAX] {
            assert!(umem.take_back(wrong).is_none(), "{wrong}");
        }
        assert!(umem.take_back(address).is_some());
        assert!(umem.take_back(address).is_none(), "twice");
    }

    #[test]
    fn packets_of_elsewhere_are_refused_and_all_come_home() {
        let mut pool = PacketPool::new(PoolSize { small: 70, large: 1 }).unwrap();
        let mut other = PacketPool::new(PoolSize { small: 1, large: 0 }).unwrap();
        let mut umem = Umem::of(&mut pool).unwrap();
        assert!(umem.is_of(&pool) && !umem.is_of(&other));
        assert!(umem.lend(pool.take(60_000).unwrap()).is_err());
        assert!(umem.lend(other.take(1).unwrap()).is_err());
        while let Some(packet) = pool.take(1) {
            umem.lend(packet).unwrap();
        }
        assert_eq!(pool.free().small, 0);
        drop(umem);
        assert_eq!(pool.free(), pool.size());
    }
}
