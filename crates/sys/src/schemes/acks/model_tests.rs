//! The pure headers of `bpf/`, compiled for this machine, against their models.

use proptest::prelude::*;
use tidegate_core::{
    dem::{Ack as DemAck, Config as DemConfig, Due, Law as DemLaw, Marker},
    flow_count::{FlowCount, Mark},
    spring::{self, Ack, Config, Epoch},
    wait::{Account, Config as WaitConfig},
};

use super::{intf, *};

/// `struct sp_epoch`.
#[repr(C)]
struct NativeEpoch {
    elapsed_ns: u64,
    left_bytes: u64,
    backlog_ns: u64,
    rtt_ns: u64,
    flows: u32,
    pad: u32,
}

/// `struct sp_ack`.
#[repr(C)]
struct NativeAck {
    ack: u32,
    raw: u16,
    scale: u8,
    bare: u8,
}

/// `struct opt_walk`.
#[repr(C)]
struct NativeWalk {
    options: [u8; 64],
    len: u32,
    at: u32,
    mss: u16,
    scale: u8,
    has_scale: u8,
}

/// What a SYN's options say, read as RFC 9293 has them.
fn options(mut bytes: &[u8]) -> (u16, Option<u8>) {
    let (mut mss, mut scale) = (0, None);
    loop {
        match *bytes {
            [1, ref rest @ ..] => bytes = rest,
            [kind, size, ..] if kind != 0 && size >= 2 && usize::from(size) <= bytes.len() => {
                match (kind, &bytes[2..usize::from(size)]) {
                    (2, [high, low]) => mss = u16::from_be_bytes([*high, *low]),
                    (3, [shift]) => scale = Some(*shift),
                    _ => {}
                }
                bytes = &bytes[usize::from(size)..];
            }
            _ => return (mss, scale),
        }
    }
}

unsafe extern "C" {
    fn native_dem_on_ack(
        conf: *const intf::DemConf,
        marker: *mut intf::Marker,
        due: *mut u32,
        now_ns: u64,
        backlog_bytes: u64,
        segments: u32,
        scalable: u8,
    ) -> i32;
    fn native_sp_next(share: u64, conf: *const intf::SpringConf, epoch: *const NativeEpoch) -> u64;
    fn native_sp_join(share: u64, flows: u32) -> u64;
    fn native_sp_epoch_ns(conf: *const intf::SpringConf, rtt_ns: u64, flows: u32, mss: u16) -> u64;
    fn native_sp_window(
        conf: *const intf::SpringConf,
        share: u64,
        rtt_ns: u64,
        mss: u16,
        hash: u32,
        epoch: u32,
    ) -> u32;
    fn native_sp_rtt_data(
        rtt: *mut intf::RoundTrip,
        end: u32,
        now_ns: u64,
        wait_ns: u64,
        cost: u64,
    );
    fn native_sp_rtt_ack(rtt: *mut intf::RoundTrip, ack: u32, now_ns: u64, cost: u64) -> i32;
    fn native_sp_say(edge: *mut intf::Edge, ack: *const NativeAck, window: u32) -> u16;
    fn native_sp_is_beyond(edge: *const intf::Edge, end: u32, mss: u16) -> i32;
    fn native_wt_charge(
        conf: *const intf::WaitConf,
        account: *mut intf::Account,
        now_ns: u64,
        wire_bytes: u32,
    );
    fn native_wt_debt(account: *const intf::Account, now_ns: u64) -> u64;
    fn native_wt_short_debt(account: *const intf::Account, now_ns: u64) -> u64;
    fn native_wt_look(
        conf: *const intf::WaitConf,
        account: *mut intf::Account,
        now_ns: u64,
        queued_ns: u64,
    ) -> u64;
    fn native_fc_ack(
        conf: *const intf::SpringConf,
        flow_count: *mut intf::FlowCount,
        mark: *mut intf::Mark,
        ack: u32,
        now_ns: u64,
    );
    fn native_opt_read(walk: *mut NativeWalk);
}

