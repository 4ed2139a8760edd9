//! The pure header against its model, and queues of a kernel with packets in them.

use std::net::UdpSocket;

use proptest::prelude::*;
use tidegate_core::{Rate, waiting::HEADER_BYTES};

use super::*;
use crate::{
    backlog::locate,
    net::{
        NetNs, VethPair,
        qdisc::{Fifo, FqCodel, Handle, Htb, HtbClass, Place, Qdisc, Verb},
    },
};

unsafe extern "C" {
    fn native_wf_read(bytes: *const u8, length: u32, flow: *mut WaitingFlow) -> i32;
}

/// What the header says of so many bytes.
fn native(packet: &[u8]) -> Option<Flow> {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..packet.len()].copy_from_slice(packet);
    let mut key = WaitingFlow::default();
    // SAFETY: the header reads HEADER_BYTES at most, and writes one key.
    let ret = unsafe { native_wf_read(bytes.as_ptr(), packet.len() as u32, &raw mut key) };
    (ret == 0).then(|| key.into())
}

proptest! {
    #[test]
    fn any_bytes_are_read_as_the_model_reads_them(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..=HEADER_BYTES),
        version in prop_oneof![Just(0x45u8), Just(0x60), Just(0x4f), 0x40u8..0x70],
        protocol in prop_oneof![Just(6u8), Just(17), any::<u8>()],
        fragment in prop_oneof![Just([0x40u8, 0]), Just([0, 0]), any::<[u8; 2]>()],
    ) {
        if let [first, ..] = &mut bytes[..] {
            *first = version;
        }
        if bytes.len() > 9 {
            bytes[6..8].copy_from_slice(&fragment);
            bytes[if version >> 4 == 6 { 6 } else { 9 }] = protocol;
        }
        prop_assert_eq!(native(&bytes), Flow::read(&bytes));
    }
}

const RATE: u64 = 8_000;
const LEAF: Handle = Handle::new(0x7500, 0);

/// A device whose packets leave at 1 kB/s, so that nearly all of them wait; what waits after two flows have
/// sent 30 and 10 datagrams of 1000 bytes. `None` where the kernel has no such queue, or does not explain it.
fn two_flows(name: &str, leaf: &(dyn Qdisc + Sync)) -> Option<Waiting> {
    let netns = |side| NetNs::create(&format!("tidegate-{}-{name}-{side}", std::process::id()));
    let (near, far) = (netns("a").unwrap(), netns("b").unwrap());
    let mut netlink = near.netlink().unwrap();
    let pair = VethPair { name: "out", peer: "in", peer_netns: Some(&far) };
    netlink.add_veth(&pair).unwrap();
    for (host, dev, ip) in [(&near, "out", "10.94.0.1"), (&far, "in", "10.94.0.2")] {
        let mut netlink = host.netlink().unwrap();
        let index = netlink.index_of(dev).unwrap();
        netlink.add_address(index, ip.parse().unwrap(), 24).unwrap();
        netlink.set_up(index, true).unwrap();
    }
    let ifindex = netlink.index_of("out").unwrap();
    let at = |parent, handle| Place { ifindex, parent, handle };
    near.run(|| {
        let send = |port: u16, count: usize| {
            let socket = UdpSocket::bind(("10.94.0.1", port)).unwrap();
            for _ in 0..count {
                socket.send_to(&[0; 1000], ("10.94.0.2", 9)).unwrap();
            }
        };
        // Neighbours find each other before there is a queue.
        send(4000, 1);
        let found = || std::fs::read_to_string("/proc/thread-self/net/arp").unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !found().lines().any(|line| line.contains("10.94.0.2") && line.contains(" 0x2 ")) {
            assert!(std::time::Instant::now() < deadline, "{}", found());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        netlink.set_qdisc(Verb::Add, at(Handle::ROOT, Handle::new(1, 0)), &Htb::new(1)).unwrap();
        let class = Handle::new(1, 1);
        netlink.set_class(Verb::Add, at(Handle::new(1, 0), class), &HtbClass::new(RATE)).unwrap();
        match netlink.set_qdisc(Verb::Add, at(class, LEAF), leaf) {
            Err(e) if e.is_absent() => return None,
            done => done.unwrap(),
        }
        send(4001, 30);
        send(4002, 10);
        let rate = Rate::from_bit_s(RATE).unwrap();
        let backlog = locate(ifindex, LEAF, rate).unwrap();
        let elsewhere = Backlog { handle: 0x7501_0000, ..backlog };
        assert_eq!(look(&elsewhere).unwrap(), None, "another qdisc");
        let waiting = look(&backlog).unwrap();
        let stats = netlink.qdisc_stats(ifindex).unwrap();
        let leaf = stats.iter().find(|qdisc| qdisc.handle == LEAF).unwrap();
        let waiting = waiting?;
        // The kernel's own count, but for what left between both looks.
        let left = waiting.all.bytes.abs_diff(leaf.backlog_bytes.into());
        assert!(left <= 2 * 1042, "{waiting:?} {leaf:?}");
        Some(waiting)
    })
    .unwrap()
}

/// One flow has three times as much in the queue as the other.
fn has_both(waiting: &Waiting) {
    assert!(waiting.whole, "{waiting:?}");
    let of = |port: u16| {
        let flow = waiting.flows.iter().find(|(flow, _)| flow.from.port() == port);
        flow.map_or(Count::default(), |(_, count)| *count)
    };
    let (greedy, sparse) = (of(4001), of(4002));
    // Some left at once, with HTB's burst, and while it was looked.
    assert!(greedy.packets > 20 && sparse.packets > 5, "{waiting:?}");
    assert!(greedy.bytes > 2 * sparse.bytes, "{waiting:?}");
    assert_eq!(greedy.bytes, greedy.packets * 1042, "{waiting:?}");
    let sum: u64 = waiting.flows.iter().map(|(_, count)| count.bytes).sum();
    assert_eq!(sum + waiting.other.bytes, waiting.all.bytes);
    let (flow, _) = waiting.flows[0];
    assert_eq!((flow.protocol_name(), flow.to), (Some("udp"), "10.94.0.2:9".parse().unwrap()));
}

#[test]
fn root_who_waits_in_a_fifo_is_reported() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_who_waits_in_a_fifo_is_reported: needs root");
        return;
    }
    has_both(&two_flows("fifo", &Fifo::Bytes(1_000_000)).unwrap());
}

#[test]
fn root_who_waits_in_fq_codel_is_reported() {
    let test = "root_who_waits_in_fq_codel_is_reported";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {test}: needs root");
        return;
    }
    let queue = FqCodel {
        limit_packets: 1000,
        memory_bytes: 10_000_000,
        // It must not drop while it is looked at.
        target: std::time::Duration::from_secs(60),
    };
    match two_flows("codel", &queue) {
        Some(waiting) => has_both(&waiting),
        None => eprintln!("SKIP {test}: this kernel has no fq_codel, or does not explain it"),
    }
}
