//! Bytes that new services send before their limit is in force: the agent at work, slow, stopped, flooded,
//! killed. Judged by what has arrived, and by the order in which things happen.

use std::{
    io,
    net::UdpSocket,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;
use tidegate_core::gate::BYTES;
use tidegate_sys::{cgroup::Cgroup, libbpf_rs::libbpf_sys::BPF_F_ALLOW_MULTI};

use super::{Bed, Slice, limit};
use crate::{
    apply::attach_foreign,
    common::{Guard, Objects, Place, signal, wait_for},
    edt, need_root,
    traffic::sender,
};

/// The limit of the services here, so low that what it lets pass hides nothing.
pub(super) const LIMIT: &str = "scheme = \"police\"\negress = \"64kbit\"\nburst = \"10kb\"";
pub(super) const LIMIT_BYTES_S: u64 = 8000;
const LIMIT_BURST_BYTES: u64 = 10_000;
/// Longer than any test takes: nobody is late.
pub(super) const LONG: &str = "3600s";
/// Where the deadline is waited for.
const SHORT: Duration = Duration::from_secs(2);
/// Of a datagram of the sender on the wire.
const WIRE_BYTES: u64 = 1200 + 42;
/// Without end, as far as a test can see.
const ENDLESS_BYTES: u64 = 1 << 40;
/// A slow process stands still for so long, and runs for so long, in turn.
const STANDSTILL: Duration = Duration::from_millis(10);
/// More events than the gate's ring has room for.
const FLOOD: usize = 3000;

/// Two namespaces with a cable between, and what arrives at the far end.
pub(super) struct Net {
    bed: edt::Bed,
    socket: UdpSocket,
}

impl Net {
    pub(super) fn new() -> Net {
        let bed = edt::Bed::new();
        let socket = bed.receiver.run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        // Room for much more than may pass.
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 8 << 20).unwrap();
        Net { bed, socket }
    }

    /// A process in a cgroup that sends as fast as it can.
    pub(super) fn send_from(&self, place: &Place, cgroup: &Cgroup) -> Guard {
        let mut command = place.inside(cgroup, "nsenter");
        command.arg(edt::net_of(&self.bed.sender));
        let port = self.socket.local_addr().unwrap().port();
        sender(&mut command, &format!("udp {}:{port} {ENDLESS_BYTES}", edt::RECEIVER));
        Guard(command.stderr(Stdio::null()).spawn().unwrap())
    }

    /// Bytes on the wire that have come since the last look.
    pub(super) fn arrived(&self) -> u64 {
        let mut sum = 0;
        loop {
            match self.socket.recv(&mut [0; 2048]) {
                Ok(_) => sum += WIRE_BYTES,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return sum,
                Err(e) => panic!("{e}"),
            }
        }
    }
}

impl Bed<'_> {
    /// An agent with its gate open.
    pub(super) fn start_with(&self, deadline: &str) -> Guard {
        let agent = Guard(self.agent().args(["--deadline", deadline]).spawn().unwrap());
        wait_for("the gate", || (self.gate()["state"] == "open").then_some(()));
        agent
    }

    fn gate(&self) -> Value {
        self.status()["agent"]["gate"].clone()
    }
}

