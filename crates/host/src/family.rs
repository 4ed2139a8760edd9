//! What limits inside limits must keep to, wherever they come from: a file, a command line, the host. Pure.
//!
//! - The tree of limits follows the tree of cgroups: a parent is on the same cgroup or on one above, and no
//!   sibling is between.
//! - A limit is limited in the directions of its parent; where nothing was said, at whatever the parent has.
//! - Siblings are guaranteed together no more than their parent has for sure: a root's rate, another limit's
//!   own guarantee. So every guarantee can be kept at once.
//!
//! A ceiling above the parent's is no mistake: the lowest on the way up holds. O(n log n) for n limits.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use tidegate_core::{
    Direction, Rate, Scheme, Scope,
    class::MAX_DEPTH,
    scheme::{Trees, list},
};
use tidegate_sys::{
    limit::LimitOptions,
    store::{can_contain, contains},
};

use crate::{settings::Asked, tree::ancestors};

/// One limit among others.
#[derive(Debug, Clone)]
pub struct Member {
    pub name: String,
    /// What it is on, as the host writes it; `None` while only its name in a file is known.
    pub scope: Option<Scope>,
    /// With a selector: its cgroups.
    pub members: Vec<String>,
    /// The name of its parent.
    pub parent: Option<String>,
    pub options: LimitOptions,
    /// The directions for which it was given a rate of its own.
    pub asked: Asked,
    /// It is not in force, so that it can be nobody's parent.
    pub detached: bool,
    /// It stays as it is on the host: nobody asks for it now.
    pub stays: bool,
}

/// A limit that cannot be where it is in its tree. Nothing has been changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("limit `{name}`: {field}: {problem}")]
pub struct FamilyError {
    pub name: String,
    /// Its field, as a spec file names it.
    pub field: &'static str,
    /// What is wrong.
    pub problem: FamilyProblem,
}

/// What is wrong with a limit in its tree, and what to type instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FamilyProblem {
    /// There is no such parent.
    #[error(
        "there is no limit `{0}`, neither here nor on this host; attach it first, or write it into the same \
         file"
    )]
    NoParent(String),
    /// Its own parent.
    #[error("a limit cannot be its own parent; leave this out, or name another limit")]
    Itself,
    /// Parents in a circle.
    #[error("{} is a circle; one of them must be the root, without a parent", Circle(.0))]
    Circle(Vec<String>),
    /// Too many above each other.
    #[error("more than {MAX_DEPTH} limits above each other; leave some out")]
    TooDeep,
    /// The parent does not contain it.
    #[error(
        "`{parent}` is on {parent_scope}, which does not contain {scope}; the parent of a limit is on \
         the same cgroup or on one above"
    )]
    NotAbove { scope: Scope, parent: String, parent_scope: Scope },
    /// A sibling contains it.
    #[error(
        "`{between}` is on a cgroup between the two; the parent must be `{between}`: write that, or \
         remove the limit and add it again"
    )]
    Between { between: String },
    /// A sibling is on the same cgroup.
    #[error(
        "`{beside}` is inside `{parent}` on the same cgroup; write one of the two as the parent of the other"
    )]
    Beside { beside: String, parent: String },
    /// A scheme that shares with nobody.
    #[error("`{parent}` has scheme `{scheme}`; a parent has {}", list("`", |i| i.trees == Trees::OfCgroups))]
    ParentScheme { parent: String, scheme: Scheme },
    /// A parent on a device.
    #[error("`{parent}` is on {scope}; a parent is on a cgroup, or with scheme `htb` on a device")]
    ParentScope { parent: String, scope: Scope },
    /// A tree on a device has one scheme.
    #[error(
        "`{parent}` has scheme `{theirs}` and this limit `{ours}`; in a tree on a device all have {}, in a \
         tree of cgroups {}",
        list("`", |info| info.trees == Trees::OfADevice),
        list("`", |info| info.trees == Trees::OfCgroups)
    )]
    Schemes {
        parent: String,
        /// How that acts.
        theirs: Scheme,
        /// How the limit does.
        ours: Scheme,
    },
    /// What comes in by a device is nobody's yet.
    #[error(
        "a limit inside `{0}` has only egress: an incoming packet has no known receiver yet; leave this out, \
         or limit the port itself, without a parent"
    )]
    EgressAlone(String),
    /// A parent that does nothing.
    #[error(
        "`{0}` is not in force (its cgroup was removed, or its programs were detached); restore it first, \
         or into the same file"
    )]
    ParentDetached(String),
    /// A direction that is free.
    #[error(
        "its parent `{parent}` does not limit {direction}; leave this out, or limit it there first"
    )]
    NotLimited {
        parent: String,
        /// `egress` or `ingress`.
        direction: &'static str,
    },
    /// More than there is.
    #[error(
        "the limits inside `{parent}` are guaranteed {reserved} together, and `{parent}` has {most} to \
         guarantee ({what}); lower their guarantees, or raise {what}"
    )]
    Reserved {
        parent: String,
        /// Up to and with this limit.
        reserved: Rate,
        most: Rate,
        /// Its rate or its guarantee.
        what: &'static str,
    },
    /// Nothing is there.
    #[error(
        "its parent `{parent}` has no guarantee itself; give `{parent}` a guarantee of at least {wanted} \
         first"
    )]
    NothingToPassOn { parent: String, wanted: Rate },
}

