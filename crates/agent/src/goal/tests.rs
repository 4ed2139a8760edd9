use tidegate_host::{
    plan::State,
    pods::{EGRESS, INGRESS, JOIN, Pod},
    settings::Asked,
    world::Container,
};
use tidegate_sys::limit::LimitOptions;

use super::*;

const ID: &str = "4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c";

fn files(texts: &[&str]) -> Files {
    let spec = |(n, text): (usize, &&str)| Spec::parse(&format!("{n}.toml"), text).unwrap();
    Files { specs: texts.iter().enumerate().map(spec).collect(), errors: Vec::new() }
}

fn limit(name: &str, scope: &str, rest: &str) -> String {
    format!("[[limit]]\nname = \"{name}\"\nscope = {{ {scope} }}\n{rest}\n")
}

fn world(paths: &[&str]) -> World {
    let cgroups = paths.iter().enumerate().map(|(id, path)| ((*path).to_owned(), id as u64 + 2));
    World { cgroups: cgroups.collect(), ..World::default() }
}

fn now() -> Zoned {
    "2026-03-02T12:00+00:00[UTC]".parse().unwrap()
}

/// `NAME STATE[: REASON]` of each limit.
fn states(goal: &Goal) -> Vec<String> {
    let reason = |report: &LimitReport| report.reason.as_ref().map(|why| format!(": {why}"));
    let all = goal.reports.iter();
    all.map(|r| format!("{} {}{}", r.name, r.state.name(), reason(r).unwrap_or_default())).collect()
}

const RATE: &str = "egress = \"1mbit\"";

#[test]
fn one_that_waits_takes_those_inside_it_along() {
    let text = limit("a", "unit = \"a.service\"", RATE)
        + &limit("b", "cgroup = \"system.slice/b.service\"", &format!("{RATE}\nparent = \"a\""))
        + &limit("c", "cgroup = \"system.slice/c.service\"", "parent = \"b\"")
        + &limit("d", "unit = \"d.service\"", RATE);
    let world =
        world(&["system.slice/b.service", "system.slice/c.service", "system.slice/d.service"]);
    let goal = goal(&files(&[&text]), &world, &now());
    assert_eq!(
        states(&goal),
        [
            "a waiting: no unit `a.service` runs",
            "b waiting: its parent `a` waits or is refused",
            "c waiting: its parent `b` waits or is refused",
            "d in force",
        ]
    );
    assert_eq!(goal.waiting.len(), 3);
}

#[test]
fn a_device_that_is_not_there_is_waited_for() {
    let text = limit("up", "dev = \"eth0\"", RATE)
        + &limit("in", "cgroup = \"a\"", &format!("{RATE}\nparent = \"up\""));
    let with = |device| World { devices: [("eth0".to_owned(), device)].into(), ..world(&["a"]) };
    let goal = |device| goal(&files(&[&text]), &with(device), &now());
    let waits = [
        "up waiting: there is no device `eth0`",
        "in waiting: its parent `up` waits or is refused",
    ];
    assert_eq!(states(&goal(None)), waits);
    assert_eq!(states(&goal(Some(3))), ["up in force", "in in force"]);
    assert_ne!(goal(Some(3)), goal(Some(4)), "it has been made again");
}

#[test]
fn what_waits_where_services_have_no_cgroups_says_so() {
    let text = limit("a", "unit = \"a.service\"", RATE);
    let goal = goal(&files(&[&text]), &world(&[""]), &now());
    let reason = "no unit `a.service` runs; no service has a cgroup of version 2 here: see \
                  `tidegate doctor`";
    assert_eq!(states(&goal), [format!("a waiting: {reason}")]);
}

