//! The screen as people see it, and that no screen and no key breaks it.

use std::time::Duration;

use proptest::prelude::*;
use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
};
use tidegate_agent::report::{LimitReport, LimitState};
use tidegate_core::{
    Scope,
    selector::{Selector, SelectorKind},
};
use tidegate_host::{
    live::Origin,
    plan::State,
    risk::AtRisk,
    sockets::SocketSample,
    status::{Ages, Counts, DirectionSample, DirectionStatus, Fair, LimitSample, LimitStatus},
    watch::Watched,
    world::Users,
};
use tidegate_sys::{limit::LimitOptions, store::Waiting};

use super::{
    draw::draw,
    model::{Model, TopSockets},
};

const SECOND: u64 = 1_000_000_000;
const MBIT: u64 = 1_000_000;

/// A direction of so many Mbit/s of which so many are used.
fn direction(rate_mbit: u64, used_mbit: u64, paced: bool) -> (DirectionStatus, DirectionSample) {
    let mut counters = Counts::default();
    counters.packets[0] = used_mbit * 80;
    counters.bytes[0] = used_mbit * 125_000;
    let full = used_mbit * 10 >= rate_mbit * 9;
    let mut ages = Ages::default();
    if full && !paced {
        counters.packets[2] = 120;
        counters.bytes[2] = 120 * 1514;
        counters.packets[3] = 7;
        counters.bytes[3] = 7 * 1514;
        ages.0[2] = Some(3_100_000);
        ages.0[3] = Some(812_000_000);
    }
    let fair =
        Fair { flows: 9, share_bit_s: rate_mbit * 990_000 / 9, rtt_ns: Some(28_400), held: 0 };
    // The others are ingress, where only the first packets of connections are known.
    let at_risk = match (paced, full) {
        (true, _) => AtRisk([Some(0); 3]),
        (false, true) => AtRisk([Some(2), None, None]),
        (false, false) => AtRisk([Some(0), None, None]),
    };
    let backlog_ns = if full { 1_234_567 } else { -1_000_000 };
    let rate_bit_s = rate_mbit * MBIT;
    let status = DirectionStatus {
        colours: None,
        rate_bit_s,
        now_bit_s: None,
        share: None,
        burst_ns: 1_000_000,
        mark_ns: Some(2_000_000),
        drop_ns: Some(4_000_000),
        backlog_ns,
        fair: paced.then_some(fair),
        at_risk: Some(at_risk),
        counters,
        last: ages,
    };
    let used_bit_s = used_mbit * MBIT;
    (
        status,
        DirectionSample {
            colours: None,
            rate_bit_s,
            now_bit_s: None,
            share: None,
            used_bit_s,
            backlog_ns,
            at_risk: Some(at_risk),
            counters,
        },
    )
}

/// A limit on a cgroup; of each direction rate and use in Mbit/s.
pub(in crate::verbs) fn limit(
    path: &str,
    egress: Option<(u64, u64)>,
    ingress: Option<(u64, u64)>,
) -> Watched {
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    let scope = Scope::Cgroup(path.to_owned());
    let egress = egress.map(|(rate, used)| direction(rate, used, true));
    let ingress = ingress.map(|(rate, used)| direction(rate, used, false));
    let settings = LimitOptions::default().into();
    let state = State::InForce;
    Watched {
        status: LimitStatus {
            members: None,
            name: name.clone(),
            scope: scope.clone(),
            state,
            required: false,
            parent: None,
            guarantee_bit_s: None,
            weight: None,
            settings,
            egress: egress.map(|(status, _)| status),
            ingress: ingress.map(|(status, _)| status),
            lent: false,
            waiting: None,
            why: None,
            other_build: None,
            programs_before: Vec::new(),
            outside: Vec::new(),
        },
        origin: match path.contains("run") {
            true => Origin::Run { runner_pid: 4711 },
            false => Origin::Pinned,
        },
        sample: LimitSample {
            unix_ns: 0,
            interval_ns: SECOND,
            name,
            scope,
            state,
            parent: None,
            egress: egress.map(|(_, sample)| sample),
            ingress: ingress.map(|(_, sample)| sample),
        },
    }
}

/// Some services with limits inside a slice, and one whose cgroup is gone.
fn host(used: u64) -> Vec<Watched> {
    let mut gone = limit("system.slice/old.service", Some((10, 0)), None);
    gone.status.state = State::ScopeGone;
    vec![
        limit("system.slice/backup.service", Some((200, used)), Some((500, 490))),
        limit("system.slice/backup.service/tidegate-run-4711-8f2e", Some((50, used / 4)), None),
        limit("system.slice", Some((1000, 3 * used)), None),
        limit("user.slice/alice", None, Some((100, 3))),
        gone,
    ]
}

