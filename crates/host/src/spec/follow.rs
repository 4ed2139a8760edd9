//! Reads what a limit is on, and how it follows that: selectors, `each`, `required`, `move`, `schedule`.

use std::collections::BTreeMap;

use jiff::{Timestamp, Zoned};
use tidegate_core::{
    Scope,
    selector::{Selector, SelectorKind},
};

use super::{LimitSpec, Problem, Reader, Spec, SpecError, Table, Value, example, in_order};
use crate::{
    auto::Trees,
    pods::JOIN,
    schedule::{Days, MAX_ROWS, Row, Schedule, ScheduleError, TimeOfDay},
    settings::{Patch, RateSetting},
};

const SCOPE: &str = "scope";
const SCHEDULE: &str = "schedule";

/// How a limit follows what it is on, which comes and goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Follow {
    /// Each match has a limit of its own.
    pub each: bool,
    /// While it waits, something is wrong.
    pub required: bool,
    /// The processes of a program are moved into a cgroup of their own.
    pub moves: bool,
    /// Rates by the clock.
    pub schedule: Schedule,
}

/// A selector, or how a limit follows it, that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FollowProblem {
    #[error("`{0}` has no ending; write `{0}.service`, or another kind such as `{0}.scope`")]
    Unit(String),
    #[error("`{0}` is no slice; the name of one ends in `.slice`")]
    Slice(String),
    #[error("`{0}` is no name; leave `/` and spaces out")]
    Name(String),
    #[error("`{0}` is no label; write `KEY=VALUE` or `KEY`, with commas between several")]
    Label(String),
    #[error("`{0}` is no path of a program; write it from `/` on, without spaces")]
    Exe(String),
    #[error(
        "write for example `scope = {{ pod = {{ namespace = \"prod\", labels = \"app=api\" }} }}`"
    )]
    Pod,
    #[error("only with `exe` in the scope")]
    OnlyExe,
    #[error("only with a scope that may match several things, such as `unit = \"job-*.service\"`")]
    OnlySelectors,
    #[error(
        "it makes a limit for each match, and no other limit can be inside those; leave `each` out"
    )]
    ParentEach,
    #[error(
        "others are inside this limit; it needs a rate at all times: its own, and no row without one"
    )]
    ParentOff,
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
}

impl Follow {
    /// The flag of this name.
    pub(super) fn flag_mut(&mut self, name: &str) -> Option<&mut bool> {
        match name {
            "each" => Some(&mut self.each),
            "required" => Some(&mut self.required),
            "move" => Some(&mut self.moves),
            _ => None,
        }
    }
}

/// Whether a limit with these rates is one at all.
fn has_rate(patch: &Patch, has_parent: bool) -> bool {
    let asked = patch.asked();
    has_parent || asked.egress || asked.ingress
}

/// What is given of a limit whose schedule may be all that gives it a rate.
pub(super) fn checked(patch: &Patch, follow: &Follow, has_parent: bool) -> Patch {
    match follow.schedule.0.iter().find(|row| has_rate(&row.on(patch), has_parent)) {
        Some(row) if !has_rate(patch, has_parent) => row.on(patch),
        _ => *patch,
    }
}

