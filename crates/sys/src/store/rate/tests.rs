use std::{os::fd::AsFd, time::Instant};

use rustix::{
    fs::{FlockOperation, Mode, OFlags, flock, open},
    mount::{MountFlags, UnmountFlags, mount, unmount},
};
use tidegate_core::{Nanos, Scheme, Scope, queue_options::VirtualQueueOptions};

use super::*;
use crate::{
    cgroup::Cgroup,
    limit::LimitOptions,
    net::{NetNs, Netlink, VethPair, qdisc::Handle},
};

/// A BPF file system and a cgroup of its own.
struct Place {
    dir: tempfile::TempDir,
    hierarchy: Hierarchy,
    group: Cgroup,
    store: Store,
}

impl Place {
    fn new(name: &str) -> Place {
        let dir = tempfile::tempdir().unwrap();
        mount("bpf", dir.path(), "bpf", MountFlags::empty(), None).unwrap();
        let hierarchy = Hierarchy::find().unwrap();
        let name = format!("tidegate-{name}-{}", std::process::id());
        let group = hierarchy.create(&hierarchy.open("").unwrap(), &name).unwrap();
        let store = Store::at(dir.path().join("t"));
        Place { dir, hierarchy, group, store }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.group.remove(Instant::now() + Duration::from_secs(10));
        let _ = unmount(self.dir.path(), UnmountFlags::DETACH);
    }
}

fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

fn options(scheme: Scheme, rate: &str) -> LimitOptions {
    let queue = VirtualQueueOptions::new(rate.parse().unwrap());
    LimitOptions { egress: Some(queue), scheme, ..LimitOptions::default() }
}

fn hour_from_now() -> Nanos {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Nanos((now.tv_sec as u64 + 3_600) * 1_000_000_000)
}

/// Whoever changes a limit that a group has lent a rate to must not make a present of it.
#[test]
fn root_a_change_leaves_a_lent_rate_its_end() {
    if !is_root("root_a_change_leaves_a_lent_rate_its_end") {
        return;
    }
    let place = Place::new("lent");
    let Place { hierarchy, store, .. } = &place;
    let netns = NetNs::create(&format!("tidegate-lent-{}", std::process::id())).unwrap();
    netns
        .run(|| {
            let pair = VethPair { name: "v0", peer: "v1", peer_netns: None };
            Netlink::open().unwrap().add_veth(&pair).unwrap();
            for scheme in [Scheme::Pace, Scheme::Nrm, Scheme::Police, Scheme::Spring, Scheme::Dem] {
                let scope = match scheme {
                    Scheme::Spring | Scheme::Dem => Scope::Dev("v0".to_owned()),
                    _ => Scope::Cgroup(place.group.path().to_owned()),
                };
                let direction = Direction::Egress;
                let lock = store.lock().unwrap();
                let begin = options(scheme, "100mbit");
                store.install(&lock, hierarchy, "a", &scope, &begin, None).unwrap();
                drop(lock);
                let (until, then) = (hour_from_now(), "2mbit".parse().unwrap());
                let lease = Lease { until, then };
                let rate = "30mbit".parse().unwrap();
                let set = store.set_rate(
                    hierarchy,
                    "a",
                    direction,
                    rate,
                    Some(lease),
                    Duration::from_secs(60),
                );
                assert_eq!(set.unwrap(), RateSet::Set);
                let lock = store.lock().unwrap();
                for (to, falls_to) in [("50mbit", "2mbit"), ("1mbit", "1mbit"), ("5mbit", "1mbit")]
                {
                    store.change(&lock, hierarchy, "a", &options(scheme, to)).unwrap();
                    let maps = store.open(hierarchy, "a").unwrap().maps;
                    assert_eq!(maps.limit().unwrap().rate(direction), to.parse().ok());
                    let then = falls_to.parse().unwrap();
                    assert_eq!(
                        maps.lease(direction).unwrap(),
                        Some(Lease { until, then }),
                        "{scheme}"
                    );
                    let now = maps.limit().unwrap().police[0];
                    let ended = maps.limit_at(Nanos(until.0 + 1)).unwrap().police[0];
                    // A policer's books go on: what has been earned until then is in both.
                    if scheme == Scheme::Police {
                        assert!(now.since_ns > 0 && now.committed.earned_bytes > 0, "{now:?}");
                        assert!(ended.since_ns >= now.since_ns, "{ended:?} after {now:?}");
                        assert!(ended.committed.earned_bytes >= now.committed.earned_bytes);
                    }
                }
                store.remove(&lock, "a").unwrap();
            }
        })
        .unwrap();
}

