//! Strokes, fills and text on an SVG of 900 px, and the frame that all figures share: title, legend,
//! plot, axes.

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::drawing::IntoDrawingArea as _;
use plotters::element::{PathElement, Polygon, Rectangle};
use plotters::prelude::{Color as _, DrawingArea, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, FontTransform, IntoFont as _, RGBColor, ShapeStyle};

use super::axis::Axis;

/// Width of every figure.
pub const WIDTH: f64 = 900.0;
/// Space between the figure's edge and all it holds.
const MARGIN: f64 = 22.0;
/// plotters rounds to whole pixels: draw larger, and let the viewer scale it down.
const SCALE: f64 = 4.0;
/// plotters divides its font sizes by this before it writes them.
const FONT_FACTOR: f64 = 1.24;
/// Mean width of a character over the font's size; on the safe side for the wider sans-serifs.
const CHARACTER: f64 = 0.6;

const TITLE_SIZE: f64 = 18.0;
const TEXT_SIZE: f64 = 13.0;
const LEGEND_ROW: f64 = 22.0;

/// The colour of text and frames.
pub const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
/// That of ticks and of smaller text.
pub const SOFT_INK: RGBColor = RGBColor(0x55, 0x55, 0x55);
pub const GRID: RGBColor = RGBColor(0xDD, 0xDD, 0xDD);
const PAPER: RGBColor = RGBColor(0xFF, 0xFF, 0xFF);

/// A point, in pixels of the figure.
pub type Point = (f64, f64);

/// How text stands to its point.
#[derive(Clone, Copy)]
pub struct Style {
    size: f64,
    colour: RGBColor,
    bold: bool,
    upward: bool,
    across: HPos,
    along: VPos,
}

impl Style {
    /// Ordinary text, right of its point and level with it.
    pub fn text() -> Style {
        let (across, along) = (HPos::Left, VPos::Center);
        Style { size: TEXT_SIZE, colour: INK, bold: false, upward: false, across, along }
    }

    /// Smaller and softer.
    pub fn small(self) -> Style {
        Style { size: 11.5, colour: SOFT_INK, ..self }
    }

    /// Centred on its point.
    pub fn centred(self) -> Style {
        Style { across: HPos::Center, ..self }
    }

    /// Small, hanging down from its point: for the inside of a bar.
    pub fn inside(self) -> Style {
        Style { size: 11.5, upward: true, across: HPos::Right, ..self }
    }

    fn leftward(self) -> Style {
        Style { across: HPos::Right, ..self }
    }

    /// Running upwards.
    pub fn upward(self) -> Style {
        Style { upward: true, ..self }
    }
}

/// An entry of the legend.
pub struct Key {
    pub label: String,
    /// What stands before it.
    pub mark: Mark,
}

/// What stands before a legend's label.
#[derive(Clone, Copy)]
pub enum Mark {
    /// A filled box.
    Box(RGBColor),
    /// A stroke.
    Line(RGBColor),
    /// A dashed stroke.
    Dashes(RGBColor),
    /// The diamond of a second metric.
    Diamond,
}

/// Where a figure's data goes.
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    /// Its left edge.
    pub left: f64,
    /// Its right edge.
    pub right: f64,
    /// Its top edge.
    pub top: f64,
    /// Its bottom edge.
    pub bottom: f64,
}

/// An SVG that is being drawn.
pub struct Canvas<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
}

