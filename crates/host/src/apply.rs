//! Carrying out a plan, all or nothing.
//!
//! Actions are done in order; when one fails, those already done are undone, and the host is as it was.
//! What is acted upon is a trait, so that every place of failure is tested without a kernel;
//! [`crate::host`] has the real one.

use std::collections::BTreeSet;

use tidegate_core::class::MAX_DEPTH;
use tidegate_sys::limit::LimitOptions;

use crate::plan::{Action, Present, Reason, State, Wanted};

/// The limits of a host, as far as a plan acts on them. Each verb does all of what it says or nothing.
pub trait Backend {
    /// Why a verb failed; what it acted on is as before.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Puts a limit on a cgroup, device or the members of a selector, inside its parent if it has one.
    ///
    /// # Errors
    /// As the backend has it.
    fn add(&mut self, limit: &Wanted) -> Result<(), Self::Error>;

    /// Puts a limit in the place of another one of its name, the new one first where both can be. What is
    /// inside the earlier one is inside the new one.
    ///
    /// # Errors
    /// As the backend has it.
    fn replace(&mut self, limit: &Wanted) -> Result<(), Self::Error>;

    /// Gives a limit with a selector these cgroups and no others.
    ///
    /// # Errors
    /// As the backend has it.
    fn set_members(&mut self, name: &str, cgroups: &[String]) -> Result<(), Self::Error>;

    /// Names limits that will be taken off, or lose cgroups: others may be put on what these are on.
    fn leaving(&mut self, _names: BTreeSet<String>) {}

    /// Takes a limit off that another one cannot be beside. Should this process die it is put back,
    /// unless the other one is there.
    ///
    /// # Errors
    /// As the backend has it.
    fn make_way(&mut self, name: &str) -> Result<(), Self::Error> {
        self.remove(name)
    }

    /// All is done: none of those that made way is put back any more.
    fn finish(&mut self) {}

    /// Why no more steps are to be done, if that is so.
    fn stopped(&mut self) -> Option<Self::Error> {
        None
    }

    /// Changes a limit in place.
    ///
    /// # Errors
    /// As the backend has it.
    fn change(&mut self, name: &str, options: &LimitOptions) -> Result<(), Self::Error>;

    /// Has a limit run the programs of this build.
    ///
    /// # Errors
    /// As the backend has it.
    fn take_over(&mut self, name: &str) -> Result<(), Self::Error>;

    /// Takes a limit off.
    ///
    /// # Errors
    /// As the backend has it.
    fn remove(&mut self, name: &str) -> Result<(), Self::Error>;

    /// Takes a limit off that cannot be read, so that it can be put on anew.
    ///
    /// # Errors
    /// As the backend has it, and if a newer version has put it on.
    fn remove_unreadable(&mut self, name: &str) -> Result<(), Self::Error> {
        self.remove(name)
    }
}

/// Why a plan was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError<E: std::error::Error + 'static> {
    /// An action failed; the limits are as they were before.
    #[error("{source}; the limits are as they were before")]
    RolledBack { source: E },
    /// An action failed, and some of those before it could not be undone.
    #[error("{source}; and what had been done could not be undone: {}; look at `tidegate status`", .left.join("; "))]
    HalfApplied {
        source: E,
        /// What could not be undone, and why.
        left: Vec<String>,
    },
}

/// Carries out the actions in order.
///
/// # Errors
/// [`ApplyError`].
pub fn apply<G: Backend>(backend: &mut G, actions: &[Action]) -> Result<(), ApplyError<G::Error>> {
    let leaves = |action: &&Action| match action {
        Action::Remove { .. } | Action::Replace { .. } => true,
        Action::Members { leave, .. } => !leave.is_empty(),
        Action::Add { .. } | Action::Change { .. } | Action::TakeOver { .. } => false,
    };
    backend.leaving(actions.iter().filter(leaves).map(|action| action.name().to_owned()).collect());
    let done = perform_all(backend, actions);
    if done.is_ok() {
        backend.finish();
    }
    backend.leaving(BTreeSet::new());
    done
}

