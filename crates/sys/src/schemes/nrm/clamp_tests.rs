//! The congestion window of a connection in a limit of scheme `pace` follows the limit and the path. The path
//! is two TUN devices with a relay between them, which delays what passes.

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    process::Child,
    sync::atomic::Ordering,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tidegate_core::{Class, Rate, Scheme, queue_options::VirtualQueueOptions};
use tidegate_instruments::sock::tcp_info;

use super::{
    tree_tests::{Nest, process_in},
    *,
};
use crate::{
    cgroup::Cgroup,
    limit::AttachedLimit,
    net::{NetNs, tun_path::TunPath},
};

/// In the process that the test starts: its network namespace and where to connect to.
const ROLE: &str = "TIDEGATE_TEST_CLAMP";
const PATIENCE: Duration = Duration::from_secs(120);

/// The process in the limit, not a test of its own: it sends, and for each line says its window in segments
/// and the most that it may be paced at.
#[test]
fn sends() {
    let Ok(role) = env::var(ROLE) else { return };
    let (netns, address) = role.split_once(' ').unwrap();
    NetNs::open(netns).unwrap().enter_current_thread().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    // One that knows no path but its acknowledgements.
    let (name, fd) = (b"reno", stream.as_raw_fd());
    // SAFETY: the descriptor is open, and the name is live and as long as said.
    let ret = unsafe {
        libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, name.as_ptr().cast(), 4)
    };
    assert_eq!(ret, 0);
    let asked = stream.try_clone().unwrap();
    thread::spawn(move || while stream.write_all(&[7; 10_000]).is_ok() {});
    for _ in io::stdin().lines() {
        let info = tcp_info(&asked).unwrap();
        println!("said {} {}", info.cwnd_segments, info.max_pacing_bytes_s);
    }
}

struct Sender(Child);

impl Sender {
    /// Asks for its window, and its pacing if there is any, until both are as wanted.
    fn wait(&mut self, what: &str, is_wanted: impl Fn(u64, Option<u64>) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut lines = BufReader::new(self.0.stdout.take().unwrap());
        loop {
            writeln!(self.0.stdin.as_ref().unwrap()).unwrap();
            let mut said = String::new();
            while !said.contains("said ") {
                said.clear();
                assert_ne!(lines.read_line(&mut said).unwrap(), 0, "the sender has ended");
            }
            let mut words = said.trim().rsplit(' ').map(|word| word.parse::<u64>().unwrap());
            let pacing = words.next().filter(|byte_s| *byte_s < u64::from(u32::MAX));
            let window = words.next().unwrap();
            if is_wanted(window, pacing) {
                break;
            }
            assert!(Instant::now() < deadline, "{what}: {window} segments, paced at {pacing:?}");
            thread::sleep(Duration::from_millis(5));
        }
        self.0.stdout = Some(lines.into_inner());
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One that sends over the path from a cgroup, and who receives that.
fn start(path: &TunPath, group: &Cgroup) -> (Sender, JoinHandle<io::Result<u64>>) {
    let bind = || TcpListener::bind(SocketAddr::from((TunPath::ADDRESSES[1], 0))).unwrap();
    let listener = path.ends[1].run(bind).unwrap();
    let role = format!("{} {}", path.ends[0].name(), listener.local_addr().unwrap());
    let mut command = process_in(group, concat!(module_path!(), "::sends"));
    let sender = Sender(command.env(ROLE, role).spawn().unwrap());
    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let mut stream = loop {
        if let Ok((stream, _)) = listener.accept() {
            break stream;
        }
        assert!(Instant::now() < deadline, "the sender does not connect");
        thread::sleep(Duration::from_millis(5));
    };
    stream.set_nonblocking(false).unwrap();
    (sender, thread::spawn(move || io::copy(&mut stream, &mut io::sink())))
}

fn egress(mbit: u64) -> LimitOptions {
    let egress = Rate::from_bit_s(mbit * 1_000_000).map(VirtualQueueOptions::new);
    LimitOptions { egress, ..LimitOptions::default() }
}

#[test]
fn root_the_window_follows_the_rate_and_the_path() {
    const TEST: &str = "root_the_window_follows_the_rate_and_the_path";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let nest = Nest::new("clamp", 1);
    let (hierarchy, group) = (&nest.hierarchy, &nest.groups[0]);
    let path = TunPath::new("clamp");
    let limit = AttachedLimit::attach(hierarchy, group, &egress(2), None).unwrap();
    let (mut sender, sink) = start(&path, group);

    // If the machine stands still during the handshake, the path is long at first, and its window large.
    let began = Instant::now();
    let is_small = |window, _| window <= 10 || began.elapsed() > Duration::from_secs(5);
    sender.wait("at a low rate", is_small);
    let options = egress(50);
    let entry = options.encode(group.id()).unwrap();
    limit.maps.set(hierarchy, [group], &entry, &options).unwrap();
    sender.wait("at a higher rate", |window, _| window >= 15);
    // More than any short path has at this rate. The least round trip of the connection stays that of before.
    path.delay_us.store(30_000, Ordering::Relaxed);
    sender.wait("over a longer path", |window, _| window > 80);
    drop(sender);
    let _ = sink.join().unwrap();
    limit.detach(hierarchy, group).unwrap();
}

/// A parent that does not know a child yet sets a window on a socket of it.
#[test]
fn root_a_parents_window_ends_where_a_child_has_the_socket() {
    const TEST: &str = "root_a_parents_window_ends_where_a_child_has_the_socket";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let nest = Nest::new("left-clamp", 2);
    let (hierarchy, [outer, inner]) = (&nest.hierarchy, &nest.groups[..]) else { unreachable!() };
    let path = TunPath::new("left-clamp");
    let parent = AttachedLimit::attach(hierarchy, outer, &egress(20), None).unwrap();
    let (mut sender, sink) = start(&path, inner);
    sender.wait("in the parent", |_, pacing| pacing.is_some());
    // One that sets nothing on sockets. It does not look for those that are there.
    let (scheme, class) = (Scheme::Nrm, Some(Class::default()));
    let options = LimitOptions { scheme, class, pace_ceiling: false, ..egress(20) };
    let child = AttachedLimit::attach_new(hierarchy, inner, &options, Some(parent.maps())).unwrap();
    sender.wait("in the child", |_, pacing| pacing.is_none());
    // The window of a short path at this rate has 24 segments at most.
    path.delay_us.store(30_000, Ordering::Relaxed);
    sender.wait("over a longer path", |window, _| window > 40);
    drop(sender);
    let _ = sink.join().unwrap();
    child.detach(hierarchy, inner).unwrap();
    parent.detach(hierarchy, outer).unwrap();
}
