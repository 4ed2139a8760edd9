//! What `top` shows, and how keys and looks change it. Pure: time comes with each look.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use tidegate_agent::{
    report::{LimitReport, LimitState},
    status::WAITING,
};
use tidegate_core::Scope;
use tidegate_host::{
    absent,
    sockets::SocketSample,
    status::DirectionSample,
    tree::{Branch, enclosing, tree},
    watch::Watched,
    world::Users,
};
use tidegate_sys::store::Waiting;

use crate::args::{TOP_MAX_INTERVAL, TOP_MIN_INTERVAL};

/// How far the small charts go back.
pub const HISTORY_NS: u64 = 60_000_000_000;
/// Looks that are kept of each direction at most; more than a minute has at the shortest interval.
const MAX_HISTORY: usize = 1024;

/// A limit is known by its name and place.
type Key = (String, Scope);

/// The order of limits inside the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    Name,
    Used,
    Percent,
    Dropped,
}

impl Sort {
    pub fn name(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::Used => "rate used",
            Sort::Percent => "% used",
            Sort::Dropped => "drops",
        }
    }

    fn next(self) -> Sort {
        match self {
            Sort::Name => Sort::Used,
            Sort::Used => Sort::Percent,
            Sort::Percent => Sort::Dropped,
            Sort::Dropped => Sort::Name,
        }
    }
}

/// A stretch of time and the rate used in it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Stretch {
    from_ns: u64,
    to_ns: u64,
    used_bit_s: u64,
}

/// What one direction used in the last minute.
#[derive(Debug, Clone, Default)]
pub struct History(VecDeque<Stretch>);

impl History {
    fn push(&mut self, stretch: Stretch) {
        self.0.push_back(stretch);
        let old = |s: &Stretch| stretch.to_ns.saturating_sub(s.to_ns) > HISTORY_NS;
        while self.0.len() > MAX_HISTORY || self.0.front().is_some_and(old) {
            self.0.pop_front();
        }
    }

    /// The mean rates of so many equal parts of the last minute, oldest first; `None` where nobody looked.
    pub fn parts(&self, parts: usize) -> Vec<Option<f64>> {
        let Some(last) = self.0.back() else { return vec![None; parts] };
        let part = HISTORY_NS / parts.max(1) as u64;
        let mean = |i: usize| {
            let to = last.to_ns.saturating_sub((parts - 1 - i) as u64 * part);
            let from = to.saturating_sub(part);
            let overlap = |s: &Stretch| s.to_ns.min(to).saturating_sub(s.from_ns.max(from));
            let (bits, time) = self.0.iter().fold((0.0, 0), |(bits, time), s| {
                (bits + s.used_bit_s as f64 * overlap(s) as f64, time + overlap(s))
            });
            (time > 0).then(|| bits / time as f64)
        };
        (0..parts).map(mean).collect()
    }
}

/// The fastest sockets of a cgroup.
#[derive(Debug, Clone, Default)]
pub struct TopSockets {
    pub list: Vec<SocketSample>,
    pub total: usize,
}

/// A limit as it is shown.
#[derive(Debug, Clone)]
pub struct Shown {
    pub limit: Watched,
    pub branch: Branch,
    /// Of egress and ingress.
    pub history: [History; 2],
}

/// All that is on the screen.
#[derive(Debug)]
pub struct Model {
    shown: Vec<Shown>,
    /// Looked at least once.
    looked: bool,
    selected: Option<Key>,
    detail: bool,
    help: bool,
    paused: bool,
    sort: Sort,
    interval: Duration,
    error: Option<String>,
    sockets: Option<TopSockets>,
    /// Why limits are not in force, by their names, as far as that is known beside the kernel.
    reasons: BTreeMap<String, String>,
    /// Schedules in words, by the names of their limits.
    schedules: BTreeMap<String, String>,
}

fn key(limit: &Watched) -> Key {
    (limit.status.name.clone(), limit.status.scope.clone())
}

