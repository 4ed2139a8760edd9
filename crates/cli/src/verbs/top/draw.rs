//! Puts a [`Model`] on a screen of any size. Pure.
//!
//! Columns go one by one, the least important first, as a screen gets narrower; the header and the line of
//! keys as it gets lower.

use std::{borrow::Cow, env};

use ratatui::{
    buffer::Buffer,
    layout::Rect,
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Widget},
};
use tidegate_core::Rate;
use tidegate_host::{
    live::Origin,
    plan::State,
    status::{DirectionSample, DirectionStatus},
};
use tidegate_sys::intf::OUTCOME_TABLE;

use super::model::{History, Model, Shown};
use crate::output;

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const KEYS: &str = "q quit  ↑↓ select  Enter details  s sort  p pause  +/- interval  ? help";
const HELP: [&str; 15] = [
    "q, Esc, Ctrl-C   end",
    "↑ ↓, j k         select a limit",
    "PgUp PgDn, g G   ten at once; first, last",
    "Enter            show its details, and back",
    "s                sort by name, rate, % or drops",
    "p, space         pause",
    "+ -              longer, shorter interval",
    "",
    "USED is on the wire. MARK/s counts packets that were",
    "marked or slowed. BACKLOG is how far the virtual",
    "queue is behind. FLOWS and SHARE: TCP flows that",
    "sent just now, and what each of them may send.",
    "RISK/s: drops of TCP with nothing else in flight;",
    "a request waits 200 ms or more for each.",
    "LAST MINUTE: full height is the limit.",
];
/// The names of limits get at most so much of the width.
const MAX_NAME: u16 = 40;
const MAX_CHART: u16 = 60;
/// With less height the detail pane takes all of it.
const SPLIT_HEIGHT: u16 = 14;

/// A column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Name,
    Direction,
    Used,
    Limit,
    Percent,
    Chart,
    Backlog,
    Flows,
    Share,
    Marked,
    Dropped,
    AtRisk,
}

/// From left to right: head, least width, and rank. Where there is too little room the highest rank goes
/// first.
const COLUMNS: [(Column, &str, u16, u8); 12] = [
    (Column::Name, "NAME", 14, 0),
    (Column::Direction, "DIR", 3, 3),
    (Column::Used, "USED", 5, 1),
    (Column::Limit, "LIMIT", 5, 2),
    (Column::Percent, "%", 3, 4),
    (Column::Chart, "LAST MINUTE", 11, 5),
    (Column::Backlog, "BACKLOG", 7, 6),
    (Column::Flows, "FLOWS", 5, 8),
    (Column::Share, "SHARE", 5, 9),
    (Column::Marked, "MARK/s", 6, 10),
    (Column::Dropped, "DROP/s", 6, 7),
    (Column::AtRisk, "RISK/s", 6, 11),
];

/// Draws everything.
pub fn draw(model: &Model, area: Rect, out: &mut Buffer) {
    let area = area.intersection(out.area);
    if area.is_empty() {
        return;
    }
    let header = area.height >= 4;
    let footer = area.height >= 6;
    let mut body = area;
    if header {
        put(out, area, 0, &title(model, area.width));
        body.y += 1;
        body.height -= 1;
    }
    if footer {
        body.height -= 1;
        let line = match model.error() {
            Some(error) => Line::styled(error.to_owned(), red()),
            None => Line::styled(KEYS, dim()),
        };
        put(out, area, area.height - 1, &line);
    }
    if model.shows_detail() {
        let split = body.height >= SPLIT_HEIGHT;
        let list = if split { (body.height / 3).min(1 + lines(model)) } else { 0 };
        let (above, below) = (
            Rect { height: list, ..body },
            Rect { y: body.y + list, height: body.height - list, ..body },
        );
        table(model, above, out);
        detail(model, below, out);
    } else {
        table(model, body, out);
    }
    if model.shows_help() {
        help(area, out);
    }
}

fn colour(style: Style) -> Style {
    let refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if refused { Style { fg: None, ..style } } else { style }
}

fn red() -> Style {
    colour(Style::new().fg(Color::Red).add_modifier(Modifier::BOLD))
}

fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

/// A line of an area, cut where that ends; nothing below it.
fn put(out: &mut Buffer, area: Rect, y: u16, line: &Line<'_>) {
    if y < area.height {
        out.set_line(area.x, area.y + y, line, area.width);
    }
}

