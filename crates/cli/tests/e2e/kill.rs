//! A writer that is killed before any of its changes: the next command finds the host in order. It
//! finishes or undoes what was begun, limits that were on are on, and traffic flows.
//!
//! `make test` kills at a sample of all places, by a seed that it prints (`TIDEGATE_KILL_SEED` gives
//! another). `make test-kill` (`TIDEGATE_KILL=all`) kills at every place and 1000 times at random
//! moments, `TIDEGATE_KILL=moments` at these alone. Scheme `edt` has a test of its own, for kernels that
//! have `fq`.

use std::{
    collections::BTreeMap,
    env, fs,
    io::Write,
    net::UdpSocket,
    path::PathBuf,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::Value;
use tidegate_core::Rate;
use tidegate_sys::{libbpf_rs::libbpf_sys, net::NetNs, store::Store};

use crate::{
    common::{Objects, PATIENCE, Place, entries, kernel_before, skip},
    edt::{cable, into},
    need_root,
    older::build_of_another,
    tracer,
};

/// The sample ends after this time ...
const SAMPLE_TIME: Duration = Duration::from_secs(40);
/// ... and the sample of scheme `edt` after this one.
const EDT_SAMPLE_TIME: Duration = Duration::from_secs(10);
/// Kills at random moments in the long form.
const MOMENTS: u32 = 1000;
const PORT: u16 = 9797;
const NEAR: &str = "10.98.0.1";
const FAR: &str = "10.98.0.2";
/// The devices that limits are on: towards the other host, and a port.
const DEVICES: [&str; 2] = ["eth0", "tap0"];

/// A host with a device, a port and cgroups, one inside another, behind it another one that answers.
struct Scene {
    place: Place,
    near: NetNs,
    far: NetNs,
    groups: [String; 3],
}

/// Something that changes limits.
struct Case {
    name: String,
    /// What is done before.
    setup: Vec<String>,
    /// What is killed.
    words: String,
    /// The limits that are on before, and stay.
    stay: Vec<&'static str>,
}

/// What the kernel and the store hold, without ids and counters.
type Snapshot = BTreeMap<&'static str, Vec<String>>;

impl Scene {
    fn new() -> Scene {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let place = Place::new();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("tidegate-kill-{}-{number}-{side}", std::process::id());
        let near = NetNs::create(&name("n")).unwrap();
        let far = NetNs::create(&name("f")).unwrap();
        cable(&near, "eth0", NEAR, &far, "eth0", FAR);
        cable(&near, "tap0", "10.99.0.1", &far, "tap0", "10.99.0.2");
        let groups = ["x", "y", "x/in"].map(|name| place.child(name).path().to_owned());
        Scene { place, near, far, groups }
    }

    fn fill(&self, words: &str) -> String {
        let [x, y, inside] = &self.groups;
        words.replace("{x}", x).replace("{y}", y).replace("{in}", inside)
    }

    fn command(&self, words: &str) -> Command {
        let mut command = into(&self.near, env!("CARGO_BIN_EXE_tidegate"));
        command.env("TIDEGATE_BPFFS", self.place.store()).stdout(Stdio::null());
        if let Some(spec) = words.strip_prefix("apply ") {
            let file = self.place.file("limits.toml", &self.fill(spec));
            command.args(["apply", "--prune"]).arg(file);
        } else {
            command.args(self.fill(words).split_whitespace());
        }
        command
    }

    fn try_to(&self, words: &str) -> Result<String, String> {
        let output = self.command(words).stdout(Stdio::piped()).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        match output.status.success() {
            true => Ok(text(output.stdout)),
            false => Err(format!("`{words}`: {}", text(output.stderr))),
        }
    }

    fn tc(&self, words: &str) -> String {
        let output = into(&self.near, "tc").args(words.split(' ')).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn snapshot(&self) -> Snapshot {
        let mut found = Snapshot::new();
        let devices = self.near.netlink().unwrap().devices().unwrap();
        found.insert("devices", devices.iter().map(|device| device.name.clone()).collect());
        let qdiscs = self.tc("qdisc show");
        let words = |line: &str| line.split(' ').take(5).collect::<Vec<_>>().join(" ");
        let mut qdiscs: Vec<_> = qdiscs.lines().map(words).collect();
        qdiscs.sort();
        found.insert("qdiscs", qdiscs);
        let classes = devices.iter().flat_map(|device| {
            let classes = self.tc(&format!("class show dev {}", device.name));
            classes.lines().map(|line| format!("{}: {line}", device.name)).collect::<Vec<_>>()
        });
        // Slots and rates; not what the kernel makes of bursts.
        let classes = classes.map(|line| line.split(" burst").next().unwrap_or("").to_owned());
        let mut classes: Vec<_> = classes.filter(|line| line.contains("htb 7467")).collect();
        classes.sort();
        found.insert("classes", classes);
        for (side, words) in [("filters in", "ingress"), ("filters out", "egress")] {
            let filters = DEVICES.map(|device| {
                let filters = self.tc(&format!("filter show dev {device} {words}"));
                let filters = filters.lines().filter(|line| line.contains("handle"));
                // libbpf names a filter of clsact after the program and its id: `name:[id]`.
                let line = |line: &str| {
                    let line = line.split(" id ").next().unwrap_or("");
                    let (name, rest) = line.split_once(":[").unwrap_or((line, ""));
                    format!("{name}{}", rest.split_once(']').map_or("", |(_, rest)| rest))
                };
                filters.map(line).collect::<Vec<_>>()
            });
            found.insert(side, filters.concat());
        }
        let programs = DEVICES.map(|name| {
            let index = devices.iter().find(|device| device.name == name).unwrap().index;
            self.near.run(|| programs_of(index)).unwrap()
        });
        found.insert("programs", programs.concat());
        let xdp = into(&self.near, "ip").args(["link", "show", "eth0"]).output().unwrap();
        let xdp = String::from_utf8(xdp.stdout).unwrap().contains("prog/xdp");
        found.insert("xdp", vec![xdp.to_string()]);
        let on = |path: &String| {
            let group = self.place.hierarchy.open(path).unwrap();
            Objects::on(&group).links().to_string()
        };
        found.insert("cgroups", self.groups.iter().map(on).collect());
        let store = Store::at(self.place.store());
        let order = |path: &String| {
            let group = self.place.hierarchy.open(path).unwrap();
            store.order_on(&group).unwrap().map(|names| names.join(" then "))
        };
        found.insert("order", self.groups.iter().flat_map(order).collect());
        // A pool of children has the id of its parent's map in its name.
        let named = |name: String| match name.split_once("_inside_") {
            Some((pool, rest)) => {
                let slots = rest.split_once('_').map_or(rest, |(_, slots)| slots);
                format!("{pool}_inside_MAP_{slots}")
            }
            None => name,
        };
        let store = entries(&self.place.store());
        let mut store: Vec<_> = store.into_iter().map(named).collect();
        store.sort();
        found.insert("store", store);
        found
    }

    /// A datagram there and back.
    fn is_alive(&self) -> bool {
        let bind = |ip: &str, port| UdpSocket::bind((ip, port)).unwrap();
        let there = self.far.run(|| bind(FAR, PORT)).unwrap();
        let here = self.near.run(|| bind(NEAR, 0)).unwrap();
        let deadline = Instant::now() + PATIENCE;
        for socket in [&there, &here] {
            socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        }
        let mut buffer = [0; 16];
        while Instant::now() < deadline {
            let _ = here.send_to(b"ping", (FAR, PORT));
            let Ok((_, from)) = there.recv_from(&mut buffer) else { continue };
            let _ = there.send_to(b"pong", from);
            if here.recv_from(&mut buffer).is_ok() {
                return true;
            }
        }
        false
    }

    /// Everything off, and nothing left.
    fn clear(&self, pristine: &Snapshot) -> Result<(), String> {
        self.try_to("detach")?;
        same("after detach", &self.snapshot(), pristine)
    }
}

/// How many programs are on a device of the calling thread's namespace: in, out.
pub fn programs_of(index: u32) -> [String; 2] {
    [libbpf_sys::BPF_TCX_INGRESS, libbpf_sys::BPF_TCX_EGRESS].map(|side| {
        let mut options = libbpf_sys::bpf_prog_query_opts {
            sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as _,
            ..Default::default()
        };
        // SAFETY: the struct says its size and outlives the call; no arrays are given, so the kernel counts.
        let done = unsafe { libbpf_sys::bpf_prog_query_opts(index as i32, side, &raw mut options) };
        // SAFETY: the kernel has written the number, or it is zero.
        let count = unsafe { options.__bindgen_anon_1.prog_cnt };
        if done == 0 { count.to_string() } else { "0".to_owned() }
    })
}

fn same(when: &str, is: &Snapshot, shall: &Snapshot) -> Result<(), String> {
    let differs = |(what, is): (&&str, &Vec<String>)| {
        let shall = shall.get(*what).cloned().unwrap_or_default();
        (*is != shall).then(|| format!("{when}: {what}: {is:#?} instead of {shall:#?}"))
    };
    let differences: Vec<_> = is.iter().filter_map(differs).collect();
    if differences.is_empty() { Ok(()) } else { Err(differences.join("\n")) }
}

impl Case {
    fn prepare(&self, scene: &Scene) -> Result<(), String> {
        self.setup.iter().try_for_each(|words| scene.try_to(words).map(drop))?;
        if self.name.ends_with("take over") {
            self.stay.iter().for_each(|name| build_of_another(&scene.place, name));
        }
        Ok(())
    }

    /// What must hold once the writer is dead.
    fn check(&self, scene: &Scene, pristine: &Snapshot, after: &Snapshot) -> Result<(), String> {
        let status: Value = serde_json::from_str(&scene.try_to("status --json")?).unwrap();
        let limits = status["limits"].as_array().unwrap();
        for limit in limits {
            if limit["state"] != "in_force" {
                return Err(format!("{} is {}", limit["name"], limit["state"]));
            }
            let asked = scene.place.intent(limit["name"].as_str().unwrap());
            let rate =
                |text: &Value| text.as_str().map(|text| text.parse::<Rate>().unwrap().bit_s());
            let in_force = limit["egress"]["rate_bit_s"].as_u64();
            // One inside another shows the rate of that.
            if limit["parent"].is_null() && rate(&asked["egress"]["rate"]) != in_force {
                return Err(format!("asked is {asked}, in force is {limit}"));
            }
        }
        if self.name.ends_with("rename") && limits.is_empty() {
            return Err("neither the one that was on nor the one that comes is on".to_owned());
        }
        for name in &self.stay {
            if !limits.iter().any(|limit| limit["name"] == *name) {
                return Err(format!("{name} was on and is not"));
            }
        }
        let names: Vec<_> = limits.iter().filter_map(|limit| limit["name"].as_str()).collect();
        let snapshot = scene.snapshot();
        for (limit, order) in
            limits.iter().flat_map(|l| snapshot["order"].iter().map(move |o| (l, o)))
        {
            let at = |name: &Value| order.split(" then ").position(|other| *name == other);
            if at(&limit["parent"]).zip(at(&limit["name"])).is_some_and(|(above, own)| above < own)
            {
                return Err(format!("{} runs after its parent: {order}", limit["name"]));
            }
        }
        let stored: Vec<_> =
            snapshot["store"].iter().filter(|name| !name.starts_with('+')).collect();
        if stored != names {
            return Err(format!("the store holds {stored:?}, status shows {names:?}"));
        }
        if names.is_empty() {
            same("without limits", &without_store(&snapshot), &without_store(pristine))?;
        }
        if !scene.is_alive() {
            return Err("no traffic flows".to_owned());
        }
        scene.try_to(&self.words)?;
        same("when done again", &scene.snapshot(), after)?;
        if !scene.is_alive() {
            return Err("no traffic flows when done again".to_owned());
        }
        scene.clear(pristine)
    }
}

fn without_store(snapshot: &Snapshot) -> Snapshot {
    let mut rest = snapshot.clone();
    rest.remove("store");
    rest
}

/// A scheme, and the flags that put it on, change it, and put it on anew.
const SCHEMES: [(&str, &str, &str, &str); 15] = [
    ("nrm", "--cgroup {x} --scheme nrm", "--egress 9mbit", "exempt = [\"10.1.0.0/16\"]"),
    ("pace", "--cgroup {x} --scheme pace", "--egress 9mbit", "exempt = [\"10.1.0.0/16\"]"),
    ("police", "--cgroup {x} --scheme police", "--egress 9mbit", "exempt = [\"10.1.0.0/16\"]"),
    ("police-dev", "--dev eth0 --scheme police", "--egress 9mbit", "exempt = [\"10.1.0.0/16\"]"),
    ("xdp", "--dev eth0 --scheme police --hook xdp", "--hook auto", "exempt = [\"10.1.0.0/16\"]"),
    (
        "match",
        "--dev eth0 --scheme police --match 10.98.0.2",
        "--match 10.98.0.2,10.98.0.3",
        "exempt = [\"10.1.0.0/16\"]",
    ),
    ("htb", "--dev eth0 --scheme htb", "--egress 9mbit", "scheme = \"spring\""),
    ("dem", "--dev eth0 --scheme dem", "--egress 9mbit", "scheme = \"htb\""),
    ("spring", "--dev eth0 --scheme spring", "--egress 9mbit", "scheme = \"police\""),
    ("tbf", "--dev eth0 --scheme tbf", "--egress 9mbit", "scheme = \"htb\""),
    ("police-port", "--port tap0 --scheme police", "--egress 9mbit", "exempt = [\"10.1.0.0/16\"]"),
    (
        "match-port",
        "--port tap0 --scheme police --match 10.99.0.2",
        "--match 10.99.0.2,10.99.0.3",
        "exempt = [\"10.1.0.0/16\"]",
    ),
    ("htb-port", "--port tap0 --scheme htb", "--ingress 9mbit", "scheme = \"dem\""),
    ("dem-port", "--port tap0 --scheme dem", "--ingress 9mbit", "scheme = \"spring\""),
    ("spring-port", "--port tap0 --scheme spring", "--ingress 9mbit", "scheme = \"htb\""),
];
/// The same of `edt`. It and `tbf` hold what leaves alone.
const EDT: [(&str, &str, &str, &str); 3] = [
    ("edt", "--cgroup {x} --scheme edt", "--egress 9mbit", "exempt = [\"10.1.0.0/16\"]"),
    ("edt-dev", "--dev eth0 --scheme edt", "--egress 9mbit", "exempt = [\"10.1.0.0/16\"]"),
    ("edt-port", "--port tap0 --scheme edt", "--egress 9mbit", "exempt = [\"10.1.0.0/16\"]"),
];

/// Every verb with each of some schemes.
fn cases_of(schemes: &[(&str, &str, &str, &str)]) -> Vec<Case> {
    let mut cases = Vec::new();
    let other = "limit add z --cgroup {y} --scheme police --egress 5mbit";
    for (scheme, flags, set, anew) in schemes {
        let rates = match scheme.starts_with("edt") || *scheme == "tbf" {
            true => "--egress 20mbit",
            false => "--egress 20mbit --ingress 20mbit",
        };
        let add = format!("limit add a {flags} {rates}");
        let spec = spec_of(&format!("{flags} {rates}"), anew);
        let mut case = |verb: &str, setup: &[&str], words: &str, stay: &[&'static str]| {
            cases.push(Case {
                name: format!("{scheme} {verb}"),
                setup: setup.iter().map(ToString::to_string).collect(),
                words: words.to_owned(),
                stay: stay.to_vec(),
            });
        };
        case("add", &[other], &add, &["z"]);
        case("set", &[&add], &format!("limit set a {set}"), &["a"]);
        case("del", &[&add, other], "limit del a", &["z"]);
        case("apply", &[&add, other], &spec, &["a"]);
        case("detach", &[&add, other], "detach", &[]);
        // Of another build, as `prepare` has it.
        case("take over", &[&add], "limit restore", &["a"]);
    }
    cases
}

/// Every verb with every scheme that each kernel has, and limits inside limits.
fn cases() -> Vec<Case> {
    let mut cases = cases_of(&SCHEMES);
    let root = "limit add a --dev eth0 --scheme htb --egress 20mbit --ingress 20mbit";
    let inside = "limit add b --cgroup {x} --parent a --scheme htb --egress 5mbit";
    let mut case = |name: &str, setup: &[&str], words: &str, stay: &[&'static str]| {
        let setup = setup.iter().map(ToString::to_string).collect();
        let (name, words, stay) = (name.to_owned(), words.to_owned(), stay.to_vec());
        cases.push(Case { name, setup, words, stay });
    };
    case("htb child add", &[root], inside, &["a"]);
    case("htb child set", &[root, inside], "limit set b --egress 4mbit", &["a", "b"]);
    case("htb child del", &[root, inside], "limit del b", &["a"]);
    case("htb tree detach", &[root, inside], "detach", &[]);
    let port = "limit add c --port tap0 --parent a --scheme htb --egress 5mbit";
    case("htb port child add", &[root, inside], port, &["a", "b"]);
    case("htb port child set", &[root, port], "limit set c --egress 4mbit", &["a", "c"]);
    case("htb port child del", &[root, port, inside], "limit del c", &["a", "b"]);
    let tree = "apply [[limit]]\nname = \"a\"\nscope = { dev = \"eth0\" }\nscheme = \"htb\"\n\
                egress = \"20mbit\"\ningress = \"20mbit\"\n[[limit]]\nname = \"d\"\n\
                scope = { port = \"tap0\" }\nparent = \"a\"\nscheme = \"htb\"\negress = \"5mbit\"\n";
    case("htb port child rename", &[root, port], tree, &["a"]);
    let outer = "limit add a --cgroup {x} --scheme pace --egress 20mbit --ingress 20mbit";
    let inner = "limit add b --cgroup {in} --parent a --scheme pace --weight 200";
    case("pace child add", &[outer], inner, &["a"]);
    case("pace child set", &[outer, inner], "limit set b --weight 300", &["a", "b"]);
    case("pace child del", &[outer, inner], "limit del b", &["a"]);
    case("pace parent set", &[outer, inner], "limit set a --egress 9mbit", &["a", "b"]);
    case("pace tree take over", &[outer, inner], "limit restore", &["a", "b"]);
    case("htb tree take over", &[root, inside], "limit restore", &["a", "b"]);
    case("pace tree detach", &[outer, inner], "detach", &[]);
    // The parent gets other programs, and its child with it.
    let tree = "apply [[limit]]\nname = \"a\"\nscope = { cgroup = \"{x}\" }\negress = \"20mbit\"\n\
                ingress = \"20mbit\"\nexempt = [\"10.1.0.0/16\"]\n[[limit]]\nname = \"b\"\n\
                scope = { cgroup = \"{in}\" }\nparent = \"a\"\nweight = 200\n";
    case("pace tree apply", &[outer, inner], tree, &["a", "b"]);
    // On one cgroup the innermost runs first.
    let middle = "limit add b --cgroup {x} --parent a --scheme pace --weight 200";
    let inmost = "limit add c --cgroup {x} --parent b --scheme pace";
    case("pace beside add", &[outer], middle, &["a"]);
    case("pace third beside add", &[outer, middle], inmost, &["a", "b"]);
    case("pace beside set", &[outer, middle, inmost], "limit set b --weight 9", &["a", "b", "c"]);
    case("pace third beside del", &[outer, middle, inmost], "limit del c", &["a", "b"]);
    case("pace beside take over", &[outer, middle, inmost], "limit restore", &["a", "b", "c"]);
    case("pace beside detach", &[outer, middle, inmost], "detach", &[]);
    let beside = tree.replace("{in}", "{x}");
    case("pace beside apply", &[outer, middle], &beside, &["a", "b"]);
    let third = "[[limit]]\nname = \"c\"\nscope = { cgroup = \"{x}\" }\nparent = \"b\"\n";
    let three = format!("{beside}{third}");
    case("pace three beside apply", &[outer, middle, inmost], &three, &["a", "b", "c"]);
    let members = "limit add c --cgroup {x}* --parent b --scheme pace";
    case("pace member beside add", &[outer, middle], members, &["a", "b"]);
    // Of two that cannot be beside each other the new one has another name.
    let renamed = |more: &str| {
        format!(
            "apply [[limit]]\nname = \"b\"\nscope = {{ dev = \"eth0\" }}\negress = \"20mbit\"\n\
             ingress = \"20mbit\"\n{more}"
        )
    };
    case("htb rename", &[root], &renamed("scheme = \"dem\""), &[]);
    let xdp = "limit add a --dev eth0 --scheme police --hook xdp --ingress 20mbit";
    case("xdp rename", &[xdp], &renamed("scheme = \"police\"\nhook = \"xdp\""), &[]);
    let matched = "limit add a --dev eth0 --scheme police --match 10.98.0.2 --egress 20mbit";
    let other = renamed("scheme = \"police\"\nmatch = \"10.98.0.2\"");
    case("match rename", &[matched], &other, &[]);
    cases
}

/// A file that has limit `a` with other programs, a limit `n` more, and no `z`.
fn spec_of(flags: &str, anew: &str) -> String {
    let mut fields = BTreeMap::new();
    let words: Vec<_> = flags.split_whitespace().collect();
    for pair in words.chunks(2) {
        let (flag, value) = (pair[0].trim_start_matches("--"), pair[1]);
        let (key, value) = match flag {
            "cgroup" | "dev" | "port" => ("scope", format!("{{ {flag} = \"{value}\" }}")),
            flag => (flag, format!("\"{value}\"")),
        };
        fields.insert(key.to_owned(), value);
    }
    let (key, value) = anew.split_once(" = ").unwrap();
    fields.insert(key.to_owned(), value.to_owned());
    let lines: Vec<_> = fields.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    format!(
        "apply [[limit]]\nname = \"a\"\n{}\n\n[[limit]]\nname = \"n\"\n\
         scope = {{ cgroup = \"{{y}}\" }}\negress = \"7mbit\"\n",
        lines.join("\n")
    )
}

/// A small generator, so that a seed says which places are tried.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound.max(1)
    }
}

