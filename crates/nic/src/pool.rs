//! All the memory that packets will ever have: two stocks of buffers, taken from the system once.
//!
//! Most frames are of MTU size, some are segments of up to 64 KB. A stock of small buffers (2 KB) and one
//! of large ones (68 KB) hold each in one piece, so nobody has to walk chains; a port decides after it has
//! read a frame which of the two it keeps. Pages of large buffers that were never written cost no memory.
//!
//! One thread owns the [`PacketPool`] and takes buffers from it; a [`Packet`] may be dropped in any thread.
//! A dropped packet pushes its buffer on a list of returned ones (one compare-and-swap); the owner takes
//! the whole list when its own runs out. As nobody takes single buffers from the shared list, the ABA
//! problem cannot arise. No lock, no allocation, no reference count a packet. The memory goes when the
//! pool has been dropped and the last packet has come home.
//!
//! What belongs to a frame but is not part of it (its length, its offload metadata) is in a dense array of
//! heads, a cache line each, and not before the bytes: heads at a stride of 2 KB would share a few sets of
//! the cache. The small buffers of a pool are one piece of memory, each aligned to its size, as AF_XDP
//! wants it for its UMEM.

use std::{
    ffi::c_void,
    io,
    ptr::{self, NonNull},
    sync::atomic::{AtomicI64, AtomicPtr, Ordering},
};

use crate::{
    buffer::{CLOSED, Class, Head, Padded, SMALL_BUFFER_BYTES, Shared, Stock, free_shared},
    packet::Packet,
    vnet::VnetHeader,
};

/// Most buffers of one size in a pool.
pub const POOL_BUFFERS_MAX: u32 = 1 << 22;
/// How many buffers a pool has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolSize {
    /// Buffers for frames of up to [`SMALL_BUFFER_BYTES`].
    pub small: u32,
    /// Buffers for segments of up to 64 KB. With none, longer frames than a small buffer holds are dropped.
    pub large: u32,
}

/// Why a pool cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A number is out of range.
    #[error("{field} is {read}: use {expected}")]
    Invalid {
        /// Which.
        field: &'static str,
        /// What was given.
        read: u32,
        /// What to give.
        expected: &'static str,
    },
    /// The system has not that much memory.
    #[error("cannot reserve {bytes} bytes for packets: {source} (use a smaller pool)")]
    NoMemory {
        /// How much was asked for.
        bytes: usize,
        /// The system's answer.
        source: io::Error,
    },
}

/// The owner of all buffers. See the [module](self).
pub struct PacketPool {
    shared: NonNull<Shared>,
    /// By [`Class`]: free buffers that only this thread sees.
    free: [*mut Head; 2],
    free_count: [u32; 2],
    refused: u64,
}

// SAFETY: the pool is the only user of its private lists; what it shares with packets is atomic.
unsafe impl Send for PacketPool {}

impl PacketPool {
    /// Reserves the memory.
    ///
    /// Errors: no small buffer, more than [`POOL_BUFFERS_MAX`] of a size, or not enough memory.
    pub fn new(size: PoolSize) -> Result<Self, PoolError> {
        if !(1..=POOL_BUFFERS_MAX).contains(&size.small) {
            let (field, expected) = ("the number of small buffers", "1 to 4194304");
            return Err(PoolError::Invalid { field, read: size.small, expected });
        }
        if size.large > POOL_BUFFERS_MAX {
            let (field, expected) = ("the number of large buffers", "0 to 4194304");
            return Err(PoolError::Invalid { field, read: size.large, expected });
        }
        let stock = |class, count| {
            let new = Stock::new(class, count);
            new.map_err(|(bytes, source)| PoolError::NoMemory { bytes, source })
        };
        let stocks = [stock(Class::Small, size.small)?, stock(Class::Large, size.large)?];
        let shared = Box::new(Shared {
            returned: [const { Padded(AtomicPtr::new(ptr::null_mut())) }; 2],
            abroad: AtomicI64::new(0),
            stocks,
        });
        let shared = NonNull::from(Box::leak(shared));
        let mut pool = Self { shared, free: [ptr::null_mut(); 2], free_count: [0; 2], refused: 0 };
        for class in Class::ALL {
            let stock = &pool.shared().stocks[class as usize];
            let (data, heads, count) = (stock.data.base, stock.heads(), stock.count);
            // From the last to the first: they are taken from the first on.
            for index in (0..count as usize).rev() {
                // SAFETY: the stock has `count` of each.
                let (data, head) =
                    unsafe { (data.byte_add(index * class.bytes()), heads.add(index)) };
                // SAFETY: inside the mapping, aligned, and nobody has it yet.
                unsafe {
                    head.write(Head {
                        home: shared,
                        next: AtomicPtr::new(ptr::null_mut()),
                        data: data.cast(),
                        class,
                        start: 0,
                        len: 0,
                        vnet: VnetHeader::default(),
                    });
                }
                pool.keep(head);
            }
        }
        Ok(pool)
    }

