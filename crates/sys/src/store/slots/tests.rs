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

/// Children of one parent are in a pool, whoever the parent is: one load of the programs serves them all.
#[test]
fn root_limits_inside_one_limit_share_programs() {
    const TEST: &str = "root_limits_inside_one_limit_share_programs";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
    let store = Store::at(bpffs.path().join("t"));
    let mut nest = Nest::new("share", 1);
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
        let queue = limit.maps.read(Direction::Egress).unwrap().queue;
        assert_eq!(queue.cost_now != 0, parent.is_some(), "{name}");
    }
    let pool_of = |name| store.place_of(name).unwrap().0;
    assert_eq!((pool_of("a"), pool_of("x")), (pool_of("b"), pool_of("y")));
    let pools: BTreeSet<_> = ["top", "a", "x"].into_iter().map(pool_of).collect();
    assert_eq!(pools.len(), 3);
    let program = |name: &str| {
        Link::open(store.root.join(name).join("egress")).unwrap().info().unwrap().prog_id
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