fn perform_all<G: Backend>(
    backend: &mut G,
    actions: &[Action],
) -> Result<(), ApplyError<G::Error>> {
    let first = first_removals(actions);
    for (done, action) in actions.iter().enumerate() {
        let makes_way = done < first && first < actions.len();
        let failed = backend.stopped().or_else(|| match action {
            Action::Remove { limit, .. }
                if makes_way && !limit.state.is_gone() && limit.state != State::Broken =>
            {
                backend.make_way(&limit.name).err()
            }
            action => perform(backend, action).err(),
        });
        let Some(source) = failed else { continue };
        // What was put on goes, too.
        backend.leaving(actions.iter().map(|action| action.name().to_owned()).collect());
        // What nobody knows cannot come back: what has taken its place stays.
        let is_lost = |name: &str| {
            actions[..done].iter().any(|action| {
                matches!(action, Action::Remove { limit, .. }
                    if limit.name == name && !limit.is_known())
            })
        };
        let undone = backwards(&actions[..done]).into_iter().filter_map(|action| {
            if matches!(action, Action::Add { limit } if is_lost(&limit.name)) {
                return None;
            }
            if let Action::Remove { limit: from, .. } | Action::Replace { from, .. } = action
                && !from.is_known()
            {
                return Some(format!("{} `{}`: it could not be read", action.verb(), from.name));
            }
            if let Action::Remove { limit, .. } = action
                && held_nothing(limit, &actions[..done])
            {
                return None;
            }
            let error = undo(backend, action).err()?;
            Some(format!("{} `{}`: {error}", action.verb(), action.name()))
        });
        let left: Vec<_> = undone.collect();
        return Err(if left.is_empty() {
            ApplyError::RolledBack { source }
        } else {
            ApplyError::HalfApplied { source, left }
        });
    }
    Ok(())
}

/// The order in which steps are undone. Cgroups that left are back, and what was changed or replaced is as it
/// was, parents first, before what was put on goes; what went first, to make way for that, comes last.
fn backwards(done: &[Action]) -> Vec<&Action> {
    let (first, rest) = done.split_at(first_removals(done));
    let (members, rest): (Vec<_>, Vec<_>) =
        rest.iter().partition(|action| matches!(action, Action::Members { .. }));
    let is_join =
        |action: &&Action| matches!(action, Action::Members { join, .. } if !join.is_empty());
    let (joined, left): (Vec<_>, Vec<_>) = members.into_iter().rev().partition(is_join);
    let (added, mut others): (Vec<_>, Vec<_>) =
        rest.into_iter().partition(|action| matches!(action, Action::Add { .. }));
    let parent_of = |name: &str| {
        others.iter().chain(&added).find_map(|action| match action {
            Action::Remove { limit, .. } | Action::Replace { from: limit, .. } => {
                limit.parent.as_deref().filter(|_| limit.name == name)
            }
            _ => None,
        })
    };
    let depth = |action: &&Action| {
        std::iter::successors(parent_of(action.name()), |name| parent_of(name))
            .take(MAX_DEPTH)
            .count()
    };
    let mut depths: Vec<_> = others.iter().map(|action| (depth(action), *action)).collect();
    depths.sort_by_key(|(depth, _)| *depth);
    others = depths.into_iter().map(|(_, action)| action).collect();
    let changed = left.into_iter().chain(others).chain(added.into_iter().rev());
    changed.chain(joined).chain(first.iter().rev()).collect()
}

/// Whether a limit that was taken off limited nothing any more, and cannot come back: its cgroup is gone, or
/// it has no members, inside a parent of this kind. So nothing is lost with it.
fn held_nothing(limit: &Present, done: &[Action]) -> bool {
    let is_parent_lost = |parent: &String| {
        done.iter().any(|action| {
            matches!(action, Action::Remove { limit, .. }
                if limit.name == *parent && held_nothing(limit, done))
        })
    };
    match limit.state {
        State::ScopeGone | State::Anew => true,
        State::NoMembers => limit.parent.as_ref().is_some_and(is_parent_lost),
        _ => false,
    }
}

/// How many steps at the beginning take limits off.
fn first_removals(actions: &[Action]) -> usize {
    actions.iter().take_while(|action| matches!(action, Action::Remove { .. })).count()
}

fn perform<G: Backend>(backend: &mut G, action: &Action) -> Result<(), G::Error> {
    match action {
        Action::Remove { limit, reason: Reason::Broken } => backend.remove_unreadable(&limit.name),
        Action::Remove { limit, .. } => backend.remove(&limit.name),
        Action::Change { name, to, .. } => backend.change(name, to),
        Action::Members { name, to, .. } => backend.set_members(name, to),
        Action::TakeOver { limit } => backend.take_over(&limit.name),
        Action::Replace { to: limit, .. } => backend.replace(limit),
        Action::Add { limit } => backend.add(limit),
    }
}

