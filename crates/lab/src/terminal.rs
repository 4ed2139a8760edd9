//! Standard output as people and pipes expect it.
//!
//! Colour only on a terminal and never with NO_COLOR set. When the reader of a pipe goes away, the
//! rest is dropped in silence: the reports are in files, and an experiment must not stop half-way
//! because somebody piped its summary into `head`.

use std::io::{self, IsTerminal as _, Write};

/// Whether to colour.
#[derive(Clone, Copy, Debug)]
pub struct Paint {
    colour: bool,
}

impl Paint {
    /// No colour.
    pub fn plain() -> Paint {
        Paint { colour: false }
    }

    /// Colour in any case.
    pub fn coloured() -> Paint {
        Paint { colour: true }
    }

    /// Colour if `terminal` and the environment does not ask for none.
    pub fn for_terminal(terminal: bool) -> Paint {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        Paint { colour: terminal && !refused && !dumb }
    }

    pub fn is_coloured(self) -> bool {
        self.colour
    }

    pub fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    /// Faint.
    pub fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    /// Green, for what holds.
    pub fn good(self, text: &str) -> String {
        self.wrap("32", text)
    }

    /// Red, for what does not.
    pub fn bad(self, text: &str) -> String {
        self.wrap("31", text)
    }

    /// Yellow, for what needs a look.
    pub fn warn(self, text: &str) -> String {
        self.wrap("33", text)
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A writer that forgives a broken pipe.
pub struct Terminal<W> {
    out: W,
    gone: bool,
    /// How to colour what is written here.
    pub paint: Paint,
}

impl Terminal<io::Stdout> {
    /// Standard output.
    pub fn stdout() -> Self {
        let out = io::stdout();
        let paint = Paint::for_terminal(out.is_terminal());
        Terminal { out, gone: false, paint }
    }
}

impl<W: Write> Terminal<W> {
    /// Any writer, without colour.
    pub fn plain(out: W) -> Self {
        Terminal { out, gone: false, paint: Paint::plain() }
    }

    fn forgive<T>(&mut self, result: io::Result<T>, instead: T) -> io::Result<T> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.gone = true;
                Ok(instead)
            }
            other => other,
        }
    }
}

impl<W: Write> Write for Terminal<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.gone {
            return Ok(bytes.len());
        }
        let written = self.out.write(bytes);
        self.forgive(written, bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.gone {
            return Ok(());
        }
        let flushed = self.out.flush();
        self.forgive(flushed, ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Broken(io::ErrorKind);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(self.0.into())
        }
    }

    #[test]
    fn a_broken_pipe_is_no_error() {
        let mut out = Terminal::plain(Broken(io::ErrorKind::BrokenPipe));
        writeln!(out, "hello").unwrap();
        out.flush().unwrap();
        assert!(out.gone);
    }

    #[test]
    fn a_full_disk_is_one() {
        let mut out = Terminal::plain(Broken(io::ErrorKind::StorageFull));
        assert!(writeln!(out, "hello").is_err());
    }

    #[test]
    fn no_colour_without_a_terminal() {
        assert!(!Paint::for_terminal(false).is_coloured());
        assert_eq!(Paint::plain().bad("x"), "x");
        assert_eq!(Paint::coloured().bad("x"), "\x1b[31mx\x1b[0m");
    }
}
