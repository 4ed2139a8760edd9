//! The C of the kernel against its Rust model.

use proptest::prelude::*;
use tidegate_core::htb::{MAJOR, QUEUE_MAJOR, leaf_minor, marks};

use super::*;
use crate::shared::HtbMarked;

unsafe extern "C" {
    fn native_htb_marks(waiting_bytes: u32, mark_bytes: u32) -> u32;
    fn native_htb_leaf(slot: u32) -> u32;
    static native_htb_constants: [u32; 4];
}

#[test]
fn the_constants_are_the_headers() {
    let ours = [u32::from(MAJOR), u32::from(SLOTS), u32::from(ROOT_SLOT), u32::from(QUEUE_MAJOR)];
    // SAFETY: a constant of the test's C library, of this type.
    assert_eq!(unsafe { native_htb_constants }, ours);
}

/// They are in pinned maps, which another build goes on with: raise the ABI to change them.
#[test]
fn the_layout_of_pinned_maps_stays() {
    assert_eq!([size_of::<HtbSlot>(), size_of::<HtbMarked>()], [40, 16]);
    let slot = bytemuck::cast::<_, [u32; 10]>(HtbSlot {
        mark_bytes: 1,
        flags: 2,
        backlog: Backlog { qdisc: 3, handle: 4, ifindex: 5, rate_bit_s: 6, dev_queue: 7 },
    });
    assert_eq!(slot, [1, 2, 3, 0, 4, 5, 6, 0, 7, 0]);
}

proptest! {
    #[test]
    fn the_header_is_the_model(
        waiting in prop_oneof![any::<u32>(), 0u32..200],
        mark in prop_oneof![Just(0u32), any::<u32>(), 0u32..200],
        slot in 1u16..SLOTS,
    ) {
        // SAFETY: pure functions over numbers.
        let (marked, leaf) = unsafe { (native_htb_marks(waiting, mark), native_htb_leaf(slot.into())) };
        prop_assert_eq!(marked != 0, marks(waiting, Some(mark)));
        prop_assert_eq!(leaf, u32::from(MAJOR) << 16 | u32::from(leaf_minor(slot)));
        prop_assert_eq!(leaf & 0xf, 0);
    }
}
