//! Lines over time, a line a system, with the limit as a dashed level.

use anyhow::ensure;

use super::axis::Axis;
use super::canvas::{self, INK, Key, Mark, Plot, WIDTH};
use super::{Series, palette::Palette, systems};
use crate::units::{Unit, trimmed, with_symbol};

/// Values over time: a rate in each 100 ms, say.
#[derive(Clone, Debug)]
pub struct Lines {
    pub title: String,
    /// What runs along, as a key with its unit: `time_s`.
    pub x: String,
    /// What goes up, as a key with its unit: `wire_bit_s`.
    pub y: String,
    /// The way up is logarithmic: for values that differ by orders of magnitude.
    pub logarithmic: bool,
    /// A level to hold, in the unit of `y`.
    pub limit: Option<f64>,
    pub series: Vec<Series>,
}

impl Lines {
    /// The figure as an SVG document, 900 px wide.
    ///
    /// # Errors
    ///
    /// When there is nothing to draw.
    pub fn svg(&self) -> anyhow::Result<String> {
        self.svg_in(&Palette::default())
    }

    /// The same in the colours of a report.
    ///
    /// # Errors
    ///
    /// When there is nothing to draw.
    pub fn svg_in(&self, palette: &Palette) -> anyhow::Result<String> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        ensure!(points().next().is_some(), "no points");
        ensure!(points().all(|(x, y)| x.is_finite() && y.is_finite()), "a point is no number");
        let (x_name, x_unit) = Unit::split(&self.x);
        let (y_name, y_unit) = Unit::split(&self.y);
        let systems = systems(&self.series);
        let colours = palette.colours(&systems);

        let mut keys = canvas::line_keys(&systems, &colours);
        if let Some(limit) = self.limit {
            let label = format!("limit, {}", y_unit.human(limit));
            keys.push(Key { label, mark: Mark::Dashes(INK) });
        }
        let top = canvas::head_height(&self.title, &keys);
        let plot = Plot { left: 92.0, right: WIDTH - 30.0, top, bottom: top + 310.0 };

        let x_max = points().map(|p| p.0).fold(0.0, f64::max);
        let x_min = points().map(|p| p.0).fold(0.0, f64::min);
        let y_max = points().map(|p| p.1).chain(self.limit).fold(0.0, f64::max);
        let (x_scale, y_scale) = (x_unit.axis_scale(x_max), y_unit.axis_scale(y_max));
        let x_shown = |value| x_unit.shown(value, x_scale);
        let y_shown = |value| y_unit.shown(value, y_scale);
        let x = Axis::spanning(x_shown(x_min), x_shown(x_max), 8).over(plot.left, plot.right);
        // Room above, so that a line on its limit does not run along the frame.
        let y = match self.logarithmic {
            false => Axis::from_zero(y_shown(y_max) * 1.05, 5),
            true => Axis::logarithmic(points().map(|p| p.1)),
        };
        let y = y.over(plot.bottom, plot.top);
        let y_at = |value| if self.logarithmic { y.px(value) } else { y.px(y_shown(value)) };

        canvas::svg(plot.bottom + 62.0, |canvas| {
            canvas.head(&self.title, &keys)?;
            match self.logarithmic {
                false => {
                    let name = with_symbol(&y_name, y_scale.symbol);
                    canvas.left_axis(plot, &y, &name, trimmed)?;
                }
                true => canvas.left_axis(plot, &y, &y_name, |tick| y_unit.human(tick))?,
            }
            canvas.bottom_axis(plot, &x, &with_symbol(&x_name, x_scale.symbol), trimmed)?;
            for series in &self.series {
                let at = systems.iter().position(|system| *system == series.system);
                let colour = at.map_or(INK, |at| colours[at]);
                let points = series.points.iter();
                let points: Vec<_> =
                    points.map(|&(px, py)| (x.px(x_shown(px)), y_at(py))).collect();
                canvas.line(&points, colour, 2.0)?;
            }
            if let Some(limit) = self.limit {
                let level = y_at(limit);
                canvas.dashes((plot.left, level), (plot.right, level), INK)?;
            }
            Ok(())
        })
    }
}