    /// An empty packet whose buffer has room for a frame of `bytes`. None if there is no free buffer of
    /// that size, which is counted.
    pub fn take(&mut self, bytes: usize) -> Option<Packet> {
        match Class::ALL.into_iter().find(|class| bytes <= class.bytes()) {
            Some(class) => self.take_class(class),
            None => {
                self.refused += 1;
                None
            }
        }
    }

    /// A packet with a copy of `frame`. None as in [`take`](Self::take).
    pub fn packet(&mut self, frame: &[u8]) -> Option<Packet> {
        let mut packet = self.take(frame.len())?;
        packet.fill(frame);
        Some(packet)
    }

    pub(crate) fn take_class(&mut self, class: Class) -> Option<Packet> {
        let list = class as usize;
        if self.free[list].is_null() {
            self.collect(class);
        }
        let Some(head) = NonNull::new(self.free[list]) else {
            self.refused += 1;
            return None;
        };
        // SAFETY: a head in the private list belongs to nobody else.
        let buffer = unsafe { &mut *head.as_ptr() };
        self.free[list] = *buffer.next.get_mut();
        self.free_count[list] -= 1;
        buffer.start = 0;
        buffer.len = 0;
        buffer.vnet = VnetHeader::default();
        // SAFETY: just taken from the list, so this packet is the only one on this buffer.
        Some(unsafe { Packet::from_head(head) })
    }

    /// Takes a packet back. The same as dropping it, without an atomic instruction if it is of this pool.
    pub fn recycle(&mut self, packet: Packet) {
        if packet.head().home == self.shared {
            self.keep(packet.into_head());
        }
    }

    /// How many buffers there are, free or not.
    pub fn size(&self) -> PoolSize {
        let [small, large] = &self.shared().stocks;
        PoolSize { small: small.count, large: large.count }
    }

    /// How many buffers are free.
    pub fn free(&mut self) -> PoolSize {
        Class::ALL.into_iter().for_each(|class| self.collect(class));
        PoolSize { small: self.free_count[0], large: self.free_count[1] }
    }

    /// How often a buffer was asked for and there was none.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// The memory of the small buffers: its begin, and its length in bytes.
    pub(crate) fn small_memory(&self) -> (NonNull<c_void>, usize) {
        let stock = &self.shared().stocks[Class::Small as usize];
        (stock.data.base, stock.count as usize * SMALL_BUFFER_BYTES)
    }

    /// The heads of the small buffers, in the order of their memory.
    pub(crate) fn small_heads(&self) -> NonNull<Head> {
        self.shared().stocks[Class::Small as usize].heads()
    }

    fn shared(&self) -> &Shared {
        // SAFETY: it lives at least as long as the pool.
        unsafe { self.shared.as_ref() }
    }

    /// Puts a buffer that nobody else has on the private list.
    fn keep(&mut self, mut head: NonNull<Head>) {
        // SAFETY: the caller gives the buffer away; nobody else has it.
        let buffer = unsafe { head.as_mut() };
        let list = buffer.class as usize;
        *buffer.next.get_mut() = self.free[list];
        self.free[list] = head.as_ptr();
        self.free_count[list] += 1;
    }

    /// Moves all buffers that came back to the private list.
    fn collect(&mut self, class: Class) {
        let returned = &self.shared().returned[class as usize].0;
        if returned.load(Ordering::Relaxed).is_null() {
            return;
        }
        let list = returned.swap(ptr::null_mut(), Ordering::Acquire);
        self.keep_list(list);
    }

    fn keep_list(&mut self, mut list: *mut Head) {
        while let Some(mut head) = NonNull::new(list) {
            // SAFETY: the list was taken as a whole, so its buffers are ours alone.
            list = *unsafe { head.as_mut() }.next.get_mut();
            self.keep(head);
        }
    }
}

impl Drop for PacketPool {
    fn drop(&mut self) {
        for class in Class::ALL {
            let list = self.shared().returned[class as usize].0.swap(CLOSED, Ordering::Acquire);
            self.keep_list(list);
        }
        let size = self.size();
        let missing = i64::from(size.small) + i64::from(size.large)
            - self.free_count.iter().map(|&n| i64::from(n)).sum::<i64>();
        let before = self.shared().abroad.fetch_add(missing, Ordering::AcqRel);
        if before + missing == 0 {
            // SAFETY: every buffer is home, and each `came_home_late` has ended its use of `Shared`.
            unsafe { free_shared(self.shared) };
        }
    }
}

#[cfg(test)]
mod tests;
