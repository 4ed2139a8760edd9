//! The machine with a host that is made up: files and cgroups change, limits are refused, time passes.

use jiff::ToSpan;
use proptest::prelude::*;
use tidegate_host::world::Program;

use super::*;

/// Actions between two events at most: read, gate, scan, move, scan, decide, apply, decide, report.
const STEPS_MAX: usize = 14;
const DEADLINE: Duration = Duration::from_secs(2);

struct Bed {
    agent: Agent,
    now: Duration,
    wall: Zoned,
    disk: Files,
    cgroups: BTreeMap<String, u64>,
    /// Refused by the kernel.
    refuses: BTreeSet<String>,
    /// Why nothing can be applied.
    busy: Option<String>,
    /// In force, with the rate in words.
    host: BTreeMap<String, String>,
    /// Cgroups of some limits of the host, by name.
    on: BTreeMap<String, String>,
    applied: usize,
    report: Report,
    /// Cgroups that are held, by id; `None` while the gate is closed.
    held: Option<BTreeSet<u64>>,
    /// Why there is no gate here.
    no_gate: Option<String>,
    /// What was done, in words.
    done: Vec<String>,
    /// Reports cannot be written.
    full: bool,
    /// Not all cgroups have a watch.
    unwatched: bool,
    programs: Vec<Program>,
    /// Why no process can be moved.
    no_move: Option<String>,
    /// The limits whose processes the last scan has left where they are.
    own: BTreeSet<String>,
}

impl Bed {
    fn new() -> Bed {
        Bed {
            agent: Agent::new("/etc/tidegate", 1, BTreeSet::new(), DEADLINE),
            now: Duration::ZERO,
            wall: "2026-03-02T12:00+00:00[UTC]".parse().unwrap(),
            disk: Files::default(),
            cgroups: BTreeMap::new(),
            refuses: BTreeSet::new(),
            busy: None,
            host: BTreeMap::new(),
            on: BTreeMap::new(),
            applied: 0,
            report: Report::default(),
            held: None,
            no_gate: None,
            done: Vec::new(),
            full: false,
            unwatched: false,
            programs: Vec::new(),
            no_move: None,
            own: BTreeSet::new(),
        }
    }

    fn handle(&mut self, event: Event) {
        self.agent.handle(event, self.now);
        self.run();
        // Goals for what children say may have to wait.
        if self.agent.goal_due.is_some() {
            self.pass(GOAL_GAP);
        }
    }

    /// Does all that is to be done now; fails if that has no end.
    fn run(&mut self) {
        for _ in 0..STEPS_MAX {
            let Some(action) = self.agent.next(self.now, &self.wall) else { return };
            let event = match action {
                Action::ReadFiles => Event::Read(self.disk.clone()),
                Action::Scan { own, .. } => {
                    self.own = own;
                    let (cgroups, programs) = (self.cgroups.clone(), self.programs.clone());
                    let world = World { cgroups, programs, ..World::default() };
                    Event::Scanned { world, whole: !self.unwatched }
                }
                Action::Gate { open } => self.gate(open),
                Action::Decide(cgroups) => self.decide(&cgroups),
                Action::Move(moves) => {
                    let why = |one: Move| Some((one.into, self.no_move.clone()?));
                    Event::Moved(moves.into_iter().filter_map(why).collect())
                }
                Action::Apply { goal, managed, .. } => self.apply(&goal, &managed),
                Action::Report(_) if self.full => Event::NotReported,
                Action::Report(report) => {
                    self.report = report;
                    continue;
                }
            };
            self.agent.handle(event, self.now);
        }
        panic!("more than {STEPS_MAX} actions for one event");
    }

    fn gate(&mut self, open: bool) -> Event {
        let reason = self.no_gate.clone().filter(|_| open);
        let state = match (open, &reason) {
            (false, _) => GateState::Unneeded,
            (true, None) => GateState::Open,
            (true, Some(_)) => GateState::Unavailable,
        };
        match state {
            GateState::Open => drop(self.held.get_or_insert_default()),
            _ => self.held = None,
        }
        Event::Gate(GateReport { state, reason, ..GateReport::default() })
    }

    fn decide(&mut self, cgroups: &BTreeSet<u64>) -> Event {
        for id in cgroups {
            if self.held.as_mut().is_some_and(|held| held.remove(id)) {
                self.done.push(format!("decide {id}"));
            }
        }
        self.gate(true)
    }

    /// A cgroup is made.
    fn make(&mut self, path: &str, id: u64) {
        self.cgroups.insert(path.to_owned(), id);
        if let Some(held) = &mut self.held {
            held.insert(id);
        }
        self.handle(Event::CgroupsChanged);
        self.pass(SCAN_GAP);
    }

