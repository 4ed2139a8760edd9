//! `tidegate limit`, `status`, `monitor` and `detach`.

use std::{
    io::Read,
    net::{Shutdown, TcpListener, TcpStream},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use tidegate_sys::cgroup::Cgroup;

use crate::{
    agent::Slice,
    common::{Guard, Objects, Place, wait_for},
    edt::{Bed, SENDER, into, net_of},
    need_root,
    older::pacing,
    traffic::{accept, sender},
};

#[test]
fn root_limit_verbs_are_idempotent() {
    need_root!();
    let place = Place::new();
    let cgroup = place.group.path();
    let add = ["limit", "add", "a", "--cgroup", cgroup, "--egress", "50mbit"];
    assert!(place.ok(&add).contains("egress 50mbit"));
    let objects = Objects::on(&place.group);
    assert!(objects.is_whole());
    assert!(place.ok(&add).contains("nothing changed"));
    assert!(place.ok(&["limit", "set", "a", "--egress", "20mbit"]).contains("50mbit -> 20mbit"));
    assert!(place.ok(&["limit", "set", "a", "--egress", "20mbit"]).contains("nothing changed"));

    let (code, message) = place.refused(&add);
    assert_eq!(code, 1);
    assert!(
        message.contains("limit `a` exists already; change it with `tidegate limit set a"),
        "{message}"
    );
    let (code, message) =
        place.refused(&["limit", "add", "b", "--cgroup", cgroup, "--egress", "1mbit"]);
    assert_eq!(code, 1);
    assert!(message.contains("already has limit `a`"), "{message}");

    place.ok(&["limit", "del", "a"]);
    place.ok(&["limit", "del", "a"]);
    objects.wait_until_gone();
    assert!(!place.store().exists(), "the empty store is gone, too");
}

#[test]
fn root_limit_set_changes_only_what_is_named() {
    need_root!();
    let place = Place::new();
    let flags = ["--egress", "50mbit", "--ingress", "1gbit", "--burst", "2ms", "--rto-min", "30ms"];
    place.ok(&[&["limit", "add", "a", "--cgroup", place.group.path()], &flags[..]].concat());
    let before = place.json(&["limit", "show", "a", "--json"]);
    place.ok(&["limit", "set", "a", "--egress", "10mbit", "--loopback"]);
    let after = place.json(&["limit", "show", "a", "--json"]);
    assert_eq!(after["egress"]["rate_bit_s"], 10_000_000);
    assert_eq!(after["loopback"], true);
    assert_eq!(after["ingress"]["rate_bit_s"], 1_000_000_000);
    for field in ["rto_min_ns", "delack_max_ns", "exempt", "name", "cgroup", "state"] {
        assert_eq!(after[field], before[field], "{field}");
    }
    assert_eq!(after["egress"]["burst_ns"], 2_000_000);
    place.ok(&["limit", "set", "a", "--ingress", "none"]);
    assert!(place.json(&["limit", "show", "a", "--json"])["ingress"].is_null());
}

#[test]
fn root_a_limit_whose_cgroup_is_gone_is_cried_out_and_can_be_put_back() {
    need_root!();
    let place = Place::new();
    let child = place.child("service");
    let add = ["limit", "add", "a", "--cgroup", child.path(), "--egress", "50mbit"];
    place.ok(&add);
    std::fs::remove_dir(child.absolute()).unwrap();
    let status = place.ok(&["status"]);
    assert!(status.contains("NOT ENFORCED") && status.contains(child.path()), "{status}");
    assert_eq!(place.json(&["status", "--json"])["limits"][0]["state"], "waiting");
    assert!(place.ok(&["monitor", "--count", "1", "--interval", "10ms"]).contains("NOT ENFORCED"));
    let (code, message) = place.refused(&["limit", "set", "a", "--egress", "1mbit"]);
    assert_eq!(code, 2);
    assert!(message.contains("NOT ENFORCED"), "{message}");

    let again = place.child("service");
    place.ok(&add);
    assert!(Objects::on(&again).is_whole());
    assert_eq!(place.json(&["status", "--json"])["limits"][0]["state"], "in_force");
}

/// One that cannot be restored, as another limit has its place by now, keeps no other one off.
#[test]
fn root_each_limit_that_can_be_is_restored() {
    need_root!();
    let place = Place::new();
    let add = |name: &str, cgroup: &str| {
        place.ok(&["limit", "add", name, "--cgroup", cgroup, "--egress", "50mbit"]);
    };
    let anew = |lost: &Cgroup, name: &str| {
        std::fs::remove_dir(lost.absolute()).unwrap();
        place.child(name)
    };
    let (taken, free) = (place.child("taken"), place.child("free"));
    add("stale", taken.path());
    add("lost", free.path());
    let (taken, free) = (anew(&taken, "taken"), anew(&free, "free"));
    add("living", taken.path());

    let (code, said) = place.refused(&["limit", "restore"]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("`stale` is not restored") && said.contains("limit del stale"), "{said}");
    assert!(!said.contains("file") && !said.contains("prune"), "{said}");
    assert!(Objects::on(&free).is_whole(), "the other one is in force again");
    assert_eq!(place.json(&["limit", "show", "living", "--json"])["state"], "in_force");
    let (_, said) = place.refused(&["limit", "restore", "stale"]);
    assert!(said.contains("limit del stale") && !said.contains("file"), "{said}");
    assert_eq!(place.refused(&["limit", "restore"]).0, 2);
}

#[test]
fn root_a_limit_whose_cgroup_was_made_anew_is_restored_with_what_is_inside_it() {
    need_root!();
    let place = Place::new();
    let (child, inside) = (place.child("service"), place.child("service/worker"));
    place.ok(&["limit", "add", "a", "--cgroup", child.path(), "--egress", "50mbit"]);
    let add = ["limit", "add", "b", "--cgroup", inside.path(), "--parent", "a", "--weight", "7"];
    place.ok(&add);
    let anew = || {
        std::fs::remove_dir(inside.absolute()).unwrap();
        std::fs::remove_dir(child.absolute()).unwrap();
        ["service", "service/worker"].map(|name| place.child(name))
    };
    let whole = |groups: &[Cgroup]| groups.iter().all(|group| Objects::on(group).is_whole());
    let restore = ["limit", "restore", "a"];

    let groups = anew();
    assert_eq!(place.json(&["limit", "show", "a", "--json"])["state"], "detached");
    assert_eq!(place.refused(&["status", "--check"]).0, 3);
    let said = place.ok(&["status"]);
    assert!(said.contains("another one has its name") && said.contains("restore a"), "{said}");
    place.ok(&restore);
    assert!(whole(&groups), "both are in force again");
    assert_eq!(place.json(&["limit", "show", "b", "--json"])["weight"], 7);
    assert_eq!(place.ok(&restore).trim(), "nothing to restore; nothing changed");

    // The same by who puts the parent on again.
    let groups = anew();
    place.ok(&["limit", "add", "a", "--cgroup", child.path(), "--egress", "50mbit"]);
    assert!(whole(&groups), "both are in force again");

    // What does not exist is not restored, and one inside it that goes with it is named.
    std::fs::remove_dir(inside.absolute()).unwrap();
    let (code, message) = place.refused(&["limit", "restore", "b"]);
    assert!(code == 2 && message.contains("is gone"), "{code}: {message}");
    std::fs::remove_dir(child.absolute()).unwrap();
    let _child = place.child("service");
    let said = place.ok(&["limit", "add", "a", "--cgroup", child.path(), "--egress", "50mbit"]);
    assert!(said.contains("limit `b` is off"), "{said}");
    assert_eq!(place.limits(), ["a"]);
}

#[test]
fn root_a_limit_whose_programs_were_taken_off_is_cried_out() {
    need_root!();
    let place = Place::new();
    place.ok(&["limit", "add", "a", "--cgroup", place.group.path(), "--egress", "50mbit"]);
    let link = tidegate_sys::libbpf_rs::Link::open(place.store().join("a/egress")).unwrap();
    link.detach().unwrap();
    assert_eq!(place.json(&["status", "--json"])["limits"][0]["state"], "detached");
    assert!(place.ok(&["status"]).contains("NOT ENFORCED"));
}

/// Reads what comes, and counts it.
fn counted(mut stream: TcpStream) -> Arc<AtomicUsize> {
    let moved = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&moved);
    std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(n @ 1..) = stream.read(&mut bytes) {
            count.fetch_add(n, Ordering::Relaxed);
        }
    });
    moved
}