/// Draws an SVG of the given height.
pub fn svg(
    height: f64,
    draw: impl FnOnce(&Canvas<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<String> {
    let size = (scaled(WIDTH) as u32, scaled(height) as u32);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let canvas = Canvas { area };
        canvas.fill((0.0, 0.0), (WIDTH, height), PAPER)?;
        draw(&canvas)?;
        canvas.area.present().map_err(|error| anyhow!("{error}"))?;
    }
    let drawn = format!("width=\"{}\" height=\"{}\"", size.0, size.1);
    let shown = format!("width=\"{WIDTH}\" height=\"{height:.0}\"");
    Ok(text.replacen(&drawn, &shown, 1))
}

/// The legend of figures in which each system is a line of its colour.
pub fn line_keys(systems: &[&str], colours: &[RGBColor]) -> Vec<Key> {
    let key = |(system, colour): (&&str, &RGBColor)| Key {
        label: (*system).to_owned(),
        mark: Mark::Line(*colour),
    };
    systems.iter().zip(colours).map(key).collect()
}

/// The height that title and legend take.
pub fn head_height(title: &str, keys: &[Key]) -> f64 {
    let title = wrapped(title, TITLE_SIZE).len() as f64 * (TITLE_SIZE + 5.0);
    MARGIN + title + legend_rows(keys).len() as f64 * LEGEND_ROW + 18.0
}

impl Canvas<'_> {
    /// Draws title and legend at the top; they end at [`head_height`].
    pub fn head(&self, title: &str, keys: &[Key]) -> anyhow::Result<()> {
        let mut y = MARGIN + TITLE_SIZE / 2.0;
        for line in wrapped(title, TITLE_SIZE) {
            let style = Style { size: TITLE_SIZE, bold: true, ..Style::text() };
            self.text(&line, (MARGIN, y), style)?;
            y += TITLE_SIZE + 5.0;
        }
        y += 4.0;
        for row in legend_rows(keys) {
            let mut x = MARGIN;
            for key in row {
                self.mark(key.mark, (x, y))?;
                self.text(&key.label, (x + 24.0, y), Style::text())?;
                x += key_width(key);
            }
            y += LEGEND_ROW;
        }
        Ok(())
    }

    fn mark(&self, mark: Mark, (x, y): Point) -> anyhow::Result<()> {
        match mark {
            Mark::Box(colour) => self.fill((x + 2.0, y - 6.0), (x + 16.0, y + 6.0), colour),
            Mark::Line(colour) => self.line(&[(x, y), (x + 18.0, y)], colour, 2.5),
            Mark::Dashes(colour) => self.dashes((x, y), (x + 18.0, y), colour),
            Mark::Diamond => self.diamond((x + 9.0, y)),
        }
    }

    /// Horizontal grid, labels and title of the left axis.
    pub fn left_axis(
        &self,
        plot: Plot,
        axis: &Axis,
        title: &str,
        label: impl Fn(f64) -> String,
    ) -> anyhow::Result<()> {
        for &tick in &axis.ticks {
            let y = axis.px(tick);
            self.line(&[(plot.left, y), (plot.right, y)], GRID, 1.0)?;
            self.text(&label(tick), (plot.left - 8.0, y), Style::text().leftward())?;
        }
        let middle = (plot.top + plot.bottom) / 2.0;
        let x = (plot.left - 24.0 - widest(axis, label)).max(MARGIN);
        self.text(title, (x, middle), Style::text().centred().upward())
    }

    /// Base line, ticks, labels and title of the bottom axis.
    pub fn bottom_axis(
        &self,
        plot: Plot,
        axis: &Axis,
        title: &str,
        label: impl Fn(f64) -> String,
    ) -> anyhow::Result<()> {
        self.base_line(plot)?;
        for &tick in &axis.ticks {
            let x = axis.px(tick);
            self.line(&[(x, plot.bottom), (x, plot.bottom + 5.0)], SOFT_INK, 1.0)?;
            self.text(&label(tick), (x, plot.bottom + 17.0), Style::text().centred())?;
        }
        let middle = (plot.left + plot.right) / 2.0;
        self.text(title, (middle, plot.bottom + 40.0), Style::text().centred())
    }

    /// The line at the bottom.
    pub fn base_line(&self, plot: Plot) -> anyhow::Result<()> {
        self.line(&[(plot.left, plot.bottom), (plot.right, plot.bottom)], SOFT_INK, 1.2)
    }

    /// A line through all points.
    pub fn line(&self, points: &[Point], colour: RGBColor, width: f64) -> anyhow::Result<()> {
        let points: Vec<(i32, i32)> = points.iter().map(|&p| pixel(p)).collect();
        self.area
            .draw(&PathElement::new(points, stroke(colour, width)))
            .map_err(|error| anyhow!("{error}"))
    }

    /// A straight dashed line.
    pub fn dashes(&self, from: Point, to: Point, colour: RGBColor) -> anyhow::Result<()> {
        const DASH: f64 = 5.0;
        const GAP: f64 = 3.5;
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let length = dx.hypot(dy);
        let at = |way: f64| (from.0 + dx * way / length, from.1 + dy * way / length);
        let mut way = 0.0;
        while way < length {
            self.line(&[at(way), at((way + DASH).min(length))], colour, 1.6)?;
            way += DASH + GAP;
        }
        Ok(())
    }

    /// A filled rectangle.
    pub fn fill(&self, from: Point, to: Point, colour: RGBColor) -> anyhow::Result<()> {
        self.area
            .draw(&Rectangle::new([pixel(from), pixel(to)], colour.filled()))
            .map_err(|error| anyhow!("{error}"))
    }

    /// A dark diamond with a light rim, which shows on any bar.
    pub fn diamond(&self, (x, y): Point) -> anyhow::Result<()> {
        for (radius, colour) in [(7.5, PAPER), (5.5, INK)] {
            let corners = [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)];
            self.area
                .draw(&Polygon::new(corners.map(pixel).to_vec(), colour.filled()))
                .map_err(|error| anyhow!("{error}"))?;
        }
        Ok(())
    }

    /// A line of text.
    pub fn text(&self, text: &str, at: Point, style: Style) -> anyhow::Result<()> {
        let face = if style.bold { FontStyle::Bold } else { FontStyle::Normal };
        let font = ("sans-serif", style.size * SCALE * FONT_FACTOR).into_font().style(face);
        let font = if style.upward { font.transform(FontTransform::Rotate270) } else { font };
        let style = font.color(&style.colour).pos(Pos::new(style.across, style.along));
        self.area.draw_text(text, &style, pixel(at)).map_err(|error| anyhow!("{error}"))
    }
}

