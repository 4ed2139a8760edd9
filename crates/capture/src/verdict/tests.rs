use super::*;
use crate::fit::{DepthBasis, Mark, Pass, TokenStatistics};

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
    Pace::before_losses(series, 1e7, 1).expect("enough losses")
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
    assert!(pace.words().contains("came at 2.000 times the rate"), "{}", pace.words());
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
    assert_eq!(Pace::before_losses(&series, 1e7, 1), None);
}

/// A gap that a lost packet leaves shows a bucket. Among packets of several flows it does not.
#[test]
fn packets_at_about_the_rate_come_from_a_bucket_only_if_the_gap_is_open() {
    let paces = |burst: u64| 1.02 + 0.003 * burst as f64;
    let open = pace(&bursts(paces, 10, false));
    assert!(!open.is_of_a_queue() && !open.is_of_both(), "{open:?}");
    let several = Pace { is_alone: false, ..open };
    assert!(several.is_of_both(), "{several:?}");
    let closed = pace(&bursts(paces, 10, true));
    assert!(!closed.is_of_a_queue() && closed.is_of_both(), "{closed:?}");
    let faster = pace(&bursts(|burst| 1.2 + 0.1 * burst as f64, 10, true));
    assert!(!faster.is_of_both(), "{faster:?}");
}

/// Packets that come more slowly than the rate empty no bucket, and no queue has many paces.
#[test]
fn slow_packets_come_from_either() {
    let slow = pace(&bursts(|burst| 0.5 + 0.02 * burst as f64, 10, false));
    assert!(!slow.is_of_a_queue() && slow.is_of_both(), "{slow:?}");
}

/// A bucket of 40 packets, at 10 Mbit/s: it fills in 48 ms.
fn fit() -> Fit {
    let tokens =
        TokenStatistics { loss_mean: 0.0, loss_median: 0.0, pass_mean: 1e4, pass_median: 1e4 };
    Fit {
        rate_bit_s: 1e7,
        rate_within_bit_s: 0.0,
        depth_bytes: 60_000.0,
        depth_within_bytes: 0.0,
        basis: DepthBasis::Began,
        explained: 1.0,
        violated: 0.0,
        tokens,
        marks: 20,
        level_bytes: 60_000.0,
        spread_bytes: 0.0,
        tolerance_bytes: 1_800.0,
        loss_rank: 1.0,
        explained_loosely: 1.0,
    }
}

fn waited(median_ms: f64, upper_ms: f64, within_ms: f64, depth_bytes: f64) -> Waited {
    let delay = Delay {
        median_ns: median_ms * 1e6,
        upper_ns: upper_ms * 1e6,
        within_ns: within_ms * 1e6,
        losses: 20,
        source: DelaySource::TimeStamps,
    };
    let series = bursts(|_| 1.0, 10, true);
    Waited::weigh(&delay, &series, &Fit { depth_bytes, ..fit() })
}

/// A quarter of what the bucket takes to fill is 12 ms.
#[test]
fn the_delay_tells_a_queue_from_a_policer() {
    assert_eq!(waited(0.0, 0.5, 0.5, 60_000.0), Waited::Nothing);
    assert_eq!(waited(13.0, 13.0, 0.5, 60_000.0), Waited::Queue);
    assert_eq!(waited(12.0, 12.0, 0.5, 60_000.0), Waited::Coarse);
    // A quarter of the losses had a long queue.
    assert_eq!(waited(0.0, 30.0, 0.5, 60_000.0), Waited::Queue);
}

/// A policer makes no packet wait, and a full queue makes most of them wait.
#[test]
fn a_delay_before_some_losses_is_of_neither() {
    assert_eq!(waited(0.0, 20.0, 0.5, 60_000.0), Waited::Little);
    assert_eq!(waited(11.0, 14.0, 0.5, 60_000.0), Waited::Little);
    // One packet takes 1.2 ms, and this bucket of two fills in 2.4 ms.
    assert_eq!(waited(1.1, 1.1, 0.0, 3_000.0), Waited::Little);
    // The clock does not tell.
    assert_eq!(waited(0.5, 1.0, 1.0, 3_000.0), Waited::Coarse);
}

/// The path may move packets, but losses by chance, or a bucket without room, are no policer's.
#[test]
fn a_blurred_level_still_needs_a_bucket() {
    let series = bursts(|_| 2.0, 10, false);
    let blurred = Fit { explained: 0.5, explained_loosely: 0.95, loss_rank: 0.95, ..fit() };
    assert!(holds_loosely(&blurred, &series));
    for wrong in [
        Fit { explained_loosely: 0.8, ..blurred },
        Fit { loss_rank: 0.6, ..blurred },
        Fit { violated: 0.1, ..blurred },
        Fit { depth_bytes: 3_000.0, ..blurred },
    ] {
        assert!(!holds_loosely(&wrong, &series), "{wrong:?}");
    }
}