/// Several CPUs charge one account while its rate changes and others look: no charge is lost. The queue that
/// they see is so long that no look takes anything back. Nobody charges amid a change of the rate: a busy
/// machine may stop a thread there for long, as no program of the kernel is stopped, and what the others
/// charge meanwhile counts at the wrong rate.
#[test]
fn threads_owe_what_they_were_charged() {
    const THREADS: usize = 4;
    const PACKETS: u64 = 50_000;
    const BYTES: u32 = 1_000;
    const NOW_NS: u64 = 1 << 40;
    let confs = [1_000_000_000u64, 500_000_000].map(|byte_s| {
        let rate = Rate::from_bit_s(byte_s * 8).expect("more than zero");
        intf::WaitConf::from(WaitConfig::new(rate, Nanos(0)))
    });
    struct Shared(std::cell::UnsafeCell<intf::Account>);
    // SAFETY: only ever touched through a pointer, by the header's atomic operations.
    unsafe impl Sync for Shared {}
    // Time stands still, so the debt stays.
    let first = intf::Account { finish_ns: NOW_NS, cost: confs[0].cost, ..Default::default() };
    let shared = Shared(first.into());
    let in_force = std::sync::RwLock::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (shared, confs, in_force) = (&shared, &confs, &in_force);
            scope.spawn(move || {
                let account = shared.0.get();
                for i in 0..PACKETS {
                    if thread == 0 && i.is_multiple_of(5_000) {
                        let mut index = in_force.write().expect("no thread panics");
                        *index = (i / 5_000) as usize % 2;
                        // SAFETY: the account lives as long as `shared`.
                        unsafe { native_wt_look(&confs[*index], account, NOW_NS, u64::MAX) };
                    }
                    let index = in_force.read().expect("no thread panics");
                    let conf = &confs[*index];
                    // SAFETY: as above.
                    unsafe {
                        if thread == 0 && i.is_multiple_of(4) {
                            native_wt_look(conf, account, NOW_NS, u64::MAX);
                        }
                        native_wt_charge(conf, account, NOW_NS, BYTES);
                    }
                }
            });
        }
    });
    // At the first rate a byte takes 1 ns. The rates are a power of two apart, so no change rounds.
    let account = shared.0.into_inner();
    let cost_ns = if account.cost == confs[0].cost { 1 } else { 2 };
    let bytes = (account.finish_ns - NOW_NS) / cost_ns;
    let all = THREADS as u64 * PACKETS * u64::from(BYTES);
    assert_eq!(bytes, all);
}

/// Small and large alike.
fn any_u64() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..2_000_000, 0u64..1 << 34, any::<u64>()]
}

