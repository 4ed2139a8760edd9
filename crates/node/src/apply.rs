//! Carrying out a plan, all or nothing.
//!
//! Actions are done in order; when one fails, those already done are undone in reverse, and the host is as it
//! was. What is acted upon is a trait of three verbs, so that every place of failure is tested without a
//! kernel; [`crate::host`] has the real one.

use tidegate_core::Scope;
use tidegate_sys::limit::LimitOptions;

use crate::plan::{Action, Present, Standing};

/// The limits of a host, as far as a plan acts on them. Each verb does all of what it says or nothing.
pub trait Gates {
    /// Why a verb failed; what it acted on is as before.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Puts a limit on a cgroup or device, inside its parent if it has one.
    ///
    /// # Errors
    /// As the gates have it.
    fn add(
        &mut self,
        name: &str,
        scope: &Scope,
        options: &LimitOptions,
        parent: Option<&str>,
    ) -> Result<(), Self::Error>;

    /// Changes a limit in place.
    ///
    /// # Errors
    /// As the gates have it.
    fn change(&mut self, name: &str, options: &LimitOptions) -> Result<(), Self::Error>;

    /// Takes a limit off.
    ///
    /// # Errors
    /// As the gates have it.
    fn remove(&mut self, name: &str) -> Result<(), Self::Error>;
}

/// Why a plan was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError<E: std::error::Error + 'static> {
    /// An action failed; the limits are as they were before.
    #[error("{source}; the limits are as they were before")]
    RolledBack {
        /// Why it failed.
        source: E,
    },
    /// An action failed, and some of those before it could not be undone.
    #[error("{source}; and what had been done could not be undone: {}; look at `tidegate status`", .left.join("; "))]
    HalfApplied {
        /// Why it failed.
        source: E,
        /// What could not be undone, and why.
        left: Vec<String>,
    },
}

/// Carries out the actions in order.
///
/// # Errors
/// [`ApplyError`].
pub fn apply<G: Gates>(gates: &mut G, actions: &[Action]) -> Result<(), ApplyError<G::Error>> {
    for (done, action) in actions.iter().enumerate() {
        let Err(source) = perform(gates, action) else { continue };
        let undone = actions[..done].iter().rev().filter_map(|action| {
            if let Action::Remove {
                limit: Present { standing: Standing::Broken, name, .. }, ..
            } = action
            {
                return Some(format!("remove `{name}`: it could not be read"));
            }
            let error = undo(gates, action).err()?;
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

fn perform<G: Gates>(gates: &mut G, action: &Action) -> Result<(), G::Error> {
    match action {
        Action::Remove { limit, .. } => gates.remove(&limit.name),
        Action::Change { name, to, .. } => gates.change(name, to),
        Action::Add { limit } => {
            gates.add(&limit.name, &limit.scope, &limit.options, limit.parent.as_deref())
        }
    }
}

fn undo<G: Gates>(gates: &mut G, action: &Action) -> Result<(), G::Error> {
    match action {
        // Nothing was limited by it any more, so nothing is lost with it.
        Action::Remove { limit: Present { standing: Standing::ScopeGone, .. }, .. } => Ok(()),
        Action::Remove { limit, .. } => {
            gates.add(&limit.name, &limit.scope, &limit.options, limit.parent.as_deref())
        }
        Action::Change { name, from, .. } => gates.change(name, from),
        Action::Add { limit } => gates.remove(&limit.name),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::{
        plan,
        tests::{Model, present, wanted},
    };

    proptest! {
        #[test]
        fn a_fault_anywhere_leaves_the_host_as_it_was(
            present in present(), wanted in wanted(), prune: bool, fault in 0usize..18,
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
