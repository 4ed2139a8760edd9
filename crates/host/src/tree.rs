//! Limits inside limits, as a tree for whoever shows them. Pure.

use std::{cmp::Ordering, collections::BTreeMap};

use tidegate_core::Scope;

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

/// For each limit the place of the one on the nearest cgroup above its own; `None` where there is none, as
/// for devices. Limits on one cgroup count as one inside the other, the first outermost. O(n x depth).
#[must_use]
pub fn enclosing(scopes: &[&Scope]) -> Vec<Option<usize>> {
    let mut on: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, scope) in scopes.iter().enumerate() {
        if let Scope::Cgroup(path) = scope {
            on.entry(path).or_default().push(i);
        }
    }
    let above = |i: usize, scope: &Scope| {
        let Scope::Cgroup(path) = scope else { return None };
        let same = on.get(path.as_str())?;
        let before = same.iter().rev().find(|other| **other < i).copied();
        let upwards = || ancestors(path).skip(1).find_map(|path| on.get(path)?.last().copied());
        before.or_else(upwards)
    };
    scopes.iter().enumerate().map(|(i, scope)| above(i, scope)).collect()
}

/// A cgroup's path and those above it, the root's empty one last.
pub fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(path), |path| match path.rsplit_once('/') {
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
        let found = enclosing(&scopes.each_ref());
        assert_eq!(found, [Some(1), Some(3), Some(3), None, None]);
        let twice = [cgroup("a"), cgroup("a"), cgroup("a/b")];
        assert_eq!(enclosing(&twice.each_ref()), [None, Some(0), Some(1)]);
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
