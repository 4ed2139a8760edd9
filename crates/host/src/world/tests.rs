use proptest::prelude::*;

use super::*;

const ID: &str = "4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c";
const OTHER: &str = "aaaaaaaaaaaa4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c";

fn world(paths: &[&str]) -> World {
    let cgroups = paths.iter().enumerate().map(|(id, path)| ((*path).to_owned(), id as u64 + 2));
    World { cgroups: cgroups.collect(), ..World::default() }
}

fn found(world: &World, selector: &str) -> Vec<String> {
    let found = world.find(&selector.parse().unwrap()).matches;
    found.into_iter().map(|found| found.cgroup).collect()
}

#[test]
fn a_container_is_found_whoever_made_its_cgroup() {
    let user = "user.slice/user-1000.slice/user@1000.service";
    let table = [
        ("docker/ID", "docker/ID"),
        ("docker/ID/init.scope", "docker/ID"),
        ("system.slice/docker-ID.scope", "system.slice/docker-ID.scope"),
        ("my.slice/docker-ID.scope", "my.slice/docker-ID.scope"),
        ("machine.slice/libpod-ID.scope", "machine.slice/libpod-ID.scope"),
        ("machine.slice/libpod-ID.scope/container", "machine.slice/libpod-ID.scope"),
        (
            "machine.slice/machine-libpod_pod_OTHER.slice/libpod-ID.scope",
            "machine.slice/machine-libpod_pod_OTHER.slice/libpod-ID.scope",
        ),
        ("libpod_parent/libpod-ID", "libpod_parent/libpod-ID"),
        (
            "system.slice/web.service/libpod-payload-ID",
            "system.slice/web.service/libpod-payload-ID",
        ),
        ("USER/user.slice/libpod-ID.scope/container", "USER/user.slice/libpod-ID.scope"),
        ("USER/app.slice/docker-ID.scope", "USER/app.slice/docker-ID.scope"),
        (
            "kubepods.slice/kubepods-pod1.slice/crio-ID.scope",
            "kubepods.slice/kubepods-pod1.slice/crio-ID.scope",
        ),
        (
            "kubepods.slice/kubepods-pod1.slice/cri-containerd-ID.scope",
            "kubepods.slice/kubepods-pod1.slice/cri-containerd-ID.scope",
        ),
        ("kubepods/pod1/ID", "kubepods/pod1/ID"),
        ("docker/OTHER/docker/ID", "docker/OTHER/docker/ID"),
        ("machine.slice/libpod-conmon-ID.scope", ""),
        ("machine.slice/crio-conmon-ID.scope", ""),
        ("machine.slice/libpod-OTHER.scope", ""),
        ("docker/xID", ""),
    ];
    for (path, cgroup) in table {
        let full =
            |path: &str| path.replace("ID", ID).replace("OTHER", OTHER).replace("USER", user);
        let paths = [full("machine.slice/libpod-conmon-ID.scope"), full(path)];
        let expected = (!cgroup.is_empty()).then(|| full(cgroup));
        assert_eq!(container_cgroup(&paths, ID), expected, "{path}");
    }
}

#[test]
fn a_users_engine_speaks_for_the_users_slice_alone() {
    let mut world = world(&[&format!("docker/{ID}")]);
    let web = Container { name: "web".into(), ..Container::default() };
    world.containers.insert((Some(1000), ID.to_owned()), web);
    assert_eq!(found(&world, "container:web"), [""; 0]);
    let own = format!("user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope");
    world.cgroups.insert(own.clone(), 9);
    assert_eq!(found(&world, "container:web"), [own]);
}

/// Each user may make cgroups of any name there. Root's Podman with `--cgroups=split` may have its own there.
#[test]
fn a_cgroup_in_a_users_slice_takes_no_containers_place() {
    let slice = "prod.slice/prod-team.slice/prod-team-backend.slice/prod-team-backend-of-web.slice";
    let real = format!("{slice}/docker-{ID}.scope");
    let users = format!("user.slice/user-1.slice/user@1.service/{ID}");
    let mut world = world(&[&users]);
    world.containers.insert((None, ID.into()), Container { name: "web".into(), ..<_>::default() });
    assert_eq!(found(&world, "container:web"), std::slice::from_ref(&users));
    assert!(users.len() < real.len());
    world.cgroups.insert(real.clone(), 9);
    assert_eq!(found(&world, "container:web"), [real]);
}

