//! Figures as SVG: grouped bars, lines over time, cumulative distributions, curves over decades.
//!
//! ```text
//! bars, lines, cdf, curves -> axis (ticks, mapping) -> canvas (strokes and text, through plotters)
//! ```
//!
//! A figure holds data and draws itself; a system has one colour everywhere ([`palette`]). plotters
//! strokes and fills; axes and legends are ours, since plotters sets labels by a guess at the font
//! that lets them overlap, and its logarithmic axis cannot label 1-2-5.

mod axis;
mod bars;
mod canvas;
mod cdf;
mod curves;
mod lines;
pub mod palette;

pub use bars::{Bar, Bars, BarsOf, Group};
pub use cdf::Cdf;
pub use curves::Curves;
pub use lines::Lines;

/// A figure of a report.
#[derive(Clone, Debug)]
pub enum Figure {
    /// Grouped bars.
    Bars(Bars),
    /// Lines over time.
    Lines(Lines),
    /// A cumulative distribution.
    Cdf(Cdf),
    /// Curves over decades.
    Curves(Curves),
}

impl Figure {
    /// The title.
    pub fn title(&self) -> &str {
        match self {
            Figure::Bars(bars) => &bars.title,
            Figure::Lines(lines) => &lines.title,
            Figure::Cdf(cdf) => &cdf.title,
            Figure::Curves(curves) => &curves.title,
        }
    }

    /// The figure as an SVG document, 900 px wide.
    ///
    /// # Errors
    ///
    /// When there is nothing to draw.
    pub fn svg(&self) -> anyhow::Result<String> {
        match self {
            Figure::Bars(bars) => bars.svg(),
            Figure::Lines(lines) => lines.svg(),
            Figure::Cdf(cdf) => cdf.svg(),
            Figure::Curves(curves) => curves.svg(),
        }
    }
}

impl From<Bars> for Figure {
    fn from(bars: Bars) -> Figure {
        Figure::Bars(bars)
    }
}

impl From<Lines> for Figure {
    fn from(lines: Lines) -> Figure {
        Figure::Lines(lines)
    }
}

impl From<Cdf> for Figure {
    fn from(cdf: Cdf) -> Figure {
        Figure::Cdf(cdf)
    }
}

impl From<Curves> for Figure {
    fn from(curves: Curves) -> Figure {
        Figure::Curves(curves)
    }
}

/// The points of one system, ascending in x.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The system; it decides the colour.
    pub system: String,
    /// (x, y) in the units that the axes' keys name.
    pub points: Vec<(f64, f64)>,
}

impl Series {
    /// A series of given points.
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
fn systems(series: &[Series]) -> Vec<&str> {
    crate::report::distinct(series.iter().map(|series| series.system.as_str()))
}

#[cfg(test)]
mod tests;
