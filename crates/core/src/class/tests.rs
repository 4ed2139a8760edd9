use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::fair_share::{self, Epoch, ONE, Sharers, TARGET};
use crate::queue_options::VirtualQueueOptions;

const ROOT: Rate = Rate::from_bit_s(1_000_000_000).unwrap();

fn mbit(mbit: u64) -> Option<Rate> {
    Rate::from_bit_s(mbit * 1_000_000)
}

#[test]
fn a_class_has_its_guarantee_a_part_and_no_more_than_its_ceiling() {
    let class = Class { guarantee: mbit(100), weight: 200 };
    let rate =
        |ceiling, share| class.rate(mbit(ceiling).unwrap(), ROOT, share).bit_s() as f64 / 1e6;
    assert!((rate(1000, ONE / 10) - 300.0).abs() < 0.1);
    assert!((rate(250, ONE / 10) - 250.0).abs() < 0.1);
    assert!((rate(1000, 0) - 100.0).abs() < 0.1);
    assert!((rate(2000, ONE) - 1000.0).abs() < 0.1, "never more than its parent");
    let nothing = Class { guarantee: None, weight: 1 };
    assert_eq!(nothing.rate(ROOT, ROOT, 0).bit_s(), MIN_RATE_BIT_S);
}

#[test]
fn thresholds_in_bytes_are_longer_at_a_lower_rate() {
    let options = VirtualQueueOptions::paced(ROOT);
    let config = options.config().unwrap();
    let floors = options.floors();
    let slow = Rate::from_bit_s(10_000_000).unwrap();
    let expected = VirtualQueueOptions::paced(slow).config().unwrap();
    let got = config_at(&config, &floors, virtual_queue::cost_of_byte(slow));
    assert_eq!(got.cost, expected.cost);
    for (got, expected) in [
        (got.burst, expected.burst),
        (got.mark, expected.mark),
        (got.drop, expected.drop),
        (got.large_drop, expected.large_drop),
    ] {
        assert!(got.0.abs_diff(expected.0) <= 2, "{got} for {expected}");
    }
    assert_eq!(config_at(&config, &floors, virtual_queue::cost_of_byte(ROOT)), config);
}

/// A class that wants `demand` of its parent's rate.
#[derive(Debug, Clone, Copy)]
struct Sibling {
    demand: f64,
    ceiling: f64,
    guarantee: f64,
    weight: u32,
}

impl Sibling {
    fn class(&self) -> Class {
        Class { guarantee: Rate::from_bit_s(bits(self.guarantee)), weight: self.weight }
    }
}

fn bits(part: f64) -> u64 {
    (part * ROOT.bit_s() as f64) as u64
}

/// Drives siblings whose rates follow the parent's share one epoch late; returns what each uses in the end,
/// as a part of the parent's rate, and the highest load of the second half.
fn drive(siblings: &[Sibling], epochs: usize) -> (Vec<f64>, f64) {
    let sharers = Sharers {
        count: siblings.len() as u32,
        weight: siblings.iter().map(|s| s.weight).sum(),
        lightest: siblings.iter().map(|s| s.weight).min().unwrap_or(100),
        reserved: siblings.iter().map(|s| (s.guarantee * ONE as f64) as u64).sum(),
    };
    let burst = Nanos(24_000);
    let length = fair_share::epoch_length(sharers.count, burst);
    let mut share = fair_share::make_room(TARGET, &sharers);
    let (mut heard, mut backlog, mut used, mut highest) = (share, 0f64, Vec::new(), 0f64);
    for epoch in 0..epochs {
        used = siblings
            .iter()
            .map(|s| {
                let ceiling = Rate::from_bit_s(bits(s.ceiling)).unwrap();
                let rate = s.class().rate(ceiling, ROOT, heard).bit_s();
                s.demand.min(rate as f64 / ROOT.bit_s() as f64)
            })
            .collect();
        let load: f64 = used.iter().sum();
        if epoch >= epochs / 2 {
            highest = highest.max(load);
        }
        backlog = (backlog + (load - 1.0) * length.0 as f64).max(0.0);
        heard = share;
        share = fair_share::next_share(
            share,
            &Epoch {
                elapsed: length,
                charged: Nanos((load * length.0 as f64) as u64),
                backlog: Nanos((backlog - 2e6).max(0.0) as u64),
                rtt: Nanos(2 * length.0),
                burst,
                sharers,
            },
        );
    }
    (used, highest)
}