/// Case, setup and a run to its end: the changes that it makes, and what is there then.
fn rehearse(case: &Case, scene: &Scene, pristine: &Snapshot) -> (Vec<String>, Snapshot) {
    let fail = |e: String| -> ! { panic!("{}, undisturbed: {e}", case.name) };
    case.prepare(scene).unwrap_or_else(|e| fail(e));
    let ended = tracer::watch(scene.command(&case.words), |_| None);
    if ended.code != Some(0) {
        fail(format!("exit code {:?}", ended.code));
    }
    let after = scene.snapshot();
    scene.clear(pristine).unwrap_or_else(|e| fail(e));
    (ended.changes, after)
}

fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[test]
fn root_a_killed_writer_leaves_nothing_broken() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    kill_writers(&Scene::new(), cases(), SAMPLE_TIME);
}

#[test]
fn root_edt_a_killed_writer_leaves_nothing_broken() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let scene = Scene::new();
    for device in DEVICES {
        let fq = format!("qdisc replace dev {device} root fq");
        let done = into(&scene.near, "tc").args(fq.split(' ')).output().unwrap();
        if !done.status.success() {
            return skip("this kernel has no fq; `make test-vm` has some that do");
        }
    }
    kill_writers(&scene, cases_of(&EDT), EDT_SAMPLE_TIME);
}

