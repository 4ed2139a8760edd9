//! What the kernel does with the storage of a cgroup, on which the sharing of programs depends.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    fs,
    net::UdpSocket,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use tidegate_core::{Direction, Rate};
use tidegate_instruments::sharing::{Limits, Sharing};
use tidegate_sys::{
    cgroup::{Cgroup, Hierarchy},
    net::NetNs,
};

const DEADLINE: Duration = Duration::from_secs(60);

/// A process is in one cgroup: tests take turns to be in another one.
static IN_CGROUP: Mutex<()> = Mutex::new(());

fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("tidegate-{}-sharing-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

struct Bed {
    hierarchy: Hierarchy,
    net: NetNs,
    top: Cgroup,
    groups: Vec<Cgroup>,
}

impl Bed {
    fn new(test: &str) -> Option<Bed> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP {test}: needs root");
            return None;
        }
        let hierarchy = Hierarchy::find().unwrap();
        let root = hierarchy.open("").unwrap();
        let top = hierarchy.create(&root, &unique()).unwrap();
        let groups = ["a", "b", "c"].map(|name| hierarchy.create(&top, name).unwrap());
        Some(Bed { hierarchy, net: NetNs::create(&unique()).unwrap(), top, groups: groups.into() })
    }

    /// A socket of a process in the group: the kernel remembers where it was made.
    fn socket(&self, group: &Cgroup) -> UdpSocket {
        let _turn = IN_CGROUP.lock().unwrap();
        let home = self.hierarchy.current().unwrap();
        let pid = std::process::id();
        group.add(pid).unwrap();
        let socket = self.net.run(|| UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
        home.add(pid).unwrap();
        socket
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for group in self.groups.iter().chain([&self.top]) {
            let _ = group.remove(Instant::now() + DEADLINE);
        }
    }
}

fn rate() -> Rate {
    Rate::from_bit_s(10_000_000_000).unwrap()
}

/// Sends so many packets from one socket to the other, and waits until all have come.
fn send(from: &UdpSocket, to: &UdpSocket, packets: u32) {
    to.set_read_timeout(Some(DEADLINE)).unwrap();
    for _ in 0..packets {
        from.send_to(&[0; 100], to.local_addr().unwrap()).unwrap();
        to.recv(&mut [0; 100]).unwrap();
    }
}

fn packets(limits: &Limits, limit: u32, direction: Direction) -> u64 {
    limits.passed(limit, direction).unwrap().0
}

#[test]
fn root_a_limit_counts_all_its_cgroups() {
    let Some(bed) = Bed::new("root_a_limit_counts_all_its_cgroups") else { return };
    let [a, b, c] = [0, 1, 2].map(|i| &bed.groups[i]);
    for sharing in [Sharing::Own, Sharing::Slot, Sharing::Chunk, Sharing::Ancestor] {
        let mut limits = Limits::new(sharing, 40, a.level()).unwrap();
        for (limit, group) in [(1, a), (1, b), (2, c)] {
            limits.attach(limit, group, rate()).unwrap();
        }
        let [from_a, from_b, at_c] = [a, b, c].map(|group| bed.socket(group));
        send(&from_a, &at_c, 10);
        send(&from_b, &at_c, 5);
        send(&at_c, &from_a, 3);
        let counted = [(1, Direction::Egress), (1, Direction::Ingress)]
            .into_iter()
            .chain([(2, Direction::Egress), (2, Direction::Ingress)])
            .map(|(limit, direction)| packets(&limits, limit, direction));
        assert_eq!(counted.collect::<Vec<_>>(), [15, 3, 3, 15], "{sharing:?}");
    }
}

#[test]
fn root_each_level_has_its_own_storage() {
    let Some(bed) = Bed::new("root_each_level_has_its_own_storage") else { return };
    let (inner, peer) = (&bed.groups[0], &bed.groups[1]);
    for sharing in [Sharing::Own, Sharing::Slot, Sharing::Chunk, Sharing::Whole] {
        let mut limits = Limits::new(sharing, 2, 0).unwrap();
        limits.attach(1, &bed.top, rate()).unwrap();
        limits.attach(2, inner, rate()).unwrap();
        let [from, to] = [inner, peer].map(|group| bed.socket(group));
        send(&from, &to, 7);
        send(&to, &from, 4);
        assert_eq!(packets(&limits, 1, Direction::Egress), 11, "{sharing:?}");
        assert_eq!(packets(&limits, 2, Direction::Egress), 7, "{sharing:?}");
        assert_eq!(packets(&limits, 2, Direction::Ingress), 4, "{sharing:?}");
    }
}

/// Other programs with the same maps take the place of the earlier ones: the kernel keeps the storage.
#[test]
fn root_a_storage_outlives_links_and_programs() {
    let Some(bed) = Bed::new("root_a_storage_outlives_links_and_programs") else { return };
    let [a, b, c] = [0, 1, 2].map(|i| &bed.groups[i]);
    for sharing in [Sharing::Slot, Sharing::Chunk] {
        let mut limits = Limits::new(sharing, 2, 0).unwrap();
        limits.attach(1, a, rate()).unwrap();
        limits.attach(1, b, rate()).unwrap();
        let [from_a, from_b, at_c] = [a, b, c].map(|group| bed.socket(group));
        let send_both = || {
            send(&from_a, &at_c, 2);
            send(&from_b, &at_c, 3);
        };
        send_both();
        assert_eq!(packets(&limits, 1, Direction::Egress), 5, "{sharing:?}");
        limits.detach(b);
        send_both();
        assert_eq!(packets(&limits, 1, Direction::Egress), 7, "{sharing:?}: b has left");
        limits.attach_again(1, b).unwrap();
        send_both();
        assert_eq!(packets(&limits, 1, Direction::Egress), 12, "{sharing:?}: b is back");
        limits.replace_programs().unwrap();
        send_both();
        assert_eq!(packets(&limits, 1, Direction::Egress), 17, "{sharing:?}: other programs");
    }
}

/// A process may end between the links and the index: such a cgroup has no limit, not a wrong one.
#[test]
fn root_a_cgroup_without_an_index_has_no_limit() {
    let Some(bed) = Bed::new("root_a_cgroup_without_an_index_has_no_limit") else { return };
    let [a, b] = [0, 1].map(|i| &bed.groups[i]);
    let mut limits = Limits::new(Sharing::Slot, 2, 0).unwrap();
    limits.attach(1, a, rate()).unwrap();
    limits.attach_again(1, b).unwrap();
    let [from_a, from_b] = [a, b].map(|group| bed.socket(group));
    send(&from_b, &from_a, 6);
    assert_eq!(packets(&limits, 1, Direction::Egress), 0);
    assert_eq!(packets(&limits, 1, Direction::Ingress), 6);
    assert!(fs::exists(a.absolute()).unwrap());
}
