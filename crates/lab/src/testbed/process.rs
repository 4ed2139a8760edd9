//! Processes that the lab starts: placed before they run, watched while they do, gone after.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    os::unix::fs::FileExt,
    process::{Child as StdChild, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use rustix::{
    fs::{MemfdFlags, memfd_create},
    process::{Pid, Signal, kill_process},
};
use serde::de::DeserializeOwned;
use tidegate_sys::net::{NetNs, SpawnInto, prepare};

use super::{Cgroup, wait::wait_until};

/// How long a process may take to end after it was asked to.
const STOP: Duration = Duration::from_secs(30);
/// How long one that is dropped may take, before it is killed.
const HEED: Duration = Duration::from_secs(20);
/// How much of a process's output an error quotes.
const QUOTE_BYTES: usize = 2000;

/// Where a process starts: in which namespace, in which cgroup, and under which other program.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// The network namespace.
    pub netns: &'a NetNs,
    /// The cgroup; none: that of the lab.
    pub cgroup: Option<&'a Cgroup>,
    /// A program and its arguments, which runs the process: `tidegate run --egress 50mbit --`.
    pub runner: &'a [OsString],
}

impl<'a> Site<'a> {
    /// The same namespace, in a cgroup.
    pub fn in_cgroup(self, cgroup: &'a Cgroup) -> Self {
        Self { cgroup: Some(cgroup), ..self }
    }

    /// The same place, under a program that runs others.
    pub fn under(self, runner: &'a [OsString]) -> Self {
        Self { runner, ..self }
    }
}

impl<'a> From<&'a NetNs> for Site<'a> {
    fn from(netns: &'a NetNs) -> Self {
        Self { netns, cgroup: None, runner: &[] }
    }
}

/// A command that starts at `site` and is killed when the thread that spawned it ends.
pub fn command<'a>(
    site: impl Into<Site<'a>>,
    program: impl AsRef<OsStr>,
) -> anyhow::Result<Command> {
    let site = site.into();
    let mut words = site.runner.iter().map(OsString::as_os_str).chain([program.as_ref()]);
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    let cgroup_procs = site.cgroup.map(Cgroup::open_procs).transpose()?;
    let into = SpawnInto { netns: Some(site.netns), cgroup_procs, die_with_parent: true };
    prepare(&mut command, into)?;
    Ok(command)
}

/// A running process. Dropping it ends it, by its own pid, and reaps it: it is asked first, so that
/// one that runs another can end that too, and killed if it does not listen.
#[derive(Debug)]
pub struct Child {
    name: String,
    child: StdChild,
    stdout: File,
    stderr: File,
}

/// A process that ended well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// What it wrote on standard output.
    pub stdout: String,
    /// What it wrote on standard error.
    pub stderr: String,
}

impl Finished {
    /// Standard output as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> anyhow::Result<T> {
        serde_json::from_str(&self.stdout)
            .with_context(|| format!("the output is not as expected: {}", quote(&self.stdout)))
    }
}

impl Child {
    /// Starts `command`. Its output goes to memory, however much it is; its input is empty.
    pub fn spawn(command: Command) -> anyhow::Result<Self> {
        Self::spawn_with(command, Stdio::null())
    }

    /// As [`spawn`](Self::spawn), with an input that stays open until [`wind_up`](Self::wind_up).
    pub fn spawn_open(command: Command) -> anyhow::Result<Self> {
        Self::spawn_with(command, Stdio::piped())
    }

    fn spawn_with(mut command: Command, stdin: Stdio) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let sink = || -> anyhow::Result<(File, Stdio)> {
            let file = File::from(memfd_create("lab-output", MemfdFlags::CLOEXEC)?);
            let for_child = file.try_clone()?;
            Ok((file, for_child.into()))
        };
        let (stdout, child_stdout) = sink()?;
        let (stderr, child_stderr) = sink()?;
        let child = command
            .stdin(stdin)
            .stdout(child_stdout)
            .stderr(child_stderr)
            .spawn()
            .with_context(|| format!("cannot start {name} (is it installed?)"))?;
        Ok(Self { name, child, stdout, stderr })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it wrote on standard output until now.
    pub fn stdout_so_far(&self) -> String {
        read_all(&self.stdout)
    }