proptest! {
    #[test]
    fn marks_are_the_models(
        threshold_bytes in prop_oneof![1000u64..100_000, 0..=dem::MAX_BYTES],
        pi: bool,
        steps in prop::collection::vec(
            (0u64..5_000_000, prop_oneof![0u64..100_000, any::<u64>()], 0u32..100, any::<bool>()), 1..200),
    ) {
        let law = if pi { DemLaw::Pi } else { DemLaw::Step };
        let config = DemConfig { threshold_bytes, law };
        let conf = intf::DemConf::from(config);
        let (mut marker, mut due) = (Marker::default(), Due::default());
        let (mut native, mut native_due, mut now) = (intf::Marker::default(), 0u32, 1);
        for (gap, backlog, segments, scalable) in steps {
            now += gap;
            let ack = DemAck { segments, scalable };
            let expected = marker.on_ack(&config, Nanos(now), backlog, ack, &mut due);
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            let got = unsafe {
                native_dem_on_ack(
                    &conf, &mut native, &mut native_due, now, backlog, segments, scalable.into(),
                )
            };
            prop_assert_eq!(got != 0, expected);
            prop_assert_eq!(native_due, due.0);
            prop_assert_eq!(
                (native.updated_ns, native.probability, native.before_bytes),
                (marker.updated.0, marker.probability, marker.before_bytes)
            );
        }
    }

    #[test]
    fn waits_are_the_models(
        rates in (8_000u64..100_000_000_000, 100u64..100_000_000_000),
        burst in 0u64..100_000_000,
        steps in prop::collection::vec(
            (0u64..5_000_000, 0u8..20, prop_oneof![0u32..100_000, any::<u32>()], any_u64()), 1..200),
    ) {
        let configs = [rates.0, rates.1].map(|bit_s| {
            WaitConfig::new(Rate::from_bit_s(bit_s).expect("more than zero"), Nanos(burst))
        });
        let (mut account, mut native, mut now) = (Account::default(), intf::Account::default(), 1);
        for (gap, what, bytes, queued) in steps {
            now += gap;
            // Now and then the limit changes.
            let (comes, config) = (what % 2 == 0, configs[usize::from(what >= 18)]);
            let conf = intf::WaitConf::from(config);
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            unsafe {
                if comes {
                    account.charge(&config, Nanos(now), bytes);
                    native_wt_charge(&conf, &mut native, now, bytes);
                } else {
                    let expected = account.look(&config, Nanos(now), Nanos(queued));
                    prop_assert_eq!(native_wt_look(&conf, &mut native, now, queued), expected.0);
                }
            }
            prop_assert_eq!(
                (native.finish_ns, native.carry, native.cost),
                (account.finish.0, account.carry, account.cost)
            );
            // SAFETY: the pointer is to a live value of the layout that the header declares.
            let (debt, short) =
                unsafe { (native_wt_debt(&native, now), native_wt_short_debt(&native, now)) };
            prop_assert_eq!(debt, account.debt(Nanos(now)).0);
            prop_assert_eq!(short, account.short_debt(Nanos(now)).0);
        }
    }

    #[test]
    fn counts_are_the_models(
        byte_s in any_u64(),
        steps in prop::collection::vec((0usize..3, 0u64..2_000_000_000, any_u64()), 1..200),
    ) {
        let config = Config { byte_s, target: Nanos(0) };
        let conf = intf::SpringConf::from(config);
        let (mut flow_count, mut native) = (FlowCount::default(), intf::FlowCount::default());
        let (mut marks, mut natives) = ([Mark::default(); 3], [intf::Mark::default(); 3]);
        let (mut now, mut acked) = (0, [0u32; 3]);
        for (flow, gap, bytes) in steps {
            now += gap;
            acked[flow] = acked[flow].wrapping_add(bytes as u32);
            flow_count.count(&config, &mut marks[flow], acked[flow], Nanos(now));
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            unsafe { native_fc_ack(&conf, &mut native, &mut natives[flow], acked[flow], now) };
            prop_assert_eq!(
                (native.start_ns, native.period_ns, native.number),
                (flow_count.start.0, flow_count.period.0, flow_count.number)
            );
            prop_assert_eq!((native.sums.into(), native.before.into()), (flow_count.sums, flow_count.before));
            let (mark, native) = (marks[flow], natives[flow]);
            let mark = (mark.at.0, mark.acked, mark.number);
            prop_assert_eq!((native.at_ns, native.acked, native.number), mark);
        }
    }

    #[test]
    fn shares_and_windows_are_the_models(
        share in prop_oneof![0..2 * spring::ONE, any::<u64>()],
        byte_s in any_u64(), target in any_u64(), elapsed in any_u64(), left_bytes in any_u64(),
        backlog in any_u64(), rtt in any_u64(), flows in prop_oneof![0u32..100, any::<u32>()],
        mss: u16, hash: u32, number: u32,
    ) {
        let config = Config { byte_s, target: Nanos(target) };
        let conf = intf::SpringConf::from(config);
        let epoch = Epoch {
            elapsed: Nanos(elapsed), left_bytes, backlog: Nanos(backlog), rtt: Nanos(rtt), flows,
        };
        let native = NativeEpoch {
            elapsed_ns: elapsed, left_bytes, backlog_ns: backlog, rtt_ns: rtt, flows, pad: 0,
        };
        let window = spring::window(&config, share, Nanos(rtt), mss, spring::phase(hash, number));
        // SAFETY: every pointer is to a live value of the layout that the header declares.
        unsafe {
            let next = spring::next_share(share, &config, &epoch);
            prop_assert_eq!(native_sp_next(share, &conf, &native), next);
            prop_assert_eq!(native_sp_join(share, flows), spring::join(share, flows));
            prop_assert_eq!(
                native_sp_epoch_ns(&conf, rtt, flows, mss),
                spring::epoch_length(&config, Nanos(rtt), flows, mss).0
            );
            prop_assert_eq!(native_sp_window(&conf, share, rtt, mss, hash, number), window);
        }
    }

    #[test]
    fn round_trips_are_the_models(
        steps in prop::collection::vec(
            (any::<bool>(), any_u64(), any::<u32>(), any_u64(), prop_oneof![90u64..110, any::<u64>()]),
            1..200,
        ),
    ) {
        let (mut model, mut native) = (spring::RoundTrip::default(), intf::RoundTrip::default());
        let mut now = 1u64;
        for (data, gap, number, wait, cost) in steps {
            now = now.wrapping_add(gap);
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            unsafe {
                if data {
                    model.on_data(number, Nanos(now), Nanos(wait), cost);
                    native_sp_rtt_data(&mut native, number, now, wait, cost);
                } else {
                    let got = native_sp_rtt_ack(&mut native, number, now, cost);
                    prop_assert_eq!(got != 0, model.on_ack(number, Nanos(now), cost));
                }
            }
            prop_assert_eq!(
                (native.sent_ns, native.least_ns, native.recent_ns, native.since_ns),
                (model.sent.0, model.least.0, model.recent.0, model.since.0)
            );
        }
    }

    #[test]
    fn edges_are_the_models(
        start: u32, scale: u8,
        steps in prop::collection::vec(
            (prop_oneof![-3000i32..3000, any::<i32>()], any::<u16>(), any::<bool>(), any::<u32>(),
             any::<u16>()),
            1..200),
    ) {
        let (mut model, mut native) = (spring::Edge::default(), intf::Edge::default());
        let mut number = start;
        for (by, raw, bare, window, mss) in steps {
            number = number.wrapping_add_signed(by);
            let ack = NativeAck { ack: number, raw, scale, bare: bare.into() };
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            let (said, beyond) = unsafe {
                let said = native_sp_say(&mut native, &ack, window);
                (said, native_sp_is_beyond(&native, number.wrapping_add(window), mss) != 0)
            };
            prop_assert_eq!(said, model.say(&Ack { ack: number, raw, scale, bare }, window));
            prop_assert_eq!((native.edge, native.ack, native.raw, native.said),
                            (model.edge, model.ack, model.raw, model.said));
            prop_assert_eq!(beyond, model.is_beyond(number.wrapping_add(window), mss));
        }
    }

    /// Any bytes, and such as are nearly options.
    #[test]
    fn options_are_read(
        bytes in prop::collection::vec(prop_oneof![0u8..6, any::<u8>()], 0..=40),
    ) {
        let mut walk =
            NativeWalk { options: [3; 64], len: bytes.len() as u32, at: 0, mss: 0, scale: 0, has_scale: 0 };
        walk.options[..bytes.len()].copy_from_slice(&bytes);
        // SAFETY: the pointer is to a live value of the layout that the header declares.
        unsafe { native_opt_read(&mut walk) };
        let scale = (walk.has_scale != 0).then_some(walk.scale);
        prop_assert_eq!((walk.mss, scale), options(&bytes));
    }
}

