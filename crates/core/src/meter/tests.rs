use proptest::prelude::*;
use std::vec::Vec;

use super::*;
use Colour::{Green, Red, Yellow};

fn rate(bit_s: u64) -> Rate {
    Rate::from_bit_s(bit_s).unwrap()
}

fn meter(kind: MeterKind, mode: ColourMode) -> Meter {
    Meter::new(kind.config(mode).unwrap(), Nanos(0))
}

/// A thousand bytes a millisecond.
const CIR: u64 = 8_000_000;

#[test]
fn single_rate_fills_excess_with_what_overflows() {
    let kind = MeterKind::SingleRate { cir: rate(CIR), cbs: Bytes(2_000), ebs: Bytes(1_000) };
    let mut meter = meter(kind, ColourMode::Blind);
    let mut colour = |at_us: u64| meter.on_packet(Nanos(at_us * 1_000), 1_000, Red);
    assert_eq!([colour(0), colour(0), colour(0), colour(0)], [Green, Green, Yellow, Red]);
    assert_eq!([colour(1_000), colour(1_000)], [Green, Red]);
    assert_eq!(
        [colour(4_000), colour(4_000), colour(4_000), colour(4_000)],
        [Green, Green, Yellow, Red]
    );
    // The committed bucket first, then what is over.
    assert_eq!([colour(6_500), colour(6_500), colour(6_500)], [Green, Green, Red]);
    assert_eq!([colour(9_000), colour(9_000), colour(9_000)], [Green, Green, Yellow]);
}

#[test]
fn two_rates_charge_green_to_both() {
    let kind = MeterKind::TwoRate {
        cir: rate(CIR),
        cbs: Bytes(1_000),
        pir: rate(2 * CIR),
        pbs: Bytes(2_000),
    };
    let mut meter = meter(kind, ColourMode::Blind);
    let mut colour = |at_us: u64| meter.on_packet(Nanos(at_us * 1_000), 1_000, Green);
    assert_eq!([colour(0), colour(0), colour(0)], [Green, Yellow, Red]);
    assert_eq!([colour(500), colour(500)], [Yellow, Red]);
    assert_eq!([colour(1_000), colour(1_000)], [Green, Red]);
}

#[test]
fn differentiated_keeps_its_buckets_apart() {
    let kind = MeterKind::Differentiated {
        cir: rate(CIR),
        cbs: Bytes(1_000),
        eir: rate(CIR / 2),
        ebs: Bytes(1_000),
    };
    let mut meter = meter(kind, ColourMode::Aware);
    let mut colour = |at_us: u64, incoming| meter.on_packet(Nanos(at_us * 1_000), 1_000, incoming);
    assert_eq!([colour(0, Yellow), colour(0, Yellow), colour(0, Green)], [Yellow, Red, Green]);
    assert_eq!([colour(1_000, Red), colour(1_000, Green), colour(1_000, Green)], [Red, Green, Red]);
    assert_eq!(colour(2_000, Yellow), Yellow);
}

#[test]
fn a_colour_is_never_improved() {
    let kind =
        MeterKind::TwoRate { cir: rate(CIR), cbs: Bytes(9_000), pir: rate(CIR), pbs: Bytes(9_000) };
    let mut aware = meter(kind, ColourMode::Aware);
    assert_eq!(aware.on_packet(Nanos(0), 100, Yellow), Yellow);
    assert_eq!(aware.on_packet(Nanos(0), 100, Red), Red);
    let full = 9_000 * UNITS_PER_BYTE;
    assert_eq!(aware.state(), (full, full - 100 * UNITS_PER_BYTE, Nanos(0)), "red pays nothing");
    let mut blind = meter(kind, ColourMode::Blind);
    assert_eq!(blind.on_packet(Nanos(0), 100, Red), Green);
}

#[test]
fn what_cannot_be_is_refused() {
    let kind = |cir, pir| MeterKind::TwoRate {
        cir: rate(cir),
        cbs: Bytes(1),
        pir: rate(pir),
        pbs: Bytes(1),
    };
    assert!(matches!(kind(CIR, CIR - 1).config(ColourMode::Blind), Err(MeterError::Peak { .. })));
    assert!(matches!(
        kind(1, CIR).config(ColourMode::Blind),
        Err(MeterError::Bucket(BucketError::Rate(_)))
    ));
    let bursts = |cbs, ebs| {
        MeterKind::SingleRate { cir: rate(CIR), cbs: Bytes(cbs), ebs: Bytes(ebs) }
            .config(ColourMode::Blind)
    };
    assert!(bursts(0, 0).is_err());
    assert!(bursts(MAX_BURST.0, 1).is_err());
    assert!(bursts(u64::MAX, u64::MAX).is_err());
    assert!(bursts(MAX_BURST.0, 0).is_ok() && bursts(0, MAX_BURST.0).is_ok());
}

/// The three RFCs once more, each written separately, in fractions of a byte over 8e9 without any bound.
struct Naive {
    kind: MeterKind,
    mode: ColourMode,
    first: u128,
    second: u128,
    last: u64,
}