/// Who may not wait is told so at once, and all is as before.
#[test]
fn root_a_rate_that_may_not_wait_is_not_set_while_another_writes() {
    if !is_root("root_a_rate_that_may_not_wait_is_not_set_while_another_writes") {
        return;
    }
    let place = Place::new("busy");
    let Place { hierarchy, store, .. } = &place;
    let scope = Scope::Cgroup(place.group.path().to_owned());
    let lock = store.lock().unwrap();
    store.install(&lock, hierarchy, "a", &scope, &options(Scheme::Pace, "9mbit"), None).unwrap();
    drop(lock);
    // As another process has it, for ever.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let other = open(&store.root, flags, Mode::empty()).unwrap();
    flock(other.as_fd(), FlockOperation::LockExclusive).unwrap();
    let set = |patience| {
        let rate = "5mbit".parse().unwrap();
        store.set_rate(hierarchy, "a", Direction::Egress, rate, None, patience)
    };
    assert!(matches!(set(Duration::ZERO), Err(StoreError::Busy(_))));
    let rate = || store.open(hierarchy, "a").unwrap().limit.rate(Direction::Egress);
    assert_eq!(rate(), "9mbit".parse().ok());
    drop(other);
    assert_eq!(set(Duration::from_secs(60)).unwrap(), RateSet::Set);
    assert_eq!(rate(), "5mbit".parse().ok());
}

/// A rate that could not be set is not in force, and the next attempt does not find it so either.
#[test]
fn root_a_rate_that_the_qdisc_refuses_is_not_in_force() {
    if !is_root("root_a_rate_that_the_qdisc_refuses_is_not_in_force") {
        return;
    }
    let place = Place::new("refused");
    let Place { hierarchy, store, .. } = &place;
    let netns = NetNs::create(&format!("tidegate-refused-{}", std::process::id())).unwrap();
    netns
        .run(|| {
            let mut netlink = Netlink::open().unwrap();
            netlink.add_veth(&VethPair { name: "v0", peer: "v1", peer_netns: None }).unwrap();
            let ifindex = netlink.index_of("v0").unwrap();
            let scope = Scope::Dev("v0".to_owned());
            for scheme in [Scheme::Htb, Scheme::Spring, Scheme::Tbf] {
                let lock = store.lock().unwrap();
                let begin = options(scheme, "20mbit");
                store.install(&lock, hierarchy, "a", &scope, &begin, None).unwrap();
                drop(lock);
                let set = |rate: &str| {
                    let (rate, patience) = (rate.parse().unwrap(), Duration::from_secs(60));
                    store.set_rate(hierarchy, "a", Direction::Egress, rate, None, patience)
                };
                let rate = || store.open(hierarchy, "a").unwrap().limit.rate(Direction::Egress);
                assert_eq!(set("30mbit").unwrap(), RateSet::Set);
                netlink.delete_qdisc(ifindex, Handle::ROOT).unwrap();
                for _ in 0..2 {
                    assert!(set("50mbit").is_err(), "{scheme}");
                    assert_eq!(rate(), "30mbit".parse().ok(), "{scheme}");
                }
                store.remove(&store.lock().unwrap(), "a").unwrap();
            }
        })
        .unwrap();
}
