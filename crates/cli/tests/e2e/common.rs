//! What the tests share: private places that are put back, and waiting with a deadline.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write},
    net::{TcpListener, UdpSocket},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tidegate_sys::{
    bpffs::PrivateBpffs,
    cgroup::{Cgroup, Hierarchy},
    libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions},
    links::{self, Link, On},
    store::Store,
};

/// Long, for emulated machines that others leave little.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// An emulated machine takes so many times as long.
const EMULATED: u32 = 4;
/// The pause between two looks of [`wait_for`], at least.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A look may start a process. So the pause is also so many times as long as the look took: on a slow machine
/// looking must not take the CPU time of what is waited for.
const LOOK_PAUSE: u32 = 4;

/// Says SKIP, past the test harness that would keep it to itself.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("test").rsplit("::").next().unwrap_or("test").to_owned();
    let _ = writeln!(io::stdout(), "SKIP {test}: {why}");
}

/// Whether this machine has no time of its own, as `make test-vm` says of its machines: less of a rate is
/// then used than there is.
pub fn is_emulated() -> bool {
    std::env::var_os("TIDEGATE_TEST_SLOW").is_some()
}

/// Whether the running kernel is older than a version.
pub fn kernel_before(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) < (Some(major), Some(minor))
}

pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip("needs root");
    }
    root
}

/// Returns from the test unless it runs as root.
#[macro_export]
macro_rules! need_root {
    () => {
        if !$crate::common::is_root() {
            return;
        }
    };
}

pub fn wait_for<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_within(PATIENCE * if is_emulated() { EMULATED } else { 1 }, what, look)
}

/// As [`wait_for`], for what takes its own time.
pub fn wait_within<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        let start = Instant::now();
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::sleep(LOOK_EVERY.max(start.elapsed() * LOOK_PAUSE));
    }
}

/// A port of loopback that nobody else uses as long as this process lives: below those that the kernel picks
/// for connections, and reserved by an abstract socket, which other runs of these tests see.
pub fn port() -> u16 {
    const PORTS: std::ops::Range<u16> = 10_000..32_000;
    static NEXT: Mutex<Option<u16>> = Mutex::new(None);
    let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
    let count = u32::from(PORTS.end - PORTS.start);
    let first = PORTS.start + (std::process::id().wrapping_mul(97) % count) as u16;
    for _ in 0..count {
        let port = next.unwrap_or(first);
        *next = Some(if port + 1 < PORTS.end { port + 1 } else { PORTS.start });
        let name = SocketAddr::from_abstract_name(format!("tidegate-test-port-{port}")).unwrap();
        let Ok(reserved) = UnixDatagram::bind_addr(&name) else { continue };
        let address = ("127.0.0.1", port);
        if TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok() {
            // Until this process ends.
            std::mem::forget(reserved);
            return port;
        }
    }
    panic!("no port of loopback is free");
}

/// A BPF file system and a cgroup for one test.
pub struct Place {
    pub group: Cgroup,
    pub hierarchy: Hierarchy,
    // Unmounted before its directory is removed.
    bpffs: PrivateBpffs,
    dir: TempDir,
}

impl Place {
    pub fn new() -> Place {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let dir = tempfile::tempdir().unwrap();
        let bpffs = dir.path().join("bpffs");
        fs::create_dir(&bpffs).unwrap();
        let bpffs = PrivateBpffs::mount(bpffs).unwrap();
        let hierarchy = Hierarchy::find().unwrap();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("tidegate-test-{}-{number}", std::process::id());
        let group = hierarchy.create(&hierarchy.open("").unwrap(), &name).unwrap();
        Place { group, hierarchy, bpffs, dir }
    }

    pub fn store(&self) -> PathBuf {
        self.bpffs.path().join("tidegate")
    }

    /// What `limit add --persist` writes.
    pub fn host_file(&self) -> PathBuf {
        self.dir.path().join("host/limits.toml")
    }

    /// Has `tidegate` work here alone: a user's limits and agent are not seen.
    pub fn keep_to<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("TIDEGATE_BPFFS", self.store());
        command.env("TIDEGATE_HOST_FILE", self.host_file());
        command.env("TIDEGATE_RUN_DIR", self.dir.path().join("run"))
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A cgroup below the test's own.
    pub fn child(&self, name: &str) -> Cgroup {
        self.hierarchy.create(&self.group, name).unwrap()
    }

    pub fn tidegate(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        self.keep_to(&mut command).stdin(Stdio::null());
        command
    }

    /// A command that starts inside a cgroup.
    pub fn inside(&self, group: &Cgroup, program: &str) -> Command {
        let mut command = Command::new("sh");
        let script = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        command.arg("-c").arg(script).arg(group.absolute()).arg(program);
        self.keep_to(&mut command).stdin(Stdio::null());
        command
    }

    /// `tidegate run`, started inside the test's cgroup.
    pub fn run(&self, flags: &[&str]) -> Command {
        let mut command = self.inside(&self.group, env!("CARGO_BIN_EXE_tidegate"));
        command.arg("run").args(flags).arg("--");
        command
    }

