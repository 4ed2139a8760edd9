//! A path for tests: two TUN devices `tun0` in namespaces of their own, and a relay between them, which
//! delays packets. The devices carry IP without a link header.

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::OpenOptionsExt,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::NetNs;

/// Packets that the relay keeps in a direction.
const RELAYED_MAX: usize = 4096;
/// The relay looks so often whether it shall end.
const TURN_MAX: Duration = Duration::from_millis(20);

fn tun(netns: &NetNs, address: Ipv4Addr) -> File {
    let open = || {
        let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(flags).open("/dev/net/tun").unwrap()
    };
    let file = netns.run(open).unwrap();
    // SAFETY: all zeros are such a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"tun0") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the descriptor is open, and the request is live and of the type that the call takes.
    let ret = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(ret, 0, "{}", io::Error::last_os_error());
    let mut netlink = netns.netlink().unwrap();
    let index = netlink.index_of("tun0").unwrap();
    netlink.add_address(index, IpAddr::V4(address), 24).unwrap();
    netlink.set_up(index, true).unwrap();
    file
}

/// Two network namespaces with a path between them.
pub(crate) struct TunPath {
    pub(crate) ends: [NetNs; 2],
    /// One way, in microseconds.
    pub(crate) delay_us: Arc<AtomicU64>,
    has_ended: Arc<AtomicBool>,
    relays: Vec<JoinHandle<()>>,
}

impl TunPath {
    pub(crate) const ADDRESSES: [Ipv4Addr; 2] =
        [Ipv4Addr::new(10, 97, 7, 1), Ipv4Addr::new(10, 97, 7, 2)];

    pub(crate) fn new(name: &str) -> TunPath {
        let name = |end| format!("tidegate-{name}-{}-{end}", std::process::id());
        let ends = ["a", "b"].map(|end| NetNs::create(&name(end)).unwrap());
        let (delay_us, has_ended) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let files = [0, 1].map(|i| Arc::new(tun(&ends[i], TunPath::ADDRESSES[i])));
        let relays = [0, 1].map(|i| {
            let (from, to) = (files[i].clone(), files[1 - i].clone());
            let (delay_us, has_ended) = (delay_us.clone(), has_ended.clone());
            thread::spawn(move || relay(&from, &to, &delay_us, &has_ended))
        });
        TunPath { ends, delay_us, has_ended, relays: relays.into() }
    }
}

impl Drop for TunPath {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.relays.drain(..).for_each(|relay| drop(relay.join()));
    }
}

fn relay(mut from: &File, mut to: &File, delay_us: &AtomicU64, has_ended: &AtomicBool) {
    let mut under_way: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut packet = [0; 2048];
    while !has_ended.load(Ordering::Relaxed) {
        let next = under_way.front().map(|(at, _)| at.saturating_duration_since(Instant::now()));
        let wait = next.unwrap_or(TURN_MAX).min(TURN_MAX);
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as i64 };
        let _ = poll(&mut [PollFd::from_borrowed_fd(from.as_fd(), PollFlags::IN)], Some(&wait));
        while let Ok(bytes) = from.read(&mut packet) {
            let at = Instant::now() + Duration::from_micros(delay_us.load(Ordering::Relaxed));
            if under_way.len() < RELAYED_MAX {
                under_way.push_back((at, packet[..bytes].to_vec()));
            }
        }
        while under_way.front().is_some_and(|(at, _)| *at <= Instant::now()) {
            let _ = under_way.pop_front().map(|(_, packet)| to.write(&packet));
        }
    }
}
