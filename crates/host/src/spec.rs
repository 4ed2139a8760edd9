//! The spec file: TOML in, well-formed limits out.
//!
//! Parse, don't validate: every [`Spec`] that exists can be planned. The file is walked by hand rather than
//! through serde's derive, so that each refusal knows its line, its limit and its field, and can say what
//! to type instead. The first error of the file, from the top, is the one reported.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    ops::Range,
    path::Path,
    str::FromStr,
};

use tidegate_core::{Scheme, Scope, choice::Kernel, prefixes::Prefix, units::ParseError};
use tidegate_sys::{
    files::open_regular,
    limit::LimitOptions,
    store::{self, MAX_LIMITS, is_above},
};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::absent::ScopeError;
use crate::auto::{Trees, Written};
use crate::family::{self, FamilyError, FamilyProblem, Member};
use crate::fleet::url;
use crate::fleet::{FleetError, FleetSpec, GroupSpec};
use crate::key::{self, Kind};
use crate::nic::{NicError, NicSpec};
use crate::plan;
use crate::settings::{
    Asked, Patch, SettingsError, SettingsProblem,
    fields::{self, Field},
};
use crate::tree::{Parents, are_strangers};

/// The largest file that is read: far above [`MAX_LIMITS`] limits.
pub const MAX_SPEC_BYTES: u64 = 4 << 20;
/// Longest name of a device, in bytes.
const MAX_DEVICE_BYTES: usize = 15;

/// A well-formed spec: names and cgroups are unique in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// As named by the user.
    pub file: String,
    /// The limits that are put on this host and stay, in the order of the file.
    pub limits: Vec<LimitSpec>,
    /// The software NICs, in the order of the file, with the limits that hold while they run.
    pub nics: Vec<NicSpec>,
    /// The node of a fleet that this host is.
    pub fleet: Option<FleetSpec>,
    /// The groups that limits of this host are in, in the order of the file.
    pub groups: Vec<GroupSpec>,
    /// Containers may have rates by their labels.
    pub labels: bool,
    /// Pods may have rates by their annotations.
    pub annotations: bool,
    /// Nothing is written in it; `limit = []` says that there shall be no limits.
    pub blank: bool,
}

/// One `[[limit]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitSpec {
    pub name: String,
    /// Its cgroup or device as written.
    pub scope: Scope,
    /// What it does. With a parent that is not in the file its directions are only known on a host.
    pub options: LimitOptions,
    /// The name of its parent, in the file or on the host.
    pub parent: Option<String>,
    /// With a parent: the directions for which a rate of its own was written.
    pub asked: Asked,
    /// As it was written.
    pub patch: Patch,
    /// How it follows what it is on.
    pub follow: Follow,
    /// The line on which it starts, from 1.
    pub line: usize,
}

impl LimitSpec {
    /// As it was written, for [`Written::options`].
    pub fn written(&self) -> Written<'_> {
        let (name, parent) = (self.name.as_str(), self.parent.as_deref());
        Written { name, scope: &self.scope, parent, patch: &self.patch }
    }
}

/// Why a file is no spec: where, and what to type instead. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", place(.file, .line, .limit, .field))]
pub struct SpecError {
    /// As named by the user.
    pub file: String,
    /// From 1; `None` for the file as a whole.
    pub line: Option<usize>,
    /// Name of the limit, if it is known.
    pub limit: Option<String>,
    /// The field.
    pub field: Option<&'static str>,
    /// What is wrong.
    pub problem: Problem,
}

impl SpecError {
    /// An error in the settings of a limit of a file.
    pub(crate) fn of(file: &str, limit: &LimitSpec, error: SettingsError) -> SpecError {
        SpecError {
            file: file.to_owned(),
            line: Some(limit.line),
            limit: Some(limit.name.clone()),
            field: Some(error.field),
            problem: error.problem.into(),
        }
    }
}

/// `limits.toml:7: limit `a`: egress`, as far as it is known.
fn place(file: &str, line: &Option<usize>, limit: &Option<String>, field: &Option<&str>) -> String {
    let mut place = file.to_owned();
    place.extend(line.map(|line| format!(":{line}")));
    place.extend(limit.as_ref().map(|name| format!(": limit `{name}`")));
    place.extend(field.map(|field| format!(": {field}")));
    place
}

