use std::collections::BTreeSet;

use tidegate_core::{Class, Direction, Scheme, queue_options::VirtualQueueOptions};

use super::*;
use crate::{bpffs::PrivateBpffs, schemes::nrm::tree_tests::Nest};

fn options(class: Option<Class>) -> LimitOptions {
    let queue = Some(VirtualQueueOptions::new("9mbit".parse().unwrap()));
    LimitOptions {
        egress: queue,
        ingress: queue,
        scheme: Scheme::Pace,
        class,
        ..LimitOptions::default()
    }
}

/// A store of its own, with the mount that it is in, and a cgroup; `None` without root.
fn setup(test: &str, name: &str) -> Option<(tempfile::TempDir, PrivateBpffs, Store, Nest)> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {test}: needs root");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
    let store = Store::at(bpffs.path().join("t"));
    Some((dir, bpffs, store, Nest::new(name, 1)))
}

/// Children of one parent are in a pool, whoever the parent is: one load of the programs serves them all.
#[test]
fn root_limits_inside_one_limit_share_programs() {
    const TEST: &str = "root_limits_inside_one_limit_share_programs";
    let Some((_dir, _bpffs, store, mut nest)) = setup(TEST, "share") else { return };
    for (above, name) in [(0, "a"), (0, "b"), (1, "x"), (1, "y")] {
        let group = nest.hierarchy.create(&nest.groups[above], name).unwrap();
        nest.groups.push(group);
    }
    let hierarchy = &nest.hierarchy;
    let lock = store.lock().unwrap();
    let rows =
        [("top", None), ("a", Some("top")), ("b", Some("top")), ("x", Some("a")), ("y", Some("a"))];
    for ((name, parent), group) in rows.into_iter().zip(&nest.groups) {
        let scope = Scope::Cgroup(group.path().to_owned());
        let options = options(parent.map(|_| Class::default()));
        store.install(&lock, hierarchy, name, &scope, &options, parent).unwrap();
        let limit = store.open(hierarchy, name).unwrap();
        assert!(limit.unhooked.is_empty(), "{name}: {:?}", limit.unhooked);
        // What it may use of its parent, from its first packet on.
        let part = limit.maps.read(Direction::Egress).unwrap().part;
        assert_eq!(part.is_some(), parent.is_some(), "{name}");
    }
    let pool_of = |name| store.place_of(name).unwrap().0;
    assert_eq!((pool_of("a"), pool_of("x")), (pool_of("b"), pool_of("y")));
    let pools: BTreeSet<_> = ["top", "a", "x"].into_iter().map(pool_of).collect();
    assert_eq!(pools.len(), 3);
    let program = |name: &str| {
        libbpf_rs::Link::open(store.root.join(name).join("egress")).unwrap().info().unwrap().prog_id
    };
    assert_eq!((program("a"), program("x")), (program("b"), program("y")));
    assert_ne!(program("a"), program("x"));

    // Each has its own settings and counters.
    let half = LimitOptions {
        egress: Some(VirtualQueueOptions::new("4mbit".parse().unwrap())),
        ..options(Some(Class::default()))
    };
    store.change(&lock, hierarchy, "a", &half).unwrap();
    let rate = |name: &str| store.open(hierarchy, name).unwrap().options().egress.unwrap().rate;
    assert_eq!(["a", "b"].map(|name| rate(name).to_string()), ["4mbit", "9mbit"]);

    // The next of the same name has other maps, so no child of the first joins its pool.
    for name in ["x", "y", "b", "a"] {
        store.remove(&lock, name).unwrap();
    }
    let entries =
        || store.entries().unwrap().into_iter().filter(|name| name.starts_with(POOL_PREFIX));
    assert_eq!(entries().count(), 1);
    store.remove(&lock, "top").unwrap();
    assert_eq!(entries().count(), 0);
    store.close(lock);
}

