//! What must be done so that the limits of a host are as a spec says. Pure: no kernel is asked.
//!
//! - A limit of the spec that runs the programs of another build gets those of this one, in place.
//! - A limit of the spec that the host does not have is added; one with other settings is changed in place.
//! - One on another cgroup or device than the spec says, or whose programs somebody took off, or that
//!   gets other programs, is replaced: the new one comes first, then the old one goes.
//! - A limit that gets, loses or changes its parent is replaced, and so are all that are inside one that
//!   is: a child works with the maps of its parent.
//! - A limit that only the host has is left alone, unless the plan prunes. One inside a limit of the spec
//!   stays as it is, taken off and put on again with that, and limited in the directions in which that is.
//!
//! - A limit with a selector stays while its cgroups join and leave.
//!
//! Order: changes; then cgroups that join, additions and replacements, parents before children; then whatever
//! is taken off and cgroups that leave, children before parents. So nothing is unlimited meanwhile. A limit
//! goes first only where nothing is limited by it any more, or where another one needs what only one can
//! have: the HTB or the program in XDP of a device, or a prefix. Planning n limits takes O(n log n).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use tidegate_core::{
    Scheme, Scope, class::MAX_DEPTH, police::Hook, prefixes::Prefix,
    queue_options::VirtualQueueOptions,
};
use tidegate_sys::{limit::LimitOptions, schemes::needs_other_programs};

use crate::{
    family::{self, FamilyError, Member},
    settings::{Asked, Difference, differences, is_parents},
    tree::{Parents, are_kin, tree},
};

/// A limit that shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub name: String,
    /// Its cgroup or device, which exists, or its selector.
    pub scope: Scope,
    /// The cgroups that its selector matches.
    pub members: Vec<String>,
    pub options: LimitOptions,
    /// The name of its parent.
    pub parent: Option<String>,
    /// With a parent: the directions for which it was given a rate of its own.
    pub asked: Asked,
}

/// A limit that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    pub name: String,
    /// Its cgroup or device, or where it was, or its selector.
    pub scope: Scope,
    /// With a selector: its cgroups that exist ...
    pub members: Vec<String>,
    /// ... and those that have been removed.
    pub gone: Vec<String>,
    /// Whether it is enforced.
    pub state: State,
    /// What it does; one that cannot be read, and of which nobody wrote down what it does, has no direction.
    pub options: LimitOptions,
    /// The name of its parent.
    pub parent: Option<String>,
    /// Whose programs it runs, if they are those of another build.
    pub other_build: Option<String>,
}

impl Present {
    /// Whether it can be put on again as it was.
    pub fn is_known(&self) -> bool {
        let Present { options: LimitOptions { egress, ingress, .. }, .. } = self;
        self.state != State::Broken || egress.is_some() || ingress.is_some()
    }
}

impl Wanted {
    /// A limit that is, once more.
    pub fn again(limit: Present) -> Wanted {
        let Present { name, scope, members, options, parent, .. } = limit;
        let is_own = |queue: Option<VirtualQueueOptions>| {
            parent.is_some() && queue.is_some_and(|queue| !is_parents(&options, queue.rate))
        };
        let asked = Asked { egress: is_own(options.egress), ingress: is_own(options.ingress) };
        Wanted { name, scope, members, options, parent, asked }
    }
}

/// Whether a limit is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It is.
    InForce,
    /// Its cgroup or device has been removed.
    ScopeGone,
    /// The same, and another one of its name is there.
    Anew,
    /// Its selector matches no cgroup now. The next one joins it.
    NoMembers,
    /// Its cgroup or device is there, but its programs were taken off.
    Detached,
    /// With scheme `edt`: a device keeps no departure times, so that the limit only polices.
    NoFq,
    /// It cannot be read: another version has put it on, or a pin is lost. Nobody knows what it does.
    Broken,
}

impl State {
    /// Whether nothing is left of what it was on.
    pub fn is_gone(self) -> bool {
        matches!(self, State::ScopeGone | State::Anew)
    }
}

