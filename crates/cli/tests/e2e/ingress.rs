//! Ingress limits of scheme `pace` on the sockets of a program: the receive windows that they set, and give
//! back. What is looked at is the window alone; no time is asked for.

use std::{
    env,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use tidegate_instruments::sock;
use tidegate_sys::net::{NetNs, VethPair};

use crate::{
    common::{Guard, PATIENCE, Place, kernel_before, wait_for},
    need_root,
};

const HELPER: &str = "TIDEGATE_TEST_INGRESS";
const ADDRESS: &str = "10.96.0.2";
const PORT: u16 = 5400;
/// So slow that a fair window is far below any that the kernel would choose.
const LIMIT: &str = "2mbit";
/// 2 Mbit/s for a second: no path here has a round trip so long.
const WINDOW_BYTES: u32 = 250_000;

/// In the process under test: takes one connection in and reads all of it; for each line of its input it says
/// the clamp of the connection's window.
pub fn help() {
    if env::var(HELPER).is_err() {
        return;
    }
    let listener = TcpListener::bind((ADDRESS, PORT)).unwrap();
    println!("\nlistening");
    let (stream, _) = listener.accept().unwrap();
    let mut data = stream.try_clone().unwrap();
    thread::spawn(move || while data.read(&mut [0; 65536]).is_ok_and(|n| n > 0) {});
    for line in std::io::stdin().lines() {
        line.unwrap();
        println!("CLAMP {}", sock::window_clamp(&stream).unwrap());
    }
}

/// A program that receives, in a cgroup and a namespace of its own.
struct Receiver {
    child: Guard,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Receiver {
    fn start(place: &Place, netns: &NetNs) -> Receiver {
        let mut command = place.inside(&place.group, "nsenter");
        command.arg(format!("--net=/run/netns/{}", netns.name()));
        command.arg(env::current_exe().unwrap()).args(["helper", "--exact", "--nocapture"]);
        command.env(HELPER, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child: Child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut receiver = Receiver { child: Guard(child), input, output: BufReader::new(output) };
        receiver.read("listening");
        receiver
    }

    /// What follows on a line that begins so.
    fn read(&mut self, begin: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the receiver has ended");
            if let Some(rest) = line.trim().strip_prefix(begin) {
                return rest.to_owned();
            }
        }
    }

    fn clamp(&mut self) -> u32 {
        self.input.write_all(b"\n").unwrap();
        self.read("CLAMP ").parse().unwrap()
    }
}

#[test]
fn root_an_ingress_limit_sets_windows_and_gives_them_back() {
    need_root!();
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = |side| format!("tidegate-in-{}-{number}-{side}", std::process::id());
    let near = NetNs::create(&name("r")).unwrap();
    let far = NetNs::create(&name("s")).unwrap();
    let pair = VethPair { name: "eth0", peer: "eth0", peer_netns: Some(&near) };
    far.netlink().unwrap().add_veth(&pair).unwrap();
    for (netns, ip) in [(&far, "10.96.0.1"), (&near, ADDRESS)] {
        let mut netlink = netns.netlink().unwrap();
        let index = netlink.index_of("eth0").unwrap();
        netlink.add_address(index, ip.parse().unwrap(), 24).unwrap();
        netlink.set_up(index, true).unwrap();
    }

    let place = Place::new();
    let limit = ["limit", "add", "a", "--cgroup", place.group.path(), "--ingress", LIMIT];
    place.ok(&limit);
    let mut receiver = Receiver::start(&place, &near);
    let mut sender = far.run(|| TcpStream::connect((ADDRESS, PORT)).unwrap()).unwrap();
    sender.set_write_timeout(Some(PATIENCE)).unwrap();
    // A host that stalls makes round trips, and with them windows, long for a while.
    let limited = wait_for("a window of the limit", || {
        sender.write_all(&[7; 20_000]).unwrap();
        Some(receiver.clamp()).filter(|clamp| *clamp < WINDOW_BYTES)
    });

    place.ok(&["limit", "del", "a"]);
    let free = receiver.clamp();
    assert!(free > limited, "given back: {limited} then, {free} now");

    // The connection exists when this limit comes: before Linux 6.12 it cannot be heard.
    place.ok(&limit);
    sender.write_all(&[7; 100_000]).unwrap();
    if !kernel_before(6, 12) {
        wait_for("a window of the second limit", || {
            sender.write_all(&[7; 20_000]).unwrap();
            Some(receiver.clamp()).filter(|clamp| *clamp < free)
        });
    }
    drop(sender);
    drop(receiver.child);
}