fn undo<G: Backend>(backend: &mut G, action: &Action) -> Result<(), G::Error> {
    match action {
        Action::Remove { limit, .. } => backend.add(&Wanted::again(limit.clone())),
        Action::Change { name, from, .. } => backend.change(name, from),
        Action::Members { name, from, .. } => backend.set_members(name, from),
        // It does the same with the programs of either build.
        Action::TakeOver { .. } => Ok(()),
        Action::Replace { from, .. } => backend.replace(&Wanted::again(from.clone())),
        Action::Add { limit } => backend.remove(&limit.name),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_core::{
        Scope,
        selector::{Selector, SelectorKind},
    };

    use super::*;
    use crate::plan::{
        Wanted, plan,
        tests::{Model, present, wanted},
    };

    proptest! {
        #[test]
        fn a_fault_anywhere_leaves_the_host_as_it_was(
            present in present(), wanted in wanted(), prune: bool, fault in 0usize..24,
        ) {
            let mut host = Model::new(&present);
            let before = host.enforced();
            let names: Vec<_> = host.limits.keys().cloned().collect();
            let Ok(plan) = plan(&host.present(), &wanted, prune) else { return Ok(()) };
            host.fails_at = Some(fault);
            match apply(&mut host, &plan.actions) {
                Ok(()) => prop_assert!(plan.actions.len() <= fault),
                Err(ApplyError::RolledBack { .. }) => {
                    for (name, held) in host.enforced() {
                        prop_assert!(names.contains(&name), "{} is new", name);
                        if let Some(was) = before.get(&name) {
                            prop_assert_eq!(&held, was);
                        }
                    }
                    for name in before.keys() {
                        prop_assert!(host.limits.contains_key(name), "{} is lost", name);
                    }
                }
                Err(e) => prop_assert!(false, "{}", e),
            }
        }
    }

    #[test]
    fn what_took_the_place_of_a_limit_that_could_not_be_read_stays() {
        let wanted = crate::plan::tests::two_limits();
        let broken = |limit: &Wanted| Present {
            name: limit.name.clone(),
            scope: limit.scope.clone(),
            members: Vec::new(),
            gone: Vec::new(),
            state: State::Broken,
            options: LimitOptions::default(),
            parent: None,
            other_build: None,
        };
        let present: Vec<_> = wanted.iter().map(broken).collect();
        let mut host = Model::new(&present);
        let plan = plan(&host.present(), &wanted, false).unwrap();
        // Each goes when its successor comes, not before.
        assert!(matches!(&plan.actions[..], [Action::Replace { .. }, Action::Replace { .. }]));
        host.fails_at = Some(1);
        let refused = apply(&mut host, &plan.actions);
        assert!(matches!(refused, Err(ApplyError::HalfApplied { .. })), "{refused:?}");
        assert_eq!(host.enforced().len(), 1, "the first stays");
    }

    /// It had no members, and what it is inside is gone.
    #[test]
    fn a_limit_without_members_does_not_come_back_without_its_parent() {
        let wanted = crate::plan::tests::two_limits();
        let options = wanted[0].options;
        let is = |name: &str, scope, state, parent: Option<&str>| Present {
            name: name.to_owned(),
            scope,
            members: Vec::new(),
            gone: Vec::new(),
            state,
            options,
            parent: parent.map(str::to_owned),
            other_build: None,
        };
        let any = Selector { kind: SelectorKind::Cgroup, value: "gone/*".to_owned() };
        let present = [
            is("p", Scope::Cgroup("gone".to_owned()), State::ScopeGone, None),
            is("c", Scope::Select(any), State::NoMembers, Some("p")),
        ];
        let mut host = Model::new(&present);
        let gone =
            |at: usize| Action::Remove { limit: present[at].clone(), reason: Reason::Pruned };
        let actions = [gone(1), gone(0), Action::Add { limit: wanted[0].clone() }];
        host.fails_at = Some(2);
        let refused = apply(&mut host, &actions);
        assert!(matches!(refused, Err(ApplyError::RolledBack { .. })), "{refused:?}");
    }

    #[test]
    fn what_cannot_be_undone_is_said() {
        let mut host = Model::new(&[]);
        let wanted = crate::plan::tests::two_limits();
        let plan = plan(&[], &wanted, false).unwrap();
        host.fails_at = Some(1);
        host.fails_after = true;
        let message = apply(&mut host, &plan.actions).unwrap_err().to_string();
        insta::assert_snapshot!(message, @"injected fault; and what had been done could not be undone: add `a`: injected fault; look at `tidegate status`");
    }
}
