//! Limits that binaries of earlier commits have put on, and this one: `make test-upgrade` builds those.

use std::{
    env,
    net::UdpSocket,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;
use tidegate_sys::features::has_qdisc;

use crate::{
    common::{Guard, Place, skip, wait_for},
    edt::{self, Bed, PORT, RECEIVER, into, tidegate},
    htb::links,
    need_root,
    traffic::sender,
};

/// The binaries, with `:` between them.
const OLDER: &str = "TIDEGATE_OLDER";

/// The first versions have no limits on several cgroups.
const MEMBERS: &str = "members";

/// Needs the qdisc `fq`, which not every kernel has.
const EDT: &str = "edt";

/// How versions refuse a scheme that they do not have.
const UNKNOWN: [&str; 2] = ["unknown scheme", "for '--scheme <SCHEME>'"];

/// What an earlier binary puts on, and a name for it.
const CASES: [(&str, &[&str]); 13] = [
    ("pace", &["add a --cgroup {g} --scheme pace --egress 20mbit --ingress 20mbit"]),
    ("nrm", &["add a --cgroup {g} --scheme nrm --egress 20mbit --exempt 10.1.0.0/16"]),
    (MEMBERS, &["add a --cgroup {g}* --scheme pace --egress 20mbit --ingress 20mbit"]),
    ("police", &["add a --cgroup {g} --scheme police --egress 20mbit"]),
    (
        "tree",
        &[
            "add a --cgroup {g} --scheme pace --egress 20mbit",
            "add b --cgroup {in} --parent a --weight 300",
        ],
    ),
    ("htb", &["add a --dev eth0 --scheme htb --egress 20mbit --ingress 20mbit"]),
    (
        "htb tree",
        &[
            "add a --dev eth0 --scheme htb --egress 20mbit",
            "add b --cgroup {in} --parent a --scheme htb --weight 300",
        ],
    ),
    ("spring", &["add a --port eth0 --scheme spring --egress 20mbit --ingress 20mbit"]),
    ("device", &["add a --dev eth0 --scheme police --egress 20mbit --ingress 20mbit"]),
    (
        "match",
        &[
            "add a --dev eth0 --scheme police --egress 20mbit --match 10.97.0.0/24",
            "add b --dev eth0 --scheme police --egress 10mbit --match 10.98.0.0/24",
        ],
    ),
    ("xdp", &["add a --dev eth0 --scheme police --ingress 20mbit --hook xdp"]),
    ("tbf", &["add a --dev eth0 --scheme tbf --egress 20mbit"]),
    (EDT, &["add a --dev eth0 --scheme edt --egress 20mbit"]),
];

struct Scene {
    place: Place,
    bed: Bed,
    group: String,
    inside: String,
}

impl Scene {
    fn ok(&self, words: &str) -> String {
        edt::ok(&self.place, &self.bed, words)
    }

    /// Why the earlier binary refuses, if it does.
    fn older(&self, binary: &Path, words: &str) -> Result<(), String> {
        let words = words.replace("{g}", &self.group).replace("{in}", &self.inside);
        let mut command = into(&self.bed.sender, binary.to_str().unwrap());
        command.env("TIDEGATE_BPFFS", self.place.store()).arg("limit").args(words.split(' '));
        let output = command.output().unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    fn row(&self, name: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("limit show {name} --json"))).unwrap()
    }

    /// Packets that a limit has counted, whatever became of them.
    fn counted(&self, name: &str) -> u64 {
        let row = self.row(name);
        let passed = |way: &str| row[way]["pass_packets"].as_u64().unwrap_or_default();
        passed("egress") + passed("ingress")
    }
}

/// Sends datagrams from the cgroup to the other end and back, until it is dropped.
fn traffic(scene: &Scene) -> [Guard; 2] {
    let Scene { place, bed, .. } = scene;
    let inside = place.hierarchy.open(&scene.inside).unwrap();
    let mut out = place.inside(&inside, "nsenter");
    out.arg(edt::net_of(&bed.sender)).arg("env");
    sender(&mut out, &format!("datagrams {RECEIVER}:{PORT} 0"));
    let mut back = into(&bed.receiver, "env");
    sender(&mut back, &format!("datagrams {}:{PORT} 0", edt::SENDER));
    back.stdout(Stdio::null());
    [out, back].map(|mut command: Command| Guard(command.spawn().unwrap()))
}

