use super::*;
use crate::fit::{Mark, Pass};

/// Bursts of 20 packets at `pace` times 10 Mbit/s, of which packet `lost` is lost; the gap that it leaves is
/// closed by a queue and stays open behind a policer.
fn bursts(pace: impl Fn(u64) -> f64, lost: u64, closes_gap: bool) -> Series {
    let mut series = Series::default();
    for burst in 0..20_u64 {
        let gap_ns = (1_500.0 * 8e9 / 1e7 / pace(burst)) as u64;
        let mut time_ns = burst * 1_000_000_000;
        for at in 0..20 {
            let is_lost = at == lost;
            if !(is_lost && closes_gap) {
                time_ns += gap_ns;
            }
            if is_lost {
                let after = series.passes.len() - 1;
                series.marks.push(Mark { after, before: after + 1, time_ns: None, packets: 1 });
            } else {
                series.passes.push(Pass { time_ns, bytes: 1_500, unsure: false });
            }
        }
    }
    series
}

fn pace(series: &Series) -> Pace {
    Pace::before_losses(series, 1e7).expect("enough losses")
}

/// A queue that is empty at times has a higher rate than the bucket that fits its losses.
#[test]
fn a_queue_keeps_one_pace_and_closes_the_gap() {
    for rate in [1.0, 1.07, 2.0] {
        let pace = pace(&bursts(|_| rate, 10, true));
        assert!(pace.is_of_a_queue() && !pace.empties_a_bucket(), "{pace:?}");
    }
}

/// A sender with a line of twice the rate keeps one pace, too, but nothing closes the gap.
#[test]
fn a_policer_leaves_the_gap_open() {
    let pace = pace(&bursts(|_| 2.0, 10, false));
    assert!((pace.gap - 2.0).abs() < 0.01, "{pace:?}");
    assert!(!pace.is_of_a_queue() && pace.empties_a_bucket(), "{pace:?}");
}

/// No queue has many rates; and closed gaps show no bucket.
#[test]
fn packets_of_many_paces_come_from_no_queue() {
    let pace = pace(&bursts(|burst| 1.2 + 0.1 * burst as f64, 10, true));
    assert!(!pace.is_of_a_queue() && !pace.empties_a_bucket(), "{pace:?}");
}

#[test]
fn few_losses_show_no_pace() {
    let mut series = bursts(|_| 2.0, 10, false);
    series.marks.truncate(PACES_MIN - 1);
    assert_eq!(Pace::before_losses(&series, 1e7), None);
}
