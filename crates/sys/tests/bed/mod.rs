//! What the privileged tests stand on: two network namespaces joined by a veth pair, cgroups, processes in
//! them. Everything has a name of its own and goes when dropped.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Time enough for anything that is waited for.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Addresses of the two ends.
pub const CLIENT: &str = "10.77.0.1";
pub const SERVER: &str = "10.77.0.2";

/// Whether the test may run; says so when not.
pub fn root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

/// `tg_dctcp` exists once on a host: tests that look whether it does take turns.
pub fn take_turn() -> File {
    let path = std::env::temp_dir().join("tidegate-test-tg_dctcp.lock");
    let file = File::create(path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    file
}

/// A name that no other test of this or another process has.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("tg{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn ip(args: &str) {
    let status = Command::new("ip").args(args.split(' ')).status().unwrap();
    assert!(status.success(), "ip {args}");
}

/// Waits until `probe` gives something.
pub fn wait_for<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(begun.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Two namespaces, `client` and `server`.
pub struct Net {
    pub client: String,
    pub server: String,
}

impl Net {
    pub fn new() -> Net {
        let name = unique();
        let net = Net { client: format!("{name}c"), server: format!("{name}s") };
        ip(&format!("netns add {}", net.client));
        ip(&format!("netns add {}", net.server));
        ip(&format!("link add v0 netns {} type veth peer v0 netns {}", net.client, net.server));
        for (ns, address) in [(&net.client, CLIENT), (&net.server, SERVER)] {
            ip(&format!("-n {ns} addr add {address}/24 dev v0"));
            ip(&format!("-n {ns} link set lo up"));
            ip(&format!("-n {ns} link set v0 up"));
        }
        net
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for ns in [&self.client, &self.server] {
            let _ = Command::new("ip").args(["netns", "del", ns]).status();
        }
    }
}

/// A cgroup; what is in it must have ended when it is dropped.
pub struct Cgroup(PathBuf);

impl Cgroup {
    pub fn new() -> Cgroup {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mount = mounts.lines().find(|l| l.split(' ').nth(2) == Some("cgroup2"));
        let mount = mount.and_then(|l| l.split(' ').nth(1)).expect("cgroup v2 is mounted");
        let path = PathBuf::from(format!("{mount}/{}", unique()));
        fs::create_dir(&path).unwrap();
        Cgroup(path)
    }

    pub fn open(&self) -> OwnedFd {
        File::open(&self.0).unwrap().into()
    }

    /// Starts a command in this cgroup and the namespace.
    pub fn spawn(&self, ns: &str, command: &str) -> Process {
        let enter = "echo $$ > \"$0/cgroup.procs\" && exec ip netns exec \"$@\"";
        let child = Command::new("sh")
            .args(["-c", enter])
            .arg(&self.0)
            .arg(ns)
            .args(command.split(' '))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        Process(child.unwrap())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let begun = Instant::now();
        while fs::remove_dir(&self.0).is_err() && begun.elapsed() < DEADLINE {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A process, killed when dropped.
pub struct Process(Child);

impl Process {
    /// Waits for its end; its output.
    pub fn output(mut self) -> String {
        use std::io::Read;
        let mut text = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        self.0.wait().unwrap();
        text
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `iperf3 -s` that listens.
pub fn iperf3_server(net: &Net, cgroup: &Cgroup) -> Process {
    let server = cgroup.spawn(&net.server, "iperf3 -s");
    wait_for("iperf3 listens", || {
        let text = ss(&net.server, "-tlnH");
        text.contains(":5201").then_some(())
    });
    server
}

/// What `ss` prints in the namespace.
pub fn ss(ns: &str, args: &str) -> String {
    let output =
        Command::new("ip").args(["netns", "exec", ns, "ss"]).args(args.split(' ')).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

/// The TCP_INFO words of each connection that has carried data, as `ss -i` prints them.
pub fn connections(ns: &str) -> Vec<Vec<String>> {
    let text = ss(ns, "-tinoOH state established");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    text.lines().map(words).collect()
}
