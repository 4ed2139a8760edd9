use insta::assert_snapshot;

use super::*;
use crate::fleet::Algorithm;

const FLEET: &str = r#"
[fleet]
name = "prod"
keys = "/etc/tidegate/fleet.keys"
acceptors = ["web-1", "web-2", "web-3"]
peers = ["10.0.0.2", "web-3:7000", "[2001:db8::1]:7946"]

[[limit]]
name   = "backup"
scope  = { cgroup = "system.slice/backup.service" }
egress = "1gbit"
"#;

fn with_group(lines: &str) -> Result<Spec, SpecError> {
    let given = |field: &str| lines.lines().any(|l| l.split(' ').next() == Some(field));
    let defaults = [
        ("name", "name = \"uplink\""),
        ("rate", "rate = \"10gbit\""),
        ("algorithm", "algorithm = \"share\""),
        ("members", "members = [\"backup\"]"),
    ];
    let rest: Vec<_> = defaults.iter().filter(|(f, _)| !given(f)).map(|(_, l)| *l).collect();
    Spec::parse("f.toml", &format!("{FLEET}\n[[group]]\n{}\n{lines}\n", rest.join("\n")))
}

fn group(lines: &str) -> String {
    with_group(lines).unwrap_err().to_string()
}

fn fleet(line: &str) -> String {
    let text = format!("[fleet]\nname = \"prod\"\nkeys = \"k\"\n{line}\n");
    Spec::parse("f.toml", &text).unwrap_err().to_string()
}

#[test]
fn a_fleet_and_its_groups_read() {
    let spec = with_group("interval = \"100ms\"\nreserve = \"20%\"\nhosts = 4").unwrap();
    let fleet = spec.fleet.as_ref().unwrap();
    assert_eq!((fleet.name.as_str(), fleet.line, fleet.peers.len()), ("prod", 2, 3));
    assert_eq!(fleet.listen.to_string(), "0.0.0.0:7946");
    let [group] = &spec.groups[..] else { unreachable!() };
    assert_eq!((group.algorithm, group.members.len(), group.hosts), (Algorithm::Share, 1, 4));
    assert_eq!(group.alone_bit_s(), 500_000_000, "a quarter of 20 %");
    let number = group.number(fleet);
    let other = with_group("interval = \"100ms\"\nreserve = \"20%\"\nhosts = 4\nrate = \"9gbit\"");
    assert_ne!(other.unwrap().groups[0].number(fleet), number, "another limit is another group");
    let fps = with_group("algorithm = \"fps\"\nhosts = 4").unwrap();
    assert_eq!(fps.groups[0].alone_bit_s(), 2_500_000_000);
    assert!(with_group("members = []").is_ok(), "an acceptor need not have members");
}