impl Reader<'_> {
    pub(super) fn scope(&self, value: &Value<'_>) -> Result<Scope, SpecError> {
        let Some(table) = value.get_ref().as_table() else {
            return Err(self.wrong_type(value, SCOPE, "a table"));
        };
        let mut scope: Option<Scope> = None;
        for (key, value) in in_order(table) {
            let refuse = |problem| Err(self.at(&value.span(), Some(SCOPE), problem));
            let kind = key.get_ref().as_ref();
            if let (Some(Scope::Select(selector)), "args") = (&mut scope, kind)
                && selector.kind == SelectorKind::Exe
                && !selector.value.contains(' ')
            {
                selector.value += &format!(" {}", self.text(value, SCOPE)?);
                continue;
            }
            if kind == "args" && table.contains_key("exe") && scope.is_none() {
                return refuse(Problem::ArgsFirst);
            }
            if scope.is_some() {
                return refuse(Problem::ManyScopes);
            }
            scope = Some(match kind {
                "container" if value.get_ref().as_table().is_some() => self.labels(value)?,
                "pod" => self.pod(value)?,
                "cgroup" | "port" | "dev" | "unit" | "slice" | "user" | "container" | "exe" => {
                    let text = self.word(kind, value)?;
                    scope_of(kind, &text).map_err(|e| self.at(&value.span(), Some(SCOPE), e))?
                }
                other => {
                    let hint = "a scope has one of cgroup, unit, slice, user, container, pod, exe, dev and \
                                port";
                    let problem =
                        Problem::UnknownField { field: other.to_owned(), hint: hint.to_owned() };
                    return Err(self.at(&key.span(), Some(SCOPE), problem));
                }
            });
        }
        scope.ok_or_else(|| self.at(&value.span(), Some(SCOPE), Problem::Missing(example(SCOPE))))
    }

    /// The text of a kind of scope; a user may be a number.
    fn word(&self, kind: &str, value: &Value<'_>) -> Result<String, SpecError> {
        if let ("user", toml::de::DeValue::Integer(_)) = (kind, value.get_ref()) {
            return Ok(self.whole(value, SCOPE)?.to_string());
        }
        let example = match kind {
            "unit" => "scope = { unit = \"backup.service\" }",
            "slice" => "scope = { slice = \"batch.slice\" }",
            "user" => "scope = { user = \"anna\" }",
            "container" => "scope = { container = \"web\" }",
            "labels" => "scope = { container = { labels = \"app=web\" } }",
            "exe" => "scope = { exe = \"/usr/bin/rsync\" }",
            "dev" => "scope = { dev = \"eth0\" }",
            "port" => "scope = { port = \"tap0\" }",
            _ => example(SCOPE),
        };
        self.text(value, SCOPE).map(str::to_owned).map_err(|mut e| {
            if let Problem::Type { example: is, .. } = &mut e.problem {
                *is = example;
            }
            e
        })
    }

    /// `container = { labels = "app=web" }`.
    fn labels(&self, value: &Value<'_>) -> Result<Scope, SpecError> {
        let mut scope = None;
        for (key, labels) in value.get_ref().as_table().map(in_order).unwrap_or_default() {
            if key.get_ref().as_ref() != "labels" {
                let (field, hint) =
                    (key.get_ref().to_string(), "write `labels = \"app=web\"`".to_owned());
                return Err(self.at(
                    &key.span(),
                    Some(SCOPE),
                    Problem::UnknownField { field, hint },
                ));
            }
            let selected = select("labels", &self.word("labels", labels)?);
            scope = Some(selected.map_err(|e| self.at(&labels.span(), Some(SCOPE), e.into()))?);
        }
        let missing = Problem::Missing("scope = { container = { labels = \"app=web\" } }");
        scope.ok_or_else(|| self.at(&value.span(), Some(SCOPE), missing))
    }

    /// `pod = { namespace = "prod", labels = "app=api" }`.
    fn pod(&self, value: &Value<'_>) -> Result<Scope, SpecError> {
        let refuse = |value: &Value<'_>, e: FollowProblem| {
            Err(self.at(&value.span(), Some(SCOPE), e.into()))
        };
        let Some(table) = value.get_ref().as_table() else {
            return refuse(value, FollowProblem::Pod);
        };
        let (mut namespace, mut pod, mut labels) = (None, None, Vec::new());
        for (key, value) in in_order(table) {
            let kind = match key.get_ref().as_ref() {
                "namespace" | "name" => "container",
                "labels" => "labels",
                "join" => {
                    if self.flag(value, SCOPE)? {
                        let name = self.limit.as_deref().unwrap_or_default();
                        labels.push(format!("{JOIN}={name}"));
                    }
                    continue;
                }
                other => {
                    let hint = "a pod has namespace, name, labels and join".to_owned();
                    let problem = Problem::UnknownField { field: other.to_owned(), hint };
                    return Err(self.at(&key.span(), Some(SCOPE), problem));
                }
            };
            let text = self.text(value, SCOPE)?;
            if let Err(problem) = select(kind, text) {
                return refuse(value, problem);
            }
            match key.get_ref().as_ref() {
                "namespace" => namespace = Some(text),
                "name" => pod = Some(text),
                _ => labels.push(text.to_owned()),
            }
        }
        if namespace.is_none() && pod.is_none() && labels.is_empty() {
            return refuse(value, FollowProblem::Pod);
        }
        let mut selected = namespace.unwrap_or("*").to_owned();
        if pod.is_some() || !labels.is_empty() {
            selected += &format!("/{}", pod.unwrap_or("*"));
        }
        if !labels.is_empty() {
            selected += &format!("/{}", labels.join(","));
        }
        Ok(Scope::Select(Selector { kind: SelectorKind::Pod, value: selected }))
    }

    /// `[{ days = "mon-fri", from = "08:00", to = "18:00", egress = "10mbit" }]`.
    pub(super) fn schedule(&self, value: &Value<'_>) -> Result<Schedule, SpecError> {
        let Some(rows) = value.get_ref().as_array() else {
            return Err(self.wrong_type(value, SCHEDULE, "a list of tables"));
        };
        if rows.len() > MAX_ROWS {
            return Err(self.at(
                &value.span(),
                Some(SCHEDULE),
                FollowProblem::from(ScheduleError::TooMany).into(),
            ));
        }
        let rows = rows.iter().map(|row| match row.get_ref().as_table() {
            Some(table) => self.row(row, table),
            None => Err(self.wrong_type(row, SCHEDULE, "a table")),
        });
        Ok(Schedule(rows.collect::<Result<_, _>>()?))
    }

    fn row(&self, at: &Value<'_>, table: &Table<'_>) -> Result<Row, SpecError> {
        let (from, to) = (TimeOfDay::MIDNIGHT, TimeOfDay::END);
        let mut row = Row { days: Days::ALL, from, to, egress: None, ingress: None };
        for (key, value) in in_order(table) {
            let refuse = |e: ScheduleError| {
                self.at(&value.span(), Some(SCHEDULE), FollowProblem::from(e).into())
            };
            let rate = || self.parse::<RateSetting>(value, SCHEDULE).map(Some);
            match key.get_ref().as_ref() {
                "days" => row.days = self.text(value, SCHEDULE)?.parse().map_err(refuse)?,
                "from" => row.from = self.text(value, SCHEDULE)?.parse().map_err(refuse)?,
                "to" => row.to = self.text(value, SCHEDULE)?.parse().map_err(refuse)?,
                "egress" => row.egress = rate()?,
                "ingress" => row.ingress = rate()?,
                other => {
                    let hint = "a row has days, from, to, egress and ingress".to_owned();
                    let problem = Problem::UnknownField { field: other.to_owned(), hint };
                    return Err(self.at(&key.span(), Some(SCHEDULE), problem));
                }
            }
        }
        if row.egress.is_none() && row.ingress.is_none() {
            return Err(self.at(
                &at.span(),
                Some(SCHEDULE),
                FollowProblem::from(ScheduleError::NoRate).into(),
            ));
        }
        Ok(row)
    }

    /// Refuses what does not go with the scope, and a limit that would have no rate where others are inside.
    pub(super) fn check_follow(
        &self,
        follow: &Follow,
        scope: &Scope,
        (fields, patch): (&Table<'_>, &Patch),
        (has_parent, is_parent): (bool, bool),
    ) -> Result<(), SpecError> {
        let refuse = |field: &'static str, problem: FollowProblem| {
            let span = fields.get(field).map(toml::Spanned::span).unwrap_or_default();
            Err(self.at(&span, Some(field), problem.into()))
        };
        let is_exe = matches!(scope, Scope::Select(s) if s.kind == SelectorKind::Exe);
        if follow.moves && !is_exe {
            return refuse("move", FollowProblem::OnlyExe);
        }
        if follow.each && !matches!(scope, Scope::Select(_)) {
            return refuse("each", FollowProblem::OnlySelectors);
        }
        if follow.each && is_parent {
            return refuse("each", FollowProblem::ParentEach);
        }
        let off = |row: &Row| !has_rate(&row.on(patch), has_parent);
        let rows = &follow.schedule.0;
        if is_parent && !rows.is_empty() && (!has_rate(patch, has_parent) || rows.iter().any(off)) {
            return refuse(SCHEDULE, FollowProblem::ParentOff);
        }
        Ok(())
    }
}

