//! The congestion window of a connection in a limit of scheme `pace` follows the limit and the path. The path
//! is two TUN devices with a relay between them, which delays what passes.

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    process::Child,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use tidegate_core::{Rate, queue_options::VirtualQueueOptions};
use tidegate_instruments::sock::tcp_info;

use super::{
    tree_tests::{Nest, process_in},
    *,
};
use crate::{
    limit::AttachedLimit,
    net::{NetNs, tun_path::TunPath},
};

/// In the process that the test starts: its network namespace and where to connect to.
const ROLE: &str = "TIDEGATE_TEST_CLAMP";
const PATIENCE: Duration = Duration::from_secs(120);

/// The process in the limit, not a test of its own: it sends, and for each line says its window in segments.
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
        println!("said {}", tcp_info(&asked).unwrap().cwnd_segments);
    }
}

struct Sender(Child);

impl Sender {
    /// Asks for its window until it is as wanted.
    fn wait(&mut self, what: &str, is_wanted: impl Fn(u64) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut lines = BufReader::new(self.0.stdout.take().unwrap());
        loop {
            writeln!(self.0.stdin.as_ref().unwrap()).unwrap();
            let mut said = String::new();
            while !said.contains("said ") {
                said.clear();
                assert_ne!(lines.read_line(&mut said).unwrap(), 0, "the sender has ended");
            }
            let window = said.trim().rsplit(' ').next().unwrap().parse().unwrap();
            if is_wanted(window) {
                break;
            }
            assert!(Instant::now() < deadline, "{what}: {window} segments");
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
    let options = |mbit: u64| {
        let egress = Rate::from_bit_s(mbit * 1_000_000).map(VirtualQueueOptions::new);
        LimitOptions { egress, ..LimitOptions::default() }
    };
    let limit = AttachedLimit::attach(hierarchy, group, &options(2), None).unwrap();
    let bind = || TcpListener::bind(SocketAddr::from((TunPath::ADDRESSES[1], 0))).unwrap();
    let listener = path.ends[1].run(bind).unwrap();
    let role = format!("{} {}", path.ends[0].name(), listener.local_addr().unwrap());
    let mut command = process_in(group, concat!(module_path!(), "::sends"));
    let mut sender = Sender(command.env(ROLE, role).spawn().unwrap());
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
    let sink = thread::spawn(move || io::copy(&mut stream, &mut io::sink()));

    // If the machine stands still during the handshake, the path is long at first, and its window large.
    let began = Instant::now();
    let is_small = |window| window <= 10 || began.elapsed() > Duration::from_secs(5);
    sender.wait("at a low rate", is_small);
    let options = options(50);
    let entry = options.encode(group.id()).unwrap();
    limit.maps.set(hierarchy, [group], &entry, &options).unwrap();
    sender.wait("at a higher rate", |window| window >= 15);
    // More than any short path has at this rate. The least round trip of the connection stays that of before.
    path.delay_us.store(30_000, Ordering::Relaxed);
    sender.wait("over a longer path", |window| window > 80);
    drop(sender);
    let _ = sink.join().unwrap();
    limit.detach(hierarchy, group).unwrap();
}
