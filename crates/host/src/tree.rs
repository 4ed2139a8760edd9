//! Limits inside limits, as a tree for whoever shows them. Pure.

use std::{cmp::Ordering, collections::BTreeMap, iter};

use tidegate_core::{Scope, class::MAX_DEPTH};

/// Where one limit stands among those shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Branch {
    /// Its place in what was given.
    pub index: usize,
    /// How many limits it is inside of.
    pub depth: usize,
    /// Of those inside the same limit it is the last.
    pub last: bool,
}

/// The limits in the order in which a tree shows them: each is followed by those inside it. `limits` has the
/// name of each and that of its parent; siblings stand as `order` says of their places. A parent that is not
/// there counts as none, and of parents in a circle the first stands at the root. O(n log n).
pub fn tree<N: Ord>(
    limits: &[(N, Option<N>)],
    mut order: impl FnMut(usize, usize) -> Ordering,
) -> Vec<Branch> {
    let places: BTreeMap<&N, usize> =
        limits.iter().enumerate().rev().map(|(i, (name, _))| (name, i)).collect();
    let mut children = vec![Vec::new(); limits.len()];
    let mut roots = Vec::new();
    for (i, (_, parent)) in limits.iter().enumerate() {
        match parent.as_ref().and_then(|parent| places.get(parent)) {
            Some(parent) if *parent != i => children[*parent].push(i),
            _ => roots.push(i),
        }
    }
    let mut branches = Vec::with_capacity(limits.len());
    let mut shown = vec![false; limits.len()];
    roots.sort_by(|a, b| order(*a, *b));
    walk(roots, &mut children, &mut order, &mut shown, &mut branches);
    // Only circles are left.
    for i in 0..limits.len() {
        if !shown[i] {
            walk(vec![i], &mut children, &mut order, &mut shown, &mut branches);
        }
    }
    branches
}

fn walk(
    roots: Vec<usize>,
    children: &mut [Vec<usize>],
    order: &mut impl FnMut(usize, usize) -> Ordering,
    shown: &mut [bool],
    branches: &mut Vec<Branch>,
) {
    let push = |open: &mut Vec<Branch>, siblings: Vec<usize>, depth| {
        let last = siblings.last().copied();
        let branch = |index| Branch { index, depth, last: Some(index) == last };
        open.extend(siblings.into_iter().rev().map(branch));
    };
    let mut open = Vec::new();
    push(&mut open, roots, 0);
    while let Some(branch) = open.pop() {
        if std::mem::replace(&mut shown[branch.index], true) {
            continue;
        }
        branches.push(branch);
        let mut below = std::mem::take(&mut children[branch.index]);
        below.retain(|i| !shown[*i]);
        below.sort_by(|a, b| order(*a, *b));
        push(&mut open, below, branch.depth + 1);
    }
}

/// For each limit the place of its parent, if that is given, or of the limit on the nearest cgroup above its
/// own; `None` where there is none, as for devices. Limits on one cgroup count as one inside the other: those
/// inside another by name are innermost, of the others the first is outermost. O(n x depth).
pub fn enclosing(limits: &[(&Scope, Option<usize>)]) -> Vec<Option<usize>> {
    let parent = |i: &usize| limits.get(*i).and_then(|(_, parent)| *parent);
    let depth = |i: usize| iter::successors(Some(i), parent).take(MAX_DEPTH).count();
    let mut on: BTreeMap<&str, Vec<(usize, usize)>> = BTreeMap::new();
    for (i, (scope, _)) in limits.iter().enumerate() {
        if let Scope::Cgroup(path) = scope {
            on.entry(path).or_default().push((depth(i), i));
        }
    }
    on.values_mut().for_each(|same| same.sort_unstable());
    let above = |i: usize, scope: &Scope| {
        let Scope::Cgroup(path) = scope else { return None };
        let same = on.get(path.as_str())?;
        let at = same.iter().position(|(_, other)| *other == i)?;
        let before = same[..at].last().map(|(_, other)| *other);
        let upwards = || ancestors(path).skip(1).find_map(|path| Some(on.get(path)?.last()?.1));
        before.or_else(upwards)
    };
    let each = limits.iter().enumerate();
    each.map(|(i, (scope, parent))| parent.or_else(|| above(i, scope))).collect()
}

/// Limits by their names, with the names of their parents.
pub type Parents<'a> = BTreeMap<&'a str, Option<&'a str>>;

