//! `tidegate explain`: the limits that apply, who uses them, and what holds the thing back.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    process::{Child, Stdio},
    thread,
};

use rustix::process::Signal;
use serde_json::Value;
use tidegate_instruments::plumbing::{add_bridge, set_master};
use tidegate_sys::net::{NetNs, VethPair};

use crate::{
    common::{Guard, Place, signal, wait_for},
    edt::{Bed, net_of, ok},
    htb::{guest, json},
    need_root,
    traffic::{accept, sender},
};

const PIECE_BYTES: usize = 1 << 16;
const LIMIT: &[&str] = &["--egress", "50mbit", "--loopback"];

/// A connection over which a process of the cgroup sends, until it is dropped.
struct Transfer {
    sender: Guard,
    local: SocketAddr,
    remote: SocketAddr,
}

impl Transfer {
    fn start(spawn: impl FnOnce(&str) -> Child) -> Transfer {
        Transfer::to(&TcpListener::bind("127.0.0.1:0").unwrap(), spawn)
    }

    fn to(listener: &TcpListener, spawn: impl FnOnce(&str) -> Child) -> Transfer {
        let remote = listener.local_addr().unwrap();
        let sender = Guard(spawn(&format!("stream {remote} {PIECE_BYTES}")));
        let mut stream = accept(listener);
        let local = stream.peer_addr().unwrap();
        // Ends with the sender.
        thread::spawn(move || io::copy(&mut stream, &mut io::sink()));
        Transfer { sender, local, remote }
    }

    /// Sends from the test's own cgroup.
    fn in_group(place: &Place) -> Transfer {
        Transfer::start(|order| {
            let mut command = place.inside(&place.group, "env");
            sender(&mut command, order);
            command.spawn().unwrap()
        })
    }

    fn pid(&self) -> String {
        self.sender.0.id().to_string()
    }
}

fn explain(place: &Place, subject: &[&str]) -> Value {
    place.json(&[&["explain", "--json", "--sample", "200ms"], subject].concat())
}

/// Asks until the first place of the answer is as wanted.
fn wait_for_answer(place: &Place, subject: &[&str], wanted: impl Fn(&Value) -> bool) -> Value {
    wait_for("the answer", || {
        let first = explain(place, subject)["places"][0].take();
        wanted(&first).then_some(first)
    })
}

fn wait_for_reason(place: &Place, subject: &[&str], reason: &str) -> Value {
    wait_for_answer(place, subject, |first| first["verdict"]["reason"] == reason)
}

/// Asks until the flow is seen to send under this limit, how fast the machine may be.
fn wait_until_sending(place: &Place, subject: &[&str], limit: &str) -> Value {
    wait_for_answer(place, subject, |first| {
        let egress = &first["limits"][0]["egress"];
        first["verdict"]["limit"] == limit
            && egress["used_bit_s"].as_u64() > Some(0)
            && egress["fair"]["flows"] == 1
            && first["sockets"][0]["sent_bit_s"].as_u64() > Some(0)
    })
}

fn names(place: &Value) -> Vec<&str> {
    place["limits"].as_array().unwrap().iter().map(|l| l["name"].as_str().unwrap()).collect()
}

#[test]
fn root_explain_tells_the_limit_and_the_socket_of_a_process_a_cgroup_and_a_flow() {
    need_root!();
    let place = Place::new();
    place.ok(&[&["limit", "add", "a", "--cgroup", place.group.path()], LIMIT].concat());
    let transfer = Transfer::in_group(&place);
    let (local, remote) = (transfer.local.to_string(), transfer.remote.to_string());
    let pair = format!("{local}-{remote}");
    let pid = transfer.pid();
    for subject in [
        &[pid.as_str()][..],
        &[place.group.path()],
        &[local.as_str()],
        &[remote.as_str(), local.as_str()],
        &[pair.as_str()],
    ] {
        let first = wait_until_sending(&place, subject, "a");
        assert_eq!(first["cgroup"], place.group.path(), "{subject:?}");
        assert_eq!(names(&first), ["a"], "{subject:?}");
        let limit = &first["limits"][0];
        assert_eq!((&limit["held_by"], &limit["state"]), (&"pinned".into(), &"in_force".into()));
        let egress = &limit["egress"];
        assert!(egress["fair"]["share_bit_s"].as_u64() <= Some(50_000_000), "{egress}");
        let socket = &first["sockets"][0];
        assert_eq!(
            (&socket["local"], &socket["remote"]),
            (&local.clone().into(), &remote.clone().into())
        );
        assert_eq!(
            (&socket["asked"], &socket["cgroup"]),
            (&true.into(), &place.group.path().into())
        );
        assert_eq!(socket["pid"].to_string(), pid);
        let sentence = first["sentence"].as_str().unwrap();
        assert!(sentence.contains("limit `a`"), "{sentence}");
        if first["verdict"]["reason"] == "paced" {
            assert!(sentence.ends_with(" of limit `a` (50mbit, no other flow)"), "{sentence}");
        }
    }
    let text = place.ok(&["explain", "--sample", "50ms", &local]);
    assert!(text.contains("Limit `a` on cgroup"), "{text}");
    assert!(text.contains("Held back by: "), "{text}");
}

