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
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub fn bold(self, text: &str) -> String {
        self.code("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.code("2", text)
    }

    pub fn red(self, text: &str) -> String {
        self.code("1;31", text)
    }

    pub fn green(self, text: &str) -> String {
        self.code("32", text)
    }

    pub fn yellow(self, text: &str) -> String {
        self.code("33", text)
    }
}

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
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["NAME", "RATE"], ["a", "50 µs"], ["longer", "1gbit"]];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        let widths = widths(&rows);
        let lines = rows.map(|row| line([Align::Left, Align::Right], &widths, &row));
        assert_eq!(lines, ["NAME     RATE", "a       50 µs", "longer  1gbit"]);
    }
}