/// One step. Each can be undone, save the taking off of a limit whose cgroup or device is gone.
#[allow(
    clippy::large_enum_variant,
    reason = "a plan is made once, and its steps are not moved about"
)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Take a limit off.
    Remove { limit: Present, reason: Reason },
    /// Change it in place.
    Change { name: String, scope: Scope, from: LimitOptions, to: LimitOptions },
    /// Have cgroups join or leave a limit with a selector.
    Members {
        name: String,
        scope: Scope,
        /// Those that join; none in a step in which others leave.
        join: Vec<String>,
        /// Those that leave, or have been removed.
        leave: Vec<String>,
        /// All that it has before.
        from: Vec<String>,
        /// ... and after.
        to: Vec<String>,
    },
    /// Have it go on with the programs of this build.
    TakeOver { limit: Present },
    /// Put another limit in the place of one of its name.
    Replace {
        from: Present,
        /// Why it cannot be changed in place.
        reason: Reason,
        to: Wanted,
    },
    /// Put a limit on.
    Add { limit: Wanted },
}

/// Why a limit is taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The spec does not have it, and the plan prunes.
    Pruned,
    /// The spec has it on another cgroup or device.
    Moved,
    /// The spec has it with a scheme of other programs, or exempts somebody where nobody was, or nobody.
    OtherPrograms,
    /// Its cgroup or device is gone; it is put on the one that has taken its place.
    ScopeGone,
    /// Somebody took its programs off; it is put on again.
    Detached,
    /// It cannot be read; it is put on anew.
    Broken,
    /// The spec has it inside another limit, or inside none.
    OtherParent,
    /// Its parent is taken off and put on again, and it with that.
    WithParent,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Pruned => "not in the file",
            Reason::Moved => "on something else in the file",
            Reason::OtherPrograms => "what it shall do needs other programs",
            Reason::ScopeGone => "what it was on was removed",
            Reason::Detached => "its programs were removed",
            Reason::Broken => "it cannot be read",
            Reason::OtherParent => "inside another limit, or none, in the file",
            Reason::WithParent => "to be reattached with its parent",
        })
    }
}

impl PlanError {
    /// The limit of the spec without which there may be a plan.
    pub fn limit(&self) -> &str {
        match self {
            PlanError::SameScope { second: name, .. }
            | PlanError::SamePrefix { second: name, .. }
            | PlanError::ScopeTaken { name, .. }
            | PlanError::PrefixTaken { name, .. }
            | PlanError::ParentPruned { name, .. }
            | PlanError::Family(FamilyError { name, .. }) => name,
        }
    }
}

impl Action {
    pub fn name(&self) -> &str {
        match self {
            Action::Remove { limit, .. } | Action::TakeOver { limit } => &limit.name,
            Action::Change { name, .. } | Action::Members { name, .. } => name,
            Action::Replace { to: limit, .. } | Action::Add { limit } => &limit.name,
        }
    }

    pub fn scope(&self) -> &Scope {
        match self {
            Action::Remove { limit, .. } | Action::TakeOver { limit } => &limit.scope,
            Action::Change { scope, .. } | Action::Members { scope, .. } => scope,
            Action::Replace { to: limit, .. } | Action::Add { limit } => &limit.scope,
        }
    }

    /// `add`, `change`, `members`, `replace` or `remove`.
    pub fn verb(&self) -> &'static str {
        match self {
            Action::Remove { .. } => "remove",
            Action::Change { .. } => "change",
            Action::Members { .. } => "members",
            Action::TakeOver { .. } => "take_over",
            Action::Replace { .. } => "replace",
            Action::Add { .. } => "add",
        }
    }

    /// What a change changes; empty for other actions.
    pub fn differences(&self) -> Vec<Difference> {
        match self {
            Action::Change { from, to, .. } => differences(from, to),
            _ => Vec::new(),
        }
    }
}

/// Steps in the order in which to do them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// To do.
    pub actions: Vec<Action>,
    /// Names of limits of the host that the spec does not have and that are left alone.
    pub unmanaged: Vec<String>,
}

