//! The headers that keep no CPU waiting, with real threads: a flow counts once and in one epoch,
//! what is charged is conserved, and what is read belongs together.
//!
//! Time is an argument. The thread that ends an epoch notes what was in it and only then lets time go on, so
//! a thread that does not run for a while changes nothing in what must hold.

use std::{
    cell::UnsafeCell,
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use tidegate_core::{
    Rate,
    fair_share::{ONE, TARGET},
    queue_options::VirtualQueueOptions,
};

use crate::intf;

unsafe extern "C" {
    fn native_ep_count_flow(queue: *mut intf::NrmQueue, seen: *mut u32) -> i32;
    fn native_ep_count_class(
        parent: *mut intf::NrmQueue,
        seen: *mut u32,
        class: *const intf::ClassConf,
    ) -> i32;
    fn native_ep_use_class(
        parent: *mut intf::NrmQueue,
        queue: *mut intf::NrmQueue,
        class: *const intf::ClassConf,
        bytes: u32,
    );
    fn native_ep_charge(
        conf: *const intf::QueueConf,
        queue: *mut intf::NrmQueue,
        now_ns: u64,
        cost_ns: u64,
        aside_ns: u64,
    );
    fn native_ep_turn(
        conf: *const intf::QueueConf,
        queue: *mut intf::NrmQueue,
        now_ns: u64,
        rate_bit_s: u64,
    ) -> i32;
    fn native_ep_follow_rate(conf: *const intf::QueueConf, queue: *mut intf::NrmQueue, now_ns: u64);
    fn native_ep_config_now(
        queue: *const intf::NrmQueue,
        ceiling: *const intf::QueueConf,
        class: *const intf::ClassConf,
        now: *mut intf::QueueConf,
    );
    fn native_ep_set_rate(queue: *mut intf::NrmQueue, bit_s: u64);
}

const THREADS: usize = 4;
const EPOCHS: u64 = 3_000;
/// The shortest epoch is 4 ms.
const EPOCH_NS: u64 = 5_000_000;
const START_NS: u64 = 1 << 40;
const RATE_BIT_S: u64 = 1_000_000_000;

/// A value that C changes from several threads at once, as the kernel's programs do in a map.
#[repr(C)]
struct Shared<T>(UnsafeCell<T>);

// SAFETY: only C touches it, by atomic operations or inside of `ep_enter`; Rust reads whole words of it,
// volatile, and only those that nobody writes meanwhile.
unsafe impl<T> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    fn at(&self) -> *mut T {
        self.0.get()
    }

    fn read(&self) -> T {
        // SAFETY: as above.
        unsafe { self.0.get().read_volatile() }
    }
}

/// Ends the work of all threads when one of them ends, by whatever: a check that fails must not leave the
/// others waiting.
struct Ends<'a>(&'a AtomicU64);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.fetch_max(EPOCHS, SeqCst);
    }
}

fn conf() -> intf::QueueConf {
    let rate = Rate::from_bit_s(RATE_BIT_S).unwrap();
    VirtualQueueOptions::paced(rate).config().unwrap().into()
}

