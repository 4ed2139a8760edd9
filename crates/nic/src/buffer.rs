//! The buffers of packets, and how they come home: a dropped packet pushes its buffer on a list that any
//! thread may push on, and that only the owner of the [`PacketPool`](crate::PacketPool) takes, as a whole.

use std::{
    ffi::c_void,
    io,
    ptr::{self, NonNull},
    sync::atomic::{AtomicI64, AtomicPtr, Ordering},
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::vnet::VnetHeader;

/// A small buffer in bytes: a chunk of AF_XDP's UMEM, a frame of MTU 1500 with room for tags.
pub const SMALL_BUFFER_BYTES: usize = 2048;
/// A large buffer in bytes: 64 KB of IP, Ethernet with its tags, whole pages.
pub const LARGE_BUFFER_BYTES: usize = 17 * 4096;

/// Marks a list whose pool is gone. Never followed.
pub(crate) const CLOSED: *mut Head = ptr::without_provenance_mut(1);

/// Which stock a buffer is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Small,
    Large,
}

impl Class {
    pub(crate) const ALL: [Class; 2] = [Class::Small, Class::Large];

    pub(crate) const fn bytes(self) -> usize {
        match self {
            Class::Small => SMALL_BUFFER_BYTES,
            Class::Large => LARGE_BUFFER_BYTES,
        }
    }
}

/// What is known of a buffer.
#[repr(align(64))]
pub(crate) struct Head {
    pub(crate) home: NonNull<Shared>,
    /// The next one in whatever list the buffer is in.
    pub(crate) next: AtomicPtr<Head>,
    /// The buffer: `class.bytes()` bytes that only the holder of the head may touch.
    pub(crate) data: NonNull<u8>,
    pub(crate) class: Class,
    /// Where the frame begins, in bytes from the begin of the buffer.
    pub(crate) start: u32,
    /// The frame's length in bytes; `start + len` is at most the buffer's.
    pub(crate) len: u32,
    pub(crate) vnet: VnetHeader,
}

const _: () = assert!(size_of::<Head>() == 64);

/// What outlives the pool while packets are abroad.
pub(crate) struct Shared {
    /// By [`Class`]: buffers that were dropped, in any thread.
    pub(crate) returned: [Padded<AtomicPtr<Head>>; 2],
    /// After the pool's end: buffers abroad. Below zero while the pool is still counting.
    pub(crate) abroad: AtomicI64,
    pub(crate) stocks: [Stock; 2],
}

/// A cache line of its own, so that two lists do not slow each other.
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// Buffers of one size, side by side.
pub(crate) struct Stock {
    pub(crate) data: Mapping,
    heads: Mapping,
    pub(crate) count: u32,
}

/// Memory of the system, zeroed.
pub(crate) struct Mapping {
    pub(crate) base: NonNull<c_void>,
    bytes: usize,
}

/// Brings a buffer home from any thread.
///
/// # Safety
///
/// The caller is the only user of the buffer, and is none any more.
pub(crate) unsafe fn give_back(head: NonNull<Head>) {
    // SAFETY: `Head`s are written before they are handed out, and live while one is abroad.
    let buffer = unsafe { head.as_ref() };
    let home = buffer.home;
    // SAFETY: `Shared` lives until the last buffer is home, and this one is not.
    let shared = unsafe { home.as_ref() };
    let returned = &shared.returned[buffer.class as usize].0;
    let mut top = returned.load(Ordering::Relaxed);
    while top != CLOSED {
        buffer.next.store(top, Ordering::Relaxed);
        // Release: what was written in the buffer is seen by who takes it.
        let pushed = returned.compare_exchange_weak(
            top,
            head.as_ptr(),
            Ordering::Release,
            Ordering::Relaxed,
        );
        match pushed {
            Ok(_) => return,
            Err(now) => top = now,
        }
    }
    if shared.abroad.fetch_sub(1, Ordering::AcqRel) == 1 {
        // SAFETY: the pool is gone, and this was the last buffer abroad.
        unsafe { free_shared(home) };
    }
}

/// # Safety
///
/// `shared` came from `PacketPool::new`, and nobody uses it or a buffer of it any more.
pub(crate) unsafe fn free_shared(shared: NonNull<Shared>) {
    // SAFETY: made by `Box::leak` there; the caller says that it is the last.
    drop(unsafe { Box::from_raw(shared.as_ptr()) });
}

impl Stock {
    /// Errors: how much memory was asked for, and what the system says.
    pub(crate) fn new(class: Class, count: u32) -> Result<Self, (usize, io::Error)> {
        let count_bytes = |each| Mapping::new(count as usize * each);
        Ok(Self {
            data: count_bytes(class.bytes())?,
            heads: count_bytes(size_of::<Head>())?,
            count,
        })
    }

    pub(crate) fn heads(&self) -> NonNull<Head> {
        self.heads.base.cast()
    }
}

impl Mapping {
    fn new(bytes: usize) -> Result<Self, (usize, io::Error)> {
        // A mapping of nothing is refused.
        let bytes = bytes.max(1);
        // SAFETY: a new anonymous mapping aliases nothing.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = base.map_err(|e| (bytes, io::Error::from(e)))?;
        let Some(base) = NonNull::new(base) else {
            return Err((bytes, io::ErrorKind::OutOfMemory.into()));
        };
        Ok(Self { base, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; `Shared` is dropped after the last use.
        let _ = unsafe { munmap(self.base.as_ptr(), self.bytes) };
    }
}
