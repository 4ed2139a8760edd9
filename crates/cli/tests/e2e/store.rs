//! The store keeps its promises when something is wrong: limits that cannot be read, a journal that cannot be
//! written, devices of other network namespaces, limits of other stores.

use std::{fs, net::TcpListener, path::Path};

use tidegate_sys::{
    cgroup::Cgroup,
    libbpf_rs::{MapCore, MapFlags, MapHandle},
    net::Netlink,
};

use crate::{
    common::{Guard, Objects, Place, skip, wait_for},
    edt::{Bed, into, ok, refused},
    htb::{json, links},
    kill::programs_of,
    need_root,
    older::{pacing, spoil},
    place::Host,
    tracer,
    traffic::{accept, sender},
};

const ROOT: &str = "limit add root --dev eth0 --scheme htb --egress 20mbit --ingress 20mbit";

/// The classes of HTB of the sender's device, without their statistics. A leaf of `fq_codel` has one for each
/// flow that waits in it at the moment.
fn classes(bed: &Bed) -> Vec<String> {
    let shown = String::from_utf8(bed.tc("class show dev eth0").stdout).unwrap();
    let classes = shown.lines().filter(|line| !line.starts_with("class fq_codel "));
    let mut classes: Vec<_> = classes.map(|line| line.trim().to_owned()).collect();
    classes.sort();
    classes
}

/// The classes of one slot: that of a limit and its leaf.
fn classes_of(bed: &Bed, slot: u16) -> Vec<String> {
    let names = [slot << 4 | 1, slot << 4].map(|minor| format!("class htb 7467:{minor:x} "));
    let mut classes = classes(bed);
    classes.retain(|class| names.iter().any(|name| class.starts_with(name)));
    classes
}

fn slot_of(place: &Place, name: &str) -> u16 {
    let slot = fs::read_link(place.store().join(name).join("slot")).unwrap();
    slot.to_str().unwrap().parse().unwrap()
}

/// The slot to which the programs of a tree send the packets of a cgroup.
fn member(place: &Place, root: &str, group: &Cgroup) -> Option<u32> {
    let members = MapHandle::from_pinned_path(place.store().join(root).join("members")).unwrap();
    let slot = members.lookup(&group.id().to_ne_bytes(), MapFlags::ANY).unwrap()?;
    Some(u32::from_ne_bytes(slot.try_into().unwrap()))
}

fn add_inside(place: &Place, bed: &Bed, name: &str, group: &Cgroup) {
    let group = group.path();
    let words =
        format!("limit add {name} --cgroup {group} --parent root --scheme htb --egress 5mbit");
    ok(place, bed, &words);
}

/// State of each limit, by name.
fn states(place: &Place, bed: &Bed) -> Vec<(String, String)> {
    let (_, status, _) = crate::edt::tidegate(place, bed, "status --json");
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let word = |limit: &serde_json::Value, key: &str| limit[key].as_str().unwrap().to_owned();
    let limits = status["limits"].as_array().unwrap().iter();
    limits.map(|limit| (word(limit, "name"), word(limit, "state"))).collect()
}

