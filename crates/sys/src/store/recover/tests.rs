use std::process::Command;

use tidegate_core::{Scheme, Scope, queue_options::VirtualQueueOptions};

use super::*;
use crate::{
    bpffs::PrivateBpffs,
    limit::LimitOptions,
    net::{NetNs, Netlink, VethPair},
    schemes::nrm::tree_tests::Nest,
    store::{StoreLock, replace::keep_settings},
};

/// A store and a network namespace of its own, with the device `v0`.
fn in_scene(test: &str, check: impl FnOnce(&Store, &Hierarchy) + Send) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {test}: needs root");
        return;
    }
    let netns = NetNs::create(&format!("tg-{}-{}", &test[5..20], std::process::id())).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
    netns
        .run(|| {
            let pair = VethPair { name: "v0", peer: "v1", peer_netns: None };
            Netlink::open().unwrap().add_veth(&pair).unwrap();
            check(&Store::at(bpffs.path().join("t")), &Hierarchy::find().unwrap());
        })
        .unwrap();
}

fn options(scheme: Scheme) -> LimitOptions {
    let egress = Some(VirtualQueueOptions::new("9mbit".parse().unwrap()));
    LimitOptions { egress, scheme, ..LimitOptions::default() }
}

fn device() -> Scope {
    Scope::Dev("v0".to_owned())
}

/// As a writer does it that dies when it has renamed the limit.
fn set_half_aside(store: &Store, hierarchy: &Hierarchy, name: &str) {
    let dir = store.root.join(name);
    keep_settings(&store.open(hierarchy, name).unwrap().limit, &dir).unwrap();
    fs::rename(&dir, store.root.join(format!("{ASIDE}{name}"))).unwrap();
}

fn again(store: &Store, lock: StoreLock) -> StoreLock {
    drop(lock);
    store.lock().unwrap()
}

#[test]
fn root_police_match_limits_that_were_set_aside_come_back_each_to_its_place() {
    const TEST: &str = "root_police_match_limits_that_were_set_aside_come_back_each_to_its_place";
    in_scene(TEST, |store, hierarchy| {
        let mut lock = store.lock().unwrap();
        for (name, prefix) in [("first", "10.0.0.1"), ("second", "10.0.0.2")] {
            let matched = prefix.parse().unwrap();
            let options = LimitOptions { matched, ..options(Scheme::Police) };
            store.install(&lock, hierarchy, name, &device(), &options, None).unwrap();
        }
        // The one of the second place comes back first, to the first place.
        store.set_aside(&lock, "second").unwrap();
        set_half_aside(store, hierarchy, "first");
        fs::rename(store.root.join("=second"), store.root.join("=a-second")).unwrap();
        lock = again(store, lock);
        assert_eq!(lock.problems(), [""; 0]);
        assert_eq!(store.names().unwrap(), ["a-second", "first"]);
        let places = ["a-second", "first"].map(|name| store.place_of(name).unwrap());
        assert_ne!(places[0], places[1]);
        for name in ["a-second", "first"] {
            let limit = store.open(hierarchy, name).unwrap();
            assert!(limit.unhooked.is_empty(), "{name}: {:?}", limit.unhooked);
        }
        store.remove(&lock, "first").unwrap();
        assert!(store.open(hierarchy, "a-second").unwrap().unhooked.is_empty());
        store.remove(&lock, "a-second").unwrap();
    });
}

/// The command that took a limit off, and the next one, report which limit is not on and why.
#[test]
fn root_htb_a_limit_that_cannot_be_put_back_is_reported() {
    const TEST: &str = "root_htb_a_limit_that_cannot_be_put_back_is_reported";
    in_scene(TEST, |store, hierarchy| {
        let tc = |words: &str| {
            let done = Command::new("tc").args(words.split(' ')).status().unwrap();
            assert!(done.success(), "tc {words}");
        };
        let mut lock = store.lock().unwrap();
        for scheme in [Scheme::Dem, Scheme::Htb] {
            store.install(&lock, hierarchy, "a", &device(), &options(Scheme::Htb), None).unwrap();
            // Somebody takes the place.
            if scheme == Scheme::Dem {
                tc("qdisc replace dev v0 root handle 9: pfifo");
                let done = store.replace(&lock, hierarchy, "a", &device(), &options(scheme), None);
                let said = done.unwrap_err().to_string();
                assert!(said.contains("`a`") && said.contains("could not be put back"), "{said}");
                assert_eq!(said.matches("pfifo 9:").count(), 2, "{said}");
            } else {
                set_half_aside(store, hierarchy, "a");
                tc("qdisc replace dev v0 root handle 9: pfifo");
                lock = again(store, lock);
                let told = lock.problems();
                assert!(told.len() == 1 && told[0].contains("`a`"), "{told:?}");
                assert!(told[0].contains("pfifo 9:"), "{told:?}");
            }
            // It is seen that it should be on.
            let limit = store.open(hierarchy, "a").unwrap();
            assert!(!limit.unhooked.is_empty());
            tc("qdisc del dev v0 root");
            store.replace(&lock, hierarchy, "a", &device(), &options(Scheme::Htb), None).unwrap();
            assert!(store.open(hierarchy, "a").unwrap().unhooked.is_empty());
            store.remove(&lock, "a").unwrap();
        }
    });
}

