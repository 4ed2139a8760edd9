//! Grouped bars: a group a case, a bar a system, whiskers from the smallest to the largest run.
//!
//! A second metric can stand over the bars as diamonds on a logarithmic axis at the right: the delay
//! that a rate was bought with. Groups that do not fit side by side, or whose heights have other units, go on
//! in another row; rows in one unit have one axis. A system without a limit may dwarf the others:
//! its bar then runs off the axis and says its figure.

use anyhow::ensure;
use plotters::style::RGBColor;

use tidegate_chart::axis::Axis;
use tidegate_chart::canvas::{
    self, Canvas, INK, Key, LINE, Mark, Plot, SOFT_INK, Style, WIDTH, widest,
};
use tidegate_chart::palette::Palette;

use crate::report::{Case, Row, distinct};
use crate::stats::{self, Summary};
use crate::table::{circumstance, split_keys};
use crate::units::{Scale, Unit, measured, trimmed, with_symbol};

/// Medians of repeated runs, side by side.
#[derive(Clone, Debug)]
pub struct Bars {
    pub title: String,
    /// What the bars are, as a key with its unit: `goodput_bit_s`.
    pub metric: String,
    /// What the diamonds are, as a key with its unit: `rtt_p50_us`.
    pub points: Option<String>,
    /// Groups, left to right.
    pub groups: Vec<Group>,
}

/// The bars of one case.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its circumstances, a line each.
    pub label: Vec<String>,
    pub bars: Vec<Bar>,
}

/// One system in one case.
#[derive(Clone, Debug)]
pub struct Bar {
    /// The system; it decides the colour.
    pub system: String,
    /// Median and range, in the metric's unit.
    pub height: Summary,
    /// The published figure, in the same unit.
    pub published: Option<f64>,
    /// The diamond, in the unit of the second metric.
    pub point: Option<f64>,
}

/// Which bars to make from rows.
#[derive(Clone, Copy, Debug)]
pub struct BarsOf<'a> {
    pub title: &'a str,
    pub metric: &'a str,
    /// The metric of the diamonds.
    pub points: Option<&'a str>,
}

/// Plots narrower than this a bar get another row.
const BAR_LEAST: f64 = 13.0;
const BAR_MOST: f64 = 46.0;
/// The system whose bars may run off the axis, when they are this many times as tall as the rest.
const UNLIMITED: &str = "unlimited";
const DWARFS: f64 = 2.0;
/// More rows than these of neighbours in other units become one.
const SHELVES_MOST: usize = 4;
/// The share of a group's width that is bars.
const FILLED: f64 = 0.82;

impl Bars {
    /// Groups the rows by case, in the order of their first row.
    pub fn from_rows(rows: &[Row], what: BarsOf<'_>) -> Bars {
        let cases: Vec<&Case> = distinct(rows_of(rows, what.metric).map(|row| &row.case));
        let (varying, _) = split_keys(&cases);
        let groups = cases.iter().map(|case| {
            let here = |metric| rows_of(rows, metric).filter(|row| row.case == **case);
            let values = |metric, system: &str| -> Vec<f64> {
                here(metric).filter(|row| row.system == system).map(|row| row.value).collect()
            };
            let bars = distinct(here(what.metric).map(|row| row.system.as_str()));
            let bars = bars.into_iter().filter_map(|system| {
                let mine = |row: &&Row| row.system == system;
                Some(Bar {
                    system: system.to_owned(),
                    height: Summary::of(&values(what.metric, system))?,
                    published: here(what.metric).filter(mine).find_map(|row| row.published),
                    point: what.points.and_then(|metric| stats::median(&values(metric, system))),
                })
            });
            Group { label: label(case, &varying), bars: bars.collect() }
        });
        Bars {
            title: what.title.to_owned(),
            metric: what.metric.to_owned(),
            points: what.points.map(str::to_owned),
            groups: groups.collect(),
        }
    }

    pub(super) fn systems(&self) -> Vec<&str> {
        let bars = self.groups.iter().flat_map(|group| &group.bars);
        distinct(bars.map(|bar| bar.system.as_str()))
    }

