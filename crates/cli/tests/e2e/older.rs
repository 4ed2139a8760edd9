//! Limits whose maps cannot be read, as those that another version has pinned: one bad row, nobody else is
//! disturbed, and they come off whole.

use std::{
    net::{TcpListener, UdpSocket},
    os::{fd::AsFd, unix::fs::symlink},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Instant,
};

use tidegate_sys::{
    cgroup::Cgroup,
    libbpf_rs::{Link, MapCore, MapHandle, MapType, Program, libbpf_sys},
    net::diag,
};

use crate::{
    common::{Guard, Objects, PATIENCE, Place, on_cgroup, wait_for},
    edt::{Bed, into, ok, tidegate},
    htb::links,
    members::{send_from, show, sum},
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
    // Others share its programs and maps.
    objects.wait_until_off();
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

/// The request of a limit is written beside it alone, and is not guessed from its maps.
#[test]
fn root_a_limit_whose_request_cannot_be_read_is_replaced() {
    need_root!();
    let place = Place::new();
    let groups = ["old", "good"].map(|name| place.child(name));
    let limits = groups.each_ref().map(|group| {
        let name = group.path().rsplit('/').next().unwrap();
        let scope = format!("scope = {{ cgroup = \"{}\" }}", group.path());
        format!("[[limit]]\nname = \"{name}\"\n{scope}\negress = \"9mbit\"\n")
    });
    let file = place.file("a.toml", &limits.concat());
    let apply = || place.ok(&["apply", file.to_str().unwrap()]);
    let state = |name: &str| place.json(&["limit", "show", name, "--json"])["state"].clone();
    apply();
    let link = place.store().join("old/intent");
    let mut unknown = place.intent("old");
    unknown["later"] = true.into();
    for target in [None, Some(unknown.to_string()), Some("no JSON".to_owned())] {
        let before = on_cgroup(&groups[0]).map(|link| link.id).collect::<Vec<_>>();
        std::fs::remove_file(&link).unwrap();
        if let Some(target) = &target {
            symlink(target, &link).unwrap();
        }
        let table = place.ok(&["status"]);
        assert!(table.contains("what was asked of it cannot be read"), "{table}");
        assert_eq!([state("old"), state("good")], ["broken", "in_force"]);
        assert!(place.refused(&["limit", "set", "old", "--egress", "1mbit"]).1.contains("asked"));
        let done = apply();
        assert!(done.contains("(it cannot be read)") && done.contains("+ old on"), "{done}");
        assert_eq!(state("old"), "in_force");
        let after = on_cgroup(&groups[0]).map(|link| link.id).collect::<Vec<_>>();
        assert!(after.len() == 3 && !after.iter().any(|id| before.contains(id)), "{after:?}");
    }
    std::fs::remove_file(&link).unwrap();
    place.ok(&["detach"]);
    assert!(groups.iter().all(|group| on_cgroup(group).next().is_none()));
    assert!(place.limits().is_empty());
}

/// Makes a limit one that an earlier or newer version has put on: with its ABI number, and a map of another
/// layout.
pub fn date(place: &Place, name: &str, abi: u32) {
    let dir = place.store().join(name);
    let link = dir.join("intent");
    let mut intent = place.intent(name);
    intent["abi"] = abi.into();
    std::fs::remove_file(&link).unwrap();
    symlink(intent.to_string(), &link).unwrap();
    spoil(&dir.join("limit"));
}

/// What a limit of this version was asked to do is put on again by the next one, under a transfer.
#[test]
fn root_limits_of_an_earlier_version_are_restored() {
    need_root!();
    let place = Place::new();
    let (above, inside) = (place.child("above"), place.child("above/inside"));
    let add = |name: &str, group: &Cgroup, more: &str| {
        let words = format!("limit add {name} --cgroup {} --loopback {more}", group.path());
        place.ok(&words.split(' ').collect::<Vec<_>>());
    };
    add("above", &above, "--egress 40mbit --burst 3ms --exempt 10.1.0.0/16,dscp:ef");
    add("inside", &inside, "--parent above --egress 20mbit --weight 300 --guarantee 5mbit");
    let settings = |name: &str| {
        let shown = place.json(&["limit", "show", name, "--json"]);
        ["scope", "cgroup", "parent", "scheme", "weight", "guarantee_bit_s", "exempt", "state"]
            .map(|key| shown[key].clone())
    };
    let rates = |name: &str| {
        let shown = place.json(&["limit", "show", name, "--json"]);
        ["rate_bit_s", "burst_ns"].map(|key| shown["egress"][key].clone())
    };
    let before = ["above", "inside"].map(|name| (settings(name), rates(name)));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = place.inside(&inside, "env");
    sender(&mut command, &format!("stream {} 1000", listener.local_addr().unwrap()));
    let _sender = Guard(command.spawn().unwrap());
    let mut stream = accept(&listener);
    std::thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
    wait_for("a paced connection", || pacing(&place, &inside).filter(|rate| *rate < 2_600_000));

    let passed = |name: &str| {
        let shown = place.json(&["limit", "show", name, "--json"]);
        shown["egress"]["pass_bytes"].as_u64().unwrap()
    };
    let counted = wait_for("a megabyte", || Some(passed("inside")).filter(|b| *b > 1_000_000));
    let objects = [&above, &inside].map(Objects::on);
    ["above", "inside"].iter().for_each(|name| date(&place, name, 0));
    let status = place.ok(&["status"]);
    assert!(status.contains("an earlier version of tidegate, 0."), "{status}");
    assert!(status.contains("tidegate limit restore above"), "{status}");
    let (_, said) = place.refused(&["limit", "set", "above", "--egress", "1mbit"]);
    assert!(said.contains("tidegate limit restore above"), "{said}");
    let said = place.ok(&["limit", "restore"]);
    assert!(said.contains("limit `above` is on") && said.contains("limit `inside` is"), "{said}");
    assert_eq!(["above", "inside"].map(|name| (settings(name), rates(name))), before);
    objects.iter().for_each(Objects::wait_until_gone);
    assert!(place.ok(&["limit", "restore"]).contains("nothing changed"));
    // The connection goes on, in the limit that is there now, and so do the counters.
    let now = passed("inside");
    assert!(now >= counted, "{now} bytes, and {counted} before");
    wait_for("the connection in the new limit", || Some(passed("inside")).filter(|b| *b > now));
    wait_for("a paced connection", || pacing(&place, &inside).filter(|rate| *rate < 2_600_000));
    // A threshold that nobody gave still follows the rate, and one that was given stays.
    place.ok(&["limit", "set", "above", "--egress", "80mbit"]);
    assert_eq!(rates("above"), [80_000_000, 3_000_000].map(serde_json::Value::from));
    assert!(place.refused(&["limit", "restore", "nobody"]).1.contains("no limit `nobody`"));
}

#[test]
fn root_limits_of_an_earlier_version_on_devices_are_restored() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    for words in [
        "--dev eth0 --scheme htb --egress 20mbit --ingress 20mbit --ecn 60kb",
        "--port eth0 --scheme spring --egress 20mbit --ingress 20mbit",
        "--dev eth0 --scheme tbf --egress 20mbit",
        "--dev eth0 --scheme police --egress 20mbit --meter trtcm,pir=30mbit --fair=false",
        "--dev eth0 --scheme police --egress 20mbit --match 10.97.0.0/24,fd97::/64",
        "--dev eth0 --scheme police --ingress 20mbit --hook xdp",
    ] {
        ok(&place, &bed, &format!("limit add old {words}"));
        date(&place, "old", 0);
        assert!(ok(&place, &bed, "limit show old").contains("BROKEN"), "{words}");
        ok(&place, &bed, "limit restore old");
        let add = ok(&place, &bed, &format!("limit add old {words}"));
        assert!(add.contains("nothing changed"), "{words}: {add}");
        ok(&place, &bed, "limit del old");
        assert_eq!(bed.qdiscs(), before, "{words}");
    }
}