#[test]
fn a_cgroup_is_listed_if_an_engine_that_may_speak_for_it_has_its_id_or_one_above_it() {
    let at = |path: &str| path.replace("ID", ID).replace("OTHER", OTHER);
    let is_unlisted = |owner: Option<u32>, path: &str| {
        let containers = BTreeMap::from([((owner, ID.to_owned()), Container::default())]);
        World { containers, ..World::default() }.is_unlisted(&at(path))
    };
    let [own, others] = [1000, 100].map(|id| format!("user.slice/user-{id}.slice/libpod-ID.scope"));
    for (owner, path, unlisted) in [
        (None, "docker/ID", false),
        (None, "docker/OTHER", true),
        (None, "docker/ID/docker/OTHER", false),
        (None, "docker/OTHER/docker/ID", false),
        (None, "docker/OTHER/IDx", false),
        (None, &own, false),
        (Some(1000), &own, false),
        (Some(1000), &others, true),
        (Some(1000), "docker/ID", true),
        (Some(1000), "system.slice/user-1000.slice/docker-ID.scope", true),
    ] {
        assert_eq!(is_unlisted(owner, path), unlisted, "{owner:?} {path}");
    }
}

#[test]
fn containers_are_selected_by_name_and_labels() {
    let (a, b) = (format!("docker/{ID}"), format!("docker/{OTHER}"));
    let mut world = world(&[&a, &b]);
    let container = |name: &str, labels: &[(&str, &str)]| Container {
        name: name.to_owned(),
        labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
    };
    world
        .containers
        .insert((None, ID.into()), container("web-1", &[("app", "web"), ("tier", "front")]));
    world.containers.insert((None, OTHER.into()), container("web-2", &[("app", "web")]));
    world.containers.insert((None, "0".repeat(64)), container("web-3", &[("app", "web")]));
    assert_eq!(found(&world, "container:web-*"), [a.clone(), b.clone()]);
    assert_eq!(found(&world, "container:web-2"), std::slice::from_ref(&b));
    assert_eq!(found(&world, "labels:app=web"), [a.clone(), b]);
    assert_eq!(found(&world, "labels:app=web,tier"), [a]);
    assert_eq!(found(&world, "labels:app=we"), [""; 0]);
}

#[test]
fn units_and_slices_are_those_of_the_system_manager() {
    let world = world(&[
        "system.slice",
        "system.slice/web.service",
        "system.slice/web.service/web.service",
        "system.slice/system-job.slice/job@1.service",
        "system.slice/system-job.slice/job@2.service",
        "user.slice/user-1000.slice",
        "user.slice/user-1000.slice/user@1000.service/app.slice/web.service",
        "machine.slice/libpod-1.scope/system.slice/web.service",
        "machine.slice/libpod-1.scope/system.slice",
    ]);
    assert_eq!(found(&world, "unit:web.service"), ["system.slice/web.service"]);
    assert_eq!(found(&world, "unit:job@*.service").len(), 2);
    assert_eq!(found(&world, "slice:system.slice"), ["system.slice"]);
    assert_eq!(found(&world, "unit:gone.service"), [""; 0]);
}

#[test]
fn users_are_known_by_name_and_number() {
    let mut world = world(&["user.slice/user-1000.slice"]);
    world.users = BTreeMap::from([("anna".into(), 1000), ("ben".into(), 1001)]);
    assert_eq!(found(&world, "user:anna"), ["user.slice/user-1000.slice"]);
    assert_eq!(found(&world, "user:1000"), ["user.slice/user-1000.slice"]);
    assert_eq!(found(&world, "user:ben"), [""; 0]);
    assert_eq!(found(&world, "user:nobody"), [""; 0]);
}