/// Kills the writers of some cases: at a sample of all places, or in the long form at each of them and at
/// random moments, or at these alone.
fn kill_writers(scene: &Scene, mut cases: Vec<Case>, sample: Duration) {
    let form = env::var("TIDEGATE_KILL").unwrap_or_default();
    let (all, moments) = (form == "all", form == "moments");
    let only = env::var("TIDEGATE_KILL_CASE").ok();
    let seed = env::var("TIDEGATE_KILL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64)
    });
    println!("TIDEGATE_KILL_SEED={seed}");
    let mut random = Random(seed);
    let pristine = scene.snapshot();
    cases.retain(|case| only.as_ref().is_none_or(|only| case.name.contains(only)));
    let started = Instant::now();
    let mut failures = Vec::new();
    let mut kills = 0;
    let mut attempt = |case: &Case, what: String, kill: &dyn Fn(), after: &Snapshot| {
        let done = case.prepare(scene).and_then(|()| {
            kill();
            case.check(scene, &pristine, after)
        });
        kills += 1;
        if let Err(e) = done {
            let message = format!("{}, killed {what}: {e}", case.name);
            tell(&message);
            failures.push(message);
            repair(scene);
        }
    };
    if all {
        for case in &cases {
            let (changes, after) = rehearse(case, scene, &pristine);
            tell(&format!("{}: {} changes", case.name, changes.len()));
            for (at, change) in changes.iter().enumerate() {
                let kill = || drop(tracer::run(scene.command(&case.words), at, libc::SIGKILL));
                attempt(case, format!("before change {at}, {change}"), &kill, &after);
            }
        }
    } else if !moments {
        while !cases.is_empty() && started.elapsed() < sample {
            let case = cases.swap_remove(random.below(cases.len() as u64) as usize);
            let (changes, after) = rehearse(&case, scene, &pristine);
            for _ in 0..2 {
                let at = random.below(changes.len() as u64) as usize;
                let kill = || drop(tracer::run(scene.command(&case.words), at, libc::SIGKILL));
                attempt(&case, format!("before change {at}, {}", changes[at]), &kill, &after);
            }
        }
    }
    let mut moments = if moments || (all && only.is_none()) { MOMENTS } else { 0 };
    while moments > 0 {
        let case = &cases[random.below(cases.len() as u64) as usize];
        case.prepare(scene).unwrap();
        let begun = Instant::now();
        scene.try_to(&case.words).unwrap();
        let takes_us = begun.elapsed().as_micros() as u64;
        let after = scene.snapshot();
        scene.clear(&pristine).unwrap();
        for _ in 0..10.min(moments) {
            moments -= 1;
            let moment = Duration::from_micros(random.below(takes_us));
            let kill = || {
                let mut child = scene.command(&case.words).stderr(Stdio::null()).spawn().unwrap();
                thread::sleep(moment);
                let _ = child.kill();
                let _ = child.wait();
            };
            attempt(case, format!("after {moment:?} of {takes_us} us"), &kill, &after);
        }
    }
    println!("{kills} kills in {:?}", started.elapsed());
    assert!(failures.is_empty(), "{} of {kills} failed:\n{}", failures.len(), failures.join("\n"));
}