/// The scope of a limit, from its kind and one word.
///
/// # Errors
/// [`Problem`] when nothing can be called so.
pub fn scope_of(kind: &str, text: &str) -> Result<Scope, Problem> {
    match kind {
        "cgroup" if text.trim().is_empty() => Err(Problem::EmptyCgroup),
        "cgroup" if text.split('/').any(|part| part == "." || part == "..") => {
            Err(Problem::CgroupPath(text.to_owned()))
        }
        "cgroup" => Ok(Scope::of_cgroup(text)),
        // A port of a software NIC may be in another network namespace.
        "port" | "dev" if !super::is_device_name(text.split('@').next().unwrap_or_default()) => {
            Err(Problem::DeviceName(text.to_owned()))
        }
        "port" => Ok(Scope::Port(text.to_owned())),
        "dev" => Ok(Scope::Dev(text.to_owned())),
        kind => select(kind, text).map_err(Problem::from),
    }
}

/// A selector that can match something.
fn select(kind: &str, text: &str) -> Result<Scope, FollowProblem> {
    let own = || text.to_owned();
    let is_name = !text.is_empty() && !text.contains(|c: char| c == '/' || c.is_whitespace());
    let kind = match kind {
        "unit" | "slice" | "user" | "container" if !is_name => {
            return Err(FollowProblem::Name(own()));
        }
        "unit" if !text.contains('.') => return Err(FollowProblem::Unit(own())),
        "unit" => SelectorKind::Unit,
        "slice" if !text.ends_with(".slice") => return Err(FollowProblem::Slice(own())),
        "slice" => SelectorKind::Slice,
        "user" => SelectorKind::User,
        "container" => SelectorKind::Container,
        "labels"
            if text.split(',').any(|label| label.trim().is_empty() || label.starts_with('=')) =>
        {
            return Err(FollowProblem::Label(own()));
        }
        "labels" => SelectorKind::Labels,
        _ if !text.starts_with('/') || text.contains(char::is_whitespace) => {
            return Err(FollowProblem::Exe(own()));
        }
        _ => SelectorKind::Exe,
    };
    Ok(Scope::Select(Selector { kind, value: own() }))
}