#[test]
fn a_program_is_those_of_its_cgroups_where_nothing_else_runs() {
    let program = |pid, exe: &str, args: &str, cgroup: &str| Program {
        pid,
        exe: exe.to_owned(),
        args: args.to_owned(),
        cgroup: cgroup.to_owned(),
    };
    let session = "user.slice/user-1000.slice/session-1.scope";
    let programs = vec![
        program(1, "/usr/bin/rsync", "rsync -a /a b:", "system.slice/a.service"),
        program(2, "/usr/bin/rsync", "rsync --daemon", "zone.slice/b.service"),
        program(3, "/usr/sbin/sshd", "sshd", "zone.slice/b.service/x"),
        program(4, "/usr/bin/rsync", "rsync --daemon", "zone.slice/b.service/y"),
        // Any user may type its name.
        program(5, "/usr/bin/rsync", "rsync -a /a b:", session),
        program(6, "/bin/bash", "-bash", session),
    ];
    let mut world = World { programs, ..World::default() };
    let shared = |world: &World, selector: &str| {
        let shared = world.find(&selector.parse().unwrap()).shared;
        shared.into_iter().map(|shared| (shared.cgroup, shared.other)).collect::<Vec<_>>()
    };
    let is_in = |cgroup: &str, other: &str| (cgroup.to_owned(), other.to_owned());
    assert_eq!(found(&world, "exe:/usr/bin/rsync *-a /a*"), ["system.slice/a.service"]);
    let alone = ["system.slice/a.service", "zone.slice/b.service/y"];
    assert_eq!(found(&world, "exe:/usr/bin/rs*"), alone);
    let others = [is_in("zone.slice/b.service", "/usr/sbin/sshd"), is_in(session, "/bin/bash")];
    assert_eq!(shared(&world, "exe:/usr/bin/rs*"), others, "those of the host first");
    assert_eq!(
        (found(&world, "exe:/bin/rsync").len(), shared(&world, "exe:/bin/rsync").len()),
        (0, 0)
    );
    // All run below the root.
    world.programs.push(program(7, "/init", "init", ""));
    assert_eq!(shared(&world, "exe:/init"), [is_in("", "/usr/bin/rsync")]);
}

#[test]
fn patterns_match_as_a_shell_does() {
    let table = [
        ("a*", "abc", true),
        ("a*", "a/b", false),
        ("a/*/c", "a/b/c", true),
        ("a/*/c", "a/b/b/c", false),
        ("a/**/c", "a/b/b/c", false),
        ("a/***/c", "a/b/c", true),
        ("*b*d", "abcbd", true),
        ("?", "a", true),
        ("?", "/", false),
        ("[a-c]x", "bx", true),
        ("[!a-c]x", "bx", false),
        ("[]]", "]", true),
        ("[", "[", true),
        ("[!]", "[!]", true),
        ("*[a*", "x[ab", true),
        ("[a-c]*[*", "b-[x", true),
        ("[[]a", "[a", true),
        ("", "", true),
        ("*", "", true),
        ("a", "", false),
    ];
    for (pattern, text, is) in table {
        assert_eq!(glob(pattern)(text), is, "{pattern} {text}");
    }
}

#[test]
fn a_cgroup_with_a_whole_id_is_a_containers() {
    let id = "0123456789abcdef".repeat(4);
    let names = ["ID", "a/docker-ID.scope", "libpod-ID", "libpod-payload-ID", "x/crio-ID.scope"];
    assert!(names.iter().all(|name| is_container(&name.replace("ID", &id))));
    let others =
        ["libpod-conmon-ID.scope", "ID/container", "xID", "ID.service", "web.service", "", "é"];
    assert!(!others.iter().any(|name| is_container(&name.replace("ID", &id))));
    assert!(!is_container(&format!("é{}", &id[1..])) && !is_container(&id.replace('a', "g")));
}

proptest! {
    #[test]
    fn no_pattern_panics_and_a_text_matches_itself(
        pattern in "[ab*?\\[\\]!/-]{0,12}", text in "[ab/]{0,12}",
    ) {
        let _ = glob(&pattern)(&text);
        prop_assert!(glob(&text)(&text));
        prop_assert!(any_of("*").matches(&text));
    }
}
