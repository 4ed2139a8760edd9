//! One limit over several cgroups, which come and go.

use std::{
    env, fs,
    io::Read,
    net::{TcpListener, TcpStream, UdpSocket},
    path::Path,
    time::Instant,
};

use serde_json::{Value, json};
use tidegate_sys::{cgroup::Cgroup, store::Store};

use crate::{
    common::{Guard, Objects, Place, entries, on_cgroup, refused, skip, wait_for},
    need_root, tracer,
    traffic::{accept, sender},
};

/// Of a datagram of the helper, with the headers of IP and UDP.
const PACKET_BYTES: u64 = 1228;
const DATAGRAMS: u64 = 200;

/// Patterns below the cgroup of the test.
fn pattern(place: &Place, pattern: &str) -> String {
    format!("{}/{pattern}", place.group.path())
}

fn links_on(cgroup: &Cgroup) -> Vec<u32> {
    on_cgroup(cgroup).map(|link| link.id).collect()
}

pub fn show(place: &Place, name: &str) -> Value {
    place.json(&["limit", "show", name, "--json"])
}

fn file(place: &Place, text: &str) -> String {
    let text = text.replace("TOP", place.group.path());
    place.file("limits.toml", &text).display().to_string()
}

const SPEC: &str =
    "[[limit]]\nname = \"web\"\nscope = { cgroup = \"TOP/w*\" }\negress = \"50mbit\"\n";

pub fn sum(direction: &Value, suffix: &str) -> u64 {
    let counters = direction.as_object().unwrap().iter();
    let wanted = counters.filter(|(key, _)| key.ends_with(suffix) && !key.starts_with("green"));
    let wanted = wanted.filter(|(key, _)| !key.starts_with("yellow") && !key.starts_with("red_"));
    wanted.map(|(_, value)| value.as_u64().unwrap()).sum()
}

pub fn send_from(place: &Place, group: &Cgroup, order: &str) {
    let mut command = place.inside(group, "env");
    sender(&mut command, order);
    assert!(Guard(command.spawn().unwrap()).0.wait().unwrap().success());
}