#[test]
fn root_htb_a_child_that_cannot_be_read_keeps_its_class() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    let groups = ["x", "y", "z", "inside"].map(|name| match name {
        "inside" => {
            let above = place.hierarchy.open(&format!("{}/x", place.group.path())).unwrap();
            place.hierarchy.create(&above, name).unwrap()
        }
        name => place.child(name),
    });
    let [x, y, z, inside] = groups.each_ref();
    ok(&place, &bed, ROOT);
    add_inside(&place, &bed, "b", x);
    add_inside(&place, &bed, "c", y);
    // One that can be read, inside the one that cannot.
    let words = "--scheme htb --egress 3mbit";
    ok(&place, &bed, &format!("limit add i --cgroup {} --parent b {words}", inside.path()));
    let (slot, within) = (slot_of(&place, "b"), slot_of(&place, "i"));
    let was = [classes_of(&bed, slot), classes_of(&bed, within)];
    assert!(was.iter().all(|classes| classes.len() == 2), "{was:?}");
    spoil(&place.store().join("b/limit"));
    let is_as_it_was = || {
        assert_eq!([classes_of(&bed, slot), classes_of(&bed, within)], was);
        assert_eq!(member(&place, "root", x), Some(slot.into()));
        assert_eq!(member(&place, "root", inside), Some(within.into()));
    };
    // Whatever becomes of its siblings and of the one that it is inside of.
    ok(&place, &bed, "limit set c --egress 4mbit");
    is_as_it_was();
    add_inside(&place, &bed, "d", z);
    assert!(![slot, within].contains(&slot_of(&place, "d")), "a slot of its own");
    is_as_it_was();
    ok(&place, &bed, "limit set root --egress 19mbit");
    ok(&place, &bed, "limit del d");
    is_as_it_was();
    // One inside it cannot change either, and says why.
    let said = refused(&place, &bed, "limit set i --egress 2mbit");
    assert!(said.contains("`b` cannot be read"), "{said}");
    is_as_it_was();
    ok(&place, &bed, "limit del i");
    ok(&place, &bed, "limit del b");
    assert_eq!(classes_of(&bed, slot), [""; 0]);
    assert_eq!(member(&place, "root", x), None);
    assert_eq!(classes_of(&bed, slot_of(&place, "c")).len(), 2);
    ok(&place, &bed, "detach");
    assert_eq!(bed.qdiscs(), before);
}

/// Both of what is advised for a tree that cannot be read works, and nothing is lost meanwhile.
#[test]
fn root_htb_a_tree_that_cannot_be_read_is_put_on_anew() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    let x = place.child("x");
    let spoil_both = || {
        ok(&place, &bed, ROOT);
        add_inside(&place, &bed, "b", &x);
        spoil(&place.store().join("root/limit"));
        spoil(&place.store().join("b/limit"));
    };
    let in_force = |name: &str| (name.to_owned(), "in_force".to_owned());
    spoil_both();
    ok(&place, &bed, ROOT);
    assert_eq!(states(&place, &bed), [("b".to_owned(), "broken".to_owned()), in_force("root")]);
    add_inside(&place, &bed, "b", &x);
    assert_eq!(states(&place, &bed), [in_force("b"), in_force("root")]);
    assert_eq!(classes_of(&bed, slot_of(&place, "b")).len(), 2);
    ok(&place, &bed, "detach");
    assert_eq!(bed.qdiscs(), before);

    spoil_both();
    let spec = format!(
        "[[limit]]\nname = \"root\"\nscope = {{ dev = \"eth0\" }}\negress = \"20mbit\"\n\
         scheme = \"htb\"\n\n[[limit]]\nname = \"b\"\nscope = {{ cgroup = \"{}\" }}\n\
         parent = \"root\"\nscheme = \"htb\"\n",
        x.path()
    );
    let file = place.file("tree.toml", &spec);
    ok(&place, &bed, &format!("apply {}", file.display()));
    assert_eq!(states(&place, &bed), [in_force("b"), in_force("root")]);
    ok(&place, &bed, "detach");
    assert_eq!(bed.qdiscs(), before);
    assert!(!links(&bed).contains("tgifb"), "{}", links(&bed));
}

/// One that cannot be read still limits: it goes when its successor is there.
#[test]
fn root_a_limit_that_cannot_be_read_holds_until_another_does() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let place = Place::new();
    let groups = ["x", "y"].map(|name| place.child(name));
    let limit = |name: &str, group: &Cgroup| {
        let group = group.path();
        format!(
            "[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{group}\" }}\negress = \"9mbit\"\n"
        )
    };
    let [x, y] = groups.each_ref();
    let spec = place.file("two.toml", &(limit("a", x) + &limit("b", y)));
    // Of another name, too.
    let renamed = place.file("renamed.toml", &(limit("n", x) + &limit("m", y)));
    for to in [&spec, &renamed] {
        place.ok(&["apply", "--prune", spec.to_str().unwrap()]);
        spoil(&place.store().join("a/limit"));
        spoil(&place.store().join("b/queues"));
        let mut command = place.tidegate();
        command.args(["apply", "--prune"]).arg(to).stdout(std::process::Stdio::null());
        let ended = tracer::watch(command, |change| {
            let held = groups.each_ref().map(|group| Objects::on(group).links());
            assert!(!held.contains(&0), "{held:?} links before change {change}");
            None
        });
        assert_eq!(ended.code, Some(0));
        for group in &groups {
            assert_eq!(Objects::on(group).links(), 3);
        }
    }
}