/// What is wrong with a spec.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    /// A directory.
    #[error("is a directory; name a file such as limits.toml")]
    Directory,
    /// Larger than [`MAX_SPEC_BYTES`].
    #[error("is larger than {} MiB; is it a spec?", MAX_SPEC_BYTES >> 20)]
    TooLarge,
    /// No text.
    #[error("is not UTF-8 text; is it a spec?")]
    NotText,
    /// No TOML.
    #[error("not TOML: {message}, in `{line}`")]
    Syntax { message: String, line: String },
    /// A key that is not read.
    #[error("unknown field `{field}`; {hint}")]
    UnknownField { field: String, hint: String },
    /// A key that must be there.
    #[error("missing; write for example `{0}`")]
    Missing(&'static str),
    /// A value of another type.
    #[error("expected {expected}, found {found}; write for example `{example}`")]
    Type {
        expected: &'static str,
        found: String,
        /// A line that would have been read.
        example: &'static str,
    },
    /// The name is none.
    #[error(transparent)]
    Name(store::StoreError),
    /// The name is taken.
    #[error("a limit of this name is on line {0} already; give each its own name")]
    SameName(usize),
    /// The cgroup is taken.
    #[error(
        "limit `{name}` on line {line} has this {kind} already; put both directions in one limit{}",
        match *kind {
            "cgroup" => ", write one as the parent of the other, or limit a cgroup above or below it",
            "dev" | "port" => "",
            _ => ", or write one as the parent of the other",
        }
    )]
    SameScope {
        /// `cgroup`, `dev` or `port`.
        kind: &'static str,
        name: String,
        line: usize,
    },
    /// The cgroup's path is none.
    #[error("`{0}` is no cgroup path; write it relative to the cgroup mount, without `.` and `..`")]
    CgroupPath(String),
    /// No path at all.
    #[error(
        "empty path; write for example `system.slice/backup.service`, or `/` for the whole host"
    )]
    EmptyCgroup,
    /// The name of a device is none.
    #[error("`{0}` is no device name; write it as `ip link` shows it, for example `eth0`")]
    DeviceName(String),
    /// More than one scope.
    #[error(
        "more than one scope; write one of cgroup, unit, slice, user, container, pod, exe, dev and port"
    )]
    ManyScopes,
    /// Arguments of a program that is not known yet.
    #[error("write `exe` before `args`")]
    ArgsFirst,
    /// A selector, or a schedule.
    #[error(transparent)]
    Follow(#[from] FollowProblem),
    /// The cgroup or device does not exist on this host.
    #[error(transparent)]
    Scope(ScopeError),
    /// A rate, size or time.
    #[error(transparent)]
    Unit(#[from] ParseError),
    /// A software NIC, or a limit of one.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// A fleet, or a group of it.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// The prefix is taken.
    #[error(
        "limit `{name}` on line {line} has {prefix} of this {kind} already; give it to one of them"
    )]
    SamePrefix {
        /// `dev` or `port`.
        kind: &'static str,
        prefix: Prefix,
        name: String,
        line: usize,
    },
    /// Values that do not go together.
    #[error(transparent)]
    Settings(#[from] SettingsProblem),
    /// A limit that cannot be where it is in its tree.
    #[error(transparent)]
    Family(#[from] FamilyProblem),
    /// Too many.
    #[error("more than {MAX_LIMITS} limits")]
    TooMany,
}

/// What people write for fields that are called otherwise here.
const SYNONYMS: [(&str, &str); 13] = [
    ("rate", "write `egress`, `ingress` or both"),
    ("limit", "write `egress`, `ingress` or both"),
    ("bandwidth", "write `egress`, `ingress` or both"),
    ("upload", "write `egress`"),
    ("download", "write `ingress`"),
    ("min", "write `guarantee`, in a limit with a `parent`"),
    ("max", "write `ceiling`, in a limit with a `parent`"),
    ("ceil", "write `ceiling`"),
    ("share", "write `weight`, in a limit with a `parent`"),
    ("inside", "write `parent = \"NAME\"`"),
    ("cgroup", "write `scope = { cgroup = \"...\" }`"),
    ("unit", "write `scope = { unit = \"NAME.service\" }`"),
    ("service", "write `scope = { unit = \"NAME.service\" }`"),
];

/// A limit as read.
struct ReadLimit {
    name: String,
    scope: Scope,
    parent: Option<String>,
    patch: Patch,
    follow: Follow,
    /// What it does on this host; `None` if its software NIC does it, while that runs.
    options: Option<LimitOptions>,
}

type Table<'i> = DeTable<'i>;
type Value<'i> = Spanned<DeValue<'i>>;

impl Spec {
    /// Reads a file; `-` is standard input.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn read(path: &Path) -> Result<Spec, SpecError> {
        if path == Path::new("-") {
            return Spec::read_from(path, Ok(io::stdin().lock()));
        }
        Spec::read_from(path, File::open(path))
    }

    /// The same of a regular file only: for a process that runs on and must not wait for a pipe.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn read_regular(path: &Path) -> Result<Spec, SpecError> {
        Spec::read_from(path, open_regular(path))
    }

    fn read_from(path: &Path, from: io::Result<impl Read>) -> Result<Spec, SpecError> {
        let file = path.display().to_string();
        let refuse = |problem| SpecError {
            file: file.clone(),
            line: None,
            limit: None,
            field: None,
            problem,
        };
        let mut bytes = Vec::new();
        let read = from.and_then(|f| f.take(MAX_SPEC_BYTES + 1).read_to_end(&mut bytes));
        read.map_err(|e| match e.kind() {
            io::ErrorKind::IsADirectory => refuse(Problem::Directory),
            _ => refuse(Problem::Unreadable(e)),
        })?;
        if bytes.len() as u64 > MAX_SPEC_BYTES {
            return Err(refuse(Problem::TooLarge));
        }
        let text = String::from_utf8(bytes).map_err(|_| refuse(Problem::NotText))?;
        Spec::parse(&file, &text)
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn parse(file: &str, text: &str) -> Result<Spec, SpecError> {
        let line_ends: Vec<_> = text.match_indices('\n').map(|(at, _)| at).collect();
        let reader = Reader { file, line_ends: &line_ends, limit: None };
        let root = DeTable::parse(text).map_err(|e| {
            let span = e.span().unwrap_or(0..0);
            let message = e.message().lines().collect::<Vec<_>>().join(", ");
            let line = text.lines().nth(reader.line(&span) - 1).unwrap_or_default().trim();
            let line = url::shown(line).chars().take(60).collect();
            let problem = Problem::Syntax { message, line };
            reader.at(&span, None, problem)
        })?;
        let (mut limits, mut nics) = (None, Vec::new());
        let (mut fleet, mut groups) = (None, Vec::new());
        let (mut labels, mut annotations) = (None, None);
        for (key, value) in in_order(root.get_ref()) {
            match key.get_ref().as_ref() {
                "limit" => limits = Some(reader.limits(value)?),
                "nic" => nics = reader.nics(value)?,
                "fleet" => fleet = Some(reader.fleet(value)?),
                "group" => groups = reader.groups(value)?,
                "labels" => labels = Some(reader.flag(value, "labels")?),
                "annotations" => annotations = Some(reader.flag(value, "annotations")?),
                other => {
                    let hint = match other {
                        "limits" => "did you mean `[[limit]]`?".to_owned(),
                        "nics" => "did you mean `[[nic]]`?".to_owned(),
                        "groups" => "did you mean `[[group]]`?".to_owned(),
                        "daemon" => "write `[fleet]`".to_owned(),
                        _ if key::find(fields::keys(), other).is_some() => {
                            "it belongs into a limit: write `[[limit]]` on a line above it"
                                .to_owned()
                        }
                        _ => {
                            "a spec is made of `[[limit]]`, `[[nic]]` and `[[group]]` tables, one \
                              `[fleet]`, `labels` and `annotations`"
                                .to_owned()
                        }
                    };
                    let problem = Problem::UnknownField { field: other.to_owned(), hint };
                    return Err(reader.at(&key.span(), None, problem));
                }
            }
        }
        let (limits, of_nics) = limits.unwrap_or_default();
        for limit in of_nics {
            reader.hand_over(limit, &mut nics)?;
        }
        let groups = reader.check_groups(groups, fleet.as_ref(), &limits)?;
        let (labels, annotations) = (labels.unwrap_or_default(), annotations.unwrap_or_default());
        let (file, blank) = (file.to_owned(), root.get_ref().is_empty());
        let spec = Spec { file, limits, nics, fleet, groups, labels, annotations, blank };
        spec.check_rows()?;
        Ok(spec)
    }
}

