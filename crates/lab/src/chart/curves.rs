//! Curves over a quantity that grows by decades: both axes logarithmic, a curve a system.

use anyhow::ensure;

use tidegate_chart::axis::Axis;
use tidegate_chart::canvas::{self, INK, Plot, WIDTH};
use tidegate_chart::units::Unit;
use tidegate_chart::{Series, palette::Palette, systems};

use super::vertical_grid;

/// What something costs against how much there is of it.
#[derive(Clone, Debug)]
pub struct Curves {
    pub title: String,
    /// What runs along, as a key with its unit: `elements`.
    pub x: String,
    /// What goes up, as a key with its unit: `pair_ns`.
    pub y: String,
    /// A curve each; every number above zero.
    pub series: Vec<Series>,
}

impl Curves {
    /// The figure as an SVG document, 900 px wide, in the colours of its report.
    ///
    /// # Errors
    ///
    /// When there is nothing to draw.
    pub fn svg(&self, palette: &Palette) -> anyhow::Result<String> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        ensure!(points().next().is_some(), "no points");
        let drawable = |value: f64| value.is_finite() && value > 0.0;
        ensure!(points().all(|&(x, y)| drawable(x) && drawable(y)), "a point has no place");
        let (x_name, x_unit) = Unit::split(&self.x);
        let (y_name, y_unit) = Unit::split(&self.y);
        let systems = systems(&self.series);
        let colours = palette.colours(&systems);
        let keys = canvas::line_keys(&systems, &colours);
        let top = canvas::head_height(&self.title, &keys);
        let y = Axis::logarithmic(points().map(|p| p.1));
        // The title stands left of the labels.
        let left = f64::max(92.0, canvas::widest(&y, |tick| y_unit.human(tick)) + 44.0);
        let plot = Plot { left, right: WIDTH - 40.0, top, bottom: top + 360.0 };
        let x = Axis::logarithmic(points().map(|p| p.0)).over(plot.left, plot.right);
        let y = y.over(plot.bottom, plot.top);

        canvas::svg(plot.bottom + 62.0, |canvas| {
            canvas.head(&self.title, &keys)?;
            vertical_grid(canvas, plot, &x)?;
            canvas.left_axis(plot, &y, &y_name, |tick| y_unit.human(tick))?;
            canvas.bottom_axis(plot, &x, &x_name, |tick| x_unit.human(tick))?;
            for series in &self.series {
                let at = systems.iter().position(|system| *system == series.system);
                let colour = at.map_or(INK, |at| colours[at]);
                let points: Vec<_> = series.points.iter().map(|p| (x.px(p.0), y.px(p.1))).collect();
                canvas.line(&points, colour, 2.4)?;
            }
            Ok(())
        })
    }
}
