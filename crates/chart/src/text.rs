//! Text for a terminal: colours where they are wanted, cells in columns.

use std::{
    env,
    io::{self, IsTerminal as _},
};

/// The colours of a terminal; none unless it wants them.
#[derive(Debug, Clone, Copy)]
pub struct Paint {
    on: bool,
}

impl Paint {
    pub fn plain() -> Paint {
        Paint { on: false }
    }

    pub fn coloured() -> Paint {
        Paint { on: true }
    }

    pub fn stdout() -> Paint {
        Paint::for_terminal(io::stdout().is_terminal())
    }

    /// Colour if `terminal`, unless NO_COLOR or TERM=dumb forbid it.
    pub fn for_terminal(terminal: bool) -> Paint {
        let refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
        Paint { on: terminal && !refused && !dumb }
    }

    pub fn is_coloured(self) -> bool {
        self.on
    }

    fn code(self, code: &str, text: &str) -> String {
        if self.on { format!("{code}{text}{PLAIN}") } else { text.to_owned() }
    }

    pub fn bold(self, text: &str) -> String {
        self.code(BOLD, text)
    }

    pub fn dim(self, text: &str) -> String {
        self.code(DIM, text)
    }

    pub fn red(self, text: &str) -> String {
        self.code(RED, text)
    }

    pub fn green(self, text: &str) -> String {
        self.code(GREEN, text)
    }

    pub fn yellow(self, text: &str) -> String {
        self.code(YELLOW, text)
    }

    /// A text without control characters but for the ends of lines, tabs and these colours, each as `?`.
    pub fn harmless(self, text: &str) -> String {
        let (mut harmless, mut rest) = (String::with_capacity(text.len()), text);
        while let Some(at) = rest.find(is_harmful) {
            let (before, from) = rest.split_at(at);
            let code = CODES.into_iter().find(|code| self.on && from.starts_with(code));
            let shown = code.unwrap_or("?");
            harmless.extend([before, shown]);
            let control = from.chars().next().map_or(0, char::len_utf8);
            rest = &from[code.map_or(control, str::len)..];
        }
        harmless + rest
    }
}

fn is_harmful(c: char) -> bool {
    c.is_control() && c != '\n' && c != '\t'
}

const PLAIN: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[1;31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const CODES: [&str; 6] = [PLAIN, BOLD, DIM, RED, GREEN, YELLOW];

/// How a column is aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// The width of each column: that of its widest cell, in characters.
pub fn widths<'a>(rows: impl IntoIterator<Item = &'a Vec<String>>) -> Vec<usize> {
    let mut widths = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    widths
}

/// One line of a table: cells two spaces apart.
pub fn line(
    aligned: impl IntoIterator<Item = Align>,
    widths: &[usize],
    cells: &[String],
) -> String {
    let cells = cells.iter().zip(aligned).zip(widths).map(|((cell, align), width)| match align {
        Align::Left => format!("{cell:<width$}"),
        Align::Right => format!("{cell:>width$}"),
    });
    cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_colour_without_a_terminal() {
        assert!(!Paint::for_terminal(false).is_coloured());
        assert_eq!(Paint::plain().yellow("x"), "x");
        assert_eq!(Paint::coloured().yellow("x"), "\x1b[33mx\x1b[0m");
    }

    #[test]
    fn control_characters_are_no_orders_to_a_terminal() {
        let text = format!("{}\x1b]0;title\x07\u{9b}31m\r\tµ\n", Paint::coloured().red("\x1b[2J"));
        let coloured = "\x1b[1;31m?[2J\x1b[0m?]0;title??31m?\tµ\n";
        assert_eq!(Paint::coloured().harmless(&text), coloured);
        assert_eq!(Paint::plain().harmless(&text), coloured.replace('\x1b', "?"));
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["NAME", "RATE"], ["a", "50 µs"], ["longer", "1gbit"]];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        let widths = widths(&rows);
        let lines = rows.map(|row| line([Align::Left, Align::Right], &widths, &row));
        assert_eq!(lines, ["NAME     RATE", "a       50 µs", "longer  1gbit"]);
    }
}