/// The same on a device, where both can be: the old one has a link of its own, and so has the new one.
#[test]
fn root_a_policer_that_cannot_be_read_holds_until_another_does() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let (place, bed) = (Place::new(), Bed::new());
    let index = bed.sender.run(|| Netlink::open().unwrap().index_of("eth0").unwrap()).unwrap();
    let programs = || bed.sender.run(|| programs_of(index)).unwrap();
    let add = "limit add a --dev eth0 --scheme police --egress 20mbit";
    ok(&place, &bed, add);
    let before = programs();
    if before[1] == "0" {
        return skip("this kernel has no tcx: a filter has one place");
    }
    spoil(&place.store().join("a/limit"));
    let mut command = into(&bed.sender, env!("CARGO_BIN_EXE_tidegate"));
    command.env("TIDEGATE_BPFFS", place.store()).args(add.split(' '));
    command.stdout(std::process::Stdio::null());
    let ended = tracer::watch(command, |change| {
        assert_ne!(programs()[1], "0", "before change {change}");
        None
    });
    assert_eq!((ended.code, programs()), (Some(0), before));
    assert_eq!(states(&place, &bed), [("a".to_owned(), "in_force".to_owned())]);
    ok(&place, &bed, "detach");
    assert_eq!(programs(), ["0", "0"].map(str::to_owned));
}

/// A connection that sends nothing hears of nothing: what a limit sets on it stays until it is set anew.
#[test]
fn root_open_connections_stay_paced_when_another_limit_goes() {
    need_root!();
    let place = Place::new();
    let group = place.child("in");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = place.inside(&group, "env");
    sender(&mut command, &format!("idle {} 0", listener.local_addr().unwrap()));
    let _idle = Guard(command.spawn().unwrap());
    let _stream = accept(&listener);
    let limit = |name: &str, group: &Cgroup, rate: &str| {
        let group = group.path();
        format!(
            "[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{group}\" }}\negress = \"{rate}\"\n\
             loopback = true\n"
        )
    };
    let apply = |spec: &str| {
        let file = place.file("limits.toml", spec);
        place.ok(&["apply", "--prune", file.to_str().unwrap()]);
    };
    let paced = |below: u64, when: &str| {
        let rate = pacing(&place, &group).unwrap();
        assert!(rate < below / 8 && rate > below / 16, "{when}: {rate} byte/s");
    };
    apply(&limit("a", &group, "20mbit"));
    paced(20_000_000, "limited");
    apply(&limit("b", &group, "20mbit"));
    paced(20_000_000, "renamed");
    // The limit around it was not asked for anything while the inner one held less.
    apply(&(limit("b", &group, "20mbit") + &limit("outer", &place.group, "30mbit")));
    paced(20_000_000, "inside another");
    place.ok(&["limit", "del", "b"]);
    paced(30_000_000, "when the inner one has gone");
    place.ok(&["limit", "add", "c", "--cgroup", group.path(), "--egress", "40mbit", "--loopback"]);
    paced(30_000_000, "with another inner one");
    place.ok(&["limit", "del", "outer"]);
    paced(40_000_000, "when the outer one has gone");
    place.ok(&["detach"]);
    assert!(pacing(&place, &group).unwrap() >= u64::from(u32::MAX));
}

