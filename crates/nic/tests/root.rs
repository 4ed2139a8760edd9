//! Ports on real devices: two stacks, each in a namespace of its own, joined by a loop that forwards.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::{IpAddr, Shutdown, TcpListener, TcpStream, UdpSocket},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    time::Nsecs,
};
use tidegate_instruments::plumbing::{set_mtu, set_tx_offload};
use tidegate_nic::{
    Packet, PacketPool, PoolSize, Port, PortError,
    port::{
        tap::{TapOptions, TapOrigin, TapPort},
        xdp::{XdpCopy, XdpDevice, XdpOptions, XdpPort},
    },
};
use tidegate_sys::{
    net::{NetNs, VethPair},
    xdp::XdpMode,
};

/// Time enough for anything that is waited for.
const DEADLINE: Duration = Duration::from_secs(60);
const TRANSFER_BYTES: usize = 20_000_000;
const RING_FRAMES: u32 = 256;

fn root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

fn netns(side: &str) -> NetNs {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    NetNs::create(&format!("tgnic{}-{number}-{side}", std::process::id())).unwrap()
}

fn pool() -> PacketPool {
    PacketPool::new(PoolSize { small: 4096, large: 512 }).unwrap()
}

/// Gives a device its addresses, 10.96.0.LAST and fd96::LAST, and sets it up.
fn configure(netns: &NetNs, device: &str, last: u8) {
    let mut netlink = netns.netlink().unwrap();
    let index = netlink.index_of(device).unwrap();
    let addresses: [(IpAddr, u8); 2] =
        [([10, 96, 0, last].into(), 24), ([0xfd96, 0, 0, 0, 0, 0, 0, last.into()].into(), 64)];
    for (address, bits) in addresses {
        netlink.add_address(index, address, bits).unwrap();
    }
    netlink.set_up(index, true).unwrap();
}

fn delete(netns: &NetNs, device: &str) {
    let mut netlink = netns.netlink().unwrap();
    let index = netlink.index_of(device).unwrap();
    netlink.delete_link(index).unwrap();
}

/// A TAP in a namespace, configured.
fn tap(netns: &NetNs, last: u8, offloads: bool) -> TapPort {
    let port = TapPort::open(netns, &TapOptions { offloads, ..TapOptions::new("tap0") }).unwrap();
    configure(netns, "tap0", last);
    port
}

/// A veth pair: `eth0`, configured, in `inside`; `device` in `outside`, up and without address.
fn veth(inside: &NetNs, last: u8, outside: &NetNs, device: &str) {
    let pair = VethPair { name: "eth0", peer: device, peer_netns: Some(outside) };
    inside.netlink().unwrap().add_veth(&pair).unwrap();
    let mut netlink = outside.netlink().unwrap();
    let index = netlink.index_of(device).unwrap();
    netlink.set_up(index, true).unwrap();
    // AF_XDP cannot see that a checksum is unfinished.
    set_tx_offload(inside, "eth0", false).unwrap();
    configure(inside, "eth0", last);
}

/// The longest frame and the most segments that came in at one side.
#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    bytes_max: usize,
    segments_max: u32,
}

/// Forwards between two ports until `stop`.
fn forward(
    ports: &mut [&mut dyn Port; 2],
    pool: &mut PacketPool,
    stop: &AtomicBool,
) -> Result<[Seen; 2], PortError> {
    const BATCH: usize = 64;
    const QUEUE_MAX: usize = 1024;
    let mut seen = [Seen::default(); 2];
    let mut queues = [VecDeque::new(), VecDeque::new()];
    let mut frames: Vec<Packet> = Vec::with_capacity(BATCH);
    while !stop.load(Ordering::Relaxed) {
        let mut moved = 0;
        for from in 0..2 {
            let to = 1 - from;
            if queues[to].len() < QUEUE_MAX {
                moved += ports[from].receive(pool, &mut frames, BATCH)?;
            }
            for frame in &frames {
                seen[from].bytes_max = seen[from].bytes_max.max(frame.frame().len());
                seen[from].segments_max = seen[from].segments_max.max(frame.segments());
            }
            queues[to].extend(frames.drain(..));
            moved += ports[to].transmit(&mut queues[to], pool)?;
        }
        if moved == 0 {
            let wait = Timespec { tv_sec: 0, tv_nsec: 2_000_000 as Nsecs };
            let mut fds: Vec<_> = ports
                .iter()
                .filter_map(|port| port.as_fd())
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            let _ = poll(&mut fds, Some(&wait));
        }
    }
    Ok(seen)
}

