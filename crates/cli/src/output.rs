//! What people read: aligned tables, figures in units, colour on a terminal.

use std::{
    io::{self, StdoutLock, Write},
    iter,
};

pub use tidegate_agent::status::alarm;
use tidegate_chart::text;
pub use tidegate_chart::text::{Align, Paint};
use tidegate_core::{Class, Scope, Selector, SelectorKind, prefixes::Prefixes};
pub use tidegate_host::figures::{rate, size, time};
use tidegate_host::{
    settings::{fields::Shown, given, is_parents, whole},
    status::Settings,
    tree::tree,
};
use tidegate_sys::{limit::LimitOptions, xdp::XdpMode};

/// Standard output. Names of processes and cgroups are what users make of them: nothing in them is an order
/// to the terminal.
pub struct Stdout {
    paint: Paint,
    out: StdoutLock<'static>,
}

pub fn stdout() -> Stdout {
    Stdout { paint: Paint::stdout(), out: io::stdout().lock() }
}

fn unwritten(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("standard output cannot be written: {error}"))
}

impl Write for Stdout {
    /// Takes whole texts, as `write!` hands them over.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let bytes = text.len();
        let text = self.paint.harmless(&String::from_utf8_lossy(text));
        self.out.write_all(text.as_bytes()).map_err(unwritten)?;
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush().map_err(unwritten)
    }
}

/// In one line, whatever is in it.
pub fn in_line(text: &str) -> String {
    Paint::plain().harmless(text).replace(['\n', '\t'], "?")
}

/// A column: its head and its alignment.
pub type Column = (&'static str, Align);

/// Rows under heads, each column as wide as its widest cell.
pub fn table(
    out: &mut impl Write,
    paint: Paint,
    columns: &[Column],
    rows: &[Vec<String>],
) -> io::Result<()> {
    let heads = columns.iter().map(|(head, _)| (*head).to_owned()).collect();
    let widths = text::widths(iter::once(&heads).chain(rows));
    writeln!(out, "{}", paint.bold(&line(columns, &widths, &heads)))?;
    rows.iter().try_for_each(|row| writeln!(out, "{}", line(columns, &widths, row)))
}

pub fn line(columns: &[Column], widths: &[usize], cells: &[String]) -> String {
    text::line(columns.iter().map(|(_, align)| *align), widths, cells)
}

/// Packets and their size.
pub fn packets((packets, bytes): (u64, u64)) -> String {
    if packets == 0 { "0".to_owned() } else { format!("{packets} ({})", size(bytes)) }
}

/// A cgroup by its path, a device or port by its name and kind.
pub fn scope(scope: &Scope) -> String {
    match scope {
        // The root of the hierarchy has an empty path.
        Scope::Cgroup(path) if path.is_empty() => "/".to_owned(),
        Scope::Cgroup(path) => path.clone(),
        Scope::Select(Selector { kind: SelectorKind::Cgroup, value }) => value.clone(),
        device => format!("{} {}", device.kind(), device.name()),
    }
}

/// Cgroups that are named in one line at most.
const MEMBERS_SHOWN: usize = 8;

/// The cgroups of a limit with a selector.
pub fn members(members: &[String]) -> String {
    let count = match members.len() {
        0 => return "no cgroup yet".to_owned(),
        1 => "1 cgroup".to_owned(),
        n => format!("{n} cgroups"),
    };
    let shown: Vec<_> = members.iter().take(MEMBERS_SHOWN).map(String::as_str).collect();
    let more = match members.len().saturating_sub(MEMBERS_SHOWN) {
        0 => String::new(),
        n => format!(" and {n} more (--json)"),
    };
    format!("{count}: {}{more}", shown.join(", "))
}

/// What a limit is put on, with its cgroups if it has a selector.
pub fn scope_with(scope: &Scope, members: &[String]) -> String {
    match scope {
        Scope::Select(_) => format!("{} ({})", self::scope(scope), self::members(members)),
        one => self::scope(one),
    }
}

/// The same of a limit that is for some prefixes.
pub fn part(scope: &Scope, prefixes: &Prefixes) -> String {
    let on = self::scope(scope);
    match prefixes.as_slice() {
        [] => on,
        [one] => format!("{on} {one}"),
        [first, more @ ..] => format!("{on} {first} +{}", more.len()),
    }
}

/// A limit in one line, in words of the command line.
pub fn describe(options: &LimitOptions, parent: Option<&str>) -> String {
    let mut words: Vec<_> = parent.iter().map(|parent| format!("inside {parent}")).collect();
    if let Some(Class { guarantee, weight }) = options.class {
        words.extend(guarantee.map(|rate| format!("guarantee {rate}")));
        words.push(format!("weight {weight}"));
    }
    for (name, queue) in [("egress", options.egress), ("ingress", options.ingress)] {
        let Some(queue) = queue else { continue };
        if !is_parents(options, queue.rate) {
            let most = if options.class.is_some() { "at most " } else { "" };
            words.push(format!("{name} {most}{}", queue.rate));
        }
        words.extend(given(options.scheme, &queue).map(|(name, span)| format!("{name} {span}")));
    }
    let default = LimitOptions { scheme: options.scheme, ..LimitOptions::default() };
    for ((key, is), (_, default)) in whole(options).zip(whole(&default)) {
        match is {
            is if key.name == "scheme" => words.push(match options.chosen {
                Some(why) => format!("scheme {is} (auto: {why})"),
                None => format!("scheme {is}"),
            }),
            is if is == default => {}
            Shown::Flag(true) => words.push(key.name.to_owned()),
            Shown::Flag(false) => words.push(format!("no {}", key.name)),
            is => words.push(format!("{} {is}", key.name)),
        }
    }
    words.join(", ")
}

/// How a limit acts, and why if that was chosen.
pub fn scheme(settings: &Settings) -> String {
    match settings.options.and_then(|options| options.chosen) {
        Some(why) => format!("{} (auto: {why})", settings.scheme()),
        None => settings.scheme().to_owned(),
    }
}

/// Where a program of XDP runs.
pub fn xdp_mode(mode: &str) -> String {
    let place = if mode == XdpMode::Native.name() { "in the driver" } else { "in the stack" };
    format!("{mode}, {place}")
}

/// Limits in the order of their trees, with how many they are inside of; siblings by name.
pub fn as_tree<'a, T>(
    limits: &'a [T],
    name_and_parent: impl Fn(&'a T) -> (&'a String, &'a Option<String>),
) -> impl Iterator<Item = (usize, &'a T)> {
    let names = limits.iter().map(name_and_parent).map(|(name, parent)| (name, parent.as_ref()));
    let names: Vec<_> = names.collect();
    let branches = tree(&names, |a, b| names[a].0.cmp(names[b].0));
    branches.into_iter().map(|branch| (branch.depth, &limits[branch.index]))
}

/// The name of a limit that is inside so many others.
pub fn indented(depth: usize, name: &str) -> String {
    format!("{}{name}", "  ".repeat(depth))
}