mod threads {
    use std::{
        cell::UnsafeCell,
        sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
        thread,
    };

    use tidegate_core::{Nanos, Rate};

    use super::{AcksOptions, Law, intf};

    unsafe extern "C" {
        fn native_ac_count_flow(state: *mut intf::State, seen: *mut u32) -> i32;
        fn native_ac_turn_epoch(
            limit: *const intf::Limit,
            state: *mut intf::State,
            now_ns: u64,
        ) -> i32;
    }

    struct Shared(UnsafeCell<intf::State>);

    // SAFETY: only C touches it, by atomic operations or while it alone may.
    unsafe impl Sync for Shared {}

    /// Several CPUs count flows and end epochs: each flow counts at most once in an epoch, and all that were
    /// counted are in one.
    #[test]
    fn a_flow_counts_once_an_epoch() {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 100_000;
        const FLOWS: usize = 5;
        let limit = AcksOptions {
            law: Law::Spring,
            rate: Rate::from_bit_s(1_000_000_000).unwrap(),
            mark: None,
            burst: Nanos(1_000_000),
            lease: None,
        }
        .encode()[0];
        let state = Shared(UnsafeCell::default());
        let seen: [AtomicU32; FLOWS] = Default::default();
        let (now, counted, in_epochs) =
            (AtomicU64::new(1 << 40), AtomicU64::new(0), AtomicU64::new(0));
        let most = AtomicU32::new(0);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (state, seen, now, limit) = (&state, &seen, &now, &limit);
                let (counted, in_epochs, most) = (&counted, &in_epochs, &most);
                scope.spawn(move || {
                    for i in 0..ROUNDS {
                        let counts = |flow: &AtomicU32| {
                            // SAFETY: both live through the call; C changes them as several CPUs may.
                            unsafe { native_ac_count_flow(state.0.get(), flow.as_ptr()) }
                        };
                        let count = || seen.iter().map(counts).sum::<i32>();
                        counted.fetch_add(count().unsigned_abs().into(), SeqCst);
                        // Two end epochs, at any moment of what the others do.
                        if thread % 2 == 1 {
                            continue;
                        }
                        (0..i * 7_919 % 61).for_each(|_| std::hint::spin_loop());
                        let now_ns = now.fetch_add(400_000_000, SeqCst);
                        // SAFETY: as above.
                        let flows = unsafe { native_ac_turn_epoch(limit, state.0.get(), now_ns) };
                        // One more than there were; none if it has not ended.
                        let flows = flows.unsigned_abs().saturating_sub(1);
                        in_epochs.fetch_add(flows.into(), SeqCst);
                        most.fetch_max(flows, SeqCst);
                    }
                });
            }
        });
        let left = u64::from(state.0.into_inner().flows);
        assert!(in_epochs.load(SeqCst) > FLOWS as u64, "{in_epochs:?}");
        assert_eq!(counted.load(SeqCst), in_epochs.load(SeqCst) + left);
        assert!(most.load(SeqCst) <= FLOWS as u32, "{most:?} of {FLOWS} flows in an epoch");
    }
}
