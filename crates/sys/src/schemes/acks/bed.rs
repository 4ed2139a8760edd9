//! A workload behind a port, for tests: its namespace, the host with port and uplink, and a server.
//!
//! ```text
//!   guest eth0 ── port0 host up0 ── eth0 server        HTB on up0, its queue a FIFO
//! ```

use std::process::{Command, Output};

use tidegate_core::{Direction, Rate, Scope};

use super::{AcksOptions, AttachedAcks, attach, new_states};
use crate::{
    backlog::{self, Backlog},
    device::Target,
    net::{
        NetNs, Netlink, VethPair,
        qdisc::{Fifo, Handle, Htb, HtbClass, Place, Verb},
    },
};

pub(crate) const SERVER: &str = "10.93.2.2";
const LEAF: Handle = Handle::new(0x7500, 0);
/// What HTB's queue holds, as a device's does by default.
const QUEUE_PACKETS: u32 = 1000;

pub(crate) struct Bed {
    pub(crate) guest: NetNs,
    pub(crate) host: NetNs,
    pub(crate) server: NetNs,
    pub(crate) rate: Rate,
}

/// A command in the network namespace of the calling thread.
pub(crate) fn run(words: &str) -> Output {
    let mut words = words.split(' ');
    let program = words.next().unwrap();
    let output = Command::new(program).args(words.collect::<Vec<_>>()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {error}");
    output
}

/// Sets a value below `/proc/sys/net` of a network namespace.
pub(crate) fn set(netns: &NetNs, name: &str, value: u32) {
    let write = || std::fs::write(format!("/proc/sys/net/{name}"), value.to_string());
    netns.run(write).unwrap().unwrap();
}

pub(crate) fn sh(netns: &NetNs, words: &str) -> Output {
    netns.run(|| run(words)).unwrap()
}

/// Puts an HTB of a rate on a device, with a FIFO as its queue.
pub(crate) fn shape(netns: &NetNs, device: &str, rate: Rate) {
    let mut netlink = netns.netlink().unwrap();
    let ifindex = netlink.index_of(device).unwrap();
    let at = |parent, handle| Place { ifindex, parent, handle };
    let root = at(Handle::ROOT, Handle::new(1, 0));
    netlink.set_qdisc(Verb::Add, root, &Htb::new(1)).unwrap();
    let class = Handle::new(1, 1);
    // A timer that is late must not lose rate: 1 ms.
    let burst = Some((rate.bit_s() / 8000) as u32);
    let shape = HtbClass { burst_bytes: burst, cburst_bytes: burst, ..HtbClass::new(rate.bit_s()) };
    let place = at(Handle::new(1, 0), class);
    netlink.set_class(Verb::Add, place, &shape).unwrap();
    let queue = Fifo::Packets(QUEUE_PACKETS);
    netlink.set_qdisc(Verb::Add, at(class, LEAF), &queue).unwrap();
}

/// Where packets wait in the HTB of a device.
pub(crate) fn backlog_of(netns: &NetNs, device: &str, rate: Rate) -> Backlog {
    let found = netns.run(|| {
        let ifindex = Netlink::open().unwrap().index_of(device).unwrap();
        backlog::locate(ifindex, LEAF, rate).unwrap()
    });
    found.unwrap()
}

impl Bed {
    /// `None`, and a line that says so, without root.
    pub(crate) fn new(test: &str, rate: Rate) -> Option<Bed> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP {test}: needs root");
            return None;
        }
        let netns = |side| {
            NetNs::create(&format!("tidegate-{}-{test}-{side}", std::process::id())).unwrap()
        };
        let (guest, host, server) = (netns("g"), netns("h"), netns("s"));
        let mut netlink = host.netlink().unwrap();
        for (name, peer) in [("port0", &guest), ("up0", &server)] {
            let pair = VethPair { name, peer: "eth0", peer_netns: Some(peer) };
            netlink.add_veth(&pair).unwrap();
        }
        for (netns, device, net, last) in [
            (&host, "port0", 1, 1),
            (&guest, "eth0", 1, 2),
            (&host, "up0", 2, 1),
            (&server, "eth0", 2, 2),
        ] {
            sh(netns, &format!("ip addr add 10.93.{net}.{last}/24 dev {device}"));
            sh(netns, &format!("ip -6 addr add fd93:{net}::{last}/64 dev {device} nodad"));
            sh(netns, &format!("ip link set {device} up"));
        }
        for (netns, net) in [(&guest, 1), (&server, 2)] {
            sh(netns, "ip link set lo up");
            sh(netns, &format!("ip route add default via 10.93.{net}.1"));
            sh(netns, &format!("ip -6 route add default via fd93:{net}::1"));
        }
        set(&host, "ipv4/ip_forward", 1);
        set(&host, "ipv6/conf/all/forwarding", 1);
        shape(&host, "up0", rate);
        Some(Bed { guest, host, server, rate })
    }

    /// Where HTB's packets wait.
    pub(crate) fn backlog(&self) -> Backlog {
        backlog_of(&self.host, "up0", self.rate)
    }

    /// Puts the programs on the port.
    pub(crate) fn attach(&self, options: &AcksOptions) -> AttachedAcks {
        let backlog = self.backlog();
        let attached = self.host.run(|| {
            let target = Target::find(&Scope::Port("port0".to_owned())).unwrap();
            let states = new_states().unwrap();
            attach(&target, Direction::Egress, options, &backlog, &states).unwrap()
        });
        attached.unwrap()
    }

    /// Takes them off again: where there are no tcx links, that is done from the port's namespace.
    pub(crate) fn detach(&self, attached: AttachedAcks) {
        self.host.run(|| drop(attached)).unwrap();
    }
}