/// Limits that exempt the same prefixes share programs. One that then exempts others gets into another pool,
/// with what it has counted.
#[test]
fn root_limits_that_exempt_the_same_share_programs() {
    const TEST: &str = "root_limits_that_exempt_the_same_share_programs";
    let Some((_dir, _bpffs, store, mut nest)) = setup(TEST, "exempt") else { return };
    let rows = [
        ("a", "10.0.0.0/8,2001:db8::/32"),
        ("b", "2001:db8::/32,10.0.0.0/8,dscp:ef"),
        ("c", "192.168.0.0/16"),
        ("d", "dscp:ef"),
        ("e", "none"),
    ];
    for (name, _) in rows {
        let group = nest.hierarchy.create(&nest.groups[0], name).unwrap();
        nest.groups.push(group);
    }
    let hierarchy = &nest.hierarchy;
    let lock = store.lock().unwrap();
    let with = |exempt: &str| LimitOptions { exempt: exempt.parse().unwrap(), ..options(None) };
    let scope_of = |at: usize| Scope::Cgroup(nest.groups[at].path().to_owned());
    for (at, (name, exempt)) in rows.into_iter().enumerate() {
        store.install(&lock, hierarchy, name, &scope_of(at + 1), &with(exempt), None).unwrap();
    }
    let pool_of = |name| store.place_of(name).unwrap().0;
    assert_eq!(pool_of("a"), pool_of("b"));
    let pools: BTreeSet<_> = rows.map(|(name, _)| pool_of(name)).into_iter().collect();
    assert_eq!(pools.len(), 4, "{pools:?}");
    for (name, exempt) in rows {
        let limit = store.open(hierarchy, name).unwrap();
        assert_eq!(limit.options().exempt, exempt.parse().unwrap(), "{name}");
        assert_eq!(limit.maps.options().unwrap().exempt, exempt.parse().unwrap(), "{name}");
    }

    // Code points are changed in place; prefixes are those of the pool.
    store.change(&lock, hierarchy, "b", &with(rows[0].1)).unwrap();
    assert_eq!(pool_of("a"), pool_of("b"));
    let refused = store.change(&lock, hierarchy, "b", &with(rows[2].1));
    assert!(matches!(refused, Err(StoreError::OtherPrograms(_))), "{refused:?}");
    let counted = |name: &str| {
        let limit = store.open(hierarchy, name).unwrap();
        limit.maps.read(Direction::Egress).unwrap().counters.packets.iter().sum::<u64>()
    };
    let maps = store.open(hierarchy, "b").unwrap().maps;
    let cpus = libbpf_rs::num_possible_cpus().unwrap();
    let mut ones = vec![0; maps.counters.value_size() as usize];
    ones[..8].copy_from_slice(&1u64.to_ne_bytes());
    let key = (maps.at * intf::DIRECTIONS as u32).to_ne_bytes();
    maps.counters.update_percpu(&key, &vec![ones; cpus], libbpf_rs::MapFlags::ANY).unwrap();
    assert_eq!(counted("b"), cpus as u64);
    drop(maps);
    store.replace(&lock, hierarchy, "b", &scope_of(2), &with(rows[2].1), None).unwrap();
    assert_eq!(pool_of("b"), pool_of("c"));
    assert_eq!(counted("b"), cpus as u64);
    let limit = store.open(hierarchy, "b").unwrap();
    assert_eq!(limit.maps.options().unwrap().exempt, rows[2].1.parse().unwrap());
    for (name, _) in rows {
        store.remove(&lock, name).unwrap();
    }
    let pools = store.entries().unwrap().into_iter().filter(|name| name.starts_with(POOL_PREFIX));
    assert_eq!(pools.count(), 0);
    store.close(lock);
}

/// Two cgroups, the first with a limit of its own, the second a member of `web`, in one pool.
fn member_beside(store: &mut Store, nest: &mut Nest) -> [u64; 2] {
    for name in ["a", "b"] {
        let group = nest.hierarchy.create(&nest.groups[0], name).unwrap();
        nest.groups.push(group);
    }
    let [top, a, b] = &nest.groups[..] else { panic!("three cgroups") };
    let lock = store.lock().unwrap();
    let scope = Scope::Cgroup(a.path().to_owned());
    store.install(&lock, &nest.hierarchy, "keep", &scope, &options(None), None).unwrap();
    store.begin_with("web", &[b.path().to_owned()]);
    let scope = Scope::of_cgroup(&format!("{}/b*", top.path()));
    store.install(&lock, &nest.hierarchy, "web", &scope, &options(None), None).unwrap();
    store.close(lock);
    [a.id(), b.id()]
}

/// A slot that stays with a cgroup would keep it, and all around it, from the pool.
#[test]
fn root_a_killed_writer_leaves_no_slot_with_a_member() {
    const TEST: &str = "root_a_killed_writer_leaves_no_slot_with_a_member";
    let Some((_dir, _bpffs, mut store, mut nest)) = setup(TEST, "half") else { return };
    let [a, b] = member_beside(&mut store, &mut nest);
    let pool = SlotPool::open(&store.place_of("keep").unwrap().0).unwrap();
    assert!(pool.slot_of(a) != 0 && pool.slot_of(b) != 0);
    // As of a limit that was being built.
    let members = store.root.join("web/members");
    fs::rename(members.join(b.to_string()), members.join(format!("_{b}"))).unwrap();
    fs::rename(store.root.join("web"), store.root.join("_web")).unwrap();
    let lock = store.lock().unwrap();
    assert!(!store.root.join("_web").exists());
    assert!(pool.slot_of(a) != 0);
    assert_eq!(pool.slot_of(b), 0);
    store.remove(&lock, "keep").unwrap();
    store.close(lock);
}

/// The cgroup of a member has been made again, and is another limit's.
#[test]
fn root_a_limit_that_cannot_be_read_leaves_the_slot_of_another() {
    const TEST: &str = "root_a_limit_that_cannot_be_read_leaves_the_slot_of_another";
    let Some((_dir, _bpffs, mut store, mut nest)) = setup(TEST, "again") else { return };
    member_beside(&mut store, &mut nest);
    let path = nest.groups.pop().unwrap();
    let scope = Scope::Cgroup(path.path().to_owned());
    path.remove(std::time::Instant::now() + std::time::Duration::from_secs(60)).unwrap();
    nest.groups.push(nest.hierarchy.create(&nest.groups[0], "b").unwrap());
    let lock = store.lock().unwrap();
    store.install(&lock, &nest.hierarchy, "next", &scope, &options(None), None).unwrap();
    let (pool, slot) = store.place_of("next").unwrap();
    assert_eq!(store.place_of("web").unwrap().0, pool);
    fs::remove_file(store.root.join("web/queues")).unwrap();
    store.remove(&lock, "web").unwrap();
    let pool = SlotPool::open(&pool).unwrap();
    assert_eq!(pool.slot_of(nest.groups[2].id()), slot);
    store.remove(&lock, "next").unwrap();
    store.remove(&lock, "keep").unwrap();
    store.close(lock);
}