/// Has a limit of this layout be one that another build has made.
pub fn build_of_another(place: &Place, name: &str) {
    let dir = place.store().join(name);
    let mut intent = place.intent(name);
    intent["build"] = "0.0.1".into();
    std::fs::remove_file(dir.join("intent")).unwrap();
    symlink(intent.to_string(), dir.join("intent")).unwrap();
    let Ok(pool) = std::fs::read_link(dir.join("room")) else { return };
    let build = place.store().join(pool).join("build");
    std::fs::remove_file(&build).unwrap();
    symlink("0.0.1", build).unwrap();
}

/// The programs of the links and filters that are pinned, and the maps, by their kernel ids.
pub fn ids_of(at: &Path) -> [Vec<u32>; 2] {
    let [mut programs, mut maps] = [Vec::new(), Vec::new()];
    let mut entries: Vec<_> = std::fs::read_dir(at).unwrap().map(|e| e.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            let [more_programs, more_maps] = ids_of(&path);
            programs.extend(more_programs);
            maps.extend(more_maps);
            continue;
        }
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if ["egress", "ingress", "sockops", "xdp", "adopt"].contains(&&*name) {
            programs.push(Link::open(&path).unwrap().info().unwrap().prog_id);
        } else if name.starts_with("program_") || name.starts_with("member_") {
            let program = Program::fd_from_pinned_path(&path).unwrap();
            programs.push(Program::id_from_fd(program.as_fd()).unwrap());
        } else {
            maps.push(MapHandle::from_pinned_path(&path).unwrap().info().unwrap().info.id);
        }
    }
    [programs, maps]
}