    pub fn ok(&self, args: &[&str]) -> String {
        let output = self.tidegate().args(args).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Exit code and standard error.
    pub fn refused(&self, args: &[&str]) -> (i32, String) {
        refused(self.tidegate().args(args))
    }

    pub fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(args)).unwrap()
    }

    /// The directories of limits in the store, not those of pools.
    pub fn limits(&self) -> Vec<String> {
        let mut names = entries(&self.store());
        names.retain(|name| !name.starts_with('+'));
        names
    }

    /// The limits on a cgroup in the order in which packets out of it meet them; packets into it and sockets
    /// meet them in the same.
    #[track_caller]
    pub fn order(&self, group: &Cgroup) -> Vec<String> {
        let [out, come_in, sockets] = Store::at(self.store()).order_on(group).unwrap();
        assert_eq!((&out, &out), (&come_in, &sockets));
        out
    }

    /// What a limit was asked to do, as its link says.
    pub fn intent(&self, name: &str) -> Value {
        let text = fs::read_link(self.store().join(name).join("intent")).unwrap();
        serde_json::from_str(text.to_str().unwrap()).unwrap()
    }

    /// The cgroup that a `tidegate run` started in the test's cgroup has made.
    pub fn run_group(&self) -> Option<Cgroup> {
        let is_run = |name: &str| name.starts_with("tidegate-run-");
        let path = self.hierarchy.find_below(self.group.path(), is_run).pop()?;
        self.hierarchy.open(&path).ok()
    }
}

/// The processes of a `tidegate run` in its cgroup that have become the command. Until the limit is there,
/// one waits in it.
pub fn started(group: &Cgroup) -> Vec<u32> {
    let waits = |pid: &u32| {
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        program.file_name().is_none_or(|name| name == "tidegate")
    };
    group.processes().unwrap_or_default().into_iter().filter(|pid| !waits(pid)).collect()
}

impl Drop for Place {
    fn drop(&mut self) {
        for path in self.hierarchy.find_below(self.group.path(), |_| true) {
            let group = self.hierarchy.open(&path);
            let processes = group.and_then(|group| group.processes());
            processes.unwrap_or_default().into_iter().for_each(|pid| signal(pid, Signal::KILL));
        }
        let root = self.hierarchy.open("").unwrap();
        let deadline = Instant::now() + PATIENCE;
        let _ = self.hierarchy.dissolve(&self.group, &root, deadline);
        let _ = fs::remove_file(Store::at(self.store()).agent_lock());
    }
}

/// Copies a program to execute it there. Another process writes the copy: a file that is open for writing
/// cannot be executed, and a child that another test just starts has all that this process has open.
pub fn copy_program(from: impl AsRef<Path>, to: &Path) {
    let copied =
        Command::new("cp").arg("--preserve=mode").arg(from.as_ref()).arg(to).status().unwrap();
    assert!(copied.success(), "{copied}");
}

pub fn refused(command: &mut Command) -> (i32, String) {
    let output = command.output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// A child that does not outlive its test.
pub struct Guard(pub Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Guard {
    pub fn exit_code(&mut self) -> i32 {
        wait_for("the end of a process", || self.0.try_wait().unwrap()).code().unwrap_or(-1)
    }
}

/// The eBPF objects of the limits on a cgroup, by their ids.
#[derive(Debug, Default, PartialEq)]
pub struct Objects {
    links: BTreeSet<u32>,
    programs: BTreeSet<u32>,
    maps: BTreeSet<u32>,
}

impl Objects {
    /// A walk over all programs ends early at one that another test is just making. So two walks must agree.
    pub fn on(cgroup: &Cgroup) -> Objects {
        let mut before = Objects::walk(cgroup);
        wait_for("two walks that find the same objects", || {
            let now = Objects::walk(cgroup);
            let last = std::mem::replace(&mut before, now);
            (last == before).then_some(last)
        })
    }

    fn walk(cgroup: &Cgroup) -> Objects {
        let mut objects = Objects::default();
        for link in on_cgroup(cgroup) {
            objects.links.insert(link.id);
            objects.programs.insert(link.program);
        }
        let query = ProgInfoQueryOptions::default().include_map_ids(true);
        for program in ProgInfoIter::with_query_opts(query) {
            if objects.programs.contains(&program.id) {
                objects.maps.extend(program.map_ids);
            }
        }
        objects
    }

    pub fn links(&self) -> usize {
        self.links.len()
    }

    /// Three links: both directions and the sockets.
    pub fn is_whole(&self) -> bool {
        self.links.len() == 3 && !self.maps.is_empty()
    }

    pub fn shares_with(&self, other: &Objects) -> bool {
        self.programs == other.programs
    }

    /// Waits until no link is left: programs and maps may be others', too.
    pub fn wait_until_off(&self) {
        wait_for("the end of links", || {
            (!links::all().any(|link| self.links.contains(&link.id))).then_some(())
        });
    }

    /// Waits until none is left: the kernel frees them a little after the last user has gone.
    pub fn wait_until_gone(&self) {
        wait_for("the end of links, programs and maps", || {
            let maps = tidegate_sys::libbpf_rs::query::MapInfoIter::default();
            let left = links::all().any(|link| self.links.contains(&link.id))
                || ProgInfoIter::default().any(|program| self.programs.contains(&program.id))
                || maps.into_iter().any(|map| self.maps.contains(&map.id));
            (!left).then_some(())
        });
    }
}

pub fn on_cgroup(cgroup: &Cgroup) -> impl Iterator<Item = Link> {
    let cgroup = cgroup.id();
    links::all().filter(move |link| matches!(link.on, On::Cgroup { id, .. } if id == cgroup))
}

pub fn entries(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