#[test]
fn root_names_that_users_make_are_no_orders_to_a_terminal() {
    need_root!();
    let place = Place::new();
    let evil = place.child("esc\x1b[31mred");
    let mut command = place.inside(&evil, "sh");
    let script = "printf '\\033[31mEVIL\\n' > /proc/$$/comm; echo; read forever";
    command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = Guard(command.spawn().unwrap());
    io::Read::read_exact(process.0.stdout.as_mut().unwrap(), &mut [0]).unwrap();
    let pid = process.0.id().to_string();
    let text = place.ok(&["explain", "--sample", "50ms", &pid]);
    assert!(text.contains("(?[31mEVIL) in cgroup") && !text.contains('\x1b'), "{text:?}");
    let added = place.ok(&["limit", "add", "a", "--cgroup", evil.path(), "--egress", "1mbit"]);
    let (_, refused) = place.refused(&["explain", &format!("{}/none", evil.path())]);
    for text in [added, place.ok(&["status"]), refused] {
        assert!(text.contains("esc?[31mred") && !text.contains('\x1b'), "{text:?}");
    }
    assert_eq!(place.json(&["status", "--json"])["limits"][0]["cgroup"], evil.path());
}

#[test]
fn root_explain_tells_of_each_process_that_pidof_names() {
    need_root!();
    let place = Place::new();
    let sleeps =
        [(); 2].map(|()| Guard(place.inside(&place.group, "sleep").arg("60").spawn().unwrap()));
    let pids = sleeps.each_ref().map(|sleep| sleep.0.id().to_string());
    let args = ["explain", "--sample", "50ms", &pids[0], &pids[1]];
    let text = place.ok(&args);
    assert!(pids.iter().all(|pid| text.contains(&format!("Process {pid} ("))), "{text}");
    let json = place.ok(&[&args[..], &["--json"]].concat());
    let answers = serde_json::Deserializer::from_str(&json).into_iter::<Value>();
    let asked: Vec<_> = answers.map(|answer| answer.unwrap()["asked"]["pid"].to_string()).collect();
    assert_eq!(asked, pids);
}

#[test]
fn root_explain_finds_the_limit_of_a_run_inside_a_pinned_one() {
    need_root!();
    let place = Place::new();
    let outer = ["--egress", "1gbit", "--loopback", "--scheme", "nrm"];
    place.ok(&[&["limit", "add", "outer", "--cgroup", place.group.path()], &outer[..]].concat());
    let transfer = Transfer::start(|order| {
        let mut command = place.run(LIMIT);
        command.arg("env");
        sender(&mut command, order);
        command.spawn().unwrap()
    });
    let group = place.run_group().unwrap();
    let run = group.path().rsplit('/').next().unwrap();
    let first = wait_until_sending(&place, &[&transfer.local.to_string()], run);
    assert_eq!(names(&first), [run, "outer"], "innermost first");
    assert_eq!(first["cgroup"], group.path());
    let limit = &first["limits"][0];
    assert_eq!(
        (&limit["held_by"], limit["runner_pid"].to_string()),
        (&"run".into(), transfer.pid())
    );
    assert_eq!(first["limits"][1]["egress"]["fair"], Value::Null);
    assert_eq!(first["verdict"]["limit"], run);

    // From the outside the limit further in is named.
    let outside = wait_for_reason(&place, &[place.group.path()], "further_in");
    assert_eq!((names(&outside), &outside["verdict"]["limit"]), (vec!["outer"], &run.into()));
}

