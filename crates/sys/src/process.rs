//! A command started inside a cgroup, and the signals that whoever started it passes on.
//!
//! For `tidegate run`: it blocks the signals it means to pass on and takes them one by one with
//! `sigtimedwait`, which tells a signal of the terminal, which the command has got as well, from one that
//! was sent to this process alone. There are no handlers, so nothing runs asynchronously.

use std::{
    collections::BTreeSet,
    fs, io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{fs::MetadataExt, process::CommandExt},
    },
    panic::resume_unwind,
    process::{Child, Command},
    ptr,
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::{
    io::Errno,
    pipe::PipeFlags,
    process::{Gid, Uid},
};
use tidegate_core::scope::shown;

use crate::{
    cgroup::{Cgroup, CgroupError, Hierarchy},
    names::User,
};

/// Marks an error number of entering the cgroup, as against one of executing the command: both come from the
/// child by the same way, and no error number is as large.
const ENTER_ERROR: i32 = 1 << 16;
/// The same of becoming another user.
const USER_ERROR: i32 = 1 << 17;

/// The process group of a process, as this PID namespace numbers it; `None` if there is no such process. The
/// number is 0 for every group whose leader is outside of the namespace, as in a container whose first
/// process was not made the leader of one.
pub fn process_group(process: u32) -> Option<i32> {
    let process = libc::pid_t::try_from(process).ok()?;
    // SAFETY: it takes a number and returns one.
    let group = unsafe { libc::getpgid(process) };
    (group >= 0).then_some(group)
}

/// The network namespaces of the processes at and below a cgroup.
pub(crate) fn network_namespaces(hierarchy: &Hierarchy, cgroup: &Cgroup) -> Vec<OwnedFd> {
    let mut seen = BTreeSet::new();
    let mut namespaces = Vec::new();
    for path in hierarchy.find_below(cgroup.path(), |_| true) {
        let processes = hierarchy.open(&path).and_then(|group| group.processes());
        for pid in processes.unwrap_or_default() {
            let Ok(file) = fs::File::open(format!("/proc/{pid}/ns/net")) else { continue };
            if file.metadata().is_ok_and(|m| seen.insert(m.ino())) {
                namespaces.push(OwnedFd::from(file));
            }
        }
    }
    namespaces
}

pub(crate) fn in_network_namespace(namespace: &OwnedFd, work: impl FnOnce() + Send) {
    thread::scope(|scope| {
        scope.spawn(|| {
            let kind = rustix::thread::LinkNameSpaceType::Network;
            if rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(kind)).is_ok() {
                work();
            }
        });
    });
}

/// Why a command did not start. The cgroup is as before.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// There is no such command.
    #[error("`{0}`: command not found")]
    NotFound(String),
    /// The command is there but cannot be executed.
    #[error("`{command}`: cannot be executed: {source}")]
    NotExecutable { command: String, source: io::Error },
    #[error("cgroup `{}` does not take a process: {source}", shown(cgroup))]
    Enter { cgroup: String, source: io::Error },
    #[error("cannot become another user: {0}; run it as root")]
    User(io::Error),
    #[error("cannot start a process: {0}")]
    Fork(io::Error),
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// Signals kept back from this thread, to be taken one by one; the threads that it starts inherit that.
pub struct SignalQueue {
    blocked: libc::sigset_t,
    original: libc::sigset_t,
}

impl std::fmt::Debug for SignalQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignalQueue").finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    pub signal: i32,
    /// It came from the kernel, as a terminal's do, and not from a process.
    pub from_kernel: bool,
}