/// A limit of another build gets other programs and keeps its maps, whatever its scheme.
#[test]
fn root_limits_of_another_build_are_taken_over() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let group = place.child("g");
    let inside = place.child("g/in");
    let before = bed.qdiscs();
    let cgroup = |more: &str| format!("--cgroup {} {more}", group.path());
    let child = format!("limit add in --cgroup {} --parent old --weight 200", inside.path());
    for (words, child) in [
        (cgroup("--scheme pace --egress 20mbit --ingress 20mbit"), Some(&child)),
        (cgroup("--scheme nrm --egress 20mbit --exempt 10.1.0.0/16"), None),
        (cgroup("--scheme police --egress 20mbit"), None),
        (format!("--cgroup {}* --egress 20mbit --ingress 20mbit", group.path()), None),
        ("--dev eth0 --scheme police --egress 20mbit --exempt 10.1.0.0/16".to_owned(), None),
        ("--dev eth0 --scheme police --egress 20mbit --match 10.97.0.0/24".to_owned(), None),
        ("--dev eth0 --scheme police --ingress 20mbit --hook xdp".to_owned(), None),
        ("--dev eth0 --scheme htb --egress 20mbit --ingress 20mbit".to_owned(), None),
        ("--port eth0 --scheme spring --egress 20mbit --ingress 20mbit".to_owned(), None),
        ("--dev eth0 --scheme tbf --egress 20mbit".to_owned(), None),
    ] {
        ok(&place, &bed, &format!("limit add old {words}"));
        child.inspect(|child| drop(ok(&place, &bed, child)));
        let names = if child.is_some() { vec!["old", "in"] } else { vec!["old"] };
        names.iter().for_each(|name| build_of_another(&place, name));
        let [programs, maps] = ids_of(&place.store());
        let status = ok(&place, &bed, "status");
        assert!(status.contains("made by another build, 0.0.1"), "{words}: {status}");
        assert!(ok(&place, &bed, "status --json").contains("\"other_build\": \"0.0.1\""));
        let said = ok(&place, &bed, "limit restore");
        assert!(said.contains("limit `old` is on"), "{words}: {said}");
        let [now, same] = ids_of(&place.store());
        assert_eq!(same, maps, "{words}");
        assert!(!programs.is_empty() && now.len() == programs.len(), "{words}");
        assert!(now.iter().all(|id| !programs.contains(id)), "{words}: {programs:?} {now:?}");
        let status = ok(&place, &bed, "status");
        assert!(!status.contains("another build") && !status.contains("WARNING"), "{status}");
        assert!(ok(&place, &bed, "limit restore").contains("nothing changed"), "{words}");
        ok(&place, &bed, "detach");
        assert_eq!(bed.qdiscs(), before, "{words}");
        assert!(!place.store().exists(), "{words}");
    }
}

/// Each packet meets the program of one build or the other, never none and never both.
#[test]
fn root_no_packet_is_missed_while_a_limit_is_taken_over() {
    need_root!();
    const DATAGRAMS: u64 = 200;
    const TAKEOVERS: u64 = 5;
    let place = Place::new();
    let group = place.child("busy");
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let order = format!("udp {} {}", socket.local_addr().unwrap(), DATAGRAMS * 1200);
    let send = |count: &AtomicU64, stop: &AtomicBool| {
        while !stop.load(Ordering::Relaxed) {
            send_from(&place, &group, &order);
            count.fetch_add(DATAGRAMS, Ordering::Relaxed);
        }
    };
    for words in
        ["--cgroup CGROUP --scheme police", "--cgroup CGROUP --scheme nrm", "--cgroup CGROUP*"]
    {
        let words = words.replace("CGROUP", group.path());
        let add = format!("limit add a {words} --egress 1mbit --loopback");
        place.ok(&add.split(' ').collect::<Vec<_>>());
        let (count, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&count, &stop));
            for taken in 0..TAKEOVERS {
                wait_for("packets", || {
                    (count.load(Ordering::Relaxed) > taken * DATAGRAMS).then_some(())
                });
                build_of_another(&place, "a");
                assert!(place.ok(&["limit", "restore"]).contains("limit `a` is on"));
            }
            stop.store(true, Ordering::Relaxed);
            sender.join().unwrap();
        });
        let egress = &show(&place, "a")["egress"];
        assert_eq!(sum(egress, "_packets"), count.into_inner(), "{words}: {egress}");
        place.ok(&["limit", "del", "a"]);
    }
}