impl Model {
    pub fn new(interval: Duration) -> Model {
        Model {
            shown: Vec::new(),
            looked: false,
            selected: None,
            detail: false,
            help: false,
            paused: false,
            sort: Sort::Name,
            interval,
            error: None,
            sockets: None,
            reasons: BTreeMap::new(),
            schedules: BTreeMap::new(),
        }
    }

    /// Takes what a look has found; `at_ns` is its time on any clock that goes forward.
    pub fn look(&mut self, limits: Vec<Watched>, at_ns: u64) {
        let mut histories: BTreeMap<Key, [History; 2]> = std::mem::take(&mut self.shown)
            .into_iter()
            .map(|shown| (key(&shown.limit), shown.history))
            .collect();
        let with_history = |limit: Watched| {
            let mut history = histories.remove(&key(&limit)).unwrap_or_default();
            let samples = [limit.sample.egress, limit.sample.ingress];
            for (history, sample) in history.iter_mut().zip(samples) {
                let Some(sample) = sample else { continue };
                let from_ns = at_ns.saturating_sub(limit.sample.interval_ns);
                history.push(Stretch { from_ns, to_ns: at_ns, used_bit_s: sample.used_bit_s });
            }
            let branch = Branch { index: 0, depth: 0, last: true };
            Shown { limit, branch, history }
        };
        self.shown = limits.into_iter().map(with_history).collect();
        self.looked = true;
        self.error = None;
        self.arrange();
    }

    /// Takes what is known of limits beside the kernel: which wait, and what the agent says of its own.
    pub fn kept(
        &mut self,
        waiting: Vec<Waiting>,
        users: &Users,
        reports: Option<Vec<LimitReport>>,
    ) {
        let waits = |waits: Waiting| {
            let why = format!("{WAITING}: {}", absent::missing(&waits.scope, users));
            (waits.name, why)
        };
        self.reasons = waiting.into_iter().map(waits).collect();
        self.schedules.clear();
        for report in reports.into_iter().flatten() {
            let schedule = report.schedule_words();
            if report.state != LimitState::InForce {
                let words = schedule.clone().filter(|_| report.state == LimitState::Off);
                self.reasons.insert(report.name.clone(), words.unwrap_or_else(|| report.words()));
            }
            self.schedules.extend(schedule.map(|words| (report.name, words)));
        }
    }

    /// Says why there was no look.
    pub fn fail(&mut self, error: String) {
        self.error = Some(error);
    }

    /// Takes the sockets of the limit that is shown closely.
    pub fn sockets(&mut self, sockets: Option<TopSockets>) {
        self.sockets = sockets;
    }

