//! Limits inside limits, on traffic between two namespaces: who has which part of the parent. Tolerances are
//! wide, and a part that is not yet right is looked at again until it is: noise moves the figures of a
//! second, not where they settle.

use std::{
    env,
    io::{ErrorKind, Write},
    net::{TcpStream, UdpSocket},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tidegate_sys::cgroup::Cgroup;

use crate::{
    common::{Guard, Objects, Place, is_emulated, kernel_before, refused, text, wait_for},
    edt::{Bed, PORT, RECEIVER, SENDER, Server, blast, into, net_of},
    need_root,
    older::build_of_another,
};

const HELPER: &str = "TIDEGATE_TEST_TREE";
/// How long traffic may take to be as it should.
const SETTLES: Duration = Duration::from_secs(60);

/// In the process under test, until it is killed: `tcp FLOWS` or `udp BIT/S` sends to the receiver, `throw
/// PORT` to the sender, where `take PORT` takes it in. `pull ADDRESS` reads a TCP connection to its end.
pub fn help() {
    let Ok(order) = env::var(HELPER) else { return };
    let (kind, number) = order.split_once(' ').unwrap();
    if kind == "pull" {
        return drop(std::io::copy(&mut TcpStream::connect(number).unwrap(), &mut std::io::sink()));
    }
    let end = Instant::now() + 8 * SETTLES;
    if kind == "udp" {
        return blast(RECEIVER, PORT + 1, number.parse().unwrap(), end);
    }
    if kind == "throw" {
        return blast(SENDER, number.parse().unwrap(), 30e6, end);
    }
    if kind == "take" {
        let socket = UdpSocket::bind((SENDER, number.parse().unwrap())).unwrap();
        while socket.recv(&mut [0; 2048]).is_ok() {}
        return;
    }
    thread::scope(|scope| {
        for _ in 0..number.parse::<u32>().unwrap() {
            scope.spawn(|| {
                let mut stream = TcpStream::connect((RECEIVER, PORT)).unwrap();
                stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
                while Instant::now() < end {
                    match stream.write(&[7; 65536]) {
                        Err(e) if e.kind() != ErrorKind::WouldBlock => break,
                        _ => {}
                    }
                }
            });
        }
    });
}

/// A place whose senders reach a receiver.
pub struct Scene {
    pub place: Place,
    pub bed: Bed,
    _server: Server,
}

impl Scene {
    pub fn new() -> Scene {
        let bed = Bed::new();
        let _server = bed.serve();
        Scene { place: Place::new(), bed, _server }
    }

    fn below(&self, group: &Cgroup, name: &str) -> Cgroup {
        self.place.hierarchy.create(group, name).unwrap()
    }

    fn apply(&self, text: &str) -> String {
        self.place.ok(&["apply", self.place.file("limits.toml", text).to_str().unwrap()])
    }

    /// Starts what sends to the sender, from the receiver's namespace and no cgroup of ours.
    fn throw(&self, order: &str) -> Guard {
        let mut command = into(&self.bed.receiver, env::current_exe().unwrap().to_str().unwrap());
        command.args(["helper", "--exact"]).env(HELPER, order);
        Guard(command.stdout(std::process::Stdio::null()).spawn().unwrap())
    }

    /// Starts what sends to the receiver, or takes in, in a cgroup.
    pub fn send(&self, group: &Cgroup, order: &str) -> Guard {
        let mut command: Command = self.place.inside(group, "nsenter");
        command.arg(net_of(&self.bed.sender)).arg(env::current_exe().unwrap());
        command.args(["helper", "--exact"]).env(HELPER, order);
        Guard(command.stdout(std::process::Stdio::null()).spawn().unwrap())
    }

    /// What each limit used in a second, in Mbit/s.
    fn used(&self) -> Vec<(String, f64)> {
        let text = self.place.ok(&["monitor", "--json", "--interval", "1s", "--count", "1"]);
        let samples = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let used = |sample: &Value| {
            let direction = ["egress", "ingress"].into_iter().find(|way| !sample[way].is_null());
            sample[direction.unwrap()]["used_bit_s"].as_f64().unwrap() / 1e6
        };
        samples.map(|sample| (sample["name"].as_str().unwrap().to_owned(), used(&sample))).collect()
    }

    /// Connections of the sender's namespace.
    fn established(&self) -> usize {
        let table = || std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        let table = self.bed.sender.run(table).unwrap();
        let states = table.lines().filter_map(|line| line.split_whitespace().nth(3));
        states.filter(|state| *state == "01").count()
    }

    /// Packets that passed a limit and that it dropped, so far.
    fn passed_and_dropped(&self, name: &str) -> (u64, u64) {
        let shown = self.place.json(&["limit", "show", name, "--json"]);
        let packets = |outcome| shown["egress"][format!("{outcome}_packets")].as_u64().unwrap();
        let dropped = ["drop_full", "drop_reserve", "drop_early"].map(packets).iter().sum();
        (["pass", "mark", "slow"].map(packets).iter().sum(), dropped)
    }

    /// Waits until each limit uses what it should, in Mbit/s, within a fifth and half a Mbit/s; on an
    /// emulated machine its part of what they use together.
    pub fn settles(&self, should: &[(&str, f64)]) {
        let deadline = Instant::now() + SETTLES;
        let mut seen = Vec::new();
        loop {
            let used = self.used();
            let is = |name: &str| used.iter().find(|(is, _)| is == name).unwrap().1;
            let sum: f64 = should.iter().map(|(_, mbit)| mbit).sum();
            let all: f64 = should.iter().map(|(name, _)| is(name)).sum();
            let part = if is_emulated() && all > 0.2 * sum { (all / sum).min(1.0) } else { 1.0 };
            let near = |is: f64, mbit: f64| (is - mbit).abs() < mbit / 5.0 + 0.5;
            if should.iter().all(|(name, mbit)| near(is(name), part * mbit)) {
                return;
            }
            seen.push(used.clone());
            let status = || self.place.ok(&["status"]);
            assert!(Instant::now() < deadline, "{should:?} never seen: {seen:#?}\n{}", status());
        }
    }
}

/// A limit of a spec.
fn limit(name: &str, group: &Cgroup, fields: &str) -> String {
    let cgroup = group.path();
    format!("[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{cgroup}\" }}\n{fields}\n\n")
}

#[test]
fn root_siblings_share_by_guarantee_and_weight() {
    need_root!();
    let scene = Scene::new();
    let top = &scene.place.group;
    let [web, batch] = ["web", "batch"].map(|name| scene.below(top, name));
    let spec = |weight: u32| {
        limit("top", top, "egress = \"20mbit\"")
            + &limit("web", &web, "parent = \"top\"\nguarantee = \"8mbit\"")
            + &limit("batch", &batch, &format!("parent = \"top\"\nweight = {weight}"))
    };
    scene.apply(&spec(200));
    let _web = scene.send(&web, "tcp 4");
    let batch_sends = scene.send(&batch, "tcp 1");
    // 8 and a third of the 11.8 that are left.
    scene.settles(&[("top", 19.8), ("web", 11.9), ("batch", 7.9)]);

    let changed = scene.apply(&spec(100));
    assert!(changed.contains("~ batch: weight 200 -> 100"), "{changed}");
    scene.settles(&[("web", 13.9), ("batch", 5.9)]);
    scene.place.ok(&["limit", "set", "batch", "--ceiling", "2mbit"]);
    scene.settles(&[("web", 17.8), ("batch", 2.0)]);

    drop(batch_sends);
    scene.settles(&[("web", 19.8), ("batch", 0.0)]);
}

#[test]
fn root_what_one_leaves_the_others_take() {
    need_root!();
    let scene = Scene::new();
    let top = &scene.place.group;
    let web = scene.below(top, "web");
    let [site, shop, batch] = [(&web, "site"), (&web, "shop"), (top, "batch")]
        .map(|(above, name)| scene.below(above, name));
    scene.apply(
        &(limit("batch", &batch, "parent = \"top\"\nscheme = \"nrm\"")
            + &limit("site", &site, "parent = \"web\"\nguarantee = \"4mbit\"\nweight = 300")
            + &limit("shop", &shop, "parent = \"web\"\nweight = 100")
            + &limit("web", &web, "parent = \"top\"\nguarantee = \"6mbit\"\nceiling = \"16mbit\"")
            + &limit("top", top, "egress = \"20mbit\"")),
    );
    // Three levels: 6 and half of the rest for web, of that 4 and three quarters of the rest for site.
    let site_sends = scene.send(&site, "tcp 2");
    let _shop = scene.send(&shop, "tcp 1");
    let batch_sends = scene.send(&batch, "tcp 2");
    scene.settles(&[("web", 12.9), ("batch", 6.9), ("site", 10.6), ("shop", 2.2)]);
    drop(batch_sends);
    scene.settles(&[("web", 15.8), ("batch", 0.0), ("site", 12.9), ("shop", 2.9)]);
    drop(site_sends);
    scene.settles(&[("web", 15.8), ("site", 0.0), ("shop", 15.8)]);

    // What belongs to none of them is a class beside them, in which UDP cannot take what is guaranteed.
    let free = scene.below(top, "free");
    let _udp = scene.send(&free, "udp 30e6");
    scene.settles(&[("top", 19.8), ("web", 12.9)]);
    let _batch = scene.send(&batch, "udp 30e6");
    scene.settles(&[("top", 19.8), ("web", 10.6), ("batch", 4.6)]);
}

/// Connections that were open before: each limit that comes, changes or goes tells them their rate again,
/// and they send at it, instead of being dropped to it.
#[test]
fn root_open_connections_go_from_limit_to_limit() {
    need_root!();
    let scene = Scene::new();
    let top = &scene.place.group;
    let site = scene.below(top, "site");
    let _site = scene.send(&site, "tcp 3");
    wait_for("three connections", || (scene.established() == 3).then_some(()));
    let top_spec = limit("top", top, "egress = \"20mbit\"");
    let inside = |ceiling: &str| {
        let fields = format!("parent = \"top\"\nceiling = \"{ceiling}\"");
        limit("site", &site, &fields) + &top_spec
    };
    let told = |name: &str, should: &[(&str, f64)]| {
        scene.settles(should);
        // There each is paced at the whole limit, not at its share.
        if kernel_before(6, 12) {
            return;
        }
        // A machine that stalls sends what it held back at once, and some of that is dropped.
        wait_for("a second in which next to nothing is dropped", || {
            let before = scene.passed_and_dropped(name);
            scene.settles(should);
            let after = scene.passed_and_dropped(name);
            let (passed, dropped) = (after.0 - before.0, after.1 - before.1);
            (dropped * 50 <= passed).then_some(())
        });
    };
    scene.apply(&top_spec);
    told("top", &[("top", 19.8)]);
    scene.apply(&inside("6mbit"));
    told("site", &[("top", 5.9), ("site", 5.9)]);
    scene.apply(&inside("12mbit"));
    told("site", &[("top", 11.9), ("site", 11.9)]);
    scene.place.ok(&["limit", "del", "site"]);
    told("top", &[("top", 19.8)]);
}

/// Two TCP flows and a flood of UDP in one limit: three senders, of which one is told nothing. The inner
/// limits only count.
#[test]
fn root_udp_has_one_share_beside_tcp() {
    need_root!();
    let scene = Scene::new();
    let top = &scene.place.group;
    let [tcp, udp] = ["tcp", "udp"].map(|name| scene.below(top, name));
    let counts = "egress = \"10gbit\"\nscheme = \"nrm\"\npace_ceiling = false";
    scene.apply(
        &(limit("top", top, "egress = \"20mbit\"")
            + &limit("tcp", &tcp, counts)
            + &limit("udp", &udp, counts)),
    );
    let _tcp = scene.send(&tcp, "tcp 2");
    scene.settles(&[("top", 19.8), ("tcp", 19.8)]);
    let flood = scene.send(&udp, "udp 40e6");
    scene.settles(&[("top", 19.8), ("tcp", 13.2)]);
    drop(flood);
    scene.settles(&[("top", 19.8), ("tcp", 19.8)]);
}

#[test]
fn root_what_comes_in_is_shared_too() {
    need_root!();
    let scene = Scene::new();
    let top = &scene.place.group;
    let [one, two] = ["one", "two"].map(|name| scene.below(top, name));
    let fields = |more: &str| format!("parent = \"top\"\n{more}");
    scene.apply(
        &(limit("top", top, "ingress = \"20mbit\"")
            + &limit("one", &one, &fields("guarantee = \"10mbit\""))
            + &limit("two", &two, &fields("weight = 50"))),
    );
    let status = scene.place.json(&["limit", "show", "one", "--json"]);
    assert!(
        status["egress"].is_null() && status["ingress"]["rate_bit_s"] == 20_000_000,
        "{status}"
    );
    let (code, message) = scene.place.refused(&["limit", "set", "one", "--egress", "30mbit"]);
    assert_eq!(code, 1);
    assert!(message.contains("--egress: its parent `top` does not limit egress"), "{message}");

    let _takers = [scene.send(&one, "take 6001"), scene.send(&two, "take 6002")];
    let _throwers = [scene.throw("throw 6001"), scene.throw("throw 6002")];
    // 10 and two thirds of the 10 that are left.
    scene.settles(&[("one", 16.5), ("two", 3.3)]);
}

#[test]
fn root_a_tree_is_applied_moved_and_taken_off() {
    need_root!();
    let place = Place::new();
    let top = &place.group;
    let below = |group: &Cgroup, name: &str| place.hierarchy.create(group, name).unwrap();
    let [web, other] = ["web", "other"].map(|name| below(top, name));
    let [site, far] = [below(&web, "site"), below(&other, "site")];
    let inside = |name: &str, group: &Cgroup, parent: &str, fields: &str| {
        limit(name, group, &format!("parent = \"{parent}\"\n{fields}"))
    };
    let spec = |web: &Cgroup, site: &Cgroup, parent: &str| {
        inside("site", site, parent, "weight = 300")
            + &inside("web", web, "top", "guarantee = \"30mbit\"\nceiling = \"80mbit\"")
            + &limit("top", top, "egress = \"100mbit\"\ningress = \"200mbit\"")
    };
    let file = |text: &str| place.file("limits.toml", text).to_str().unwrap().to_owned();
    let apply = |text: &str| place.ok(&["apply", &file(text)]);
    let done = apply(&spec(&web, &site, "web"));
    assert!(
        done.contains("inside top, guarantee 30mbit, weight 100, egress at most 80mbit"),
        "{done}"
    );
    assert!(place.ok(&["plan", &file(&spec(&web, &site, "web"))]).contains("Nothing to do"));
    let groups = [top, &web, &site].map(Objects::on);
    assert!(groups.iter().all(Objects::is_whole));

    // What holds is the lowest ceiling on the way up, and the tree is seen.
    let shown = place.json(&["limit", "show", "site", "--json"]);
    assert_eq!((&shown["parent"], &shown["weight"]), (&"web".into(), &300.into()));
    assert_eq!(shown["egress"]["rate_bit_s"], 80_000_000);
    assert_eq!(shown["ingress"]["rate_bit_s"], 80_000_000);
    assert!(shown["guarantee_bit_s"].is_null() && shown["egress"]["now_bit_s"].is_null());
    let status = place.ok(&["status"]);
    assert!(status.contains("\n  web  ") && status.contains("\n    site"), "{status}");
    assert!(place.ok(&["monitor", "--count", "1", "--interval", "10ms"]).contains("    site"));
    // The parent's rate is the ceiling at once, wherever it is changed.
    place.ok(&["limit", "set", "web", "--ceiling", "none"]);
    place.ok(&["limit", "set", "top", "--egress", "60mbit"]);
    assert_eq!(
        place.json(&["limit", "show", "site", "--json"])["egress"]["rate_bit_s"],
        60_000_000
    );
    place.ok(&["limit", "set", "top", "--ingress", "none"]);
    assert!(place.json(&["limit", "show", "site", "--json"])["ingress"].is_null());

    // A parent that moves takes what is inside it along; one that is left out changes nothing.
    let moved = spec(&other, &far, "web");
    let plan = place.tidegate().args(["plan", &file(&moved)]).output().unwrap();
    assert_eq!(plan.status.code(), Some(3));
    let done = apply(&moved);
    assert!(done.contains("2 added, 1 changed, 2 removed"), "{done}");
    assert!(Objects::on(&far).is_whole() && !Objects::on(&site).is_whole());
    let done = apply(
        &spec(&other, &far, "web").replace("parent = \"web\"\nweight = 300", "egress = \"9mbit\""),
    );
    assert!(done.contains("(parent web -> none)"), "{done}");
    apply(&moved);

    // A parent is put back with what is inside it, though the file knows only the parent.
    tidegate_sys::libbpf_rs::Link::open(place.store().join("web/egress"))
        .unwrap()
        .detach()
        .unwrap();
    let only = inside("web", &other, "top", "") + &limit("top", top, "egress = \"100mbit\"");
    let done = apply(&only);
    assert!(
        done.contains("- site on ") && done.contains("to be reattached with its parent"),
        "{done}"
    );
    let limits = place.json(&["status", "--json"]);
    let states = limits["limits"].as_array().unwrap().iter().map(|limit| &limit["state"]);
    assert_eq!(states.collect::<Vec<_>>(), ["in_force"; 3]);

    let (code, message) = place.refused(&["limit", "del", "web"]);
    assert_eq!(code, 1);
    assert!(message.contains("limit `web` is the parent of site; remove those first"), "{message}");
    let last = [top, &other, &far].map(Objects::on);
    place.ok(&["detach"]);
    assert!(!place.store().exists());
    groups.iter().chain(&last).for_each(Objects::wait_until_gone);
}

#[test]
fn root_trees_that_cannot_be_change_nothing() {
    need_root!();
    let place = Place::new();
    let top = &place.group;
    let web = place.hierarchy.create(top, "web").unwrap();
    place.ok(&["limit", "add", "top", "--cgroup", top.path(), "--egress", "100mbit"]);
    let add = |more: &str| {
        let words = ["limit", "add", "web", "--cgroup", web.path()];
        place.refused(&words.into_iter().chain(more.split(' ')).collect::<Vec<_>>())
    };
    let says = |(code, message): (i32, String), what: &str| {
        assert_eq!(code, 1, "{message}");
        assert!(message.contains(what), "{message}");
        assert_eq!(place.json(&["status", "--json"])["limits"].as_array().unwrap().len(), 1);
    };
    says(add("--parent nobody"), "--parent: there is no limit `nobody`");
    says(add("--parent web"), "--parent: a limit cannot be its own parent");
    says(add("--parent top --guarantee 101mbit"), "--guarantee: the limits inside `top`");
    says(add("--parent top --ingress 1mbit"), "--ingress: its parent `top` does not limit ingress");
    says(
        add("--parent top --scheme edt"),
        "--scheme: scheme `edt` neither has a parent nor is one",
    );
    says(add("--parent top --weight -1"), "--weight: -1 is out of range");
    says(add("--parent top --weight 1.5"), "--weight");
    says(add("--egress 1mbit --weight 5"), "--weight: only a limit inside another one has this");
    says(add("--egress 1mbit --ceiling 5mbit"), "--ceiling: only a limit inside another one");

    let spec = |text: &str| {
        let file = place.file("limits.toml", text);
        let (code, message) = place.refused(&["plan", file.to_str().unwrap()]);
        let applied = place.refused(&["apply", file.to_str().unwrap()]);
        assert_eq!(applied, (code, message.clone()), "plan and apply say the same");
        (code, message)
    };
    let text = limit("web", &web, "parent = \"top\"\nguarantee = \"200mbit\"");
    says(spec(&text), "limits.toml:1: limit `web`: guarantee: the limits inside `top`");
    let text = limit("x", top, "parent = \"y\"") + &limit("y", &web, "parent = \"x\"");
    says(spec(&text), "limits.toml:4: limit `x`: parent: `x` in `y` in `x` is a circle");
    let below = place.hierarchy.create(&web, "below").unwrap();
    let text = limit("in", &web, "parent = \"out\"") + &limit("out", &below, "egress = \"1mbit\"");
    says(spec(&text), "which does not contain cgroup");
    let (code, message) = place.refused(&["limit", "set", "top", "--weight", "5"]);
    assert!(code == 1 && message.contains("--weight: only a limit inside another"), "{message}");

    // Lowering a parent below what it has promised.
    place.ok(&[
        "limit",
        "add",
        "web",
        "--cgroup",
        web.path(),
        "--parent",
        "top",
        "--guarantee",
        "50mbit",
    ]);
    let more = ["--parent", "top", "--guarantee", "60mbit"];
    let beside = place.hierarchy.create(top, "beside").unwrap();
    let add = [&["limit", "add", "a", "--cgroup", beside.path()], &more[..]].concat();
    let (code, message) = place.refused(&add);
    assert!(
        code == 1 && message.contains("error: --guarantee: "),
        "of `a`, not of `web`: {message}"
    );
    let (code, message) = place.refused(&["limit", "set", "top", "--egress", "40mbit"]);
    assert!(code == 1 && message.contains("limit `web`: guarantee: "), "{message}");
    assert_eq!(
        place.json(&["limit", "show", "top", "--json"])["egress"]["rate_bit_s"],
        100_000_000
    );
}

#[test]
fn root_a_command_runs_inside_a_limit() {
    need_root!();
    let place = Place::new();
    let [web, batch] =
        ["web", "batch"].map(|name| place.hierarchy.create(&place.group, name).unwrap());
    let add = |name: &str, group: &Cgroup| {
        place.ok(&["limit", "add", name, "--cgroup", group.path(), "--egress", "100mbit"]);
    };
    add("batch", &batch);
    // Inside the parent's cgroup, and from elsewhere: it is made there.
    for from in [&batch, &web] {
        let mut command = place.inside(from, env!("CARGO_BIN_EXE_tidegate"));
        let flags = ["--parent", "batch", "--weight", "10", "--guarantee", "5mbit"];
        command.arg("run").args(flags).args([
            "--stats",
            "--json",
            "--",
            "cat",
            "/proc/self/cgroup",
        ]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let inside = format!("0::/{}/tidegate-run-", batch.path());
        assert!(text(&output).contains(&inside), "{}", text(&output));
        let stats: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!((&stats["parent"], &stats["weight"]), (&"batch".into(), &10.into()));
        assert_eq!(stats["guarantee_bit_s"], 5_000_000);
    }
    for (flags, says) in [
        (&["--parent", "nobody"][..], "there is no limit `nobody`"),
        (&["--parent", "batch", "--guarantee", "1gbit"], "--guarantee: the limits inside `batch`"),
        (&["--parent", "batch", "--ingress", "1mbit"], "--ingress: its parent `batch` does not"),
        (&["--weight", "5", "--egress", "1mbit"], "--weight: only a limit inside another one"),
    ] {
        let (code, message) = refused(place.run(flags).arg("true"));
        assert_eq!(code, 1, "{message}");
        assert!(message.contains(says), "{message}");
    }
    assert!(place.run_group().is_none());
    assert_eq!(place.hierarchy.find_below(batch.path(), |_| true), [batch.path()]);
}

/// A child on the cgroup of its parent has that cgroup's traffic, and shares the parent with other children.
#[test]
fn root_what_is_on_the_cgroup_of_its_parent_is_a_child_like_others() {
    need_root!();
    let scene = Scene::new();
    let [one, two] = ["n1", "n2"].map(|name| scene.below(&scene.place.group, name));
    let node = Path::new(scene.place.group.path()).join("n*");
    let node = format!(
        "[[limit]]\nname = \"node\"\nscope = {{ cgroup = \"{}\" }}\negress = \"20mbit\"\n\n",
        node.display()
    );
    let spec = |more: &str| {
        limit("one", &one, "parent = \"node\"\nguarantee = \"8mbit\"")
            + &limit("two", &two, "parent = \"node\"")
            + more
            + &node
    };
    scene.apply(&spec(""));
    let _senders = [scene.send(&one, "tcp 4"), scene.send(&two, "tcp 1")];
    // 8 and half of the 11.8 that are left.
    scene.settles(&[("node", 19.8), ("one", 13.9), ("two", 5.9)]);
    // Another one between the traffic and its limit.
    scene.apply(&spec(&limit("inner", &one, "parent = \"one\"\nceiling = \"4mbit\"")));
    assert_eq!(scene.place.order(&one), ["inner", "one", "node"]);
    scene.settles(&[("inner", 4.0), ("one", 4.0)]);
    scene.place.ok(&["limit", "del", "inner"]);
    scene.settles(&[("one", 13.9), ("two", 5.9)]);
}

/// Whatever puts one of them on again leaves the innermost first.
#[test]
fn root_limits_inside_each_other_keep_their_order_on_one_cgroup() {
    need_root!();
    let place = Place::new();
    let top = &place.group;
    let file = |text: &str| place.file("limits.toml", text).to_str().unwrap().to_owned();
    let apply = |text: &str| place.ok(&["apply", &file(text)]);
    let node = |more: &str| {
        limit("node", top, &format!("egress = \"90mbit\"\ningress = \"80mbit\"\n{more}"))
    };
    let inside = |name: &str, parent: &str| limit(name, top, &format!("parent = \"{parent}\""));
    let inner = inside("app", "tenant") + &inside("tenant", "node");
    let keeps = |names: [&str; 3]| {
        assert_eq!(place.order(top), names);
        let status = place.json(&["status", "--json"]);
        let limits = status["limits"].as_array().unwrap();
        assert!(limits.iter().all(|limit| limit["state"] == "in_force"), "{status}");
        assert_eq!(Objects::on(top).links(), 9);
    };
    let names = ["app", "tenant", "node"];
    apply(&(inner.clone() + &node("")));
    keeps(names);
    assert!(place.ok(&["plan", &file(&(inner.clone() + &node("")))]).contains("Nothing to do"));
    let explained = place.json(&["explain", &format!("/{}", top.path()), "--json"]);
    let applied = explained["places"][0]["limits"].as_array().unwrap().iter();
    assert_eq!(applied.map(|limit| &limit["name"]).collect::<Vec<_>>(), names);
    place.ok(&["limit", "set", "node", "--egress", "70mbit"]);
    place.ok(&["limit", "set", "tenant", "--weight", "7"]);
    keeps(names);
    place.ok(&["limit", "set", "node", "--ingress", "none"]);
    place.ok(&["limit", "set", "node", "--ingress", "60mbit"]);
    keeps(names);
    // Other programs for the outermost, for the innermost, and for both.
    apply(&(inner.clone() + &node("exempt = [\"10.1.0.0/16\"]")));
    keeps(names);
    apply(&(inner.replacen("parent", "exempt = [\"10.1.0.0/16\"]\nparent", 1) + &node("")));
    keeps(names);
    // Somebody takes a link off.
    for name in names {
        let pin = place.store().join(name).join("ingress");
        tidegate_sys::libbpf_rs::Link::open(pin).unwrap().detach().unwrap();
        place.ok(&["limit", "restore"]);
        keeps(names);
    }
    names.iter().for_each(|name| build_of_another(&place, name));
    place.ok(&["limit", "restore"]);
    keeps(names);
    // The tree is turned round.
    let turned = inside("node", "tenant") + &inside("tenant", "app");
    apply(&(turned + &limit("app", top, "egress = \"9mbit\"\ningress = \"9mbit\"")));
    keeps(["node", "tenant", "app"]);

    // What is beside them, or between, would count packets twice.
    let path = top.path();
    let add = |more: &[&str]| {
        place.refused(&[&["limit", "add", "x", "--cgroup", path][..], more].concat())
    };
    let (code, message) = add(&["--parent", "app"]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("--parent: `tenant` is inside `app` on the same cgroup"), "{message}");
    let (code, message) = add(&["--egress", "9mbit"]);
    assert!(code != 0 && message.contains("already has limit"), "{message}");
    let (code, message) = place.refused(&["run", "--parent", "app", "--", "true"]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("`tenant` is on a cgroup between the two"), "{message}");
    keeps(["node", "tenant", "app"]);
    place.ok(&["limit", "del", "node"]);
    assert_eq!(place.order(top), ["tenant", "app"]);
    place.ok(&["detach"]);
    assert_eq!((Objects::on(top).links(), place.store().exists()), (0, false));
}

/// A limit without a rate of its own has a placeholder, which nobody typed.
#[test]
fn root_a_run_inside_a_parent_reports_the_parents_rate() {
    need_root!();
    let place = Place::new();
    place.ok(&["limit", "add", "app", "--cgroup", place.group.path(), "--egress", "50mbit"]);
    place.ok(&["limit", "add", "in", "--cgroup", place.child("in").path(), "--parent", "app"]);
    let report = |json: &[&str]| {
        let flags = [&["--parent", "app", "--stats"], json].concat();
        String::from_utf8(place.run(&flags).arg("true").output().unwrap().stderr).unwrap()
    };
    let words = report(&[]);
    assert!(words.contains("egress 50mbit: "), "{words}");
    let json: Value = serde_json::from_str(&report(&["--json"])).unwrap();
    assert_eq!(json["egress"]["rate_bit_s"], 50_000_000, "{json}");
}

#[test]
fn root_members_join_before_the_limits_that_theirs_is_inside_of() {
    need_root!();
    let place = Place::new();
    let select = |name: &str, pattern: &str, fields: &str| {
        let pattern = Path::new(place.group.path()).join(pattern);
        let pattern = pattern.display();
        format!("[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{pattern}\" }}\n{fields}\n\n")
    };
    let spec = select("app", "t1*", "parent = \"tenant\"")
        + &select("tenant", "t*", "parent = \"node\"")
        + &limit("node", &place.group, "egress = \"90mbit\"");
    let file = place.file("limits.toml", &spec);
    let apply = || place.ok(&["apply", file.to_str().unwrap()]);
    let first = place.child("t1");
    apply();
    let [other, second] = ["t2", "t1b"].map(|name| place.child(name));
    apply();
    for (group, order) in [
        (&first, &["app", "tenant"][..]),
        (&second, &["app", "tenant"]),
        (&other, &["tenant"]),
        (&place.group, &["node"]),
    ] {
        assert_eq!(place.order(group), order, "{}", group.path());
    }
    // The whole tree on the same cgroups.
    let spec = spec.replace(&limit("node", &place.group, "egress = \"90mbit\""), "");
    let spec = spec + &select("node", "t?*", "egress = \"90mbit\"");
    std::fs::write(&file, spec).unwrap();
    apply();
    assert_eq!(place.order(&first), ["app", "tenant", "node"]);
    assert_eq!(place.order(&second), ["app", "tenant", "node"]);
    assert_eq!(place.order(&other), ["tenant", "node"]);
    let third = place.child("t1c");
    apply();
    assert_eq!(place.order(&third), ["app", "tenant", "node"]);
    place.ok(&["detach"]);
}