/// The command has what its parent gave it last, which is less than the ceiling that it started with.
#[test]
fn root_a_run_keeps_its_last_rate_when_its_parent_is_removed() {
    need_root!();
    let place = Place::new();
    place.ok(&[&["limit", "add", "outer", "--cgroup", place.group.path()], LIMIT].concat());
    let transfer = Transfer::start(|order| {
        let mut command = place.run(&["--parent", "outer", "--loopback"]);
        command.arg("env");
        sender(&mut command, order);
        command.spawn().unwrap()
    });
    let group = place.run_group().unwrap();
    let run = group.path().rsplit('/').next().unwrap();
    let subject = [group.path()];
    wait_until_sending(&place, &subject, run);
    place.ok(&["limit", "set", "outer", "--egress", "20mbit"]);
    let now_bit_s = |first: &Value| first["limits"][0]["egress"]["now_bit_s"].as_u64();
    let follows = |first: &Value| now_bit_s(first).is_some_and(|now| now <= 20_000_000);
    wait_for_answer(&place, &subject, follows);

    place.ok(&["limit", "del", "outer"]);
    let passed = |first: &Value| {
        let egress = &first["limits"][0]["egress"];
        let packets = |outcome| egress[format!("{outcome}_packets")].as_u64().unwrap();
        ["pass", "mark", "slow"].map(packets).iter().sum::<u64>()
    };
    let first = explain(&place, &subject)["places"][0].take();
    assert_eq!(names(&first), [run]);
    let before = passed(&first);
    let later = wait_for_answer(&place, &subject, |first| passed(first) > before + 100);
    assert_eq!((names(&later), &later["limits"][0]["held_by"]), (vec![run], &"run".into()));
    assert!(
        now_bit_s(&later).is_some_and(|now| (5_000_000..=20_000_000).contains(&now)),
        "{later}"
    );
    drop(transfer);
}

/// The limit is gone with its process, which alone could have given its connections their rate back.
#[test]
fn root_run_killed_leaves_connections_at_their_last_rate() {
    need_root!();
    let place = Place::new();
    let mut transfer = Transfer::start(|order| {
        let mut command = place.run(LIMIT);
        command.arg("env");
        sender(&mut command, order);
        command.spawn().unwrap()
    });
    let group = place.run_group().unwrap();
    let run = group.path().rsplit('/').next().unwrap();
    let subject = [group.path()];
    let rate = |first: &Value| first["sockets"][0]["max_pacing_bit_s"].as_u64();
    let paced = wait_for_answer(&place, &subject, |first| {
        names(first) == [run] && rate(first).is_some_and(|rate| rate <= 50_000_000)
    });
    signal(transfer.sender.0.id(), Signal::KILL);
    transfer.sender.exit_code();
    let left = wait_for_answer(&place, &subject, |first| names(first).is_empty());
    assert!(rate(&left).is_some_and(|rate| rate <= 50_000_000), "{left}, before {paced}");
}

#[test]
fn root_explain_without_a_limit_says_so() {
    need_root!();
    let place = Place::new();
    let transfer = Transfer::in_group(&place);
    for subject in [transfer.pid(), place.group.path().to_owned(), transfer.local.to_string()] {
        let answer = explain(&place, &[&subject]);
        let here = |p: &&Value| p["cgroup"] == place.group.path();
        let first = answer["places"].as_array().unwrap().iter().find(here).unwrap();
        assert_eq!(first["sentence"], "not limited by Tidegate", "{subject}");
        assert_eq!(names(first), Vec::<&str>::new());
    }
}

/// A program of the host sends to a guest: the limit of the guest's port holds it back, also where the port
/// is one of a bridge.
#[test]
fn root_explain_names_the_limit_of_the_port_that_leads_to_the_other_end() {
    need_root!();
    const BRIDGED: [&str; 2] = ["10.99.0.2", "fd00:99::2"];
    for (scheme, address) in
        [("police", "10.96.0.2"), ("htb", "10.96.0.2"), ("htb", BRIDGED[0]), ("htb", BRIDGED[1])]
    {
        let (place, bed) = (Place::new(), Bed::new());
        let guest = match BRIDGED.contains(&address) {
            true => behind_a_bridge(&bed, [["10.99.0.1", "fd00:99::1"], BRIDGED]),
            false => guest(&bed),
        };
        let address: IpAddr = address.parse().unwrap();
        let add = "limit add guest --port tap0 --ingress 20mbit --scheme";
        ok(&place, &bed, &format!("{add} {scheme}"));
        let listener = guest.run(|| TcpListener::bind((address, 0)).unwrap()).unwrap();
        let transfer = Transfer::to(&listener, |order| {
            let mut command = place.inside(&place.group, "nsenter");
            command.arg(net_of(&bed.sender)).arg("env");
            sender(&mut command, order);
            command.spawn().unwrap()
        });
        let pid = transfer.pid();
        for subject in [transfer.local.to_string(), pid] {
            wait_for("a verdict that names the limit", || {
                let words = format!("explain --sample 200ms --json {subject}");
                let explained = json(&place, &bed, &words);
                let places = explained["places"].as_array().unwrap();
                let here = places.iter().find(|p| p["cgroup"] == place.group.path()).unwrap();
                let [limit] = &here["limits"].as_array().unwrap()[..] else { return None };
                assert_eq!((&limit["name"], &limit["far_end"]), (&"guest".into(), &true.into()));
                let verdict = &here["verdict"];
                let is_full = verdict["reason"] == "full" && verdict["direction"] == "ingress";
                (is_full && verdict["limit"] == "guest").then_some(())
            });
        }
        let text = ok(&place, &bed, &format!("explain --sample 10ms {}", transfer.local));
        let line = format!("Limit `guest` on port `tap0`, which leads to the other end: {scheme}");
        assert!(text.contains(&line), "{text}");
        drop(transfer);
        ok(&place, &bed, "detach");
    }
}

