//! `tidegate daemon`: three hosts in namespaces of their own, joined by a bridge, with real limits and
//! traffic; and all that a daemon refuses or outlives.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;
use tidegate_instruments::plumbing::{add_bridge, set_master};
use tidegate_sys::net::{NetNs, VethPair};

use crate::{
    common::{Guard, PATIENCE, Place, port, refused, signal, skip, wait_within},
    need_root, traffic,
};

mod names;
mod unit;

const KEYS: &str = "1 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n";
/// What each host has in any case: 10 % of 3 Mbit/s for four hosts.
const ALONE: u64 = 75_000;
const LIMIT: u64 = 3_000_000;
/// A lease is so many intervals, and as long as `tidegate` takes to start so many times; that is measured
/// with a few.
const INTERVALS: u32 = 15;
const LEASE_STARTS: u32 = 60;
const STARTS: u32 = 3;
const LEASE_LEAST: Duration = Duration::from_millis(1500);
const LEASE_MOST: Duration = Duration::from_secs(60);

/// A host: a namespace (or that of the tests), a store, a cgroup with a limit, and files.
struct Host {
    place: Place,
    netns: Option<NetNs>,
    name: String,
    file: PathBuf,
}

struct Daemon {
    process: Guard,
    said: PathBuf,
}

impl Daemon {
    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    fn wait_to_say(&self, text: &str) {
        wait_for(&format!("{text} in: {}", self.said()), || {
            self.said().contains(text).then_some(())
        });
    }
}

impl Drop for Daemon {
    /// A test that fails shows what its daemons reported.
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- {}\n{}", self.said.display(), self.said());
        }
    }
}

/// The lease of a group, and how long a host may be silent. A lease lasts as long as its daemon gets the CPU
/// time to renew it: on a machine that is emulated, or busy with other things, three daemons cannot keep one
/// of 1.5 s, and share nothing. So it is as long as the machine needs to start some tens of processes now.
fn lease() -> Duration {
    static LEASE: OnceLock<Duration> = OnceLock::new();
    *LEASE.get_or_init(|| {
        let place = Place::new();
        let start = Instant::now();
        (0..STARTS).for_each(|_| drop(place.ok(&["status", "--json"])));
        (start.elapsed() * LEASE_STARTS / STARTS).clamp(LEASE_LEAST, LEASE_MOST)
    })
}

fn wait_for<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    // A few things come only when leases have ended.
    wait_within(PATIENCE + 5 * lease(), what, look)
}

fn spec(host: &str, cgroup: &str, fleet: &str) -> String {
    let (interval, lease) = ((lease() / INTERVALS).as_millis(), lease().as_millis());
    format!(
        r#"
[fleet]
name = "test"
node = "{host}"
keys = "DIR/keys"
state = "DIR/state"
api = "DIR/api"
{fleet}

[[limit]]
name = "work"
scope = {{ cgroup = "{cgroup}" }}
egress = "100mbit"

[[group]]
name = "uplink"
rate = "3mbit"
algorithm = "share"
members = ["work"]
hosts = 4
interval = "{interval}ms"
lease = "{lease}ms"
suspect = "{lease}ms"
"#
    )
}

impl Host {
    fn new(name: &str, netns: Option<NetNs>, fleet: &str) -> Host {
        let place = Place::new();
        let keys = place.file("keys", KEYS);
        fs::set_permissions(&keys, fs::Permissions::from_mode(0o600)).unwrap();
        let dir = keys.parent().unwrap().display().to_string();
        let text = spec(name, place.group.path(), fleet).replace("DIR", &dir);
        let file = place.file("fleet.toml", &text);
        Host { place, netns, name: name.to_owned(), file }
    }

    fn file(&self) -> &str {
        self.file.to_str().unwrap()
    }

    fn dir(&self) -> PathBuf {
        self.file.parent().unwrap().to_owned()
    }

    fn change(&self, from: &str, to: &str) {
        let text = fs::read_to_string(&self.file).unwrap();
        assert!(text.contains(from), "{from}");
        fs::write(&self.file, text.replace(from, to)).unwrap();
    }