#[test]
fn two_limits_of_one_cgroup_are_told_apart_unless_one_is_inside_the_other() {
    let both = limit("a", "unit = \"a.service\"", RATE)
        + &limit("b", "cgroup = \"system.slice/a*\"", RATE);
    let world = world(&["system.slice/a.service"]);
    let refused = goal(&files(&[&both]), &world, &now());
    assert_eq!(
        states(&refused),
        [
            "a in force",
            "b refused: limits `a` and `b` both match cgroup `system.slice/a.service`; `a`, which comes \
             first, has it",
        ]
    );
    // It is taken off, so that the first can be put on, and whatever is inside it goes with it.
    let child = limit("c", "cgroup = \"system.slice/a.service/x\"", "parent = \"b\"");
    let with_child = goal(&files(&[&(both.clone() + &child)]), &world, &now());
    assert!(states(&with_child)[2].starts_with("c waiting: there is no cgroup"));
    let below = self::world(&["system.slice/a.service", "system.slice/a.service/x"]);
    let with_child = goal(&files(&[&(both.clone() + &child)]), &below, &now());
    assert_eq!(states(&with_child)[2], "c waiting: its parent `b` waits or is refused");
    assert_eq!(with_child.off, ["b", "c"].map(str::to_owned).into());
    assert_eq!((with_child.kept().count(), with_child.waiting.len()), (0, 0));
    let inside = both.replace("a*\" }", "a*\" }\nparent = \"a\"");
    assert_eq!(goal(&files(&[&inside]), &world, &now()).limits.len(), 2);
    // At any depth; siblings are not inside each other.
    let on = |name: &str, parent: &str| {
        limit(name, "unit = \"a.service\"", &format!("parent = \"{parent}\""))
    };
    let nested = on("d", "c") + &inside + &on("c", "b");
    assert_eq!(goal(&files(&[&nested]), &world, &now()).limits.len(), 4);
    let siblings = goal(&files(&[&(inside + &on("c", "a"))]), &world, &now());
    assert_eq!(siblings.limits.len(), 2);
    assert!(states(&siblings)[2].starts_with("c refused: limits `b` and `c` both match"));
}

#[test]
fn a_name_is_one_limits_in_all_files() {
    let one = limit("a", "unit = \"a.service\"", RATE);
    let inside = limit("b", "cgroup = \"a.service/b\"", "parent = \"a\"");
    let world = world(&["a.service", "a.service/b"]);
    let goal = goal(&files(&[&(one.clone() + &inside), &one]), &world, &now());
    let refused = "a refused: 0.toml has a limit of this name; give each its own name";
    assert_eq!(states(&goal), ["a in force", "b in force", refused]);
    assert_eq!(goal.kept().count(), 0, "the first one has the name");
}

#[test]
fn each_match_has_a_name_of_its_own_that_fits() {
    let found =
        |name: &str, cgroup: &str| Match { name: name.to_owned(), cgroup: cgroup.to_owned() };
    let long = "x".repeat(80);
    let matches = [
        found("job@1.service", "a/job@1.service"),
        found("same", "a/same"),
        found("same", "b/same"),
        found(&long, "c"),
    ];
    let names = names_of_each("jobs", &matches);
    assert_eq!(names[0], "jobs-job_1_service");
    assert!(names[1] != names[2] && names[1].starts_with("jobs-same-"), "{names:?}");
    for name in &names {
        assert!(check_name(name).is_ok(), "{name}");
    }
    // Who else is there changes no name.
    assert_eq!(names_of_each("jobs", &matches[..1]), names[..1]);
}

#[test]
fn cgroups_inside_others_of_the_same_limit_are_limited_with_them() {
    let text = limit("a", "slice = \"*.slice\"", RATE);
    let world = world(&["a.slice", "a.slice/a-b.slice", "a.sliced", "b.slice"]);
    let goal = goal(&files(&[&text]), &world, &now());
    let paths: Vec<_> = goal.limits[0].cgroups.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["a.slice", "b.slice"]);
}

/// Which limits are refused that containers or pods asked for themselves.
fn guests(goal: &Goal) -> Vec<bool> {
    goal.reports.iter().map(|report| report.guest).collect()
}

