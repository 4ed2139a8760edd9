use super::*;

/// A source of packets of 1500 bytes, `gap_ns` apart in bursts of `burst`, each `period_ns`, through a
/// bucket.
fn through(rate_bit_s: u64, depth: u64, burst: u64, gap_ns: u64, period_ns: u64) -> Series {
    let units = 8_000_000_000;
    let (mut tokens, mut last) = (depth * units, 0_u64);
    let mut series = Series { began: true, ..Series::default() };
    for start in (0..5_000_000_000).step_by(period_ns as usize) {
        for at in 0..burst {
            let now = start + at * gap_ns;
            tokens = (tokens + (now - last) * rate_bit_s).min(depth * units);
            last = now;
            if tokens >= 1_500 * units {
                tokens -= 1_500 * units;
                series.passes.push(Pass { time_ns: now, bytes: 1_500, unsure: false });
            } else {
                let after = series.passes.len() - 1;
                match series.marks.last_mut() {
                    Some(mark) if mark.after == after => mark.packets += 1,
                    _ => series.marks.push(Mark {
                        after,
                        before: after + 1,
                        time_ns: None,
                        packets: 1,
                    }),
                }
            }
        }
    }
    series
}

fn near(value: f64, wanted: f64, within: f64) {
    assert!((value / wanted - 1.0).abs() < within, "{value}, not {wanted}");
}

#[test]
fn finds_the_bucket_that_was_full_again() {
    let fit = through(20_000_000, 60_000, 300, 24_000, 250_000_000).fit().unwrap();
    near(fit.rate_bit_s, 20e6, 0.01);
    near(fit.depth_bytes, 60e3, 0.03);
    assert_eq!(fit.explained, 1.0);
    assert_eq!(fit.violated, 0.0);
    assert!(matches!(fit.basis, DepthBasis::Refilled(19..)), "{:?}", fit.basis);
}

#[test]
fn says_when_the_depth_is_unknown() {
    let mut series = through(20_000_000, 60_000, 5_000_000_000 / 400_000, 400_000, 5_000_000_000);
    let fit = series.fit().unwrap();
    assert_eq!(fit.basis, DepthBasis::Began);
    near(fit.depth_bytes, 60e3, 0.03);
    // The same without its beginning.
    series.passes.drain(..500);
    series.marks.retain(|mark| mark.after >= 500);
    for mark in &mut series.marks {
        mark.after -= 500;
        mark.before -= 500;
    }
    series.began = false;
    let fit = series.fit().unwrap();
    near(fit.rate_bit_s, 20e6, 0.001);
    assert_eq!(fit.basis, DepthBasis::AtLeast);
    assert!(fit.depth_bytes < 60e3);
}

#[test]
fn too_little_is_no_fit() {
    assert!(Series::default().fit().is_none());
    let mut series = through(20_000_000, 60_000, 300, 24_000, 250_000_000);
    series.marks.truncate(2);
    assert!(series.fit().is_none());
    // All at one time.
    for pass in &mut series.passes {
        pass.time_ns = 7;
    }
    series.marks =
        (1..40).map(|after| Mark { after, before: after + 1, time_ns: None, packets: 1 }).collect();
    let _ = series.fit_thoroughly();
}

#[test]
fn the_median_is_in_the_middle() {
    assert_eq!(median(&mut []), None);
    assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
}

/// A loss by chance finds as many tokens as any packet, one of a bucket the fewest.
#[test]
fn losses_rank_below_passes_by_chance_or_by_the_bucket() {
    assert_eq!(rank(&mut [1.0, 2.0], &mut [3.0, 4.0]), 1.0);
    assert_eq!(rank(&mut [1.0, 3.0], &mut [1.0, 3.0]), 0.5);
    let fit = through(20_000_000, 60_000, 300, 24_000, 250_000_000).fit().unwrap();
    assert!(fit.loss_rank > 0.9, "{}", fit.loss_rank);
}

/// A link behind the bucket delays packets by up to 3 ms, 7.5 kB at the rate: losses find tokens that differ
/// by as much, but never as many as passes do.
#[test]
fn a_path_that_moves_packets_blurs_the_level() {
    let mut series = through(20_000_000, 60_000, 300, 24_000, 250_000_000);
    let mut last = 0;
    for (at, pass) in series.passes.iter_mut().enumerate() {
        // The link is loaded for some packets at a time.
        let late = (at as u64 / 7).wrapping_mul(2_654_435_761) % 3_000_000;
        last = (pass.time_ns + late).max(last);
        pass.time_ns = last;
    }
    let fit = series.fit().unwrap();
    assert!(fit.explained_loosely >= 0.9 && fit.loss_rank > 0.9, "{fit:?}");
}

/// Every other packet is a datagram, captured before the bucket: nothing tells which of them are lost.
fn half_unseen(rate_bit_s: u64, depth: u64) -> Series {
    let units = 8_000_000_000;
    let (mut tokens, mut last) = (depth * units, 0_u64);
    let mut series = Series { began: true, ..Series::default() };
    for (start, number) in (0..40_u64).flat_map(|burst| (0..200_u64).map(move |n| (burst, n))) {
        // TCP pauses for a while, and datagrams do, too.
        let datagram = number < 120 && number % 2 == 1;
        let now = start * 250_000_000 + number * 100_000;
        tokens = (tokens + (now - last) * rate_bit_s).min(depth * units);
        last = now;
        let passes = tokens >= 1_500 * units;
        if passes {
            tokens -= 1_500 * units;
        }
        if passes || datagram {
            series.passes.push(Pass { time_ns: now, bytes: 1_500, unsure: datagram });
        } else if let Some(after) = series.passes.len().checked_sub(1) {
            let before = after + 1;
            series.marks.push(Mark { after, before, time_ns: Some(now), packets: 1 });
        }
    }
    series
}

/// A rate at which all datagrams passed would be too high by half.
#[test]
fn finds_the_bucket_though_many_losses_are_unseen() {
    let series = half_unseen(20_000_000, 60_000);
    assert!(series.lacks_losses());
    let level = series.search_unseen().unwrap();
    let fit = series.details(&level).unwrap();
    near(fit.rate_bit_s, 20e6, 0.01);
    near(fit.depth_bytes, 60e3, 0.05);
    let fit = series.fit_thoroughly().unwrap();
    near(fit.rate_bit_s, 20e6, 0.01);
    near(fit.depth_bytes, 60e3, 0.05);
}

#[test]
fn searches_for_no_unseen_losses_where_all_are_seen() {
    let series = through(20_000_000, 60_000, 300, 24_000, 250_000_000);
    assert!(!series.lacks_losses() && series.search_unseen().is_none());
}

/// A path that moves packets leaves a level, which losses at random places do not have.
#[test]
fn a_loose_level_is_still_a_level() {
    let mut series = through(20_000_000, 60_000, 300, 24_000, 250_000_000);
    let mut last = 0;
    for (at, pass) in series.passes.iter_mut().enumerate() {
        let late = (at as u64 / 7).wrapping_mul(2_654_435_761) % 3_000_000;
        last = (pass.time_ns + late).max(last);
        pass.time_ns = last;
    }
    let fit = series.fit().unwrap();
    assert!(crate::verdict::holds_loosely(&fit, &series), "{fit:?}");
    for (number, mark) in series.marks.iter_mut().enumerate() {
        mark.after = (number * 7_919) % (series.passes.len() - 1);
        mark.before = mark.after + 1;
    }
    series.marks.sort_by_key(|mark| mark.after);
    let fit = series.fit().unwrap();
    assert!(!crate::verdict::holds_loosely(&fit, &series), "{fit:?}");
}