/// A cgroup comes, and the agent may have it join, while the command waits.
#[test]
fn root_apply_looks_for_cgroups_once_it_has_the_store() {
    need_root!();
    let place = Place::new();
    place.child("w1");
    let file = file(&place, SPEC);
    place.ok(&["apply", &file]);
    let store = fs::File::open(place.store()).unwrap();
    rustix::fs::flock(&store, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut apply = Guard(place.tidegate().args(["apply", &file]).spawn().unwrap());
    // It tries again and again.
    wait_for("a command that waits", || {
        let status = fs::read_to_string(format!("/proc/{}/status", apply.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        (line.unwrap().trim().parse::<u32>().unwrap() > 25).then_some(())
    });
    place.child("w2");
    drop(store);
    assert_eq!(apply.exit_code(), 0);
    assert_eq!(show(&place, "web")["members"].as_array().unwrap().len(), 2);
}

#[test]
fn root_members_share_one_bucket_and_exact_counters() {
    need_root!();
    let place = Place::new();
    let groups = ["w1", "w2"].map(|name| place.child(name));
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let order = format!("udp {} {}", socket.local_addr().unwrap(), DATAGRAMS as usize * 1200);
    let started = Instant::now();
    let on = pattern(&place, "w?");
    let flags = ["--scheme", "police", "--egress", "8kbit", "--burst", "100kb", "--loopback"];
    let said = place.ok(&[&["limit", "add", "web", "--cgroup", &on], &flags[..]].concat());
    assert!(said.contains("2 cgroups"), "{said}");
    groups.iter().for_each(|group| send_from(&place, group, &order));
    let egress = &show(&place, "web")["egress"];
    assert_eq!(sum(egress, "_packets"), 2 * DATAGRAMS, "{egress}");
    let passed = egress["pass_bytes"].as_u64().unwrap();
    // A bucket of each would have let twice as much pass.
    let earned = 1000 * (started.elapsed().as_secs() + 1);
    assert!(passed <= 100_000 + earned + PACKET_BYTES, "{egress}");
    assert!(passed >= 100_000 - PACKET_BYTES, "{egress}");
}

/// The cgroups that a plan has leave. A removed one stays until the kernel has none of its sockets any more,
/// which it says a moment later, also where there was none.
fn leaving(place: &Place, spec: &str) -> Value {
    wait_for("a member that leaves", || {
        let plan = place.tidegate().args(["plan", "--json", spec]).output().unwrap();
        let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
        let leave = plan["actions"][0]["leave"].clone();
        leave.is_array().then_some(leave)
    })
}

#[test]
fn root_members_join_and_leave_under_a_transfer() {
    need_root!();
    let place = Place::new();
    let (first, listener) = (place.child("w1"), TcpListener::bind("127.0.0.1:0").unwrap());
    let spec = file(&place, &format!("{SPEC}loopback = true\n"));
    place.ok(&["apply", &spec]);
    let order = format!("stream {} 65536", listener.local_addr().unwrap());
    let mut command = place.inside(&first, "env");
    sender(&mut command, &order);
    let _child = Guard(command.spawn().unwrap());
    let mut stream = accept(&listener);
    let flows = |stream: &mut TcpStream| stream.read_exact(&mut vec![0; 1 << 20]).unwrap();
    flows(&mut stream);
    let links = links_on(&first);
    assert_eq!(links.len(), 3);
    let passed = || sum(&show(&place, "web")["egress"], "_bytes");
    let mut before = passed();
    let mut grows = |stream: &mut TcpStream| {
        // What has passed may wait for its receiver for some time.
        before = wait_for("bytes that are counted", || {
            flows(stream);
            Some(passed()).filter(|now| *now >= before + (1 << 20))
        });
    };

    let second = place.child("w2");
    let plan = place.tidegate().args(["plan", &spec]).output().unwrap();
    let plan = String::from_utf8(plan.stdout).unwrap();
    assert!(plan.contains("~ web: + ") && plan.contains("1 to change"), "{plan}");
    place.ok(&["apply", &spec]);
    assert_eq!((links_on(&second).len(), links_on(&first)), (3, links.clone()));
    grows(&mut stream);
    fs::remove_dir(second.absolute()).unwrap();
    assert_eq!(leaving(&place, &spec), json!([second.path()]));
    place.ok(&["apply", &spec]);
    assert_eq!(links_on(&first), links);
    grows(&mut stream);
    assert_eq!(show(&place, "web")["members"], json!([first.path()]));

    // It leaves, and its connection goes on without the limit; then it is back.
    let store = Store::at(place.store());
    let set = |cgroups: &[String]| {
        let lock = store.lock().unwrap();
        store.set_members(&lock, &place.hierarchy, "web", cgroups).unwrap();
    };
    set(&[]);
    assert_eq!(links_on(&first), [0; 0]);
    let counted = passed();
    flows(&mut stream);
    assert_eq!(passed(), counted, "what does not pass the limit is not counted");
    assert_eq!(show(&place, "web")["state"], "waiting");
    set(&[first.path().to_owned()]);
    assert_eq!(links_on(&first).len(), 3);
    grows(&mut stream);
    assert_eq!(show(&place, "web")["state"], "in_force");
}

#[test]
fn root_a_limit_stays_while_it_has_no_member() {
    need_root!();
    let place = Place::new();
    let spec = file(&place, SPEC);
    let on = pattern(&place, "w*");
    let said = place.ok(&["limit", "add", "web", "--cgroup", &on, "--egress", "50mbit"]);
    assert!(said.contains("no cgroup yet"), "{said}");
    assert_eq!(show(&place, "web")["state"], "waiting");
    assert!(place.ok(&["apply", &spec]).contains("web waits"));
    let status = place.ok(&["status"]);
    assert!(status.contains("waiting") && !status.contains("WARNING"), "{status}");
    let group = place.child("w1");
    let map = fs::metadata(place.store().join("web/limit")).unwrap();
    for _ in 0..2 {
        let group = place.hierarchy.open(group.path()).unwrap();
        assert!(place.ok(&["apply", &spec]).contains("1 changed"));
        assert!(Objects::on(&group).is_whole());
        assert_eq!(show(&place, "web")["state"], "in_force");
        let explained = place.ok(&["explain", group.path()]);
        assert!(explained.contains("`web`") && explained.contains("1 cgroup: "), "{explained}");
        // A service that restarts gets a cgroup of the same name.
        fs::remove_dir(group.absolute()).unwrap();
        assert_eq!(show(&place, "web")["state"], "waiting");
        place.child("w1");
    }
    place.ok(&["limit", "set", "web", "--egress", "9mbit"]);
    assert_eq!(show(&place, "web")["egress"]["rate_bit_s"], 9_000_000);
    let same = |a: &fs::Metadata, b: &fs::Metadata| {
        use std::os::unix::fs::MetadataExt;
        a.ino() == b.ino()
    };
    let now = fs::metadata(place.store().join("web/limit")).unwrap();
    assert!(same(&map, &now), "it is still the same limit");
}

#[test]
fn root_removing_a_limit_takes_it_off_all_members() {
    need_root!();
    for scheme in ["pace", "nrm", "police"] {
        for verb in [&["limit", "del", "web"][..], &["detach"]] {
            let place = Place::new();
            let groups = ["w1", "w2"].map(|name| place.child(name));
            let on = pattern(&place, "w*");
            let rates = ["--egress", "9mbit", "--ingress", "9mbit", "--scheme", scheme];
            place.ok(&[&["limit", "add", "web", "--cgroup", &on], &rates[..]].concat());
            let objects = groups.each_ref().map(Objects::on);
            let links = if scheme == "police" { 2 } else { 3 };
            assert!(objects.iter().all(|objects| objects.links() == links));
            place.ok(verb);
            objects.iter().for_each(Objects::wait_until_gone);
            assert!(!place.store().exists(), "{:?}", entries(&place.store()));
        }
    }
}

#[test]
fn root_another_limit_of_the_name_keeps_the_members() {
    need_root!();
    let place = Place::new();
    let groups = ["w1", "w2"].map(|name| place.child(name));
    let spec = |more: &str| file(&place, &format!("{SPEC}{more}"));
    place.ok(&["apply", &spec("")]);
    let first = Objects::on(&groups[0]);
    // Other programs, then another scheme.
    for more in ["exempt = [\"10.1.0.0/16\"]\n", "scheme = \"police\"\n"] {
        place.ok(&["apply", &spec(more)]);
        assert!(groups.iter().all(|group| !links_on(group).is_empty()));
        assert_eq!(show(&place, "web")["state"], "in_force");
    }
    first.wait_until_gone();
    // From one cgroup to several, and back.
    let one = SPEC.replace("w*", "w1");
    place.ok(&["apply", &file(&place, &one)]);
    assert_eq!((links_on(&groups[0]).len(), links_on(&groups[1]).len()), (3, 0));
    place.ok(&["apply", &spec("")]);
    assert!(groups.iter().all(|group| links_on(group).len() == 3));
}

#[test]
fn root_a_cgroup_is_in_one_limit() {
    need_root!();
    let place = Place::new();
    let groups = ["w1", "w2"].map(|name| place.child(name));
    let other = "[[limit]]\nname = \"all\"\nscope = { cgroup = \"TOP/?2\" }\negress = \"9mbit\"\n";
    let (code, message) = place.refused(&["apply", &file(&place, &format!("{SPEC}{other}"))]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("limits `web` and `all` both match cgroup"), "{message}");
    place.ok(&["apply", &file(&place, SPEC)]);
    let (_, message) = place.refused(&["apply", &file(&place, other)]);
    assert!(message.contains("`all`") && message.contains("limit `web`"), "{message}");
    for on in [groups[1].path().to_owned(), pattern(&place, "?2")] {
        let add = ["limit", "add", "all", "--cgroup", &on, "--egress", "9mbit"];
        let (_, message) = place.refused(&add);
        assert!(message.contains("already has limit `web`"), "{message}");
        assert_eq!(place.limits(), ["web"]);
    }
    // One that changes hands has a limit all the time.
    place.ok(&["apply", "--prune", &file(&place, other)]);
    assert_eq!((links_on(&groups[0]).len(), links_on(&groups[1]).len()), (0, 3));
}

#[test]
fn root_members_in_trees() {
    need_root!();
    let place = Place::new();
    let groups = ["w1", "w2"].map(|name| place.child(name));
    let inner = groups.each_ref().map(|group| place.hierarchy.create(group, "in").unwrap());
    let outside = place.child("other");
    let tree = |child: &str| {
        let child = format!(
            "[[limit]]\nname = \"in\"\nscope = {{ cgroup = \"{child}\" }}\nparent = \"web\"\n"
        );
        file(&place, &format!("{SPEC}{child}"))
    };
    // Below a member; then several, each below one.
    for child in ["TOP/w2/in", "TOP/w*/in"] {
        place.ok(&["apply", &tree(child)]);
        assert_eq!(links_on(&inner[1]).len(), 3);
        assert_eq!(show(&place, "in")["state"], "in_force");
    }
    assert_eq!(links_on(&inner[0]).len(), 3);
    let (_, message) = place.refused(&["apply", &tree("TOP/o*")]);
    assert!(message.contains("does not contain") && message.contains(outside.path()), "{message}");
    let (_, message) = place.refused(&["limit", "del", "web"]);
    assert!(message.contains("is the parent of in"), "{message}");
    place.ok(&["detach"]);
    // Several inside one.
    let one = SPEC.replace("/w*", "");
    let child = "[[limit]]\nname = \"in\"\nscope = { cgroup = \"TOP/w*\" }\nparent = \"web\"\n";
    place.ok(&["apply", &file(&place, &format!("{one}{child}"))]);
    assert!(groups.iter().all(|group| links_on(group).len() == 3));
}

#[test]
fn root_a_member_that_lost_its_programs_is_seen_and_restored() {
    need_root!();
    let place = Place::new();
    let groups = ["w1", "w2"].map(|name| place.child(name));
    place.ok(&["apply", &file(&place, SPEC)]);
    let member = place.store().join(format!("web/members/{}", groups[1].id()));
    fs::remove_file(member.join("egress")).unwrap();
    assert_eq!(show(&place, "web")["state"], "detached");
    place.ok(&["limit", "restore"]);
    assert_eq!(show(&place, "web")["state"], "in_force");
    assert!(groups.iter().all(|group| links_on(group).len() == 3));
}

/// Without an agent nobody has it join.
#[test]
fn root_a_cgroup_that_came_after_its_limit_is_seen_and_joins_by_restore() {
    need_root!();
    let place = Place::new();
    let first = place.child("w1");
    place.ok(&["limit", "add", "web", "--cgroup", &pattern(&place, "w*"), "--egress", "1mbit"]);
    place.ok(&["status", "--check"]);
    fs::remove_dir(first.absolute()).unwrap();
    place.ok(&["status", "--check"]);
    let second = place.child("w2");
    assert_eq!(place.refused(&["status", "--check"]).0, 3);
    let said = place.ok(&["status"]);
    assert!(said.contains(&format!("NOT ENFORCED on cgroup `{}`", second.path())), "{said}");
    assert!(said.contains("limit restore web"), "{said}");
    assert_eq!(show(&place, "web")["outside"], json!([second.path()]));
    place.ok(&["limit", "restore", "web"]);
    assert!(Objects::on(&second).is_whole());
    place.ok(&["status", "--check"]);
    assert_eq!(show(&place, "web")["members"], json!([second.path()]));
    assert!(show(&place, "web")["outside"].is_null());
}

#[test]
fn root_schemes_of_devices_have_no_members() {
    need_root!();
    let place = Place::new();
    let on = pattern(&place, "w*");
    for scheme in ["htb", "spring", "tbf"] {
        let flags = ["--egress", "9mbit", "--scheme", scheme];
        let mut command = place.tidegate();
        command.args(["limit", "add", "web", "--cgroup", &on]).args(flags);
        let (code, message) = refused(&mut command);
        assert!(code != 0 && message.contains("scheme"), "{message}");
        assert_eq!(entries(&place.store()), [""; 0]);
    }
}

/// A limit on what is below others' cgroups, with one inside it.
fn nested(place: &Place) -> String {
    let limit = |name: &str, on: &str, rest: &str| {
        format!("[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"TOP/{on}\" }}\n{rest}\n")
    };
    let rate = "egress = \"50mbit\"\nloopback = true";
    let text = limit("outer", "w*", rate)
        + &limit("web", "*/deep", rate)
        + &limit("in", "*/deep/in", "parent = \"web\"\nweight = 10");
    file(place, &text)
}

/// Limits with selectors share programs, but none with another one that meets the same packets: one that
/// comes to do so goes into another pool, with what is inside it, and goes on from its count.
#[test]
fn root_a_limit_whose_member_meets_another_limit_changes_its_pool() {
    need_root!();
    let place = Place::new();
    let [w, v] = ["w1", "v1"].map(|name| place.child(name));
    let below = |cgroup: &Cgroup, name: &str| place.hierarchy.create(cgroup, name).unwrap();
    let deep = below(&v, "deep");
    let inside = below(&deep, "in");
    let spec = nested(&place);
    let apply = ["apply", spec.as_str()];
    place.ok(&apply);
    assert!(Objects::on(&w).shares_with(&Objects::on(&deep)));
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let order = format!("udp {} {}", socket.local_addr().unwrap(), DATAGRAMS as usize * 1200);
    let counted = |name: &str| sum(&show(&place, name)["egress"], "_packets");
    send_from(&place, &inside, &order);
    assert_eq!((counted("in"), counted("web"), counted("outer")), (DATAGRAMS, DATAGRAMS, 0));

    let other = below(&w, "deep");
    let done = place.ok(&apply);
    assert!(done.contains("~ web: + "), "{done}");
    let links = [&w, &deep, &other, &inside].map(|group| Objects::on(group).links());
    assert_eq!(links, [3; 4]);
    assert!(!Objects::on(&w).shares_with(&Objects::on(&deep)));
    assert!(Objects::on(&other).shares_with(&Objects::on(&deep)));
    send_from(&place, &other, &order);
    send_from(&place, &inside, &order);
    let all = [counted("in"), counted("web"), counted("outer")];
    assert_eq!(all, [2 * DATAGRAMS, 3 * DATAGRAMS, DATAGRAMS]);
    for name in ["in", "web", "outer"] {
        assert_eq!(show(&place, name)["state"], "in_force", "{name}");
    }
    assert!(place.ok(&apply).contains("Nothing to do"));
    place.ok(&["detach"]);
    assert_eq!([&w, &deep, &other, &inside].map(|group| Objects::on(group).links()), [0; 4]);
    assert!(!place.store().exists());
}

/// The same, killed.
#[test]
fn root_a_killed_change_of_pools_is_finished() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let place = Place::new();
    let [w, v] = ["w1", "v1"].map(|name| place.child(name));
    let below = |cgroup: &Cgroup, name: &str| place.hierarchy.create(cgroup, name).unwrap();
    let deep = below(&v, "deep");
    let inside = below(&deep, "in");
    let spec = nested(&place);
    let apply = ["apply", spec.as_str()];
    let other = || place.hierarchy.open(&format!("{}/deep", w.path())).unwrap();
    let before = || {
        let _ = place.tidegate().arg("detach").output();
        let _ = fs::remove_dir(w.absolute().join("deep"));
        place.ok(&apply);
        below(&w, "deep");
    };
    kill_at_each(&place, &apply, before, |change| {
        let links = [&w, &deep, &inside].map(|group| links_on(group).len());
        assert_eq!(links, [3; 3], "{change}");
        assert!(matches!(links_on(&other()).len(), 0 | 3), "{change}");
        place.ok(&apply);
        let links = [&w, &deep, &inside, &other()].map(|group| links_on(group).len());
        assert_eq!(links, [3; 4], "{change}");
        for name in ["in", "web", "outer"] {
            assert_eq!(show(&place, name)["state"], "in_force", "{change}");
        }
    });
    place.ok(&["detach"]);
    assert!(!place.store().exists());
}

/// Names in a store that say that something is half done.
fn half_done(store: &Path) -> Vec<String> {
    let mut found = entries(store);
    found.extend(entries(&store.join("web/members")));
    found.retain(|name| name.starts_with(['_', '=']));
    found
}

/// Without `TIDEGATE_KILL=all` one in so many places is tried.
const SAMPLE: usize = 4;

/// Kills a command before each of its changes, or a sample of them, and has a look afterwards. The sample
/// begins where `TIDEGATE_KILL_SEED` says.
fn kill_at_each(place: &Place, words: &[&str], prepare: impl Fn(), check: impl Fn(&str)) {
    let command = || {
        let mut command = place.tidegate();
        command.args(words).stdout(std::process::Stdio::null());
        command
    };
    prepare();
    let changes = tracer::watch(command(), |_| None).changes;
    assert!(changes.len() > 3, "{changes:?}");
    let whole = env::var("TIDEGATE_KILL").is_ok_and(|form| form == "all");
    let seed = env::var("TIDEGATE_KILL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(std::process::id() as usize);
    println!("TIDEGATE_KILL_SEED={seed}");
    let step = if whole { 1 } else { SAMPLE };
    for (at, change) in changes.iter().enumerate().skip(seed % step).step_by(step) {
        prepare();
        tracer::run(command(), at, 9);
        // Whoever comes next finishes it, also if it only reads.
        place.ok(&["status"]);
        assert_eq!(half_done(&place.store()), [""; 0], "{words:?}, killed before {change}");
        check(change);
    }
}

#[test]
fn root_a_killed_writer_of_members_is_finished() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let place = Place::new();
    let (first, spec) = (place.child("w1"), file(&place, SPEC));
    let path = pattern(&place, "w2");
    let make = || {
        let open = place.hierarchy.open(&path);
        open.unwrap_or_else(|_| place.child("w2"))
    };
    let drop_second = || {
        let _ = fs::remove_dir(place.hierarchy.mount().join(&path));
    };
    let is_whole = |cgroup: &Cgroup| matches!(links_on(cgroup).len(), 0 | 3);
    let apply = ["apply", &spec];
    let links = || links_on(&first);

    // Put on with one member.
    let off = || {
        let _ = place.tidegate().arg("detach").output();
        drop_second();
    };
    kill_at_each(&place, &apply, off, |change| {
        assert!(is_whole(&first), "{change}");
        place.ok(&apply);
        assert_eq!(links().len(), 3, "{change}");
    });
    // Another one joins.
    let one = || {
        drop_second();
        place.ok(&apply);
        make();
    };
    let held = std::cell::RefCell::new(Vec::new());
    let one = || {
        one();
        *held.borrow_mut() = links();
    };
    kill_at_each(&place, &apply, one, |change| {
        assert_eq!(links(), *held.borrow(), "{change}");
        assert!(is_whole(&make()), "{change}");
        place.ok(&apply);
        assert_eq!((links(), links_on(&make()).len()), (held.borrow().clone(), 3), "{change}");
    });
    // It is removed.
    let two = || {
        make();
        place.ok(&apply);
        drop_second();
        leaving(&place, &spec);
    };
    kill_at_each(&place, &apply, two, |change| {
        assert_eq!(links(), *held.borrow(), "{change}");
        place.ok(&apply);
        assert_eq!(show(&place, "web")["members"], json!([first.path()]), "{change}");
        assert_eq!(entries(&place.store().join("web/members")), [first.id().to_string()]);
    });
    // Another one with other programs comes in its place.
    let both = || {
        make();
        place.ok(&apply);
    };
    let other = place.file(
        "other.toml",
        &fs::read_to_string(&spec).unwrap().replace("egress", "exempt = [\"10.1.0.0/16\"]\negress"),
    );
    kill_at_each(&place, &["apply", other.to_str().unwrap()], both, |change| {
        assert_eq!((links().len(), links_on(&make()).len()), (3, 3), "{change}");
        assert_eq!(show(&place, "web")["state"], "in_force", "{change}");
    });
    // All of it comes off.
    let on = || {
        make();
        place.ok(&apply);
    };
    kill_at_each(&place, &["limit", "del", "web"], on, |change| {
        assert!(is_whole(&first) && is_whole(&make()), "{change}");
        assert_eq!(links().len(), links_on(&make()).len(), "{change}");
    });
}

#[test]
fn root_one_that_cannot_be_read_comes_off_all_members() {
    need_root!();
    let place = Place::new();
    let groups = ["w1", "w2"].map(|name| place.child(name));
    let (on, spec) = (pattern(&place, "w*"), file(&place, SPEC));
    let objects = || groups.each_ref().map(Objects::on);
    let break_it = || {
        place.ok(&["apply", &spec]);
        fs::remove_file(place.store().join("web/queues")).unwrap();
        let status = place.json(&["status", "--json"]);
        assert_eq!(status["limits"][0]["state"], "broken");
        assert_eq!(status["limits"][0]["cgroup"], Value::from(on.as_str()));
    };
    break_it();
    let broken = objects();
    place.ok(&["apply", &spec]);
    broken.iter().for_each(Objects::wait_until_gone);
    assert!(objects().iter().all(Objects::is_whole));
    break_it();
    let broken = objects();
    place.ok(&["limit", "del", "web"]);
    broken.iter().for_each(Objects::wait_until_gone);
    assert!(!place.store().exists());
}

#[test]
fn root_who_leaves_half_way_is_let_go() {
    need_root!();
    let place = Place::new();
    let groups = ["w1", "w2"].map(|name| place.child(name));
    place.ok(&["apply", &file(&place, SPEC)]);
    let members = place.store().join("web/members");
    let id = groups[1].id();
    fs::rename(members.join(id.to_string()), members.join(format!("_{id}"))).unwrap();
    place.ok(&["status"]);
    assert_eq!((links_on(&groups[0]).len(), links_on(&groups[1]).len()), (3, 0));
    assert_eq!(entries(&members), [groups[0].id().to_string()]);
    assert!(place.ok(&["apply", &file(&place, SPEC)]).contains("1 changed"));
    assert_eq!(links_on(&groups[1]).len(), 3);
}

#[test]
fn root_one_member_that_cannot_join_disturbs_no_other() {
    need_root!();
    let place = Place::new();
    let groups = ["w1", "w2", "w3"].map(|name| place.child(name));
    place.ok(&["limit", "add", "web", "--cgroup", &pattern(&place, "w1*"), "--egress", "9mbit"]);
    place.ok(&["limit", "add", "z", "--cgroup", groups[1].path(), "--egress", "9mbit"]);
    let links = links_on(&groups[0]);
    let store = Store::at(place.store());
    let lock = store.lock().unwrap();
    let paths: Vec<_> = groups.iter().map(|group| group.path().to_owned()).collect();
    let error = store.set_members(&lock, &place.hierarchy, "web", &paths).unwrap_err().to_string();
    assert!(error.contains(groups[1].path()) && error.contains("limit `z`"), "{error}");
    assert_eq!((links_on(&groups[0]), links_on(&groups[2]).len()), (links, 3));
    let error = store.set_members(&lock, &place.hierarchy, "z", &paths).unwrap_err().to_string();
    assert!(error.contains("`z`") && error.contains("selector"), "{error}");
}
