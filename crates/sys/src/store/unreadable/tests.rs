//! Limits of schemes that this build does not have: what they have on devices is known by handles, names and
//! pins.

use std::os::fd::AsFd;

use libbpf_rs::MapType;
use tidegate_core::{Scheme, queue_options::VirtualQueueOptions};

use super::*;
use crate::{
    bpf::create_map,
    bpffs::PrivateBpffs,
    limit::settings::Settings,
    net::Netlink,
    schemes::LINKS,
    store::{
        around::tests::{foreign_program, on_lo},
        pins::{open_map, update},
        symlink,
    },
};

/// A number that no scheme has.
const NUMBER: u32 = 99;

/// How much of a limit this build cannot read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unread {
    Scheme,
    /// Its settings, too.
    Layout,
}

/// Two stores, in a network namespace with `lo`.
fn in_scene(test: &str, scene: &str, check: impl FnOnce(&Store, &Store) + Send) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {test}: needs root");
        return;
    }
    let netns = NetNs::create(&format!("tg-unread-{scene}-{}", std::process::id())).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
    let store = |name: &str| Store::at(bpffs.path().join(name));
    netns.run(|| check(&store("ours"), &store("theirs"))).unwrap();
}

/// Puts a limit on `lo`: `tbf` as on a port, for what leaves by it, the others in both directions.
fn put_on(store: &Store, name: &str, scope: &Scope, scheme: Scheme) -> Result<(), StoreError> {
    let queue = Some(VirtualQueueOptions::new("1gbit".parse().unwrap()));
    let egress = queue.filter(|_| scheme != Scheme::Tbf);
    let options = LimitOptions { egress, ingress: queue, scheme, ..LimitOptions::default() };
    let (lock, hierarchy) = (store.lock()?, Hierarchy::find().unwrap());
    let done = store.install(&lock, &hierarchy, name, scope, &options, None);
    store.close(lock);
    done
}

fn port() -> Scope {
    Scope::Port("lo".to_owned())
}

fn dev() -> Scope {
    Scope::Dev("lo".to_owned())
}

/// Makes a limit one of a scheme that this build does not have: number, name, and the names of programs.
fn forget_scheme(store: &Store, name: &str, scheme: Scheme, unread: Unread) {
    let dir = store.root.join(name);
    let intent = dir.join("intent");
    let text = fs::read_link(&intent).unwrap().to_str().unwrap().to_owned();
    let named = |scheme: &str| format!("\"scheme\":\"{scheme}\"");
    fs::remove_file(&intent).unwrap();
    symlink(Path::new(&text.replace(&named(scheme.name()), &named("later"))), &intent).unwrap();
    let map = open_map(&dir, "limit").unwrap();
    let mut settings = Settings::read(&map, 0).unwrap();
    settings.limit.scheme = NUMBER;
    settings.write(&map, 0).unwrap();
    for link in LINKS.iter().map(|link| dir.join(link)).filter(|link| link.exists()) {
        update(&link, foreign_program().as_fd()).unwrap();
    }
    if unread == Unread::Layout {
        fs::remove_file(dir.join("limit")).unwrap();
        create_map(MapType::Array, "limit", 8, 1).unwrap().pin(dir.join("limit")).unwrap();
    }
}

fn take_off(store: &Store, name: &str) {
    let lock = store.lock().unwrap();
    assert_eq!(lock.problems(), Vec::<String>::new());
    store.remove(&lock, name).unwrap();
    store.close(lock);
}

/// The qdiscs of `lo`, and how many ifb devices there are.
fn seen() -> (Vec<String>, usize) {
    let mut netlink = Netlink::open().unwrap();
    let index = netlink.index_of("lo").unwrap();
    let qdiscs = netlink.qdisc_stats(index).unwrap().into_iter();
    let ifbs = netlink.devices().unwrap().into_iter().filter(|device| device.kind == "ifb");
    (qdiscs.map(|qdisc| format!("{} {}", qdisc.kind, qdisc.handle)).collect(), ifbs.count())
}

#[test]
fn root_a_limit_of_an_unknown_scheme_comes_off_with_all_that_it_has() {
    const TEST: &str = "root_a_limit_of_an_unknown_scheme_comes_off_with_all_that_it_has";
    in_scene(TEST, "off", |store, _| {
        let before = seen();
        for scheme in [Scheme::Tbf, Scheme::Htb, Scheme::Spring, Scheme::Police] {
            for unread in [Unread::Scheme, Unread::Layout] {
                put_on(store, "later", &port(), scheme).unwrap();
                forget_scheme(store, "later", scheme, unread);
                let listing = store.list(&Hierarchy::find().unwrap()).unwrap();
                assert!(listing.limits.is_empty(), "{scheme}, {unread:?}");
                assert_eq!(listing.unreadable.len(), 1, "{scheme}, {unread:?}");
                take_off(store, "later");
                assert_eq!(seen(), before, "{scheme}, {unread:?}");
                assert!(on_lo().is_empty(), "{scheme}, {unread:?}: {}", on_lo());
            }
        }
    });
}

/// Whether `lo` has the `tbf` of a limit.
fn has_tbf() -> bool {
    seen().0.contains(&"tbf 7467:".to_owned())
}

#[test]
fn root_others_keep_their_qdisc_beside_a_limit_of_an_unknown_scheme() {
    const TEST: &str = "root_others_keep_their_qdisc_beside_a_limit_of_an_unknown_scheme";
    in_scene(TEST, "beside", |ours, theirs| {
        let before = seen();
        for unread in [Unread::Scheme, Unread::Layout] {
            for other in [ours, theirs] {
                put_on(other, "queue", &port(), Scheme::Tbf).unwrap();
                put_on(ours, "later", &dev(), Scheme::Police).unwrap();
                forget_scheme(ours, "later", Scheme::Police, unread);
                take_off(ours, "later");
                let hierarchy = Hierarchy::find().unwrap();
                let queue = other.open(&hierarchy, "queue").unwrap();
                assert!(queue.unhooked.is_empty() && has_tbf(), "{unread:?}: {:?}", queue.unhooked);
                take_off(other, "queue");
                assert_eq!(seen(), before, "{unread:?}");
            }
        }
    });
}

#[test]
fn root_a_limit_of_an_unknown_scheme_keeps_its_qdisc() {
    const TEST: &str = "root_a_limit_of_an_unknown_scheme_keeps_its_qdisc";
    in_scene(TEST, "keeps", |ours, theirs| {
        let before = seen();
        for unread in [Unread::Scheme, Unread::Layout] {
            put_on(ours, "later", &port(), Scheme::Tbf).unwrap();
            forget_scheme(ours, "later", Scheme::Tbf, unread);
            for other in [ours, theirs] {
                put_on(other, "police", &dev(), Scheme::Police).unwrap();
                assert!(has_tbf(), "{unread:?}: taken for what a dead process left");
                take_off(other, "police");
                assert!(has_tbf(), "{unread:?}: taken for the qdisc of another limit");
                assert_eq!(other.orphans(), Vec::<String>::new(), "{unread:?}");
            }
            let refused = put_on(ours, "queue", &port(), Scheme::Tbf);
            assert!(matches!(refused, Err(StoreError::ScopeUnreadable { .. })), "{refused:?}");
            let refused = put_on(theirs, "queue", &port(), Scheme::Tbf);
            assert!(matches!(refused, Err(StoreError::OtherStore { .. })), "{refused:?}");
            assert!(has_tbf(), "{unread:?}");
            take_off(ours, "later");
            assert_eq!(seen(), before, "{unread:?}");
        }
    });
}
