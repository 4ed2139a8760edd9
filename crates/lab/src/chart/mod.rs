//! The figures of a report: those of `tidegate-chart`; cumulative distributions and curves over decades; and
//! grouped bars, which are made of rows.

mod bars;
mod cdf;
mod curves;

use tidegate_chart::axis::Axis;
use tidegate_chart::canvas::{Canvas, GRID, Plot};

pub use bars::{Bar, Bars, BarsOf, Group};
pub use cdf::Cdf;
pub use curves::Curves;
use tidegate_chart::systems;
pub use tidegate_chart::{Lines, Series, palette::Palette};

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
    pub fn title(&self) -> &str {
        match self {
            Figure::Bars(bars) => &bars.title,
            Figure::Lines(lines) => &lines.title,
            Figure::Cdf(cdf) => &cdf.title,
            Figure::Curves(curves) => &curves.title,
        }
    }

    /// The systems in it.
    pub fn systems(&self) -> Vec<&str> {
        match self {
            Figure::Bars(bars) => bars.systems(),
            Figure::Lines(Lines { series, .. })
            | Figure::Cdf(Cdf { series, .. })
            | Figure::Curves(Curves { series, .. }) => systems(series),
        }
    }

    /// The figure as an SVG document, 900 px wide, in the colours of its report.
    ///
    /// # Errors
    ///
    /// When there is nothing to draw.
    pub fn svg(&self, palette: &Palette) -> anyhow::Result<String> {
        match self {
            Figure::Bars(bars) => bars.svg(palette),
            Figure::Lines(lines) => lines.svg_in(palette),
            Figure::Cdf(cdf) => cdf.svg(palette),
            Figure::Curves(curves) => curves.svg(palette),
        }
    }
}

/// Vertical grid lines, for axes on which one reads values off.
fn vertical_grid(canvas: &Canvas<'_>, plot: Plot, axis: &Axis) -> anyhow::Result<()> {
    axis.ticks.iter().try_for_each(|&tick| {
        let x = axis.px(tick);
        canvas.line(&[(x, plot.top), (x, plot.bottom)], GRID, 1.0)
    })
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

#[cfg(test)]
mod tests;
