//! A packet that the stack cuts into fragments is charged for all of them: on the way out before it is cut,
//! on the way in after it was put together. What is charged is compared with what the devices counted.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod bed;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use bed::{DEADLINE, Net, root};
use tidegate_core::queue_options::VirtualQueueOptions;
use tidegate_core::{Direction, Scheme};
use tidegate_instruments::plumbing::link_stats;
use tidegate_sys::cgroup::{Cgroup, Hierarchy};
use tidegate_sys::intf::OUTCOME_TABLE;
use tidegate_sys::limit::{AttachedLimit, LimitOptions};
use tidegate_sys::net::NetNs;

/// Neighbours may find each other again meanwhile, which adds to what is on the wire: the least of so many.
const ROUNDS: usize = 5;

/// Held while the process is in another cgroup: the tests of this binary are threads of one.
static PROCESS: Mutex<()> = Mutex::new(());

/// A cgroup with a limit that is never met, and a socket in it.
struct Limited {
    socket: UdpSocket,
    limit: Option<AttachedLimit>,
    cgroup: Cgroup,
}

impl Limited {
    /// The sockets of a process belong to the cgroup that it was in when it made them.
    fn new(name: &str, scheme: Scheme, netns: &NetNs, address: IpAddr) -> Limited {
        let hierarchy = Hierarchy::find().unwrap();
        let _alone = PROCESS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (before, pid) = (hierarchy.current().unwrap(), std::process::id());
        let root = hierarchy.open("/").unwrap();
        let cgroup = hierarchy.create(&root, &format!("tidegate-{pid}-{name}")).unwrap();
        let rate = Some(VirtualQueueOptions::new("100gbit".parse().unwrap()));
        let options =
            LimitOptions { egress: rate, ingress: rate, scheme, ..LimitOptions::default() };
        let limit = AttachedLimit::attach(&hierarchy, &cgroup, &options, None).unwrap();
        cgroup.add(pid).unwrap();
        let socket = netns.run(|| UdpSocket::bind((address, 0)));
        before.add(pid).unwrap();
        let socket = socket.unwrap().unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        Limited { socket, limit: Some(limit), cgroup }
    }

    /// Bytes and packets of a direction; all must have passed.
    fn passed(&self, direction: Direction) -> (u64, u64) {
        let counters = self.limit.as_ref().unwrap().maps().read(direction).unwrap().counters;
        for (outcome, packets) in OUTCOME_TABLE.iter().zip(counters.packets) {
            assert!(outcome.name == "pass" || packets == 0, "{}: {packets}", outcome.name);
        }
        (counters.bytes[0], counters.packets[0])
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        drop(self.limit.take());
        let _ = self.cgroup.remove(Instant::now() + Duration::from_secs(5));
    }
}

fn ip(args: &str) {
    let status = Command::new("ip").args(args.split(' ')).status().unwrap();
    assert!(status.success(), "ip {args}");
}

/// Sends datagrams of these lengths over a path with such an MTU, given by its devices or by a route.
fn compare(scheme: Scheme, v6: bool, device_mtu: u32, route_mtu: Option<u32>, lengths: &[usize]) {
    let net = Net::new();
    let (client, server, prefix) = match v6 {
        false => (bed::CLIENT, bed::SERVER, "10.77.0.0/24"),
        true => ("fd77::1", "fd77::2", "fd77::/64"),
    };
    for (ns, address) in [(&net.client, client), (&net.server, server)] {
        ip(&format!("-n {ns} link set v0 mtu {device_mtu}"));
        if v6 {
            ip(&format!("-n {ns} addr add {address}/64 dev v0 nodad"));
        }
    }
    if let Some(mtu) = route_mtu {
        let family = if v6 { "-6" } else { "-4" };
        ip(&format!("-n {} {family} route replace {prefix} dev v0 mtu {mtu}", net.client));
    }
    let [near, far] = [&net.client, &net.server].map(|name| NetNs::open(name).unwrap());
    let sender = Limited::new(&format!("{}s", net.client), scheme, &near, client.parse().unwrap());
    let receiver = Limited::new(&format!("{}r", net.client), scheme, &far, server.parse().unwrap());
    let to: SocketAddr = receiver.socket.local_addr().unwrap();
    let mut netlink = near.netlink().unwrap();
    let device = netlink.index_of("v0").unwrap();
    let mut buffer = vec![0; 1 << 16];
    let mut send = |length: usize| {
        sender.socket.send_to(&vec![0; length], to).unwrap();
        assert_eq!(receiver.socket.recv(&mut buffer).unwrap(), length);
    };
    // They find each other.
    send(1);
    for &length in lengths {
        let what = format!("{scheme} v6 {v6} MTU {device_mtu} {route_mtu:?}, {length} bytes");
        let differences = (0..ROUNDS).map(|_| {
            let stats = link_stats(&mut netlink, device).unwrap();
            let (out, arrived) =
                (sender.passed(Direction::Egress), receiver.passed(Direction::Ingress));
            send(length);
            let now = link_stats(&mut netlink, device).unwrap();
            let wire = (now.tx_bytes - stats.tx_bytes) as i64;
            let [out, arrived] = [
                (out, sender.passed(Direction::Egress)),
                (arrived, receiver.passed(Direction::Ingress)),
            ]
            .map(|(before, after)| {
                assert_eq!(after.1 - before.1, 1, "{what}");
                (after.0 - before.0) as i64
            });
            let fragments = now.tx_packets - stats.tx_packets;
            (wire - out, wire - arrived, fragments)
        });
        let differences: Vec<_> = differences.collect();
        let least = differences.iter().min_by_key(|(out, ..)| out.abs());
        assert!(matches!(least, Some((0, 0, _))), "{what}: {differences:?}");
    }
}

const SCHEMES: [Scheme; 2] = [Scheme::Nrm, Scheme::Police];

#[test]
fn root_fragments_of_ipv4_are_charged_as_sent() {
    if !root("root_fragments_of_ipv4_are_charged_as_sent") {
        return;
    }
    for scheme in SCHEMES {
        compare(scheme, false, 1500, None, &[100, 1472, 1473, 2952, 2953, 8_000, 65_507]);
        compare(scheme, false, 1280, None, &[1252, 1253, 1473, 40_000]);
        compare(scheme, false, 1500, Some(1306), &[1278, 1279, 1472, 1473, 8_000]);
    }
}

#[test]
fn root_fragments_of_ipv6_are_charged_as_sent() {
    if !root("root_fragments_of_ipv6_are_charged_as_sent") {
        return;
    }
    for scheme in SCHEMES {
        compare(scheme, true, 1500, None, &[100, 1452, 1453, 2888, 2900, 8_000, 65_000]);
        compare(scheme, true, 1280, None, &[1232, 1233, 2456, 2457, 40_000]);
        compare(scheme, true, 1500, Some(1300), &[1252, 1253, 1452, 1453, 8_000]);
    }
}