impl Spec {
    /// What is wrong with the trees of limits that a plan would make, said of the file's line where the limit
    /// is in the file.
    ///
    /// # Errors
    /// The error as it was, when the limit is not in the file.
    pub fn locate(&self, error: FamilyError) -> Result<SpecError, FamilyError> {
        let limit = self.limits.iter().find(|limit| limit.name == error.name);
        let Some(line) = limit.map(|limit| limit.line) else { return Err(error) };
        Ok(SpecError {
            file: self.file.clone(),
            line: Some(line),
            limit: Some(error.name),
            field: Some(error.field),
            problem: error.problem.into(),
        })
    }
}

/// The entries of a table in the order of the file.
fn in_order<'t, 'i>(
    table: &'t Table<'i>,
) -> Vec<(&'t Spanned<std::borrow::Cow<'i, str>>, &'t Value<'i>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

/// Which limits of a file are inside which, as far as it is well-formed.
fn trees(tables: &[Value<'_>]) -> Trees {
    let mut trees = Trees::default();
    for fields in tables.iter().filter_map(|table| table.get_ref().as_table()) {
        let text = |field| fields.get(field).and_then(|value| value.get_ref().as_str());
        let scope = fields.get("scope").and_then(|value| value.get_ref().as_table());
        let on_device = scope.is_some_and(|s| s.contains_key("dev") || s.contains_key("port"));
        trees.add(text("name").unwrap_or_default(), on_device, text("parent"));
    }
    trees
}

/// Turns places of the text into lines.
struct Reader<'a> {
    file: &'a str,
    /// The places of line feeds.
    line_ends: &'a [usize],
    limit: Option<String>,
}

impl Reader<'_> {
    fn line(&self, span: &Range<usize>) -> usize {
        1 + self.line_ends.partition_point(|end| *end < span.start)
    }

    fn at(&self, span: &Range<usize>, field: Option<&'static str>, problem: Problem) -> SpecError {
        SpecError {
            file: self.file.to_owned(),
            line: Some(self.line(span)),
            limit: self.limit.clone(),
            field,
            problem,
        }
    }

    fn wrong_type(
        &self,
        value: &Value<'_>,
        field: &'static str,
        expected: &'static str,
    ) -> SpecError {
        let found = match value.get_ref() {
            DeValue::String(text) => format!("the text \"{}\"", url::shown(text)),
            DeValue::Integer(number) => format!("the bare number {number}"),
            DeValue::Float(number) => format!("the bare number {number}"),
            DeValue::Boolean(value) => format!("`{value}`"),
            DeValue::Datetime(time) => format!("the date {time}"),
            DeValue::Array(_) => "a list".to_owned(),
            DeValue::Table(_) => "a table".to_owned(),
        };
        let example = match field {
            "limit" => "[[limit]]",
            "nic" => "[[nic]]",
            "group" => "[[group]]",
            "fleet" => "[fleet]",
            "labels" => "labels = true",
            "annotations" => "annotations = true",
            _ => example(field),
        };
        self.at(&value.span(), Some(field), Problem::Type { expected, found, example })
    }

    /// Those that stay on the host, and those of software NICs.
    fn limits(&self, value: &Value<'_>) -> Result<(Vec<LimitSpec>, Vec<nic::Carousel>), SpecError> {
        let Some(tables) = value.get_ref().as_array() else {
            return Err(self.wrong_type(value, "limit", "double brackets"));
        };
        let (mut limits, mut of_nics) = (Vec::new(), Vec::new());
        // Name and line of each.
        let mut by_name: BTreeMap<String, usize> = BTreeMap::new();
        let mut by_scope: BTreeMap<plan::Part, Vec<(String, usize)>> = BTreeMap::new();
        // On one cgroup: the names of both, and what is wrong unless one is inside the other.
        let mut beside = Vec::new();
        let trees = trees(tables);
        for table in tables.iter() {
            let Some(fields) = table.get_ref().as_table() else {
                return Err(self.wrong_type(table, "limit", "a table"));
            };
            let name = fields.get("name").and_then(|name| name.get_ref().as_str());
            let reader = Reader { limit: name.map(str::to_owned), ..*self };
            let ReadLimit { name, scope, parent, patch, follow, options } =
                reader.limit(fields, &table.span(), &trees)?;
            if by_name.len() == MAX_LIMITS {
                return Err(reader.at(&table.span(), None, Problem::TooMany));
            }
            let line = self.line(&table.span());
            let field_span = |field| fields.get(field).map_or(table.span(), Spanned::span);
            if let Some(line) = by_name.insert(name.clone(), line) {
                let problem = Problem::SameName(line);
                return Err(reader.at(&field_span("name"), Some("name"), problem));
            }
            let prefixes = options.as_ref().map_or_else(|| vec![None], plan::places_of);
            for prefix in prefixes {
                let others = by_scope.entry((normal(&scope), prefix)).or_default();
                for (other, line) in others.iter().cloned() {
                    let (kind, first) = (scope.kind(), other.clone());
                    let (field, problem) = match prefix {
                        None => ("scope", Problem::SameScope { kind, name: other, line }),
                        Some(prefix) => {
                            ("match", Problem::SamePrefix { kind, prefix, name: other, line })
                        }
                    };
                    let refused = reader.at(&field_span(field), Some(field), problem);
                    if scope.is_device() {
                        return Err(refused);
                    }
                    beside.push((first, name.clone(), refused));
                }
                others.push((name.clone(), line));
            }
            match options {
                Some(options) => {
                    let asked = patch.asked();
                    limits.push(LimitSpec {
                        name,
                        scope,
                        options,
                        parent,
                        asked,
                        patch,
                        follow,
                        line,
                    });
                }
                None => of_nics.push(nic::Carousel {
                    name,
                    scope,
                    patch,
                    line,
                    at: field_span("scope"),
                }),
            }
        }
        if let Some(refused) = not_kin(&limits, beside) {
            return Err(refused);
        }
        self.resolve_families(&mut limits, tables)?;
        Ok((limits, of_nics))
    }

    /// Checks the trees of limits as far as the file alone tells, and gives each limit the directions of its
    /// parent.
    fn resolve_families(
        &self,
        limits: &mut [LimitSpec],
        tables: &[Value<'_>],
    ) -> Result<(), SpecError> {
        let member = |limit: &LimitSpec| {
            let LimitSpec { name, scope, options, parent, asked, .. } = limit.clone();
            // Only a host knows how a cgroup's path is written.
            let scope = Some(scope).filter(Scope::is_device);
            let members = Vec::new();
            Member { name, scope, members, options, parent, asked, detached: false, stays: false }
        };
        let mut members: Vec<_> = limits.iter().map(member).collect();
        let resolved = family::resolve(&mut members, false);
        let resolved = resolved.and_then(|()| above_their_parents(limits).map_or(Ok(()), Err));
        if let Err(FamilyError { name, field, problem }) = resolved {
            let span = tables.iter().find_map(|table| {
                let fields = table.get_ref().as_table()?;
                let is_it = fields.get("name")?.get_ref().as_str()? == name;
                is_it.then(|| fields.get(field).map_or(table.span(), Spanned::span))
            });
            let reader = Reader { limit: Some(name), ..*self };
            return Err(reader.at(&span.unwrap_or_default(), Some(field), problem.into()));
        }
        limits.iter_mut().zip(members).for_each(|(limit, member)| limit.options = member.options);
        Ok(())
    }

    fn limit(
        &self,
        fields: &Table<'_>,
        span: &Range<usize>,
        trees: &Trees,
    ) -> Result<ReadLimit, SpecError> {
        let (mut patch, mut follow) = (Patch::default(), Follow::default());
        let (mut name, mut scope, mut parent) = (None, None, None);
        for (key, value) in in_order(fields) {
            match key.get_ref().as_ref() {
                "name" => name = Some(self.limit_name(value, "name")?),
                "scope" => scope = Some(self.scope(value)?),
                "parent" => parent = Some(self.limit_name(value, "parent")?),
                "schedule" => follow.schedule = self.schedule(value)?,
                flag @ ("each" | "required" | "move") => {
                    let set = self.flag(value, flag_name(flag))?;
                    follow.flag_mut(flag).into_iter().for_each(|flag| *flag = set);
                }
                other => match fields::find(other) {
                    Some(field) => self.setting(field, value, &mut patch)?,
                    None => {
                        let problem =
                            Problem::UnknownField { field: other.to_owned(), hint: hint(other) };
                        return Err(self.at(&key.span(), None, problem));
                    }
                },
            }
        }
        let missing = |field| self.at(span, Some(field), Problem::Missing(example(field)));
        let name = name.ok_or_else(|| missing("name"))?;
        let scope = scope.ok_or_else(|| missing("scope"))?;
        let refuse = |SettingsError { field, problem }| {
            let span = fields.get(field).map_or(span.clone(), Spanned::span);
            self.at(&span, Some(field), problem.into())
        };
        let parent_name = parent.as_deref();
        let given = follow::checked(&patch, &follow, parent.is_some());
        let written = Written { name: &name, scope: &scope, parent: parent_name, patch: &given };
        self.check_follow(
            &follow,
            &scope,
            (fields, &patch),
            (parent.is_some(), trees.is_parent(&name)),
        )?;
        if written.is_named(Scheme::Carousel) && scope.is_device() && parent.is_none() {
            self.check_carousel(&patch, fields, span)?;
            return Ok(ReadLimit { name, scope, parent, patch, follow, options: None });
        }
        // Of a kernel that has everything: what this host has is asked when the limits are planned.
        let options = written.options(trees, Kernel::WHOLE, None).map_err(refuse)?;
        Ok(ReadLimit { name, scope, parent, patch, follow, options: Some(options) })
    }

    fn text<'v>(&self, value: &'v Value<'_>, field: &'static str) -> Result<&'v str, SpecError> {
        value.get_ref().as_str().ok_or_else(|| self.wrong_type(value, field, "a text in quotes"))
    }

    fn flag(&self, value: &Value<'_>, field: &'static str) -> Result<bool, SpecError> {
        value
            .get_ref()
            .as_bool()
            .ok_or_else(|| self.wrong_type(value, field, "`true` or `false` without quotes"))
    }

    fn limit_name(&self, value: &Value<'_>, field: &'static str) -> Result<String, SpecError> {
        let text = self.text(value, field)?;
        let refuse = |e| self.at(&value.span(), Some(field), Problem::Name(e));
        store::check_name(text).map_err(refuse)?;
        Ok(text.to_owned())
    }

    /// Reads one setting, by its kind.
    fn setting(
        &self,
        field: &'static Field,
        value: &Value<'_>,
        patch: &mut Patch,
    ) -> Result<(), SpecError> {
        let name = field.key.name;
        let refuse =
            |span: Range<usize>| move |e: SettingsProblem| self.at(&span, Some(name), e.into());
        let text = match field.key.kind {
            Kind::Meter => return self.meter(value, patch),
            Kind::Actions => return self.actions(value, patch),
            Kind::Flag => self.flag(value, name)?.to_string(),
            Kind::Whole(..) => self.whole(value, name)?.to_string(),
            Kind::List if value.get_ref().as_str().is_none() => {
                let items = self.list(value, name)?;
                for (item, at) in &items {
                    field.set(&mut Patch::default(), item).map_err(refuse(at.span()))?;
                }
                let items: Vec<_> = items.into_iter().map(|(item, _)| item).collect();
                if items.is_empty() { "none".to_owned() } else { items.join(",") }
            }
            _ => self.text(value, name)?.to_owned(),
        };
        field.set(patch, &text).map_err(refuse(value.span()))
    }

    fn list<'t, 'i>(
        &self,
        value: &'t Value<'i>,
        field: &'static str,
    ) -> Result<Vec<(&'t str, &'t Value<'i>)>, SpecError> {
        let Some(list) = value.get_ref().as_array() else {
            return Err(self.wrong_type(value, field, "a list"));
        };
        list.iter().map(|one| Ok((self.text(one, field)?, one))).collect()
    }

    fn whole(&self, value: &Value<'_>, field: &'static str) -> Result<i64, SpecError> {
        let wrong = || self.wrong_type(value, field, "a whole number without quotes");
        let integer = value.get_ref().as_integer().ok_or_else(wrong)?;
        // One that is too large for the type is too large for the field.
        Ok(i64::from_str_radix(integer.as_str(), integer.radix()).unwrap_or(i64::MAX))
    }

    fn parse<T>(&self, value: &Value<'_>, field: &'static str) -> Result<T, SpecError>
    where
        T: FromStr,
        T::Err: Into<Problem>,
    {
        let text = self.text(value, field)?;
        text.parse().map_err(|e: T::Err| self.at(&value.span(), Some(field), e.into()))
    }
}