#[test]
fn containers_have_rates_by_their_labels_if_a_file_allows_it() {
    let mut world = world(&[&format!("docker/{ID}")]);
    let labels = BTreeMap::from([("tidegate.egress".to_owned(), "5mbit".to_owned())]);
    let container = Container { name: "web".into(), labels };
    world.containers.insert((None, ID.to_owned()), container);
    assert_eq!(states(&goal(&files(&["labels = false"]), &world, &now())), [""; 0]);
    let labelled = goal(&files(&["labels = true"]), &world, &now());
    assert_eq!(states(&labelled), ["container-web in force"]);
    assert_eq!(labelled.limits[0].limit.options.egress.unwrap().rate.to_string(), "5mbit");
    // What a file says of the container comes first.
    let text = "labels = true\n".to_owned() + &limit("web", "container = \"web\"", RATE);
    let both = goal(&files(&[&text]), &world, &now());
    // Who starts a container is not who looks after the files.
    assert_eq!(guests(&both), [false, true]);
    let both = states(&both);
    assert!(
        both[1].starts_with("container-web refused: limits `web` and `container-web` both"),
        "{both:?}"
    );
    // A label that is no rate.
    let id = (None, ID.to_owned());
    let labels = &mut world.containers.get_mut(&id).unwrap().labels;
    labels.insert("tidegate.ingress".into(), "fast".into());
    let wrong = states(&goal(&files(&["labels = true"]), &world, &now()));
    assert!(wrong[0].starts_with("container-web refused: label tidegate.ingress: "), "{wrong:?}");
    // One that is none of ours.
    let labels = BTreeMap::from([("tidegate.egres".to_owned(), "5mbit".to_owned())]);
    world.containers.get_mut(&id).unwrap().labels = labels;
    let wrong = states(&goal(&files(&["labels = true"]), &world, &now()));
    let said = "container-web refused: label tidegate.egres is unknown; tidegate.egress and";
    assert!(wrong[0].starts_with(said), "{wrong:?}");
}

/// Whatever they call them, and however many there are.
#[test]
fn containers_of_users_take_no_name_of_the_hosts() {
    let own = "user.slice/user-1000.slice/libpod-";
    let user_ids: Vec<_> = (0..MAX_LIMITS).map(|n| format!("{n:064x}")).collect();
    let paths = [format!("{own}{}.scope", user_ids[0]), format!("docker/{ID}")];
    let mut world = world(&[&paths[0], &paths[1]]);
    let labels = BTreeMap::from([("tidegate.egress".to_owned(), "5mbit".to_owned())]);
    let container = |name: &str| Container { name: name.to_owned(), labels: labels.clone() };
    world.containers.insert((None, ID.to_owned()), container("web"));
    let mut with = |names: &dyn Fn(usize) -> String, text: &str| {
        let of_user = user_ids.iter().enumerate();
        let of_user = of_user.map(|(n, id)| ((Some(1000), id.clone()), container(&names(n))));
        world.containers.extend(of_user);
        states(&goal(&files(&[text]), &world, &now()))
    };
    let labelled =
        with(&|n| if n == 0 { "web".to_owned() } else { format!("a{n}") }, "labels = true");
    assert_eq!(labelled[0], "container-web in force");
    assert_eq!(labelled.iter().filter(|state| state.ends_with("in force")).count(), 2);
    // A user's, which sorts first.
    let each = limit("each", "container = \"*\"", &format!("{RATE}\neach = true"));
    let other = with(&|_| "a".to_owned(), &each);
    assert_eq!(other, ["each-web in force", "each-a in force"]);
    let both = with(&|_| "web".to_owned(), &each);
    assert_eq!(both[0], "each-web in force");
    assert!(both[1].starts_with("each-web-"), "{both:?}");
}

#[test]
fn a_container_with_rates_that_does_not_run_waits_with_its_limit() {
    let mut world = world(&["docker"]);
    let labels = BTreeMap::from([("tidegate.egress".to_owned(), "5mbit".to_owned())]);
    let container = Container { name: "web".into(), labels };
    world.containers.insert((None, ID.to_owned()), container);
    let goal = goal(&files(&["labels = true"]), &world, &now());
    assert_eq!(states(&goal), ["container-web waiting: container `web` does not run"]);
    assert_eq!(goal.waiting.len(), 1);
}

/// The digit of its UID, its name and its annotations.
type PodOf<'a> = (char, &'a str, &'a [(&'a str, &'a str)]);

