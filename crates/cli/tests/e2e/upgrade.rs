//! Limits that binaries of earlier commits have put on, and this one: `make test-upgrade` builds those.

use std::{
    env, fmt, fs,
    io::Read,
    net::{TcpListener, UdpSocket},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use serde_json::Value;
use tidegate_sys::features::has_qdisc;

use crate::{
    common::{Guard, Place, skip, wait_for},
    edt::{self, Bed, PORT, RECEIVER, into, tidegate},
    htb::links,
    need_root,
    older::{ids_of, pacing},
    traffic::{accept, sender},
};

/// The binaries, with `:` between them.
const OLDER: &str = "TIDEGATE_OLDER";

/// The first versions have no limits on several cgroups.
const MEMBERS: &str = "members";

/// The first versions have a scheme for each limit that names none.
const AUTO: &str = "auto";

/// Two limits of one device.
const MATCH: &str = "match";

/// Needs the qdisc `fq`, which not every kernel has.
const EDT: &str = "edt";

/// How versions refuse a scheme that they do not have.
const UNKNOWN: [&str; 2] = ["unknown scheme", "for '--scheme <SCHEME>'"];

/// A connection that goes on brings so many bytes more.
const MORE_BYTES: u64 = 100_000;

/// What an earlier binary puts on, and a name for it.
const CASES: [(&str, &[&str]); 15] = [
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
    ("dem", &["add a --port eth0 --scheme dem --egress 20mbit --ingress 20mbit"]),
    (AUTO, &["add a --dev eth0 --scheme auto --egress 20mbit --ingress 20mbit"]),
    ("device", &["add a --dev eth0 --scheme police --egress 20mbit --ingress 20mbit"]),
    (
        MATCH,
        &[
            "add a --dev eth0 --scheme police --egress 20mbit --match 10.97.0.0/24",
            "add b --dev eth0 --scheme police --egress 10mbit --match 10.98.0.0/24",
        ],
    ),
    ("xdp", &["add a --dev eth0 --scheme police --ingress 20mbit --hook xdp"]),
    ("tbf", &["add a --dev eth0 --scheme tbf --egress 20mbit"]),
    (EDT, &["add a --dev eth0 --scheme edt --egress 20mbit"]),
];

/// By which verb this binary goes on with limits of an earlier one.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Verb {
    Restore,
    Apply,
}

struct Scene {
    place: Place,
    bed: Bed,
    group: String,
    inside: String,
}

impl Scene {
    fn new() -> Scene {
        let place = Place::new();
        let (group, inside) = (place.child("g"), place.child("g/in"));
        let (group, inside) = (group.path().to_owned(), inside.path().to_owned());
        Scene { place, bed: Bed::new(), group, inside }
    }

    fn ok(&self, words: &str) -> String {
        edt::ok(&self.place, &self.bed, words)
    }