    fn remove(&mut self, path: &str) {
        if let (Some(id), Some(held)) = (self.cgroups.remove(path), &mut self.held) {
            held.remove(&id);
        }
        self.handle(Event::CgroupsChanged);
        self.pass(SCAN_GAP);
    }

    fn is_held(&self, id: u64) -> bool {
        self.held.as_ref().is_some_and(|held| held.contains(&id))
    }

    fn apply(&mut self, goal: &Goal, managed: &BTreeSet<String>) -> Event {
        self.applied += 1;
        if let Some(why) = &self.busy {
            return Event::NotApplied(why.clone());
        }
        let ids = goal.limits.iter().flat_map(|goal| &goal.cgroups).map(|(_, id)| id);
        let held = ids.filter(|id| self.is_held(**id)).map(|id| format!("limit {id}"));
        let held: Vec<_> = held.collect();
        self.done.extend(held);
        let on = |name: &str| self.on.get(name).map(String::as_str).into_iter();
        let is_over = |name: &String| managed.contains(name) && goal.is_over(name, on(name));
        let mut refused = BTreeMap::new();
        self.host.retain(|name, _| {
            if is_over(name) && self.refuses.contains(name) {
                refused.insert(name.clone(), "the kernel refuses it".to_owned());
            }
            !is_over(name) || self.refuses.contains(name)
        });
        for goal in &goal.limits {
            let name = goal.limit.name.clone();
            if self.refuses.contains(&name) {
                refused.insert(name, "the kernel refuses it".to_owned());
            } else {
                self.host.insert(name, goal.limit.options.egress.unwrap().rate.to_string());
            }
        }
        Event::Applied(refused)
    }

    /// Passes time, waking when the agent asks for it.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let wait = self.agent.timeout(self.now, &self.wall).max(Duration::from_millis(1));
            let step = wait.min(end - self.now);
            self.now += step;
            self.wall = self.wall.checked_add(step).unwrap();
            self.run();
        }
    }

    fn write(&mut self, text: &str) {
        let (spec, errors) = Spec::parse_what_is_good("a.toml", text);
        let errors = errors.iter().map(ToString::to_string).collect();
        self.disk = Files { specs: spec.into_iter().collect(), errors };
        self.handle(Event::FilesChanged);
        self.pass(SETTLE);
    }

    fn state(&self, name: &str) -> Option<LimitState> {
        Some(self.report.limits.iter().find(|limit| limit.name == name)?.state)
    }
}

fn unit(name: &str, rest: &str) -> String {
    format!("[[limit]]\nname = \"{name}\"\nscope = {{ unit = \"{name}.service\" }}\n{rest}\n")
}

fn engine(socket: &str, owner: Option<u32>, line: Line<Container>) -> Event {
    Event::Engine { socket: socket.to_owned(), owner, line }
}

fn text(names: &[usize], rate: usize) -> String {
    let rate = format!("egress = \"{}mbit\"", rate + 1);
    names.iter().map(|n| unit(&format!("u{n}"), &rate)).collect::<String>()
        + "[[limit]]\n\
     name = \"x\"\nscope = { unit = \"none.service\" }\negress = \"1mbit\"\n"
}

#[test]
fn an_error_in_a_file_leaves_what_is_in_force() {
    let mut bed = Bed::new();
    bed.cgroups.insert("a.service".into(), 1);
    bed.write(&unit("a", "egress = \"1mbit\""));
    assert_eq!(bed.host["a"], "1mbit");
    bed.write(&(unit("a", "egress = \"2mbit\"") + &unit("b", "egress = \"2mbps\"")));
    assert_eq!((bed.host["a"].as_str(), bed.report.errors.len()), ("1mbit", 1));
    bed.write(&unit("a", "egress = \"3mbit\""));
    assert_eq!((bed.host["a"].as_str(), bed.report.errors.len()), ("3mbit", 0));
    bed.write("limit = []");
    assert!(bed.host.is_empty() && bed.report.managed.is_empty());
}

#[test]
fn at_the_start_the_good_limits_of_a_bad_file_are_put_on() {
    let mut bed = Bed::new();
    bed.cgroups.insert("a.service".into(), 1);
    bed.write(&(unit("a", "egress = \"2mbit\"") + &unit("b", "egress = \"2mbps\"")));
    assert_eq!((bed.host["a"].as_str(), bed.report.errors.len()), ("2mbit", 1));
}