/// A process that stands still and runs in turn for as long as the value lives.
struct Slow {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    fn new(pid: u32) -> Slow {
        let ends = Arc::new(AtomicBool::new(false));
        let has_ended = ends.clone();
        let thread = thread::spawn(move || {
            while !has_ended.load(Ordering::Relaxed) {
                for sent in [Signal::STOP, Signal::CONT] {
                    signal(pid, sent);
                    thread::sleep(STANDSTILL);
                }
            }
        });
        Slow { ends, thread: Some(thread) }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Waits for the limit. It has a program on egress alone.
pub(super) fn limited(cgroup: &Cgroup) {
    wait_for("the limit", || (Objects::on(cgroup).links() > 0).then_some(()));
}

/// The most bytes that may have arrived of a service whose cgroup was made at `made`, once its limit is in
/// force. The limit lets `burst_bytes` pass at once.
pub(super) fn most(made: Instant, burst_bytes: u64) -> u64 {
    let earned = LIMIT_BYTES_S * (made.elapsed().as_secs() + 1);
    BYTES + burst_bytes + earned + WIRE_BYTES
}

#[test]
fn root_agent_lets_a_service_that_restarts_have_64_kib_until_it_is_limited() {
    need_root!();
    let (place, net) = (Place::new(), Net::new());
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let unit = format!("{}.service", slice.unique);
    bed.write("a.toml", &limit("web", &format!("unit = \"{unit}\""), LIMIT));
    let _agent = bed.start_with(LONG);
    for _ in 0..3 {
        let made = Instant::now();
        let cgroup = slice.make(&unit);
        let process = net.send_from(&place, &cgroup);
        limited(&cgroup);
        let arrived = net.arrived();
        assert!(arrived <= most(made, LIMIT_BURST_BYTES), "{arrived} bytes");
        // It is decided: what the limit lets pass arrives.
        wait_for("traffic", || (net.arrived() > 0).then_some(()));
        drop(process);
        slice.remove(&cgroup);
        net.arrived();
    }
    // A service that no limit matches.
    let other = slice.make("other.service");
    let _process = net.send_from(&place, &other);
    let mut sum = 0;
    wait_for("more than what is undecided gets", || {
        sum += net.arrived();
        (sum > 4 * BYTES).then_some(())
    });
    let gate = bed.gate();
    assert_eq!((&gate["late_bytes"], &gate["unheld_cgroups"]), (&0.into(), &0.into()), "{gate}");
    place.ok(&["detach"]);
}

#[test]
fn root_agent_that_is_slow_holds_new_services_until_they_are_limited() {
    need_root!();
    let (place, net) = (Place::new(), Net::new());
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let unit = |number: &str| format!("{}-{number}.service", slice.unique);
    bed.write("a.toml", &limit("web", &format!("unit = \"{}\"", unit("*")), LIMIT));
    let agent = bed.start_with(LONG);
    // Its programs are loaded. Signals on end would keep the kernel from that: each ends its check of a
    // program.
    limited(&slice.make(&unit("0")));
    for number in ["1", "2", "3"] {
        // It is late from the beginning, so the service sends while it is undecided.
        signal(agent.0.id(), Signal::STOP);
        let made = Instant::now();
        let cgroup = slice.make(&unit(number));
        let process = net.send_from(&place, &cgroup);
        let mut sum = 0;
        wait_for("traffic of what is undecided", || {
            sum += net.arrived();
            (sum > 0).then_some(())
        });
        let slow = Slow::new(agent.0.id());
        limited(&cgroup);
        sum += net.arrived();
        assert!(sum <= most(made, LIMIT_BURST_BYTES), "{sum} bytes");
        wait_for("traffic", || (net.arrived() > 0).then_some(()));
        drop((process, slow));
        slice.remove(&cgroup);
        net.arrived();
    }
    let gate = bed.gate();
    assert_eq!((&gate["late_bytes"], &gate["unheld_cgroups"]), (&0.into(), &0.into()), "{gate}");
    place.ok(&["detach"]);
}

#[test]
fn root_agent_that_is_stopped_holds_new_services_until_the_deadline() {
    need_root!();
    let (place, net) = (Place::new(), Net::new());
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let unit = format!("{}.service", slice.unique);
    bed.write("a.toml", &limit("web", &format!("unit = \"{unit}\""), LIMIT));
    let agent = bed.start_with("2s");
    signal(agent.0.id(), Signal::STOP);
    let before = Instant::now();
    let cgroup = slice.make(&unit);
    let _process = net.send_from(&place, &cgroup);
    let mut sum = 0;
    wait_for("status to say that it is stopped", || {
        let status = bed.tidegate().arg("status").output().unwrap();
        let pid = agent.0.id();
        String::from_utf8_lossy(&status.stdout).contains(&format!("kill -CONT {pid}")).then_some(())
    });
    wait_for("traffic after the deadline", || {
        sum += net.arrived();
        // If it is not over now, all this came before it.
        assert!(sum <= BYTES || before.elapsed() >= SHORT, "{sum} bytes before the deadline");
        (sum > 4 * BYTES).then_some(())
    });
    signal(agent.0.id(), Signal::CONT);
    limited(&cgroup);
    bed.wait_said("web", "in_force");
    let late =
        wait_for("what passed late", || bed.gate()["late_bytes"].as_u64().filter(|n| *n > 0));
    assert!(late > 2 * BYTES, "{late} bytes");
    let said = bed.tidegate().arg("status").output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("a new cgroup gets 64 KiB until it is decided, 2s at most"), "{said}");
    assert!(said.contains("bytes passed after that, undecided"), "{said}");
    place.ok(&["detach"]);
}

#[test]
fn root_agent_that_is_flooded_with_cgroups_limits_a_service_in_time() {
    need_root!();
    let (place, net) = (Place::new(), Net::new());
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let unit = format!("{}.service", slice.unique);
    bed.write("a.toml", &limit("web", &format!("unit = \"{unit}\""), LIMIT));
    let agent = bed.start_with(LONG);
    // It reads nothing meanwhile, so it loses events, and must look at all cgroups.
    signal(agent.0.id(), Signal::STOP);
    // None is kept open: 1024 files are the usual limit.
    let flood = |name: &str, count| {
        let names = (0..count).map(|number| format!("{name}{number}"));
        names.inspect(|name| drop(slice.make(name))).collect::<Vec<_>>()
    };
    let first = flood("x", FLOOD);
    let made = Instant::now();
    let cgroup = slice.make(&unit);
    let _process = net.send_from(&place, &cgroup);
    signal(agent.0.id(), Signal::CONT);
    // It reads, and more comes all the time.
    let more = flood("y", FLOOD / 2);
    limited(&cgroup);
    let arrived = net.arrived();
    assert!(arrived <= most(made, LIMIT_BURST_BYTES), "{arrived} bytes");
    wait_for("traffic", || (net.arrived() > 0).then_some(()));
    let gate = bed.gate();
    assert!(gate["lost_events"].as_u64().unwrap() > 0, "{gate}");
    for name in first.iter().chain(&more) {
        let cgroup = place.hierarchy.open(&format!("{}/{name}", slice.group.path()));
        slice.remove(&cgroup.unwrap());
    }
    place.ok(&["detach"]);
}

#[test]
fn root_agent_that_is_killed_holds_nobody_and_leaves_limits_in_force() {
    need_root!();
    let (place, net) = (Place::new(), Net::new());
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let unit = format!("{}.service", slice.unique);
    bed.write("a.toml", &limit("web", &format!("unit = \"{unit}\""), LIMIT));
    let mut agent = bed.start_with(LONG);
    let service = slice.make(&unit);
    limited(&service);
    let gate = Objects::on(&slice.group);
    assert_eq!(gate.links(), 2);
    signal(agent.0.id(), Signal::STOP);
    let held = slice.make("held.service");
    let _process = net.send_from(&place, &held);
    let mut sum = 0;
    wait_for("what is undecided gets", || {
        sum += net.arrived();
        (sum > BYTES - 2 * WIRE_BYTES).then_some(())
    });
    assert!(sum <= BYTES, "{sum} bytes");
    signal(agent.0.id(), Signal::KILL);
    agent.exit_code();
    wait_for("traffic without a gate", || {
        sum += net.arrived();
        (sum > 4 * BYTES).then_some(())
    });
    gate.wait_until_gone();
    assert!(Objects::on(&service).links() > 0);
    place.ok(&["detach"]);
}

/// Where the kernel does not let it: cgroups are followed by inotify, and status says so.
#[test]
fn root_agent_without_a_gate_follows_cgroups_all_the_same() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let unit = format!("{}.service", slice.unique);
    bed.write("a.toml", &limit("web", &format!("unit = \"{unit}\""), LIMIT));
    // As many programs as the kernel takes on one hook.
    while attach_foreign(&slice.group, BPF_F_ALLOW_MULTI) == 0 {}
    let _agent = bed.start();
    bed.wait_said("web", "waiting");
    let gate = bed.gate();
    assert_eq!(gate["state"], "unavailable", "{gate}");
    let said = bed.tidegate().arg("status").output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("new cgroups are followed, not held: "), "{said}");
    let cgroup = slice.make(&unit);
    limited(&cgroup);
    bed.wait_said("web", "in_force");
    slice.remove(&cgroup);
    bed.wait_said("web", "waiting");
    place.ok(&["detach"]);
}