/// A tree is changed on its own device, from whichever network namespace.
#[test]
fn root_htb_a_tree_is_changed_where_its_device_is() {
    need_root!();
    let (place, bed, other, elsewhere) = (Place::new(), Bed::new(), Place::new(), Bed::new());
    let x = place.child("x");
    let theirs = other.child("x");
    ok(&place, &bed, ROOT);
    add_inside(&place, &bed, "b", &x);
    // Another store has the device of the same name and number there.
    ok(&other, &elsewhere, ROOT);
    add_inside(&other, &elsewhere, "b", &theirs);
    let (slot, untouched) = (slot_of(&place, "b"), classes(&elsewhere));
    assert_eq!(slot, slot_of(&other, "b"));
    refused(&place, &elsewhere, "limit set b --egress 3mbit");
    assert_eq!(classes(&elsewhere), untouched);
    let shown = json(&place, &elsewhere, "limit show b --json");
    assert_eq!(shown["state"], "in_force", "{shown}");

    // One that can be read, and one that cannot.
    for spoils in [false, true] {
        if spoils {
            add_inside(&place, &bed, "b", &x);
            spoil(&place.store().join("b/limit"));
        }
        assert_eq!(classes_of(&bed, slot).len(), 2);
        ok(&place, &elsewhere, "limit del b");
        assert_eq!(classes_of(&bed, slot), [""; 0]);
        assert_eq!(classes(&elsewhere), untouched);
    }

    // Somebody has put a qdisc of our handle there, without programs.
    ok(&other, &elsewhere, "detach");
    let bare = "qdisc add dev eth0 root handle 7467: htb default 10";
    assert!(elsewhere.tc(bare).status.success());
    spoil(&place.store().join("root/limit"));
    ok(&place, &elsewhere, "limit del root");
    assert!(elsewhere.qdiscs().contains("htb 7467:"), "{}", elsewhere.qdiscs());
    assert!(!bed.qdiscs().contains("htb 7467:"), "{}", bed.qdiscs());
    assert!(elsewhere.tc("qdisc del dev eth0 root").status.success());
}

/// The next command finishes the work of a killed writer in the network namespace of the device.
#[test]
fn root_htb_what_was_begun_is_finished_where_its_device_is() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let (place, bed, elsewhere) = (Place::new(), Bed::new(), Bed::new());
    ok(&place, &bed, ROOT);
    let set = |rate: &str| {
        let mut command = into(&bed.sender, env!("CARGO_BIN_EXE_tidegate"));
        command.env("TIDEGATE_BPFFS", place.store());
        command.args(["limit", "set", "root", "--egress", rate]);
        command.stdout(std::process::Stdio::null());
        command
    };
    let changes = tracer::watch(set("18mbit"), |_| None).changes;
    // The settings are written, and no class is changed yet.
    let at = changes.iter().position(|change| change.starts_with("netlink")).unwrap();
    assert!(changes[..at].contains(&"bpf(2)".to_owned()), "{changes:?}");
    tracer::run(set("9mbit"), at, libc::SIGKILL);
    assert!(classes_of(&bed, 1).iter().all(|class| class.contains("ceil 18Mbit")));
    ok(&place, &elsewhere, "status");
    let now = classes_of(&bed, 1);
    assert!(now.iter().all(|class| class.contains("ceil 9Mbit")), "{now:?}");
}

