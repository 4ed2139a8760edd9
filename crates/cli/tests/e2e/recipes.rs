//! The files of `docs/recipes.md`, applied as they stand there, with other cgroups and units. Judged by what
//! has passed in its time and by counters: a busy machine makes traffic slow, never fast.

use std::{
    fs,
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use serde_json::Value;
use tidegate_sys::cgroup::Cgroup;

use crate::{
    agent::Slice,
    common::{Guard, Place, text},
    edt::{RECEIVER, net_of},
    need_root,
    traffic::{accept, counter, receive, sender},
    tree::Scene,
};

/// An address of the receiver that no private network has (RFC 5737), and its neighbour here.
const INTERNET: &str = "203.0.113.2";
const INTERNET_HERE: &str = "203.0.113.1";
/// Of one transfer: seconds at the rates of the page.
const PULL_BYTES: usize = 30_000_000;
const PUSH_BYTES: usize = 6_000_000;
/// Windows that were granted for the round trip before may pass beyond the rate, besides the limit's burst
/// and backlog.
const WINDOWS: Duration = Duration::from_millis(200);

/// A file of the page; `tidegate check` takes it as it is.
fn recipe(place: &Place, file: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/recipes.md");
    let page = fs::read_to_string(path).unwrap();
    let head = format!("```toml\n# /etc/tidegate/{file}\n");
    let (_, rest) = page.split_once(&head).unwrap();
    let recipe = rest.split_once("```").unwrap().0.to_owned();
    place.ok(&["check", place.file(file, &recipe).to_str().unwrap()]);
    recipe
}

/// With something else in the place of each; all are there.
fn adapted(recipe: &str, changes: &[(&str, &str)]) -> String {
    changes.iter().fold(recipe.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from}: {text}");
        text.replace(from, to)
    })
}

fn apply(place: &Place, text: &str) -> String {
    place.ok(&["apply", place.file("limits.toml", text).to_str().unwrap()])
}

fn shown(place: &Place, name: &str, direction: &str) -> Value {
    place.json(&["limit", "show", name, "--json"])[direction].clone()
}

/// The bytes that have passed a limit and were charged.
fn charged(place: &Place, name: &str, direction: &str) -> u64 {
    counter(&shown(place, name, direction), "bytes")
}

/// So many bytes took the time that the rate of a limit asks for.
fn is_held(limit: &Value, bytes: usize, elapsed: Duration) {
    let ahead = ["burst_ns", "drop_ns"].map(|field| limit[field].as_f64().unwrap() / 1e9);
    let seconds = elapsed.as_secs_f64() + ahead.iter().sum::<f64>() + WINDOWS.as_secs_f64();
    let allowed = limit["rate_bit_s"].as_f64().unwrap() / 8.0 * seconds;
    assert!((bytes as f64) < allowed, "{bytes} bytes in {elapsed:?}: {limit}");
}