#[test]
fn what_the_kernel_refuses_is_tried_again_less_and_less_often() {
    let mut bed = Bed::new();
    bed.cgroups.extend([("a.service".into(), 1), ("b.service".into(), 2)]);
    bed.refuses.insert("a".into());
    bed.write(&(unit("a", "egress = \"1mbit\"") + &unit("b", "egress = \"1mbit\"")));
    assert_eq!(bed.state("a"), Some(LimitState::Refused));
    assert_eq!(bed.state("b"), Some(LimitState::InForce));
    let before = bed.applied;
    bed.pass(Duration::from_secs(600));
    let tries = bed.applied - before;
    assert!((15..40).contains(&tries), "{tries}");
    bed.refuses.clear();
    bed.pass(RETRY_MAX);
    assert_eq!(bed.state("a"), Some(LimitState::InForce));
}

#[test]
fn what_does_not_come_off_is_said_until_it_does() {
    let mut bed = Bed::new();
    bed.cgroups.insert("a.service".into(), 1);
    bed.write(&unit("a", "egress = \"1mbit\""));
    // A limit made by hand is inside it.
    bed.refuses.insert("a".into());
    bed.write("limit = []");
    assert!(bed.host.contains_key("a"));
    assert_eq!(bed.report.errors, ["limit `a`, which is in no file: the kernel refuses it"]);
    bed.refuses.clear();
    bed.pass(RETRY_MAX);
    assert!(bed.host.is_empty() && bed.report.errors.is_empty());
}

#[test]
fn what_is_to_come_off_while_the_store_is_busy_comes_off_later() {
    let mut bed = Bed::new();
    bed.cgroups.extend([("a.service".into(), 1), ("b.service".into(), 2)]);
    let a = unit("a", "egress = \"1mbit\"");
    for left in [a.as_str(), "limit = []"] {
        bed.busy = None;
        bed.write(&(a.clone() + &unit("b", "egress = \"1mbit\"")));
        assert_eq!(bed.host.len(), 2);
        bed.busy = Some("busy".into());
        bed.write(left);
        assert!(bed.report.managed.contains("b"), "the next agent's, too");
        let said = "limit `b`, which is in no file: busy".to_owned();
        assert!(bed.report.errors.contains(&said), "{:?}", bed.report.errors);
        bed.busy = None;
        bed.pass(RETRY_MAX);
        assert!(!bed.host.contains_key("b") && bed.report.errors.is_empty());
    }
    assert!(bed.host.is_empty());
}

#[test]
fn processes_of_a_limit_that_cannot_be_read_stay_where_the_agent_before_has_moved_them() {
    let mut bed = Bed::new();
    let moved = BTreeSet::from(["moved".to_owned()]);
    bed.agent = Agent::new("/etc/tidegate", 2, moved.clone(), DEADLINE);
    bed.write("[[limit]]\nname = \"moved\"\negress = \"1mbps\"\n");
    assert_eq!(bed.own, moved);
    bed.write("limit = []");
    bed.handle(Event::CgroupsChanged);
    bed.pass(SCAN_GAP);
    assert!(bed.own.is_empty());
}

#[test]
fn a_process_that_cannot_be_moved_is_forgotten_when_it_ends() {
    let mut bed = Bed::new();
    let (exe, cgroup) = ("/bin/x".to_owned(), "s".to_owned());
    bed.programs.push(Program { pid: 1, exe, args: String::new(), cgroup });
    bed.cgroups.insert("s".into(), 1);
    bed.no_move = Some("it cannot be moved".into());
    let limit =
        "[[limit]]\nname = \"x\"\nscope = { exe = \"/bin/x\" }\nmove = true\negress = \"1mbit\"\n";
    bed.write(limit);
    assert_eq!(bed.report.errors, ["cgroup `s/tidegate.x`: it cannot be moved"]);
    bed.programs.clear();
    bed.pass(Duration::from_secs(60));
    assert_eq!(bed.report.errors, [""; 0]);
}

#[test]
fn a_flood_of_cgroups_is_scanned_at_intervals() {
    let mut bed = Bed::new();
    bed.write(&unit("a", "egress = \"1mbit\""));
    let mut scans = 0;
    for _ in 0..1000 {
        bed.agent.handle(Event::CgroupsChanged, bed.now);
        while let Some(action) = bed.agent.next(bed.now, &bed.wall) {
            if let Action::Scan { .. } = action {
                scans += 1;
                bed.agent.handle(Event::Scanned { world: World::default(), whole: true }, bed.now);
            }
        }
        bed.now += Duration::from_millis(1);
    }
    assert!((45..=52).contains(&scans), "{scans}");
}

