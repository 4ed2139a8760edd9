//! Axes: a range, its ticks, and the way from a value to a pixel.

/// How values are spread over the axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spread {
    Linear,
    Logarithmic,
}

/// The share of an end value that a logarithmic axis leaves free beyond it.
const ROOM: f64 = 0.02;

/// A range of values, mapped onto a range of pixels.
#[derive(Clone, Debug)]
pub struct Axis {
    spread: Spread,
    low: f64,
    high: f64,
    start_px: f64,
    end_px: f64,
    /// Where labels go.
    pub ticks: Vec<f64>,
}

impl Axis {
    /// From zero to the first tick at or above `max`, with about `count` ticks.
    pub fn from_zero(max: f64, count: usize) -> Axis {
        let max = if max > 0.0 { max } else { 1.0 };
        let step = nice_step(max / count as f64);
        let steps = (max / step - 1e-9).ceil();
        let ticks = (0..=steps as usize).map(|at| at as f64 * step).collect();
        Axis::new(Spread::Linear, 0.0, steps * step, ticks)
    }

    /// From `low` to `high`, or to the tick just above, with about `count` ticks.
    pub fn spanning(low: f64, high: f64, count: usize) -> Axis {
        let high = if high > low { high } else { low + 1.0 };
        let step = nice_step((high - low) / count as f64);
        let next = (high / step).ceil() * step;
        let high = if next - high < step * 0.15 { next } else { high };
        let first = (low / step - 1e-9).ceil() as i64;
        let last = (high / step + 1e-9).floor() as i64;
        let ticks = (first..=last).map(|at| at as f64 * step).collect();
        Axis::new(Spread::Linear, low, high, ticks)
    }

    /// Logarithmic, to the round steps around the range of the values; those that are not positive
    /// have no place on it. The wider the range, the fewer steps get a tick.
    pub fn logarithmic(values: impl IntoIterator<Item = f64>) -> Axis {
        let positive = values.into_iter().filter(|&v| v > 0.0 && v.is_finite());
        let (min, max) = positive.fold((f64::INFINITY, 0.0_f64), |(l, h), v| (l.min(v), h.max(v)));
        let (min, max) = if max > 0.0 { (min, max) } else { (1.0, 10.0) };
        let factors: &[f64] =
            if max / min <= 8.0 { &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0] } else { &[1.0, 2.0, 5.0] };
        let steps = log_steps(min / 10.0, max * 10.0, factors);
        let low = steps.iter().rev().find(|&&s| s <= min * (1.0 - ROOM)).copied().unwrap_or(min);
        let high =
            steps.iter().find(|&&s| s >= max * (1.0 + ROOM) && s > low).copied().unwrap_or(max);
        let decades = (high / low).log10();
        let wanted = |step: &f64| *step >= low * 0.999 && *step <= high * 1.001;
        let labelled = |step: &f64| decades <= 3.1 || is_decade(*step);
        let ticks = steps.into_iter().filter(wanted).filter(labelled).collect();
        Axis::new(Spread::Logarithmic, low, high, ticks)
    }

    fn new(spread: Spread, low: f64, high: f64, ticks: Vec<f64>) -> Axis {
        Axis { spread, low, high, start_px: 0.0, end_px: 1.0, ticks }
    }

    /// The axis from pixel `start` to pixel `end`, which may be the smaller.
    pub fn over(mut self, start: f64, end: f64) -> Axis {
        (self.start_px, self.end_px) = (start, end);
        self
    }

    /// The largest value.
    pub fn high(&self) -> f64 {
        self.high
    }

    /// The pixel of a value; values outside are put on the nearer end.
    pub fn px(&self, value: f64) -> f64 {
        let share = match self.spread {
            Spread::Linear => (value - self.low) / (self.high - self.low),
            Spread::Logarithmic if value <= 0.0 => 0.0,
            Spread::Logarithmic => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        self.start_px + share.clamp(0.0, 1.0) * (self.end_px - self.start_px)
    }
}

/// The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `least`.
fn nice_step(least: f64) -> f64 {
    let decade = 10_f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|f| f * decade >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * decade
}

/// The factors times each power of ten, from `low` to `high`.
fn log_steps(low: f64, high: f64, factors: &[f64]) -> Vec<f64> {
    let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
    let steps = decades.flat_map(|decade| factors.iter().map(move |f| f * 10_f64.powi(decade)));
    steps.filter(|&step| step >= low && step <= high).collect()
}

fn is_decade(step: f64) -> bool {
    (step.log10() - step.log10().round()).abs() < 1e-6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_zero_ends_on_a_tick() {
        let axis = Axis::from_zero(958.0, 5);
        assert_eq!(axis.ticks, [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        assert_eq!(Axis::from_zero(0.0, 5).high(), 1.0);
    }

    #[test]
    fn spanning_keeps_its_end_or_takes_the_tick_just_above() {
        let axis = Axis::spanning(0.0, 9.5, 5).over(0.0, 95.0);
        assert_eq!(axis.ticks, [0.0, 2.0, 4.0, 6.0, 8.0]);
        assert!((axis.px(9.5) - 95.0).abs() < 1e-9);
        assert_eq!(Axis::spanning(0.0, 9.9, 5).high(), 10.0);
    }

    #[test]
    fn log_over_few_decades_has_steps_between() {
        let axis = Axis::logarithmic([31.0, 950.0]);
        assert_eq!(axis.ticks, [20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]);
    }

    #[test]
    fn log_within_a_decade_has_finer_steps() {
        let axis = Axis::logarithmic([31.0, 70.0]);
        assert_eq!(axis.ticks, [30.0, 50.0, 70.0, 100.0]);
    }

    #[test]
    fn log_over_many_decades_has_decades() {
        let axis = Axis::logarithmic([31.0, 150_000.0]);
        assert_eq!(axis.ticks, [100.0, 1000.0, 10_000.0, 100_000.0]);
    }

    #[test]
    fn log_survives_any_values() {
        for values in [vec![], vec![0.0], vec![5.0], vec![f64::NAN, 3.0], vec![1e-9, 1e9]] {
            let axis = Axis::logarithmic(values.clone()).over(0.0, 100.0);
            for value in [0.0, -1.0, 5.0, 1e12] {
                assert!((0.0..=100.0).contains(&axis.px(value)), "{values:?} {value}");
            }
        }
    }

    #[test]
    fn pixels_may_run_upwards() {
        let axis = Axis::from_zero(10.0, 5).over(400.0, 100.0);
        assert_eq!(axis.px(0.0), 400.0);
        assert_eq!(axis.px(10.0), 100.0);
        assert_eq!(axis.px(5.0), 250.0);
    }
}
