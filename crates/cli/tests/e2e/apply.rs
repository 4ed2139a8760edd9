//! `tidegate check`, `plan` and `apply`.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use tidegate_sys::{
    cgroup::Cgroup,
    libbpf_rs::libbpf_sys::{
        BPF_CGROUP_INET_EGRESS, BPF_PROG_TYPE_CGROUP_SKB, bpf_insn, bpf_prog_attach, bpf_prog_load,
    },
};

use crate::{
    common::{Objects, Place},
    need_root,
    older::date,
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
fn check_reads_the_files_of_a_directory_as_the_agent_does() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let check = |more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let output = command.arg("check").arg(dir.path()).args(more).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let path = |name: &str| dir.path().join(name).display().to_string();
    let none = format!("{}: no files, no limits\n", dir.path().display());
    assert_eq!(check(&[]), (Some(0), none, String::new()));
    write("a.toml", &spec(&[("a", "x", "50mbit")]));
    write("b.toml", &spec(&[("b", "y", "50mbit"), ("c", "z", "50mbit")]));
    write("notes.txt", "no TOML");
    let well = ["a.toml: well-formed, 1 limit", "b.toml: well-formed, 2 limits"].map(path);
    assert_eq!(check(&[]), (Some(0), well.join("\n") + "\n", String::new()));
    let (_, json, _) = check(&["--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let [first, second] = [&json["files"][0], &json["files"][1]];
    assert_eq!(
        (&first["file"], &second["limits"][1]["name"]),
        (&path("a.toml").into(), &"c".into())
    );
    // Each error names its file.
    write("b.toml", &spec(&[("a", "y", "50mbit"), ("c", "z", "50mbps")]));
    write("c.toml", "[[limit]");
    let (code, said, errors) = check(&[]);
    let errors: Vec<_> = errors.lines().collect();
    assert!(code == Some(1) && said.is_empty() && errors.len() == 3, "{code:?} {said} {errors:?}");
    let places = ["b.toml:9: limit `c`: egress: ", "c.toml:1: ", "b.toml:1: limit `a`: "].map(path);
    for (error, place) in errors.iter().zip(places) {
        assert!(error.starts_with(&format!("tidegate: error: {place}")), "{error}");
    }
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
fn root_a_limit_without_a_cgroup_waits_and_the_others_are_put_on() {
    need_root!();
    let place = Place::new();
    let service = format!("{}/service", place.group.path());
    let text = spec(&[("a", place.group.path(), "50mbit"), ("b", &service, "1mbit")]);
    let file = place.file("limits.toml", &text);
    let file = file.to_str().unwrap();
    let code = |args: &[&str]| place.tidegate().args(args).output().unwrap().status.code();
    let states = || {
        let status = place.json(&["status", "--json"]);
        let limits = status["limits"].as_array().unwrap().clone();
        limits
            .iter()
            .map(|limit| format!("{} {}", limit["name"], limit["state"]).replace('"', ""))
            .collect::<Vec<_>>()
    };
    let line =
        format!("! b waits: there is no cgroup `{service}`; `tidegate apply {file}` attaches it");
    let plan = place.tidegate().args(["plan", file]).output().unwrap();
    assert_eq!(plan.status.code(), Some(3), "`a` is to be put on");
    assert!(String::from_utf8_lossy(&plan.stdout).contains(&line));
    let said = place.ok(&["apply", file]);
    assert!(said.contains(&line) && said.contains("Done: 1 added"), "{said}");
    assert!(Objects::on(&place.group).is_whole());
    assert_eq!(states(), ["a in_force", "b waiting"]);
    let (refused, message) = place.refused(&["limit", "set", "b", "--egress", "2mbit"]);
    assert_eq!(refused, 1);
    assert!(
        message.contains("limit `b` waits: there is no") && message.contains("in its file"),
        "{message}"
    );
    let table = place.ok(&["status"]);
    let row = format!("{service}  waiting");
    assert!(table.contains(&row) && table.contains("limit `b` waits: there is no"), "{table}");
    assert_eq!(code(&["status", "--check"]), Some(0), "who waits is not lost");
    std::fs::write(file, format!("{text}required = true\n")).unwrap();
    place.ok(&["apply", file]);
    assert_eq!(code(&["status", "--check"]), Some(3));
    std::fs::write(file, &text).unwrap();
    place.ok(&["apply", file]);
    assert_eq!(code(&["plan", file]), Some(0), "nothing can be done");
    assert!(place.ok(&["apply", file]).contains("Nothing to do until then"));
    let json = place.json(&["plan", file, "--json"]);
    assert_eq!(json["waiting"][0]["name"], "b");
    assert_eq!(json["waiting"][0]["cgroup"], service.as_str());

    // It is there: put on. It goes: waits again, with whatever else the file says.
    let child = place.child("service");
    assert!(place.ok(&["apply", file]).contains("+ b on"));
    assert!(Objects::on(&child).is_whole());
    assert_eq!(states(), ["a in_force", "b in_force"]);
    assert_eq!(code(&["status", "--check"]), Some(0));
    std::fs::remove_dir(child.absolute()).unwrap();
    assert_eq!(states(), ["a in_force", "b waiting"]);
    std::fs::write(file, text.replace("50mbit", "60mbit")).unwrap();
    let said = place.ok(&["apply", file]);
    assert!(said.contains(&line) && said.contains("~ a: egress 50mbit -> 60mbit"), "{said}");
    let child = place.child("service");
    assert!(place.ok(&["apply", file]).contains("+ b on"));
    assert!(Objects::on(&child).is_whole());

    // One that never was can be forgotten, and `detach` forgets all.
    place.ok(&["limit", "del", "b"]);
    std::fs::remove_dir(child.absolute()).unwrap();
    place.ok(&["apply", file]);
    assert_eq!(states(), ["a in_force", "b waiting"]);
    assert!(place.ok(&["limit", "del", "b"]).contains("does not wait any more"));
    assert_eq!(states(), ["a in_force"]);
    place.ok(&["apply", file]);
    assert!(place.ok(&["detach"]).contains("limit `b` does not wait any more"));
    assert!(!place.store().exists());
}

#[test]
fn root_a_limit_on_a_device_and_those_inside_it_wait_for_the_device() {
    need_root!();
    let place = Place::new();
    let child = place.child("inside");
    let text = format!(
        "[[limit]]\nname = \"up\"\nscope = {{ dev = \"tg-none\" }}\negress = \"9mbit\"\n\
         scheme = \"htb\"\n[[limit]]\nname = \"inside\"\nparent = \"up\"\nscheme = \"htb\"\n\
         scope = {{ cgroup = \"{}\" }}\n",
        child.path()
    );
    let file = place.file("limits.toml", &text);
    let said = place.ok(&["apply", file.to_str().unwrap()]);
    assert!(said.contains("! up waits: there is no device `tg-none`"), "{said}");
    assert!(said.contains("! inside waits: its parent `up` waits"), "{said}");
    assert_eq!(place.json(&["status", "--json"])["limits"].as_array().unwrap().len(), 2);
}

/// A row that holds always, then one that holds on another day.
#[test]
fn root_plan_and_apply_say_what_a_schedule_has_off() {
    need_root!();
    let place = Place::new();
    let day = jiff::Zoned::now().checked_add(jiff::Span::new().days(3)).unwrap();
    let (each, plain) = (place.child("each"), place.child("plain"));
    let path = |group: &Cgroup| group.path().to_owned();
    let text = |days: &str| {
        let row = format!("schedule = [{{ days = \"{days}\", egress = \"3mbit\" }}]\n");
        let selected = path(&each).replace("each", "ea*");
        spec(&[("p", &path(&plain), "9mbit")]).trim_end().to_owned()
            + "\n"
            + &row
            + &format!(
                "[[limit]]\nname = \"e\"\nscope = {{ cgroup = \"{selected}\" }}\neach = true\n"
            )
            + &row
    };
    let on = place.file("on.toml", &text("mon-sun"));
    let done = place.ok(&["apply", on.to_str().unwrap()]);
    assert!(done.contains("  p: schedule daily 00:00-24:00\n"), "{done}");
    assert!(!done.contains("nobody"), "it never changes: {done}");
    let unfollowed = || {
        let status = place.json(&["status", "--json"]);
        let limits = status["limits"].as_array().unwrap().iter();
        let those = limits.filter(|limit| limit["unfollowed"] == true);
        those.map(|limit| limit["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(unfollowed().is_empty());
    assert!(Objects::on(&each).is_whole() && Objects::on(&plain).is_whole());
    let off = text(&day.strftime("%a").to_string().to_lowercase());
    let off = place.file("off.toml", &off);
    let off = off.to_str().unwrap();
    let plan = |flags: &[&str]| {
        let output = place.tidegate().args(["plan", off]).args(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "changes are pending");
        String::from_utf8(output.stdout).unwrap()
    };
    let planned = plan(&[]);
    let until = format!("until {}T", day.date());
    for words in [
        "- e-",
        "~ p: egress 3mbit -> 9mbit",
        &format!("  e: off by its schedule {until}"),
        &format!("  p: no row of its schedule holds {until}"),
        ", then egress 3mbit\n",
    ] {
        assert!(planned.contains(words), "{words}: {planned}");
    }
    let nobody = "! nobody follows these schedules: apply the file again at each change, or have \
                  `tidegate agent`";
    assert!(planned.contains(nobody), "{planned}");
    let json: serde_json::Value = serde_json::from_str(&plan(&["--json"])).unwrap();
    let off_of = |name: &str| {
        let mut all = json["schedules"].as_array().unwrap().iter();
        all.find(|schedule| schedule["name"] == name).unwrap()["off"].clone()
    };
    assert_eq!((off_of("e"), off_of("p")), (true.into(), false.into()));
    place.ok(&["apply", off]);
    assert_eq!(Objects::on(&each).links(), 0);
    assert!(Objects::on(&plain).is_whole());
    // The host remembers it, and the next plan finds nothing to do.
    assert_eq!(unfollowed(), ["p"]);
    let status = place.ok(&["status"]);
    assert!(status.contains("p: nobody follows its schedule: apply its file again"), "{status}");
    place.ok(&["plan", off]);
    place.ok(&["limit", "set", "p", "--egress", "8mbit"]);
    assert_eq!(unfollowed(), ["p"]);
    place.ok(&["apply", on.to_str().unwrap()]);
    assert!(unfollowed().is_empty());
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
    let refused = || {
        let (code, message) = place.refused(&["apply", file.to_str().unwrap()]);
        assert_eq!(code, 2, "{message}");
        assert!(message.contains("limit `never`: "), "{message}");
        assert!(message.contains("as they were before"), "{message}");
        let status = place.json(&["status", "--json"]);
        assert_eq!(status["limits"].as_array().unwrap().len(), 1);
        assert_eq!(status["limits"][0]["state"], "in_force");
        assert_eq!(status["limits"][0]["egress"]["rate_bit_s"], 50_000_000);
        assert!(!Objects::on(&groups[1]).is_whole());
    };
    refused();
    // What another version has put on comes back as it was asked for.
    date(&place, "old", 0);
    refused();
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
    assert_eq!(attach_foreign(cgroup, 0), 0);
}

/// A program on the egress hook that passes all, attached as others do; what the kernel says.
pub fn attach_foreign(cgroup: &Cgroup, flags: u32) -> i32 {
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
        let attached = bpf_prog_attach(program, fd, BPF_CGROUP_INET_EGRESS, flags);
        drop(OwnedFd::from_raw_fd(program));
        attached
    }
}

#[test]
fn root_a_file_without_limits_is_a_file_and_takes_nothing_off_by_accident() {
    need_root!();
    let place = Place::new();
    place.ok(&["limit", "add", "a", "--cgroup", place.group.path(), "--egress", "1mbit"]);
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/limits.toml");
    assert!(place.ok(&["check", shipped]).contains("well-formed, 0 limits"));
    assert!(place.ok(&["apply", shipped]).contains("left alone"));
    let (code, message) = place.refused(&["apply", "--prune", shipped]);
    assert_eq!(code, 1);
    assert!(message.contains("write `limit = []` if this host shall have no limits"), "{message}");
    let none = place.file("none.toml", "limit = []");
    assert!(place.ok(&["apply", "--prune", none.to_str().unwrap()]).contains("- a on"));
}
