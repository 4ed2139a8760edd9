//! The C of the kernel against its Rust models.

use proptest::prelude::*;
use tidegate_core::{
    Rate, Verdict,
    fleet::{
        flows::{FlowCounts, flow_hash},
        grd::Grd,
    },
};

use super::*;

unsafe extern "C" {
    fn native_sm_flow(seed: u64, words: *const u64, count: u32) -> u64;
    fn native_sm_count(counts: *mut intf::FlowCells, flow: u64, bytes: u32, random: u32);
    fn native_sm_drops(probability: u32, random: u32) -> u32;
}

proptest! {
    /// Packet by packet, cell by cell.
    #[test]
    fn the_counters_are_the_models(
        packets in prop::collection::vec(
            // Few sets and many flows, so that they contend.
            (0u64..3, 1u64..12, prop_oneof![1u32..2_000, any::<u32>()], any::<u32>()),
            1..2_000,
        ),
        heavy in any::<bool>(),
    ) {
        let mut model = FlowCounts::new();
        let mut native: intf::FlowCells = bytemuck::Zeroable::zeroed();
        for (step, (set, flow, bytes, random)) in packets.into_iter().enumerate() {
            let flow = set << 58 | flow;
            // Beyond 4 GiB in a cell, too.
            let bytes = if heavy && step % 7 == 0 { u32::MAX } else { bytes };
            model.on_packet(flow, bytes, random);
            // SAFETY: the counters are live and of the layout that the header declares.
            unsafe { native_sm_count(&mut native, flow, bytes, random) };
        }
        let cells = native.set.iter().flatten().filter(|cell| cell.flow != 0);
        let cells: Vec<_> =
            cells.map(|cell| FlowBytes { flow: cell.flow, bytes: cell.bytes }).collect();
        prop_assert_eq!(cells, model.iter().collect::<Vec<_>>());
    }

    #[test]
    fn a_flow_is_the_models(seed: u64, words in prop::collection::vec(any::<u64>(), 0..6)) {
        // SAFETY: so many words are there.
        let native = unsafe { native_sm_flow(seed, words.as_ptr(), words.len() as u32) };
        prop_assert_eq!(native, flow_hash(seed, &words));
    }

    /// GRD drops the same packets here and there.
    #[test]
    fn a_drop_is_the_models(
        limit in 8_000u64..100_000_000_000,
        excess in prop_oneof![0.0..4.0f64, 0.99..1.01f64, Just(1e30)],
        around in -3i64..=3,
        random: u32,
    ) {
        let mut grd = Grd::new(Rate::from_bit_s(limit).unwrap());
        let probability = grd.set_demand(limit as f64 * excess);
        let threshold = grd::threshold(probability);
        prop_assert!((f64::from(threshold) / 4_294_967_296.0 - probability).abs() <= 2.0f64.powi(-32));
        let edge = (i64::from(threshold) + around).clamp(0, u32::MAX.into()) as u32;
        for random in [random, edge] {
            // SAFETY: numbers alone.
            let native = unsafe { native_sm_drops(threshold, random) } == 1;
            prop_assert_eq!(native, matches!(grd.on_packet(random), Verdict::Drop(_)));
        }
    }
}