    /// Why the earlier binary refuses, if it does.
    fn older(&self, binary: &Path, words: &str) -> Result<(), String> {
        let mut command = into(&self.bed.sender, binary.to_str().unwrap());
        self.place.keep_to(&mut command).args(words.split(' '));
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

    /// The number of the layout of a limit; the first versions wrote none down.
    fn layout(&self, name: &str) -> Option<Value> {
        let intent = fs::read_link(self.place.store().join(name).join("intent")).ok()?;
        let intent: Value = serde_json::from_str(intent.to_str()?).ok()?;
        Some(intent["abi"].clone())
    }

    /// The limits as they are in the kernel and in the store.
    fn installed(&self, names: &[&str]) -> impl PartialEq + fmt::Debug {
        let intents: Vec<_> = names.iter().map(|name| self.place.intent(name)).collect();
        (intents, ids_of(&self.place.store()), self.bed.qdiscs())
    }
}

/// The limits of `limit add` as a spec file.
fn spec(adds: &[String]) -> String {
    let mut text = String::new();
    for add in adds {
        let words: Vec<_> = add.split(' ').collect();
        text += &format!("[[limit]]\nname = \"{}\"\n", words[1]);
        for pair in words[2..].chunks(2) {
            let (key, value) = (pair[0].trim_start_matches("--"), pair[1]);
            text += &match key {
                "cgroup" | "dev" | "port" => format!("scope = {{ {key} = \"{value}\" }}\n"),
                "weight" => format!("{key} = {value}\n"),
                "exempt" | "match" => format!("{key} = [\"{value}\"]\n"),
                _ => format!("{key} = \"{value}\"\n"),
            };
        }
    }
    text
}

/// This very program in the cgroup and the namespace of the sender.
fn helper(scene: &Scene, order: &str) -> Command {
    let inside = scene.place.hierarchy.open(&scene.inside).unwrap();
    let mut command = scene.place.inside(&inside, "nsenter");
    command.arg(edt::net_of(&scene.bed.sender)).arg("env");
    sender(&mut command, order);
    command
}

/// Sends datagrams from the cgroup to the other end and back, until it is dropped.
fn traffic(scene: &Scene) -> [Guard; 2] {
    let out = helper(scene, &format!("datagrams {RECEIVER}:{PORT} 0"));
    let mut back = into(&scene.bed.receiver, "env");
    sender(&mut back, &format!("datagrams {}:{PORT} 0", edt::SENDER));
    back.stdout(Stdio::null());
    [out, back].map(|mut command: Command| Guard(command.spawn().unwrap()))
}

/// One connection of TCP from the cgroup to the other end, whose sender ends if it is lost.
struct Connection {
    sender: Guard,
    received: Arc<AtomicU64>,
}

impl Connection {
    fn start(scene: &Scene) -> Connection {
        let listen = || TcpListener::bind(("0.0.0.0", PORT)).unwrap();
        let listener = scene.bed.receiver.run(listen).unwrap();
        let mut command = helper(scene, &format!("stream {RECEIVER}:{PORT} 1000"));
        let sender = Guard(command.spawn().unwrap());
        let mut stream = accept(&listener);
        let received = Arc::new(AtomicU64::new(0));
        let count = received.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(bytes @ 1..) = stream.read(&mut buffer) {
                count.fetch_add(bytes as u64, Ordering::Relaxed);
            }
        });
        Connection { sender, received }
    }

    fn goes_on(&mut self, at: &str) {
        let before = self.received.load(Ordering::Relaxed);
        wait_for(&format!("{at}: more of the connection"), || {
            let ended = self.sender.0.try_wait().unwrap();
            assert!(ended.is_none(), "{at}: the connection is lost, {ended:?}");
            (self.received.load(Ordering::Relaxed) >= before + MORE_BYTES).then_some(())
        });
    }
}