/// A datagram there and back.
fn echo(left: &NetNs, right: &NetNs, left_address: &str, right_address: &str) {
    let server = right.run(|| UdpSocket::bind(right_address).unwrap()).unwrap();
    let client = left.run(|| UdpSocket::bind(left_address).unwrap()).unwrap();
    client.connect(server.local_addr().unwrap()).unwrap();
    let wait = Some(Duration::from_millis(200));
    server.set_read_timeout(wait).unwrap();
    client.set_read_timeout(wait).unwrap();
    let begun = Instant::now();
    let mut buffer = [0; 64];
    // The first one brings neighbour discovery along, and may be lost with it.
    while begun.elapsed() < DEADLINE {
        client.send(b"there").unwrap();
        if let Ok((bytes, from)) = server.recv_from(&mut buffer) {
            assert_eq!(&buffer[..bytes], b"there");
            server.send_to(b"and back", from).unwrap();
            if let Ok(bytes) = client.recv(&mut buffer) {
                assert_eq!(&buffer[..bytes], b"and back");
                return;
            }
        }
    }
    panic!("no echo from {right_address} within {DEADLINE:?}");
}

/// A connection that carries `TRANSFER_BYTES` in each direction, and checks them.
fn transfer(left: &NetNs, right: &NetNs, address: &str) {
    let pattern: Vec<u8> = (0..=250).cycle().take(251 * 400).collect();
    let listener = right.run(|| TcpListener::bind(address).unwrap()).unwrap();
    let exchange = |mut stream: TcpStream| {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        let mut reader = stream.try_clone().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut left = TRANSFER_BYTES;
                while left > 0 {
                    let part = left.min(pattern.len());
                    stream.write_all(&pattern[..part]).unwrap();
                    left -= part;
                }
                stream.shutdown(Shutdown::Write).unwrap();
            });
            let mut buffer = vec![0; pattern.len()];
            let mut read = 0;
            loop {
                let part = buffer.len().min(TRANSFER_BYTES - read);
                if part == 0 {
                    break;
                }
                reader.read_exact(&mut buffer[..part]).unwrap();
                assert!(buffer[..part] == pattern[..part], "the bytes at {read} differ");
                read += part;
            }
        });
    };
    thread::scope(|scope| {
        scope.spawn(|| exchange(listener.accept().unwrap().0));
        exchange(left.run(|| TcpStream::connect(address).unwrap()).unwrap());
    });
}

/// Echo and transfer over both versions of IP while a loop forwards; what the loop saw of each side.
fn carry(
    left: &NetNs,
    right: &NetNs,
    ports: [&mut dyn Port; 2],
    pool: &mut PacketPool,
) -> [Seen; 2] {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut ports = ports;
        let stop = &stop;
        let loop_thread = scope.spawn(move || forward(&mut ports, pool, stop));
        // Also when an assertion below fails.
        struct StopOnDrop<'a>(&'a AtomicBool);
        impl Drop for StopOnDrop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stopper = StopOnDrop(stop);
        echo(left, right, "10.96.0.1:0", "10.96.0.2:9000");
        echo(left, right, "[fd96::1]:0", "[fd96::2]:9000");
        transfer(left, right, "10.96.0.2:9000");
        transfer(left, right, "[fd96::2]:9000");
        drop(stopper);
        loop_thread.join().unwrap().unwrap()
    })
}