/// Why there is no plan. Nothing has been changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Two limits of the spec name one cgroup in two ways.
    #[error(
        "limits `{first}` and `{second}` are both on {scope}; put both directions in one limit{}",
        if scope.is_device() {
            ""
        } else {
            ", write one as the parent of the other, or limit a cgroup above or below it"
        }
    )]
    SameScope { first: String, second: String, scope: Scope },
    /// Two limits of the spec have one prefix of a device.
    #[error(
        "limits `{first}` and `{second}` both have {prefix} of {scope}; give it to one of them"
    )]
    SamePrefix { first: String, second: String, prefix: Prefix, scope: Scope },
    /// A limit of the host that the spec does not have is on the cgroup or device.
    #[error(
        "limit `{name}`: {scope} already has limit `{other}`, which is not in the file; \
         remove that one with `tidegate limit del {other}`, or apply with --prune"
    )]
    ScopeTaken { name: String, scope: Scope, other: String },
    /// A limit of the host that the spec does not have has one of the prefixes.
    #[error(
        "limit `{name}`: {scope} already has limit `{other}` for {prefix}, which is not in the file; \
         remove that one with `tidegate limit del {other}`, or apply with --prune"
    )]
    PrefixTaken { name: String, scope: Scope, prefix: Prefix, other: String },
    /// A limit of the spec is inside one that the plan takes off.
    #[error(
        "limit `{name}`: its parent `{parent}` is in no file, so the agent and `apply --prune` remove it; \
         write it into the file"
    )]
    ParentPruned { name: String, parent: String },
    /// A limit cannot be where it is in its tree.
    #[error(transparent)]
    Family(#[from] FamilyError),
}

/// Plans the way from `present` to `wanted`. Names are unique in each.
///
/// # Errors
/// [`PlanError`] when two limits would be on one cgroup and neither is inside the other, or one cannot be
/// where it is in its tree.
pub fn plan(present: &[Present], wanted: &[Wanted], prune: bool) -> Result<Plan, PlanError> {
    plan_pruning(present, wanted, |_| prune)
}