fn goes_on(scene: &Scene, binary: &Path, verb: Verb, case: &str, adds: &[&str]) {
    let at = format!("{case}, {}, {verb:?}", binary.display());
    let fill = |words: &&str| words.replace("{g}", &scene.group).replace("{in}", &scene.inside);
    let adds: Vec<_> = adds.iter().map(fill).collect();
    let file = scene.place.file("limits.toml", &spec(&adds));
    let apply = format!("apply {}", file.display());
    let before = scene.bed.qdiscs();
    for words in &adds {
        let done = scene.older(binary, &format!("limit {words}"));
        let is_unknown = |said: &String| UNKNOWN.iter().any(|words| said.contains(words));
        if done.as_ref().is_err_and(|said| case == MEMBERS || is_unknown(said)) {
            println!("{at}: not known there");
            return;
        }
        assert!(done.is_ok(), "{at}: {words}: {done:?}");
    }
    let names = &["a", "b"][..adds.len()];
    let layout = scene.layout("a");
    let _sockets = [&scene.bed.receiver, &scene.bed.sender]
        .map(|netns| netns.run(|| UdpSocket::bind(("0.0.0.0", PORT)).unwrap()).unwrap());
    let _traffic = traffic(scene);
    let mut connection = Connection::start(scene);
    connection.goes_on(&at);

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

    // It goes on as it was asked for: by the file, or if somebody wrote that down.
    let go_on = if verb == Verb::Apply { apply.as_str() } else { "limit restore" };
    let (code, _, said) = tidegate(&scene.place, &scene.bed, go_on);
    let how = match (verb, is_read, code) {
        (Verb::Apply, ..) => "applied",
        (_, true, 0) => "taken over",
        (_, false, 0) => "restored",
        _ => "put on anew",
    };
    if code != 0 {
        assert!(verb == Verb::Restore && !is_read, "{at}: {said}");
        assert!(said.contains("tidegate limit del a"), "{at}: {said}");
        for name in names.iter().rev() {
            scene.ok(&format!("limit del {name}"));
        }
        for words in &adds {
            scene.ok(&format!("limit {words}"));
        }
    }
    for name in names {
        let row = scene.row(name);
        assert_eq!(row["state"], "in_force", "{at}: {row}");
        assert!(row["other_build"].is_null(), "{at}: {row}");
    }
    assert_eq!(scene.row("a")["scheme_chosen"].is_string(), case == AUTO, "{at}");
    let first = scene.counted("a");
    assert!(first >= was, "{at}: {first} packets, {was} before");
    wait_for("packets in the limit that is there now", || {
        (scene.counted("a") > first).then_some(())
    });
    connection.goes_on(&at);
    if verb == Verb::Apply {
        let again = scene.ok(&apply);
        assert!(again.contains("Nothing to do"), "{at}: {again}");
    }
    if !is_xdp {
        scene.ok("limit set a --egress 40mbit");
        assert_eq!(scene.row("a")["egress"]["rate_bit_s"], 40_000_000, "{at}");
    }
    if scene.layout("a") != layout {
        // The first versions know of no other layout, only that they cannot read it.
        let says = layout.map_or("", |_| "newer than this one");
        is_not_downgraded(scene, binary, &at, names, (&apply, says));
    }
    if adds[0].contains("--scheme pace") {
        // The programs of today have taken the connection in: its pace follows the rate.
        scene.ok("limit set a --egress 4mbit");
        let inside = scene.place.hierarchy.open(&scene.inside).unwrap();
        wait_for("the new pace of the connection", || {
            pacing(&scene.place, &inside).filter(|bytes_s| *bytes_s <= 520_000)
        });
    }
    connection.goes_on(&at);
    scene.ok("detach");
    assert_eq!(scene.bed.qdiscs(), before, "{at}");
    assert!(!links(&scene.bed).contains("tgifb"), "{at}: {}", links(&scene.bed));
    assert!(!scene.place.store().exists(), "{at}");
    println!("{at}: {how}");
}

/// The earlier binary, of another layout, refuses limits of this one, says why, and changes nothing.
fn is_not_downgraded(
    scene: &Scene,
    binary: &Path,
    at: &str,
    names: &[&str],
    (apply, says): (&str, &str),
) {
    let before = scene.installed(names);
    let verbs = ["limit restore a", "limit set a --egress 10mbit", apply];
    // The first versions put on anew what they cannot read. So did later ones with two limits of one device.
    let refused = if says.is_empty() || at.starts_with(MATCH) { &verbs[..2] } else { &verbs[..] };
    for words in refused {
        let done = scene.older(binary, words);
        assert!(done.as_ref().is_err_and(|said| said.contains(says)), "{at}: {words}: {done:?}");
        assert_eq!(scene.installed(names), before, "{at}: {words}: {done:?}");
    }
    let counted = scene.counted("a");
    wait_for("packets after a downgrade", || (scene.counted("a") > counted).then_some(()));
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
            for verb in [Verb::Restore, Verb::Apply] {
                let scene = Scene::new();
                if case == EDT {
                    let fq = scene.bed.tc("qdisc replace dev eth0 root fq");
                    assert!(fq.status.success(), "{fq:?}");
                }
                goes_on(&scene, &binary, verb, case, adds);
            }
        }
    }
}