#[test]
fn root_tap_carries_segments_whole() {
    if !root("root_tap_carries_segments_whole") {
        return;
    }
    let (left, right, mut pool) = (netns("l"), netns("r"), pool());
    let (mut a, mut b) = (tap(&left, 1, true), tap(&right, 2, true));
    assert!(a.takes_segments() && b.takes_segments());
    let seen = carry(&left, &right, [&mut a, &mut b], &mut pool);
    for side in seen {
        assert!(side.segments_max > 1 && side.bytes_max > 1514, "{seen:?}");
    }
    let (a, b) = (a.counters(), b.counters());
    // What stays in a queue of the loop at its end was not sent.
    assert!(a.rx_frames - b.tx_frames < 1024 && b.tx_drop_refused == 0, "{a:?} {b:?}");
    assert!(a.rx_wire_bytes > 2 * TRANSFER_BYTES as u64, "{a:?}");
    assert_eq!(pool.free(), pool.size());
}

#[test]
fn root_tap_without_offloads_gives_frames_of_mtu_size() {
    if !root("root_tap_without_offloads_gives_frames_of_mtu_size") {
        return;
    }
    let (left, right, mut pool) = (netns("l"), netns("r"), pool());
    let (mut a, mut b) = (tap(&left, 1, false), tap(&right, 2, false));
    assert!(!a.takes_segments() && !b.takes_segments());
    let seen = carry(&left, &right, [&mut a, &mut b], &mut pool);
    for side in seen {
        assert_eq!((side.segments_max, side.bytes_max), (1, 1514));
    }
}

#[test]
fn root_a_deleted_tap_is_gone() {
    if !root("root_a_deleted_tap_is_gone") {
        return;
    }
    let (left, mut pool) = (netns("l"), pool());
    let mut port = tap(&left, 1, true);
    let mut frames = Vec::new();
    port.receive(&mut pool, &mut frames, 100).unwrap();
    delete(&left, "tap0");
    assert!(port.receive(&mut pool, &mut frames, 100).unwrap_err().is_gone());
    let mut queue = VecDeque::from([pool.packet(&[0xff; 60]).unwrap()]);
    assert!(port.transmit(&mut queue, &mut pool).unwrap_err().is_gone());
    assert_eq!(queue.len(), 1);
    let mut fds = [PollFd::from_borrowed_fd(port.as_fd().unwrap(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 5, tv_nsec: 0 })).unwrap();
    assert!(fds[0].revents().contains(PollFlags::ERR), "{:?}", fds[0].revents());
}

#[test]
fn root_a_tap_that_is_down_drops_and_counts() {
    if !root("root_a_tap_that_is_down_drops_and_counts") {
        return;
    }
    let (left, mut pool) = (netns("l"), pool());
    let mut port = TapPort::open(&left, &TapOptions::new("tap0")).unwrap();
    let mut queue = VecDeque::from([pool.packet(&[0xff; 60]).unwrap()]);
    assert_eq!(port.transmit(&mut queue, &mut pool).unwrap(), 1);
    assert_eq!(port.counters().tx_drop_down, 1);
    assert_eq!(port.receive(&mut pool, &mut Vec::new(), 10).unwrap(), 0);
}

#[test]
fn root_taps_are_made_or_found_as_asked() {
    if !root("root_taps_are_made_or_found_as_asked") {
        return;
    }
    let left = netns("l");
    let persistent = TapOptions { persistent: true, multi_queue: true, ..TapOptions::new("vm%d") };
    let ports = TapPort::open_queues(&left, &persistent, 3).unwrap();
    assert!(ports.iter().all(|port| port.name() == "vm0"));
    let exists = TapOptions { multi_queue: true, ..TapOptions::new("vm0") };
    let error = TapPort::open(&left, &exists).unwrap_err();
    assert!(error.to_string().contains("exists already"), "{error}");
    drop(ports);
    // Persistent, so it is still there.
    let found = TapOptions { origin: TapOrigin::Existing, ..exists };
    let other_queues = TapOptions { multi_queue: false, ..found.clone() };
    let error = TapPort::open(&left, &other_queues).unwrap_err();
    assert!(error.to_string().contains("multi_queue"), "{error}");
    TapPort::open(&left, &found).unwrap();
    let missing = TapOptions { name: "vm7".into(), ..found };
    assert!(matches!(TapPort::open(&left, &missing), Err(PortError::Net(_))));
    delete(&left, "vm0");
}