/// A user who serves an engine's socket may say what that user likes.
#[test]
fn a_flood_of_lines_that_change_nothing_makes_no_goal() {
    let mut bed = Bed::new();
    bed.write("labels = true");
    let known = ("a".repeat(64), Container::default());
    bed.handle(engine("s", Some(1000), Line::Listed([known.clone()].into())));
    for line in [
        Line::Gone("b".repeat(64)),
        Line::Gone(String::new()),
        Line::Changed(known.0, known.1),
        Line::Changed("a".to_owned(), Container::default()),
        Line::Asked,
        Line::Away("refused".to_owned()),
    ] {
        bed.agent.handle(engine("s", Some(1000), line.clone()), bed.now);
        assert_eq!(bed.agent.goal_due, None, "{line:?}");
    }
    bed.agent.handle(engine("s", Some(1000), Line::Gone("a".repeat(64))), bed.now);
    assert!(bed.agent.goal_due.is_some());
}

#[test]
fn a_flood_of_changes_makes_goals_at_intervals_and_the_last_one_counts() {
    let mut bed = Bed::new();
    bed.cgroups.insert("user.slice/user-1000.slice/libpod-".to_owned() + &"a".repeat(64), 1);
    bed.write("labels = true");
    let before = bed.applied;
    for n in 1..=1000 {
        let labels = BTreeMap::from([("tidegate.egress".to_owned(), format!("{n}mbit"))]);
        let web = Container { name: "web".to_owned(), labels };
        bed.agent.handle(engine("s", Some(1000), Line::Changed("a".repeat(64), web)), bed.now);
        bed.pass(Duration::from_millis(1));
    }
    let applied = bed.applied - before;
    assert!((45..=52).contains(&applied), "{applied}");
    bed.pass(GOAL_GAP);
    assert_eq!(bed.host["container-web"], "1gbit");
}

/// Nobody hears of them again before the next list.
#[test]
fn that_containers_were_left_out_is_said_until_the_next_list() {
    let mut bed = Bed::new();
    bed.write("labels = true");
    let [a, b] = ['a', 'b'].map(|letter| letter.to_string().repeat(64));
    let strange = ("x".to_owned(), Container::default());
    let mut state = |line| {
        bed.handle(engine("s", None, line));
        bed.report.engines["s"].clone()
    };
    let says = "lists ids that no container has; they are left out";
    assert_eq!(state(Line::Listed([strange].into())), says);
    assert_eq!(state(Line::Changed(a.clone(), Container::default())), says);
    assert_eq!(state(Line::Gone(b)), says);
    assert_eq!(state(Line::Listed([(a, Container::default())].into())), "running");
}

/// Watches run out.
#[test]
fn cgroups_without_a_watch_are_looked_for() {
    let mut bed = Bed::new();
    bed.unwatched = true;
    bed.write(&unit("a", "egress = \"1mbit\""));
    assert_eq!(bed.state("a"), Some(LimitState::Waiting));
    bed.cgroups.insert("a.service".into(), 1);
    bed.pass(RESCAN);
    assert_eq!(bed.state("a"), Some(LimitState::InForce));
    bed.cgroups.clear();
    bed.pass(RESCAN);
    assert_eq!(bed.state("a"), Some(LimitState::Waiting));
}

#[test]
fn a_schedule_changes_the_rate_at_its_boundary() {
    let mut bed = Bed::new();
    bed.cgroups.insert("a.service".into(), 1);
    let row =
        "egress = \"9mbit\"\nschedule = [{ from = \"12:30\", to = \"13:00\", egress = \"1mbit\" }]";
    bed.write(&unit("a", row));
    assert_eq!(bed.host["a"], "9mbit");
    bed.pass(Duration::from_secs(1801));
    assert_eq!(bed.host["a"], "1mbit");
    bed.pass(Duration::from_secs(1801));
    assert_eq!(bed.host["a"], "9mbit");
    // Somebody sets the clock: it is seen within a minute.
    bed.wall = bed.wall.checked_sub(20.minutes()).unwrap();
    bed.pass(CLOCK);
    assert_eq!(bed.host["a"], "1mbit");
}

#[test]
fn what_was_put_on_by_the_agent_before_is_taken_off_and_nothing_else() {
    let mut bed = Bed::new();
    bed.agent = Agent::new("/etc/tidegate", 2, BTreeSet::from(["old".to_owned()]), DEADLINE);
    bed.host.extend([("old".into(), "1mbit".into()), ("by-hand".into(), "1mbit".into())]);
    bed.write("limit = []");
    assert_eq!(bed.host.keys().collect::<Vec<_>>(), ["by-hand"]);
}

