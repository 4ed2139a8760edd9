use std::{
    process::Command,
    time::{Duration, Instant},
};

use tidegate_core::{Class, Direction, Scheme, Scope, queue_options::VirtualQueueOptions};

use super::*;
use crate::{
    bpffs::PrivateBpffs,
    intf,
    limit::LimitOptions,
    schemes::nrm::tree_tests::{Nest, queue_of},
    store::{BUILDING, StoreLock},
};

/// A store of its own and a cgroup with one inside it.
struct Scene {
    nest: Nest,
    store: Store,
    _bpffs: PrivateBpffs,
    _dir: tempfile::TempDir,
}

impl Scene {
    fn new(name: &str) -> Option<Scene> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP {name}: needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
        let store = Store::at(bpffs.path().join("t"));
        Some(Scene { nest: Nest::new(name, 2), store, _bpffs: bpffs, _dir: dir })
    }

    fn scope(&self, at: usize) -> Scope {
        Scope::Cgroup(self.nest.groups[at].path().to_owned())
    }

    fn put(
        &self,
        lock: &StoreLock,
        name: &str,
        at: usize,
        options: &LimitOptions,
        parent: Option<&str>,
    ) -> Result<(), StoreError> {
        self.store.install(lock, &self.nest.hierarchy, name, &self.scope(at), options, parent)
    }

    /// Each limit of a cgroup is there once, and in this order.
    #[track_caller]
    fn is_order(&self, at: usize, names: &[&str]) {
        let cgroup = &self.nest.groups[at];
        assert_eq!(self.store.order_on(cgroup).unwrap(), [names; 3]);
        for link in LINKS {
            assert_eq!(query::in_order(cgroup, link).unwrap().len(), names.len(), "{link}");
        }
        for name in names {
            let limit = self.store.open(&self.nest.hierarchy, name).unwrap();
            assert!(limit.unhooked.is_empty(), "{name}: {:?}", limit.unhooked);
        }
        assert!(!self.store.root.join(ON_ITS_WAY).exists());
    }
}

fn options(is_child: bool) -> LimitOptions {
    let queue = Some(VirtualQueueOptions::new("9mbit".parse().unwrap()));
    LimitOptions {
        egress: queue,
        ingress: queue,
        scheme: Scheme::Pace,
        class: is_child.then(Class::default),
        ..LimitOptions::default()
    }
}

/// One that has programs of its own.
fn alone(is_child: bool) -> LimitOptions {
    let mut options = options(is_child);
    options.exempt.prefixes = "10.0.0.0/8".parse().unwrap();
    options
}

#[test]
fn root_limits_on_one_cgroup_run_innermost_first() {
    let Some(scene) = Scene::new("order") else { return };
    let store = &scene.store;
    let mut lock = store.lock().unwrap();
    // Those that share programs, those that do not, and both.
    for [top, mid, leaf] in [
        [options(false), options(true), options(true)],
        [alone(false), alone(true), alone(true)],
        [options(false), alone(true), options(true)],
    ] {
        scene.put(&lock, "top", 0, &top, None).unwrap();
        scene.put(&lock, "mid", 0, &mid, Some("top")).unwrap();
        scene.is_order(0, &["mid", "top"]);
        scene.put(&lock, "leaf", 0, &leaf, Some("mid")).unwrap();
        scene.is_order(0, &["leaf", "mid", "top"]);
        // A child that comes anew; then parents, and the next writer puts those inside them on again.
        let (group, hierarchy) = (scene.scope(0), &scene.nest.hierarchy);
        for (name, options, parent) in
            [("leaf", &leaf, Some("mid")), ("mid", &mid, Some("top")), ("top", &top, None)]
        {
            store.replace(&lock, hierarchy, name, &group, options, parent).unwrap();
            drop(lock);
            lock = store.lock().unwrap();
            assert_eq!(lock.problems(), [""; 0]);
            scene.is_order(0, &["leaf", "mid", "top"]);
        }
        for name in ["leaf", "mid", "top"] {
            let limit = store.open(hierarchy, name).unwrap();
            assert!(limit.maps().read(Direction::Egress).is_ok());
            store.remove(&lock, name).unwrap();
        }
    }
    store.close(lock);
}

/// An inner cgroup is as it was; a limit that is there on both cgroups has a link on each.
#[test]
fn root_a_member_joins_before_its_parents() {
    let Some(scene) = Scene::new("member-order") else { return };
    let (store, hierarchy) = (&scene.store, &scene.nest.hierarchy);
    let paths: Vec<_> = scene.nest.groups.iter().map(|group| group.path().to_owned()).collect();
    let lock = store.lock().unwrap();
    let select = |name: &str| Scope::of_cgroup(&format!("{}/{name}*", paths[0]));
    scene.put(&lock, "top", 0, &options(false), None).unwrap();
    store.install(&lock, hierarchy, "mid", &select("m"), &options(true), Some("top")).unwrap();
    store.install(&lock, hierarchy, "leaf", &select("l"), &options(true), Some("mid")).unwrap();
    store.set_members(&lock, hierarchy, "mid", &paths[..1]).unwrap();
    store.set_members(&lock, hierarchy, "leaf", &paths[..1]).unwrap();
    scene.is_order(0, &["leaf", "mid", "top"]);
    // A parent that goes and comes again is behind its child.
    store.set_members(&lock, hierarchy, "mid", &[]).unwrap();
    scene.is_order(0, &["leaf", "top"]);
    store.set_members(&lock, hierarchy, "mid", &paths[..1]).unwrap();
    scene.is_order(0, &["leaf", "mid", "top"]);
    store.set_members(&lock, hierarchy, "leaf", &paths[1..]).unwrap();
    scene.is_order(0, &["mid", "top"]);
    scene.is_order(1, &["leaf"]);
    store.set_members(&lock, hierarchy, "leaf", &[]).unwrap();
    store.set_members(&lock, hierarchy, "mid", &paths[1..]).unwrap();
    let refused = store.set_members(&lock, hierarchy, "leaf", &paths[..1]).unwrap_err();
    assert!(refused.to_string().contains("not inside its parent `mid`"), "{refused}");
    for name in ["leaf", "mid", "top"] {
        store.remove(&lock, name).unwrap();
    }
    store.close(lock);
}