/// A frame that finds no buffer stays in the kernel.
#[test]
fn root_an_empty_pool_leaves_frames_unread() {
    if !root("root_an_empty_pool_leaves_frames_unread") {
        return;
    }
    let left = netns("l");
    let mut pool = PacketPool::new(PoolSize { small: 1, large: 1 }).unwrap();
    let mut port = tap(&left, 1, true);
    let sender = left.run(|| UdpSocket::bind("10.96.0.1:0").unwrap()).unwrap();
    sender.set_broadcast(true).unwrap();
    let mut frames = Vec::new();
    let held = pool.take(1).unwrap();
    // Neighbour discovery makes some noise of its own.
    sender.send_to(&[7; 1001], "10.96.0.2:9").unwrap();
    assert_eq!(port.receive(&mut pool, &mut frames, 10).unwrap(), 0);
    assert_eq!(port.counters().rx_no_buffer, 1);
    drop(held);
    let begun = Instant::now();
    while port.counters().rx_frames == 0 {
        port.receive(&mut pool, &mut frames, 10).unwrap();
        assert!(begun.elapsed() < DEADLINE);
    }
}

/// Two stacks, each on a veth whose other end is an AF_XDP device of a third namespace.
struct XdpBed {
    left: NetNs,
    right: NetNs,
    middle: NetNs,
}

impl XdpBed {
    fn new() -> Self {
        let bed = Self { left: netns("l"), right: netns("r"), middle: netns("m") };
        veth(&bed.left, 1, &bed.middle, "a");
        veth(&bed.right, 2, &bed.middle, "b");
        bed
    }

    fn port(&self, device: &str, options: XdpOptions, pool: &mut PacketPool) -> XdpPort {
        let device = XdpDevice::open(&self.middle, device, options).unwrap();
        device.port(0, RING_FRAMES, pool).unwrap()
    }
}

#[test]
fn root_xdp_forwards_between_two_veths() {
    if !root("root_xdp_forwards_between_two_veths") {
        return;
    }
    for mode in [Some(XdpMode::Native), Some(XdpMode::Generic), None] {
        let (bed, mut pool) = (XdpBed::new(), pool());
        let options = XdpOptions { mode, copy: XdpCopy::Auto };
        let mut a = bed.port("a", options, &mut pool);
        let mut b = bed.port("b", options, &mut pool);
        let seen = carry(&bed.left, &bed.right, [&mut a, &mut b], &mut pool);
        assert_eq!((seen[0].bytes_max, seen[1].bytes_max), (1514, 1514), "{mode:?}");
        let counters = [a.counters(), b.counters()];
        assert!(
            counters.iter().all(|c| c.tx_drop_refused + c.tx_drop_offload == 0),
            "{counters:?}"
        );
        drop((a, b));
        assert_eq!(pool.free(), pool.size(), "{mode:?}");
    }
}

/// A TAP hands over whole segments without checksums; the wire takes finished frames.
#[test]
fn root_tap_and_xdp_speak_to_each_other() {
    if !root("root_tap_and_xdp_speak_to_each_other") {
        return;
    }
    let (left, right, middle, mut pool) = (netns("l"), netns("r"), netns("m"), pool());
    let mut a = tap(&left, 1, true);
    veth(&right, 2, &middle, "b");
    let device = XdpDevice::open(&middle, "b", XdpOptions::default()).unwrap();
    let mut b = device.port(0, RING_FRAMES, &mut pool).unwrap();
    let seen = carry(&left, &right, [&mut a, &mut b], &mut pool);
    // How many TCP joins depends on how fast its acknowledgements come.
    assert!(seen[0].segments_max > 1 && seen[1].segments_max == 1, "{seen:?}");
    assert_eq!(b.counters().tx_drop_offload + b.counters().tx_drop_too_long, 0);
    drop(b);
    assert_eq!(pool.free(), pool.size());
}

