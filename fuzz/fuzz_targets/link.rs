//! A link of any options and packets at any times: never early, never faster than its rate, never more in its
//! queue than it holds; without reordering, in order.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidegate_core::{
    DropReason, Nanos, Rate, Verdict,
    link::{Link, LinkOptions},
    stamp::MAX_PACKET_BYTES,
    units::Bytes,
};

#[derive(Debug, Arbitrary)]
struct Case {
    delay_ns: u64,
    bit_s: u64,
    queue_bytes: Option<u32>,
    loss: f64,
    reorder: f64,
    reorder_by_ns: u64,
    /// Time since the one before, length, random bits.
    packets: Vec<(i64, u32, u64)>,
}

const PACKETS_MOST: usize = 1_000;

fuzz_target!(|case: Case| {
    let rate = Rate::from_bit_s(case.bit_s);
    let queue = case.queue_bytes.map(|bytes| Bytes(bytes.into()));
    let mut link = Link::new(LinkOptions {
        delay: Nanos(case.delay_ns),
        rate,
        queue,
        loss: case.loss,
        reorder: case.reorder,
        reorder_by: Nanos(case.reorder_by_ns),
    });
    let in_order = case.reorder.is_nan() || case.reorder <= 0.0;
    let (mut now, mut last, mut latest) = (0u64, 0u64, 0u64);
    for &(gap, bytes, random) in case.packets.iter().take(PACKETS_MOST) {
        now = now.saturating_add_signed(gap);
        let (before, busy) = (link.backlog(Nanos(now)), link.busy_until());
        let verdict = link.on_packet(Nanos(now), bytes, random);
        match verdict {
            Verdict::SendAt(at) => {
                let sending = rate
                    .map_or(0, |rate| rate.time_for(Bytes(bytes.min(MAX_PACKET_BYTES).into())).0);
                let least = now.saturating_add(sending).saturating_add(case.delay_ns);
                assert!(at.0 >= least, "{at:?} before {least}");
                // A link without a rate has no memory: a clock that steps back takes its packets along.
                if in_order && (rate.is_some() || now >= latest) {
                    assert!(at.0 >= last, "{at:?} overtakes {last}");
                }
                last = at.0;
                latest = latest.max(now);
            }
            Verdict::Drop(DropReason::Full) => {
                let queue = queue.expect("a queue");
                assert!(before.0 > 0 && before.0.saturating_add(bytes.into()) > queue.0);
                assert_eq!(link.busy_until(), busy, "what is dropped takes no time");
            }
            Verdict::Drop(DropReason::Lost) => assert!(case.loss > 0.0),
            other => panic!("{other:?}"),
        }
    }
});
