//! Figures as SVG: lines over time, tokens of a bucket, and what others are made of. And [`text`]: colours
//! and columns on a terminal.
//!
//! ```text
//! lines, tokens -> axis (ticks, mapping) -> canvas (strokes and text, through plotters)
//! ```
//!
//! A figure holds data and draws itself; a system has one colour everywhere ([`palette`]). plotters strokes
//! and fills; axes and legends are ours, since plotters sets labels by a guess at the font that lets them
//! overlap, and its logarithmic axis cannot label 1-2-5. Keys carry the unit of what they name ([`units`]).

pub mod axis;
pub mod canvas;
mod lines;
pub mod palette;
pub mod text;
mod tokens;
pub mod units;

pub use lines::Lines;
pub use tokens::Tokens;

/// The points of one system, ascending in x.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The system; it decides the colour.
    pub system: String,
    /// (x, y) in the units that the axes' keys name.
    pub points: Vec<(f64, f64)>,
}

impl Series {
    pub fn new(system: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
        Series { system: system.into(), points }
    }

    /// A series of values that are `step` apart, each at the middle of its bin.
    pub fn every(system: impl Into<String>, step: f64, values: &[f64]) -> Series {
        let points =
            values.iter().enumerate().map(|(at, &value)| ((at as f64 + 0.5) * step, value));
        Series::new(system, points.collect())
    }
}

/// The systems of several series, in order.
pub fn systems(series: &[Series]) -> Vec<&str> {
    distinct(series.iter().map(|series| series.system.as_str()))
}

/// The items without repetition, in order. O(n · distinct), which is small here.
pub fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for item in items {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}