/// A writer that dies when it has replaced a parent leaves children that work with the earlier one's maps.
#[test]
fn root_children_of_a_parent_that_was_replaced_join_it() {
    in_scene("root_children_of_a_parent_that_was_replaced_join_it", |store, hierarchy| {
        let nest = Nest::new("join", 3);
        let scopes = [0, 1, 2].map(|at| Scope::Cgroup(nest.groups[at].path().to_owned()));
        let lock = store.lock().unwrap();
        let pace = options(Scheme::Pace);
        let mut parent = None;
        for (name, scope) in ["a", "b", "c"].into_iter().zip(&scopes) {
            store.install(&lock, hierarchy, name, scope, &pace, parent).unwrap();
            parent = Some(name);
        }
        let settings = |name| LimitOptions::from(&store.open(hierarchy, name).unwrap().limit);
        let before = ["a", "b", "c"].map(settings);
        store.replace(&lock, hierarchy, "a", &scopes[0], &pace, None).unwrap();
        let unhooked = || ["b", "c"].map(|name| store.open(hierarchy, name).unwrap().unhooked);
        assert_eq!(unhooked(), [vec![PARENT], vec![]]);
        // Whoever only looks waits for no writer ...
        assert_eq!(store.repair().unwrap(), [""; 0]);
        assert_eq!(unhooked(), [vec![PARENT], vec![]]);
        // ... and finishes what one has left that died.
        drop(lock);
        assert_eq!(store.repair().unwrap(), [""; 0]);
        assert_eq!(unhooked(), [vec![], Vec::<&str>::new()]);
        let lock = store.lock().unwrap();
        assert_eq!(["a", "b", "c"].map(settings), before);
        ["c", "b", "a"].into_iter().for_each(|name| store.remove(&lock, name).unwrap());
        store.close(lock);
    });
}

/// The number of a device that is gone may be another one's by now.
#[test]
fn root_htb_a_journal_is_not_believed_of_another_device() {
    const TEST: &str = "root_htb_a_journal_is_not_believed_of_another_device";
    in_scene(TEST, |store, _| {
        let target = Target::find(&device()).unwrap();
        let add = ["qdisc", "add", "dev", "v0", "root", "handle", "7467:", "htb"];
        let put = || assert!(Command::new("tc").args(add).status().unwrap().success());
        let has_htb = || {
            let qdiscs = Netlink::open().unwrap().qdisc_stats(target.ifindex).unwrap();
            root_qdisc::ours(&qdiscs).is_some()
        };
        put();
        let mut lock = store.lock().unwrap();
        for (name, stays) in [("eth7", true), ("v0", false)] {
            let of = Target { scope: Scope::Dev(name.to_owned()), ..target.clone() };
            lock.journal.begin(store.installation("a", Some(&of), true)).unwrap();
            lock = again(store, lock);
            assert_eq!(has_htb(), stays, "{name}");
        }
        drop(lock);
    });
}