/// By hand, so that one failure is not followed by others.
fn repair(scene: &Scene) {
    let _ = scene.try_to("detach");
    for words in ["qdisc del dev eth0 clsact", "qdisc del dev eth0 root"] {
        scene.tc(words);
    }
    let mut netlink = scene.near.netlink().unwrap();
    for device in netlink.devices().unwrap().iter().filter(|d| d.name.starts_with("tgifb")) {
        let _ = netlink.delete_link(device.index);
    }
}

fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}

/// Of an `add`, the change by which the limit is listed: all of it is there by then.
fn listing(changes: &[String]) -> usize {
    changes.iter().rposition(|change| change == "rename").unwrap()
}

/// The directory of the journal of the scene's store.
fn journal_of(scene: &Scene) -> Option<PathBuf> {
    let store = scene.place.store().to_string_lossy().into_owned();
    let dirs = fs::read_dir("/run/tidegate").into_iter().flatten().flatten();
    dirs.map(|dir| dir.path()).find(|dir| {
        fs::read_to_string(dir.join("journal.json")).is_ok_and(|text| text.contains(&store))
    })
}

#[test]
fn root_a_journal_without_pins_and_pins_without_a_journal() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let scene = Scene::new();
    let pristine = scene.snapshot();
    let add = Case { setup: Vec::new(), stay: Vec::new(), ..case("htb add") };
    let (changes, after) = rehearse(&add, &scene, &pristine);
    let kill = || drop(tracer::run(scene.command(&add.words), listing(&changes), libc::SIGKILL));

    kill();
    let journal = journal_of(&scene).expect("a journal");
    assert_ne!(scene.snapshot(), pristine, "something is left");
    fs::remove_dir_all(journal).unwrap();
    add.check(&scene, &pristine, &after).unwrap();

    kill();
    assert!(journal_of(&scene).is_some());
    let bpffs = scene.place.store().parent().unwrap().to_owned();
    unmount(&bpffs, UnmountFlags::DETACH).unwrap();
    mount("bpf", &bpffs, "bpf", MountFlags::empty(), None).unwrap();
    add.check(&scene, &pristine, &after).unwrap();
    assert!(journal_of(&scene).is_none());
}