struct Circle<'a>(&'a [String]);

impl fmt::Display for Circle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Circle(names) = self;
        names.iter().try_for_each(|name| write!(f, "`{name}` in "))?;
        names.first().map_or(Ok(()), |first| write!(f, "`{first}`"))
    }
}

/// Members by their depth, and the depth of each.
type Ordered = Vec<(usize, usize)>;

/// Checks all trees and gives each limit the directions of its parent. With `whole`, every parent must be
/// among the members; without, what hangs on others is checked as far as it is known. Names are unique.
///
/// # Errors
/// [`FamilyError`] for the first limit, from the roots downwards and then in the order given.
pub fn resolve(members: &mut [Member], whole: bool) -> Result<(), FamilyError> {
    let places: BTreeMap<String, usize> =
        members.iter().enumerate().map(|(i, member)| (member.name.clone(), i)).collect();
    let parents: Vec<Option<usize>> = members
        .iter()
        .map(|member| member.parent.as_ref().and_then(|parent| places.get(parent)).copied())
        .collect();
    let mut reserved: BTreeMap<usize, u64> = BTreeMap::new();
    for (_, i) in by_depth(members, &parents, whole)? {
        let Some(parent) = parents[i] else { continue };
        let above = members[parent].clone();
        let refuse =
            |field, problem| Err(FamilyError { name: members[i].name.clone(), field, problem });
        stands_below(&members[i], &above).or_else(|problem| refuse("parent", problem))?;
        let guarantee = members[i].options.class.and_then(|class| class.guarantee);
        if let Some(guarantee) = guarantee {
            let sum = reserved.entry(parent).or_default();
            *sum = sum.saturating_add(guarantee.bit_s());
            can_keep(&above, *sum, guarantee).or_else(|problem| refuse("guarantee", problem))?;
        }
        let known = whole || above.parent.is_none() || parents[parent].is_some();
        if known && let Err((field, problem)) = conform(&mut members[i], &above) {
            return Err(FamilyError { name: members[i].name.clone(), field, problem });
        }
    }
    none_between(members, &parents)
}

/// Checks that no limit is on a cgroup between another one and the parent of both, or on the other one's: it
/// would be counted twice.
fn none_between(members: &[Member], parents: &[Option<usize>]) -> Result<(), FamilyError> {
    let child = |i: usize| {
        let parent = parents[i];
        parent.into_iter().flat_map(move |parent| members[i].cgroups().map(move |at| (parent, at)))
    };
    let mut places = BTreeMap::new();
    for (at, i) in (0..members.len()).flat_map(|i| child(i).map(move |at| (at, i))) {
        let Some(other) = places.insert(at, i).filter(|other| *other != i) else { continue };
        // The one that somebody asks for now is wrong.
        let (i, beside) = if members[i].stays { (other, i) } else { (i, other) };
        let (parent, beside) = (members[at.0].name.clone(), members[beside].name.clone());
        let problem = FamilyProblem::Beside { beside, parent };
        return Err(FamilyError { name: members[i].name.clone(), field: "parent", problem });
    }
    for (i, member) in members.iter().enumerate() {
        let between = child(i).find_map(|(parent, path)| {
            ancestors(path).skip(1).find_map(|above| places.get(&(parent, above)))
        });
        if let Some(between) = between {
            let problem = FamilyProblem::Between { between: members[*between].name.clone() };
            return Err(FamilyError { name: member.name.clone(), field: "parent", problem });
        }
    }
    Ok(())
}

impl Member {
    /// The paths of its cgroups.
    fn cgroups(&self) -> impl Iterator<Item = &str> {
        let own = match &self.scope {
            Some(Scope::Cgroup(path)) => Some(path),
            _ => None,
        };
        own.into_iter().chain(&self.members).map(String::as_str)
    }
}

/// The first part of a limit that another one does not contain.
fn outside(limit: &Member, above: &Member, scheme: Scheme) -> Option<Scope> {
    let (scope, theirs) = (limit.scope.as_ref()?, above.scope.as_ref()?);
    let has_selector = |scope: &Scope| matches!(scope, Scope::Select(_));
    if !has_selector(scope) && !has_selector(theirs) {
        return (!can_contain(theirs, scope, scheme)).then(|| scope.clone());
    }
    if scope.is_device() || theirs.is_device() {
        return Some(scope.clone());
    }
    let is_inside = |path: &&str| above.cgroups().any(|theirs| contains(theirs, path));
    limit.cgroups().find(|path| !is_inside(path)).map(|path| Scope::Cgroup(path.to_owned()))
}

