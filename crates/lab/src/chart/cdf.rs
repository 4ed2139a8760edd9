//! Cumulative distributions over a logarithmic axis, a curve a system.

use anyhow::ensure;

use tidegate_chart::axis::Axis;
use tidegate_chart::canvas::{self, INK, Plot, WIDTH};
use tidegate_chart::units::Unit;
use tidegate_chart::{Series, palette::Palette, systems};

use super::vertical_grid;

/// Which share of the samples is at or below a value.
#[derive(Clone, Debug)]
pub struct Cdf {
    pub title: String,
    /// What was sampled, as a key with its unit: `rtt_us`.
    pub metric: String,
    /// A curve each, of (value, share from 0 to 1): ascending in both.
    pub series: Vec<Series>,
}

/// Steps smaller than this, in pixels, are left out.
const FINEST: f64 = 0.5;

impl Cdf {
    /// The figure as an SVG document, 900 px wide, in the colours of its report.
    ///
    /// # Errors
    ///
    /// When there is nothing to draw.
    pub fn svg(&self, palette: &Palette) -> anyhow::Result<String> {
        let values = || self.series.iter().flat_map(|series| series.points.iter().map(|p| p.0));
        ensure!(values().any(|value| value > 0.0), "no samples above zero");
        let (name, unit) = Unit::split(&self.metric);
        let systems = systems(&self.series);
        let colours = palette.colours(&systems);
        let keys = canvas::line_keys(&systems, &colours);
        let top = canvas::head_height(&self.title, &keys);
        let plot = Plot { left: 92.0, right: WIDTH - 40.0, top, bottom: top + 310.0 };
        let x = Axis::logarithmic(values()).over(plot.left, plot.right);
        let y = Axis::from_zero(100.0, 5).over(plot.bottom, plot.top);

        canvas::svg(plot.bottom + 62.0, |canvas| {
            canvas.head(&self.title, &keys)?;
            vertical_grid(canvas, plot, &x)?;
            canvas.left_axis(plot, &y, "share of samples", |tick| format!("{tick:.0} %"))?;
            canvas.bottom_axis(plot, &x, &name, |tick| unit.human(tick))?;
            for series in &self.series {
                let at = systems.iter().position(|system| *system == series.system);
                let colour = at.map_or(INK, |at| colours[at]);
                // Steps: the share jumps at each value, and holds until the next.
                let mut steps = Vec::new();
                let mut level = y.px(0.0);
                let mut drawn = f64::NEG_INFINITY;
                for (at, &(value, share)) in series.points.iter().enumerate() {
                    let (px, next) = (x.px(value), y.px(share * 100.0));
                    // Thousands of samples share a pixel: draw what the eye can tell apart.
                    let last = at + 1 == series.points.len();
                    if !last && px - drawn < FINEST && level - next < FINEST {
                        continue;
                    }
                    steps.extend([(px, level), (px, next)]);
                    (drawn, level) = (px, next);
                }
                canvas.line(&steps, colour, 2.4)?;
            }
            Ok(())
        })
    }
}