/// A line with this key, of whatever table.
fn example(name: &str) -> &'static str {
    let keys = fields::keys().chain(&nic::KEYS).chain(&fleet::KEYS).chain(&fleet::GROUP_KEYS);
    key::find(keys, name).map_or("", |key| key.example)
}

/// The key of this name, which there is.
fn flag_name(name: &str) -> &'static str {
    key::find(fields::keys(), name).map_or("", |key| key.name)
}

/// What to type instead of a field that a limit does not have.
fn hint(field: &str) -> String {
    if matches!(field, "labels" | "annotations" | "fleet") {
        return "it belongs at the top of the file, above the first `[[limit]]`".to_owned();
    }
    let synonym = SYNONYMS.iter().find(|(name, _)| *name == field);
    synonym
        .map_or_else(|| key::hint(fields::keys(), "limit", field), |(_, hint)| (*hint).to_owned())
}

/// The first error of two limits on one cgroup of which neither is inside the other, as far as a file tells.
fn not_kin(limits: &[LimitSpec], beside: Vec<(String, String, SpecError)>) -> Option<SpecError> {
    let parents = limits.iter().map(|limit| (limit.name.as_str(), limit.parent.as_deref()));
    let parents: Parents<'_> = parents.collect();
    let refused = beside.into_iter().find(|(one, other, _)| are_strangers(one, other, &parents));
    refused.map(|(_, _, error)| error)
}