/// The same; of the limits that only the host has those go whose name passes.
///
/// # Errors
/// [`PlanError`].
pub fn plan_pruning(
    present: &[Present],
    wanted: &[Wanted],
    prune: impl Fn(&str) -> bool,
) -> Result<Plan, PlanError> {
    let names: BTreeSet<_> = wanted.iter().map(|limit| limit.name.as_str()).collect();
    let by_name: BTreeMap<_, _> =
        present.iter().map(|limit| (limit.name.as_str(), limit)).collect();
    let stay = present.iter().filter(|limit| !names.contains(limit.name.as_str()));
    let stay = stay.map(|limit| (limit.name.as_str(), limit.parent.as_deref()));
    let shall = wanted.iter().map(|limit| (limit.name.as_str(), limit.parent.as_deref()));
    let parents: Parents<'_> = stay.chain(shall).collect();
    let taken = places(wanted, &parents)?;

    let mut plan = Plan::default();
    let mut members: Vec<Member> = wanted.iter().map(Member::from).collect();
    let mut removals = Vec::new();
    for limit in present.iter().filter(|limit| !names.contains(limit.name.as_str())) {
        if prune(&limit.name) {
            removals.push((limit, Reason::Pruned));
            continue;
        }
        let parts = parts(&limit.scope, &limit.members, &limit.options).into_iter();
        let mut users = parts.filter_map(|part| {
            let mut users = taken.get(&part)?.iter();
            let user =
                users.find(|user| part.0.is_device() || !are_kin(user, &limit.name, &parents))?;
            Some(((*user).to_owned(), part))
        });
        if let Some((name, (scope, prefix))) = users.next().filter(|_| !limit.state.is_gone()) {
            let other = limit.name.clone();
            return Err(match prefix {
                None => PlanError::ScopeTaken { name, scope, other },
                Some(prefix) => PlanError::PrefixTaken { name, scope, prefix, other },
            });
        }
        plan.unmanaged.push(limit.name.clone());
        // What cannot be read binds nobody.
        if limit.state != State::Broken {
            members.push(Member::from(limit));
        }
    }
    if let Some(limit) = wanted.iter().find(|limit| is_pruned(limit, &removals)) {
        let parent = limit.parent.clone().unwrap_or_default();
        return Err(PlanError::ParentPruned { name: limit.name.clone(), parent });
    }
    family::resolve(&mut members, true)?;

    let holders: BTreeMap<(&Scope, Option<Prefix>), &str> = present
        .iter()
        .flat_map(|is| places_of(&is.options).into_iter().map(|p| ((&is.scope, p), &*is.name)))
        .collect();
    let (mut changes, mut additions) = (Vec::new(), Vec::new());
    let (mut joins, mut leaves) = (Vec::new(), Vec::new());
    let (mut put_on, mut lost): (BTreeSet<&str>, BTreeSet<&str>) = Default::default();
    for i in downwards(&members) {
        let limit = &members[i];
        let parent_is_in = |names: &BTreeSet<&str>| {
            limit.parent.as_deref().is_some_and(|parent| names.contains(parent))
        };
        let (with_parent, without) = (parent_is_in(&put_on), parent_is_in(&lost));
        let is = by_name.get(limit.name.as_str()).copied();
        let reason = is.and_then(|is| {
            if without {
                return Some(Reason::ScopeGone);
            }
            // Another limit has the prefix now, and may have to lose it first.
            let others = |prefix| holders.get(&(&is.scope, prefix)).is_some_and(|h| *h != is.name);
            let swaps =
                !is.options.matched.is_empty() && places_of(&limit.options).into_iter().any(others);
            reason(is, limit, with_parent).or(swaps.then_some(Reason::Moved))
        });
        if let Some((is, reason)) = is.zip(reason) {
            removals.push((is, reason));
        }
        match (is, reason) {
            // Nothing is left of what it was on, and nobody asks for it.
            (Some(is), Some(Reason::ScopeGone))
                if limit.stays && (without || is.state != State::Anew) =>
            {
                lost.insert(&limit.name);
            }
            (None, _) | (_, Some(_)) => {
                put_on.insert(&limit.name);
                additions.push(limit.wanted());
            }
            (Some(_), None) if limit.detached => {}
            (Some(is), None) if is.other_build.is_some() && !limit.stays => {
                changes.push(Action::TakeOver { limit: is.clone() });
                changes.extend(change(is, limit));
            }
            (Some(is), None) => changes.extend(change(is, limit)),
        }
        if let (Some(is), None, false) = (is, reason, limit.stays) {
            let (join, leave) = members_steps(is, limit);
            joins.extend(join);
            leaves.extend(leave);
        }
    }
    plan.unmanaged.retain(|name| !removals.iter().any(|(limit, _)| limit.name == *name));
    // Children before their parents, else in the order given.
    removals.sort_by_key(|(limit, _)| std::cmp::Reverse(depth(limit, &by_name)));
    let first = who_goes_first(&removals, &additions);
    let (first, mut last): (Vec<_>, Vec<_>) =
        removals.into_iter().partition(|(limit, _)| first.contains(limit.name.as_str()));
    let remove =
        |(limit, reason): (&Present, Reason)| Action::Remove { limit: limit.clone(), reason };
    plan.actions.extend(first.into_iter().map(remove));
    plan.actions.extend(changes);
    plan.actions.extend(joins);
    for to in additions {
        let earlier = last.iter().position(|(limit, _)| limit.name == to.name);
        plan.actions.push(match earlier.map(|at| last.remove(at)) {
            Some((from, reason)) => Action::Replace { from: from.clone(), reason, to },
            None => Action::Add { limit: to },
        });
    }
    plan.actions.extend(last.into_iter().map(remove));
    plan.actions.extend(leaves.into_iter().rev());
    Ok(plan)
}

