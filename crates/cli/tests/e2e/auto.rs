//! Scheme `auto`: what it picks on a host, that it keeps it, and where it says why.

use serde_json::Value;
use tidegate_sys::features::has_qdisc;

use crate::{
    common::Place,
    edt::{Bed, ok, refused, tidegate},
    need_root,
};

fn limit(place: &Place, bed: &Bed, name: &str) -> Value {
    serde_json::from_str(&ok(place, bed, &format!("limit show {name} --json"))).unwrap()
}

#[test]
fn root_auto_picks_and_keeps_a_scheme() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let add = "limit add up --dev eth0 --egress 20mbit";
    let added = ok(&place, &bed, add);
    assert!(added.contains("scheme spring (auto: first choice on a device)"), "{added}");
    assert!(ok(&place, &bed, add).contains("nothing changed"));
    ok(&place, &bed, "limit set up --egress 10mbit");
    let up = limit(&place, &bed, "up");
    assert_eq!(
        (&up["scheme"], &up["scheme_chosen"]),
        (&"spring".into(), &"first choice on a device".into())
    );
    let shown = ok(&place, &bed, "limit show up");
    assert!(shown.contains("up: scheme spring (auto: first choice on a device)"), "{shown}");

    // The same scheme by its name is another wish, and the other way round.
    let named = ok(&place, &bed, "limit set up --scheme spring");
    assert!(named.contains("scheme chosen auto, first choice on a device -> by name"), "{named}");
    assert!(limit(&place, &bed, "up")["scheme_chosen"].is_null());
    let auto = ok(&place, &bed, "limit set up --scheme auto");
    assert!(auto.contains("by name -> auto, first choice on a device"), "{auto}");
    let error = refused(&place, &bed, "limit add b --dev eth0 --egress 1mbit --ecn 60kb --fair");
    assert!(error.contains("--scheme: no scheme fits: `spring` has no `ecn`"), "{error}");
    ok(&place, &bed, "detach");
}

#[test]
fn root_auto_in_a_file_is_chosen_by_the_whole_file() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let group = place.group.path().trim_matches('/').to_owned();
    let child = place.child("web");
    let child = child.path().trim_matches('/');
    let text = format!(
        "[[limit]]\nname = \"in\"\nscope = {{ cgroup = \"{group}\" }}\nparent = \"up\"\n\n\
         [[limit]]\nname = \"up\"\nscope = {{ dev = \"eth0\" }}\negress = \"20mbit\"\n\n\
         [[limit]]\nname = \"web\"\nscope = {{ cgroup = \"{child}\" }}\negress = \"5mbit\"\n"
    );
    let apply = |text: &str, verb: &str| {
        ok(&place, &bed, &format!("{verb} {}", place.file("limits.toml", text).display()))
    };
    let done = apply(&text, "apply");
    assert!(done.contains("scheme htb (auto: inside the limit of a device)"), "{done}");
    assert!(done.contains("scheme htb (auto: `spring` neither has a parent nor is one)"), "{done}");
    assert!(done.contains("scheme pace (auto: first choice on a cgroup)"), "{done}");
    assert!(apply(&text, "apply").contains("Nothing to do"));

    // Without its child the parent keeps its scheme; it is `spring` where a new limit would have it.
    let alone = text.split_once("\n\n").unwrap().1;
    ok(&place, &bed, "limit del in");
    assert!(apply(alone, "plan").contains("Nothing to do"));
    // Another setting that only another scheme has decides anew.
    let metered =
        alone.replace("20mbit\"", "20mbit\"\nmeter = { type = \"srtcm\", ebs = \"99kb\" }");
    let done = apply(&metered, "apply");
    assert!(done.contains("scheme police (auto: `spring` has no `meter`)"), "{done}");
    assert!(apply(&metered, "apply").contains("Nothing to do"));
    ok(&place, &bed, "detach");
}

/// `mark` on a device is a setting of `edt` alone, which needs the kernel's `fq`.
#[test]
fn root_auto_picks_edt_only_where_the_kernel_has_fq() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let limit = "[[limit]]\nname = \"up\"\nscope = { dev = \"eth0\" }\negress = \"20mbit\"\nmark = \"1ms\"\n";
    let plan = format!("plan {}", place.file("limits.toml", limit).display());
    let (_, shown, said) = tidegate(&place, &bed, &plan);
    if has_qdisc("fq") == Some(false) {
        assert!(said.contains("no scheme fits: `spring` has no `mark`"), "{said}");
        assert!(said.contains("the kernel has no fq for `edt`"), "{said}");
    } else {
        assert!(shown.contains("scheme edt (auto: `spring` has no `mark`)"), "{shown}{said}");
    }
}
