//! Tokens of a bucket over time, with the losses marked.

use anyhow::ensure;
use plotters::style::RGBColor;

use crate::axis::Axis;
use crate::canvas::{self, INK, Key, Mark, Plot, WIDTH};
use crate::units::{Unit, trimmed, with_symbol};

const TOKENS: RGBColor = RGBColor(0x00, 0x72, 0xB2);
const LOSSES: RGBColor = RGBColor(0xD5, 0x5E, 0x00);

/// A bucket over time.
#[derive(Clone, Debug)]
pub struct Tokens {
    pub title: String,
    /// Seconds and bytes, ascending in time.
    pub tokens: Vec<(f64, f64)>,
    /// Where packets were lost: seconds and bytes.
    pub losses: Vec<(f64, f64)>,
    /// Bytes that fit.
    pub depth_bytes: f64,
}

impl Tokens {
    /// The figure as an SVG document, 900 px wide.
    ///
    /// # Errors
    ///
    /// When there is nothing to draw.
    pub fn svg(&self) -> anyhow::Result<String> {
        let points = || self.tokens.iter().chain(&self.losses);
        ensure!(!self.tokens.is_empty(), "no points");
        ensure!(points().all(|(x, y)| x.is_finite() && y.is_finite()), "a point is no number");
        ensure!(self.depth_bytes.is_finite(), "a depth is no number");
        let (x_name, x_unit) = Unit::split("time_s");
        let (y_name, y_unit) = Unit::split("tokens_bytes");
        let keys = [
            Key { label: "tokens".to_owned(), mark: Mark::Line(TOKENS) },
            Key { label: "packets lost".to_owned(), mark: Mark::Box(LOSSES) },
            Key {
                label: format!("depth, {}", y_unit.human(self.depth_bytes.round())),
                mark: Mark::Dashes(INK),
            },
        ];
        let top = canvas::head_height(&self.title, &keys);
        let plot = Plot { left: 92.0, right: WIDTH - 30.0, top, bottom: top + 310.0 };
        let x_min = points().map(|p| p.0).fold(f64::INFINITY, f64::min);
        let x_max = points().map(|p| p.0).fold(0.0, f64::max);
        let y_max = points().map(|p| p.1).fold(self.depth_bytes, f64::max);
        let (x_scale, y_scale) = (x_unit.axis_scale(x_max), y_unit.axis_scale(y_max));
        let x_shown = |value| x_unit.shown(value, x_scale);
        let y_shown = |value| y_unit.shown(value, y_scale);
        let x = Axis::spanning(x_shown(x_min), x_shown(x_max), 8).over(plot.left, plot.right);
        let y = Axis::from_zero(y_shown(y_max) * 1.05, 5).over(plot.bottom, plot.top);
        let place = |&(px, py): &(f64, f64)| (x.px(x_shown(px)), y.px(y_shown(py)));

        canvas::svg(plot.bottom + 62.0, |canvas| {
            canvas.head(&self.title, &keys)?;
            canvas.left_axis(plot, &y, &with_symbol(&y_name, y_scale.symbol), trimmed)?;
            canvas.bottom_axis(plot, &x, &with_symbol(&x_name, x_scale.symbol), trimmed)?;
            let line: Vec<_> = self.tokens.iter().map(place).collect();
            canvas.line(&line, TOKENS, 1.2)?;
            for (px, py) in self.losses.iter().map(place) {
                canvas.fill((px - 0.8, py - 4.0), (px + 0.8, py + 4.0), LOSSES)?;
            }
            let level = y.px(y_shown(self.depth_bytes));
            canvas.dashes((plot.left, level), (plot.right, level), INK)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_and_depth_are_there() {
        let tokens = vec![(1.0, 15_000.0), (1.001, 0.0), (1.1, 15_000.0)];
        let figure = Tokens {
            title: "A bucket".into(),
            tokens,
            losses: vec![(1.001, 0.0)],
            depth_bytes: 15_000.0,
        };
        let svg = figure.svg().unwrap();
        assert!(svg.contains("depth, 15 kB") && svg.contains("packets lost"), "{svg}");
        assert!(Tokens { tokens: vec![], ..figure.clone() }.svg().is_err());
        assert!(Tokens { depth_bytes: f64::NAN, ..figure }.svg().is_err());
    }
}