    pub(super) fn svg(&self, palette: &Palette) -> anyhow::Result<String> {
        let bars = || self.groups.iter().flat_map(|group| &group.bars);
        ensure!(bars().next().is_some(), "no bars");
        let systems = self.systems();
        let colours = palette.colours(&systems);
        let keys = self.keys(&systems, &colours);

        let left = 92.0;
        let right = if self.points.is_some() { WIDTH - 106.0 } else { WIDTH - 30.0 };
        let (name, unit) = Unit::split(&self.metric);
        let rows = self.rows(right - left, systems.len(), unit);
        let label_lines = self.groups.iter().map(|group| group.label.len()).max().unwrap_or(0);
        let plot_height = if rows.len() > 1 { 210.0 } else { 300.0 };
        let row_height = plot_height + 26.0 + LINE * label_lines as f64;
        let top = canvas::head_height(&self.title, &keys);

        let second = self.points.as_ref().map(|metric| {
            let values = bars().filter_map(|bar| bar.point);
            (Unit::split(metric), Axis::logarithmic(values))
        });

        canvas::svg(top + row_height * rows.len() as f64, |canvas| {
            canvas.head(&self.title, &keys)?;
            for (at, Shelf { groups, places }) in rows.iter().enumerate() {
                let top = top + row_height * at as f64;
                let plot = Plot { left, right, top, bottom: top + plot_height };
                let scale = unit.axis_scale(ceiling(groups));
                // Rows in one unit have one axis, or a bar of 12 looks taller than one of 37.
                let alike = rows.iter().map(|row| ceiling(row.groups));
                let alike = alike.filter(|max| unit.axis_scale(*max).symbol == scale.symbol);
                let max = alike.fold(0.0, f64::max);
                let axis = Axis::from_zero(unit.shown(max, scale) * 1.04, 5);
                let axis = axis.over(plot.bottom, plot.top);
                canvas.left_axis(plot, &axis, &with_symbol(&name, scale.symbol), trimmed)?;
                let mut points = None;
                if let Some(((name, unit), axis)) = &second {
                    let axis = axis.clone().over(plot.bottom, plot.top);
                    right_axis(canvas, plot, &axis, name, |tick| unit.human(tick))?;
                    points = Some(axis);
                }
                let figures = self.have_room_for_figures(right - left, &rows, &systems, unit);
                let row = Panel { plot, axis, points, unit, scale, places: *places, figures };
                row.draw(canvas, groups, &systems, &colours)?;
                canvas.base_line(plot)?;
            }
            Ok(())
        })
    }

    /// Whether every bar is wide enough for its figure: on some alone they would seem to be the only ones.
    fn have_room_for_figures(
        &self,
        width: f64,
        rows: &[Shelf<'_>],
        systems: &[&str],
        unit: Unit,
    ) -> bool {
        rows.iter().all(|Shelf { groups, places }| {
            let scale = unit.axis_scale(ceiling(groups));
            let slot = slot(width / *places as f64, systems.len());
            let bars = groups.iter().flat_map(|group| &group.bars);
            bars.map(|bar| measured(unit.shown(bar.height.median, scale)))
                .all(|text| canvas::text_width(&text) <= slot + 2.0)
        })
    }

    fn keys(&self, systems: &[&str], colours: &[RGBColor]) -> Vec<Key> {
        let boxes = systems.iter().zip(colours);
        let mut keys: Vec<Key> = boxes
            .map(|(system, colour)| Key { label: (*system).to_owned(), mark: Mark::Box(*colour) })
            .collect();
        let bars = || self.groups.iter().flat_map(|group| &group.bars);
        if bars().any(|bar| bar.published.is_some()) {
            keys.push(Key { label: "published".to_owned(), mark: Mark::Dashes(INK) });
        }
        if let Some(metric) = &self.points {
            let label = format!("{} (right axis)", Unit::split(metric).0);
            keys.push(Key { label, mark: Mark::Diamond });
        }
        keys
    }

    /// The groups in as many rows as they need to be legible, those shown in other units apart.
    fn rows(&self, width: f64, systems: usize, unit: Unit) -> Vec<Shelf<'_>> {
        let labels = self.groups.iter().flat_map(|group| &group.label);
        let label = labels.map(|line| canvas::text_width(line)).fold(0.0, f64::max) + 12.0;
        let needed = label.max(systems as f64 * BAR_LEAST / FILLED);
        let most = ((width / needed) as usize).max(1);

        let symbol = |group: &Group| unit.axis_scale(tallest(group, false)).symbol;
        let alike = |a: &Group, b: &Group| symbol(a) == symbol(b);
        let mut shelves: Vec<&[Group]> = self.groups.chunk_by(alike).collect();
        if shelves.len() > SHELVES_MOST {
            shelves = vec![&self.groups];
        }
        let rows = shelves.into_iter().flat_map(|groups| {
            let places = groups.len().div_ceil(groups.len().div_ceil(most));
            groups.chunks(places).map(move |groups| Shelf { groups, places })
        });
        rows.collect()
    }
}

/// The groups of one row, and how many there is room for.
struct Shelf<'a> {
    groups: &'a [Group],
    places: usize,
}

/// The tallest bar, whisker or published figure of a group, with or without unlimited systems.
fn tallest(group: &Group, unlimited: bool) -> f64 {
    let bars = group.bars.iter().filter(|bar| unlimited || bar.system != UNLIMITED);
    bars.map(|bar| bar.height.max.max(bar.published.unwrap_or(0.0))).fold(0.0, f64::max)
}

/// How far up the axis of some groups goes. What has no limit may run off it.
fn ceiling(groups: &[Group]) -> f64 {
    let most = |unlimited| groups.iter().map(|g| tallest(g, unlimited)).fold(0.0, f64::max);
    let (limited, all) = (most(false), most(true));
    if limited > 0.0 && all > limited * DWARFS { limited * 1.25 } else { all }
}