/// The steps by which cgroups join a limit and leave it, if there are any.
fn members_steps(is: &Present, shall: &Member) -> (Option<Action>, Option<Action>) {
    let not_in = |some: &[String], others: &[String]| -> Vec<String> {
        some.iter().filter(|path| !others.contains(path)).cloned().collect()
    };
    let step = |join: Vec<String>, leave: Vec<String>, from: &[String], to: &[String]| {
        let (name, scope) = (is.name.clone(), is.scope.clone());
        let (from, to) = (from.to_vec(), to.to_vec());
        (!join.is_empty() || !leave.is_empty()).then_some(Action::Members {
            name,
            scope,
            join,
            leave,
            from,
            to,
        })
    };
    let join = not_in(&shall.members, &is.members);
    let mut all = is.members.clone();
    all.extend(join.iter().cloned());
    let mut leave = not_in(&is.members, &shall.members);
    leave.extend(is.gone.iter().cloned());
    (step(join, Vec::new(), &is.members, &all), step(Vec::new(), leave, &all, &shall.members))
}

/// The change of a limit that does something else than it shall.
fn change(is: &Present, shall: &Member) -> Option<Action> {
    let differs = !differences(&is.options, &shall.options).is_empty();
    differs.then(|| Action::Change {
        name: is.name.clone(),
        scope: is.scope.clone(),
        from: is.options,
        to: shall.options,
    })
}

/// The names of the limits that are taken off before others are put on: nothing is limited by them any
/// more, or another one cannot be beside them. So are those inside them.
fn who_goes_first<'a>(
    removals: &[(&'a Present, Reason)],
    additions: &[Wanted],
) -> BTreeSet<&'a str> {
    let in_the_way =
        |is: &Present| additions.iter().any(|shall| shall.name != is.name && excludes(is, shall));
    let goes = |is: &Present| is.state.is_gone() || in_the_way(is);
    let limits = removals.iter().map(|(limit, _)| *limit);
    let mut first: BTreeSet<_> =
        limits.clone().filter(|is| goes(is)).map(|is| is.name.as_str()).collect();
    for _ in 0..MAX_DEPTH {
        let inside = |is: &&Present| is.parent.as_deref().is_some_and(|name| first.contains(name));
        let more: Vec<_> = limits.clone().filter(inside).map(|is| is.name.as_str()).collect();
        first.extend(more);
    }
    first
}

/// Whether two limits need what only one can have. One that cannot be read may have anything of its device.
fn excludes(is: &Present, shall: &Wanted) -> bool {
    if !is.scope.is_device() || is.scope.name() != shall.scope.name() {
        return false;
    }
    if is.state == State::Broken {
        return shall.scope.is_device();
    }
    let both = |has: fn(&LimitOptions) -> bool| has(&is.options) && has(&shall.options);
    let roots = is.parent.is_none() && shall.parent.is_none();
    let prefixes = is.options.matched.as_slice();
    roots && both(|o| o.scheme.info().has_qdisc)
        || both(|o| o.scheme == Scheme::Police && o.police.hook == Hook::Xdp)
        || shall.options.matched.as_slice().iter().any(|prefix| prefixes.contains(prefix))
}

/// A cgroup or device as a whole, a prefix of a device, or a selector.
pub type Part = (Scope, Option<Prefix>);

/// What a limit takes of a host, so that no other limit can have it.
pub fn parts(scope: &Scope, members: &[String], options: &LimitOptions) -> Vec<Part> {
    let own = places_of(options).into_iter().map(|prefix| (scope.clone(), prefix));
    own.chain(members.iter().map(|path| (Scope::Cgroup(path.clone()), None))).collect()
}

/// What of its scope a limit takes: each of its prefixes, or all as one.
pub fn places_of(options: &LimitOptions) -> Vec<Option<Prefix>> {
    match options.matched.as_slice() {
        [] => vec![None],
        prefixes => prefixes.iter().copied().map(Some).collect(),
    }
}

/// The limits by what they are on. One inside another may be on its cgroup.
fn places<'a>(
    wanted: &'a [Wanted],
    parents: &Parents<'_>,
) -> Result<BTreeMap<Part, Vec<&'a str>>, PlanError> {
    let mut taken: BTreeMap<Part, Vec<&str>> = BTreeMap::new();
    for limit in wanted {
        for part in parts(&limit.scope, &limit.members, &limit.options) {
            let others = taken.entry(part.clone()).or_default();
            let is_in_the_way =
                |other: &&&str| part.0.is_device() || !are_kin(other, &limit.name, parents);
            let first = others.iter().find(is_in_the_way).map(|name| (*name).to_owned());
            others.push(&limit.name);
            let Some(first) = first else { continue };
            let (second, (scope, prefix)) = (limit.name.clone(), part);
            return Err(match prefix {
                None => PlanError::SameScope { first, second, scope },
                Some(prefix) => PlanError::SamePrefix { first, second, prefix, scope },
            });
        }
    }
    Ok(taken)
}

