//! A child without capabilities that asks others for what runs here: its lines are read, and it is started
//! again with back-off when it ends. That it is away is a state.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The longest line.
pub const LINE_MAX: usize = 16 << 20;
/// Bytes that are read at once.
const READ_BYTES: usize = 64 << 10;
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A line of a child, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line<T> {
    /// The other side is asked now. Said by the parent.
    Asked,
    /// All there are, by id.
    Listed(BTreeMap<String, T>),
    /// One has come or is another now.
    Changed(String, T),
    /// One is removed.
    Gone(String),
    /// The other side does not answer. What it listed before may still run.
    Away(String),
}

/// One child, which may run or be due.
#[derive(Debug)]
pub struct Asker {
    child: Option<(Child, ChildStdout)>,
    part: Vec<u8>,
    /// It has said why it ends.
    said_why: bool,
    due: Duration,
    wait: Duration,
}

impl Asker {
    /// It is started as soon as it is kept.
    #[must_use]
    pub fn new(now: Duration) -> Asker {
        Asker { child: None, part: Vec::new(), said_why: false, due: now, wait: RETRY_MIN }
    }

    /// Starts it if it is due; says so, or why it cannot be.
    pub fn keep<T>(
        &mut self,
        command: impl FnOnce() -> io::Result<Command>,
        now: Duration,
    ) -> Option<Line<T>> {
        if self.child.is_some() || self.due > now {
            return None;
        }
        match command().and_then(start) {
            Ok(child) => {
                self.child = Some(child);
                Some(Line::Asked)
            }
            Err(e) => {
                self.fails(now);
                Some(Line::Away(e.to_string()))
            }
        }
    }

    /// Readable when it has said something.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.child.as_ref().map(|(_, pipe)| pipe.as_fd())
    }

    /// When it is to be started; `None` while it runs.
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        self.child.is_none().then_some(self.due)
    }

    /// The lines that have come. If the child has ended, the last line says why.
    pub fn take<T: DeserializeOwned>(&mut self, now: Duration) -> Vec<Line<T>> {
        let (mut lines, ended) = self.read();
        let is_away = |line: &Line<T>| matches!(line, Line::Away(_));
        if lines.iter().any(|line| !is_away(line)) {
            self.wait = RETRY_MIN;
        }
        self.said_why |= lines.iter().any(is_away);
        if ended {
            if !std::mem::take(&mut self.said_why) {
                lines.push(Line::Away("its child has ended".to_owned()));
            }
            self.fails(now);
        }
        lines
    }

    pub fn end(mut self) {
        self.kill();
    }

    fn kill(&mut self) {
        if let Some((mut child, _)) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn fails(&mut self, now: Duration) {
        self.kill();
        self.part.clear();
        // Many agents may ask one server, and lose it at once.
        self.due = now + jittered(self.wait);
        self.wait = (self.wait * 2).min(RETRY_MAX);
    }

    /// Whole lines that have come, and whether the child is at its end.
    fn read<T: DeserializeOwned>(&mut self) -> (Vec<Line<T>>, bool) {
        let Some((_, pipe)) = &mut self.child else { return (Vec::new(), false) };
        let (mut lines, mut ended) = (Vec::new(), false);
        let mut buffer = vec![0; READ_BYTES];
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => {
                    ended = true;
                    break;
                }
                Ok(n) => self.part.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    ended = true;
                    break;
                }
            }
            while let Some(end) = self.part.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = self.part.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(line) => lines.push(line),
                    Err(_) => return (lines, true),
                }
            }
            if self.part.len() > LINE_MAX {
                return (lines, true);
            }
        }
        (lines, ended)
    }
}

/// A time between three quarters and five quarters of this one.
#[must_use]
pub fn jittered(time: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish();
    time.mul_f64(0.75 + (random >> 32) as f64 / f64::from(u32::MAX) / 2.0)
}

fn start(mut command: Command) -> io::Result<(Child, ChildStdout)> {
    // It ends when this is closed.
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let pipe = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let flags = rustix::fs::fcntl_getfl(&pipe)?;
    rustix::fs::fcntl_setfl(&pipe, flags | OFlags::NONBLOCK)?;
    Ok((child, pipe))
}

/// For the child: ends it with its parent.
pub fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// For the child: writes a line.
///
/// # Errors
/// Those of the operating system.
pub fn say<T: Serialize>(line: &Line<T>) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&text)?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn a_child_that_ends_is_started_less_and_less_often() {
        let mut now = Duration::ZERO;
        let mut asker = Asker::new(now);
        let ends = || Err(io::ErrorKind::NotFound.into());
        let mut wait = RETRY_MIN;
        for _ in 0..9 {
            assert!(matches!(asker.keep::<()>(ends, now), Some(Line::Away(_))));
            let due = asker.due().unwrap();
            let waits = due - now;
            assert!((wait.mul_f64(0.75)..=wait.mul_f64(1.25)).contains(&waits), "{waits:?}");
            assert_eq!(asker.keep::<()>(ends, due - Duration::from_nanos(1)), None, "not yet");
            (now, wait) = (due, (2 * wait).min(RETRY_MAX));
        }
        // One that has said something begins again.
        let says = || {
            let mut command = Command::new("sh");
            command.args(["-c", "echo '{\"listed\":{}}'; exec cat"]);
            Ok(command)
        };
        assert_eq!(asker.keep::<()>(says, now), Some(Line::Asked));
        assert_eq!(asker.keep::<()>(ends, now), None, "it runs");
        let wait_for_it = |asker: &Asker| {
            let mut fds = [PollFd::from_borrowed_fd(asker.fd().unwrap(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap();
        };
        wait_for_it(&asker);
        assert_eq!(asker.take::<()>(now), [Line::Listed(BTreeMap::new())]);
        // Its input ends, and it does.
        drop(asker.child.as_mut().unwrap().0.stdin.take());
        wait_for_it(&asker);
        assert_eq!(asker.take::<()>(now), [Line::Away("its child has ended".to_owned())]);
        assert!(asker.due().unwrap() - now <= RETRY_MIN.mul_f64(1.25));
    }
}