/// Threads count flows, charge packets and end epochs of one queue. One flow is all threads', as a socket
/// whose packets several CPUs have.
#[test]
fn flows_and_charges_of_many_cpus_are_conserved() {
    let begin = intf::NrmQueue::from(intf::Queue {
        epoch_start_ns: START_NS - EPOCH_NS,
        ..intf::Queue::default()
    });
    let (conf, queue) = (conf(), Shared(UnsafeCell::new(begin)));
    let common = Shared(UnsafeCell::new(0u32));
    let (clock, barrier) = (AtomicU64::new(START_NS), Barrier::new(THREADS));
    // In all epochs that have ended: flows, and time of unpaced senders.
    let (flows, unpaced) = (AtomicU64::new(0), AtomicU64::new(0));
    let epochs = AtomicU64::new(0);
    let one = |number: u64| {
        let (mut mine, mut counts) = ([0u32; 5], [0u64; 5]);
        let (mut of_common, mut cost, mut of_unpaced, mut step) = (0u64, 0u64, 0u64, number);
        let _ends = Ends(&epochs);
        barrier.wait();
        while epochs.load(SeqCst) < EPOCHS {
            for (seen, count) in mine.iter_mut().zip(&mut counts) {
                // SAFETY: both are live, of the layout that the header declares.
                *count += unsafe { native_ep_count_flow(queue.at(), seen) } as u64;
            }
            step += 1;
            let (now, packet) = (clock.load(SeqCst), 1 + step % 100);
            // SAFETY: all are live, of the layouts that the header declares.
            let ended = unsafe {
                of_common += native_ep_count_flow(queue.at(), common.at()) as u64;
                native_ep_charge(&conf, queue.at(), now, packet, packet / 3);
                native_ep_turn(&conf, queue.at(), now, RATE_BIT_S) == 1
            };
            (cost, of_unpaced) = (cost + packet, of_unpaced + packet / 3);
            if ended {
                // Nobody writes these until time goes on.
                let is = queue.read();
                assert!(is.flows_before as usize <= 5 * THREADS + 1, "{is:?}");
                assert!(is.share > 0 && u64::from(is.share) <= TARGET, "{is:?}");
                flows.fetch_add(u64::from(is.flows_before), SeqCst);
                // A fraction of the epoch, rounded down.
                unpaced.fetch_add((is.aside_before * EPOCH_NS).div_ceil(ONE), SeqCst);
                epochs.fetch_add(1, SeqCst);
                clock.fetch_add(EPOCH_NS, SeqCst);
            }
        }
        (counts, of_common, cost, of_unpaced)
    };
    let (mut counted, mut of_common, mut cost, mut of_unpaced) = (0, 0, 0, 0);
    thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> =
            (0..THREADS as u64).map(|number| scope.spawn(move || one(number))).collect();
        for thread in threads {
            let (counts, common, costs, unpaced) = thread.join().unwrap();
            let ended = epochs.load(SeqCst);
            assert!(counts.iter().all(|count| *count <= ended + 1), "once an epoch: {counts:?}");
            counted += counts.iter().sum::<u64>() + common;
            (of_common, cost, of_unpaced) =
                (of_common + common, cost + costs, of_unpaced + unpaced);
        }
    });
    let is = queue.read();
    let ended = epochs.load(SeqCst);
    assert_eq!(u64::from(is.epoch), ended);
    assert!(of_common <= ended + 1, "once an epoch, whoever sees it: {of_common} of {ended}");
    assert_eq!(counted, flows.load(SeqCst) + u64::from(is.flows), "no flow is lost or doubled");
    assert_eq!(of_unpaced, unpaced.load(SeqCst) + is.aside_ns);
    assert_eq!(cost, is.finish_ns - is.skipped_ns, "what was charged is all there");
    assert_eq!(is.entered, 0, "nobody is left inside");
}

/// The same with classes, which have a weight and a guarantee.
#[test]
fn classes_of_many_cpus_are_conserved() {
    let conf = conf();
    let rate_bit_s = RATE_BIT_S;
    let queue = Shared(UnsafeCell::new(intf::NrmQueue { rate_bit_s, ..intf::NrmQueue::default() }));
    let (clock, barrier) = (AtomicU64::new(1 << 40), Barrier::new(THREADS));
    let (weight, reserved, epochs) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let class = |number: usize| intf::ClassConf {
        guarantee_bit_s: 1_000_000 << number,
        weight: 100 + 7 * number as u32,
        ..intf::ClassConf::default()
    };
    let one = |number: usize| {
        let (mine, mut seen, mut counted) = (class(number), [0u32; 5], 0u64);
        let _ends = Ends(&epochs);
        barrier.wait();
        while epochs.load(SeqCst) < EPOCHS {
            for seen in &mut seen {
                // SAFETY: all are live, of the layouts that the header declares.
                counted += unsafe { native_ep_count_class(queue.at(), seen, &mine) } as u64;
            }
            // SAFETY: as above.
            let ended =
                unsafe { native_ep_turn(&conf, queue.at(), clock.load(SeqCst), RATE_BIT_S) == 1 };
            if ended {
                // Nobody writes these until time goes on.
                let is = queue.read();
                let weights: Vec<u32> = (0..THREADS).map(|number| class(number).weight).collect();
                assert!(is.lightest_before == 0 || weights.contains(&is.lightest_before), "{is:?}");
                assert!(is.lightest_before <= is.weight_before, "{is:?}");
                weight.fetch_add(u64::from(is.weight_before), SeqCst);
                reserved.fetch_add(is.reserved_before_bit_s, SeqCst);
                epochs.fetch_add(1, SeqCst);
                clock.fetch_add(EPOCH_NS, SeqCst);
            }
        }
        counted
    };
    let (mut weights, mut guarantees) = (0, 0);
    thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(move || one(n))).collect();
        for (number, thread) in threads.into_iter().enumerate() {
            let counted = thread.join().unwrap();
            weights += counted * u64::from(class(number).weight);
            guarantees += counted * class(number).guarantee_bit_s;
        }
    });
    let is = queue.read();
    assert_eq!(weights, weight.load(SeqCst) + u64::from(is.weight));
    assert_eq!(guarantees, reserved.load(SeqCst) + is.reserved_bit_s);
    assert_eq!(is.entered, 0);
}