fn by_depth(
    members: &[Member],
    parents: &[Option<usize>],
    whole: bool,
) -> Result<Ordered, FamilyError> {
    let mut ordered = Ordered::with_capacity(members.len());
    for (i, member) in members.iter().enumerate() {
        let refuse =
            |problem| Err(FamilyError { name: member.name.clone(), field: "parent", problem });
        match (&member.parent, parents[i]) {
            (Some(_), Some(parent)) if parent == i => return refuse(FamilyProblem::Itself),
            (Some(parent), None) if whole && !member.stays => {
                return refuse(FamilyProblem::NoParent(parent.clone()));
            }
            _ => {}
        }
        let mut seen = BTreeSet::from([i]);
        let mut path = vec![i];
        let mut at = i;
        while let Some(above) = parents[at] {
            if !seen.insert(above) {
                let first = path.iter().position(|place| *place == above).unwrap_or(0);
                let names = path[first..].iter().map(|place| members[*place].name.clone());
                return refuse(FamilyProblem::Circle(names.collect()));
            }
            path.push(above);
            at = above;
        }
        if path.len() > MAX_DEPTH {
            return refuse(FamilyProblem::TooDeep);
        }
        ordered.push((path.len(), i));
    }
    ordered.sort_unstable();
    Ok(ordered)
}

/// Whether one limit can be the parent of another.
fn stands_below(limit: &Member, above: &Member) -> Result<(), FamilyProblem> {
    let parent = above.name.clone();
    let (scheme, ours) = (above.options.scheme, limit.options.scheme);
    if (scheme == Scheme::Htb) != (ours == Scheme::Htb) {
        return Err(FamilyProblem::Schemes { parent, theirs: scheme, ours });
    }
    let is_tree = |scope: &Scope| scheme == Scheme::Htb && matches!(scope, Scope::Dev(_));
    if let Some(scope) = above.scope.clone().filter(|s| s.is_device() && !is_tree(s)) {
        return Err(FamilyProblem::ParentScope { parent, scope });
    }
    if scheme.info().trees == Trees::None {
        return Err(FamilyProblem::ParentScheme { parent, scheme });
    }
    if above.detached && !limit.stays {
        return Err(FamilyProblem::ParentDetached(parent));
    }
    let outside = outside(limit, above, scheme);
    let Some((scope, parent_scope)) = outside.zip(above.scope.clone()) else { return Ok(()) };
    Err(FamilyProblem::NotAbove { scope, parent, parent_scope })
}

/// Whether the parent has for sure what its children are guaranteed.
fn can_keep(above: &Member, sum: u64, guarantee: Rate) -> Result<(), FamilyProblem> {
    let parent = above.name.clone();
    let (most, what) = match above.options.class {
        Some(class) => match class.guarantee {
            Some(guarantee) => (guarantee, "its own guarantee"),
            None => return Err(FamilyProblem::NothingToPassOn { parent, wanted: guarantee }),
        },
        None => {
            let both = above.options.scheme != Scheme::Htb;
            let rates = [above.options.egress, above.options.ingress.filter(|_| both)];
            let Some(rate) = rates.into_iter().flatten().map(|queue| queue.rate).min() else {
                return Ok(());
            };
            (rate, "its rate")
        }
    };
    match Rate::from_bit_s(sum).filter(|_| sum > most.bit_s()) {
        Some(reserved) => Err(FamilyProblem::Reserved { parent, reserved, most, what }),
        None => Ok(()),
    }
}

/// Gives a limit the directions of its parent.
fn conform(limit: &mut Member, above: &Member) -> Result<(), (&'static str, FamilyProblem)> {
    let free = crate::settings::inside_another();
    for direction in Direction::BOTH {
        let asked = match direction {
            Direction::Egress => limit.asked.egress,
            Direction::Ingress => limit.asked.ingress,
        };
        let (theirs, default) = (above.options.queue(direction), free.queue(direction));
        let ours = limit.options.queue_mut(direction);
        let direction = direction.name();
        let is_htb = above.options.scheme == Scheme::Htb;
        match (theirs, ours.is_some()) {
            _ if is_htb && direction == "ingress" => {
                if asked {
                    return Err((direction, FamilyProblem::EgressAlone(above.name.clone())));
                }
                *ours = None;
            }
            (None, _) if is_htb => {
                let parent = above.name.clone();
                return Err(("parent", FamilyProblem::NotLimited { parent, direction }));
            }
            (None, true) if asked => {
                let parent = above.name.clone();
                return Err((direction, FamilyProblem::NotLimited { parent, direction }));
            }
            (None, _) => *ours = None,
            (Some(_), false) => *ours = default,
            (Some(_), true) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
