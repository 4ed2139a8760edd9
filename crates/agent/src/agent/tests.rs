//! The machine with a host that is made up: files and cgroups change, limits are refused, time passes.

use jiff::ToSpan;
use proptest::prelude::*;
use tidegate_host::spec::Spec;

use super::*;

/// Actions between two events at most: read, scan, move, scan, apply, report.
const STEPS_MAX: usize = 12;

struct Bed {
    agent: Agent,
    now: Duration,
    wall: Zoned,
    disk: Files,
    cgroups: BTreeMap<String, u64>,
    /// Refused by the kernel.
    refuses: BTreeSet<String>,
    /// In force, with the rate in words.
    host: BTreeMap<String, String>,
    applied: usize,
    report: Report,
    /// Reports cannot be written.
    full: bool,
}

impl Bed {
    fn new() -> Bed {
        Bed {
            agent: Agent::new("/etc/tidegate", 1, BTreeSet::new()),
            now: Duration::ZERO,
            wall: "2026-03-02T12:00+00:00[UTC]".parse().unwrap(),
            disk: Files::default(),
            cgroups: BTreeMap::new(),
            refuses: BTreeSet::new(),
            host: BTreeMap::new(),
            applied: 0,
            report: Report::default(),
            full: false,
        }
    }

    fn handle(&mut self, event: Event) {
        self.agent.handle(event, self.now);
        self.run();
    }

    /// Does all that is to be done now; fails if that has no end.
    fn run(&mut self) {
        for _ in 0..STEPS_MAX {
            let Some(action) = self.agent.next(self.now, &self.wall) else { return };
            let event = match action {
                Action::ReadFiles => Event::Read(self.disk.clone()),
                Action::Scan { .. } => {
                    let world = World { cgroups: self.cgroups.clone(), ..World::default() };
                    Event::Scanned { world, whole: true }
                }
                Action::Move(_) => Event::Moved(BTreeMap::new()),
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

    fn apply(&mut self, goal: &Goal, managed: &BTreeSet<String>) -> Event {
        self.applied += 1;
        self.host.retain(|name, _| goal.has(name) || !managed.contains(name));
        let mut refused = BTreeMap::new();
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
    bed.agent = Agent::new("/etc/tidegate", 2, BTreeSet::from(["old".to_owned()]));
    bed.host.extend([("old".into(), "1mbit".into()), ("by-hand".into(), "1mbit".into())]);
    bed.write("limit = []");
    assert_eq!(bed.host.keys().collect::<Vec<_>>(), ["by-hand"]);
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
        for (what, which, ms) in steps {
            let name = format!("u{which}");
            match what {
                0 => {
                    good = ((0..which).collect(), ms as usize % 3);
                    bed.write(&text(&good.0, good.1));
                }
                1 => bed.write("[[limit]]\nname = 1"),
                2 => {
                    bed.cgroups.insert(format!("{name}.service"), ms);
                    bed.handle(Event::CgroupsChanged);
                }
                3 => {
                    bed.cgroups.remove(&format!("{name}.service"));
                    bed.handle(Event::CgroupsChanged);
                }
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