/// A schedule at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scheduled {
    /// The row that holds, in words.
    pub row: Option<String>,
    /// When the limit has other rates, and which: `egress 10mbit`, or `off`.
    pub change: Option<(Zoned, String)>,
}

impl Scheduled {
    fn of(limit: &LimitSpec, now: &Zoned) -> Scheduled {
        let LimitSpec { follow: Follow { schedule, .. }, patch, parent, .. } = limit;
        let change = schedule.change(now).map(|(when, row)| {
            let patch = row.map_or(*patch, |row| row.on(patch));
            let mut rates = Vec::new();
            for (name, rate) in [("egress", patch.egress), ("ingress", patch.ingress)] {
                if let Some(RateSetting::Limit(rate)) = rate {
                    rates.push(format!("{name} {rate}"));
                }
            }
            let rates = match rates.is_empty() {
                false => rates.join(", "),
                true if parent.is_some() => "no rate of its own".to_owned(),
                true => "off".to_owned(),
            };
            (when, rates)
        });
        Scheduled { row: schedule.at(now).0.map(Row::to_string), change }
    }
}

/// A spec as it is at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// The limits that have a rate then, with that.
    pub spec: Spec,
    /// Names of those that have none by their schedule, each with what is written of it.
    pub off: Vec<LimitSpec>,
    /// The schedules, by the names of their limits.
    pub scheduled: BTreeMap<String, Scheduled>,
    /// The next moment at which something may change.
    pub next: Option<Timestamp>,
}

impl Spec {
    /// What the schedules say at a moment.
    ///
    /// # Errors
    /// [`SpecError`] when a row asks for what a limit cannot have.
    pub fn at(&self, now: &Zoned) -> Result<Moment, SpecError> {
        let mut moment =
            Moment { spec: self.clone(), off: Vec::new(), scheduled: BTreeMap::new(), next: None };
        if self.limits.iter().all(|limit| limit.follow.schedule.0.is_empty()) {
            return Ok(moment);
        }
        let mut trees = Trees::default();
        for limit in &self.limits {
            trees.add(&limit.name, limit.scope.is_device(), limit.parent.as_deref());
        }
        moment.spec.limits.clear();
        for limit in &self.limits {
            let mut limit = limit.clone();
            let (row, next) = limit.follow.schedule.at(now);
            moment.next = moment.next.into_iter().chain(next).min();
            if !limit.follow.schedule.0.is_empty() {
                let row = row.cloned();
                moment.scheduled.insert(limit.name.clone(), Scheduled::of(&limit, now));
                let patch = row.map_or(limit.patch, |row| row.on(&limit.patch));
                if !has_rate(&patch, limit.parent.is_some()) {
                    moment.off.push(limit);
                    continue;
                }
                self.set(&mut limit, patch, &trees)?;
            }
            moment.spec.limits.push(limit);
        }
        Ok(moment)
    }

    /// Gives a limit other rates.
    fn set(&self, limit: &mut LimitSpec, patch: Patch, trees: &Trees) -> Result<(), SpecError> {
        limit.patch = patch;
        limit.asked = patch.asked();
        let options = limit.written().options(trees, tidegate_core::choice::Kernel::WHOLE, None);
        limit.options = options.map_err(|e| SpecError::of(&self.file, limit, e))?;
        Ok(())
    }

    /// Refuses rows that ask for what their limit cannot have.
    pub(super) fn check_rows(&self) -> Result<(), SpecError> {
        let mut trees = Trees::default();
        for limit in &self.limits {
            trees.add(&limit.name, limit.scope.is_device(), limit.parent.as_deref());
        }
        for limit in &self.limits {
            for row in &limit.follow.schedule.0 {
                let (mut limit, patch) = (limit.clone(), row.on(&limit.patch));
                if has_rate(&patch, limit.parent.is_some()) {
                    self.set(&mut limit, patch, &trees)?;
                }
            }
        }
        Ok(())
    }
}