/// All traffic of the cgroup is the child's: the parent finds no packet that belongs to no child.
#[test]
fn root_a_parent_on_the_cgroup_of_its_child_has_no_traffic_of_its_own() {
    let Some(scene) = Scene::new("own-class") else { return };
    let (store, hierarchy) = (&scene.store, &scene.nest.hierarchy);
    let lock = store.lock().unwrap();
    for make in [options as fn(bool) -> LimitOptions, alone] {
        let make = |is_child| LimitOptions { loopback: true, ..make(is_child) };
        scene.put(&lock, "top", 0, &make(false), None).unwrap();
        scene.put(&lock, "child", 0, &make(true), Some("top")).unwrap();
        // Each datagram is of a new socket.
        let send = || {
            let script = "echo $$ > \"$0/cgroup.procs\"; for i in $(seq 100); do \
                          echo > /dev/udp/127.0.0.1/9 2>/dev/null; done; true";
            let mut shell = Command::new("bash");
            let done = shell.args(["-c", script]).arg(scene.nest.groups[0].absolute()).status();
            assert!(done.unwrap().success());
        };
        let queue = |name: &str, index: usize| {
            let limit = store.open(hierarchy, name).unwrap();
            queue_of(&limit.maps, index)
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while queue("top", 0).children_until_ns == 0 {
            assert!(Instant::now() < deadline, "the parent does not know its child");
            send();
        }
        let before = [queue("top", 0).finish_ns, queue("child", 0).finish_ns];
        send();
        let after = [queue("top", 0).finish_ns, queue("child", 0).finish_ns];
        assert!(before[0] < after[0] && before[1] < after[1], "{before:?} {after:?}");
        let own = queue("top", intf::DIRECTIONS);
        assert_eq!((own.finish_ns, own.epoch), (0, 0));
        store.remove(&lock, "child").unwrap();
        store.remove(&lock, "top").unwrap();
    }
    store.close(lock);
}

#[test]
fn root_siblings_do_not_share_a_cgroup() {
    let Some(scene) = Scene::new("sibling-order") else { return };
    let store = &scene.store;
    let lock = store.lock().unwrap();
    for top in [options(false), alone(false)] {
        scene.put(&lock, "top", 0, &top, None).unwrap();
        scene.put(&lock, "a", 0, &options(true), Some("top")).unwrap();
        for other in [options(true), alone(true)] {
            let refused = scene.put(&lock, "b", 0, &other, Some("top")).unwrap_err();
            assert!(matches!(&refused, StoreError::ScopeTaken { name, .. } if name == "a"));
        }
        let refused = scene.put(&lock, "b", 0, &options(false), None).unwrap_err();
        assert!(matches!(refused, StoreError::ScopeTaken { .. }), "{refused}");
        scene.is_order(0, &["a", "top"]);
        store.remove(&lock, "a").unwrap();
        store.remove(&lock, "top").unwrap();
    }
    store.close(lock);
}

/// Wherever a writer dies that attaches a parent again, the next one finds one link of it, in its place.
#[test]
fn root_what_a_dead_writer_leaves_is_put_in_order() {
    let Some(scene) = Scene::new("dead-order") else { return };
    let (store, cgroup) = (&scene.store, &scene.nest.groups[0]);
    let mut lock = store.lock().unwrap();
    for (name, parent) in [("top", None), ("mid", Some("top")), ("leaf", Some("mid"))] {
        scene.put(&lock, name, 0, &options(parent.is_some()), parent).unwrap();
    }
    let attach = |name: &str, link: &'static str| {
        let program = program_of(&store.root.join(name).join(link), cgroup).unwrap();
        bpf::attach(Program::fd_from_id(program).unwrap().as_fd(), link, cgroup).unwrap()
    };
    // It has pinned the new link.
    let way = store.root.join(ON_ITS_WAY);
    fs::create_dir(&way).unwrap();
    query::pin(attach("mid", "ingress").as_fd(), &way.join("ingress")).unwrap();
    assert_eq!(query::in_order(cgroup, "ingress").unwrap().len(), 4);
    // The new one has the pin of the earlier one, `mid` is behind `top`, and the child that was to come goes.
    let pin = store.root.join("mid/egress");
    query::pin(attach("mid", "egress").as_fd(), &way.join("egress")).unwrap();
    let earlier = Link::open(&pin).unwrap();
    fs::rename(way.join("egress"), &pin).unwrap();
    earlier.detach().unwrap();
    let built = store.root.join(format!("{BUILDING}new"));
    fs::create_dir(&built).unwrap();
    drop(lock);
    lock = store.lock().unwrap();
    assert_eq!(lock.problems(), [""; 0]);
    assert!(!built.exists());
    scene.is_order(0, &["leaf", "mid", "top"]);
    for name in ["leaf", "mid", "top"] {
        store.remove(&lock, name).unwrap();
    }
    store.close(lock);
}
