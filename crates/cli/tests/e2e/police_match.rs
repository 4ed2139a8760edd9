//! Policers for prefixes of one device: whose rate a packet is held to, and that hundreds are no trouble.

use std::{fmt::Write as _, fs};

use serde_json::Value;

use crate::{
    common::{Place, text},
    edt::{BURST_BYTES, Bed, RECEIVER, into, is_free, is_held, ok, refused},
    need_root,
};

/// Beside the receiver's own.
const SECOND: &str = "10.97.0.3";
const THIRD: &str = "10.97.0.4";

/// A bed whose receiver has three addresses.
fn bed() -> Bed {
    let bed = Bed::new();
    let mut netlink = bed.receiver.netlink().unwrap();
    let index = netlink.index_of("eth0").unwrap();
    for address in [SECOND, THIRD] {
        netlink.add_address(index, address.parse().unwrap(), 24).unwrap();
    }
    bed
}

fn status(place: &Place, bed: &Bed) -> Value {
    serde_json::from_str(&ok(place, bed, "status --json")).unwrap()
}

fn add(name: &str, rest: &str) -> String {
    format!("limit add {name} --dev eth0 --scheme police --burst 100kb {rest}")
}

#[test]
fn root_police_match_says_what_cannot_be() {
    need_root!();
    let (place, bed) = (Place::new(), bed());
    let message = refused(&place, &bed, &add("a", "--egress 5mbit --match 10.0.0.1/24"));
    assert!(message.contains("--match") && message.contains("write 10.0.0.0/24"), "{message}");
    let words = "limit add a --dev eth0 --scheme edt --egress 5mbit --match 10.0.0.0/24";
    let message = refused(&place, &bed, words);
    assert!(message.contains("--match: scheme `edt` has no `match`; it has"), "{message}");
    let run = "run --scheme police --egress 5mbit --match 10.0.0.0/24 -- true";
    let message = refused(&place, &bed, run);
    assert!(message.contains("--match: a limit for prefixes is on the device"), "{message}");
    assert!(!place.store().exists());

    ok(&place, &bed, &add("a", "--egress 5mbit --match 10.0.0.0/24,10.9.0.1"));
    let message = refused(&place, &bed, &add("b", "--ingress 5mbit --match 10.9.0.1"));
    assert!(message.contains("device `eth0` already has limit `a` for 10.9.0.1/32"), "{message}");
    ok(&place, &bed, &add("b", "--egress 5mbit --match 10.9.0.2"));
    let message = refused(&place, &bed, "limit set b --match 10.9.0.2,10.0.0.0/24");
    assert!(message.contains("already has limit `a` for 10.0.0.0/24"), "{message}");
    assert!(!message.contains("the file"), "there is none: {message}");
    let twice = |second: &str| {
        let limit = |name: &str, prefix: &str| {
            format!(
                "[[limit]]\nname = \"{name}\"\nscope = {{ dev = \"eth0\" }}\nscheme = \"police\"\n\
                 egress = \"5mbit\"\nmatch = {prefix}\n"
            )
        };
        let text = limit("c", "\"10.1.0.0/16\"") + &limit("d", second);
        let file = place.file("twice.toml", &text);
        refused(&place, &bed, &format!("apply {}", file.display()))
    };
    let message = twice("[\"10.2.0.0/16\", \"10.1.0.0/16\"]");
    assert!(
        message.contains("limit `c` on line 1 has 10.1.0.0/16 of this dev already"),
        "{message}"
    );
    let message = twice("\"10.1.0.0/8\"");
    assert!(message.contains("write 10.0.0.0/8"), "{message}");
    let message = twice("\"10.9.0.1\"");
    assert!(message.contains("limit `a` for 10.9.0.1/32, which is not in the file"), "{message}");
    ok(&place, &bed, "detach");
    assert!(!place.store().exists());
}

/// Two hosts with rates of their own, one with none; what is changed, taken off and put back.
#[test]
fn root_police_match_gives_each_prefix_its_rate() {
    need_root!();
    let (place, bed) = (Place::new(), bed());
    ok(&place, &bed, &add("one", &format!("--egress 20mbit --ingress 50mbit --match {RECEIVER}")));
    ok(&place, &bed, &add("net", &format!("--egress 10mbit --match {SECOND}")));
    let rate = |order: &str| bed.free(&bed.sender, order);
    is_held(&rate("2 0 60e6 10.97.0.2"), 20e6, BURST_BYTES);
    is_held(&rate("2 0 60e6 10.97.0.3"), 10e6, BURST_BYTES);
    let dropped = || {
        let shown = status(&place, &bed);
        let of = |limit: &Value| limit["egress"]["drop_full_packets"].as_u64().unwrap();
        shown["limits"].as_array().unwrap().iter().map(of).sum::<u64>()
    };
    let before = dropped();
    assert!(rate("2 0 60e6 10.97.0.4").best_bit_s() > 0.0);
    assert_eq!(dropped(), before, "what is sent to others is nobody's");
    let shown = status(&place, &bed);
    let passed = |name: &str, shown: &Value| {
        let limits = shown["limits"].as_array().unwrap();
        let limit = limits.iter().find(|limit| limit["name"] == name).unwrap();
        assert_eq!((&limit["state"], &limit["dev"]), (&"in_force".into(), &"eth0".into()));
        limit["egress"]["pass_bytes"].as_f64().unwrap()
    };
    let (one, net) = (passed("one", &shown), passed("net", &shown));
    assert!((1.5..2.7).contains(&(one / net)), "{one} {net}");
    assert_eq!(shown["limits"][0]["match"], serde_json::json!(["10.97.0.3/32"]));
    // The answers come from the first address.
    assert!(shown["limits"][1]["ingress"]["pass_packets"].as_u64().unwrap() > 0);
    assert!(ok(&place, &bed, "status").contains("dev eth0 10.97.0.2/32"));

    // A shorter prefix takes what has none of its own; then the longer one goes.
    ok(&place, &bed, "limit set net --match 10.97.0.0/24 --egress 30mbit");
    is_held(&rate("2 0 60e6 10.97.0.4"), 30e6, BURST_BYTES);
    is_held(&rate("2 0 60e6 10.97.0.2"), 20e6, BURST_BYTES);
    ok(&place, &bed, "limit del one");
    is_held(&rate("2 0 60e6 10.97.0.2"), 30e6, BURST_BYTES);

    // Somebody takes the programs off.
    let rooms = fs::read_dir(place.store()).unwrap().flatten();
    let room = rooms.map(|e| e.path()).find(|p| p.to_string_lossy().contains("+dev")).unwrap();
    for side in ["egress", "program_egress"] {
        let _ = fs::remove_file(room.join(side));
    }
    bed.tc("qdisc del dev eth0 clsact");
    assert_eq!(status(&place, &bed)["limits"][0]["state"], "detached");
    ok(&place, &bed, &add("net", "--egress 10mbit --match 10.97.0.0/24"));
    is_held(&rate("2 0 60e6 10.97.0.2"), 10e6, BURST_BYTES);
    ok(&place, &bed, "limit del net");
    is_free(&rate("2 0 60e6 10.97.0.2"), 10e6);
    assert!(!place.store().exists());
}