/// One that was set aside has nothing of the tree any more, in which its successor may have its slot.
#[test]
fn root_htb_what_is_forgotten_leaves_its_successor_alone() {
    const TEST: &str = "root_htb_what_is_forgotten_leaves_its_successor_alone";
    in_scene(TEST, |store, hierarchy| {
        let mut lock = store.lock().unwrap();
        let class = Some(tidegate_core::Class::default());
        let inside = LimitOptions { class, ..options(Scheme::Htb) };
        let port = Scope::Port("v1".to_owned());
        store.install(&lock, hierarchy, "a", &device(), &options(Scheme::Htb), None).unwrap();
        store.install(&lock, hierarchy, "in", &port, &inside, Some("a")).unwrap();
        let slot = || name_in(&store.root.join("in"), "slot");
        let was = slot();
        store.set_aside(&lock, "in").unwrap();
        store.install(&lock, hierarchy, "in", &port, &inside, Some("a")).unwrap();
        assert_eq!(slot(), was);
        // The writer dies when it has begun to forget it.
        fs::rename(store.root.join("=in"), store.root.join("_in")).unwrap();
        lock = again(store, lock);
        let limit = store.open(hierarchy, "in").unwrap();
        assert!(limit.unhooked.is_empty(), "{:?}", limit.unhooked);
        store.remove(&lock, "in").unwrap();
        store.remove(&lock, "a").unwrap();
    });
}

/// A limit whose device is gone leaves the one alone that has got its number.
#[test]
fn root_htb_the_number_of_a_device_may_be_another_ones() {
    const TEST: &str = "root_htb_the_number_of_a_device_may_be_another_ones";
    in_scene(TEST, |store, hierarchy| {
        let ip = |words: &str| {
            let done = Command::new("ip").args(words.split(' ')).status().unwrap();
            assert!(done.success(), "ip {words}");
        };
        let other = Store::at(store.root.with_file_name("other"));
        let target = Target::find(&device()).unwrap();
        let lock = store.lock().unwrap();
        store.install(&lock, hierarchy, "a", &device(), &options(Scheme::Htb), None).unwrap();
        ip("link del v0");
        ip(&format!("link add w0 index {} type veth peer name w1", target.ifindex));
        let theirs = other.lock().unwrap();
        let scope = Scope::Dev("w0".to_owned());
        other.install(&theirs, hierarchy, "b", &scope, &options(Scheme::Htb), None).unwrap();
        assert_eq!(Target::find(&scope).unwrap().ifindex, target.ifindex);
        store.remove(&lock, "a").unwrap();
        let limit = other.open(hierarchy, "b").unwrap();
        assert!(limit.unhooked.is_empty(), "{:?}", limit.unhooked);
        // One that was renamed is still the same.
        ip("link set w0 name w2");
        other.remove(&theirs, "b").unwrap();
        let qdiscs = Netlink::open().unwrap().qdisc_stats(target.ifindex).unwrap();
        assert!(root_qdisc::ours(&qdiscs).is_none());
    });
}

#[test]
fn root_htb_a_limit_comes_back_to_its_renamed_device() {
    in_scene("root_htb_a_limit_comes_back_to_its_renamed_device", |store, hierarchy| {
        let mut lock = store.lock().unwrap();
        store.install(&lock, hierarchy, "a", &device(), &options(Scheme::Htb), None).unwrap();
        set_half_aside(store, hierarchy, "a");
        let renamed = Command::new("ip").args(["link", "set", "v0", "name", "w0"]).status();
        assert!(renamed.unwrap().success());
        lock = again(store, lock);
        assert_eq!(lock.problems(), [""; 0]);
        let limit = store.open(hierarchy, "a").unwrap();
        assert_eq!(limit.scope, Some(Scope::Dev("w0".to_owned())));
        assert!(limit.unhooked.is_empty(), "{:?}", limit.unhooked);
        store.remove(&lock, "a").unwrap();
    });
}

/// A writer that dies when the pins are gone leaves the rest to its journal.
#[test]
fn root_htb_a_journal_names_a_renamed_device_as_it_is_called_now() {
    const TEST: &str = "root_htb_a_journal_names_a_renamed_device_as_it_is_called_now";
    in_scene(TEST, |store, hierarchy| {
        let mut lock = store.lock().unwrap();
        store.install(&lock, hierarchy, "a", &device(), &options(Scheme::Htb), None).unwrap();
        let renamed = Command::new("ip").args(["link", "set", "v0", "name", "w0"]).status();
        assert!(renamed.unwrap().success());
        let step = store.removal(Deed::Remove, "a");
        assert_eq!(step.device, "w0");
        lock.journal.begin(step).unwrap();
        remove_pins(&store.root.join("a")).unwrap();
        lock = again(store, lock);
        assert_eq!(lock.problems(), [""; 0]);
        let mut netlink = Netlink::open().unwrap();
        let index = netlink.index_of("w0").unwrap();
        assert!(root_qdisc::ours(&netlink.qdisc_stats(index).unwrap()).is_none());
    });
}
