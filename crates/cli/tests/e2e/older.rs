//! Limits whose maps cannot be read, as those that another version has pinned: one bad row, nobody else is
//! disturbed, and they come off whole.

use std::{net::TcpListener, path::Path};

use tidegate_sys::{
    cgroup::Cgroup,
    libbpf_rs::{MapCore, MapHandle, MapType, libbpf_sys},
    net::diag,
};

use crate::{
    common::{Guard, Objects, Place, wait_for},
    edt::{Bed, into, ok},
    htb::links,
    need_root,
    traffic::{accept, sender},
};

/// Puts a map of another size in the place of a pinned one, as another version would have it.
pub fn spoil(pin: &Path) {
    let was = MapHandle::from_pinned_path(pin).unwrap();
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let bytes = was.value_size() + 8;
    let mut other =
        MapHandle::create(MapType::Array, Some("limit"), 4, bytes, 3, &options).unwrap();
    std::fs::remove_file(pin).unwrap();
    other.pin(pin).unwrap();
}

#[test]
fn root_a_limit_that_cannot_be_read_disturbs_no_other() {
    need_root!();
    let place = Place::new();
    let groups = ["old", "good", "new", "more"].map(|name| place.child(name));
    let [old, good, new, more] = groups.each_ref().map(Cgroup::path);
    let add = ["limit", "add", "old", "--cgroup", old, "--egress", "50mbit"];
    place.ok(&add);
    place.ok(&["limit", "add", "good", "--cgroup", good, "--egress", "50mbit"]);
    let objects = Objects::on(&groups[0]);
    spoil(&place.store().join("old/limit"));

    let table = place.ok(&["status"]);
    assert!(table.contains("BROKEN") && table.contains("in force"), "{table}");
    assert!(table.contains("`limit` has another layout"), "{table}");
    assert!(table.contains("tidegate limit del old"), "{table}");
    let status = place.json(&["status", "--json"]);
    let row = |name: &str| {
        let rows = status["limits"].as_array().unwrap();
        rows.iter().find(|row| row["name"] == name).unwrap().clone()
    };
    assert_eq!(
        (&row("old")["state"], &row("good")["state"]),
        (&"broken".into(), &"in_force".into())
    );
    assert_eq!(row("old")["cgroup"], old);
    assert!(row("old")["reason"].as_str().unwrap().contains("another layout"));
    assert_eq!(place.json(&["limit", "show", "old", "--json"])["state"], "broken");
    let shown = place.ok(&["monitor", "--count", "1", "--interval", "10ms"]);
    assert!(shown.contains("BROKEN") && shown.contains("good"), "{shown}");
    for group in [old, good] {
        let said = place.ok(&["explain", group, "--sample", "10ms"]);
        assert_eq!(said.contains("BROKEN"), group == old, "{said}");
    }

    // The others are changed and joined as ever.
    place.ok(&["limit", "set", "good", "--egress", "20mbit"]);
    place.ok(&["limit", "add", "new", "--cgroup", new, "--egress", "1mbit"]);
    let limit = |name: &str, group: &str| {
        format!(
            "[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{group}\" }}\negress = \"9mbit\"\n"
        )
    };
    let file = place.file("a.toml", &(limit("good", good) + &limit("more", more)));
    let file = file.to_str().unwrap();
    let (code, _) = place.refused(&["plan", file]);
    assert_eq!(code, 3);
    let done = place.ok(&["apply", file]);
    assert!(done.contains("1 added, 1 changed, 0 removed"), "{done}");
    assert!(done.contains("old: not in the file, left alone"), "{done}");

    // It says what to type, whatever is asked of it.
    let (_, said) = place.refused(&["limit", "set", "old", "--egress", "1mbit"]);
    assert!(said.contains("cannot be read") && said.contains("tidegate limit del old"), "{said}");
    let (_, said) = place.refused(&["limit", "add", "b", "--cgroup", old, "--egress", "1mbit"]);
    assert!(said.contains("already has limit `old`") && said.contains("limit del old"), "{said}");
    // Both of what is advised works.
    place.ok(&add);
    assert_eq!(place.json(&["limit", "show", "old", "--json"])["state"], "in_force");
    objects.wait_until_gone();
    let objects = Objects::on(&groups[0]);
    assert!(objects.is_whole());
    spoil(&place.store().join("old/queues"));
    assert_eq!(place.json(&["limit", "show", "old", "--json"])["state"], "broken");
    place.ok(&["limit", "del", "old"]);
    objects.wait_until_gone();
    let file = place.file("b.toml", &limit("good", good));
    spoil(&place.store().join("new/counters"));
    let done = place.ok(&["apply", "--prune", file.to_str().unwrap()]);
    assert!(done.contains("- new on") && done.contains("2 removed"), "{done}");
}