fn title(model: &Model, width: u16) -> Line<'static> {
    let limits = match model.shown().len() {
        1 => "1 limit".to_owned(),
        n => format!("{n} limits"),
    };
    let absent = match model.absent().len() {
        0 => String::new(),
        n => format!(", {n} not on"),
    };
    let interval = i64::try_from(model.interval().as_nanos()).unwrap_or(i64::MAX);
    let paused = if model.is_paused() { "  PAUSED" } else { "" };
    let text = format!(
        "tidegate top  {limits}{absent}  every {}  by {}{paused}",
        output::time(interval),
        model.sort().name()
    );
    let width = usize::from(width);
    Line::styled(format!("{text:<width$}"), Style::new().add_modifier(Modifier::REVERSED))
}

/// Lines that the table's rows take.
fn lines(model: &Model) -> u16 {
    let rows = model.shown().iter().map(|shown| shown.limit.status.directions().count().max(1));
    u16::try_from(rows.sum::<usize>()).unwrap_or(u16::MAX)
}

/// The columns that fit, with their widths.
fn columns(width: u16, names: u16) -> Vec<(Column, &'static str, u16)> {
    let mut ranked: Vec<_> = COLUMNS.iter().enumerate().collect();
    ranked.sort_by_key(|(_, (.., rank))| *rank);
    let mut left = width;
    let mut kept = [false; COLUMNS.len()];
    for (i, (column, _, least, _)) in ranked {
        let takes = least + u16::from(*column != Column::Name);
        if takes > left && *column != Column::Name {
            continue;
        }
        left = left.saturating_sub(takes);
        kept[i] = true;
    }
    let mut columns: Vec<_> = COLUMNS
        .iter()
        .zip(kept)
        .filter(|(_, kept)| *kept)
        .map(|((column, head, least, _), _)| (*column, *head, *least))
        .collect();
    // What is left goes to the names as far as they need it, then to the charts.
    for (wanted, most) in [(Column::Name, names.min(MAX_NAME)), (Column::Chart, MAX_CHART)] {
        if let Some((.., width)) = columns.iter_mut().find(|(column, ..)| *column == wanted) {
            let more = most.saturating_sub(*width).min(left);
            *width += more;
            left -= more;
        }
    }
    columns
}

fn table(model: &Model, area: Rect, out: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    if model.shown().is_empty() && model.absent().is_empty() {
        let text = if model.has_looked() {
            "No limits; waiting for one. `tidegate limit add` or `tidegate run` makes one."
        } else {
            "Looking ..."
        };
        Paragraph::new(text).wrap(ratatui::widgets::Wrap { trim: true }).render(area, out);
        return;
    }
    let names = names(model);
    let absent = model.absent();
    let all = names.iter().map(String::as_str).chain(absent.iter().map(|(name, _)| *name));
    let longest = all.map(|name| name.chars().count()).max().unwrap_or(0);
    let columns = columns(area.width, u16::try_from(longest).unwrap_or(u16::MAX));
    let mut body = area;
    if area.height >= 3 {
        let heads = columns.iter().map(|(column, head, width)| cell(*column, head, *width));
        let line = Line::styled(heads.collect::<Vec<_>>().join(" "), bold());
        put(out, area, 0, &line);
        body.y += 1;
        body.height -= 1;
    }
    let selected = model.selected_index();
    let mut rows = Vec::new();
    let mut selected_rows = (0, 0);
    for (i, (shown, name)) in model.shown().iter().zip(&names).enumerate() {
        let first = rows.len();
        let reason = model.reason(&shown.limit.status.name);
        limit_rows(shown, (name, reason), &columns, selected == Some(i), &mut rows);
        if selected == Some(i) {
            selected_rows = (first, rows.len());
        }
    }
    let width = columns.first().map_or(0, |(.., width)| *width);
    rows.extend(absent.iter().map(|(name, why)| {
        Line::styled(format!("{} {why}", cell(Column::Name, name, width)), dim())
    }));
    // The selected limit stays in sight, its first line above all.
    let height = usize::from(body.height);
    let from = selected_rows.1.saturating_sub(height).min(selected_rows.0);
    for (y, line) in rows.iter().skip(from).take(height).enumerate() {
        put(out, body, y as u16, line);
    }
}

/// The names with the lines of the tree before them.
fn names(model: &Model) -> Vec<String> {
    let mut last_at = Vec::new();
    let name = |shown: &Shown| {
        let depth = shown.branch.depth;
        last_at.truncate(depth);
        last_at.push(shown.branch.last);
        let mut name = String::new();
        for last in last_at.iter().take(depth).skip(1) {
            name.push_str(if *last { "  " } else { "│ " });
        }
        if depth > 0 {
            name.push_str(if shown.branch.last { "└ " } else { "├ " });
        }
        name + &shown.limit.status.name
    };
    model.shown().iter().map(name).collect()
}