/// Limits can be removed without a journal; nothing else is begun.
#[test]
fn root_limits_come_off_without_a_journal() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let Some(mut host) = Host::with_network(&bed.sender) else { return };
    host.ok(&format!("export TIDEGATE_BPFFS={}", place.store().display()));
    let groups = ["x", "y", "z"].map(|name| place.child(name));
    let [x, y, z] = groups.each_ref().map(Cgroup::path);
    let file = place.file(
        "limits.toml",
        &format!("[[limit]]\nname = \"c\"\nscope = {{ cgroup = \"{z}\" }}\negress = \"9mbit\"\n"),
    );
    let qdiscs = bed.qdiscs();
    let full = "mount -t tmpfs -o size=4k tmpfs /run && head -c 4096 /dev/zero > /run/full";
    for unwritable in ["mount -t tmpfs -o ro tmpfs /run", full] {
        host.ok(&format!("$T limit add a --cgroup {x} --egress 9mbit"));
        host.ok(&format!("$T limit add b --cgroup {y} --egress 9mbit"));
        host.ok(&format!("$T {ROOT}"));
        host.ok(unwritable);
        let status = "$T status --json | grep -v -e _ns -e packets -e bytes";
        let before = host.ok(status);
        for verb in [
            format!("limit add c --cgroup {z} --egress 9mbit"),
            "limit set a --egress 5mbit".to_owned(),
            "limit set root --egress 5mbit".to_owned(),
            format!("apply {}", file.display()),
            format!("apply --prune {}", file.display()),
        ] {
            let (code, said) = host.sh(&format!("$T {verb}"));
            assert_eq!(code, 2, "{verb}: {said}");
            assert!(said.contains("error: ") && said.contains("journal"), "{verb}: {said}");
            assert!(said.contains("/run/tidegate"), "{verb}: {said}");
            assert_eq!(said.trim().lines().count(), 1, "{verb}: {said}");
        }
        assert_eq!(host.ok(status), before);
        for (verb, says) in [("limit del a", "`a` is off"), ("detach", "`root` is off")] {
            let said = host.ok(&format!("$T {verb}"));
            assert!(said.contains(says), "{said}");
            assert_eq!(said.matches("tidegate: warning: ").count(), 1, "{said}");
        }
        assert!(!place.store().exists());
        for group in &groups {
            Objects::on(group).wait_until_gone();
        }
        assert_eq!(bed.qdiscs(), qdiscs);
        assert!(!links(&bed).contains("tgifb"), "{}", links(&bed));
        host.ok("umount /run");
    }
}

/// From inside a container with the host's network the host's store cannot be seen. Its limits stay, and so
/// do those of a store in a container when the host looks.
#[test]
fn root_limits_of_a_store_that_is_not_seen_stay() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let Some(mut host) = Host::with_network(&bed.sender) else { return };
    let without_store = |bpffs: &Path| format!("umount -l {}", bpffs.display());
    // A filter has no link that would say that somebody holds it.
    let ingress = "limit add root --dev eth0 --scheme htb --ingress 20mbit";
    ok(&place, &bed, ingress);
    host.ok(&without_store(place.store().parent().unwrap()));
    let theirs = (links(&bed), bed.tc("filter show dev eth0 ingress").stdout);
    assert!(theirs.0.contains("tgifb") && !theirs.1.is_empty());
    let said = host.ok("$T detach --dry-run; $T detach");
    assert!(!said.contains("would remove") && !said.contains("removed"), "{said}");
    assert!(said.contains("may be another store's"), "{said}");
    // Nor is it taken for the remains of a dead process when the device is limited.
    let (code, said) = host.sh(&format!("mkdir -p /sys/fs/bpf; $T {ingress}"));
    assert!(code != 0 && said.contains("another store"), "{code}: {said}");
    assert_eq!((links(&bed), bed.tc("filter show dev eth0 ingress").stdout), theirs);
    ok(&place, &bed, "detach");

    // The other way round: the host sees what is mounted in a container.
    host.ok(&format!("$T {ingress}"));
    let theirs = (links(&bed), bed.tc("filter show dev eth0 ingress").stdout);
    let said = ok(&place, &bed, "detach");
    assert!(!said.contains("removed"), "{said}");
    let said = refused(&place, &bed, ingress);
    assert!(said.contains("another store"), "{said}");
    assert_eq!((links(&bed), bed.tc("filter show dev eth0 ingress").stdout), theirs);
    host.ok("$T detach");
    wait_for("no ifb device", || (!links(&bed).contains("tgifb")).then_some(()));
}

/// A limit that waited, and was put on by hand, does not wait any more.
#[test]
fn root_a_limit_that_is_put_on_waits_no_more() {
    need_root!();
    let place = Place::new();
    let path = format!("{}/later", place.group.path());
    let file = place.file(
        "limits.toml",
        &format!(
            "[[limit]]\nname = \"a\"\nscope = {{ cgroup = \"{path}\" }}\negress = \"9mbit\"\n"
        ),
    );
    place.ok(&["apply", file.to_str().unwrap()]);
    let mark = place.store().join("~a");
    assert!(mark.symlink_metadata().is_ok());
    place.child("later");
    place.ok(&["limit", "add", "a", "--cgroup", &path, "--egress", "9mbit"]);
    assert!(mark.symlink_metadata().is_err());
}