/// The rate in bytes a second at which the one connection of a cgroup may be paced.
pub fn pacing(place: &Place, group: &Cgroup) -> Option<u64> {
    let mine = |socket: &diag::TcpSocket| socket.cgroup_id == group.id();
    let found = diag::tcp_sockets(&place.hierarchy, group, mine).unwrap();
    Some(found.sockets.first()?.info.max_pacing_bytes_s)
}

#[test]
fn root_connections_of_a_limit_that_cannot_be_read_are_given_back() {
    need_root!();
    for verb in [&["detach"][..], &["limit", "del", "old"]] {
        let place = Place::new();
        let group = place.child("old");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let flags = ["--cgroup", group.path(), "--egress", "20mbit", "--loopback"];
        place.ok(&[&["limit", "add", "old"], &flags[..]].concat());
        let mut command = place.inside(&group, "env");
        sender(&mut command, &format!("stream {} 1000", listener.local_addr().unwrap()));
        let _sender = Guard(command.spawn().unwrap());
        let mut stream = accept(&listener);
        std::thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
        wait_for("a paced connection", || pacing(&place, &group).filter(|rate| *rate < 2_600_000));
        spoil(&place.store().join("old/limit"));
        let objects = Objects::on(&group);
        place.ok(verb);
        wait_for("a connection that is not paced", || {
            pacing(&place, &group).filter(|rate| *rate >= u64::from(u32::MAX))
        });
        objects.wait_until_gone();
        assert!(!place.store().exists());
    }
}

#[test]
fn root_devices_of_a_limit_that_cannot_be_read_are_as_before() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    for words in [
        "--dev eth0 --scheme htb --egress 20mbit --ingress 20mbit",
        "--dev eth0 --scheme htb --egress 20mbit",
        "--dev eth0 --scheme htb --ingress 20mbit",
        "--port eth0 --scheme spring --egress 20mbit --ingress 20mbit",
        "--dev eth0 --scheme police --egress 20mbit --ingress 20mbit",
        "--dev eth0 --scheme police --egress 20mbit --ingress 20mbit --match 10.97.0.0/24",
        "--dev eth0 --scheme police --ingress 20mbit --hook xdp",
    ] {
        for elsewhere in [false, true] {
            ok(&place, &bed, &format!("limit add old {words}"));
            spoil(&place.store().join("old/limit"));
            // From another network namespace, too.
            match elsewhere {
                false => drop(ok(&place, &bed, "limit del old")),
                true => drop(place.ok(&["detach"])),
            }
            assert_eq!(bed.qdiscs(), before, "{words}");
            assert!(!links(&bed).contains("tgifb"), "{words}: {}", links(&bed));
            let mut tc = into(&bed.sender, "tc");
            let filters = tc.args(["filter", "show", "dev", "eth0", "ingress"]).output().unwrap();
            assert!(filters.stdout.is_empty(), "{words}: {filters:?}");
            assert!(!place.store().exists(), "{words}");
        }
    }
}

#[test]
fn root_what_a_dead_process_left_on_devices_goes_with_detach() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let words = "limit add up --dev eth0 --scheme htb --egress 20mbit --ingress 20mbit";
    ok(&place, &bed, words);
    // Another store's are left alone: its pins are to be seen.
    let other = Place::new();
    assert!(ok(&other, &bed, "detach").contains("nothing to take off"));
    assert!(bed.qdiscs().contains("htb 7467:"), "{}", bed.qdiscs());
    // All that a process keeps goes with it; what is left is on devices.
    std::fs::remove_dir_all(place.store()).unwrap();
    wait_for("the end of the links", || {
        let said = ok(&place, &bed, "detach --dry-run");
        said.contains("would remove from device eth0: qdisc htb 7467:, ifb device").then_some(())
    });
    assert!(ok(&place, &bed, "detach").contains("removed what a process that died had left"));
    assert!(!bed.qdiscs().contains("htb 7467:"), "{}", bed.qdiscs());
    assert!(!links(&bed).contains("tgifb"), "{}", links(&bed));
    ok(&place, &bed, words);
    ok(&place, &bed, "detach");
}