    /// An error, with what the process said, if it has ended.
    pub fn check_running(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{}", self.epitaph(status)),
        }
    }

    /// Waits until the process ends by itself. Errors, and kills it, if that takes longer than
    /// `within`; errors if it ends with another exit code than 0.
    pub fn finish(self, within: Duration) -> anyhow::Result<Finished> {
        let name = self.name.clone();
        let (status, finished) = self.finish_any(within)?;
        if !status.success() {
            bail!("{}", epitaph(&name, status, &finished));
        }
        Ok(finished)
    }

    /// As [`finish`](Self::finish), whatever the exit code.
    pub fn finish_any(mut self, within: Duration) -> anyhow::Result<(ExitStatus, Finished)> {
        let what = format!("the end of {} (pid {})", self.name, self.pid());
        let status = wait_until(&what, within, || Ok(self.child.try_wait()?))?;
        Ok((status, self.output()))
    }

    /// Asks the process to end (SIGTERM), waits for it, and returns what it wrote.
    pub fn stop(mut self) -> anyhow::Result<Finished> {
        self.ask_to_end()?;
        Ok(self.finish_any(STOP)?.1)
    }

    /// Ends it at once (SIGKILL), as a crash would.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    fn ask_to_end(&mut self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        // Not reaped yet, so the pid is still its own.
        if let (None, Some(pid)) = (self.child.try_wait()?, pid) {
            kill_process(pid, Signal::TERM)?;
        }
        Ok(())
    }

    /// Closes the process's input and waits for its end, not even an interrupt ends the wait.
    /// `None` if it has not ended `within`.
    pub fn wind_up(&mut self, within: Duration) -> anyhow::Result<Option<ExitStatus>> {
        drop(self.child.stdin.take());
        let started = Instant::now();
        loop {
            let status = self.child.try_wait()?;
            if status.is_some() || started.elapsed() >= within {
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// What it wrote until now.
    pub fn output(&self) -> Finished {
        Finished { stdout: read_all(&self.stdout), stderr: read_all(&self.stderr) }
    }

    fn epitaph(&self, status: ExitStatus) -> String {
        epitaph(&self.name, status, &self.output())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // All do nothing if it has been reaped.
        if self.ask_to_end().is_ok() {
            let _ = self.wind_up(HEED);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn epitaph(name: &str, status: ExitStatus, output: &Finished) -> String {
    let said = if output.stderr.trim().is_empty() { &output.stdout } else { &output.stderr };
    format!("{name} ended with {status}: {}", quote(said))
}

fn quote(text: &str) -> String {
    text.trim().chars().take(QUOTE_BYTES).collect()
}

/// Reads without moving the offset, at which the process may still be writing.
fn read_all(file: &File) -> String {
    let mut bytes = Vec::new();
    let mut chunk = [0; 65_536];
    while let Ok(len @ 1..) = file.read_at(&mut chunk, bytes.len() as u64) {
        bytes.extend_from_slice(&chunk[..len]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Child::spawn(command).unwrap()
    }

    #[test]
    fn output_larger_than_a_pipe_arrives() {
        let finished = shell("head -c 1000000 /dev/zero | tr '\\0' x; echo no >&2");
        let finished = finished.finish(Duration::from_secs(60)).unwrap();
        assert_eq!((finished.stdout.len(), finished.stderr.as_str()), (1_000_000, "no\n"));
    }

    #[test]
    fn failure_quotes_what_was_said() {
        let error = shell("echo broken >&2; exit 3").finish(Duration::from_secs(60)).unwrap_err();
        assert_eq!(error.to_string(), "sh ended with exit status: 3: broken");
    }

    #[test]
    fn a_late_process_is_killed() {
        let child = shell("exec sleep 1000");
        let pid = child.pid();
        assert!(child.finish(Duration::from_millis(20)).is_err());
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