fn goes_on(scene: &Scene, binary: &Path, case: &str, adds: &[&str]) {
    let at = format!("{case}, {}", binary.display());
    let before = scene.bed.qdiscs();
    for words in adds {
        let done = scene.older(binary, words);
        let is_unknown = |said: &String| UNKNOWN.iter().any(|words| said.contains(words));
        if done.as_ref().is_err_and(|said| case == MEMBERS || is_unknown(said)) {
            println!("{at}: not known there");
            return;
        }
        assert!(done.is_ok(), "{at}: {words}: {done:?}");
    }
    let names = &["a", "b"][..adds.len()];
    let _sockets = [&scene.bed.receiver, &scene.bed.sender]
        .map(|netns| netns.run(|| UdpSocket::bind(("0.0.0.0", PORT)).unwrap()).unwrap());
    let _traffic = traffic(scene);

    // Each is in force or one row that says what to type; no verb stumbles over it.
    let status: Value = serde_json::from_str(&scene.ok("status --json")).unwrap();
    assert_eq!(status["limits"].as_array().unwrap().len(), names.len(), "{at}: {status}");
    let is_read = scene.row("a")["state"] == "in_force";
    let (code, _, said) = tidegate(&scene.place, &scene.bed, "limit set a --egress 30mbit");
    let is_xdp = case == "xdp";
    assert!(is_xdp || (code == 0) == is_read, "{at}: {said}");
    assert!(is_xdp || is_read || said.contains("tidegate limit "), "{at}: {said}");
    if is_read {
        wait_for("packets", || (scene.counted("a") > 0).then_some(()));
    }
    let was = if is_read { scene.counted("a") } else { 0 };

    // It goes on as it was asked for, if somebody wrote that down.
    let (code, _, said) = tidegate(&scene.place, &scene.bed, "limit restore");
    let how = match (is_read, code) {
        (true, 0) => "taken over",
        (false, 0) => "restored",
        _ => "put on anew",
    };
    if code != 0 {
        assert!(!is_read && said.contains("tidegate limit del a"), "{at}: {said}");
        for name in names.iter().rev() {
            scene.ok(&format!("limit del {name}"));
        }
        for words in adds {
            let words = words.replace("{g}", &scene.group).replace("{in}", &scene.inside);
            scene.ok(&format!("limit {words}"));
        }
    }
    for name in names {
        let row = scene.row(name);
        assert_eq!(row["state"], "in_force", "{at}: {row}");
        assert!(row["other_build"].is_null(), "{at}: {row}");
    }
    let first = scene.counted("a");
    assert!(first >= was, "{at}: {first} packets, {was} before");
    wait_for("packets in the limit that is there now", || {
        (scene.counted("a") > first).then_some(())
    });
    if !is_xdp {
        scene.ok("limit set a --egress 40mbit");
        assert_eq!(scene.row("a")["egress"]["rate_bit_s"], 40_000_000, "{at}");
    }
    // A downgrade is refused, unless both builds have the same layout, and changes nothing.
    let row = |row: Value| ["state", "scheme", "cgroup", "device"].map(|key| row[key].clone());
    let before_downgrade = row(scene.row("a"));
    let refused = scene.older(binary, "restore a").err();
    assert_eq!(row(scene.row("a")), before_downgrade, "{at}: {refused:?}");
    scene.ok("detach");
    assert_eq!(scene.bed.qdiscs(), before, "{at}");
    assert!(!links(&scene.bed).contains("tgifb"), "{at}: {}", links(&scene.bed));
    assert!(!scene.place.store().exists(), "{at}");
    println!("{at}: {how}");
}

#[test]
fn root_limits_of_earlier_binaries_go_on() {
    need_root!();
    let Some(older) = env::var_os(OLDER) else {
        return skip("needs binaries of earlier commits: `make test-upgrade`");
    };
    for binary in env::split_paths(&older) {
        for (case, adds) in CASES {
            if case == EDT && has_qdisc("fq") == Some(false) {
                println!("{case}, {}: the kernel has no fq", binary.display());
                continue;
            }
            let place = Place::new();
            let (group, inside) = (place.child("g"), place.child("g/in"));
            let (group, inside) = (group.path().to_owned(), inside.path().to_owned());
            let scene = Scene { place, bed: Bed::new(), group, inside };
            goes_on(&scene, &binary, case, adds);
        }
    }
}
