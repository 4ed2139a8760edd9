//! Scheme `tbf`: the kernel's token bucket filter on a device or port. Rates are compared with the limit; no
//! time is asked for by itself.

use crate::{
    common::Place,
    edt::{BURST_BYTES, Bed, into, is_free, is_held, ok, refused, tidegate},
    htb::json,
    need_root,
};

const LIMIT_BIT_S: f64 = 20e6;

#[test]
fn root_tbf_limits_a_device_and_leaves_no_trace() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    let words = "limit add up --dev eth0 --scheme tbf --egress 20mbit";
    ok(&place, &bed, words);
    assert!(ok(&place, &bed, "status").contains("in force"));
    assert!(bed.qdiscs().contains("tbf 7467:"), "{}", bed.qdiscs());
    let same = ok(&place, &bed, words);
    assert!(same.contains("nothing changed"), "{same}");
    let fast = bed.free(&bed.sender, "3 2 0 10.97.0.2");
    is_held(&fast, LIMIT_BIT_S, BURST_BYTES);
    ok(&place, &bed, "limit set up --egress 10mbit");
    let slow = bed.free(&bed.sender, "3 1 0 10.97.0.2");
    is_held(&slow, LIMIT_BIT_S / 2.0, BURST_BYTES);
    // A flood: the bytes that were dropped are known, too. The counters went on over the change.
    let flood = bed.free(&bed.sender, "2 2 40e6 10.97.0.2");
    is_held(&flood, LIMIT_BIT_S / 2.0, BURST_BYTES);
    let status = json(&place, &bed, "status --json");
    let egress = &status["limits"][0]["egress"];
    assert!(egress["drop_full_packets"].as_u64().unwrap() > 0, "{egress}");
    assert!(egress["drop_full_bytes"].as_u64().unwrap() > 0, "{egress}");
    let received: u64 = [&fast, &slow, &flood].map(|traffic| traffic.bytes()).iter().sum();
    assert!(egress["pass_bytes"].as_u64().unwrap() >= received, "{egress} of {received}");

    // Somebody takes it off: it says so, and is put back.
    assert!(bed.tc("qdisc del dev eth0 root").status.success());
    let (_, table, _) = tidegate(&place, &bed, "status");
    assert!(table.contains("DETACHED") && table.contains("NOT ENFORCED"), "{table}");
    ok(&place, &bed, words);
    assert!(ok(&place, &bed, "status").contains("in force"));
    is_held(&bed.free(&bed.sender, "3 1 0 10.97.0.2"), LIMIT_BIT_S, BURST_BYTES);

    ok(&place, &bed, "detach");
    assert_eq!(bed.qdiscs(), before);
    assert!(!place.store().exists());
    is_free(&bed.free(&bed.sender, "2 1 0 10.97.0.2"), LIMIT_BIT_S);
}

#[test]
fn root_tbf_holds_what_leaves_alone() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    for (words, direction) in [
        ("limit add up --dev eth0 --scheme tbf --ingress 20mbit", "egress"),
        ("limit add up --dev eth0 --scheme tbf --egress 20mbit --ingress 20mbit", "egress"),
        ("limit add up --port eth0 --scheme tbf --egress 20mbit", "ingress"),
    ] {
        let message = refused(&place, &bed, words);
        let why = format!("scheme `tbf` limits {direction} only");
        assert!(message.contains(&why), "{words}: {message}");
        assert_eq!(bed.qdiscs(), before);
    }
    ok(&place, &bed, "limit add up --port eth0 --scheme tbf --ingress 20mbit");
    is_held(&bed.free(&bed.sender, "3 1 0 10.97.0.2"), LIMIT_BIT_S, BURST_BYTES);
    ok(&place, &bed, "limit del up");
    assert_eq!(bed.qdiscs(), before);
}

#[test]
fn root_tbf_leaves_the_qdiscs_of_others_alone() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    assert!(bed.tc("qdisc add dev eth0 root handle 9: pfifo limit 7").status.success());
    let theirs = bed.qdiscs();
    let words = "limit add up --dev eth0 --scheme tbf --egress 20mbit";
    let message = refused(&place, &bed, words);
    assert!(message.contains("`pfifo 9:`") && message.contains("--force"), "{message}");
    assert_eq!(bed.qdiscs(), theirs);
    ok(&place, &bed, &format!("{words} --force"));
    assert!(bed.qdiscs().contains("tbf 7467:"), "{}", bed.qdiscs());
    // A device has one qdisc: another limit that needs it is refused.
    let message = refused(&place, &bed, "limit add two --port eth0 --scheme htb --ingress 5mbit");
    assert!(message.contains("`up`"), "{message}");
    ok(&place, &bed, "limit del up");
    assert_eq!(bed.qdiscs(), before);
}

#[test]
fn root_counters_go_on_when_another_scheme_takes_the_device() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme htb --egress 20mbit");
    let passed = || {
        let limit = &json(&place, &bed, "status --json")["limits"][0];
        (limit["scheme"].clone(), limit["egress"]["pass_bytes"].as_u64().unwrap())
    };
    // Of `htb` and `tbf` a device has one: the earlier limit is off before the later one is on.
    for scheme in ["tbf", "htb", "police", "htb"] {
        let (_, before) = passed();
        let received = bed.free(&bed.sender, "1 1 0 10.97.0.2").bytes();
        let (from, sent) = passed();
        assert!(sent >= before + received, "{from}: {before}, {received}, {sent}");
        let message = refused(&place, &bed, "limit set up --scheme edt --egress 20mbit");
        assert!(message.contains("`fq`"), "{message}");
        ok(&place, &bed, &format!("limit set up --scheme {scheme} --egress 20mbit"));
        let (now, counted) = passed();
        assert_eq!(now, scheme);
        // A packet counts once: counted twice, all of `sent` would be there again. What the sender has left
        // in its buffer may follow.
        assert!((sent..2 * sent).contains(&counted), "{from}, {now}: {sent}, {counted}");
    }
}

#[test]
fn root_a_limit_goes_on_with_its_renamed_device() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let before = bed.qdiscs();
    let renamed = |from: &str, to: &str| {
        // Linux 6.1 refuses one that is up.
        for words in [vec![from, "down"], vec![from, "name", to], vec![to, "up"]] {
            let output = into(&bed.sender, "ip").args(["link", "set", "dev"]).args(words).output();
            assert!(output.unwrap().status.success(), "from {from} to {to}");
        }
    };
    for scheme in ["tbf", "spring", "police", "htb"] {
        ok(&place, &bed, &format!("limit add up --dev eth0 --scheme {scheme} --egress 20mbit"));
        renamed("eth0", "lan0");
        let status = ok(&place, &bed, "status");
        assert!(status.contains("dev lan0") && status.contains("in force"), "{scheme}: {status}");
        ok(&place, &bed, "limit set up --egress 10mbit");
        let same = ok(&place, &bed, "limit restore up");
        assert!(same.contains("nothing to restore"), "{scheme}: {same}");
        ok(&place, &bed, "limit del up");
        renamed("lan0", "eth0");
        assert_eq!(bed.qdiscs(), before, "{scheme}");
    }
}
