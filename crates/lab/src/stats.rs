//! The few statistics that reports need, over plain slices.
//!
//! Every function returns `None` where the figure is undefined (no data, a mean of zero), never a
//! NaN. Unless said otherwise: time O(n log n) for the sort, O(n) memory for the copy.

use hdrhistogram::Histogram;

/// Median and range of repeated runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The middle run, or the mean of the two in the middle.
    pub median: f64,
    /// The smallest run.
    pub min: f64,
    /// The largest run.
    pub max: f64,
    pub runs: usize,
}

impl Summary {
    /// Summarises the runs; `None` without any.
    pub fn of(values: &[f64]) -> Option<Summary> {
        let (min, max) = range(values)?;
        Some(Summary { median: median(values)?, min, max, runs: values.len() })
    }
}

/// The median; the mean of the two middle values when their number is even.
pub fn median(values: &[f64]) -> Option<f64> {
    percentile(values, 50.0)
}

/// The smallest and the largest value. O(n).
pub fn range(values: &[f64]) -> Option<(f64, f64)> {
    let first = *values.first()?;
    Some(values.iter().fold((first, first), |(low, high), &v| (low.min(v), high.max(v))))
}

/// The `percent`-th percentile (0 to 100), linear between the two nearest ranks: Hyndman and Fan's
/// type 7, the default of NumPy and R, so that a reader who loads the rows finds the same figure.
pub fn percentile(values: &[f64], percent: f64) -> Option<f64> {
    if values.is_empty() || !(0.0..=100.0).contains(&percent) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let below = sorted[rank.floor() as usize];
    let above = sorted[rank.ceil() as usize];
    Some(below + (above - below) * rank.fract())
}

/// The arithmetic mean. O(n).
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Jain's fairness index, (Σx)² / (n Σx²): 1 when all shares are equal, 1/n when one has it all
/// (Jain, Chiu and Hawe, DEC TR-301, 1984). O(n).
pub fn jain(shares: &[f64]) -> Option<f64> {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|x| x * x).sum();
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

/// The coefficient of variation: the sample standard deviation (n - 1) over the mean. O(n).
pub fn variation(values: &[f64]) -> Option<f64> {
    let mean = mean(values)?;
    if values.len() < 2 || mean == 0.0 {
        return None;
    }
    let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt() / mean)
}

/// The distribution of raw samples as (value, share of samples at or below it), ascending, one point
/// a distinct value.
pub fn cdf(samples: &[f64]) -> Vec<(f64, f64)> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut points: Vec<(f64, f64)> = Vec::new();
    for (at, &value) in sorted.iter().enumerate() {
        let share = (at + 1) as f64 / sorted.len() as f64;
        match points.last_mut() {
            Some(last) if last.0 == value => last.1 = share,
            _ => points.push((value, share)),
        }
    }
    points
}

/// The same from a histogram, one point a bucket that holds samples. O(buckets).
pub fn histogram_cdf(histogram: &Histogram<u64>) -> Vec<(f64, f64)> {
    let total = histogram.len() as f64;
    let mut seen = 0;
    histogram
        .iter_recorded()
        .map(|bucket| {
            seen += bucket.count_since_last_iteration();
            (bucket.value_iterated_to() as f64, seen as f64 / total)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_none() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[7.0]), Some(7.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn summary_keeps_the_range() {
        let summary = Summary::of(&[945.0, 958.0, 951.0]);
        assert_eq!(summary, Some(Summary { median: 951.0, min: 945.0, max: 958.0, runs: 3 }));
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn range_of_negatives() {
        assert_eq!(range(&[-3.0, -1.0]), Some((-3.0, -1.0)));
    }

    #[test]
    fn percentiles_agree_with_numpy() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        for (percent, expected) in
            [(0.0, 1.0), (25.0, 3.25), (90.0, 9.1), (99.0, 9.91), (100.0, 10.0)]
        {
            let got = percentile(&values, percent).unwrap();
            assert!((got - expected).abs() < 1e-12, "p{percent}: {got}");
        }
        assert_eq!(percentile(&values, 101.0), None);
        assert_eq!(percentile(&values, f64::NAN), None);
    }

    #[test]
    fn jain_at_its_two_ends() {
        assert_eq!(jain(&[5.0; 8]), Some(1.0));
        assert_eq!(jain(&[8.0, 0.0, 0.0, 0.0]), Some(0.25));
        assert_eq!(jain(&[]), None);
        assert_eq!(jain(&[0.0, 0.0]), None);
    }

    #[test]
    fn variation_is_relative() {
        let once = variation(&[90.0, 100.0, 110.0]).unwrap();
        let tenfold = variation(&[900.0, 1000.0, 1100.0]).unwrap();
        assert!((once - 0.1).abs() < 1e-12);
        assert!((once - tenfold).abs() < 1e-12);
        assert_eq!(variation(&[1.0]), None);
        assert_eq!(variation(&[-1.0, 1.0]), None);
    }

    #[test]
    fn cdf_merges_equal_samples() {
        assert_eq!(cdf(&[2.0, 1.0, 2.0, 4.0]), [(1.0, 0.25), (2.0, 0.75), (4.0, 1.0)]);
        assert!(cdf(&[]).is_empty());
    }

    #[test]
    fn histogram_cdf_ends_at_one() {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        for value in [10, 10, 20, 40] {
            histogram.record(value).unwrap();
        }
        assert_eq!(histogram_cdf(&histogram), [(10.0, 0.5), (20.0, 0.75), (40.0, 1.0)]);
        assert!(histogram_cdf(&Histogram::<u64>::new(3).unwrap()).is_empty());
    }
}
