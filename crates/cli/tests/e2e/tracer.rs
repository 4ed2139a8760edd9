//! A process that is stopped at each system call by which it changes something that outlives it: files, pins,
//! programs, maps, devices, qdiscs.

use std::{io, os::unix::process::CommandExt, process::Command, ptr};

/// The children and traced threads of the calling thread alone, not those of other tests.
const OWN: i32 = libc::__WALL | libc::__WNOTHREAD;
/// `PTRACE_SYSCALL_INFO_ENTRY`.
const ENTRY: u8 = 1;
/// Of `bpf(2)`: update and delete an element, pin, attach, detach, update many, create, change and detach a
/// link.
const BPF_CHANGES: [u64; 9] = [2, 3, 6, 8, 9, 26, 28, 29, 34];
/// Kinds of a netlink message come in fours: new, delete, get, set.
const RTM_BASE: u64 = 16;
const RTM_GET: u64 = 2;

/// `struct ptrace_syscall_info`, as far as the entry of a call goes.
#[repr(C)]
#[derive(Default)]
struct CallInfo {
    op: u8,
    pad: [u8; 3],
    arch: u32,
    ip: u64,
    sp: u64,
    number: u64,
    arguments: [u64; 6],
}

#[derive(Debug)]
pub struct Ended {
    /// The changes that it was about to make, in order; the last one was not made if it was killed.
    pub changes: Vec<String>,
    /// Its exit code; `None` if a signal ended it.
    pub code: Option<i32>,
}

/// Runs a command and, before it makes the change number `at`, counted from 0, sends it a signal.
pub fn run(command: Command, at: usize, signal: i32) -> Ended {
    watch(command, |change| (change == at).then_some(signal))
}

/// Runs a command and asks before each change, by its number, which signal to send it.
pub fn watch(mut command: Command, mut before: impl FnMut(usize) -> Option<i32>) -> Ended {
    // SAFETY: ptrace is async-signal-safe, and allocates nothing.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    #[allow(clippy::zombie_processes, reason = "waitpid below waits for it")]
    let main = command.spawn().unwrap().id() as i32;
    let mut ended = Ended { changes: Vec::new(), code: None };
    let mut is_new = true;
    loop {
        let mut status = 0;
        // SAFETY: `status` lives through the call.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, OWN) };
        assert!(pid > 0, "waitpid: {}", io::Error::last_os_error());
        if !libc::WIFSTOPPED(status) {
            if pid != main {
                continue;
            }
            ended.code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
            return ended;
        }
        if is_new {
            is_new = false;
            let options = libc::PTRACE_O_TRACESYSGOOD
                | libc::PTRACE_O_TRACECLONE
                | libc::PTRACE_O_TRACEEXEC
                | libc::PTRACE_O_EXITKILL;
            // SAFETY: the process is stopped and ours; no memory is passed.
            unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, pid, 0, options) };
            go_on(pid, 0);
            continue;
        }
        let stop = libc::WSTOPSIG(status);
        if stop == libc::SIGTRAP | 0x80 {
            if let Some(change) = change_of(pid) {
                ended.changes.push(change);
                if let Some(signal) = before(ended.changes.len() - 1) {
                    // SAFETY: the process is ours and has not been waited for.
                    unsafe { libc::kill(main, signal) };
                }
            }
            go_on(pid, 0);
        } else if status >> 16 != 0 || stop == libc::SIGTRAP || stop == libc::SIGSTOP {
            // An event of the tracer's, or a thread that is new.
            go_on(pid, 0);
        } else {
            go_on(pid, stop);
        }
    }
}

fn go_on(pid: i32, signal: i32) {
    // SAFETY: no memory is passed. One that has been killed meanwhile is no longer stopped.
    unsafe { libc::ptrace(libc::PTRACE_SYSCALL, pid, 0, signal) };
}

fn peek(pid: i32, address: u64) -> u64 {
    // SAFETY: reads the memory of a stopped process; glibc returns the word.
    unsafe { libc::ptrace(libc::PTRACE_PEEKDATA, pid, address, ptr::null_mut::<u8>()) as u64 }
}

/// What a system call that is about to be made would change.
fn change_of(pid: i32) -> Option<String> {
    let mut info = CallInfo::default();
    let size = size_of::<CallInfo>();
    // SAFETY: the kernel writes at most `size` bytes to `info`, which lives through the call.
    unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, pid, size, &raw mut info) };
    if info.op != ENTRY {
        return None;
    }
    let [first, second, third, ..] = info.arguments;
    let is_file = first > 2;
    let create = |flags: u64| flags & libc::O_CREAT as u64 != 0;
    let name = match info.number as i64 {
        libc::SYS_bpf if BPF_CHANGES.contains(&first) => return Some(format!("bpf({first})")),
        libc::SYS_sendto => {
            let kind = peek(pid, second) >> 32 & 0xffff;
            let changes = kind < RTM_BASE || (kind - RTM_BASE) % 4 != RTM_GET;
            return changes.then(|| format!("netlink({kind})"));
        }
        libc::SYS_sendmsg => "sendmsg",
        libc::SYS_write if is_file => "write",
        libc::SYS_openat if create(third) => "create",
        libc::SYS_mkdir | libc::SYS_mkdirat => "mkdir",
        libc::SYS_rename | libc::SYS_renameat | libc::SYS_renameat2 => "rename",
        libc::SYS_unlink | libc::SYS_unlinkat | libc::SYS_rmdir => "unlink",
        libc::SYS_symlink | libc::SYS_symlinkat => "symlink",
        libc::SYS_mount => "mount",
        libc::SYS_umount2 => "unmount",
        _ => return None,
    };
    Some(name.to_owned())
}