#[test]
fn limits_of_the_agent_before_stay_while_a_file_cannot_be_read() {
    let mut bed = Bed::new();
    bed.cgroups.insert("a.service".into(), 1);
    let managed = ["a", "b", "c"].map(str::to_owned);
    bed.agent = Agent::new("/etc/tidegate", 2, BTreeSet::from(managed.clone()), DEADLINE);
    bed.host.extend(managed.map(|name| (name, "1mbit".to_owned())));
    bed.write(&(unit("a", "egress = \"2mbit\"") + &unit("b", "egress = \"2mbps\"")));
    let host = |bed: &Bed| bed.host.iter().map(|(k, v)| format!("{k} {v}")).collect::<Vec<_>>();
    assert_eq!(host(&bed), ["a 2mbit", "b 1mbit", "c 1mbit"]);
    assert_eq!(bed.report.managed.len(), 3, "the next agent's, too");
    bed.pass(RETRY_MAX);
    assert_eq!(host(&bed), ["a 2mbit", "b 1mbit", "c 1mbit"]);
    bed.write(&unit("a", "egress = \"2mbit\""));
    assert_eq!(host(&bed), ["a 2mbit"]);
    assert_eq!(bed.report.managed.len(), 1);
}

#[test]
fn a_new_cgroup_is_held_until_its_limit_is_on_and_others_not_so_long() {
    let mut bed = Bed::new();
    bed.make("a.service", 1);
    bed.write(&unit("a", "egress = \"1mbit\""));
    assert_eq!(bed.report.gate.state, GateState::Open);
    assert_eq!(bed.done, [] as [&str; 0], "what was there before is not held");
    bed.make("b.service", 2);
    assert_eq!(bed.done.split_off(0), ["decide 2"], "no limit matches it");
    // Both at once: nobody waits for the limit of another.
    bed.remove("a.service");
    bed.cgroups.insert("c.service".to_owned(), 4);
    bed.held.as_mut().unwrap().insert(4);
    bed.make("a.service", 3);
    assert_eq!(bed.done.split_off(0), ["decide 4", "limit 3", "decide 3"]);
    // Refused is decided, too.
    bed.refuses.insert("a".into());
    bed.remove("a.service");
    bed.make("a.service", 5);
    assert_eq!(bed.done.split_off(0), ["limit 5", "decide 5"]);
    assert_eq!(bed.state("a"), Some(LimitState::Refused));
}

#[test]
fn without_limits_on_cgroups_there_is_no_gate() {
    let mut bed = Bed::new();
    let device = "[[limit]]\nname = \"d\"\nscope = { dev = \"eth0\" }\negress = \"1mbit\"\n";
    bed.write(device);
    assert_eq!((bed.report.gate.state, bed.held.is_none()), (GateState::Unneeded, true));
    bed.write(&unit("a", "egress = \"1mbit\""));
    assert_eq!((bed.report.gate.state, bed.held.is_some()), (GateState::Open, true));
    bed.write(device);
    assert_eq!((bed.report.gate.state, bed.held.is_none()), (GateState::Unneeded, true));
}

#[test]
fn where_there_is_no_gate_limits_are_put_on_all_the_same() {
    let mut bed = Bed::new();
    bed.no_gate = Some("no BTF".to_owned());
    bed.write(&unit("a", "egress = \"1mbit\""));
    bed.make("a.service", 1);
    assert_eq!(bed.state("a"), Some(LimitState::InForce));
    let gate = &bed.report.gate;
    assert_eq!((gate.state, gate.reason.as_deref()), (GateState::Unavailable, Some("no BTF")));
    // It is tried again when the files are read.
    bed.no_gate = None;
    bed.handle(Event::Reload);
    assert_eq!(bed.report.gate.state, GateState::Open);
}

#[test]
fn a_container_is_held_until_its_engine_tells_of_it_or_the_deadline() {
    let mut bed = Bed::new();
    let [known, unknown] = ['a', 'b'].map(|letter| letter.to_string().repeat(64));
    bed.write("[[limit]]\nname = \"w\"\nscope = { container = \"web\" }\negress = \"1mbit\"\n");
    bed.make(&format!("libpod-{known}.scope"), 1);
    bed.make(&format!("docker-{unknown}.scope"), 2);
    assert!(bed.is_held(1) && bed.is_held(2));
    let container = Container { name: "web".to_owned(), ..Container::default() };
    let line = Line::Changed(known, container);
    bed.handle(engine("s", None, line));
    assert_eq!(bed.done, ["limit 1", "decide 1"]);
    bed.pass(DEADLINE - Duration::from_millis(1));
    assert!(bed.is_held(2));
    bed.pass(Duration::from_millis(1));
    assert!(!bed.is_held(2));
}