/// The estimated width of ordinary text.
pub fn text_width(text: &str) -> f64 {
    let width = |c: char| match c {
        'i' | 'j' | 'l' | '.' | ',' | ' ' | '(' | ')' | '/' => 0.34,
        't' | 'f' | 'r' | '-' => 0.41,
        'm' | 'w' | 'M' | 'W' | '%' => 0.95,
        'A'..='Z' => 0.68,
        _ => 0.62,
    };
    text.chars().map(width).sum::<f64>() * TEXT_SIZE
}

/// The estimated width of the widest label.
pub fn widest(axis: &Axis, label: impl Fn(f64) -> String) -> f64 {
    axis.ticks.iter().map(|&tick| text_width(&label(tick))).fold(0.0, f64::max)
}

/// The height of a line of ordinary text.
pub const LINE: f64 = TEXT_SIZE + 4.0;

fn key_width(key: &Key) -> f64 {
    24.0 + text_width(&key.label) + 22.0
}

fn legend_rows(keys: &[Key]) -> Vec<Vec<&Key>> {
    let mut rows: Vec<Vec<&Key>> = Vec::new();
    let mut x = f64::INFINITY;
    for key in keys {
        if x + key_width(key) > WIDTH - MARGIN {
            rows.push(Vec::new());
            x = MARGIN;
        }
        x += key_width(key);
        if let Some(row) = rows.last_mut() {
            row.push(key);
        }
    }
    rows
}

/// The text in lines that fit the figure's width.
fn wrapped(text: &str, size: f64) -> Vec<String> {
    let fits = ((WIDTH - 2.0 * MARGIN) / (size * CHARACTER)) as usize;
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= fits => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn stroke(colour: RGBColor, width: f64) -> ShapeStyle {
    colour.stroke_width(scaled(width) as u32)
}

fn scaled(length: f64) -> i32 {
    (length * SCALE).round() as i32
}

fn pixel((x, y): Point) -> (i32, i32) {
    (scaled(x), scaled(y))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_titles_wrap_at_words() {
        let title = "a word ".repeat(30);
        let lines = wrapped(&title, TITLE_SIZE);
        assert!(lines.len() > 1);
        assert_eq!(lines.join(" "), title.trim());
    }

    #[test]
    fn a_legend_stays_within_the_figure() {
        let keys: Vec<Key> = (0..20)
            .map(|at| Key { label: format!("a system called {at}"), mark: Mark::Diamond })
            .collect();
        let rows = legend_rows(&keys);
        assert_eq!(rows.iter().map(Vec::len).sum::<usize>(), 20);
        for row in rows {
            assert!(row.into_iter().map(key_width).sum::<f64>() <= WIDTH - 2.0 * MARGIN);
        }
    }

    #[test]
    fn the_page_is_nine_hundred_wide_and_escaped() {
        let svg = svg(300.0, |canvas| canvas.text("a < b & c", (5.0, 5.0), Style::text())).unwrap();
        assert!(svg.starts_with("<svg width=\"900\" height=\"300\" viewBox=\"0 0 3600 1200\""));
        assert!(svg.contains("a &lt; b &amp; c"));
    }
}