/// Two addresses of one host: the packets pass through the loopback device, so the limit has none of them.
#[test]
fn root_connections_between_two_addresses_of_the_host_are_free() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let ip = |words: &str| {
        let words = words.split(' ');
        assert!(into(&bed.sender, "ip").args(words).status().unwrap().success());
    };
    ip("address add 10.98.0.1/32 dev lo");
    ip("link set lo up");
    // Whoever connects to the one has the other.
    ip(&format!("route change local 10.98.0.1 dev lo table local src {SENDER}"));
    let listener = bed.sender.run(|| TcpListener::bind("10.98.0.1:0")).unwrap().unwrap();
    let address = listener.local_addr().unwrap();
    for before in [true, false] {
        let group = place.child(if before { "before" } else { "after" });
        let add = || {
            let flags = ["--cgroup", group.path(), "--egress", "20mbit"];
            place.ok(&[&["limit", "add", "one"], &flags[..]].concat());
        };
        if before {
            add();
        }
        let mut command = place.inside(&group, "nsenter");
        sender(command.arg(net_of(&bed.sender)), &format!("stream {address} 1000"));
        let _sender = Guard(command.spawn().unwrap());
        let stream = accept(&listener);
        assert_eq!(stream.peer_addr().unwrap().ip().to_string(), SENDER);
        let moved = counted(stream);
        if !before {
            add();
        }
        let then = moved.load(Ordering::Relaxed);
        wait_for("traffic", || (moved.load(Ordering::Relaxed) > then + 10_000_000).then_some(()));
        assert!(pacing(&place, &group).is_some_and(|rate| rate >= u64::from(u32::MAX)), "{before}");
        place.ok(&["limit", "del", "one"]);
    }
}