/// A cgroup that joins a limit after the takeover meets the programs of this build, too.
#[test]
fn root_a_cgroup_joins_a_limit_that_was_taken_over() {
    need_root!();
    let place = Place::new();
    place.child("w1");
    let add = format!("limit add web --cgroup {}/w* --egress 20mbit", place.group.path());
    place.ok(&add.split(' ').collect::<Vec<_>>());
    build_of_another(&place, "web");
    place.ok(&["limit", "restore"]);
    place.child("w2");
    place.ok(&add.split(' ').collect::<Vec<_>>());
    let members = place.store().join("web/members");
    let program = |entry: std::fs::DirEntry| {
        Link::open(entry.path().join("egress")).unwrap().info().unwrap().prog_id
    };
    let programs: Vec<_> =
        std::fs::read_dir(members).unwrap().map(|e| program(e.unwrap())).collect();
    assert!(matches!(programs[..], [one, other] if one == other), "{programs:?}");
}

#[test]
fn root_limits_of_a_newer_version_are_left_alone() {
    need_root!();
    let place = Place::new();
    let group = place.child("new");
    let add = ["limit", "add", "new", "--cgroup", group.path(), "--egress", "20mbit"];
    place.ok(&add);
    date(&place, "new", 999);
    let objects = Objects::on(&group);
    let spec = format!(
        "[[limit]]\nname = \"new\"\nscope = {{ cgroup = \"{}\" }}\negress = \"9mbit\"\n",
        group.path()
    );
    let file = place.file("limits.toml", &spec);
    for words in [
        &add[..],
        &["limit", "set", "new", "--egress", "1mbit"],
        &["limit", "restore"],
        &["limit", "restore", "new"],
        &["apply", file.to_str().unwrap()],
    ] {
        let (_, said) = place.refused(words);
        assert!(said.contains("newer than this one"), "{words:?}: {said}");
        assert!(objects.is_whole());
    }
    assert!(place.ok(&["status"]).contains("a newer version of tidegate, 0."));
    // It keeps no other one from being restored.
    let other = place.child("old");
    place.ok(&["limit", "add", "old", "--cgroup", other.path(), "--egress", "20mbit"]);
    date(&place, "old", 0);
    let (code, said) = place.refused(&["limit", "restore"]);
    assert!(code == 2 && said.contains("newer than this one"), "{said}");
    assert!(objects.is_whole());
    assert_eq!(place.json(&["limit", "show", "old", "--json"])["state"], "in_force");
    // What was limited is gone: there is nothing to restore.
    date(&place, "old", 0);
    other.remove(Instant::now() + PATIENCE).unwrap();
    let (_, said) = place.refused(&["limit", "restore", "old"]);
    assert!(said.contains(other.path()), "{said}");
    place.ok(&["limit", "del", "new"]);
    objects.wait_until_gone();
}

/// Nobody knows what a newer limit has of its device, so each would have to go before the other one is put on
/// anew.
#[test]
fn root_limits_of_a_newer_version_on_one_device_are_left_alone() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let mut text = String::new();
    for (name, prefix) in [("a", "10.97.0.0/24"), ("b", "10.98.0.0/24")] {
        ok(&place, &bed, &format!("limit add {name} --dev eth0 --egress 9mbit --match {prefix}"));
        let scope = "scope = { dev = \"eth0\" }";
        text += &format!(
            "[[limit]]\nname = \"{name}\"\n{scope}\negress = \"9mbit\"\nmatch = [\"{prefix}\"]\n"
        );
    }
    ["a", "b"].iter().for_each(|name| date(&place, name, 999));
    let before = ids_of(&place.store());
    let (code, _, said) =
        tidegate(&place, &bed, &format!("apply {}", place.file("limits.toml", &text).display()));
    assert!(code != 0 && said.contains("newer than this one"), "{code} {said}");
    assert_eq!(ids_of(&place.store()), before);
    ok(&place, &bed, "detach");
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
        "--dev eth0 --scheme tbf --egress 20mbit",
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
    assert!(ok(&other, &bed, "detach").contains("nothing to remove"));
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