/// Text in a column, aligned and cut to its width.
fn cell(column: Column, text: &str, width: u16) -> String {
    let width = usize::from(width);
    let text: Cow<'_, str> = if text.chars().count() > width {
        Cow::Owned(text.chars().take(width.saturating_sub(1)).chain(['…']).collect())
    } else {
        Cow::Borrowed(text)
    };
    match column {
        Column::Name | Column::Direction | Column::Chart => format!("{text:<width$}"),
        _ => format!("{text:>width$}"),
    }
}

fn limit_rows(
    shown: &Shown,
    (name, reason): (&str, Option<&str>),
    columns: &[(Column, &'static str, u16)],
    selected: bool,
    rows: &mut Vec<Line<'static>>,
) {
    let (status, sample) = (&shown.limit.status, &shown.limit.sample);
    let base = if selected { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
    let alarm = match status.state {
        State::InForce => None,
        State::NoMembers => Some("waiting: its selector matches no cgroup"),
        State::ScopeGone => Some("NOT ENFORCED: its cgroup or device is gone"),
        State::Anew => Some("NOT ENFORCED: its cgroup or device was made anew"),
        State::Detached => Some("NOT ENFORCED: its programs were removed"),
        State::NoFq => Some("NO FQ: it only drops"),
        State::Broken => Some("BROKEN: it cannot be read"),
    };
    if let Some(alarm) = alarm {
        let may_wait = matches!(status.state, State::NoMembers | State::ScopeGone);
        let why = reason.filter(|_| may_wait);
        let words = match why {
            Some(why) => Span::styled(why.to_owned(), dim()),
            None => Span::styled(alarm, red()),
        };
        let width = columns.first().map_or(0, |(.., width)| *width);
        let name = cell(Column::Name, name, width);
        rows.push(Line::from(vec![Span::raw(name), Span::raw(" "), words]).style(base));
        return;
    }
    let directions = [
        ("out", &status.egress, &sample.egress, &shown.history[0]),
        ("in", &status.ingress, &sample.ingress, &shown.history[1]),
    ];
    let mut name = name;
    for (direction, now, sample, history) in directions {
        let (Some(now), Some(sample)) = (now, sample) else { continue };
        let row = Row {
            name,
            direction,
            now,
            sample,
            history,
            interval_ns: shown.limit.sample.interval_ns,
        };
        let mut spans = Vec::new();
        for (i, (column, _, width)) in columns.iter().enumerate() {
            if i > 0 {
                spans.push(Span::raw(" "));
            }
            let (text, style) = row.cell(*column, *width);
            spans.push(Span::styled(cell(*column, &text, *width), style));
        }
        rows.push(Line::from(spans).style(base));
        name = "";
    }
}

/// What one line of the table says.
struct Row<'a> {
    name: &'a str,
    direction: &'static str,
    now: &'a DirectionStatus,
    sample: &'a DirectionSample,
    history: &'a History,
    interval_ns: u64,
}

impl Row<'_> {
    fn cell(&self, column: Column, width: u16) -> (String, Style) {
        let plain = Style::new();
        let (used, limit) = (self.sample.used_bit_s as f64, self.sample.rate_bit_s.max(1) as f64);
        let a_second = |packets: u64| packets as f64 * 1e9 / self.interval_ns.max(1) as f64;
        let dash = || "-".to_owned();
        let signalled = self.sample.counters.of(|outcome| outcome.slows() && outcome.passed).0;
        let dropped = self.sample.counters.dropped().0;
        match column {
            Column::Name => (self.name.to_owned(), bold()),
            Column::Direction => (self.direction.to_owned(), plain),
            Column::Used => (short(used), plain),
            Column::Limit => (short(limit), plain),
            Column::Percent => {
                let style =
                    if used >= 0.9 * limit { colour(plain.fg(Color::Yellow)) } else { plain };
                (format!("{:.0}", (100.0 * used / limit).min(999.0)), style)
            }
            Column::Chart => (chart(self.history, limit, width), colour(plain.fg(Color::Cyan))),
            Column::Backlog => match self.now.backlog_ns {
                ..=0 => ("0".to_owned(), plain),
                ns => (short_time(ns), plain),
            },
            Column::Flows => (self.now.fair.map_or_else(dash, |f| short(f.flows.into())), plain),
            Column::Share => {
                (self.now.fair.map_or_else(dash, |f| short(f.share_bit_s as f64)), plain)
            }
            Column::Marked => (short(a_second(signalled)), plain),
            Column::Dropped => (short(a_second(dropped)), if dropped > 0 { red() } else { plain }),
            Column::AtRisk => match self.sample.at_risk {
                // Zero would say that no request waits.
                Some(at_risk) if at_risk.is_whole() || at_risk.packets() > 0 => {
                    let style = if at_risk.packets() > 0 { red() } else { plain };
                    (short(a_second(at_risk.packets())), style)
                }
                _ => (dash(), plain),
            },
        }
    }
}

/// The last minute as bars; full height is the limit.
fn chart(history: &History, limit: f64, width: u16) -> String {
    let bar = |part: Option<f64>| {
        let Some(used) = part else { return ' ' };
        let level = (used / limit * BARS.len() as f64).ceil() as usize;
        BARS[level.clamp(1, BARS.len()) - 1]
    };
    history.parts(usize::from(width)).into_iter().map(bar).collect()
}

/// Three digits and a letter: five characters at most.
fn short(value: f64) -> String {
    let units = [("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12), ("p", 1e15)];
    three(value, &units)
}

/// Three digits and a unit of time: six characters at most.
fn short_time(ns: i64) -> String {
    three(ns as f64, &[("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)])
}

fn three(value: f64, units: &[(&str, f64)]) -> String {
    // What would round to 1000 has the next unit.
    let unit = units.iter().rev().find(|(_, size)| value >= 0.9995 * size).or(units.first());
    let Some((name, size)) = unit else { return String::new() };
    let scaled = value / size;
    let decimals = match scaled {
        _ if *size <= 1.0 => 0,
        x if x >= 99.95 => 0,
        x if x >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{scaled:.decimals$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{name}")
}

/// All that is known of the selected limit.
fn detail(model: &Model, area: Rect, out: &mut Buffer) {
    let Some(shown) = model.selected().filter(|_| !area.is_empty()) else { return };
    let status = &shown.limit.status;
    let block = Block::bordered().title(Span::styled(format!(" {} ", status.name), bold()));
    let inner = if area.height >= 5 && area.width >= 20 {
        let inner = block.inner(area);
        block.render(area, out);
        inner
    } else {
        area
    };
    let held = match shown.limit.origin {
        Origin::Pinned => "pinned".to_owned(),
        Origin::Run { runner_pid } => format!("held by `tidegate run` ({runner_pid})"),
        Origin::Elsewhere => "held elsewhere".to_owned(),
    };
    let mut lines =
        vec![Line::raw(format!("{}  {}  {held}", status.scope, status.settings.scheme()))];
    lines.extend(model.schedule(&status.name).map(|words| Line::raw(words.to_owned())));
    lines.extend(status.members.as_ref().map(|members| Line::raw(output::members(members))));
    if let Some(alarm) = output::alarm(&status.name, &status.scope, status.state) {
        lines.push(Line::styled(alarm, red()));
    }
    let interval_ns = shown.limit.sample.interval_ns;
    let directions = status.directions().zip(shown.limit.sample.directions());
    for ((name, now), (_, sample)) in directions {
        direction_lines(name, now, sample, interval_ns, &mut lines);
    }
    let room = usize::from(inner.height).saturating_sub(lines.len());
    socket_lines(model, room, &mut lines);
    for (y, line) in lines.iter().enumerate().take(usize::from(inner.height)) {
        put(out, inner, y as u16, line);
    }
}

fn direction_lines(
    name: &str,
    now: &DirectionStatus,
    sample: &DirectionSample,
    interval_ns: u64,
    lines: &mut Vec<Line<'static>>,
) {
    let time = |ns: u64| output::time(i64::try_from(ns).unwrap_or(i64::MAX));
    let rate = Rate::from_bit_s(now.rate_bit_s).map(|rate| rate.to_string()).unwrap_or_default();
    let fair = now.fair.map_or_else(String::new, |fair| {
        let rtt = fair.rtt_ns.map_or_else(String::new, |rtt| format!(", RTT {}", time(rtt)));
        format!("; {} flows, {} each{rtt}", fair.flows, output::rate(fair.share_bit_s))
    });
    lines.push(Line::from(vec![
        Span::styled(name.to_owned(), bold()),
        Span::raw(format!(" {rate}: {} used{fair}", output::rate(sample.used_bit_s))),
    ]));
    lines.push(Line::raw(format!(
        "  backlog {}; mark above {}, drop above {}, burst {}",
        output::time(now.backlog_ns.max(0)),
        now.mark_ns.map_or_else(|| "-".to_owned(), time),
        now.drop_ns.map_or_else(|| "-".to_owned(), time),
        time(now.burst_ns)
    )));
    for (i, outcome) in OUTCOME_TABLE.iter().enumerate() {
        let packets = now.counters.packets[i];
        if packets == 0 {
            continue;
        }
        let a_second = sample.counters.packets[i] as f64 * 1e9 / interval_ns.max(1) as f64;
        let ago = now.last.0[i].map_or_else(String::new, |ago| format!(", last {} ago", time(ago)));
        lines.push(Line::raw(format!(
            "  {:<13} {:>5}/s  {:>5} packets  {}{ago}",
            outcome.name,
            short(a_second),
            short(packets as f64),
            output::size(now.counters.bytes[i])
        )));
    }
    if let Some(words) = now.at_risk.and_then(|at_risk| at_risk.words()) {
        let packets = sample.at_risk.map_or(0, |at_risk| at_risk.packets());
        let a_second = packets as f64 * 1e9 / interval_ns.max(1) as f64;
        let line = format!("  {:<13} {:>5}/s  {words}", "at risk", short(a_second));
        lines.push(Line::styled(line, if packets > 0 { red() } else { Style::new() }));
    }
}

/// The fastest sockets, as many as there is room for.
fn socket_lines(model: &Model, room: usize, lines: &mut Vec<Line<'static>>) {
    let Some(sockets) = model.top_sockets() else { return };
    if sockets.list.is_empty() {
        lines.push(Line::styled("No TCP sockets.", dim()));
        return;
    }
    let width = |of: fn(&tidegate_host::sockets::SocketSample) -> usize, least: usize| {
        sockets.list.iter().map(of).max().unwrap_or(0).max(least)
    };
    let remote = width(|s| s.remote.to_string().len(), 6);
    let local = width(|s| s.local.to_string().len(), 5);
    let head = format!(
        "{:>5} {:>5} {:>5} {:>6} {:>5}  {:<15}  {:<remote$}  {:<local$}",
        "SENT", "RECVD", "PACED", "RTT", "RETR", "PROCESS", "REMOTE", "LOCAL"
    );
    lines.push(Line::styled(head, bold()));
    // The head takes a line, and so does what says that there are more.
    let rows = room.saturating_sub(1 + usize::from(sockets.total >= room));
    for socket in sockets.list.iter().take(rows) {
        let paced = socket.pacing_bit_s.map_or_else(|| "-".to_owned(), |r| short(r as f64));
        lines.push(Line::raw(format!(
            "{:>5} {:>5} {paced:>5} {:>6} {:>5}  {:<15}  {:<remote$}  {:<local$}",
            short(socket.sent_bit_s as f64),
            short(socket.received_bit_s as f64),
            short_time(i64::try_from(socket.rtt_ns).unwrap_or(i64::MAX)),
            short(socket.retransmitted_segments.into()),
            socket.comm.as_deref().unwrap_or("-"),
            socket.remote.to_string(),
            socket.local.to_string(),
        )));
    }
    let more = sockets.total - sockets.list.len().min(rows).min(sockets.total);
    if more > 0 {
        lines.push(Line::styled(format!("and {more} more"), dim()));
    }
}

fn help(area: Rect, out: &mut Buffer) {
    let width = HELP.iter().map(|line| line.chars().count()).max().unwrap_or(0) as u16 + 4;
    let height = HELP.len() as u16 + 2;
    let (width, height) = (width.min(area.width), height.min(area.height));
    let place = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    Clear.render(place, out);
    let block = Block::bordered().title(" Keys ");
    let lines: Vec<_> = HELP.iter().map(|line| Line::raw(format!(" {line}"))).collect();
    Paragraph::new(lines).block(block).render(place, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_five_characters_at_most() {
        for (value, text) in [
            (0.0, "0"),
            (7.4, "7"),
            (999.4, "999"),
            (999.6, "1k"),
            (12_345.0, "12.3k"),
            (999_600.0, "1m"),
            (48_712_345.0, "48.7m"),
            (1e9, "1g"),
        ] {
            assert_eq!(short(value), text);
        }
        assert_eq!(short_time(1_234_567), "1.23ms");
    }

    #[test]
    fn columns_go_as_the_screen_narrows() {
        let of = |width| columns(width, 14).into_iter().map(|(c, ..)| c).collect::<Vec<_>>();
        assert_eq!(of(87).len(), COLUMNS.len());
        assert!(!of(80).contains(&Column::AtRisk) && of(80).len() + 1 == COLUMNS.len());
        let least = [Column::Name, Column::Direction, Column::Used, Column::Limit, Column::Percent];
        assert_eq!(of(35), least);
        assert_eq!(of(1), [Column::Name]);
    }
}