/// A download by a process in a cgroup, as of a registry at this address: how long it took.
fn pull(scene: &Scene, group: &Cgroup, address: &str) -> Duration {
    let bind = || TcpListener::bind((address, 0)).unwrap();
    let listener = scene.bed.receiver.run(bind).unwrap();
    let at = listener.local_addr().unwrap();
    let _client = scene.send(group, &format!("pull {at}"));
    let mut stream = accept(&listener);
    let started = Instant::now();
    stream.write_all(&vec![7; PULL_BYTES]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(TcpStream::read(&mut stream, &mut [0]).unwrap(), 0);
    started.elapsed()
}

/// An upload by a process in a cgroup.
fn push(scene: &Scene, group: &Cgroup, address: &str) -> Duration {
    let bind = || TcpListener::bind((address, 0)).unwrap();
    let listener = scene.bed.receiver.run(bind).unwrap();
    let mut command = scene.place.inside(group, "nsenter");
    command.arg(net_of(&scene.bed.sender));
    sender(&mut command, &format!("tcp {} {PUSH_BYTES}", listener.local_addr().unwrap()));
    let mut child = Guard(command.spawn().unwrap());
    let (bytes, elapsed) = receive(&listener);
    assert_eq!(bytes, PUSH_BYTES);
    assert_eq!(child.exit_code(), 0);
    elapsed
}

#[test]
fn root_recipe_image_pulls_are_held_and_containers_are_not() {
    need_root!();
    let scene = Scene::new();
    let slice = Slice::new(&scene.place);
    let u = &slice.unique;
    let [containerd, docker] = ["containerd", "docker"].map(|name| format!("{u}-{name}.service"));
    let podman = format!("{u}-*-image.service");
    let text = adapted(
        &recipe(&scene.place, "image-pulls.toml"),
        &[
            ("containerd.service", &containerd),
            ("docker.service", &docker),
            ("*-image.service", &podman),
        ],
    );
    let done = apply(&scene.place, &text);
    assert_eq!(done.matches(" waits: no unit").count(), 3, "{done}");
    let container = slice.make(&format!("{u}-docker-0123.scope"));
    let engines = [
        ("pulls-containerd", slice.make(&containerd)),
        ("pulls-docker", slice.make(&docker)),
        ("pulls-podman", slice.make(&format!("{u}-web-image.service"))),
    ];
    apply(&scene.place, &text);
    for (name, group) in &engines {
        let elapsed = pull(&scene, group, RECEIVER);
        let limit = shown(&scene.place, name, "ingress");
        is_held(&limit, PULL_BYTES, elapsed);
        assert!(counter(&limit, "bytes") > PULL_BYTES as u64, "{limit}");
    }
    let all = || engines.each_ref().map(|(name, _)| charged(&scene.place, name, "ingress"));
    let before = all();
    pull(&scene, &container, RECEIVER);
    assert_eq!(all(), before, "what a container receives is no pull");
    scene.place.ok(&["detach"]);
}

#[test]
fn root_recipe_the_internet_is_held_and_the_lan_is_not() {
    need_root!();
    let scene = Scene::new();
    for (netns, address) in [(&scene.bed.sender, INTERNET_HERE), (&scene.bed.receiver, INTERNET)] {
        let mut netlink = netns.netlink().unwrap();
        let index = netlink.index_of("eth0").unwrap();
        netlink.add_address(index, address.parse().unwrap(), 24).unwrap();
    }
    let place = &scene.place;
    let host = format!("cgroup = \"{}\"", place.group.path());
    let text = adapted(&recipe(place, "internet.toml"), &[("cgroup = \"/\"", &host)]);
    apply(place, &text);
    let program = place.child("program");

    let pulled = pull(&scene, &program, INTERNET);
    is_held(&shown(place, "internet", "ingress"), PULL_BYTES, pulled);
    let pushed = push(&scene, &program, INTERNET);
    is_held(&shown(place, "internet", "egress"), PUSH_BYTES, pushed);
    let charged = || ["egress", "ingress"].map(|way| charged(place, "internet", way));
    let exempt = |way| shown(place, "internet", way)["exempt_bytes"].as_u64().unwrap();
    let before = charged();
    assert!(before[0] > PUSH_BYTES as u64 && before[1] > PULL_BYTES as u64, "{before:?}");
    assert_eq!((exempt("egress"), exempt("ingress")), (0, 0));

    pull(&scene, &program, RECEIVER);
    push(&scene, &program, RECEIVER);
    assert_eq!(charged(), before, "nothing of the LAN is charged");
    assert!(exempt("ingress") > PULL_BYTES as u64 && exempt("egress") > PUSH_BYTES as u64);
    place.ok(&["detach"]);
}

/// A time zone in which it is about this hour of the day now.
fn zone_at(hour: i64) -> String {
    let utc = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).hour();
    // POSIX counts hours west of Greenwich.
    format!("TST-{}", (hour - i64::from(utc)).rem_euclid(24))
}

#[test]
fn root_recipe_a_backup_takes_what_is_left_at_night() {
    need_root!();
    let scene = Scene::new();
    let slice = Slice::new(&scene.place);
    let unit = format!("{}-backup.service", slice.unique);
    let host = format!("cgroup = \"{}\"", slice.group.path());
    let recipe = recipe(&scene.place, "backup.toml");
    let spec = adapted(&recipe, &[("cgroup = \"/\"", &host), ("backup.service", &unit)]);
    let file = scene.place.file("limits.toml", &spec);
    let apply_at = |hour| {
        let mut command = scene.place.tidegate();
        command.env("TZ", zone_at(hour)).arg("apply").arg(&file);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        text(&output)
    };
    let done = apply_at(2);
    assert!(done.contains("backup waits: no unit"), "{done}");
    let [backup, web] = [&unit[..], "web.service"].map(|name| slice.make(name));
    let done = apply_at(2);
    assert!(done.contains("inside uplink, weight 1"), "{done}");

    // The tree gives out 99 %.
    let _backup = scene.send(&backup, "tcp 2");
    scene.settles(&[("uplink", 37.6), ("backup", 37.6)]);
    let others = scene.send(&web, "tcp 2");
    scene.settles(&[("uplink", 37.6), ("backup", 0.4)]);
    drop(others);
    scene.settles(&[("backup", 37.6)]);
    let done = apply_at(12);
    assert!(done.contains("egress"), "{done}");
    scene.settles(&[("uplink", 2.0), ("backup", 2.0)]);
    scene.place.ok(&["detach"]);
}
