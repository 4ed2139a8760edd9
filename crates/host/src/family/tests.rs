use tidegate_core::{Class, queue_options::VirtualQueueOptions};

use super::*;
use crate::settings::inside_another;

fn rate(mbit: u64) -> Option<Rate> {
    Rate::from_bit_s(mbit * 1_000_000)
}

fn root(name: &str, cgroup: &str, mbit: u64) -> Member {
    let queue = rate(mbit).map(VirtualQueueOptions::new);
    Member {
        name: name.into(),
        scope: Some(Scope::Cgroup(cgroup.into())),
        members: Vec::new(),
        parent: None,
        options: LimitOptions { egress: queue, ..LimitOptions::default() },
        asked: Asked::default(),
        detached: false,
        stays: false,
    }
}

fn inside(name: &str, cgroup: &str, parent: &str, guarantee: u64) -> Member {
    let class = Some(Class { guarantee: rate(guarantee), ..Class::default() });
    let options = LimitOptions { class, ..inside_another() };
    Member { parent: Some(parent.into()), options, ..root(name, cgroup, 1) }
}

fn refusal(members: &[Member]) -> String {
    resolve(&mut members.to_vec(), true).unwrap_err().to_string()
}

#[test]
fn children_have_the_directions_of_their_parent() {
    let mut members =
        [inside("b", "x/y", "a", 0), root("a", "x", 100), inside("c", "x/y/z", "b", 0)];
    resolve(&mut members, true).unwrap();
    for i in [0, 2] {
        let LimitOptions { egress, ingress, .. } = members[i].options;
        assert_eq!((egress, ingress), (inside_another().egress, None));
    }
    members[1].options.ingress = members[1].options.egress;
    resolve(&mut members, true).unwrap();
    assert!(members[2].options.ingress.is_some());
    members[1].options.ingress = None;
    members[0].asked.ingress = true;
    insta::assert_snapshot!(refusal(&members), @"limit `b`: ingress: its parent `a` does not limit ingress; leave this out, or limit it there first");
}

#[test]
fn trees_that_are_none() {
    insta::assert_snapshot!(refusal(&[inside("a", "x", "no", 0)]), @"limit `a`: parent: there is no limit `no`, neither here nor on this host; attach it first, or write it into the same file");
    insta::assert_snapshot!(refusal(&[inside("a", "x", "a", 0)]), @"limit `a`: parent: a limit cannot be its own parent; leave this out, or name another limit");
    insta::assert_snapshot!(refusal(&[inside("a", "x", "b", 0), inside("b", "y", "c", 0), inside("c", "z", "b", 0)]), @"limit `a`: parent: `b` in `c` in `b` is a circle; one of them must be the root, without a parent");
    insta::assert_snapshot!(refusal(&[root("a", "x", 9), inside("b", "xy", "a", 0)]), @"limit `b`: parent: `a` is on cgroup `x`, which does not contain cgroup `xy`; the parent of a limit is on the same cgroup or on one above");
    insta::assert_snapshot!(refusal(&[root("a", "x", 9), inside("c", "x/y/z", "a", 0), inside("b", "x/y", "a", 0)]), @"limit `c`: parent: `b` is on a cgroup between the two; the parent must be `b`: write that, or remove the limit and add it again");
    let edt = |member: Member| {
        let options = LimitOptions { scheme: Scheme::Edt, ..member.options };
        Member { options, ..member }
    };
    insta::assert_snapshot!(refusal(&[edt(root("a", "x", 9)), inside("b", "x/y", "a", 0)]), @"limit `b`: parent: `a` has scheme `edt`; a parent has `pace` or `nrm`");
    let device = Member { scope: Some(Scope::Dev("eth0".into())), ..edt(root("a", "x", 9)) };
    insta::assert_snapshot!(refusal(&[device, inside("b", "x/y", "a", 0)]), @"limit `b`: parent: `a` is on device `eth0`; a parent is on a cgroup, or with scheme `htb` on a device");
    let detached = Member { detached: true, stays: true, ..root("a", "x", 9) };
    insta::assert_snapshot!(refusal(&[detached, inside("b", "x/y", "a", 0)]), @"limit `b`: parent: `a` is not in force (its cgroup was removed, or its programs were detached); restore it first, or into the same file");
}

#[test]
fn no_tree_is_deeper_than_the_kernel_follows() {
    let mut members = vec![root("0", "0", 9)];
    for depth in 1..MAX_DEPTH {
        let cgroup = (0..=depth).map(|i| i.to_string()).collect::<Vec<_>>().join("/");
        members.push(inside(&depth.to_string(), &cgroup, &(depth - 1).to_string(), 0));
    }
    resolve(&mut members.clone(), true).unwrap();
    members.push(inside("more", "0/1/2/3/4/5/6/7/8", "7", 0));
    insta::assert_snapshot!(refusal(&members), @"limit `more`: parent: more than 8 limits above each other; leave some out");
}

#[test]
fn no_more_is_guaranteed_than_there_is() {
    let trees = |b: u64, c: u64, d: u64| {
        [
            root("a", "x", 100),
            inside("b", "x/b", "a", b),
            inside("c", "x/c", "a", c),
            inside("d", "x/b/d", "b", d),
        ]
    };
    assert!(resolve(&mut trees(60, 40, 60), true).is_ok());
    insta::assert_snapshot!(refusal(&trees(60, 50, 0)), @"limit `c`: guarantee: the limits inside `a` are guaranteed 110mbit together, and `a` has 100mbit to guarantee (its rate); lower their guarantees, or raise its rate");
    insta::assert_snapshot!(refusal(&trees(60, 40, 70)), @"limit `d`: guarantee: the limits inside `b` are guaranteed 70mbit together, and `b` has 60mbit to guarantee (its own guarantee); lower their guarantees, or raise its own guarantee");
    insta::assert_snapshot!(refusal(&trees(0, 40, 10)), @"limit `d`: guarantee: its parent `b` has no guarantee itself; give `b` a guarantee of at least 10mbit first");
}

#[test]
fn what_hangs_on_others_waits_for_the_host() {
    let mut members = [inside("a", "x", "elsewhere", 5), inside("b", "x/y", "a", 5)];
    resolve(&mut members, false).unwrap();
    assert_eq!(members[1].options.ingress, inside_another().ingress, "not known yet");
}

#[test]
fn each_cgroup_of_a_selector_is_inside_its_parent() {
    let select = |name: &str, members: &[&str], of: Member| Member {
        name: name.into(),
        scope: Some(Scope::of_cgroup(&format!("{name}*"))),
        members: members.iter().map(ToString::to_string).collect(),
        ..of
    };
    let above = select("a", &["x", "y"], root("a", "", 9));
    let below = |members: &[&str]| select("b", members, inside("b", "", "a", 1));
    let check = |members: &[&str]| {
        resolve(&mut [above.clone(), below(members)], true).map_err(|e| e.to_string())
    };
    assert_eq!(check(&["x/1", "y/1", "y/2"]), Ok(()));
    assert_eq!(check(&[]), Ok(()));
    let refusal = check(&["x/1", "z"]).unwrap_err();
    assert!(refusal.contains("does not contain cgroup `z`"), "{refusal}");
    let refusal = resolve(&mut [above.clone(), inside("c", "z", "a", 1)], true).unwrap_err();
    assert!(refusal.to_string().contains("is on cgroup `a*`"), "{refusal}");
    assert_eq!(resolve(&mut [above, inside("c", "y/z", "a", 1)], true), Ok(()));
    let single = [root("a", "x", 9), below(&["x/1", "x/2"])];
    assert_eq!(resolve(&mut single.clone(), true), Ok(()));
}