    /// The binary, in the host's namespace.
    fn command(&self, args: &[&str]) -> Command {
        let binary = env!("CARGO_BIN_EXE_tidegate");
        let mut command = match &self.netns {
            None => Command::new(binary),
            Some(netns) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net=/run/netns/{}", netns.name())).arg(binary);
                command
            }
        };
        command.args(args).env("TIDEGATE_BPFFS", self.place.store());
        command.env("TIDEGATE_SOCKET", self.dir().join("api")).stdin(Stdio::null());
        command
    }

    fn apply(&self) -> String {
        let output = self.command(&["apply", self.file()]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn start(&self) -> Daemon {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let said = self.dir().join(format!("said-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        let mut command = self.command(&["daemon", self.file()]);
        command.stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap());
        let daemon = Daemon { process: Guard(command.spawn().unwrap()), said };
        daemon.wait_to_say(&format!("node `{}` runs", self.name));
        daemon
    }

    fn status(&self) -> Value {
        let output = self.command(&["status", "--json"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn state(&self) -> String {
        self.status()["fleet"]["groups"][0]["state"].as_str().unwrap_or_default().to_owned()
    }

    /// What the pinned limit has.
    fn rate(&self) -> u64 {
        self.status()["limits"][0]["egress"]["rate_bit_s"].as_u64().unwrap()
    }
}

/// Three hosts on a bridge.
struct Bed {
    hub: NetNs,
    hosts: Vec<Host>,
}

impl Bed {
    fn new() -> Bed {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = |side: &str| format!("tidegate-fl-{}-{number}-{side}", std::process::id());
        let hub = NetNs::create(&name("hub")).unwrap();
        let mut netlink = hub.netlink().unwrap();
        add_bridge(&mut netlink, "br0").unwrap();
        let bridge = netlink.index_of("br0").unwrap();
        netlink.set_up(bridge, true).unwrap();
        let hosts = (0..3).map(|i| {
            let netns = NetNs::create(&name(&format!("h{i}"))).unwrap();
            let port = format!("h{i}");
            let pair = VethPair { name: &port, peer: "eth0", peer_netns: Some(&netns) };
            netlink.add_veth(&pair).unwrap();
            let index = netlink.index_of(&port).unwrap();
            set_master(&mut netlink, index, bridge).unwrap();
            netlink.set_up(index, true).unwrap();
            let mut inside = netns.netlink().unwrap();
            let index = inside.index_of("eth0").unwrap();
            inside.add_address(index, format!("10.97.0.{}", i + 1).parse().unwrap(), 24).unwrap();
            inside.set_up(index, true).unwrap();
            let fleet = "acceptors = [\"h0\", \"h1\", \"h2\"]\n\
                         peers = [\"10.97.0.1\", \"10.97.0.2\", \"10.97.0.3\"]";
            Host::new(&port, Some(netns), fleet)
        });
        let hosts = hosts.collect();
        Bed { hub, hosts }
    }

    /// Cuts a host off, or joins it again.
    fn plug(&self, i: usize, up: bool) {
        let mut netlink = self.hub.netlink().unwrap();
        let index = netlink.index_of(&format!("h{i}")).unwrap();
        netlink.set_up(index, up).unwrap();
    }

    /// What the hosts may send together, at least: one after the other is looked at, and what one gives to
    /// another meanwhile must not be counted twice.
    fn sum(&self) -> u64 {
        let look = || self.hosts.iter().map(Host::rate).collect::<Vec<_>>();
        let (first, second) = (look(), look());
        first.iter().zip(second).map(|(first, second)| second.min(*first)).sum()
    }

    fn wait_for_all(&self, state: &str) {
        for host in &self.hosts {
            wait_for(&format!("{} {state}", host.name), || (host.state() == state).then_some(()));
        }
    }
}

/// Reads whatever comes, until the sender ends.
fn sink(netns: &NetNs, address: &str) -> thread::JoinHandle<()> {
    let listener = netns.run(|| TcpListener::bind(address).unwrap()).unwrap();
    thread::spawn(move || {
        let mut stream = traffic::accept(&listener);
        while stream.read(&mut [0; 65536]).is_ok_and(|n| n > 0) {}
    })
}

#[test]
fn root_daemons_share_a_limit_and_outlive_what_happens() {
    need_root!();
    let bed = Bed::new();
    let [h0, h1, h2] = &bed.hosts[..] else { unreachable!() };
    for host in &bed.hosts {
        let said = host.apply();
        assert!(said.contains("no daemon has it"), "{said}");
        assert_eq!(host.rate(), ALONE, "until there is one, what is its own");
    }
    let mut daemons: Vec<_> = bed.hosts.iter().map(Host::start).collect();
    bed.wait_for_all("sharing");
    wait_for("all of the limit in use", || (bed.sum() > LIMIT * 95 / 100).then_some(()));
    assert!(bed.sum() <= LIMIT);
    wait_for("that a share is no change", || {
        let said = h0.apply();
        assert!(said.contains("Nothing to do"), "{said}");
        said.contains("group `uplink` (work): in force, node `h0`").then_some(())
    });

    // One host has traffic: it has nearly all.
    let drain = sink(h0.netns.as_ref().unwrap(), "10.97.0.1:5401");
    let mut sender = h1.place.inside(&h1.place.group, "nsenter");
    sender.arg(format!("--net=/run/netns/{}", h1.netns.as_ref().unwrap().name()));
    traffic::sender(&mut sender, "stream 10.97.0.1:5401 20000");
    let sender = Guard(sender.spawn().unwrap());
    wait_for("most of the limit where the traffic is", || {
        assert!(h1.rate() <= LIMIT);
        (h1.rate() > LIMIT * 8 / 10).then_some(())
    });
    wait_for("both peers up", || {
        let table = h1.command(&["status"]).output().unwrap();
        let table = String::from_utf8(table.stdout).unwrap();
        assert!(table.contains("uplink  share"), "{table}");
        table.contains("Node `h1` of fleet `test`: 2 of 2 peers up").then_some(())
    });
    wait_for("what others told", || {
        let members = h1.status()["fleet"]["groups"][0]["members"].as_array().map(Vec::len);
        (members == Some(2)).then_some(())
    });
    drop(sender);
    drain.join().unwrap();

    // One is cut off: it falls to its own part and says so, others take what it had.
    bed.plug(2, false);
    daemons[2].wait_to_say("group `uplink` hears nobody and falls back");
    wait_for("its own part", || (h2.rate() == ALONE).then_some(()));
    let alerts = h2.status()["fleet"]["alerts"].to_string();
    assert!(alerts.contains("hears nobody"), "{alerts}");
    wait_for("what it had at the others", || {
        (h0.rate() + h1.rate() > LIMIT * 9 / 10).then_some(())
    });
    bed.plug(2, true);
    bed.wait_for_all("sharing");

    // One is killed: what it was lent ends by itself, and its own part holds; then it starts again.
    wait_for("more than its own part", || (h2.rate() > 2 * ALONE).then_some(()));
    signal(daemons[2].process.0.id(), Signal::KILL);
    daemons[2].process.exit_code();
    wait_for("that the others miss it", || {
        let peers = h0.status()["fleet"]["peers"].clone();
        let down = |peer: &Value| peer["node"] == "h2" && peer["up"] == false;
        peers.as_array().unwrap().iter().any(down).then_some(())
    });
    wait_for("the end of what it was lent", || (h2.rate() == ALONE).then_some(()));
    assert!(h2.status().get("fleet").is_none());
    let stood = h2.command(&["daemon", h2.file(), "--stand-down"]).output().unwrap();
    assert!(stood.status.success(), "{}", String::from_utf8_lossy(&stood.stderr));
    assert_eq!(h2.rate(), ALONE);
    daemons[2] = h2.start();
    bed.wait_for_all("sharing");
    wait_for("its part again", || (h2.rate() > 2 * ALONE).then_some(()));

    // One ends: it gives back, and keeps its own part.
    signal(daemons[0].process.0.id(), Signal::TERM);
    assert_eq!(daemons[0].process.exit_code(), 0, "{}", daemons[0].said());
    assert_eq!(h0.rate(), ALONE);
    assert!(!h0.dir().join("api").exists());
    wait_for("what it had at the others", || {
        (h1.rate() + h2.rate() > LIMIT * 9 / 10).then_some(())
    });
    assert!(bed.sum() <= LIMIT);
}

/// The idle limit was told a rate that its gate refuses, and the daemon then said nothing any more.
#[test]
fn root_a_host_with_a_busy_and_an_idle_limit_has_its_part() {
    need_root!();
    let bed = Bed::new();
    let [h0, h1, _] = &bed.hosts[..] else { unreachable!() };
    let idle = h1.place.child("idle");
    h1.change("members = [\"work\"]", "members = [\"work\", \"idle\"]");
    let scope = format!("scope = {{ cgroup = \"{}\" }}", idle.path());
    let limit = format!("[[limit]]\nname = \"idle\"\n{scope}\negress = \"100mbit\"\n\n[[group]]");
    h1.change("[[group]]", &limit);
    bed.hosts.iter().for_each(|host| drop(host.apply()));
    let daemons: Vec<_> = bed.hosts.iter().map(Host::start).collect();
    bed.wait_for_all("sharing");
    let drain = sink(h0.netns.as_ref().unwrap(), "10.97.0.1:5402");
    let mut sender = h1.place.inside(&h1.place.group, "nsenter");
    sender.arg(format!("--net=/run/netns/{}", h1.netns.as_ref().unwrap().name()));
    traffic::sender(&mut sender, "stream 10.97.0.1:5402 20000");
    let sender = Guard(sender.spawn().unwrap());
    let rate = |limit: &str| {
        let status = h1.status();
        let limits = status["limits"].as_array().unwrap();
        let is = limits.iter().find(|is| is["name"] == limit).unwrap();
        is["egress"]["rate_bit_s"].as_u64().unwrap()
    };
    wait_for("most of the limit where the traffic is", || {
        (rate("work") > LIMIT * 8 / 10).then_some(())
    });
    assert!(rate("idle") >= 8_000 && rate("idle") < LIMIT / 10, "{}", rate("idle"));
    assert!(!daemons[1].said().contains("limit `idle`"), "{}", daemons[1].said());
    drop(sender);
    drain.join().unwrap();
}

#[test]
fn root_a_daemon_reads_its_file_again() {
    need_root!();
    let bed = Bed::new();
    let [h0, ..] = &bed.hosts[..] else { unreachable!() };
    h0.apply();
    let mut daemon = h0.start();
    // The others are away: two of three acceptors are missing.
    daemon.wait_to_say("hears nobody");
    h0.change("rate = \"3mbit\"", "rate = \"6mbit\"");
    h0.change("egress = \"100mbit\"", "egress = \"90mbit\"");
    let plan = h0.command(&["plan", h0.file()]).output().unwrap();
    let said = String::from_utf8(plan.stdout).unwrap();
    assert_eq!(plan.status.code(), Some(3), "{said}");
    let change = "~ group `uplink`: rate 3mbit -> 6mbit, egress of work 100mbit -> 90mbit\n";
    assert!(said.contains(change) && said.contains("1 to change"), "{said}");
    signal(daemon.process.0.id(), Signal::HUP);
    daemon.wait_to_say("the spec was read again: group `uplink` begins");
    wait_for("twice its own part", || (h0.rate() == 2 * ALONE).then_some(()));
    h0.change("rate = \"6mbit\"", "rate = \"6mbps\"");
    signal(daemon.process.0.id(), Signal::HUP);
    daemon.wait_to_say("the old one stays in force");
    h0.change("rate = \"6mbps\"", "rate = \"3mbit\"");
    h0.change("members =", "reserve = \"10%\"\nmembers =");
    let said = h0.apply();
    assert!(said.contains("~ group `uplink`: rate 6mbit -> 3mbit\n"), "{said}");
    assert!(said.contains("group `uplink` (work): in force"), "{said}");
    wait_for("as it was, by apply", || (h0.rate() == ALONE).then_some(()));
    let set = h0.command(&["limit", "set", "work", "--egress", "9mbit"]).output().unwrap();
    let said = String::from_utf8(set.stdout).unwrap();
    assert!(said.contains("the daemon decides this rate for group `uplink`"), "{said}");
    wait_for("as it was, by the daemon", || (h0.rate() == ALONE).then_some(()));
    h0.change("node = \"h0\"", "node = \"h9\"");
    signal(daemon.process.0.id(), Signal::HUP);
    daemon.wait_to_say("[fleet] node is another: restart the daemon for that");
    let (code, why) = refused(&mut h0.command(&["apply", h0.file()]));
    let is_said = why.contains("the daemon refused ") && why.contains("[fleet] node is another");
    assert!(code == 2 && is_said, "{code} {why}");

    // What the daemon says is in the metrics of `tidegate web`.
    let share = ALONE as f64 / 8.0;
    let alone = format!("tidegate_group_share_bytes_per_second{{group=\"uplink\"}} {share:.1}");
    let state = "tidegate_group_state{group=\"uplink\",state=\"alone\"} 1";
    let run_dir = h0.dir().join("run");
    let web = h0.command(&["--run-dir", run_dir.to_str().unwrap(), "web"]).spawn().unwrap();
    let _web = Guard(web);
    wait_for("metrics that say so", || {
        let mut stream = UnixStream::connect(run_dir.join("web.sock")).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        (text.contains(&alone) && text.contains(state)).then_some(())
    });

    // A second one on the same socket or port is refused, and the first goes on.
    let (code, why) = refused(&mut h0.command(&["daemon", h0.file()]));
    assert_eq!(code, 2);
    assert!(why.contains("[fleet] listen 0.0.0.0:7946"), "{why}");
    assert!(why.contains("another daemon or program has it"), "{why}");
    h0.change("api =", "listen = \"0.0.0.0:7950\"\napi =");
    let (code, why) = refused(&mut h0.command(&["daemon", h0.file()]));
    assert_eq!(code, 2);
    assert!(why.contains("another tidegate daemon runs there"), "{why}");
    assert!(daemon.process.0.try_wait().unwrap().is_none());
}

#[test]
fn root_a_daemon_that_cannot_start_says_why_and_touches_nothing() {
    need_root!();
    let host = Host::new("h0", None, "acceptors = [\"h0\"]\npeers = [\"127.0.0.1\"]");
    host.apply();
    let refuse = || refused(&mut host.command(&["daemon", host.file()]));
    let keys = host.dir().join("keys");
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o644)).unwrap();
    let (code, why) = refuse();
    assert!(code == 1 && why.contains("others may read or change it (mode 644"), "{code} {why}");
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&keys, "1 abc").unwrap();
    let (code, why) = refuse();
    assert!(code == 1 && why.contains("keys:1: its key is none"), "{code} {why}");
    fs::write(&keys, KEYS).unwrap();
    host.change("api = \"", "api = \"/proc/no-such-place");
    let (code, why) = refuse();
    assert!(code == 2 && why.contains("[fleet] api: "), "{code} {why}");
    host.change("api = \"/proc/no-such-place", "api = \"");
    fs::write(host.dir().join("api"), "a file").unwrap();
    let (code, why) = refuse();
    assert!(code == 2 && why.contains("is no socket"), "{code} {why}");
    fs::remove_file(host.dir().join("api")).unwrap();
    host.change("[fleet]", "[fleet]\nadvertise = \"127.0.0.1:1\"");
    fs::create_dir_all(host.dir().join("state/fleet")).unwrap();
    fs::write(host.dir().join("state/fleet/group-uplink.json"), "{").unwrap();
    host.change("peers = [\"127.0.0.1\"]", "peers = [\"127.0.0.1\"]\nlisten = \"127.0.0.1:0\"");
    let (code, why) = refuse();
    assert!(why.contains("is not a state file of tidegate"), "{code} {why}");
    assert_eq!(host.rate(), ALONE);
}

/// With the privileges of its unit and no more.
#[test]
fn root_a_daemon_needs_one_capability() {
    need_root!();
    let udp = port();
    let fleet = format!("acceptors = [\"h0\"]\nlisten = \"127.0.0.1:{udp}\"");
    let host = Host::new("h0", None, &fleet);
    host.apply();
    let said = host.dir().join("said");
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-all,+bpf", "--inh-caps=-all", "--no-new-privs"]);
    command.arg(env!("CARGO_BIN_EXE_tidegate")).args(["daemon", host.file()]);
    command.env("TIDEGATE_BPFFS", host.place.store()).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap());
    let Ok(process) = command.spawn() else { return skip("no setpriv") };
    let mut daemon = Daemon { process: Guard(process), said };
    daemon.wait_to_say("group `uplink` shares");
    wait_for("all but what others have in any case", || {
        (host.rate() == LIMIT - 3 * ALONE).then_some(())
    });
    signal(daemon.process.0.id(), Signal::TERM);
    assert_eq!(daemon.process.exit_code(), 0, "{}", daemon.said());
    assert_eq!(host.rate(), ALONE);
}

/// One that was killed is missed, as an agent is; one that was ended has taken leave.
#[test]
fn root_a_daemon_that_has_died_is_missed() {
    need_root!();
    let udp = port();
    let fleet = format!("acceptors = [\"h0\"]\nlisten = \"127.0.0.1:{udp}\"");
    let host = Host::new("h0", None, &fleet);
    host.apply();
    let check = || {
        let output = host.command(&["status", "--check"]).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(check().0, 0, "none has run");
    let mut daemon = host.start();
    daemon.wait_to_say("group `uplink` shares");
    assert_eq!(check().0, 0);
    signal(daemon.process.0.id(), Signal::KILL);
    daemon.process.exit_code();
    let (code, said) = check();
    let died = "the daemon of the fleet has died. Without it limits of its groups";
    assert!(code == 3 && said.contains(died) && said.contains(": `work`"), "{code} {said}");
    let doctor = host.command(&["doctor", "--json"]).output().unwrap();
    let doctor: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    assert!(doctor["findings"].to_string().contains(died), "{doctor}");
    wait_for("the end of its lease", || (host.rate() == ALONE).then_some(()));
    assert!(check().1.contains(": `work`"));
    let mut daemon = host.start();
    assert_eq!(check().0, 0);
    signal(daemon.process.0.id(), Signal::TERM);
    assert_eq!(daemon.process.exit_code(), 0, "{}", daemon.said());
    assert_eq!(check().0, 0, "it was ended");
}

/// Two daemons on loopback that know each other by a registry alone, which comes after them.
fn found_in_a_registry(
    test: &str,
    program: &str,
    line: &str,
    args: &dyn Fn(u16, &str) -> Vec<String>,
) {
    let registry_port = port();
    let hosts: Vec<_> = (0..2)
        .map(|i| {
            let udp = port();
            let fleet = format!(
                "acceptors = [\"h0\"]\nlisten = \"127.0.0.1:{udp}\"\n{}",
                line.replace("PORT", &registry_port.to_string())
            );
            Host::new(&format!("h{i}"), None, &fleet)
        })
        .collect();
    hosts.iter().for_each(|host| drop(host.apply()));
    let mut daemons: Vec<_> = hosts.iter().map(Host::start).collect();
    for daemon in &daemons {
        daemon.wait_to_say("cannot be reached");
        daemon.wait_to_say("known nodes stay known");
    }
    // The one acceptor goes on by itself, the other has its own part.
    wait_for("an acceptor alone", || (hosts[0].state() == "sharing").then_some(()));
    assert_eq!(hosts[1].rate(), ALONE);
    let dir = hosts[0].dir().join("registry");
    fs::create_dir(&dir).unwrap();
    let mut command = Command::new(program);
    command.args(args(registry_port, dir.to_str().unwrap()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(registry) = command.spawn() else { return skip(&format!("{test}: no {program}")) };
    let registry = Guard(registry);
    daemons[1].wait_to_say("can be asked again");
    wait_for("both share", || (hosts[1].state() == "sharing").then_some(()));
    // It goes again: said, and nothing else happens.
    drop(registry);
    wait_for("that it is away", || {
        let alerts = hosts[1].status()["fleet"]["alerts"].to_string();
        alerts.contains("known nodes stay known").then_some(())
    });
    // A lease ends while a machine stands still, and comes back.
    wait_for("sharing all the same", || (hosts[1].state() == "sharing").then_some(()));
    for daemon in &mut daemons {
        signal(daemon.process.0.id(), Signal::TERM);
        assert_eq!(daemon.process.exit_code(), 0, "{}", daemon.said());
    }
}

#[test]
fn root_daemons_find_each_other_in_a_redis_that_comes_late() {
    need_root!();
    let args = |client: u16, dir: &str| {
        ["--port", &client.to_string(), "--save", "", "--dir", dir].map(str::to_owned).to_vec()
    };
    let line = "redis = \"redis://127.0.0.1:PORT\"";
    found_in_a_registry("redis", "redis-server", line, &args);
}

#[test]
fn root_daemons_find_each_other_in_an_etcd_that_comes_late() {
    need_root!();
    let args = |client: u16, dir: &str| {
        let peers = port();
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        vec![
            format!("--data-dir={dir}"),
            format!("--listen-client-urls={}", url(client)),
            format!("--advertise-client-urls={}", url(client)),
            format!("--listen-peer-urls={}", url(peers)),
            format!("--initial-advertise-peer-urls={}", url(peers)),
            format!("--initial-cluster=default={}", url(peers)),
        ]
    };
    found_in_a_registry("etcd", "etcd", "etcd = \"http://127.0.0.1:PORT\"", &args);
}