/// A limit and those that it is inside of, innermost first, as far as they are known.
pub fn lineage<'a>(name: &'a str, parents: &'a Parents<'_>) -> impl Iterator<Item = &'a str> {
    iter::successors(Some(name), |name| parents.get(name).copied().flatten()).take(MAX_DEPTH)
}

/// Whether one of two limits is inside the other: they may be on one cgroup.
pub fn are_kin(one: &str, other: &str, parents: &Parents<'_>) -> bool {
    lineage(one, parents).any(|name| name == other)
        || lineage(other, parents).any(|name| name == one)
}

/// Whether neither of two limits is inside the other, wherever their trees go on: not if one of them goes on
/// in a limit that is not known.
pub fn are_strangers(one: &str, other: &str, parents: &Parents<'_>) -> bool {
    let mut above = lineage(one, parents).chain(lineage(other, parents));
    above.all(|name| parents.contains_key(name)) && !are_kin(one, other, parents)
}

/// A cgroup's path and those above it, the root's empty one last.
pub fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    iter::successors(Some(path), |path| match path.rsplit_once('/') {
        Some((above, _)) => Some(above),
        None if path.is_empty() => None,
        None => Some(""),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cgroup(path: &str) -> Scope {
        Scope::Cgroup(path.to_owned())
    }

    #[test]
    fn children_follow_their_parent() {
        let limits = [("c", Some("b")), ("b", Some("a")), ("d", Some("gone")), ("a", None)];
        let branches = tree(&limits, |a, b| limits[a].0.cmp(limits[b].0));
        let shown: Vec<_> = branches.iter().map(|b| (limits[b.index].0, b.depth, b.last)).collect();
        assert_eq!(shown, [("a", 0, false), ("b", 1, true), ("c", 2, true), ("d", 0, true)]);
    }

    #[test]
    fn the_nearest_limit_above_encloses() {
        let scopes =
            [cgroup("a/b/c"), cgroup("a"), cgroup("ab"), cgroup(""), Scope::Dev("a".into())];
        let found = enclosing(&scopes.each_ref().map(|scope| (scope, None)));
        assert_eq!(found, [Some(1), Some(3), Some(3), None, None]);
        let twice = [cgroup("a"), cgroup("a"), cgroup("a/b")];
        let found = |parents: [Option<usize>; 3]| {
            let limits: Vec<_> = twice.iter().zip(parents).collect();
            enclosing(&limits)
        };
        assert_eq!(found([None; 3]), [None, Some(0), Some(1)]);
        // The first is inside the second.
        assert_eq!(found([Some(1), None, None]), [Some(1), None, Some(0)]);
    }

    #[test]
    fn kin_are_inside_each_other_at_any_depth() {
        let parents = [("c", "b"), ("b", "a"), ("d", "a"), ("x", "x"), ("y", "elsewhere")];
        let parents = parents.map(|(name, parent)| (name, Some(parent)));
        let parents = parents.into_iter().chain([("a", None)]).collect();
        let kin = |one, other| are_kin(one, other, &parents);
        assert!(kin("a", "c") && kin("c", "a") && kin("c", "b"));
        assert!(!kin("c", "d") && !kin("d", "b") && !kin("a", "x"));
        let strangers = |one, other| are_strangers(one, other, &parents);
        assert!(strangers("c", "d") && strangers("d", "x") && !strangers("a", "c"));
        assert!(!strangers("y", "a"), "nobody knows");
    }

    #[test]
    fn the_root_is_above_all() {
        assert_eq!(ancestors("a/b").collect::<Vec<_>>(), ["a/b", "a", ""]);
        assert_eq!(ancestors("").collect::<Vec<_>>(), [""]);
    }

    proptest! {
        #[test]
        fn every_limit_is_shown_once_below_its_parent(
            limits in proptest::collection::vec((0u8..12, proptest::option::of(0u8..12)), 0..40)
        ) {
            let branches = tree(&limits, |a, b| limits[a].cmp(&limits[b]));
            let mut seen: Vec<_> = branches.iter().map(|b| b.index).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..limits.len()).collect::<Vec<_>>());
            for (i, branch) in branches.iter().enumerate() {
                if branch.depth > 0 {
                    let parent = branches[..i].iter().rev().find(|b| b.depth < branch.depth);
                    let parent = parent.map(|b| limits[b.index].0);
                    prop_assert_eq!(parent, limits[branch.index].1);
                }
            }
        }
    }
}