fn rows_of<'a>(rows: &'a [Row], metric: &'a str) -> impl Iterator<Item = &'a Row> {
    rows.iter().filter(move |row| row.metric == metric)
}

/// The width of a bar and the gap beside it.
fn slot(group_width: f64, systems: usize) -> f64 {
    (group_width * FILLED / systems as f64).min(BAR_MOST)
}

/// Where and how one row of groups is drawn.
struct Panel {
    plot: Plot,
    axis: Axis,
    points: Option<Axis>,
    unit: Unit,
    scale: Scale,
    places: usize,
    /// The bars have their figures over them.
    figures: bool,
}

impl Panel {
    fn draw(
        &self,
        canvas: &Canvas<'_>,
        groups: &[Group],
        systems: &[&str],
        colours: &[RGBColor],
    ) -> anyhow::Result<()> {
        let Plot { left, right, bottom, .. } = self.plot;
        let group_width = (right - left) / self.places as f64;
        let slot = slot(group_width, systems.len());
        for (at, group) in groups.iter().enumerate() {
            let middle = left + (at as f64 + 0.5) * group_width;
            let first = middle - slot * systems.len() as f64 / 2.0;
            for bar in &group.bars {
                let Some(at) = systems.iter().position(|system| *system == bar.system) else {
                    continue;
                };
                let x = (first + slot * at as f64, first + slot * (at + 1) as f64);
                self.bar(canvas, bar, x, colours[at])?;
            }
            for (line, text) in group.label.iter().enumerate() {
                let y = bottom + 15.0 + LINE * line as f64;
                canvas.text(text, (middle, y), Style::text().centred())?;
            }
        }
        Ok(())
    }

    fn bar(
        &self,
        canvas: &Canvas<'_>,
        bar: &Bar,
        (left, right): (f64, f64),
        colour: RGBColor,
    ) -> anyhow::Result<()> {
        let shown = |value: f64| self.unit.shown(value, self.scale);
        let y = |value: f64| self.axis.px(shown(value));
        let (middle, width) = ((left + right) / 2.0, right - left);
        let Summary { median, min, max, runs } = bar.height;
        canvas.fill((left + 1.0, y(median)), (right - 1.0, self.plot.bottom), colour)?;
        let off = shown(max) > self.axis.high();
        if off {
            let text = format!("{} ↑", self.unit.human(rounded(median)));
            canvas.text(&text, (middle, self.plot.top + 6.0), Style::text().inside())?;
        }
        if runs > 1 && !off {
            let cap = (width / 6.0).min(4.0);
            canvas.line(&[(middle, y(min)), (middle, y(max))], INK, 1.4)?;
            for end in [y(min), y(max)] {
                canvas.line(&[(middle - cap, end), (middle + cap, end)], INK, 1.4)?;
            }
        }
        if let Some(published) = bar.published {
            canvas.dashes((left, y(published)), (right, y(published)), INK)?;
        }
        match (&self.points, bar.point) {
            (Some(axis), Some(point)) => canvas.diamond((middle, axis.px(point))),
            (None, _) if !off && self.figures => {
                // At its bar; a published figure just there is stepped over, not one far above.
                let top = y(max) - 9.0;
                let crossed = bar.published.map(y).filter(|level| (level - top).abs() < 9.0);
                let top = crossed.map_or(top, |level| level.min(y(max)) - 9.0);
                let text = measured(shown(median));
                canvas.text(&text, (middle, top), Style::text().small().centred())
            }
            _ => Ok(()),
        }
    }
}

/// What tells a case from the others, a line each: `1 Gbit/s`, `9 flows`, `cubic`, `RTT 10 ms`.
fn label(case: &Case, varying: &[&str]) -> Vec<String> {
    let line = |key: &&str| {
        let value = case.0.get(*key)?;
        let (name, unit) = Unit::split(key);
        let text = circumstance(key, value);
        Some(match value.is_number() {
            true if unit.is_plain() && text == "1" => {
                format!("1 {}", name.strip_suffix('s').unwrap_or(&name))
            }
            true if unit.is_plain() => format!("{text} {name}"),
            true if name != "limit" => format!("{name} {text}"),
            _ => text,
        })
    };
    varying.iter().filter_map(line).collect()
}

/// Ticks, labels and title of a right axis.
fn right_axis(
    canvas: &Canvas<'_>,
    plot: Plot,
    axis: &Axis,
    title: &str,
    label: impl Fn(f64) -> String,
) -> anyhow::Result<()> {
    let x = plot.right;
    canvas.line(&[(x, plot.top), (x, plot.bottom)], SOFT_INK, 1.0)?;
    for &tick in &axis.ticks {
        let y = axis.px(tick);
        canvas.line(&[(x, y), (x + 5.0, y)], SOFT_INK, 1.0)?;
        canvas.text(&label(tick), (x + 9.0, y), Style::text())?;
    }
    let middle = (plot.top + plot.bottom) / 2.0;
    let x = (plot.right + 26.0 + widest(axis, label)).min(WIDTH - 12.0);
    canvas.text(title, (x, middle), Style::text().centred().upward())
}

/// To three significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}
