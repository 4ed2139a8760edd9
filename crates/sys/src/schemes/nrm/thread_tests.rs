//! The headers that take no lock, with several threads at work on one state. The time is an argument that
//! they move on together, so nothing depends on how fast they are, or on who is interrupted where.

use std::{
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    thread,
};

use tidegate_core::{Rate, queue_options::VirtualQueueOptions};

use crate::intf;

unsafe extern "C" {
    fn native_vq_charge(
        conf: *const intf::QueueConf,
        finish_ns: *mut u64,
        skipped_ns: *mut u64,
        seen_ns: u64,
        now_ns: u64,
        cost_ns: u64,
    ) -> u64;
}

const THREADS: u64 = 4;
const PACKETS: u64 = 50_000;
const START_NS: u64 = 1 << 40;
const PACKET_BYTES: u64 = 1_500;

/// A queue as nrm.bpf.c uses it: judged, charged, and given back where others have filled it meanwhile. Time
/// moves on in steps of which most leave no room, and a few let the queue run idle.
#[test]
fn threads_pass_no_more_than_a_virtual_queue_has_room_for() {
    let rate = Rate::from_bit_s(100_000_000).unwrap();
    let options = VirtualQueueOptions::new(rate);
    let conf: intf::QueueConf = options.config().unwrap().into();
    let [finish, skipped, now] = [START_NS, 0, START_NS].map(AtomicU64::new);
    let [passed, charged, refused] = [0, 0, 0].map(AtomicU64::new);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (finish, skipped, now) = (&finish, &skipped, &now);
            let (passed, charged, refused) = (&passed, &charged, &refused);
            scope.spawn(move || {
                for i in 0..PACKETS {
                    let idle = (i * THREADS + thread).is_multiple_of(4_096);
                    let now_ns = now.fetch_add(if idle { 20_000_000 } else { 1_009 }, SeqCst);
                    let bytes = 60 + (i * 7_919 + thread * 104_729) % (PACKET_BYTES - 60);
                    let cost_ns = (bytes * conf.cost) >> 24;
                    let seen_ns = finish.load(SeqCst);
                    let most_ns = i64::try_from(conf.drop_ns).unwrap();
                    if (seen_ns.wrapping_sub(now_ns) as i64) > most_ns {
                        refused.fetch_add(1, SeqCst);
                        continue;
                    }
                    // SAFETY: the atomics live through the call, and the header touches them atomically.
                    let found = unsafe {
                        native_vq_charge(
                            &conf,
                            finish.as_ptr(),
                            skipped.as_ptr(),
                            seen_ns,
                            now_ns,
                            cost_ns,
                        )
                    };
                    if found.wrapping_sub(now_ns) as i64 <= most_ns {
                        passed.fetch_add(bytes, SeqCst);
                        charged.fetch_add(cost_ns, SeqCst);
                    } else {
                        finish.fetch_sub(cost_ns, SeqCst);
                        refused.fetch_add(1, SeqCst);
                    }
                }
            });
        }
    });
    let [finish, skipped, end] = [finish, skipped, now].map(AtomicU64::into_inner);
    let [passed, charged, refused] = [passed, charged, refused].map(AtomicU64::into_inner);
    assert!(refused > 0 && passed > 0);
    // What was charged is how far the finish time moved less the idle time that it skipped.
    assert_eq!(charged, finish - START_NS - skipped);
    let time_ns = end - START_NS + conf.burst_ns + conf.drop_ns;
    let most = rate.bytes_in(tidegate_core::Nanos(time_ns)).0 + (1 + THREADS) * PACKET_BYTES;
    assert!(passed <= most, "{passed} of {most}");
}