#[test]
fn cgroups_that_are_not_looked_at_are_said() {
    let mut bed = Bed::new();
    bed.write("limit = []");
    let world = World { has_more: true, ..World::default() };
    bed.handle(Event::Scanned { world, whole: true });
    assert!(bed.report.errors[0].starts_with("there are more than 100000 cgroups; "));
    bed.handle(Event::Scanned { world: World::default(), whole: true });
    assert_eq!(bed.report.errors, [""; 0]);
}

/// The gate is closed while it holds a container that no engine has listed.
#[test]
fn an_agent_without_a_gate_is_at_rest() {
    let mut bed = Bed::new();
    bed.write("[[limit]]\nname = \"w\"\nscope = { container = \"web\" }\negress = \"1mbit\"\n");
    bed.make(&format!("docker-{}.scope", "b".repeat(64)), 1);
    assert!(bed.is_held(1));
    bed.write("limit = []");
    bed.pass(DEADLINE);
    assert_eq!(bed.report.gate.state, GateState::Unneeded);
    assert!(bed.agent.timeout(bed.now, &bed.wall) > SETTLE_MAX);
}

#[test]
fn a_users_engine_takes_nothing_from_the_hosts() {
    let mut bed = Bed::new();
    let id = |number: usize| format!("{number:064x}");
    let [web, new] = [id(MAX_CONTAINERS + 1), id(MAX_CONTAINERS + 2)];
    let paths = [&web, &new].map(|id| format!("docker/{id}"));
    bed.write("[[limit]]\nname = \"w\"\nscope = { container = \"web*\" }\negress = \"1mbit\"\n");
    bed.make(&paths[0], 1);
    bed.make(&paths[1], 2);
    // It lists as many as it can, and says the host's are its own.
    let made_up = |id| (id, Container { name: "web".to_owned(), ..Container::default() });
    let all = (0..MAX_CONTAINERS).map(id).chain([web.clone(), new.clone()]).map(made_up);
    let user = "/run/user/1000/docker.sock";
    bed.handle(engine(user, Some(1000), Line::Listed(all.collect())));
    let said = format!("more than {USER_CONTAINERS} containers; the rest is left out");
    assert_eq!(bed.report.engines[user], said);
    assert!(bed.is_held(1) && bed.is_held(2), "their engine has not listed them");
    bed.handle(engine("/run/docker.sock", None, Line::Listed([made_up(web.clone())].into())));
    bed.handle(engine("/run/docker.sock", None, Line::Changed(new.clone(), made_up(new).1)));
    assert_eq!(bed.report.limits[0].cgroups, paths);
    assert_eq!(bed.report.engines["/run/docker.sock"], "running");
    // What it tells later changes nothing, either.
    for line in [Line::Changed(web.clone(), Container::default()), Line::Gone(web)] {
        bed.handle(engine(user, Some(1000), line));
        assert_eq!(bed.report.limits[0].cgroups, paths);
    }
}

#[test]
fn an_engine_of_a_user_who_has_logged_out_is_forgotten() {
    let mut bed = Bed::new();
    bed.write("labels = true");
    let labels = BTreeMap::from([("tidegate.egress".to_owned(), "5mbit".to_owned())]);
    let all = BTreeMap::from([("a".repeat(64), Container { name: "web".to_owned(), labels })]);
    bed.handle(engine("s", Some(1000), Line::Listed(all)));
    assert_eq!(bed.state("container-web"), Some(LimitState::Waiting));
    bed.handle(Event::EngineGone { socket: "s".to_owned(), owner: Some(1000) });
    assert!(bed.report.limits.is_empty() && bed.report.engines.is_empty());
}

#[test]
fn a_pod_that_is_known_changes_also_where_there_are_no_more() {
    let mut bed = Bed::new();
    bed.agent = Agent::new("/etc/tidegate", 1, BTreeSet::new(), DEADLINE).with_pods_of("node-a");
    bed.write("annotations = true");
    let pods: BTreeMap<_, _> = (0..MAX_PODS).map(|n| (n.to_string(), Pod::default())).collect();
    bed.handle(Event::Pods(Line::Listed(pods)));
    let changed = Pod { name: "other".to_owned(), ..Pod::default() };
    bed.handle(Event::Pods(Line::Changed("0".to_owned(), changed.clone())));
    assert!(matches!(&bed.agent.pods, Pods::Known(pods) if pods["0"] == changed));
    assert_eq!(bed.report.engines["pods of node node-a"], "connected");
}