    /// Does what a key says; true if that is the end.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control {
            return matches!(key.code, KeyCode::Char('c'));
        }
        // Whatever is pressed, help goes.
        let help = std::mem::take(&mut self.help);
        match key.code {
            KeyCode::Char('q') => return true,
            KeyCode::Esc if help => {}
            KeyCode::Esc => return true,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = !help,
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::PageDown => self.select(10),
            KeyCode::PageUp => self.select(-10),
            KeyCode::Home | KeyCode::Char('g') => self.select(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.select(isize::MAX),
            KeyCode::Enter => self.detail = !self.detail,
            KeyCode::Char('s') => {
                self.sort = self.sort.next();
                self.arrange();
            }
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('+' | '=') => self.interval = (self.interval * 2).min(TOP_MAX_INTERVAL),
            KeyCode::Char('-') => self.interval = (self.interval / 2).max(TOP_MIN_INTERVAL),
            _ => {}
        }
        false
    }

    /// Puts the limits in order, those inside others below them, and keeps the selection.
    fn arrange(&mut self) {
        let names: BTreeMap<_, _> =
            self.shown.iter().enumerate().map(|(i, s)| (&s.limit.status.name, i)).collect();
        let limits = self.shown.iter().map(|shown| {
            let status = &shown.limit.status;
            let parent = status.parent.as_ref().and_then(|name| names.get(name)).copied();
            (&status.scope, parent)
        });
        let parents = enclosing(&limits.collect::<Vec<_>>());
        let pairs: Vec<_> = parents.into_iter().enumerate().collect();
        let sort = self.sort;
        let by_name = |a: &Shown, b: &Shown| key(&a.limit).cmp(&key(&b.limit));
        let order = |a: usize, b: usize| -> Ordering {
            let (a, b) = (&self.shown[a], &self.shown[b]);
            let ordering = match sort {
                Sort::Name => Ordering::Equal,
                Sort::Used => Reverse(used(a)).cmp(&Reverse(used(b))),
                Sort::Percent => Reverse(permille(a)).cmp(&Reverse(permille(b))),
                Sort::Dropped => Reverse(dropped(a)).cmp(&Reverse(dropped(b))),
            };
            ordering.then_with(|| by_name(a, b))
        };
        let branches = tree(&pairs, order);
        let mut places: Vec<_> = self.shown.drain(..).map(Some).collect();
        for branch in branches {
            if let Some(shown) = places.get_mut(branch.index).and_then(Option::take) {
                self.shown.push(Shown { branch, ..shown });
            }
        }
        if self.selected_index().is_none() {
            self.selected = self.shown.first().map(|shown| key(&shown.limit));
        }
    }

    fn select(&mut self, by: isize) {
        let Some(last) = self.shown.len().checked_sub(1) else { return };
        let now = self.selected_index().unwrap_or(0);
        let next = now.saturating_add_signed(by).min(last);
        if next != now {
            self.sockets = None;
        }
        self.selected = Some(key(&self.shown[next].limit));
    }

    pub fn shown(&self) -> &[Shown] {
        &self.shown
    }

    /// Limits that are not on the host, and why.
    pub fn absent(&self) -> Vec<(&str, &str)> {
        let shown = self.shown.iter().map(|shown| shown.limit.status.name.as_str());
        let shown: BTreeSet<_> = shown.collect();
        let all = self.reasons.iter().map(|(name, why)| (name.as_str(), why.as_str()));
        all.filter(|(name, _)| !shown.contains(name)).collect()
    }

    /// Why a limit is not in force, if that is known beside the kernel.
    pub fn reason(&self, limit: &str) -> Option<&str> {
        self.reasons.get(limit).map(String::as_str)
    }

    pub fn schedule(&self, limit: &str) -> Option<&str> {
        self.schedules.get(limit).map(String::as_str)
    }

    pub fn selected_index(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.shown.iter().position(|shown| key(&shown.limit) == *selected)
    }

    pub fn selected(&self) -> Option<&Shown> {
        self.shown.get(self.selected_index()?)
    }

    /// The cgroup whose sockets are wanted, if any.
    pub fn wanted_cgroup(&self) -> Option<&str> {
        match &self.selected()?.limit.status.scope {
            Scope::Cgroup(path) if self.detail => Some(path),
            _ => None,
        }
    }

    pub fn has_looked(&self) -> bool {
        self.looked
    }

    pub fn shows_detail(&self) -> bool {
        self.detail && self.selected_index().is_some()
    }

    pub fn shows_help(&self) -> bool {
        self.help
    }

    pub fn is_paused(&self) -> bool {
        self.paused
    }

    pub fn sort(&self) -> Sort {
        self.sort
    }

    pub fn interval(&self) -> Duration {
        self.interval
    }

    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    pub fn top_sockets(&self) -> Option<&TopSockets> {
        self.sockets.as_ref()
    }
}

fn samples(shown: &Shown) -> impl Iterator<Item = &DirectionSample> {
    shown.limit.sample.directions().map(|(_, sample)| sample)
}

fn used(shown: &Shown) -> u64 {
    samples(shown).map(|d| d.used_bit_s).fold(0, u64::saturating_add)
}

fn permille(shown: &Shown) -> u128 {
    samples(shown)
        .map(|d| u128::from(d.used_bit_s) * 1000 / u128::from(d.rate_bit_s.max(1)))
        .max()
        .unwrap_or(0)
}

fn dropped(shown: &Shown) -> u64 {
    samples(shown).map(|d| d.counters.dropped().0).fold(0, u64::saturating_add)
}
