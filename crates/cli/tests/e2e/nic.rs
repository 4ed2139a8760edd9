//! `tidegate nic` between a TAP device and a veth: limits, ports that go and come back, what is left.
//!
//! A shaped transfer must take as long as the limit says; taking longer on a busy machine is no failure.

use std::{
    fs,
    io::{Read, Write},
    net::{IpAddr, Shutdown, TcpListener, TcpStream},
    path::PathBuf,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tidegate_instruments::plumbing::set_tx_offload;
use tidegate_sys::net::{NetNs, VethPair};

use crate::{
    common::{Guard, PATIENCE, refused, signal, wait_for},
    edt::bound,
    need_root,
};

const GUEST: &str = "10.95.0.1";
const PEER: &str = "10.95.0.2";
const PORT: u16 = 5400;
const TRANSFER_BYTES: usize = 3_000_000;
const SPEC: &str = r#"
[[nic]]
name  = "guest"
ports = ["tap:eth0@GUEST", "xdp:wire@HOST"]

[[limit]]
name    = "guest"
scope   = { port = "eth0@GUEST" }
egress  = "40mbit"
ingress = "20mbit"
scheme  = "carousel"
"#;

/// A guest behind a TAP device that the NIC makes, and a peer at the other end of a cable to the host.
struct Bed {
    guest: NetNs,
    host: NetNs,
    peer: NetNs,
    dir: TempDir,
}

/// A `tidegate nic`, and where it writes.
struct Nic {
    process: Guard,
    said: PathBuf,
}

impl Nic {
    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    fn wait_to_say(&self, text: &str) {
        wait_for(text, || self.said().contains(text).then_some(()));
    }

    fn pid(&self) -> u32 {
        self.process.0.id()
    }

    fn send(&self, what: Signal) {
        signal(self.pid(), what);
    }
}

impl Bed {
    fn new() -> Bed {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let netns = |side| {
            let name = format!("tidegate-nic-{}-{number}-{side}", std::process::id());
            NetNs::create(&name).unwrap()
        };
        let dir = tempfile::tempdir().unwrap();
        let bed = Bed { guest: netns("g"), host: netns("h"), peer: netns("p"), dir };
        bed.lay_wire();
        bed
    }

    /// The cable between host and peer.
    fn lay_wire(&self) {
        let pair = VethPair { name: "eth0", peer: "wire", peer_netns: Some(&self.host) };
        self.peer.netlink().unwrap().add_veth(&pair).unwrap();
        // AF_XDP cannot see that a checksum is unfinished.
        set_tx_offload(&self.peer, "eth0", false).unwrap();
        let mut netlink = self.host.netlink().unwrap();
        let index = netlink.index_of("wire").unwrap();
        netlink.set_up(index, true).unwrap();
        configure(&self.peer, PEER);
    }

    fn delete(&self, netns: &NetNs, device: &str) {
        let mut netlink = netns.netlink().unwrap();
        let index = netlink.index_of(device).unwrap();
        netlink.delete_link(index).unwrap();
    }

    fn has(&self, netns: &NetNs, device: &str) -> bool {
        netns.netlink().unwrap().index_of(device).is_ok()
    }

    /// The spec file with a replacement.
    fn spec(&self, from: &str, to: &str) -> PathBuf {
        assert!(SPEC.contains(from), "{from}");
        let text = SPEC.replace(from, to);
        let text = text.replace("GUEST", self.guest.name()).replace("HOST", self.host.name());
        let path = self.dir.path().join("nic.toml");
        fs::write(&path, text).unwrap();
        path
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn tidegate(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("--run-dir").arg(self.run_dir()).stdin(Stdio::null());
        // No limits but those of the NIC.
        command.env("TIDEGATE_BPFFS", "/sys/fs/bpf/tidegate-test-none");
        command
    }

    /// Starts it by the spec file, and gives the guest its address.
    fn start(&self, flags: &[&str]) -> Nic {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let said = self.dir.path().join(format!("said-{number}"));
        let mut command = self.tidegate();
        command.arg("nic").arg("--spec").arg(self.spec("", "")).args(flags);
        command.stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap());
        let nic = Nic { process: Guard(command.spawn().unwrap()), said };
        nic.wait_to_say(" runs: ");
        configure(&self.guest, GUEST);
        nic
    }

    fn ok(&self, args: &[&str]) -> String {
        let output = self.tidegate().args(args).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The state that the NIC has written last.
    fn status(&self) -> Value {
        let status: Value = serde_json::from_str(&self.ok(&["status", "--json"])).unwrap();
        status["nics"][0].clone()
    }

    /// A counter of the way from the guest (0), or to it (1).
    fn count(&self, direction: usize, name: &str) -> u64 {
        self.status()["directions"][direction][name].as_u64().unwrap()
    }
}

/// Gives `eth0` of a namespace its address.
fn configure(netns: &NetNs, address: &str) {
    let mut netlink = netns.netlink().unwrap();
    let index = netlink.index_of("eth0").unwrap();
    let address: IpAddr = address.parse().unwrap();
    let added = netlink.add_address(index, address, 24);
    assert!(added.as_ref().err().is_none_or(|e| e.is_exists()), "{added:?}");
    netlink.set_up(index, true).unwrap();
}

/// How long `TRANSFER_BYTES` take from one namespace to the other, the connection not counted.
fn transfer(from: &NetNs, to: &NetNs, address: &str) -> Duration {
    let listener = to.run(|| bound(|| TcpListener::bind((address, PORT)))).unwrap();
    let at = listener.local_addr().unwrap();
    // A device that was just made may not carry the first attempts.
    let mut stream = wait_for("a connection", || {
        let second = Duration::from_secs(1);
        from.run(|| TcpStream::connect_timeout(&at, second).ok()).unwrap()
    });
    let (mut sink, _) = listener.accept().unwrap();
    for end in [&stream, &sink] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        end.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    let started = Instant::now();
    let writer = thread::spawn(move || {
        stream.write_all(&vec![7; TRANSFER_BYTES]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
    });
    let mut got = Vec::new();
    sink.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), TRANSFER_BYTES);
    writer.join().unwrap();
    started.elapsed()
}

/// The time that the limit asks for, less its burst of 1 ms and a per cent for the clocks.
fn at_least(bit_s: f64) -> Duration {
    Duration::from_secs_f64(TRANSFER_BYTES as f64 * 8.0 / bit_s * 0.99 - 1e-3)
}

#[test]
fn root_nic_shapes_each_direction_at_its_rate() {
    need_root!();
    let bed = Bed::new();
    let mut nic = bed.start(&[]);
    let up = transfer(&bed.guest, &bed.peer, PEER);
    assert!(up >= at_least(40e6), "{up:?}");
    let down = transfer(&bed.peer, &bed.guest, GUEST);
    assert!(down >= at_least(20e6), "{down:?}");
    for direction in 0..2 {
        wait_for("the count of what passed", || {
            (bed.count(direction, "passed_bytes") > TRANSFER_BYTES as u64).then_some(())
        });
        assert!(bed.count(direction, "shaped_packets") > 1000);
    }
    let status = bed.status();
    assert_eq!(status["pid"], nic.pid());
    assert_eq!(status["directions"][0]["rate_bit_s"], 40_000_000);
    assert_eq!(status["limits"][0]["ingress"]["rate_bit_s"], 20_000_000);
    let frames = |port: usize, name: &str| status["ports"][port][name].as_u64().unwrap();
    assert!(frames(0, "rx_frames") > 0 && frames(1, "tx_frames") > 1000, "{status}");
    let table = bed.ok(&["status"]);
    assert!(table.contains(&format!("in force, nic {}", nic.pid())), "{table}");
    assert!(table.contains("40mbit") && table.contains("20mbit"), "{table}");
    nic.send(Signal::TERM);
    assert_eq!(nic.process.exit_code(), 0);
    assert!(!bed.has(&bed.guest, "eth0") && bed.has(&bed.host, "wire"));
    assert!(!bed.run_dir().exists());
    assert!(bed.ok(&["status"]).starts_with("No limits"));
}

#[test]
fn root_nic_goes_on_when_a_port_comes_back() {
    need_root!();
    let bed = Bed::new();
    let nic = bed.start(&[]);
    let port = |index: usize| bed.status()["ports"][index]["port"].as_str().unwrap().to_owned();
    let ports = [port(0), port(1)];
    transfer(&bed.guest, &bed.peer, PEER);

    bed.delete(&bed.host, "wire");
    nic.wait_to_say(&format!("warning: port {} is gone", ports[1]));
    let table = bed.ok(&["status"]);
    assert!(table.contains(&format!("PORT GONE, nic {}", nic.pid())), "{table}");
    let warning = format!("WARNING: port {} of nic `guest` is gone", ports[1]);
    assert!(table.contains(&warning), "{table}");
    bed.lay_wire();
    nic.wait_to_say(&format!("port {} is back", ports[1]));
    assert!(bed.ok(&["status"]).contains("in force, nic"));
    // From the side that is new: the other one still knows the hardware address that was.
    assert!(transfer(&bed.peer, &bed.guest, GUEST) >= at_least(20e6));

    // The NIC made this one, so it makes it again.
    bed.delete(&bed.guest, "eth0");
    nic.wait_to_say(&format!("port {} is back", ports[0]));
    configure(&bed.guest, GUEST);
    assert!(transfer(&bed.guest, &bed.peer, PEER) >= at_least(40e6));
}

#[test]
fn root_nic_leaves_nothing_when_it_is_killed() {
    need_root!();
    let bed = Bed::new();
    let mut nic = bed.start(&[]);
    transfer(&bed.guest, &bed.peer, PEER);
    let state = bed.run_dir().join("nic-guest.json");
    assert!(state.exists());
    nic.send(Signal::KILL);
    assert_eq!(nic.process.exit_code(), -1);
    wait_for("the end of the TAP device", || (!bed.has(&bed.guest, "eth0")).then_some(()));
    assert!(bed.ok(&["status"]).starts_with("No limits"), "its file counts for nothing");
    let spec = bed.spec("", "");
    let plan = bed.ok(&["plan", spec.to_str().unwrap()]);
    assert!(plan.contains("nic `guest` does not run"), "{plan}");

    // The device takes a program again, and another name's start removes the file.
    let nic = bed.start(&["--name", "guest"]);
    assert!(transfer(&bed.guest, &bed.peer, PEER) >= at_least(40e6));
    drop(nic);
    assert!(state.exists());
    let ports = ["a", "b"].map(|name| format!("tap:{name}@{}", bed.guest.name()));
    let mut other = bed.tidegate();
    other.args(["nic", &ports[0], &ports[1], "--egress", "1mbit"]).stderr(Stdio::null());
    let other = Guard(other.spawn().unwrap());
    wait_for("the other one's file", || bed.run_dir().join("nic-a.json").exists().then_some(()));
    assert!(!state.exists());
    drop(other);
}

#[test]
fn root_nic_reads_its_spec_again() {
    need_root!();
    let bed = Bed::new();
    let nic = bed.start(&[]);
    let plan = |path: PathBuf| bed.ok(&["plan", path.to_str().unwrap()]);
    assert!(plan(bed.spec("", "")).contains("guest: in force, by nic `guest`"));
    assert!(plan(bed.spec("40mbit", "24mbit")).contains(&format!("kill -HUP {}", nic.pid())));
    nic.send(Signal::HUP);
    nic.wait_to_say("the spec was read again: guest egress 40mbit -> 24mbit");
    assert!(transfer(&bed.guest, &bed.peer, PEER) >= at_least(24e6));
    for (from, to, why) in [
        ("\"40mbit\"", "\"40mbits\"", "unknown unit `mbits`; use one of"),
        ("xdp:wire", "xdp:other", "the ports of a nic that runs cannot change; start it anew"),
        ("name  = \"guest\"", "name  = \"other\"", "no nic `guest` in it; it has other"),
    ] {
        bed.spec(from, to);
        nic.send(Signal::HUP);
        nic.wait_to_say(why);
        assert_eq!(bed.status()["directions"][0]["rate_bit_s"], 24_000_000);
    }
    // Without a limit in one direction.
    bed.spec("egress  = \"40mbit\"", "");
    nic.send(Signal::HUP);
    nic.wait_to_say("guest egress 24mbit -> none");
    transfer(&bed.guest, &bed.peer, PEER);
    assert_eq!(bed.status()["directions"][0]["rate_bit_s"], Value::Null);
}

#[test]
fn root_nic_divides_a_limit_among_threads() {
    need_root!();
    let bed = Bed::new();
    let ports = [&bed.guest, &bed.peer].map(|netns| format!("tap:eth1@{}", netns.name()));
    let mut command = bed.tidegate();
    command.args(["nic", &ports[0], &ports[1], "--egress", "40mbit", "--shapers", "2"]);
    command.args(["--name", "two", "--persistent"]).stderr(Stdio::null());
    let mut nic = Guard(command.spawn().unwrap());
    wait_for("the start", || (!bed.status().is_null()).then_some(()));
    for (netns, address) in [(&bed.guest, "10.94.0.1"), (&bed.peer, "10.94.0.2")] {
        let mut netlink = netns.netlink().unwrap();
        let index = netlink.index_of("eth1").unwrap();
        netlink.add_address(index, address.parse().unwrap(), 24).unwrap();
    }
    assert!(transfer(&bed.guest, &bed.peer, "10.94.0.2") >= at_least(40e6));
    signal(nic.0.id(), Signal::TERM);
    assert_eq!(nic.exit_code(), 0);
    assert!(bed.has(&bed.guest, "eth1"), "it was to stay");
}

#[test]
fn root_nic_says_what_cannot_be() {
    need_root!();
    let bed = Bed::new();
    let nic = bed.start(&[]);
    let spec = bed.spec("", "");
    let spec = spec.to_str().unwrap();
    let here = |kind: &str| format!("{kind}@{}", bed.host.name());
    let (tap, wire, absent) = (here("tap:lo"), here("xdp:wire"), here("xdp:absent"));
    let free = here("tap:free");
    for (args, code, why) in [
        (&["nic", "--spec", spec][..], 2, "nic `guest` runs already (process "),
        (&["nic", "--spec", spec, "--name", "x"], 1, "no nic `x` in it; it has guest"),
        (&["nic", &free, "--egress", "1mbit"], 1, "2 values required"),
        (&["nic", &free, &free, "--egress", "1mbit"], 1, "twice; a nic has two different ones"),
        (&["nic", &free, &wire], 1, "--egress: neither egress nor ingress has a rate"),
        (&["nic", "free", &wire, "--egress", "1mbit"], 1, "write `tap:free` or `xdp:free`"),
        (&["nic", &tap, &wire, "--egress", "1mbit"], 2, "it is no TAP device"),
        (&["nic", &free, &absent, "--egress", "1mbit"], 2, "cannot find the device \"absent\""),
        (&["nic", "tap:a@no-such", &wire, "--egress", "1mbit"], 2, "see `ip netns`"),
        (&["nic", &free, &wire, "--egress", "1mbit", "--shapers", "2"], 2, "ethtool -L"),
        (&["nic", &free, &wire, "--egress", "1mbit", "--horizon", "0s"], 2, "a wheel has 2 to"),
    ] {
        let (is, message) = refused(bed.tidegate().args(args));
        assert!(is == code && message.contains(why), "{args:?}: {is} {message}");
        assert!(!bed.has(&bed.host, "free"), "{args:?}");
    }
    drop(nic);
}