/// The first limit on a cgroup that contains that of its parent, as far as a file tells: only a host knows
/// how the mount's path is written.
fn above_their_parents(limits: &[LimitSpec]) -> Option<FamilyError> {
    let scopes: BTreeMap<_, _> =
        limits.iter().map(|limit| (&limit.name, normal(&limit.scope))).collect();
    limits.iter().find_map(|limit| {
        let parent = limit.parent.clone()?;
        let (scope, parent_scope) = (normal(&limit.scope), scopes.get(&parent)?.clone());
        let (Scope::Cgroup(path), Scope::Cgroup(above)) = (&scope, &parent_scope) else {
            return None;
        };
        is_above(path, above).then(|| FamilyError {
            name: limit.name.clone(),
            field: "parent",
            problem: FamilyProblem::NotAbove { scope, parent, parent_scope },
        })
    })
}

/// Two spellings of one path are the same.
fn normal(scope: &Scope) -> Scope {
    match scope {
        Scope::Cgroup(path) => {
            let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).collect();
            Scope::Cgroup(parts.join("/"))
        }
        device => device.clone(),
    }
}

mod fleet;
mod follow;
mod nic;
mod police;
mod schema;
mod tolerant;

pub use follow::{Follow, FollowProblem, Moment, Scheduled, scope_of};

pub use schema::schema;

/// Whether the kernel would take it for a device.
pub fn is_device_name(name: &str) -> bool {
    (1..=MAX_DEVICE_BYTES).contains(&name.len())
        && !name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c == '\0')
        && name != "."
        && name != ".."
}

#[cfg(test)]
mod fleet_tests;
#[cfg(test)]
mod tests;