/// A minute in which the use went up and down.
fn model() -> Model {
    let mut model = Model::new(Duration::from_secs(1));
    for second in 0..=60u64 {
        let used = if second < 20 { 5 * second } else { 100 + 3 * (second - 20) };
        model.look(host(used.min(198)), 100 * SECOND + second * SECOND);
    }
    model
}

fn press(model: &mut Model, keys: &str) -> bool {
    keys.chars().any(|c| {
        let code = match c {
            '\n' => KeyCode::Enter,
            '\x1b' => KeyCode::Esc,
            c => KeyCode::Char(c),
        };
        model.key(KeyEvent::new(code, KeyModifiers::NONE))
    })
}

fn screen(model: &Model, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(model, frame.area(), frame.buffer_mut())).unwrap();
    terminal.backend().to_string()
}

fn sockets(n: u16) -> TopSockets {
    let socket = |i: u16| SocketSample {
        asked: true,
        local: format!("10.0.0.1:{}", 40_000 + i).parse().unwrap(),
        remote: "10.0.0.2:5201".parse().unwrap(),
        pid: Some(4242),
        comm: Some("rsync".to_owned()),
        cgroup: None,
        congestion_control: "cubic".to_owned(),
        sent_bit_s: u64::from(100 - i) * MBIT,
        received_bit_s: 12_345,
        pacing_bit_s: Some(111 * MBIT),
        max_pacing_bit_s: None,
        delivery_bit_s: 0,
        rtt_ns: 28_400,
        cwnd_segments: 10,
        retransmitted_segments: 0,
        retransmitted_segments_ever: 3,
        busy: 1.0,
        receiver_limited: 0.0,
        inode: 1,
        namespace: 0,
    };
    TopSockets { list: (0..n).map(socket).collect(), total: usize::from(n) + 5 }
}

#[test]
fn the_table_at_the_usual_size() {
    insta::assert_snapshot!(screen(&model(), 80, 24));
}

#[test]
fn the_table_on_a_large_screen() {
    insta::assert_snapshot!(screen(&model(), 120, 40));
}

#[test]
fn the_table_on_a_small_screen() {
    insta::assert_snapshot!(screen(&model(), 40, 10));
}

#[test]
fn no_limits() {
    let mut model = Model::new(Duration::from_secs(1));
    assert!(screen(&model, 80, 24).contains("Looking ..."));
    model.look(Vec::new(), 0);
    assert!(!press(&mut model, "jks\n?"), "nothing to select is no trouble");
    press(&mut model, "x");
    insta::assert_snapshot!(screen(&model, 80, 24));
    insta::assert_snapshot!(screen(&model, 40, 10));
}

#[test]
fn one_limit_closely() {
    let mut model = model();
    press(&mut model, "jj\n");
    assert_eq!(model.wanted_cgroup(), Some("system.slice/backup.service"));
    model.sockets(Some(sockets(20)));
    insta::assert_snapshot!(screen(&model, 80, 24));
    insta::assert_snapshot!(screen(&model, 120, 40));
    insta::assert_snapshot!(screen(&model, 40, 10));
    press(&mut model, "\n");
    assert_eq!(model.wanted_cgroup(), None);
}

#[test]
fn limits_that_are_not_on_are_below_the_others() {
    let mut model = model();
    let report = |name: &str, state, reason: Option<&str>, next: Option<&str>| LimitReport {
        name: name.to_owned(),
        file: "limits.toml".to_owned(),
        scope: "unit `x.service`".to_owned(),
        state,
        reason: reason.map(str::to_owned),
        stays: false,
        guest: false,
        required: false,
        schedule: (state == LimitState::InForce).then(|| "mon 08:00-18:00".to_owned()),
        next_change: next.map(str::to_owned),
        next_rates: next.map(|_| "egress 1mbit".to_owned()),
        cgroups: Vec::new(),
        left_out: Vec::new(),
    };
    let select = |value: &str| Selector { kind: SelectorKind::Unit, value: value.to_owned() };
    let waits = |name: &str| Waiting {
        name: name.to_owned(),
        scope: Scope::Select(select("job.service")),
        required: false,
    };
    let reports = vec![
        report("alice", LimitState::InForce, None, Some("2026-03-02T18:00+01:00")),
        report("games", LimitState::Off, Some("x"), Some("2026-03-02T18:00+01:00")),
        report("old.service", LimitState::Waiting, Some("no unit runs"), None),
        report("two", LimitState::Refused, Some("limit `one` has it"), None),
    ];
    model.kept(vec![waits("job")], &Users::new(), Some(reports));
    insta::assert_snapshot!(screen(&model, 100, 14));
    press(&mut model, "\n");
    assert!(screen(&model, 100, 24).contains("schedule mon 08:00-18:00 until 2026-03-02T18:00"));
    model.look(Vec::new(), 200 * SECOND);
    model.kept(vec![waits("job")], &Users::new(), None);
    assert!(screen(&model, 100, 14).contains("job            waiting: no unit `job.service` runs"));
}

