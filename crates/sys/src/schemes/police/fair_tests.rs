//! The phantom queues of a policer's flows: the C of the kernel against its model, and the loaded programs.

use proptest::prelude::*;
use tidegate_core::{
    Bytes, Nanos, Rate, Scheme, Span,
    fair_police::{FairConfig, FairPolice, SETS, WAYS},
    police::Policy,
    queue_options::VirtualQueueOptions,
    token_bucket::BucketConfig,
};

use super::{
    group_tests::{is_root, run, v4},
    *,
};

/// `struct fp_table`, in words: level, time of it, busy, cost; steps, sums of a turn; the others' cell, the
/// sets.
const TABLE_WORDS: usize = 4 + 2 + 5 + 3 + 3 * SETS * WAYS;
const LEVEL: usize = 0;
const BUSY: usize = 2;

unsafe extern "C" {
    fn native_fp_packet(
        bucket: *const intf::Bucket,
        table: *mut u64,
        times: *const u64,
        flow: u64,
        wire_bytes: u32,
        taken: u32,
    ) -> u32;
    fn native_fp_table_bytes() -> u64;
}

#[test]
fn the_table_has_the_models_cells() {
    // SAFETY: it takes nothing and returns a constant.
    assert_eq!(unsafe { native_fp_table_bytes() }, 8 * TABLE_WORDS as u64);
}

proptest! {
    /// Packet by packet what fits, and the level, are the model's; some flows share a set, and the rate
    /// changes now and then.
    #[test]
    fn the_header_is_the_model(
        bit_s in prop_oneof![8_000u64..=100_000_000_000, 8_000u64..1_000_000],
        burst in prop_oneof![1u64..200_000, 1..=1u64 << 31],
        start in 1u64..1 << 61,
        other_bit_s in 8_000u64..=100_000_000_000,
        steps in prop::collection::vec(
            (prop_oneof![0u64..3_000, 0u64..20_000_000, 0..1u64 << 50],
             prop_oneof![1u32..200, 1000u32..70_000, 0u32..1 << 20],
             0u64..9, 0.0f64..1.2, any::<bool>(), any::<bool>(), prop::bool::weighted(0.05)),
            1..300,
        ),
    ) {
        let configs = [bit_s, other_bit_s]
            .map(|bit_s| BucketConfig::new(Rate::from_bit_s(bit_s).unwrap(), Bytes(burst)).unwrap());
        let mut rate = 0;
        let mut model = FairPolice::new(FairConfig::new(&configs[rate]));
        let mut table = vec![0u64; TABLE_WORDS];
        let mut now = start;
        for (gap, wire_bytes, flow, lacks, apart, taken, changes) in steps {
            now += gap;
            rate ^= usize::from(changes);
            let config = configs[rate];
            let bucket = intf::Bucket::from(config);
            model.set_config(FairConfig::new(&config));
            let deficit = (config.fill as f64 * lacks) as u64;
            let flow = if apart { flow << 58 | 1 } else { flow + 1 };
            let times = [now, deficit];
            let fit = model.fit(Nanos(now), Nanos(now + deficit), flow, wire_bytes);
            // SAFETY: every pointer is to a live value of the layout that the header declares, and the table
            // is as long as its own, as a test has made sure.
            let got = unsafe {
                native_fp_packet(
                    &bucket, table.as_mut_ptr(), times.as_ptr(), flow, wire_bytes, taken.into(),
                )
            };
            prop_assert_eq!(got == 1, fit.fits);
            if fit.fits && taken {
                model.charge(fit);
            }
            prop_assert_eq!(table[LEVEL], model.level().0);
            prop_assert_eq!(table[BUSY], u64::from(model.busy()));
        }
    }
}

/// A flow that fills the bucket leaves others their part; on every place, and by default it does not.
#[test]
fn root_police_fair_leaves_room_for_who_comes() {
    if !is_root("root_police_fair_leaves_room_for_who_comes") {
        return;
    }
    const UDP: u8 = 17;
    /// `TC_ACT_SHOT`, and `TC_ACT_REDIRECT`: what leaves gets lost without a word.
    const SHOT: u32 = 2;
    const REDIRECT: u32 = 7;
    for (place, fair) in [
        (AttachPoint::Device, true),
        (AttachPoint::Port, true),
        (AttachPoint::Cgroup, true),
        (AttachPoint::Device, false),
        (AttachPoint::Cgroup, false),
    ] {
        // A frame is nearly a second's worth: the time that a test takes adds nothing.
        let queue = VirtualQueueOptions {
            burst: Some(Span::Size(Bytes(90_000))),
            ..VirtualQueueOptions::new("10kbit".parse().unwrap())
        };
        let options = LimitOptions {
            egress: Some(queue),
            ingress: Some(queue),
            loopback: true,
            scheme: Scheme::Police,
            police: Policy { fair, ..Policy::default() },
            ..LimitOptions::default()
        };
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, place, false).unwrap();
        let maps = maps(&police, &options.encode(0).unwrap()).unwrap();
        assert_eq!(LimitOptions::from(&maps.limit().unwrap()).police.fair, fair);
        let programs = [
            match place {
                AttachPoint::Cgroup => (&police.progs.police_egress, Direction::Egress),
                AttachPoint::Device => (&police.progs.police_out, Direction::Egress),
                AttachPoint::Port => (&police.progs.police_in, Direction::Egress),
            },
            match place {
                AttachPoint::Cgroup => (&police.progs.police_ingress, Direction::Ingress),
                AttachPoint::Device => (&police.progs.police_in, Direction::Ingress),
                AttachPoint::Port => (&police.progs.police_out, Direction::Ingress),
            },
        ];
        for (program, direction) in programs {
            let passed = || maps.read(direction).unwrap().counters.packets[0];
            let sent = |flow: u8, frames| {
                let before = passed();
                (0..frames).for_each(|_| _ = run(program, &v4(flow, UDP, 0, [1, 2]), 1));
                passed() - before
            };
            let (first, second) = (sent(1, 120), sent(2, 4));
            let leaves = matches!(
                (place, direction),
                (AttachPoint::Device, Direction::Egress) | (AttachPoint::Port, Direction::Ingress)
            );
            if place != AttachPoint::Cgroup {
                let verdict = run(program, &v4(1, UDP, 0, [1, 2]), 1);
                assert_eq!(verdict, if fair && leaves { REDIRECT } else { SHOT });
            }
            let what = format!("{place:?} {direction:?}, fair {fair}: {first}, {second}");
            match fair {
                // Eight ninths of it, and one more.
                true => assert!((70..=88).contains(&first) && second == 4, "{what}"),
                false => assert!(first >= 78 && second == 0, "{what}"),
            }
        }
    }
}