/// Prefixes that two limits exchange; a limit beside them for all.
#[test]
fn root_police_match_prefixes_change_hands() {
    need_root!();
    let (place, bed) = (Place::new(), bed());
    let spec = |one: &str, other: &str| {
        let mut text = String::new();
        for (name, rate, prefix) in [("one", "20mbit", one), ("other", "5mbit", other)] {
            write!(
                text,
                "[[limit]]\nname = \"{name}\"\nscope = {{ dev = \"eth0\" }}\nscheme = \"police\"\n\
                 egress = \"{rate}\"\nburst = \"100kb\"\nmatch = [\"{prefix}\"]\n"
            )
            .unwrap();
        }
        let file = place.file("limits.toml", &text);
        ok(&place, &bed, &format!("apply {}", file.display()))
    };
    let done = spec(RECEIVER, SECOND);
    assert!(done.contains("match 10.97.0.2/32"), "{done}");
    assert!(spec(RECEIVER, SECOND).contains("Nothing to do"));
    assert!(spec(RECEIVER, THIRD).contains("match 10.97.0.3/32 -> 10.97.0.4/32"));
    spec(THIRD, RECEIVER);
    is_held(&bed.free(&bed.sender, "2 0 60e6 10.97.0.2"), 5e6, BURST_BYTES);
    ok(&place, &bed, &add("all", "--egress 10mbit"));
    is_held(&bed.free(&bed.sender, "2 0 60e6 10.97.0.4"), 10e6, BURST_BYTES);
    ok(&place, &bed, "limit del all");
    is_held(&bed.free(&bed.sender, "2 0 60e6 10.97.0.4"), 20e6, BURST_BYTES);
    ok(&place, &bed, "detach");
}

/// So many that a descriptor for each would be too much. What a process may open is scaled with them: a shell
/// gives 1024, for a thousand limits.
#[test]
fn root_police_match_hundreds_from_one_file() {
    need_root!();
    const LIMITS: usize = 300;
    const FILES: &str = "--nofile=256:";
    let (place, bed) = (Place::new(), bed());
    let spec = |rate: &str| {
        let mut text = String::new();
        for i in 0..LIMITS {
            write!(
                text,
                "[[limit]]\nname = \"h{i}\"\nscope = {{ dev = \"eth0\" }}\nscheme = \"police\"\n\
                 egress = \"{rate}\"\ningress = \"50mbit\"\nburst = \"100kb\"\n\
                 match = \"10.97.{}.{}\"\n",
                i / 250,
                i % 250
            )
            .unwrap();
        }
        place.file("hundreds.toml", &text)
    };
    let apply = |rate: &str| {
        let mut command = into(&bed.sender, "prlimit");
        command.env("TIDEGATE_BPFFS", place.store()).args([FILES, "--"]);
        command.arg(env!("CARGO_BIN_EXE_tidegate")).arg("apply").arg(spec(rate));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        text(&output)
    };
    assert!(apply("20mbit").contains(&format!("Done: {LIMITS} added")));
    is_held(&bed.free(&bed.sender, "2 0 60e6 10.97.0.2"), 20e6, BURST_BYTES);
    assert!(apply("10mbit").contains(&format!("{LIMITS} changed")));
    is_held(&bed.free(&bed.sender, "2 0 60e6 10.97.0.3"), 10e6, BURST_BYTES);
    assert!(apply("10mbit").contains("Nothing to do"));
    let shown = status(&place, &bed);
    let limits = shown["limits"].as_array().unwrap();
    assert_eq!(limits.len(), LIMITS);
    assert!(limits.iter().all(|limit| limit["state"] == "in_force"));
    let busy = limits.iter().filter(|l| l["egress"]["drop_full_packets"].as_u64().unwrap() > 100);
    assert_eq!(busy.count(), 2);
    ok(&place, &bed, "detach");
    assert!(!place.store().exists());
}