/// Why a limit that is cannot be changed into the one that shall be.
fn reason(is: &Present, shall: &Member, with_parent: bool) -> Option<Reason> {
    let moved = shall.scope.as_ref().is_some_and(|scope| *scope != is.scope);
    match is.state {
        // What was left alone is left alone, unless it must go with its parent.
        _ if shall.stays && !with_parent => None,
        State::ScopeGone | State::Anew => Some(Reason::ScopeGone),
        _ if shall.stays => Some(Reason::WithParent),
        State::Detached => Some(Reason::Detached),
        State::Broken => Some(Reason::Broken),
        _ if moved => Some(Reason::Moved),
        _ if needs_other_programs(&is.options, &shall.options) => Some(Reason::OtherPrograms),
        _ if is.parent != shall.parent => Some(Reason::OtherParent),
        _ if with_parent => Some(Reason::WithParent),
        State::InForce | State::NoFq | State::NoMembers => None,
    }
}

fn is_pruned(limit: &Wanted, removals: &[(&Present, Reason)]) -> bool {
    let parent = limit.parent.as_ref();
    parent.is_some_and(|parent| removals.iter().any(|(limit, _)| limit.name == *parent))
}

/// The places of the limits, parents before children, else in the order given.
fn downwards(members: &[Member]) -> Vec<usize> {
    let names: Vec<_> = members.iter().map(|m| (m.name.as_str(), m.parent.as_deref())).collect();
    let mut branches = tree(&names, |a, b| a.cmp(&b));
    branches.sort_by_key(|branch| (branch.depth, branch.index));
    branches.iter().map(|branch| branch.index).collect()
}

/// How many limits a limit is inside of; a host's are in no circle.
fn depth(limit: &Present, by_name: &BTreeMap<&str, &Present>) -> usize {
    let parent = |limit: &&Present| by_name.get(limit.parent.as_deref()?).copied();
    std::iter::successors(parent(&limit), parent).take(MAX_DEPTH).count()
}

/// A limit as it will be among those that are: with the directions of its parent.
///
/// # Errors
/// [`FamilyError`] when it, or one inside it, cannot be so.
pub fn join(present: &[Present], limit: &Wanted) -> Result<Wanted, FamilyError> {
    let others = present.iter().filter(|other| other.name != limit.name);
    let others = others.filter(|other| other.state != State::Broken).map(Member::from);
    let mut members: Vec<_> = std::iter::once(Member::from(limit)).chain(others).collect();
    family::resolve(&mut members, true)?;
    Ok(members[0].wanted())
}

impl From<&Wanted> for Member {
    fn from(limit: &Wanted) -> Member {
        let Wanted { name, scope, members, options, parent, asked } = limit.clone();
        let (scope, detached, stays) = (Some(scope), false, false);
        Member { name, scope, members, parent, options, asked, detached, stays }
    }
}

impl From<&Present> for Member {
    fn from(limit: &Present) -> Member {
        let Present { name, scope, members, state, options, parent, .. } = limit.clone();
        let detached = state.is_gone() || matches!(state, State::Detached | State::Broken);
        let (scope, asked) = (Some(scope), Asked::default());
        Member { name, scope, members, parent, options, asked, detached, stays: true }
    }
}

impl Member {
    fn wanted(&self) -> Wanted {
        let Member { name, scope, members, parent, options, asked, .. } = self.clone();
        // Those of a plan have a scope.
        let scope = scope.unwrap_or_else(|| Scope::Cgroup(String::new()));
        Wanted { name, scope, members, options, parent, asked }
    }
}

#[cfg(test)]
pub(crate) mod tests;
