//! Limits inside limits, on traffic between two namespaces: who has which part of the parent. Tolerances are
//! wide, and a part that is not yet right is looked at again until it is: noise moves the figures of a second,
//! not where they settle.

use std::{
    env,
    io::{ErrorKind, Write},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::Value;
use tidegate_sys::cgroup::Cgroup;

use crate::{
    common::{Guard, Place},
    edt::{Bed, PORT, RECEIVER, Server, blast, net_of},
    need_root,
};

const HELPER: &str = "TIDEGATE_TEST_TREE";
/// How long traffic may take to be as it should.
const SETTLES: Duration = Duration::from_secs(25);

/// In the process under test: `tcp FLOWS` or `udp BIT/S` sends to the receiver until it is killed.
pub fn help() {
    let Ok(order) = env::var(HELPER) else { return };
    let (kind, number) = order.split_once(' ').unwrap();
    let end = Instant::now() + 4 * SETTLES;
    if kind == "udp" {
        return blast(RECEIVER, number.parse().unwrap(), end);
    }
    std::thread::scope(|scope| {
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
struct Scene {
    place: Place,
    bed: Bed,
    _server: Server,
}

impl Scene {
    fn new() -> Scene {
        let bed = Bed::new();
        let _server = bed.serve();
        Scene { place: Place::new(), bed, _server }
    }

    /// A cgroup below another one.
    fn below(&self, group: &Cgroup, name: &str) -> Cgroup {
        self.place.hierarchy.create(group, name).unwrap()
    }

    fn apply(&self, text: &str) -> String {
        self.place.ok(&["apply", self.place.file("limits.toml", text).to_str().unwrap()])
    }

    fn send(&self, group: &Cgroup, order: &str) -> Guard {
        let mut command: Command = self.place.inside(group, "nsenter");
        command.arg(net_of(&self.bed.sender)).arg(env::current_exe().unwrap());
        command.args(["helper", "--exact"]).env(HELPER, order);
        Guard(command.stdout(std::process::Stdio::null()).spawn().unwrap())
    }

    /// What each limit used in a second, in Mbit/s.
    fn used(&self) -> Vec<(String, f64)> {
        let text = self.place.ok(&["monitor", "--json", "--interval", "1s", "--count", "1"]);
        let samples = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let used = |sample: &Value| sample["egress"]["used_bit_s"].as_f64().unwrap() / 1e6;
        samples.map(|sample| (sample["name"].as_str().unwrap().to_owned(), used(&sample))).collect()
    }

    /// Waits until each limit uses what it should, in Mbit/s, within a fifth and 2 Mbit/s.
    fn settles(&self, should: &[(&str, f64)]) {
        let deadline = Instant::now() + SETTLES;
        let mut seen = Vec::new();
        loop {
            let used = self.used();
            let is = |name: &str| used.iter().find(|(is, _)| is == name).unwrap().1;
            if should.iter().all(|(name, mbit)| (is(name) - mbit).abs() < mbit / 5.0 + 2.0) {
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
        limit("top", top, "egress = \"100mbit\"")
            + &limit("web", &web, "parent = \"top\"\nguarantee = \"40mbit\"")
            + &limit("batch", &batch, &format!("parent = \"top\"\nweight = {weight}"))
    };
    scene.apply(&spec(200));
    let _web = scene.send(&web, "tcp 4");
    let batch_sends = scene.send(&batch, "tcp 1");
    // 40 and a third of the 59 that are left.
    scene.settles(&[("top", 99.0), ("web", 59.7), ("batch", 39.3)]);

    let changed = scene.apply(&spec(100));
    assert!(changed.contains("~ batch: weight 200 -> 100"), "{changed}");
    scene.settles(&[("web", 69.5), ("batch", 29.5)]);
    scene.place.ok(&["limit", "set", "batch", "--ceiling", "10mbit"]);
    scene.settles(&[("web", 89.0), ("batch", 10.0)]);

    drop(batch_sends);
    scene.settles(&[("web", 99.0), ("batch", 0.0)]);
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
            + &limit("site", &site, "parent = \"web\"\nguarantee = \"20mbit\"\nweight = 300")
            + &limit("shop", &shop, "parent = \"web\"\nweight = 100")
            + &limit(
                "web",
                &web,
                "parent = \"top\"\nguarantee = \"30mbit\"\nceiling = \"80mbit\"",
            )
            + &limit("top", top, "egress = \"100mbit\"")),
    );
    // Three levels: 30 and half of the rest for web, of that 20 and three quarters of the rest for site.
    let site_sends = scene.send(&site, "tcp 2");
    let _shop = scene.send(&shop, "tcp 1");
    let batch_sends = scene.send(&batch, "tcp 2");
    scene.settles(&[("web", 64.5), ("batch", 34.5), ("site", 52.9), ("shop", 11.0)]);
    drop(batch_sends);
    scene.settles(&[("web", 79.2), ("batch", 0.0), ("site", 64.4), ("shop", 14.8)]);
    drop(site_sends);
    scene.settles(&[("web", 79.2), ("site", 0.0), ("shop", 79.2)]);

    // What belongs to none of them is a class beside them, in which UDP cannot take what is guaranteed.
    let free = scene.below(top, "free");
    let _udp = scene.send(&free, "udp 150e6");
    scene.settles(&[("top", 99.0), ("web", 64.5)]);
    let _batch = scene.send(&batch, "udp 150e6");
    scene.settles(&[("top", 99.0), ("web", 53.0), ("batch", 23.0)]);
}

#[test]
fn root_what_comes_in_is_shared_too() {
    need_root!();
    let scene = Scene::new();
    let top = &scene.place.group;
    let [one, two] = ["one", "two"].map(|name| scene.below(top, name));
    let fields = |more: &str| format!("parent = \"top\"\n{more}");
    scene.apply(
        &(limit("top", top, "ingress = \"40mbit\"")
            + &limit("one", &one, &fields("guarantee = \"20mbit\""))
            + &limit("two", &two, &fields("weight = 50"))),
    );
    let status = scene.place.json(&["limit", "show", "one", "--json"]);
    assert!(
        status["egress"].is_null() && status["ingress"]["rate_bit_s"] == 40_000_000,
        "{status}"
    );
    let (code, message) = scene.place.refused(&["limit", "set", "one", "--egress", "1mbit"]);
    assert_eq!(code, 1);
    assert!(message.contains("--egress: its parent `top` does not limit egress"), "{message}");
}
