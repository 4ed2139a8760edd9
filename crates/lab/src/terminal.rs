//! Standard output as people and pipes expect it.
//!
//! Colour only on a terminal and never with NO_COLOR set. When the reader of a pipe goes away, the
//! rest is dropped in silence: the reports are in files, and an experiment must not stop half-way
//! because somebody piped its summary into `head`.

use std::io::{self, Write};

use tidegate_chart::text::Paint;

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
        let (out, paint) = (io::stdout(), Paint::stdout());
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
}