#[test]
fn an_id_that_no_container_has_is_left_out() {
    let mut bed = Bed::new();
    let web = "a".repeat(64);
    bed.write("[[limit]]\nname = \"w\"\nscope = { container = \"web\" }\negress = \"1mbit\"\n");
    let ids = ["", "a", "e", &web[1..], &format!("docker-{web}")].map(str::to_owned);
    for id in ids.clone() {
        bed.handle(engine("s", None, Line::Changed(id, Container::default())));
        assert_eq!(bed.report.engines["s"], "lists ids that no container has; they are left out");
    }
    let all = ids.into_iter().map(|id| (id, Container::default())).collect();
    bed.handle(engine("s", None, Line::Listed(all)));
    assert_eq!(bed.report.engines["s"], "lists ids that no container has; they are left out");
    bed.make(&format!("docker-{web}.scope"), 1);
    assert!(bed.is_held(1));
}

#[test]
fn limits_of_containers_stay_until_an_engine_has_told_of_them() {
    let mut bed = Bed::new();
    let [web, db] = ['a', 'b'].map(|letter| letter.to_string().repeat(64));
    let managed = ["container-web", "container-db"].map(str::to_owned);
    bed.host.extend(managed.clone().map(|name| (name, "1mbit".to_owned())));
    bed.on.insert("container-web".to_owned(), format!("docker/{web}"));
    bed.on.insert("container-db".to_owned(), format!("docker/{db}"));
    bed.agent = Agent::new("/etc/tidegate", 1, managed.into(), DEADLINE);
    bed.cgroups.extend([(format!("docker/{web}"), 1), (format!("docker/{db}"), 2)]);
    bed.write("labels = true");
    assert_eq!(bed.host.len(), 2, "the agent has begun");
    bed.handle(engine("s", None, Line::Away("refused".to_owned())));
    bed.handle(Event::Reload);
    assert_eq!(bed.host.len(), 2, "its engine is away");
    let labels = BTreeMap::from([("tidegate.egress".to_owned(), "5mbit".to_owned())]);
    let container = |name: &str, labels| Container { name: name.to_owned(), labels };
    // One has no labels any more.
    let all = [(web, container("web", labels)), (db, container("db", BTreeMap::new()))];
    bed.handle(engine("s", None, Line::Listed(all.into())));
    assert_eq!(bed.host, BTreeMap::from([("container-web".to_owned(), "5mbit".to_owned())]));
    // What a file asks for no longer goes, whatever the engine says.
    bed.write("labels = false");
    assert!(bed.host.is_empty());
}

#[test]
fn a_limit_that_waits_for_a_container_names_the_engine_that_is_away() {
    let mut bed = Bed::new();
    bed.make("a.service", 1);
    bed.write("[[limit]]\nname = \"w\"\nscope = { container = \"web\" }\negress = \"1mbit\"\n");
    let reason = |bed: &Bed| bed.report.limits[0].reason.clone().unwrap();
    let none = "no container `web` runs";
    let how = "`systemctl enable --now podman.socket` (rootless: `systemctl --user enable --now \
               podman.socket`)";
    let no_engine = format!("{none}; no engine of containers answers; for Podman: {how}");
    assert_eq!(reason(&bed), no_engine);
    let says = |line| engine("/run/x.sock", None, line);
    bed.handle(says(Line::Asked));
    assert_eq!(reason(&bed), format!("{none}; /run/x.sock has not answered yet"));
    for line in [Line::Away("refused".to_owned()), Line::Asked] {
        bed.handle(says(line));
        assert_eq!(reason(&bed), format!("{none}; /run/x.sock is away: refused"));
    }
    bed.handle(says(Line::Listed(BTreeMap::new())));
    assert_eq!(reason(&bed), none);
}

#[test]
fn limits_of_pods_stay_until_the_api_server_has_answered_once() {
    let mut bed = Bed::new();
    let uid = "a".repeat(32);
    let all = "[[limit]]\nname = \"t\"\nscope = { pod = { namespace = \"prod\" } }\negress = \"1mbit\"\n\
               each = true\n";
    let managed = ["t-api-0", "t-api-1"].map(str::to_owned);
    bed.host.extend(managed.clone().map(|name| (name, "1mbit".to_owned())));
    let known = managed.clone().into();
    bed.agent = Agent::new("/etc/tidegate", 1, known, DEADLINE).with_pods_of("node-a");
    bed.write(all);
    assert!(bed.agent.asks_for_pods());
    bed.make(&format!("kubepods/pod{uid}"), 1);
    bed.handle(Event::Pods(Line::Away("refused".to_owned())));
    assert_eq!((bed.host.len(), bed.state("t")), (2, Some(LimitState::Waiting)));
    let state = &bed.report.engines["pods of node node-a"];
    assert_eq!(state, "away: refused; 1 pods here are not known yet");
    // Another look changes nothing.
    bed.handle(Event::Reload);
    assert_eq!(bed.host.len(), 2);
    assert!(managed.iter().all(|name| bed.report.managed.contains(name)) && bed.is_held(1));
    let (namespace, name) = ("prod".to_owned(), "api-0".to_owned());
    let pod = Pod { namespace, name, ..Pod::default() };
    bed.handle(Event::Pods(Line::Listed(BTreeMap::from([(uid.clone(), pod)]))));
    assert_eq!(bed.host.keys().collect::<Vec<_>>(), ["t-api-0"]);
    assert!(!bed.is_held(1));
    // It is away again: the last list holds.
    bed.handle(Event::Pods(Line::Away("refused".to_owned())));
    bed.handle(Event::Reload);
    assert_eq!(bed.host.len(), 1);
    bed.handle(Event::Pods(Line::Gone(uid)));
    assert!(bed.host.is_empty());
}