impl Naive {
    fn on_packet(&mut self, now: u64, bytes: u32, incoming: Colour) -> Colour {
        let time = u128::from(now.saturating_sub(self.last));
        self.last = self.last.max(now);
        let units = |bytes: Bytes| u128::from(bytes.0) * u128::from(UNITS_PER_BYTE);
        let gain = |rate: Rate| u128::from(rate.bit_s()) * time;
        let cost = units(Bytes(bytes.into()));
        let is = |colour| self.mode == ColourMode::Blind || incoming <= colour;
        match self.kind {
            MeterKind::SingleRate { cir, cbs, ebs } => {
                let all = self.first + gain(cir);
                self.first = all.min(units(cbs));
                self.second = units(ebs).min(self.second + all - self.first);
                if is(Green) && self.first >= cost {
                    self.first -= cost;
                    return Green;
                }
                if is(Yellow) && self.second >= cost {
                    self.second -= cost;
                    return Yellow;
                }
                Red
            }
            MeterKind::TwoRate { cir, cbs, pir, pbs } => {
                self.first = units(cbs).min(self.first + gain(cir));
                self.second = units(pbs).min(self.second + gain(pir));
                if !is(Yellow) || self.second < cost {
                    return Red;
                }
                self.second -= cost;
                if !is(Green) || self.first < cost {
                    return Yellow;
                }
                self.first -= cost;
                Green
            }
            MeterKind::Differentiated { cir, cbs, eir, ebs } => {
                self.first = units(cbs).min(self.first + gain(cir));
                self.second = units(ebs).min(self.second + gain(eir));
                if is(Green) && self.first >= cost {
                    self.first -= cost;
                    Green
                } else if is(Yellow) && self.second >= cost {
                    self.second -= cost;
                    Yellow
                } else {
                    Red
                }
            }
        }
    }
}

fn kinds() -> impl Strategy<Value = MeterKind> {
    let burst = || prop_oneof![0u64..20_000, 0..=MAX_BURST.0 / 2].prop_map(Bytes);
    let bit_s = || prop_oneof![8_000u64..100_000_000, 8_000..=100_000_000_000u64];
    (0..3, bit_s(), bit_s(), burst(), burst().prop_map(|b| Bytes(b.0 + 1))).prop_filter_map(
        "too deep",
        |(kind, a, b, first, second)| {
            let (low, high) = (rate(a.min(b)), rate(a.max(b)));
            (first.0 + second.0 <= MAX_BURST.0).then_some(match kind {
                0 => MeterKind::SingleRate { cir: rate(a), cbs: first, ebs: second },
                1 => MeterKind::TwoRate { cir: low, cbs: first, pir: high, pbs: second },
                _ => MeterKind::Differentiated {
                    cir: rate(a),
                    cbs: first,
                    eir: rate(b),
                    ebs: second,
                },
            })
        },
    )
}

proptest! {
    #[test]
    fn is_what_the_rfcs_say(
        kind in kinds(),
        aware: bool,
        packets in prop::collection::vec(
            (prop_oneof![0u64..3_000_000, any::<u64>()], any::<u16>(), 0usize..3),
            1..300,
        ),
    ) {
        let mode = if aware { ColourMode::Aware } else { ColourMode::Blind };
        let mut exact = meter(kind, mode);
        let (first, second, _) = exact.state();
        let mut naive = Naive { kind, mode, first: first.into(), second: second.into(), last: 0 };
        let mut now = 0_u64;
        for (gap, bytes, incoming) in packets {
            now = if gap % 7 == 3 { now.saturating_sub(gap) } else { now.saturating_add(gap) };
            let incoming = [Green, Yellow, Red][incoming];
            let colour = exact.on_packet(Nanos(now), bytes.into(), incoming);
            prop_assert_eq!(colour, naive.on_packet(now, bytes.into(), incoming));
            prop_assert!(!aware || colour >= incoming);
            let (first, second, _) = exact.state();
            prop_assert_eq!((u128::from(first), u128::from(second)), (naive.first, naive.second));
        }
    }

    /// Green traffic keeps to its bucket, green and yellow together to both.
    #[test]
    fn never_more_than_its_rates(
        kind in kinds(),
        packets in prop::collection::vec((0u64..2_000_000, 60u32..1_500), 1..300),
    ) {
        let mut meter = meter(kind, ColourMode::Blind);
        let (c, cir, all_burst, all_rate) = match kind {
            MeterKind::SingleRate { cir, cbs, ebs } => (cbs, cir, cbs.0 + ebs.0, cir.bit_s()),
            MeterKind::TwoRate { cir, cbs, pir, pbs } => (cbs, cir, pbs.0, pir.bit_s()),
            MeterKind::Differentiated { cir, cbs, eir, ebs } => {
                (cbs, cir, cbs.0 + ebs.0, cir.bit_s() + eir.bit_s())
            }
        };
        let (mut now, mut green, mut all) = (0_u64, 0_u64, 0_u64);
        let colours: Vec<_> = packets
            .into_iter()
            .map(|(gap, bytes)| {
                now += gap;
                (now, bytes, meter.on_packet(Nanos(now), bytes, Green))
            })
            .collect();
        for (now, bytes, colour) in colours {
            green += if colour == Green { u64::from(bytes) } else { 0 };
            all += if colour == Red { 0 } else { u64::from(bytes) };
            prop_assert!(green <= c.0 + cir.bytes_in(Nanos(now)).0);
            prop_assert!(all <= all_burst + rate(all_rate).bytes_in(Nanos(now)).0 + 1);
        }
    }
}
