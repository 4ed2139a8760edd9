//! `tidegate check`, `plan` and `apply`.

use std::os::fd::{AsFd, AsRawFd};

use tidegate_sys::{
    cgroup::Cgroup,
    libbpf_rs::libbpf_sys::{
        BPF_CGROUP_INET_EGRESS, BPF_PROG_TYPE_CGROUP_SKB, bpf_insn, bpf_prog_attach, bpf_prog_load,
    },
};

use crate::{
    common::{Objects, Place},
    need_root,
};

fn spec(limits: &[(&str, &str, &str)]) -> String {
    let limit = |(name, cgroup, rate): &(&str, &str, &str)| {
        format!(
            "[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{cgroup}\" }}\negress = \"{rate}\"\n\n"
        )
    };
    limits.iter().map(limit).collect()
}

#[test]
fn root_applying_twice_changes_nothing() {
    need_root!();
    let place = Place::new();
    let (x, y) = (place.child("x"), place.child("y"));
    let text = spec(&[("a", x.path(), "50mbit"), ("b", y.path(), "1.5gbit")]);
    let file = place.file("limits.toml", &text);
    let file = file.to_str().unwrap();

    assert!(place.ok(&["check", file]).contains("well-formed, 2 limits"));
    let plan = place.tidegate().args(["plan", file]).output().unwrap();
    assert_eq!(plan.status.code(), Some(3), "changes are pending");
    assert!(!place.store().exists(), "planning touches nothing");
    assert!(place.ok(&["apply", file]).contains("2 added"));
    let objects = Objects::on(&x);

    assert!(place.ok(&["plan", file]).contains("Nothing to do"));
    assert!(place.ok(&["apply", file]).contains("Nothing to do"));
    assert_eq!(place.json(&["apply", file, "--json"])["actions"], serde_json::json!([]));
    assert_eq!(format!("{:?}", Objects::on(&x)), format!("{objects:?}"), "the very same");
}

#[test]
fn root_apply_changes_moves_keeps_and_prunes() {
    need_root!();
    let place = Place::new();
    let groups = ["w", "x", "y", "z"].map(|name| place.child(name));
    let [w, x, y, z] = groups.each_ref().map(|group| group.path());
    let first = spec(&[("rate", w, "50mbit"), ("moved", x, "50mbit"), ("other", y, "1mbit")]);
    place.ok(&["apply", place.file("1.toml", &first).to_str().unwrap()]);
    let kept = Objects::on(&groups[0]);

    let second = spec(&[("rate", w, "60mbit"), ("moved", z, "50mbit")]);
    let file = place.file("2.toml", &second);
    let file = file.to_str().unwrap();
    let done = place.ok(&["apply", file]);
    assert!(done.contains("~ rate: egress 50mbit -> 60mbit"), "{done}");
    assert!(done.contains("other: not in the file, left alone"), "{done}");
    assert_eq!(format!("{:?}", Objects::on(&groups[0])), format!("{kept:?}"), "changed in place");
    assert!(!Objects::on(&groups[1]).is_whole() && Objects::on(&groups[3]).is_whole());

    let plan = place.tidegate().args(["plan", file, "--prune"]).output().unwrap();
    assert_eq!(plan.status.code(), Some(3));
    assert!(place.ok(&["apply", file, "--prune"]).contains("- other on"));
    assert!(place.ok(&["plan", file, "--prune"]).contains("Nothing to do"));
}

#[test]
fn root_a_cgroup_that_is_missing_stops_everything() {
    need_root!();
    let place = Place::new();
    let text = spec(&[("a", place.group.path(), "50mbit"), ("b", "no/such.service", "1mbit")]);
    let file = place.file("limits.toml", &text);
    for verb in ["plan", "apply"] {
        let (code, message) = place.refused(&[verb, file.to_str().unwrap()]);
        assert_eq!(code, 1);
        assert!(
            message.contains(
                "limits.toml:6: limit `b`: scope: cgroup `no/such.service` does not exist"
            ),
            "{message}"
        );
    }
    assert!(!place.store().exists());
}

#[test]
fn root_a_spec_that_is_half_applied_is_rolled_back() {
    need_root!();
    let place = Place::new();
    let groups = ["x", "y", "z"].map(|name| place.child(name));
    let [x, y, z] = groups.each_ref().map(|group| group.path());
    place.ok(&["limit", "add", "old", "--cgroup", x, "--egress", "50mbit"]);
    hold_exclusively(&groups[2]);
    let text = spec(&[("old", x, "10mbit"), ("new", y, "10mbit"), ("never", z, "10mbit")]);
    let file = place.file("limits.toml", &text);
    let (code, message) = place.refused(&["apply", file.to_str().unwrap()]);
    assert_eq!(code, 2, "{message}");
    assert!(
        message.contains("limit `never`: ") && message.contains("as they were before"),
        "{message}"
    );
    let status = place.json(&["status", "--json"]);
    assert_eq!(status["limits"].as_array().unwrap().len(), 1);
    assert_eq!(status["limits"][0]["egress"]["rate_bit_s"], 50_000_000);
    assert!(!Objects::on(&groups[1]).is_whole());
}

#[test]
fn root_another_tools_program_is_named() {
    need_root!();
    let place = Place::new();
    hold_exclusively(&place.group);
    let below = place.child("below");
    for (cgroup, flags) in [(place.group.path(), "egress"), (below.path(), "egress")] {
        let (code, message) =
            place.refused(&["limit", "add", "a", "--cgroup", cgroup, "--egress", "1mbit"]);
        assert_eq!(code, 2, "{message}");
        assert!(message.contains("(`tg_foreign`)") && message.contains(flags), "{message}");
        assert!(message.contains(place.group.path()), "names the holder's cgroup: {message}");
    }
    let (code, message) = crate::common::refused(place.run(&["--egress", "1mbit"]).arg("true"));
    assert_eq!(code, 2);
    assert!(message.contains("(`tg_foreign`)") && message.contains("not started"), "{message}");
    assert!(place.run_group().is_none());
}

/// Attaches a program as tools of old do: without sharing the hook. It goes with the cgroup.
fn hold_exclusively(cgroup: &Cgroup) {
    let mut pass = [bpf_insn::default(), bpf_insn::default()];
    // r0 = 1; exit
    (pass[0].code, pass[0].imm, pass[1].code) = (0xb7, 1, 0x95);
    // SAFETY: names are terminated, `pass` holds two instructions, no options are given, and both
    // descriptors are open.
    unsafe {
        let program = bpf_prog_load(
            BPF_PROG_TYPE_CGROUP_SKB,
            c"tg_foreign".as_ptr(),
            c"GPL".as_ptr(),
            pass.as_ptr(),
            2,
            std::ptr::null_mut(),
        );
        assert!(program >= 0);
        let fd = cgroup.as_fd().as_raw_fd();
        assert_eq!(bpf_prog_attach(program, fd, BPF_CGROUP_INET_EGRESS, 0), 0);
    }
}