/// Room is made for a class that is new, or greedy, and for no datagram now and then.
#[test]
fn a_class_that_takes_little_takes_no_share_from_others() {
    const SHARE: u32 = TARGET as u32;
    const FRAME_BYTES: u32 = 1514;
    let class = intf::ClassConf { weight: 100, ..intf::ClassConf::default() };
    // A class of the same weight sends in each epoch.
    let mut parent = intf::NrmQueue {
        rate_bit_s: RATE_BIT_S,
        ..intf::NrmQueue::from(intf::Queue {
            cost: conf().cost,
            epoch_us: EPOCH_NS as u32 / 1000,
            ..intf::Queue::default()
        })
    };
    let mut queue = intf::NrmQueue::default();
    // The share after packets of the class in a later epoch, in which the parent had this share.
    let mut share_after = |later: u32, packets: usize, bytes: u32| {
        let (share, epoch) = (SHARE, parent.epoch + later);
        let common = intf::Queue { epoch, share, flows: 1, ..parent.common };
        let rest = intf::NrmQueue { weight: 100, weight_before: 100, lightest: 100, ..parent };
        parent = intf::NrmQueue { common, lightest_before: 100, ..rest };
        for _ in 0..packets {
            // SAFETY: all are live, of the layouts that the header declares.
            unsafe { native_ep_use_class(&raw mut parent, &raw mut queue, &class, bytes) };
        }
        assert_eq!((parent.weight, queue.counted_epoch), (200, epoch + 1), "it counts");
        parent.share
    };
    // Half of its part of 5 ms.
    let many = (RATE_BIT_S * EPOCH_NS / 8_000_000_000) as usize / FRAME_BYTES as usize / 2 + 1;
    assert!(share_after(1, 1, 200) < SHARE, "it is new");
    for later in [1, 9, 100, 5000] {
        assert_eq!(share_after(later, 1, 200), SHARE, "a datagram {later} epochs later");
    }
    assert!(share_after(100, many, FRAME_BYTES) < SHARE, "it wants its part");
    assert_eq!(share_after(1, many, FRAME_BYTES), SHARE, "it goes on");
    assert_eq!(share_after(8, 1, FRAME_BYTES), SHARE, "it was silent for a while");
    assert!(share_after(100, 1, FRAME_BYTES) < SHARE, "it comes back");
    assert_eq!(share_after(100, 1, 200), SHARE, "it took little when it came back");
}

/// Rates that change under packets: a packet sees the thresholds of one rate, and no charge is lost.
#[test]
fn a_rate_that_changes_under_packets_is_seen_as_a_whole() {
    let class = intf::ClassConf {
        burst_bytes: 1514,
        mark_bytes: 16 * 1514,
        drop_bytes: 32 * 1514,
        ..intf::ClassConf::default()
    };
    let (ceiling, rates) = (conf(), [9_000u64, 777_777, 31_000_000]);
    let queue = Shared(UnsafeCell::new(intf::NrmQueue::default()));
    let config_now = |queue: &Shared<intf::NrmQueue>| {
        let mut now = intf::QueueConf::default();
        // SAFETY: all are live, of the layouts that the header declares.
        unsafe { native_ep_config_now(queue.at(), &ceiling, &class, &mut now) };
        now
    };
    let expected = rates.map(|bit_s| {
        let of_one = Shared(UnsafeCell::new(intf::NrmQueue::default()));
        // SAFETY: it is live, of the layout that the header declares.
        unsafe { native_ep_set_rate(of_one.at(), bit_s) };
        config_now(&of_one)
    });
    // SAFETY: as above.
    unsafe { native_ep_set_rate(queue.at(), rates[0]) };
    let (barrier, now) = (Barrier::new(THREADS), 1u64 << 40);
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (queue, barrier, config_now) = (&queue, &barrier, &config_now);
            scope.spawn(move || {
                barrier.wait();
                for step in 0..100_000 {
                    let conf = config_now(queue);
                    assert!(expected.contains(&conf), "{conf:?}");
                    // SAFETY: all are live, of the layouts that the header declares.
                    unsafe {
                        if number == 0 {
                            native_ep_set_rate(queue.at(), rates[step % rates.len()]);
                        }
                        native_ep_follow_rate(&conf, queue.at(), now);
                    }
                }
            });
        }
    });
    assert_eq!(queue.read().entered, 0);
}