impl SignalQueue {
    /// Keeps these signals, and SIGCHLD, back from now on.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn block(signals: &[i32]) -> io::Result<SignalQueue> {
        let mut blocked = MaybeUninit::uninit();
        let mut original = MaybeUninit::uninit();
        // SAFETY: sigemptyset fills `blocked`, pthread_sigmask fills `original`; both outlive the calls. The
        // disposition of SIGCHLD is set to the default, which needs no handler: a parent that ignores
        // SIGCHLD hands that down, and the kernel would then drop the command's exit status.
        unsafe {
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            libc::sigemptyset(blocked.as_mut_ptr());
            for signal in signals.iter().chain(&[libc::SIGCHLD]) {
                libc::sigaddset(blocked.as_mut_ptr(), *signal);
            }
            let error =
                libc::pthread_sigmask(libc::SIG_BLOCK, blocked.as_ptr(), original.as_mut_ptr());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            Ok(SignalQueue { blocked: blocked.assume_init(), original: original.assume_init() })
        }
    }

    /// Gives this thread the signal mask that it had before. What has come and was not taken is delivered.
    pub fn restore(self) {
        // SAFETY: `original` is a signal set that pthread_sigmask has filled.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.original, ptr::null_mut()) };
    }

    /// Waits for the next signal; `None` after `timeout`.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn wait(&self, timeout: Duration) -> io::Result<Option<Received>> {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: all three point to live values of the right types.
        let signal = unsafe { libc::sigtimedwait(&self.blocked, info.as_mut_ptr(), &timeout) };
        if signal < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: zeroed at first and filled by the call; every bit pattern is a siginfo_t.
        let info = unsafe { info.assume_init() };
        Ok(Some(Received { signal, from_kernel: info.si_code == libc::SI_KERNEL }))
    }

    /// Has a process enter a cgroup, where it waits to become a command: with the signal mask that this
    /// process had before [`SignalQueue::block`], and with a user as that one, with all of its groups. The
    /// kernel takes some ten milliseconds for that, so whoever starts a command does other work meanwhile.
    ///
    /// # Errors
    /// [`SpawnError`].
    pub fn prepare(
        &self,
        mut command: Command,
        cgroup: &Cgroup,
        user: Option<&User>,
    ) -> Result<Prepared, SpawnError> {
        let procs = cgroup.open_procs()?;
        let (wait, go) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|e| SpawnError::Fork(e.into()))?;
        let mask = self.original;
        let user = user.map(|user| {
            let groups: Vec<_> = user.groups.iter().copied().map(Gid::from_raw).collect();
            (groups, Gid::from_raw(user.gid), Uid::from_raw(user.uid))
        });
        let name = command.get_program().to_string_lossy().into_owned();
        let parents = go.as_raw_fd();
        // SAFETY: between fork and exec the closure makes only system calls (close, write, read, sigprocmask,
        // setgroups, setresgid, setresuid; this child has one thread) and allocates nothing; the closure owns
        // `procs` and `wait`, and the child has a descriptor `parents` of its own, which nothing else closes.
        unsafe {
            command.pre_exec(move || {
                libc::close(parents);
                enter(&procs)?;
                wait_for_start(&wait)?;
                take_signals(&mask)?;
                user.as_ref().map_or(Ok(()), |(groups, gid, uid)| become_user(groups, *gid, *uid))
            });
        }
        let starter = thread::Builder::new().spawn(move || command.spawn());
        let starter = starter.map_err(SpawnError::Fork)?;
        Ok(Prepared {
            go: Some(go),
            starter: Some(starter),
            name,
            cgroup: cgroup.path().to_owned(),
        })
    }
}

/// A process that waits in its cgroup to become a command. It ends when this is dropped, or this process
/// dies.
#[derive(Debug)]
pub struct Prepared {
    go: Option<OwnedFd>,
    starter: Option<JoinHandle<io::Result<Child>>>,
    name: String,
    cgroup: String,
}

impl Prepared {
    /// Starts the command.
    ///
    /// # Errors
    /// [`SpawnError`].
    pub fn start(mut self) -> Result<Child, SpawnError> {
        if let Some(go) = &self.go {
            // Where the process is gone, its end says why.
            let _ = rustix::io::write(go, b"0");
        }
        let started = self.join().unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()));
        let (name, cgroup) = (std::mem::take(&mut self.name), std::mem::take(&mut self.cgroup));
        started.map_err(|source| match source.raw_os_error() {
            Some(code) if code >= USER_ERROR => {
                SpawnError::User(io::Error::from_raw_os_error(code - USER_ERROR))
            }
            Some(code) if code >= ENTER_ERROR => SpawnError::Enter {
                cgroup,
                source: io::Error::from_raw_os_error(code - ENTER_ERROR),
            },
            Some(libc::ENOENT) => SpawnError::NotFound(name),
            Some(libc::EAGAIN | libc::ENOMEM) => SpawnError::Fork(source),
            _ => SpawnError::NotExecutable { command: name, source },
        })
    }

    /// Waits until the process has become the command, or has ended.
    fn join(&mut self) -> Option<io::Result<Child>> {
        let ended = self.starter.take()?.join();
        Some(ended.unwrap_or_else(|panic| resume_unwind(panic)))
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.go = None;
        // The cgroup can be removed when the process is gone. Where the command was started, there is none.
        if let Some(Ok(mut child)) = self.join() {
            let _ = child.wait();
        }
    }
}

/// In the child: the system calls alone, since the C library's functions speak to other threads.
fn become_user(groups: &[Gid], gid: Gid, uid: Uid) -> io::Result<()> {
    use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
    let done = set_thread_groups(groups)
        .and_then(|()| set_thread_res_gid(gid, gid, gid))
        .and_then(|()| set_thread_res_uid(uid, uid, uid));
    done.map_err(|e| io::Error::from_raw_os_error(USER_ERROR + e.raw_os_error()))
}

/// In the child: enters the cgroup whose `cgroup.procs` this is.
fn enter(procs: &impl AsFd) -> io::Result<()> {
    let entered = rustix::io::write(procs, b"0");
    entered.map_err(|e| io::Error::from_raw_os_error(ENTER_ERROR + e.raw_os_error()))?;
    Ok(())
}

/// In the child: waits for the parent's byte, or ends when the parent can write none.
fn wait_for_start(wait: &OwnedFd) -> io::Result<()> {
    loop {
        match rustix::io::read(wait, &mut [0; 1]) {
            // SAFETY: it does not return. An error would go to a process that may not be there.
            Ok(0) => unsafe { libc::_exit(1) },
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// In the child: takes its signals back, and those that have come meanwhile. But a stop from the terminal is
/// dropped: it would stop the child before it is the command, while its parent waits for that.
fn take_signals(mask: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: what is ignored is not pending; then the disposition is as before, and needs no handler.
    unsafe {
        let before = libc::signal(libc::SIGTSTP, libc::SIG_IGN);
        libc::signal(libc::SIGTSTP, before);
    }
    // SAFETY: `mask` points to a signal set that pthread_sigmask has filled.
    if unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