#[test]
fn help_covers_the_table_until_a_key() {
    let mut model = model();
    press(&mut model, "?");
    insta::assert_snapshot!(screen(&model, 80, 24));
    assert!(!press(&mut model, "\x1b"), "Esc only takes the help away");
    assert!(!model.shows_help());
    assert!(press(&mut model, "\x1b"));
}

#[test]
fn q_and_control_c_end_it() {
    assert!(press(&mut model(), "q"));
    assert!(model().key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    assert!(!model().key(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::CONTROL)));
}

#[test]
fn the_selection_stays_with_its_limit() {
    let mut model = model();
    let selected = |model: &Model| model.selected().unwrap().limit.status.name.clone();
    assert_eq!(selected(&model), "alice");
    press(&mut model, "jjj");
    assert_eq!(selected(&model), "tidegate-run-4711-8f2e");
    press(&mut model, "s");
    assert_eq!(selected(&model), "tidegate-run-4711-8f2e");
    let mut without = host(100);
    without.remove(1);
    model.look(without, 200 * SECOND);
    assert_eq!(selected(&model), "system.slice", "gone: the first one");
    press(&mut model, "G");
    assert_eq!(selected(&model), model.shown().last().unwrap().limit.status.name);
}

#[test]
fn sorting_keeps_the_tree() {
    let mut model = model();
    let order = |model: &Model| {
        let name = |s: &super::model::Shown| (s.limit.status.name.clone(), s.branch.depth);
        model.shown().iter().map(name).collect::<Vec<_>>()
    };
    let by_name = order(&model);
    assert_eq!(by_name.iter().map(|(_, depth)| *depth).collect::<Vec<_>>(), [0, 0, 1, 2, 1]);
    press(&mut model, "sss");
    assert!(screen(&model, 80, 24).contains("by drops"));
    assert_eq!(order(&model)[2].0, "backup.service", "it has them");
    press(&mut model, "s");
    assert_eq!(order(&model), by_name);
}

#[test]
fn the_interval_stays_within_its_bounds() {
    let mut model = Model::new(Duration::from_secs(1));
    press(&mut model, "+");
    assert_eq!(model.interval(), Duration::from_secs(2));
    press(&mut model, "++++++++++++");
    assert_eq!(model.interval(), crate::args::TOP_MAX_INTERVAL);
    press(&mut model, "--------------------");
    assert_eq!(model.interval(), crate::args::TOP_MIN_INTERVAL);
}

#[test]
fn an_error_is_shown_until_the_next_look() {
    let mut model = model();
    model.fail("the kernel says no".to_owned());
    assert!(screen(&model, 80, 24).contains("the kernel says no"));
    model.look(host(1), 300 * SECOND);
    assert!(!screen(&model, 80, 24).contains("the kernel says no"));
}

proptest! {
    #[test]
    fn no_size_and_no_key_breaks_it(
        (width, height) in (1u16..=200, 1u16..=60),
        limits in proptest::collection::vec(
            ("[a-c](/[a-c]){0,4}", proptest::option::of((1u64..1 << 40, 0u64..1 << 40)),
             proptest::option::of((1u64..1000, 0u64..1000))),
            0..30
        ),
        keys in "[jkshgGp?+\n-]{0,12}",
        listed in 0u16..40,
        at in any::<u64>(),
    ) {
        let mut model = Model::new(Duration::from_secs(1));
        let limits: Vec<_> =
            limits.iter().map(|(path, egress, ingress)| limit(path, *egress, *ingress)).collect();
        for i in 0..3u64 {
            model.look(limits.clone(), at.saturating_add(i * SECOND));
        }
        for key in keys.chars() {
            press(&mut model, &key.to_string());
            model.sockets(model.wanted_cgroup().is_some().then(|| sockets(listed)));
            screen(&model, width, height);
        }
        screen(&model, width, height);
        prop_assert_eq!(model.shown().len(), limits.len());
    }
}
