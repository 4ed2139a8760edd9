//! A program that sets a pacing rate of its own, in a limit of scheme `pace`, on loopback.

use std::{
    env, fs,
    io::{self, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    process::{Child, Command},
    time::{Duration, Instant},
};

use tidegate_core::{Rate, queue_options::VirtualQueueOptions};

use super::{tree_tests::test_name, *};
use crate::{
    cgroup::{Cgroup, Hierarchy},
    limit::AttachedLimit,
};

/// In the process that the test starts: where to connect to.
const ADDRESS: &str = "TIDEGATE_TEST_LIFTS_TO";
const PATIENCE: Duration = Duration::from_secs(120);
const SO_MAX_PACING_RATE: i32 = 47;
const SIZE: libc::socklen_t = size_of::<u32>() as libc::socklen_t;

fn set_pacing_rate(stream: &TcpStream, byte_s: u32) {
    let value = (&raw const byte_s).cast();
    let fd = stream.as_raw_fd();
    // SAFETY: the descriptor is open, and the value is live and as long as said.
    let ret = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_MAX_PACING_RATE, value, SIZE) };
    assert_eq!(ret, 0);
}

fn pacing_rate(stream: &TcpStream) -> u32 {
    let (mut byte_s, mut size) = (0u32, SIZE);
    let (value, fd) = ((&raw mut byte_s).cast(), stream.as_raw_fd());
    // SAFETY: the descriptor is open, and both values are live and as long as said.
    let ret =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, SO_MAX_PACING_RATE, value, &raw mut size) };
    assert_eq!(ret, 0);
    byte_s
}

/// The process in the limit, not a test of its own: sends until the limit has paced it, and then again each
/// time that it has lifted its rate.
#[test]
fn lifts() {
    let Ok(address) = env::var(ADDRESS) else { return };
    let mut stream = TcpStream::connect(address).unwrap();
    let deadline = Instant::now() + PATIENCE;
    for _ in 0..3 {
        set_pacing_rate(&stream, u32::MAX);
        // Each round trip the limit looks at it.
        while pacing_rate(&stream) == u32::MAX {
            assert!(Instant::now() < deadline, "the limit does not pace it");
            stream.write_all(&[7; 10_000]).unwrap();
        }
    }
    // What it asks for below its share stays.
    set_pacing_rate(&stream, 100_000);
    stream.write_all(&[7; 100_000]).unwrap();
    assert_eq!(pacing_rate(&stream), 100_000);
}

/// What a test leaves behind however it ends: nothing.
struct Sender {
    group: Cgroup,
    child: Option<Child>,
}

impl Drop for Sender {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir(self.group.absolute());
    }
}

#[test]
fn root_a_sender_that_lifts_its_pacing_is_paced_again() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_a_sender_that_lifts_its_pacing_is_paced_again: needs root");
        return;
    }
    let hierarchy = Hierarchy::find().unwrap();
    let name = format!("tidegate-sys-lifts-{}", std::process::id());
    let group = hierarchy.create(&hierarchy.open("").unwrap(), &name).unwrap();
    let mut sender = Sender { group, child: None };
    let rate = Rate::from_bit_s(50_000_000).map(VirtualQueueOptions::new);
    let options = LimitOptions { egress: rate, loopback: true, ..LimitOptions::default() };
    let limit = AttachedLimit::attach(&hierarchy, &sender.group, &options, None).unwrap();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]);
    command.arg(sender.group.absolute()).arg(env::current_exe().unwrap());
    command.args([test_name(concat!(module_path!(), "::lifts")), "--exact"]);
    command.env(ADDRESS, listener.local_addr().unwrap().to_string());
    let child = sender.child.insert(command.spawn().unwrap());

    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let mut stream = loop {
        if let Ok((stream, _)) = listener.accept() {
            break stream;
        }
        assert!(child.try_wait().unwrap().is_none(), "the sender has ended");
        assert!(Instant::now() < deadline, "nobody connects");
        std::thread::sleep(Duration::from_millis(5));
    };
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    io::copy(&mut stream, &mut io::sink()).unwrap();
    assert!(child.wait().unwrap().success());
    sender.child = None;
    limit.detach(&hierarchy, &sender.group).unwrap();
}