/// A guest whose port is one of a bridge, which has the host's addresses.
fn behind_a_bridge(bed: &Bed, [host_has, guest_has]: [[&str; 2]; 2]) -> NetNs {
    let guest = NetNs::create(&format!("{}-g", bed.sender.name())).unwrap();
    let mut host = bed.sender.netlink().unwrap();
    host.add_veth(&VethPair { name: "tap0", peer: "eth0", peer_netns: Some(&guest) }).unwrap();
    add_bridge(&mut host, "br0").unwrap();
    let (bridge, port) = (host.index_of("br0").unwrap(), host.index_of("tap0").unwrap());
    set_master(&mut host, port, bridge).unwrap();
    for address in host_has {
        host.add_address(bridge, address.parse().unwrap(), 24).unwrap();
    }
    [port, bridge].into_iter().for_each(|index| host.set_up(index, true).unwrap());
    let mut netlink = guest.netlink().unwrap();
    let index = netlink.index_of("eth0").unwrap();
    for address in guest_has {
        netlink.add_address(index, address.parse().unwrap(), 24).unwrap();
    }
    netlink.set_up(index, true).unwrap();
    guest
}

#[test]
fn root_explain_tells_when_packets_were_dropped() {
    need_root!();
    let place = Place::new();
    let flags = ["--egress", "5mbit", "--loopback", "--scheme", "nrm"];
    place.ok(&[&["limit", "add", "a", "--cgroup", place.group.path()], &flags[..]].concat());
    let never = explain(&place, &[place.group.path()]);
    let egress = &never["places"][0]["limits"][0]["egress"];
    assert_eq!(
        (&egress["drop_full_ago_ns"], &egress["drop_early_ago_ns"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(never["places"][0]["verdict"]["reason"], "idle");

    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut command = place.inside(&place.group, "env");
    sender(&mut command, &format!("udp {} {}", socket.local_addr().unwrap(), usize::MAX));
    let _flood = Guard(command.spawn().unwrap());
    // On a busy machine the flood does not fill it all the time.
    let first = wait_for_answer(&place, &[place.group.path()], |first| {
        let is_full = |sentence: &str| sentence.contains("is full");
        first["verdict"]["reason"] == "full" && first["sentence"].as_str().is_some_and(is_full)
    });
    let egress = &first["limits"][0]["egress"];
    let dropped = |suffix: &str| {
        ["drop_full", "drop_reserve", "drop_early"]
            .iter()
            .filter_map(|what| egress[format!("{what}_{suffix}")].as_u64())
            .sum::<u64>()
    };
    assert!(dropped("packets") > 0 && dropped("ago_ns") > 0, "{egress}");
    assert!(dropped("ago_ns") < 60_000_000_000, "in this test: {egress}");
    let text = place.ok(&["explain", "--sample", "50ms", place.group.path()]);
    assert!(text.contains(" ago, ") && text.contains("dropped ("), "{text}");
}

#[test]
fn root_explain_cries_a_limit_that_is_not_enforced() {
    need_root!();
    let place = Place::new();
    place.ok(&[&["limit", "add", "a", "--cgroup", place.group.path()], LIMIT].concat());
    for hook in ["egress", "ingress", "sockops"] {
        let path = place.store().join("a").join(hook);
        tidegate_sys::libbpf_rs::Link::open(path).unwrap().detach().unwrap();
    }
    let answer = explain(&place, &[place.group.path()]);
    assert_eq!(answer["places"][0]["verdict"]["reason"], "not_enforced");
    assert!(
        place.ok(&["explain", place.group.path(), "--sample", "10ms"]).contains("NOT ENFORCED")
    );
}

#[test]
fn root_explain_says_what_does_not_exist() {
    need_root!();
    let place = Place::new();
    let child = place.inside(&place.group, "true").spawn().unwrap();
    let gone = child.id().to_string();
    drop(Guard(child));
    for (subject, says) in [
        (&[gone.as_str()][..], "there is no process"),
        (&["no/such.service"], "cgroup `no/such.service` does not exist"),
        (&["../x"], "must be relative to the cgroup mount"),
        (&["203.0.113.7:9"], "no TCP connection has 203.0.113.7:9"),
        (
            &["203.0.113.7:9", "[2001:db8::1]:9"],
            "no TCP connection has 203.0.113.7:9 [2001:db8::1]:9",
        ),
    ] {
        let (code, message) = place.refused(&[&["explain"], subject].concat());
        assert_eq!(code, 1, "{subject:?}: {message}");
        assert!(message.contains(says), "{subject:?}: {message}");
    }
}