#[test]
fn groups_that_are_none() {
    assert_snapshot!(group("algorithm = \"fair\""), @"f.toml:17: algorithm: unknown algorithm `fair`; use one of share, fps, grd, gtb, ctb");
    assert_snapshot!(group("members = [\"web\"]"), @"f.toml:17: members: there is no limit `web` in this file that stays on the host");
    assert_snapshot!(group("members = [\"backup\", \"backup\"]"), @"f.toml:17: members: limit `backup` is in group `uplink` already; a direction of a limit is in one group");
    assert_snapshot!(group("direction = \"ingress\""), @"f.toml:17: members: limit `backup` has no ingress; write one: the cap on this host, whatever the group's rate");
    assert_snapshot!(group("direction = \"up\""), @"f.toml:18: direction: `up` is no direction; write `egress` or `ingress`");
    assert_snapshot!(group("hosts = 0"), @"f.toml:18: hosts: 0 hosts; write 1 to 65536");
    assert_snapshot!(group("algorithm = \"fps\"\nhosts = 1000"), @"f.toml:18: hosts: 1000 hosts; write 1 to 512; beyond, use algorithm `share`");
    assert_snapshot!(group("rate = \"1mbit\"\nhosts = 1000"), @"f.toml:17: rate: each of 1000 hosts would have 100 bit/s for itself when it hears nobody, and below 8000 nothing can start: raise the rate or the reserve, or lower hosts");
    assert_snapshot!(group("reserve = \"0.5\""), @"f.toml:18: reserve: `0.5` is no part of the rate; write a whole percentage, for example `10%`, 1% to 100%");
    assert_snapshot!(group("interval = \"1ms\""), @"f.toml:18: interval: the interval is 1ms; write 20ms to 1 min, for example 250ms");
    assert_snapshot!(group("lease = \"300ms\""), @"f.toml:18: lease: give an interval above zero, and lease and suspect from twice that to an hour");
    assert_snapshot!(group("suspect = \"1ms\""), @"f.toml:18: suspect: give an interval above zero, and lease and suspect from twice that to an hour");
    assert_snapshot!(group("suspect = \"7200s\""), @"f.toml:18: suspect: give an interval above zero, and lease and suspect from twice that to an hour");
    assert_snapshot!(group("interval = \"5s\""), @"f.toml:18: interval: give an interval above zero, and lease and suspect from twice that to an hour");
    assert_snapshot!(group("branching = 100"), @"f.toml:18: branching: 100 peers an interval; write 1 to 16");
    assert_snapshot!(group("branching = 4"), @"f.toml:18: branching: is for algorithm `fps`, `grd` or `gtb` only");
    assert_snapshot!(group("algorithm = \"fps\"\nlease = \"3s\""), @"f.toml:18: lease: is for algorithm `share` only");
    assert_snapshot!(group("algorithm = \"ctb\""), @r#"f.toml:13: center: algorithm `ctb` has its one limiter on one node; write for example center = "web-1""#);
    assert_snapshot!(group("algorithm = \"gtb\"\nmembers = []"), @"f.toml:17: members: no members; name limits of this file (only nodes that are acceptors of `share` may do without)");
    assert_snapshot!(group("limit = \"1gbit\""), @"f.toml:18: unknown field `limit`; a group has name, rate, algorithm, members, direction, interval, branching, hosts, reserve, lease, suspect, center");
    assert_snapshot!(group("intervall = \"1s\""), @"f.toml:18: unknown field `intervall`; did you mean `interval`?");
    let one = "[[group]]\nname = \"uplink\"\nrate = \"1gbit\"\nalgorithm = \"fps\"\nmembers = [\"backup\"]";
    let twice = |other: &str| {
        let text = format!("{FLEET}\n{one}\n{}", one.replace("uplink", other));
        Spec::parse("f.toml", &text).unwrap_err().to_string()
    };
    assert_snapshot!(twice("uplink"), @"f.toml:19: name: a group of this name is on line 13 already; give each its own name");
    assert_snapshot!(twice("other"), @"f.toml:22: members: limit `backup` is in group `uplink` already; a direction of a limit is in one group");
    let no_fleet = FLEET.replace("[fleet]", "").split("[[limit]]").last().map(|limit| {
        Spec::parse("f.toml", &format!("[[limit]]{limit}\n{one}")).unwrap_err().to_string()
    });
    assert_snapshot!(no_fleet.unwrap(), @"f.toml:7: name: a group needs a `[fleet]` table; write one with name and keys");
}

#[test]
fn fleets_that_are_none() {
    assert_snapshot!(fleet("node = \"a b\""), @"f.toml:4: node: `a b` must be 1 to 63 letters, digits, `-`, `_` or `.`, and start with a letter or digit");
    assert_snapshot!(fleet("listen = \"7946\""), @"f.toml:4: listen: `7946` is no address with a port; write for example `10.0.0.1:7946`");
    assert_snapshot!(fleet("peers = [\"a b\"]"), @"f.toml:4: peers: `a b` is no peer; write an address or a name, for example `10.0.0.1` or `web-1:7946`");
    assert_snapshot!(fleet("peers = \"a\""), @r#"f.toml:4: peers: expected a list, found the text "a"; write for example `peers = ["10.0.0.2:7946"]`"#);
    assert_snapshot!(fleet("redis = \"http://10.0.0.1\""), @"f.toml:4: redis: expected an address that starts with `redis://`, or with `rediss://` for TLS");
    assert_snapshot!(fleet("etcd = \"10.0.0.1:2379\""), @"f.toml:4: etcd: expected an address that starts with `http://`, or with `https://` for TLS");
    assert_snapshot!(fleet("etcd = \"http://10.0.0.1\"\ntls_ca = \"ca.pem\""), @"f.toml:5: tls_ca: is for a registry over TLS; write its address as `rediss://...` or `https://...`");
    assert_snapshot!(fleet("etcd = \"https://10.0.0.1\"\ntls_key = \"key.pem\""), @r#"f.toml:1: tls_cert: missing; write for example `tls_cert = "/etc/tidegate/registry.pem"`"#);
    assert_snapshot!(fleet("acceptors = [\"a\", \"a\"]"), @"f.toml:4: acceptors: name 1 to 9 different acceptors");
    assert_snapshot!(fleet("seeds = []"), @"f.toml:4: unknown field `seeds`; did you mean `peers`?");
    assert_snapshot!(fleet("peer = []"), @"f.toml:4: unknown field `peer`; did you mean `peers`?");
    assert_snapshot!(fleet("advertise = \"0.0.0.0:7946\""), @"f.toml:4: advertise: no node can be reached at `0.0.0.0:7946`; write an address of this host, for example `10.0.0.1:7946`");
    let missing = Spec::parse("f.toml", "[fleet]\nname = \"prod\"").unwrap_err();
    assert_snapshot!(missing.to_string(), @r#"f.toml:1: keys: missing; write for example `keys = "/etc/tidegate/fleet.keys"`"#);
    let list = Spec::parse("f.toml", "[[fleet]]\nname = \"prod\"").unwrap_err();
    assert_snapshot!(list.to_string(), @"f.toml:1: fleet: expected a table, found a list; write for example `[fleet]`");
}

/// What a file says of a registry may hold a password, however malformed it is.
#[test]
fn no_refusal_shows_a_password() {
    let values = [
        "\"redis://:hunter2@10.0.0.9:99999\"",
        "\"redis://:hunter2@\"",
        "\"redis://:hunter2@10.0.0.9/x\"",
        "\"redis://:hunter2%zz@10.0.0.9\"",
        "\"redis://u:hunter2/@10.0.0.9\"",
        "\"rediss://:hunter2@10.0.0.9\"",
        "\"redis:/:hunter2@10.0.0.9\"",
        "\":hunter2@10.0.0.9\"",
        "\"redis//:hunter2\"",
        "\"hunter2\"",
        "\"http://root:hunter2@10.0.0.9:x\"",
        "\"https://root:hunter2@10.0.0.9\"",
        "\"http://root:hunter2@[::1\"",
        // No TOML.
        "\"redis://:hunter2@10.0.0.9",
        "redis://:hunter2@10.0.0.9",
        ":hunter2",
        "\"hunter2\" x",
        "[\"redis://:hunter2@10.0.0.9\"]",
        "{ url = \"redis://:hunter2@10.0.0.9\" }",
    ];
    let mut refused = 0;
    for field in ["redis", "etcd", "peers", "dns", "listen", "rediss"] {
        for value in values {
            for line in [format!("{field} = {value}"), format!("{field}={value}")] {
                // A name that cannot be asked is not refused here; it has no password in it.
                let text = format!("[fleet]\nname = \"prod\"\nkeys = \"k\"\n{line}\n");
                let Err(e) = Spec::parse("f.toml", &text) else { continue };
                refused += 1;
                let whole = format!("{e} {e:?}");
                let bare = value.trim_matches('"');
                let is_a_name = !["redis", "etcd"].contains(&field)
                    && !bare.contains("://")
                    && !bare.contains('@');
                assert!(is_a_name || !whole.contains("hunter2"), "{line}: {whole}");
            }
        }
    }
    assert!(refused > 150, "{refused}");
    let list = "[fleet]\nredis =\n \"redis://:hunter2@10.0.0.9\nname = \"prod\"";
    let refused = Spec::parse("f.toml", list).unwrap_err().to_string();
    assert!(!refused.contains("hunter2"), "{refused}");
    let good = "[fleet]\nname = \"prod\"\nkeys = \"k\"\nredis = \"redis://:hunter2@10.0.0.9\"\n\
                etcd = \"http://root:hunter2@10.0.0.9\"\n[[limit]]\nname = \"a\"\n\
                scope = { cgroup = \"a\" }\negress = \"1mbit\"";
    let spec = Spec::parse("f.toml", good).unwrap();
    assert!(!format!("{spec:?}").contains("hunter2"), "{spec:?}");
}
