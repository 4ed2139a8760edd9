//! The four rings between an AF_XDP socket and the kernel (`Documentation/networking/af_xdp.rst`).
//!
//! Each has one producer and one consumer, and free-running 32-bit indices in memory that both see. Our own
//! index is only ours to write; the other is read again only when what is known of it does not suffice.

use std::{
    ffi::c_void,
    marker::PhantomData,
    num::Wrapping,
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, Ordering},
};

use rustix::{
    io::Result,
    mm::{MapFlags, ProtFlags, mmap, munmap},
    net::xdp::{XdpRingFlags, XdpRingOffset},
};

/// A ring of `T` in memory shared with the kernel.
struct Shared<T> {
    base: NonNull<c_void>,
    bytes: usize,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: Option<NonNull<AtomicU32>>,
    entries: NonNull<T>,
    /// A power of two.
    size: u32,
    marker: PhantomData<T>,
}

// SAFETY: the mapping belongs to the value, whichever thread has it; entries are plain numbers.
unsafe impl<T: Copy + Send> Send for Shared<T> {}

/// Where to find a ring: the socket, what to map, its layout, and its size.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub socket: BorrowedFd<'a>,
    pub page_offset: u64,
    pub layout: &'a XdpRingOffset,
    /// A power of two, as set in the kernel.
    pub size: u32,
}

impl<T> Shared<T> {
    /// # Safety
    ///
    /// The ring at `place` has `place.size` entries of type `T`, any bits of which are a value.
    unsafe fn map(place: Place<'_>) -> Result<Self> {
        let Place { socket, page_offset, layout, size } = place;
        let bytes = layout.desc as usize + size as usize * size_of::<T>();
        // SAFETY: a new mapping aliases nothing.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                socket,
                page_offset,
            )
        }?;
        let base = NonNull::new(base).ok_or(rustix::io::Errno::NOMEM)?;
        // SAFETY: the kernel's offsets are within the ring and aligned for what is there.
        let at = |offset: u64| unsafe { base.byte_add(offset as usize) };
        Ok(Self {
            base,
            bytes,
            producer: at(layout.producer).cast(),
            consumer: at(layout.consumer).cast(),
            flags: layout.flags.map(|offset| at(offset).cast()),
            entries: at(layout.desc).cast(),
            size,
            marker: PhantomData,
        })
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: in the mapping, which lives as long as `self`.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as in `producer`.
        unsafe { self.consumer.as_ref() }
    }

    fn entry(&self, index: Wrapping<u32>) -> NonNull<T> {
        // SAFETY: masked to the size, so in the mapping.
        unsafe { self.entries.add((index.0 & (self.size - 1)) as usize) }
    }

    fn needs_wakeup(&self) -> bool {
        let bit = XdpRingFlags::XDP_RING_NEED_WAKEUP.bits();
        // SAFETY: as in `producer`.
        self.flags.is_none_or(|flags| unsafe { flags.as_ref() }.load(Ordering::Relaxed) & bit != 0)
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and used no more.
        let _ = unsafe { munmap(self.base.as_ptr(), self.bytes) };
    }
}

/// A ring that we fill: the fill ring, the transmit ring.
pub(super) struct Producer<T> {
    ring: Shared<T>,
    /// The next entry to write.
    next: Wrapping<u32>,
    /// The kernel's index when it was read last.
    consumed: Wrapping<u32>,
}

impl<T: Copy> Producer<T> {
    /// # Safety
    ///
    /// As [`Shared::map`]; and nobody else fills the ring.
    pub unsafe fn map(place: Place<'_>) -> Result<Self> {
        // SAFETY: the caller's promise.
        let ring = unsafe { Shared::map(place) }?;
        let next = Wrapping(ring.producer().load(Ordering::Relaxed));
        let consumed = Wrapping(ring.consumer().load(Ordering::Acquire));
        Ok(Self { ring, next, consumed })
    }

    /// Free entries: at least `wanted` if there are so many.
    pub fn room(&mut self, wanted: u32) -> u32 {
        if self.free() < wanted {
            self.consumed = Wrapping(self.ring.consumer().load(Ordering::Acquire));
        }
        self.free()
    }

    fn free(&self) -> u32 {
        self.ring.size.saturating_sub((self.next - self.consumed).0)
    }

    /// Writes an entry, to be seen with the next [`publish`](Self::publish). False if there is no room.
    pub fn push(&mut self, value: T) -> bool {
        if self.room(1) == 0 {
            return false;
        }
        // SAFETY: the entry is free, so the kernel does not look at it.
        unsafe { self.ring.entry(self.next).write(value) };
        self.next += 1;
        true
    }

    /// Shows the kernel all that was pushed.
    pub fn publish(&mut self) {
        self.ring.producer().store(self.next.0, Ordering::Release);
    }

    /// Entries that the kernel has not taken yet.
    pub fn pending(&mut self) -> u32 {
        self.consumed = Wrapping(self.ring.consumer().load(Ordering::Acquire));
        (self.next - self.consumed).0
    }

    /// True if the kernel wants a system call before it looks at the ring.
    pub fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }
}

/// A ring that the kernel fills: the receive ring, the completion ring.
pub(super) struct Consumer<T> {
    ring: Shared<T>,
    /// The next entry to read.
    next: Wrapping<u32>,
    /// The kernel's index when it was read last.
    produced: Wrapping<u32>,
}

impl<T: Copy> Consumer<T> {
    /// # Safety
    ///
    /// As [`Shared::map`]; and nobody else reads the ring.
    pub unsafe fn map(place: Place<'_>) -> Result<Self> {
        // SAFETY: the caller's promise.
        let ring = unsafe { Shared::map(place) }?;
        let next = Wrapping(ring.consumer().load(Ordering::Relaxed));
        Ok(Self { ring, next, produced: next })
    }

    /// Takes the next entry; the kernel may use its place after [`release`](Self::release).
    pub fn pop(&mut self) -> Option<T> {
        if self.next == self.produced {
            self.produced = Wrapping(self.ring.producer().load(Ordering::Acquire));
            if self.next == self.produced {
                return None;
            }
        }
        // SAFETY: the kernel has published the entry and leaves it alone until it is released.
        let value = unsafe { self.ring.entry(self.next).read() };
        self.next += 1;
        Some(value)
    }

    /// Gives the places of all entries that were popped back to the kernel.
    pub fn release(&mut self) {
        self.ring.consumer().store(self.next.0, Ordering::Release);
    }
}
