//! Changes by hand beside an agent.

use rustix::process::Signal;

use super::{Bed, Slice, limit, whole};
use crate::{
    common::{Objects, Place, signal, wait_for},
    need_root,
};

#[test]
fn root_agent_is_asked_whether_its_limits_are_there() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let cgroup = slice.make("a");
    let scope = format!("cgroup = \"{}\"", cgroup.path());
    bed.write("a.toml", &limit("a", &scope, "egress = \"20mbit\""));
    let agent = bed.start();
    bed.wait_said("a", "in_force");
    let output = bed.tidegate().arg("detach").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let note =
        format!("the agent (process {}) attaches limits of {}", agent.0.id(), bed.dir.display());
    assert!(output.status.success() && said.contains(&note), "{said}");
    // It would put them back at any moment.
    signal(agent.0.id(), Signal::STOP);
    assert!(bed.tidegate().arg("detach").status().unwrap().success());
    let (state, reason) = bed.said("a");
    assert!(state == "refused" && reason.contains("has taken it off"), "{state} {reason}");
    assert_eq!(bed.check(), Some(3));
    signal(agent.0.id(), Signal::CONT);
    signal(agent.0.id(), Signal::HUP);
    whole(&cgroup);
    bed.wait_said("a", "in_force");
    // What its file cannot have any more stays, and is not called off.
    bed.write("a.toml", &limit("a", &scope, "parent = \"none\"\negress = \"20mbit\""));
    let reason = bed.wait_said("a", "refused");
    assert!(reason.ends_with("the limit of this name on the host stays as it was"), "{reason}");
    assert!(Objects::on(&cgroup).is_whole());
    let status = bed.tidegate().arg("status").output().unwrap();
    let said = String::from_utf8(status.stdout).unwrap();
    assert!(said.contains("is NOT ENFORCED as written: "), "{said}");
    drop(agent);
    place.ok(&["detach"]);
}

#[test]
fn root_limits_of_each_match_and_of_the_agent_by_hand() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let groups = [slice.make("a"), slice.make("b")];
    let scope = format!("cgroup = \"{}/*\"", slice.group.path());
    let text = limit("w", &scope, "each = true\negress = \"9mbit\"");
    let file = bed.dir.join("limits.toml");
    let tidegate = |args: &[&str]| {
        let mut command = bed.tidegate();
        let output = command.env("TIDEGATE_HOST_FILE", &file).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    bed.write("limits.toml", &text);
    tidegate(&["apply", file.to_str().unwrap()]);
    groups.iter().for_each(whole);
    let said = tidegate(&["limit", "set", "w", "--egress", "8mbit"]);
    assert!(said.contains("`tidegate apply` changes w-a, w-b; changed in"), "{said}");
    let said = tidegate(&["limit", "del", "w"]);
    assert!(said.contains("limit `w` is off with `w-a`, `w-b`; taken out of"), "{said}");
    assert!(groups.iter().all(|group| Objects::on(group) == Objects::default()));
    // Beside an agent a change by hand does not last, and says so.
    bed.write("limits.toml", &text);
    let agent = bed.start();
    groups.iter().for_each(whole);
    bed.wait_said("w-a", "in_force");
    bed.wait_said("w-b", "in_force");
    signal(agent.0.id(), Signal::STOP);
    let keeps = format!("the agent keeps it as {} says", file.display());
    for verb in [&["limit", "set", "w-a", "--egress", "1mbit"][..], &["limit", "del", "w-b"]] {
        let said = tidegate(verb);
        assert!(said.contains(&keeps), "{said}");
    }
    let other = place.file(
        "other.toml",
        &limit("w-a", &format!("cgroup = \"{}\"", groups[0].path()), "egress = \"2mbit\""),
    );
    let said = tidegate(&["apply", other.to_str().unwrap()]);
    assert!(
        said.contains(&format!("the agent keeps limit `w-a` as {} says", file.display())),
        "{said}"
    );
    signal(agent.0.id(), Signal::CONT);
    signal(agent.0.id(), Signal::HUP);
    wait_for("the limits of the file", || {
        let rates = ["w-a", "w-b"].map(|name| bed.rate(name));
        (rates == [Some(9_000_000); 2]).then_some(())
    });
    drop(agent);
    place.ok(&["detach"]);
}

/// The child lies in what its parent was on, and is in no file.
#[test]
fn root_agent_goes_on_beside_a_limit_by_hand_that_has_no_place() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let (one, other) = (slice.make("w-1"), slice.make("other"));
    let inside = place.hierarchy.create(&one, "inside").unwrap();
    let pattern = format!("cgroup = \"{}/w-*\"", slice.group.path());
    let outer = limit("outer", &pattern, "egress = \"20mbit\"");
    bed.write("a.toml", &outer);
    let _agent = bed.start();
    bed.wait_said("outer", "in_force");
    let args = ["limit", "add", "inner", "--parent", "outer", "--egress", "1mbit", "--cgroup"];
    let added = bed.tidegate().args(args).arg(inside.path()).output().unwrap();
    assert!(added.status.success(), "{added:?}");
    slice.remove(&inside);
    slice.remove(&one);
    bed.wait_said("outer", "waiting");
    let scope = format!("cgroup = \"{}\"", other.path());
    bed.write("a.toml", &(outer + &limit("other", &scope, "egress = \"9mbit\"")));
    let two = slice.make("w-2");
    whole(&other);
    whole(&two);
    bed.wait_said("outer", "in_force");
    bed.wait_said("other", "in_force");
    place.ok(&["detach"]);
}