/// Nobody is without a limit for a moment, where the kernel lets two limits be in one place.
#[test]
fn root_apply_puts_the_new_on_before_it_takes_the_old_off() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let scene = Scene::new();
    let pristine = scene.snapshot();
    let spec = |name: &str, scope: &str, more: &str| {
        format!(
            "apply [[limit]]\nname = \"{name}\"\nscope = {{ {scope} }}\negress = \"20mbit\"\n\
             ingress = \"20mbit\"\n{more}"
        )
    };
    for (scheme, scope) in [
        ("nrm", "cgroup = \"{x}\""),
        ("pace", "cgroup = \"{x}\""),
        ("police", "cgroup = \"{x}\""),
        ("police", "dev = \"eth0\""),
    ] {
        // There two filters have no place beside each other.
        if scope.starts_with("dev") && kernel_before(6, 6) {
            continue;
        }
        let scheme = format!("scheme = \"{scheme}\"\n");
        let exempt = format!("{scheme}exempt = [\"10.1.0.0/16\"]\n");
        scene.try_to(&spec("a", scope, &scheme)).unwrap();
        // Other programs, then another name.
        for words in [spec("a", scope, &exempt), spec("b", scope, &exempt)] {
            let ended = tracer::watch(scene.command(&words), |change| {
                let held = scene.snapshot();
                // In and out of the first device.
                let is_off_device = held["programs"][..2].iter().any(|count| count == "0")
                    && held["filters in"].len() + held["filters out"].len() < 2;
                let is_free = held["cgroups"][0] == "0" && is_off_device;
                assert!(!is_free, "{scope}, {scheme}: nothing holds before change {change}");
                None
            });
            assert_eq!(ended.code, Some(0));
        }
        scene.clear(&pristine).unwrap();
    }
}