#[test]
fn a_flood_of_new_cgroups_is_decided_with_few_actions() {
    let mut bed = Bed::new();
    bed.make("a.service", 1);
    bed.write(&unit("a", "egress = \"1mbit\""));
    let before = bed.applied;
    for id in 2..5000u64 {
        bed.cgroups.insert(format!("x{id}"), id);
        bed.held.as_mut().unwrap().insert(id);
        bed.agent.handle(Event::CgroupsChanged, bed.now);
    }
    bed.pass(SCAN_GAP);
    assert!(bed.held.as_ref().unwrap().is_empty());
    assert_eq!(bed.applied, before, "the goal is the same");
}

proptest! {
    /// Whatever happens in whatever order: when all is quiet, the units that exist are limited at the rate of
    /// the last files that had no error, and nothing of the agent's is left besides. No event costs an
    /// unbounded number of actions, and an agent at rest does nothing but look.
    #[test]
    fn in_the_end_the_host_is_as_the_files_say(
        steps in proptest::collection::vec((0u8..7, 0usize..4, 0u64..3000), 1..40),
    ) {
        let mut bed = Bed::new();
        let mut good = (vec![], 0);
        bed.write(&text(&[], 0));
        for (number, (what, which, ms)) in steps.into_iter().enumerate() {
            let name = format!("u{which}");
            match what {
                0 => {
                    good = ((0..which).collect(), ms as usize % 3);
                    bed.write(&text(&good.0, good.1));
                }
                1 => bed.write("[[limit]]\nname = 1"),
                2 => {
                    bed.remove(&format!("{name}.service"));
                    bed.make(&format!("{name}.service"), number as u64 + 1);
                }
                3 => bed.remove(&format!("{name}.service")),
                4 => drop(bed.refuses.insert(name)),
                5 => drop(bed.refuses.remove(&name)),
                _ => bed.handle(Event::Reload),
            }
            bed.pass(Duration::from_millis(ms));
        }
        bed.refuses.clear();
        bed.write(&text(&good.0, good.1));
        bed.pass(RETRY_MAX + CHECK);
        for n in 0..4 {
            let name = format!("u{n}");
            let exists = bed.cgroups.contains_key(&format!("{name}.service"));
            let state = if exists { LimitState::InForce } else { LimitState::Waiting };
            let expected = good.0.contains(&n).then_some(state);
            prop_assert_eq!(bed.state(&name), expected);
            if expected == Some(LimitState::InForce) {
                prop_assert_eq!(&bed.host[&name], &format!("{}mbit", good.1 + 1));
            }
            prop_assert!(expected.is_some() || !bed.host.contains_key(&name));
        }
        let left = bed.held.clone().unwrap_or_default();
        prop_assert!(left.is_empty(), "{left:?} are still held");
        // Whoever was held and has a limit had it before.
        for (at, done) in bed.done.iter().enumerate() {
            let Some(id) = done.strip_prefix("limit ") else { continue };
            let decided = bed.done.iter().position(|done| *done == format!("decide {id}"));
            prop_assert!(decided.is_none_or(|decided| decided > at), "{:?}", bed.done);
        }
        let before = bed.applied;
        bed.pass(CHECK * 4);
        prop_assert!(bed.applied - before <= 5, "an agent at rest applies");
        bed.handle(Event::Stop);
        prop_assert!(bed.agent.is_stopped());
    }
}

#[test]
fn a_report_that_could_not_be_written_is_written_later() {
    let mut bed = Bed::new();
    bed.cgroups.insert("system.slice/a.service".to_owned(), 1);
    bed.full = true;
    bed.write(&unit("a", "egress = \"10mbit\""));
    bed.pass(RETRY_MIN * 3);
    assert_eq!(bed.state("a"), None);
    bed.full = false;
    bed.pass(RETRY_MIN);
    assert_eq!(bed.state("a"), Some(LimitState::InForce));
    assert_eq!(bed.applied, 1);
}