/// A world with pods of namespace `prod`, with cgroups of driver cgroupfs and a container each.
fn pods(pods: &[PodOf<'_>]) -> World {
    let (mut paths, mut known) = (vec!["kubepods".to_owned()], BTreeMap::new());
    for (digit, name, annotations) in pods {
        let uid = digit.to_string().repeat(32);
        let pod = format!("kubepods/pod{uid}");
        paths.extend([format!("{pod}/{ID}"), pod]);
        let annotations = annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        let labels = BTreeMap::from([("app".to_owned(), "api".to_owned())]);
        let (namespace, name, annotations) =
            ("prod".to_owned(), (*name).to_owned(), annotations.collect());
        known.insert(uid, Pod { namespace, name, labels, annotations, static_uid: None });
    }
    let paths: Vec<_> = paths.iter().map(String::as_str).collect();
    World { pods: Pods::Known(known), ..world(&paths) }
}

#[test]
fn pods_have_rates_by_their_annotations_if_a_file_allows_it() {
    let world = pods(&[
        ('a', "api-0", &[(EGRESS, "1M"), (INGRESS, "10Mi")]),
        ('b', "api-1", &[(EGRESS, "fast")]),
        ('c', "api-2", &[]),
    ]);
    assert_eq!(states(&goal(&files(&["annotations = false"]), &world, &now())), [""; 0]);
    let annotated = goal(&files(&["annotations = true"]), &world, &now());
    let expected = [
        "pod-prod_api-0 in force",
        "pod-prod_api-1 refused: annotation kubernetes.io/egress-bandwidth: `fast` is no quantity of \
         Kubernetes; write for example `10M` for 10 Mbit/s",
    ];
    assert_eq!(states(&annotated), expected);
    assert_eq!(guests(&annotated), [false, true], "one in force is as others");
    let options = &annotated.limits[0].limit.options;
    assert_eq!(options.egress.unwrap().rate.bit_s(), 1_000_000);
    assert_eq!(options.ingress.unwrap().rate.bit_s(), 10_485_760);
}

#[test]
fn a_pod_that_a_file_limits_has_its_own_rates_inside_that() {
    let world = pods(&[('a', "api-0", &[(EGRESS, "1M")]), ('b', "api-1", &[])]);
    let node = limit("node", "cgroup = \"kubepods\"", "egress = \"100mbit\"");
    let rest = "egress = \"9mbit\"\nparent = \"node\"";
    let tenant = limit("tenant", "pod = { namespace = \"prod\" }", rest);
    let text = "annotations = true\n".to_owned() + &node + &tenant;
    let goal = goal(&files(&[&text]), &world, &now());
    assert_eq!(states(&goal), ["node in force", "tenant in force", "pod-prod_api-0 in force"]);
    let own = &goal.limits[2];
    assert_eq!(own.limit.parent.as_deref(), Some("tenant"));
    let pod = format!("kubepods/pod{}", "a".repeat(32));
    assert_eq!(own.limit.scope, Scope::Cgroup(pod.clone()));
    assert_eq!(own.members(), [pod]);
    assert_eq!(goal.limits[1].members().len(), 2);
}

#[test]
fn a_pods_own_rates_are_inside_the_innermost_limit_that_has_it() {
    let world = pods(&[('a', "api-0", &[(EGRESS, "1M"), (JOIN, "open")])]);
    let pod = "pod = { namespace = \"prod\" }";
    let text = "annotations = true\n".to_owned()
        + &limit("team", pod, "egress = \"9mbit\"\nparent = \"open\"")
        + &limit("other", "pod = { name = \"api-*\" }", RATE)
        + &limit("open", "pod = { join = true }", "egress = \"90mbit\"")
        + &limit("app", pod, "parent = \"team\"");
    let goal = goal(&files(&[&text]), &world, &now());
    let states = states(&goal);
    assert!(states[1].starts_with("other refused: limits `team` and `other` both match"));
    assert_eq!(states[2..], ["open in force", "app in force", "pod-prod_api-0 in force"]);
    let own = goal.limits.last().unwrap();
    assert_eq!(own.limit.parent.as_deref(), Some("app"));
}

#[test]
fn pods_join_limits_that_let_them() {
    let open = limit("open", "pod = { join = true }", RATE);
    let closed = limit("closed", "pod = { name = \"api-9\" }", RATE);
    let text = "annotations = true\n".to_owned() + &open + &closed;
    let world = pods(&[
        ('a', "api-0", &[(JOIN, "open")]),
        ('b', "api-1", &[(JOIN, "open")]),
        ('c', "api-2", &[(JOIN, "closed")]),
    ]);
    let goal = goal(&files(&[&text]), &world, &now());
    let states = states(&goal);
    assert_eq!(states[..2], ["open in force", "closed waiting: there is no pod `*/api-9`"]);
    let refused =
        "join-prod_api-2 refused: annotation tidegate.dev/limit: no limit `closed` of this";
    assert!(states[2].starts_with(refused), "{states:?}");
    assert_eq!(goal.limits[0].members().len(), 2);
}

#[test]
fn a_limit_waits_for_pods_and_says_whom_it_waits_for() {
    let text = limit("a", "pod = { namespace = \"prod\" }", RATE);
    let known = pods(&[('a', "api-0", &[])]);
    let says = |pods: Pods| {
        let goal = goal(&files(&[&text]), &World { pods, ..known.clone() }, &now());
        (states(&goal).remove(0), goal.unsure)
    };
    let asks_nobody = "a waiting: only `tidegate agent --kubernetes` knows which pods are here";
    assert_eq!(says(Pods::NotAsked), (asks_nobody.to_owned(), false));
    let unlisted = "a waiting: the API server has not listed the pods of this node yet";
    assert_eq!(says(Pods::NotListed), (unlisted.to_owned(), true));
    let unknown = "a waiting: there is no pod `prod/*`; 1 pods here are not known yet";
    assert_eq!(says(Pods::Known(BTreeMap::new())), (unknown.to_owned(), false));
    assert_eq!(says(known.pods.clone()), ("a in force".to_owned(), false));
}

#[test]
fn each_pod_of_a_namespace_has_a_limit_named_after_it() {
    let text = limit("t", "pod = { namespace = \"prod\" }", &format!("{RATE}\neach = true"));
    let world = pods(&[('a', "api-0", &[]), ('b', "api-1", &[])]);
    assert_eq!(
        states(&goal(&files(&[&text]), &world, &now())),
        ["t-api-0 in force", "t-api-1 in force"]
    );
}

#[test]
fn a_limit_is_off_when_its_schedule_has_no_rate() {
    let text =
        limit("a", "unit = \"a.service\"", "schedule = [{ from = \"13:00\", egress = \"1mbit\" }]");
    let goal = goal(&files(&[&text]), &world(&["a.service"]), &now());
    assert_eq!(states(&goal), ["a off: its schedule has no rate now"]);
    assert!(goal.off.contains("a") && !goal.has("a"));
    assert_eq!(goal.next.unwrap().to_string(), "2026-03-02T13:00:00Z");
    let words = goal.reports[0].schedule_words().unwrap();
    assert_eq!(words, "off by its schedule until 2026-03-02T13:00+00:00, then egress 1mbit");
}

#[test]
fn the_limits_of_each_match_are_off_with_their_schedule() {
    let schedule = "each = true\nschedule = [{ from = \"13:00\", egress = \"1mbit\" }]";
    let text = limit("a", "unit = \"*.service\"", schedule);
    let goal = goal(&files(&[&text]), &world(&["x.service", "y.service"]), &now());
    assert_eq!(states(&goal), ["a off: its schedule has no rate now"]);
    let off = ["a", "a-x_service", "a-y_service"].map(|name| goal.off.contains(name));
    assert_eq!(off, [true; 3], "{:?}", goal.off);
}

/// Any user may type the name of a program in a session: that takes its limit off no service.
#[test]
fn a_limit_on_a_program_is_not_where_others_run_and_names_that() {
    use tidegate_host::world::Program;
    let program = |exe: &str, cgroup: &str| Program {
        pid: 0,
        exe: exe.to_owned(),
        args: String::new(),
        cgroup: cgroup.to_owned(),
    };
    let session = |n: u32| format!("user.slice/user-1000.slice/session-{n}.scope");
    let text = limit("r", "exe = \"/bin/rsync\"", RATE);
    let each = limit("r", "exe = \"/bin/rsync\"", &format!("{RATE}\neach = true"));
    let goal_of = |text: &str, runs: &[(&str, &str)]| {
        let mut world = world(&["alone", "other", "shared"]);
        world.programs = runs.iter().map(|(exe, cgroup)| program(exe, cgroup)).collect();
        world.programs.iter_mut().zip(1..).for_each(|(program, pid)| program.pid = pid);
        goal(&files(&[text]), &world, &now())
    };
    let sessions = [1, 2, 3, 4].map(session);
    let in_session = |n: usize| [("/bin/rsync", sessions[n].as_str()), ("/bin/sh", &sessions[n])];
    let of_host = [("/bin/rsync", "shared"), ("/bin/cat", "shared/x")];
    let todo = "; limit the cgroup, or write move = true to have the processes of the program moved \
                into one of their own";
    let words = |named: &str| format!("other programs would be limited, too: {named}{todo}");
    let users = "`/bin/sh` in cgroup `user.slice/user-1000.slice/session-1.scope`";
    // In force on the rest.
    let alone = ("/bin/rsync", "alone");
    let goal = goal_of(&text, &[&[alone][..], &in_session(0)].concat());
    assert_eq!(states(&goal), [format!("r in force: not on 1 cgroup: {}", words(users))]);
    assert_eq!(goal.limits[0].members(), ["alone"]);
    assert!(!goal.reports[0].leaves_out_a_host_cgroup());
    // Of many a few are named, the host's first.
    let many: Vec<_> = (0..4).flat_map(in_session).chain([alone]).chain(of_host).collect();
    let goal = goal_of(&text, &many);
    let named = format!(
        "`/bin/cat` in cgroup `shared`, {users}, {}, those in 2 more",
        users.replace("session-1", "session-2")
    );
    assert_eq!(states(&goal), [format!("r in force: not on 5 cgroups: {}", words(&named))]);
    assert_eq!(goal.reports[0].left_out, ["shared", &sessions[0], &sessions[1]]);
    assert!(goal.reports[0].leaves_out_a_host_cgroup());
    // One for each match says it once.
    let goal = goal_of(&each, &[&[alone, ("/bin/rsync", "other")][..], &of_host].concat());
    let said = states(&goal).into_iter().map(|state| state.ends_with(todo)).collect::<Vec<_>>();
    assert_eq!(said, [true, false]);
    // Nowhere alone: a cgroup of the host is a mistake in the file, one of a user is not.
    let goal = goal_of(&text, &of_host);
    assert_eq!(states(&goal), [format!("r refused: {}", words("`/bin/cat` in cgroup `shared`"))]);
    let goal = goal_of(&text, &in_session(0));
    assert_eq!(states(&goal), [format!("r waiting: {}", words(users))]);
    assert_eq!(goal.waiting.len(), 1);
}

#[test]
fn a_user_that_is_not_known_by_name_is_said() {
    let text = limit("a", "user = \"anna\"", RATE);
    let mut world = world(&["user.slice/user-1000.slice"]);
    let reason = "no user `anna` in /etc/passwd; write the number (`id -u anna`)";
    assert_eq!(states(&goal(&files(&[&text]), &world, &now())), [format!("a waiting: {reason}")]);
    world.users.insert("anna".to_owned(), 1001);
    let reason = "nobody is logged in as user `anna`";
    assert_eq!(states(&goal(&files(&[&text]), &world, &now())), [format!("a waiting: {reason}")]);
    world.users.insert("anna".to_owned(), 1000);
    assert_eq!(states(&goal(&files(&[&text]), &world, &now())), ["a in force"]);
}

#[test]
fn programs_are_moved_next_to_where_they_are_and_stay_there() {
    use tidegate_host::world::Program;
    let program = |pid, cgroup: &str| Program {
        pid,
        exe: "/bin/x".into(),
        args: String::new(),
        cgroup: cgroup.to_owned(),
    };
    let text = limit("a", "exe = \"/bin/x\"", &format!("{RATE}\nmove = true"));
    let mut world = world(&["s/tidegate.a"]);
    world.programs = vec![program(1, "s"), program(2, "s/tidegate.a"), program(3, "")];
    let goal = goal(&files(&[&text]), &world, &now());
    let moves: Vec<_> = goal.moves.iter().map(|m| (m.pid, m.into.as_str())).collect();
    assert_eq!(moves, [(1, "s/tidegate.a"), (3, "tidegate.a")]);
    assert_eq!(goal.limits[0].cgroups[0].0, "s/tidegate.a");
    let (before, files) = (World { cgroups: World::default().cgroups, ..world }, files(&[&text]));
    let reason = "program `/bin/x` is yet to be moved into a cgroup of its own";
    assert_eq!(states(&super::goal(&files, &before, &now())), [format!("a waiting: {reason}")]);
}

#[test]
fn a_program_that_several_limits_match_is_moved_by_one() {
    use tidegate_host::world::Program;
    let program = |cgroup: &str| Program {
        pid: 1,
        exe: "/bin/x".into(),
        args: String::new(),
        cgroup: cgroup.to_owned(),
    };
    let mover = |name: &str, rest: &str| {
        let exe = if name == "a" { "x" } else { "*" };
        limit(name, &format!("exe = \"/bin/{exe}\""), &format!("{RATE}\nmove = true\n{rest}"))
    };
    let at = |text: &str, cgroup: &str| {
        let mut world = world(&["s/tidegate.a", "s/tidegate.b", "s/tidegate.b/own"]);
        world.programs = vec![program(cgroup)];
        let goal = goal(&files(&[text]), &world, &now());
        let moves: Vec<_> = goal.moves.iter().map(|m| m.into.clone()).collect();
        (moves, states(&goal))
    };
    // Strangers: the first has it, wherever it is.
    let strangers = mover("a", "") + &mover("b", "");
    let reason = "limits `a` and `b` both match process 1 (/bin/x); `a`, which comes first, has it";
    let said = ["a in force".to_owned(), format!("b refused: {reason}")];
    for (cgroup, moves) in
        [("s", 1), ("s/tidegate.a", 0), ("s/tidegate.b", 1), ("s/tidegate.a/tidegate.b", 0)]
    {
        let into = vec!["s/tidegate.a".to_owned(); moves];
        assert_eq!(at(&strangers, cgroup), (into, said.to_vec()), "{cgroup}");
    }
    // One inside the other: the inner one moves it, and both are on its cgroup.
    let both = ["a in force".to_owned(), "b in force".to_owned()];
    let tree = mover("a", "") + &mover("b", "parent = \"a\"");
    let places = [("s", 1), ("s/tidegate.a", 1), ("s/tidegate.b", 0), ("s/tidegate.b/own", 0)];
    for (cgroup, moves) in places {
        let into = vec!["s/tidegate.b".to_owned(); moves];
        assert_eq!(at(&tree, cgroup), (into, both.to_vec()), "{cgroup}");
    }
}

#[test]
fn a_limit_on_containers_keeps_those_whose_engine_has_not_answered() {
    let [known, other, unit] = [
        format!("system.slice/docker-{ID}.scope"),
        format!("machine.slice/libpod-{}.scope", "b".repeat(64)),
        "system.slice/a.service".to_owned(),
    ];
    let mut world = world(&[&known, &other, &unit]);
    let web = Container { name: "web-1".to_owned(), ..Container::default() };
    world.containers.insert((None, ID.to_owned()), web);
    let goal = goal(&files(&[&limit("w", "container = \"web-*\"", RATE)]), &world, &now());
    let scope = goal.limits[0].limit.scope.clone();
    let before = |scope: &Scope| Present {
        name: "w".to_owned(),
        scope: scope.clone(),
        members: vec![known.clone(), other.clone(), unit.clone()],
        gone: Vec::new(),
        state: State::InForce,
        options: LimitOptions::default(),
        parent: None,
        other_build: None,
    };
    let members = |present: &[Present]| {
        let mut wanted = [Wanted {
            name: "w".to_owned(),
            scope: scope.clone(),
            members: Vec::new(),
            options: LimitOptions::default(),
            parent: None,
            asked: Asked::default(),
        }];
        set_members(&goal, present, &mut wanted);
        wanted[0].members.clone()
    };
    assert_eq!(members(&[]), std::slice::from_ref(&known));
    assert_eq!(
        members(&[before(&scope)]),
        [known.clone(), other.clone()],
        "a service is no container"
    );
    let units = Scope::Select(Selector { kind: SelectorKind::Unit, value: "a".to_owned() });
    assert_eq!(members(&[before(&units)]), [known], "it selected something else");
}