#[test]
fn root_a_deleted_xdp_device_is_gone() {
    if !root("root_a_deleted_xdp_device_is_gone") {
        return;
    }
    let (bed, mut pool) = (XdpBed::new(), pool());
    let mut port = bed.port("a", XdpOptions::default(), &mut pool);
    let mut frames = Vec::new();
    port.receive(&mut pool, &mut frames, 100).unwrap();
    delete(&bed.middle, "a");
    let begun = Instant::now();
    let error = loop {
        match port.receive(&mut pool, &mut frames, 100) {
            Ok(_) => assert!(begun.elapsed() < DEADLINE),
            Err(error) => break error,
        }
    };
    assert!(error.is_gone(), "{error}");
    let mut queue = VecDeque::from([pool.packet(&[0xff; 60]).unwrap()]);
    assert!(port.transmit(&mut queue, &mut pool).unwrap_err().is_gone());
    drop((port, queue, frames));
    assert_eq!(pool.free(), pool.size());
    // A new device of the same name can be opened.
    veth(&bed.left, 1, &bed.middle, "a");
    bed.port("a", XdpOptions::default(), &mut pool);
}

#[test]
fn root_xdp_refuses_what_it_cannot_do_and_leaves_no_trace() {
    if !root("root_xdp_refuses_what_it_cannot_do_and_leaves_no_trace") {
        return;
    }
    let (bed, mut pool) = (XdpBed::new(), pool());
    let device = XdpDevice::open(&bed.middle, "a", XdpOptions::default()).unwrap();
    let error = XdpDevice::open(&bed.middle, "a", XdpOptions::default()).unwrap_err();
    assert!(error.to_string().contains("has an XDP program"), "{error}");
    assert!(device.port(0, 100, &mut pool).unwrap_err().to_string().contains("power of two"));
    assert!(
        device.port(5, 64, &mut pool).unwrap_err().to_string().contains("is there such a queue")
    );
    let port = device.port(0, 64, &mut pool).unwrap();
    assert!(device.port(0, 64, &mut pool).is_err(), "a queue has one socket");
    let mut other = PacketPool::new(PoolSize { small: 64, large: 0 }).unwrap();
    let mut port = port;
    let error = port.receive(&mut other, &mut Vec::new(), 1).unwrap_err();
    assert!(error.to_string().contains("the pool"), "{error}");
    drop((port, device));
    assert_eq!(pool.free(), pool.size());
    // The program went with the last of them.
    let zero_copy = XdpOptions { copy: XdpCopy::ZeroCopy, ..XdpOptions::default() };
    let device = XdpDevice::open(&bed.middle, "a", zero_copy).unwrap();
    assert!(device.port(0, 64, &mut pool).is_err(), "a veth has no zero copy");

    let mut netlink = bed.middle.netlink().unwrap();
    let index = netlink.index_of("b").unwrap();
    set_mtu(&mut netlink, index, 9000).unwrap();
    let error = XdpDevice::open(&bed.middle, "b", XdpOptions::default()).unwrap_err();
    assert!(error.to_string().contains("1774 bytes or less"), "{error}");

    let make = || Command::new("ip").args("tuntap add dev l3 mode tun".split(' ')).status();
    assert!(bed.middle.run(make).unwrap().unwrap().success());
    let error = XdpDevice::open(&bed.middle, "l3", XdpOptions::default()).unwrap_err();
    assert!(error.to_string().contains("carries Ethernet"), "{error}");
}
