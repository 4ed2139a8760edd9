//! Which cgroups a limit with a selector has. Pure.

use std::collections::BTreeSet;

use tidegate_core::{Selector, SelectorKind};

use crate::{
    tree::ancestors,
    world::{Match, World},
};

/// The cgroups that a selector matches, but for those inside others of them. Sorted. O(n x depth).
pub fn members(world: &World, selector: &Selector) -> Vec<String> {
    outermost(world.find(selector).matches).into_iter().map(|found| found.cgroup).collect()
}

/// Matches but for those inside others: they are limited with these. Each cgroup once, sorted.
pub fn outermost(mut matches: Vec<Match>) -> Vec<Match> {
    matches.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
    matches.dedup_by(|a, b| a.cgroup == b.cgroup);
    let found: BTreeSet<_> = matches.iter().map(|found| found.cgroup.clone()).collect();
    matches.retain(|is| !ancestors(&is.cgroup).skip(1).any(|above| found.contains(above)));
    matches
}

/// Whether the tree of cgroups alone says what a selector matches. Who else runs what is asked elsewhere.
pub fn is_by_cgroups(selector: &Selector) -> bool {
    match selector.kind {
        SelectorKind::Cgroup | SelectorKind::Unit | SelectorKind::Slice => true,
        SelectorKind::User => selector.value.parse::<u32>().is_ok(),
        SelectorKind::Container | SelectorKind::Labels | SelectorKind::Exe | SelectorKind::Pod => {
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_inside_a_match_is_none_itself() {
        let paths = ["a", "a/x", "a/x/x", "a/y", "ab/x", "b.slice", "b.slice/b.slice"];
        let cgroups = paths.iter().map(|path| ((*path).to_owned(), 1)).collect();
        let world = World { cgroups, ..World::default() };
        let found = |selector: &str| members(&world, &selector.parse().unwrap());
        assert_eq!(found("cgroup:a/*"), ["a/x", "a/y"]);
        assert_eq!(found("cgroup:a*/x"), ["a/x", "ab/x"]);
        assert_eq!(found("cgroup:a/[xyz]"), ["a/x", "a/y"]);
        assert_eq!(found("cgroup:c/?"), [""; 0]);
        assert_eq!(found("slice:b.slice"), ["b.slice"]);
    }
}
