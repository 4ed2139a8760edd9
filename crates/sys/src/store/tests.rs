use super::*;

#[test]
fn a_cgroup_is_above_those_in_it() {
    for (above, below) in [("/", "/a"), ("a", "/a/b"), ("/a", "a/b/c")] {
        assert!(is_above(above, below) && !is_above(below, above), "{above} {below}");
    }
    for (one, other) in [("a", "a"), ("a", "ab"), ("a/b", "a/bc"), ("a", "b"), ("/", "")] {
        assert!(!is_above(one, other), "{one} {other}");
    }
}

#[test]
fn names_are_what_the_bpf_file_system_takes() {
    for good in ["backup", "a", "web-1", "A_b", "9lives", &"x".repeat(63)] {
        assert!(check_name(good).is_ok(), "{good}");
    }
    for bad in ["", "a.b", "a/b", "_x", "-x", "ü", &"x".repeat(64), ".."] {
        assert!(check_name(bad).is_err(), "{bad}");
    }
}

#[test]
fn root_a_writer_waits_for_others_as_long_as_it_says() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_a_writer_waits_for_others_as_long_as_it_says: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let bpffs = crate::bpffs::PrivateBpffs::mount(dir.path()).unwrap();
    let mut store = Store::at(bpffs.path().join("t"));
    let held = store.clone().lock().unwrap();
    store.patience(Duration::ZERO);
    let busy = store.lock().unwrap_err();
    assert!(matches!(busy, StoreError::Busy(_)), "{busy}");
    store.patience(Duration::from_secs(60));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| store.lock().map(drop));
        drop(held);
        waits.join().unwrap().unwrap();
    });
}