/// Also where one side has sent all, and where traffic within the host is not limited any more.
#[test]
fn root_connections_are_free_when_no_limit_holds_them() {
    need_root!();
    for (half_closed, words) in [
        (false, &["limit", "del", "one"][..]),
        (true, &["limit", "del", "one"]),
        (false, &["limit", "set", "one", "--loopback=false"]),
    ] {
        let place = Place::new();
        let group = place.child("one");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let flags = ["--cgroup", group.path(), "--egress", "20mbit", "--loopback"];
        place.ok(&[&["limit", "add", "one"], &flags[..]].concat());
        let mut command = place.inside(&group, "env");
        sender(&mut command, &format!("stream {} 1000", listener.local_addr().unwrap()));
        let _sender = Guard(command.spawn().unwrap());
        let stream = accept(&listener);
        if half_closed {
            stream.shutdown(Shutdown::Write).unwrap();
        }
        let moved = counted(stream);
        wait_for("a paced connection", || pacing(&place, &group).filter(|rate| *rate < 2_600_000));
        place.ok(words);
        let free = || pacing(&place, &group).filter(|rate| *rate >= u64::from(u32::MAX));
        wait_for("a connection that is not paced", free);
        // Many round trips later it still is free.
        let then = moved.load(Ordering::Relaxed);
        wait_for("traffic", || (moved.load(Ordering::Relaxed) > then + 10_000_000).then_some(()));
        assert!(free().is_some(), "{words:?}");
    }
}

#[test]
fn root_detach_leaves_nothing() {
    need_root!();
    let place = Place::new();
    let groups = ["x", "y"].map(|name| place.child(name));
    for (i, group) in groups.iter().enumerate() {
        let name = format!("limit-{i}");
        place.ok(&["limit", "add", &name, "--cgroup", group.path(), "--ingress", "1gbit"]);
    }
    let objects = groups.each_ref().map(Objects::on);
    assert!(objects.iter().all(Objects::is_whole));
    assert!(place.ok(&["detach", "--dry-run"]).contains("would remove limit `limit-1`"));
    assert_eq!(place.limits(), ["limit-0", "limit-1"]);
    place.ok(&["detach"]);
    assert!(!place.store().exists());
    objects.iter().for_each(Objects::wait_until_gone);
    place.ok(&["detach"]);
}

#[test]
fn root_writers_wait_for_one_another() {
    need_root!();
    let place = Place::new();
    // All of them within the patience of the last, however slow the machine is.
    let started = Instant::now();
    place.ok(&["limit", "add", "first", "--cgroup", place.group.path(), "--egress", "1gbit"]);
    place.ok(&["limit", "del", "first"]);
    let writers = (5.0 / started.elapsed().as_secs_f64()).clamp(2.0, 6.0) as usize;
    let groups: Vec<_> = (0..writers).map(|i| place.child(&format!("g{i}"))).collect();
    std::thread::scope(|scope| {
        for (i, group) in groups.iter().enumerate() {
            let place = &place;
            scope.spawn(move || {
                let name = format!("limit-{i}");
                place.ok(&["limit", "add", &name, "--cgroup", group.path(), "--egress", "1gbit"]);
                if i % 2 == 0 {
                    place.ok(&["limit", "del", &name]);
                }
            });
        }
    });
    let left: Vec<_> = (1..writers).step_by(2).map(|i| format!("limit-{i}")).collect();
    assert_eq!(place.limits(), left);
}