/// The shares of HTB: guarantees first, the rest in proportion to the weights among those that want more.
fn ideal(siblings: &[Sibling], target: f64) -> Vec<f64> {
    let at = |level: f64| -> Vec<f64> {
        let rate = |s: &Sibling| {
            s.demand.min(s.ceiling).min(s.guarantee + level * f64::from(s.weight) / 100.0)
        };
        siblings.iter().map(rate).collect()
    };
    let (mut low, mut high) = (0.0, 200.0);
    for _ in 0..100 {
        let middle = (low + high) / 2.0;
        if at(middle).iter().sum::<f64>() > target { high = middle } else { low = middle }
    }
    at(low)
}

#[test]
fn guarantees_are_kept_and_the_rest_is_shared_by_weight() {
    let greedy = |guarantee, weight| Sibling { demand: 1.0, ceiling: 1.0, guarantee, weight };
    let (used, _) = drive(&[greedy(0.3, 100), greedy(0.1, 300), greedy(0.0, 100)], 400);
    let expected = [0.3 + 0.59 / 5.0, 0.1 + 0.59 * 0.6, 0.59 / 5.0];
    for (used, expected) in used.iter().zip(expected) {
        assert!((used - expected).abs() < 0.01, "{used} for {expected}");
    }
}

#[test]
fn what_a_sibling_leaves_is_borrowed() {
    let idle = Sibling { demand: 0.02, ceiling: 1.0, guarantee: 0.5, weight: 100 };
    let light = Sibling { demand: 1.0, ceiling: 1.0, guarantee: 0.0, weight: 1 };
    let (used, _) = drive(&[idle, light], 2000);
    assert!(used[1] > 0.95, "{used:?}");
}

proptest! {
    /// Any siblings come to what HTB would give them, and stay below the parent's rate.
    #[test]
    fn any_siblings_settle_on_the_ideal(
        siblings in prop::collection::vec(
            (0.01f64..1.0, 0.05f64..1.0, 0.0f64..0.12, 10u32..1000).prop_map(
                |(demand, ceiling, guarantee, weight)| Sibling {
                    demand, ceiling: ceiling.max(guarantee), guarantee, weight,
                },
            ),
            1..8,
        ),
    ) {
        let (used, highest) = drive(&siblings, 4000);
        let ideal = ideal(&siblings, 0.99);
        for (used, ideal) in used.iter().zip(&ideal) {
            prop_assert!((used - ideal).abs() < 0.04, "{:?} for {:?}", used, ideal);
        }
        prop_assert!(highest < 1.02, "load {}", highest);
    }

    /// No input of user or kernel overflows, and no class has more than its parent or its ceiling.
    #[test]
    fn a_rate_keeps_its_bounds(
        guarantee in prop::option::of(8_000u64..=100_000_000_000),
        weight in MIN_WEIGHT..=MAX_WEIGHT,
        ceiling in 8_000u64..=100_000_000_000,
        parent in 8_000u64..=100_000_000_000,
        share: u64,
        floors in any::<[u32; 3]>(),
    ) {
        let class = Class { guarantee: guarantee.and_then(Rate::from_bit_s), weight };
        let ceiling = Rate::from_bit_s(ceiling).unwrap();
        let rate = class.rate(ceiling, Rate::from_bit_s(parent).unwrap(), share);
        prop_assert!(rate <= ceiling && rate.bit_s() <= parent && rate.bit_s() >= MIN_RATE_BIT_S);
        let config = VirtualQueueOptions::new(ceiling).config().unwrap();
        let [burst, mark, drop] = floors.map(|bytes| Bytes(u64::from(bytes)));
        let now = config_at(&config, &Floors { burst, mark, drop }, virtual_queue::cost_of_byte(rate));
        prop_assert!(now.mark < now.large_drop && now.large_drop <= now.drop && now.drop <= MAX_SPAN);
        prop_assert!(now.burst >= config.burst);
    }
}
