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

/// The longest line. A longer one ends the child.
pub const LINE_MAX: usize = 16 << 20;
/// Bytes of a child that one turn reads at most, as many as a pipe has. Others get their turn before the
/// rest. The shortest line has 12 bytes, so lines are bounded, too.
pub const TURN_BYTES: usize = 64 << 10;
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
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.child.as_ref().map(|(_, pipe)| pipe.as_fd())
    }

    /// When it is to be started; `None` while it runs.
    pub fn due(&self) -> Option<Duration> {
        self.child.is_none().then_some(self.due)
    }

    /// Lines that have come, of at most [`TURN_BYTES`] more. If the child has ended, the last line says why.
    pub fn take<T: DeserializeOwned>(&mut self, now: Duration) -> Vec<Line<T>> {
        let (mut lines, ended) = self.read();
        let is_away = |line: &Line<T>| matches!(line, Line::Away(_));
        if lines.iter().any(|line| !is_away(line)) {
            self.wait = RETRY_MIN;
        }
        self.said_why |= lines.iter().any(is_away);
        if let Some(why) = ended {
            if !std::mem::take(&mut self.said_why) {
                lines.push(Line::Away(why));
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

    /// Whole lines that have come, and why the child is at its end, if it is.
    fn read<T: DeserializeOwned>(&mut self) -> (Vec<Line<T>>, Option<String>) {
        let Some((_, pipe)) = &mut self.child else { return (Vec::new(), None) };
        // In what was read before there is no whole line.
        let (mut begin, mut from) = (0, self.part.len());
        let mut ended = match pipe.take(TURN_BYTES as u64).read_to_end(&mut self.part) {
            Ok(TURN_BYTES) => None,
            Ok(_) => Some("its child has ended".to_owned()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
            Err(e) => Some(format!("its child cannot be read: {e}")),
        };
        let mut lines = Vec::new();
        while let Some(length) = self.part[from..].iter().position(|byte| *byte == b'\n') {
            let end = from + length;
            match serde_json::from_slice(&self.part[begin..end]) {
                Ok(line) => lines.push(line),
                Err(e) => return (lines, Some(format!("a line of its child cannot be read: {e}"))),
            }
            (begin, from) = (end + 1, end + 1);
        }
        self.part.drain(..begin);
        if self.part.len() > LINE_MAX {
            let mib = LINE_MAX >> 20;
            ended = Some(format!("a line of its child has more than {mib} MiB"));
        }
        // A long line is rare, and its memory is given back.
        self.part.shrink_to(TURN_BYTES);
        (lines, ended)
    }
}

/// A time between three quarters and five quarters of this one.
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

    /// Waits until a child has said something.
    fn wait_for_it(asker: &Asker) {
        let mut fds = [PollFd::from_borrowed_fd(asker.fd().unwrap(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap();
    }

    /// One whose child runs a script.
    fn running(script: &str) -> Asker {
        let mut asker = Asker::new(Duration::ZERO);
        let says = || {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Ok(command)
        };
        assert_eq!(asker.keep::<()>(says, Duration::ZERO), Some(Line::Asked));
        asker
    }

    /// Takes turns until a line says that it is away; returns all before, and why.
    fn until_away(asker: &mut Asker) -> (Vec<Line<()>>, String) {
        let mut all = Vec::new();
        loop {
            wait_for_it(asker);
            all.extend(asker.take(Duration::ZERO));
            if let Some(Line::Away(why)) = all.pop_if(|line| matches!(line, Line::Away(_))) {
                return (all, why);
            }
        }
    }

    /// As where a user's engine writes events without end.
    #[test]
    fn a_child_that_floods_gets_its_turns_and_no_more() {
        let mut asker = running("exec yes '{\"gone\":\"a\"}'");
        for _ in 0..100 {
            wait_for_it(&asker);
            let lines = asker.take::<()>(Duration::ZERO);
            assert!(lines.len() <= TURN_BYTES / 12, "{}", lines.len());
            assert!(lines.iter().all(|line| *line == Line::Gone("a".to_owned())));
            assert!(asker.part.len() <= TURN_BYTES);
        }
        asker.end();
    }

    #[test]
    fn a_line_may_take_many_turns_and_lines_may_share_one() {
        let long = 10 * TURN_BYTES;
        let script = format!(
            "printf '{{\"gone\":\"a\"}}\\n{{\"gone\":\"'; head -c {long} /dev/zero | tr '\\0' b; \
             printf '\"}}\\n{{\"gone\":\"c\"}}\\n'"
        );
        let (lines, why) = until_away(&mut running(&script));
        let gone = ["a".to_owned(), "b".repeat(long), "c".to_owned()].map(Line::Gone);
        assert!(lines == gone, "{} lines", lines.len());
        assert_eq!(why, "its child has ended");
    }

    #[test]
    fn a_line_without_end_and_a_strange_one_end_the_child() {
        let mut asker = running("exec cat /dev/zero");
        assert_eq!(until_away(&mut asker).1, "a line of its child has more than 16 MiB");
        assert!(asker.fd().is_none() && asker.part.is_empty());
        let (lines, why) =
            until_away(&mut running("echo '{\"gone\":\"a\"}'; echo hello; exec cat"));
        assert_eq!(lines, [Line::Gone("a".to_owned())]);
        assert!(why.starts_with("a line of its child cannot be read: expected"), "{why}");
    }

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
        wait_for_it(&asker);
        assert_eq!(asker.take::<()>(now), [Line::Listed(BTreeMap::new())]);
        // Its input ends, and it does.
        drop(asker.child.as_mut().unwrap().0.stdin.take());
        wait_for_it(&asker);
        assert_eq!(asker.take::<()>(now), [Line::Away("its child has ended".to_owned())]);
        assert!(asker.due().unwrap() - now <= RETRY_MIN.mul_f64(1.25));
    }
}