#[test]
fn root_monitor_speaks_json_lines() {
    need_root!();
    let place = Place::new();
    place.ok(&["limit", "add", "a", "--cgroup", place.group.path(), "--egress", "50mbit"]);
    let text = place.ok(&["monitor", "--json", "--interval", "10ms", "--count", "3"]);
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    for line in &lines {
        assert_eq!(line["name"], "a");
        assert_eq!(line["egress"]["rate_bit_s"], 50_000_000);
        assert_eq!(line["egress"]["drop_full_packets"], 0);
        assert!(line["interval_ns"].as_u64().unwrap() > 0 && line["ingress"].is_null());
    }
}

#[test]
fn root_a_reader_who_goes_away_is_no_error() {
    need_root!();
    let place = Place::new();
    place.ok(&["limit", "add", "a", "--cgroup", place.group.path(), "--egress", "50mbit"]);
    let mut command = place.tidegate();
    command.args(["monitor", "--interval", "10ms"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Guard(command.spawn().unwrap());
    drop(child.0.stdout.take());
    let status = wait_for("the end of monitor", || child.0.try_wait().unwrap());
    assert!(status.success());
    let mut message = String::new();
    child.0.stderr.as_mut().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!(message, "");
}

/// Limits on cgroups share programs, unless one packet meets both; a slot that is taken again is as new.
#[test]
fn root_limits_on_cgroups_share_programs() {
    need_root!();
    let place = Place::new();
    let groups = ["a", "b", "c"].map(|name| place.child(name));
    let add = |name: &str, on: &Cgroup| {
        place.ok(&[
            "limit",
            "add",
            name,
            "--cgroup",
            on.path(),
            "--egress",
            "50mbit",
            "--loopback",
        ]);
    };
    add("a", &groups[0]);
    add("b", &groups[1]);
    add("above", &place.group);
    let [a, b] = [&groups[0], &groups[1]].map(Objects::on);
    let above = Objects::on(&place.group);
    assert!(a.is_whole() && above.is_whole());
    assert!(a.shares_with(&b) && !a.shares_with(&above));
    let passed = |name: &str| {
        let shown = place.json(&["limit", "show", name, "--json"]);
        shown["egress"]["pass_packets"].as_u64()
    };
    // Each counts its own packets.
    let before = [passed("b"), passed("above")];
    let script = "exec 3<>/dev/udp/127.0.0.1/9; echo x >&3";
    let sent = place.inside(&groups[0], "bash").args(["-c", script]).status().unwrap();
    assert!(sent.success());
    assert_eq!(passed("a"), Some(1));
    assert_eq!([passed("b"), passed("above")], [before[0], before[1].map(|n| n + 1)]);
    // It is another one that takes its slot.
    place.ok(&["limit", "del", "a"]);
    add("c", &groups[2]);
    assert_eq!(passed("c"), Some(0));
    assert!(Objects::on(&groups[2]).shares_with(&b));
    // One in its place, while it goes, is beside it.
    let file = place.file(
        "a.toml",
        &format!(
            "[[limit]]\nname = \"d\"\nscope = {{ cgroup = \"{}\" }}\negress = \"9mbit\"\n",
            groups[1].path()
        ),
    );
    place.ok(&["apply", "--prune", file.to_str().unwrap()]);
    assert_eq!((place.limits(), Objects::on(&groups[1]).links()), (vec!["d".to_owned()], 3));
    place.ok(&["detach"]);
    assert!(!place.store().exists());
    above.wait_until_gone();
    b.wait_until_gone();
}

#[test]
fn root_limit_add_takes_a_unit_and_finds_it_again() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let unit = format!("{}.service", slice.unique);
    let first = slice.make(&unit);
    let add = ["limit", "add", "a", "--unit", &unit, "--egress", "50mbit"];
    let said = place.ok(&add);
    assert!(said.contains(first.path()) && Objects::on(&first).is_whole(), "{said}");
    assert!(place.ok(&add).contains("nothing changed"));
    slice.remove(&first);
    let shown = place.ok(&["limit", "show", "a"]);
    assert!(shown.contains(&format!("limit `a` waits: no unit `{unit}` runs")), "{shown}");
    let second = slice.make(&unit);
    place.ok(&add);
    assert!(Objects::on(&second).is_whole());
    // All below a slice is one limit's.
    let whole = format!("{}.slice", slice.unique);
    place.ok(&["limit", "del", "a"]);
    place.ok(&["limit", "add", "b", "--unit", &whole, "--egress", "50mbit"]);
    assert!(Objects::on(&slice.group).is_whole());
    let (code, said) = place.refused(&["limit", "add", "c", "--unit", "web", "--egress", "1mbit"]);
    assert!(
        code == 1 && said.contains("--unit: `web` has no ending; write `web.service`"),
        "{said}"
    );
}

#[test]
fn root_limit_persists_in_the_file_of_the_host() {
    need_root!();
    let place = Place::new();
    let (cgroup, file) = (place.group.path(), place.host_file());
    let read = || std::fs::read_to_string(&file).unwrap_or_default();
    let add = ["limit", "add", "a", "--cgroup", cgroup, "--egress", "50mbit", "--persist"];
    // What cannot be put on is not written.
    let (code, _) = place.refused(&[&add[..], &["--parent", "none"]].concat());
    assert_eq!((code, read().as_str()), (1, ""));
    let said = place.ok(&add);
    let unkept = "; no agent keeps it: systemctl enable --now tidegate-agent";
    assert!(said.contains(&format!("written to {}{unkept}", file.display())), "{said}");
    let head = format!("[[limit]]\nname   = \"a\"\nscope  = {{ cgroup = \"{cgroup}\" }}\n");
    assert_eq!(read(), format!("{head}egress = \"50mbit\"\n"));
    assert!(place.ok(&add).contains(&format!("nothing changed{unkept}")));
    std::fs::write(&file, format!("# Ours.\n\n# Nightly.\n{}", read())).unwrap();
    let said = place.ok(&["limit", "set", "a", "--egress", "20mbit"]);
    assert!(said.contains("50mbit -> 20mbit; changed in"), "{said}");
    assert_eq!(read(), format!("# Ours.\n\n# Nightly.\n{head}egress = \"20mbit\"\n"));
    // A broken file beside it: nothing is changed, neither there nor in the kernel.
    let other = file.with_file_name("other.toml");
    std::fs::write(&other, "[[limit]\n").unwrap();
    for verb in [&["limit", "set", "a", "--egress", "1mbit"][..], &add] {
        let (code, said) = place.refused(verb);
        assert!(code == 1 && said.contains("other.toml:1"), "{code} {said}");
    }
    assert_eq!(place.json(&["limit", "show", "a", "--json"])["egress"]["rate_bit_s"], 20_000_000);
    // A limit comes off all the same, and stays in the file.
    let (written, said) = (read(), place.ok(&["limit", "del", "a"]));
    assert!(said.contains("is off") && !said.contains("taken out of"), "{said}");
    assert_eq!(read(), written);
    std::fs::remove_file(&other).unwrap();
    let said = place.ok(&["limit", "del", "a"]);
    assert!(said.contains("is off; taken out of"), "{said}");
    assert_eq!(read(), "# Ours.\n\n");
    assert!(place.limits().is_empty());
}

#[test]
fn root_limits_that_persist_at_once_are_all_written() {
    need_root!();
    const WRITERS: usize = 6;
    let place = Place::new();
    let groups: Vec<_> = (0..WRITERS).map(|i| place.child(&format!("w{i}"))).collect();
    let names: Vec<_> = (0..WRITERS).map(|i| format!("w{i}")).collect();
    let read = || std::fs::read_to_string(place.host_file()).unwrap_or_default();
    let at_once = |verb: &dyn Fn(usize) -> Vec<String>| {
        let running = (0..WRITERS)
            .map(|i| place.tidegate().args(verb(i)).stdout(Stdio::null()).spawn().unwrap());
        let running: Vec<_> = running.collect();
        for mut writer in running {
            assert!(writer.wait().unwrap().success());
        }
    };
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    at_once(&|i| {
        let (name, cgroup) = (&names[i], groups[i].path());
        words(&format!("limit add {name} --cgroup {cgroup} --egress 50mbit --persist"))
    });
    assert_eq!(read().matches("[[limit]]").count(), WRITERS);
    at_once(&|i| words(&format!("limit set {} --egress 2{i}mbit", names[i])));
    for i in 0..WRITERS {
        assert!(read().contains(&format!("egress = \"2{i}mbit\"")), "{}", read());
    }
    at_once(&|i| words(&format!("limit del {}", names[i])));
    assert_eq!(read().matches("[[limit]]").count(), 0);
}