#[test]
fn root_a_signal_stops_a_writer_between_two_steps() {
    need_root!();
    if !cfg!(target_arch = "x86_64") {
        return skip("knows the system calls of x86-64 alone");
    }
    let scene = Scene::new();
    let pristine = scene.snapshot();
    let apply = case("police apply");
    let (changes, after) = rehearse(&apply, &scene, &pristine);
    let (mut stopped, mut finished) = (0, 0);
    for part in 0..6 {
        apply.prepare(&scene).unwrap();
        let before = scene.snapshot();
        let errors = scene.place.file("errors", "");
        let mut command = scene.command(&apply.words);
        command.stderr(fs::File::create(&errors).unwrap());
        let at = (changes.len() - 1) * part / 5;
        let ended = tracer::run(command, at, libc::SIGINT);
        let said = fs::read_to_string(&errors).unwrap();
        match ended.code {
            Some(0) => {
                finished += 1;
                same("finished", &scene.snapshot(), &after).unwrap();
            }
            // Before the store was locked nothing is kept waiting.
            None => same("ended", &scene.snapshot(), &before).unwrap(),
            code => {
                stopped += 1;
                assert_eq!(code, Some(128 + libc::SIGINT), "{said}");
                let words = "stopped by SIGINT; the limits are as they were before";
                assert!(said.contains(words), "{said}");
                same("stopped", &scene.snapshot(), &before).unwrap();
            }
        }
        scene.clear(&pristine).unwrap();
    }
    assert!(stopped > 0 && finished > 0, "{stopped} stopped, {finished} finished");
}
