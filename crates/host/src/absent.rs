//! Limits of a spec that wait: their cgroup or device does not exist yet, or that of their parent.
//!
//! They are no reason to refuse the rest of the file. A plan leaves what the host has of them as it is, and
//! `tidegate apply` puts them on once there is something to put them on. Pure.

use std::collections::BTreeSet;

use tidegate_core::{Scope, Selector, SelectorKind};
use tidegate_sys::{cgroup::CgroupError, fq::FqError};

use crate::{
    plan::{Present, Wanted, parts},
    world::Users,
};

/// What a limit is to be put on does not exist.
#[derive(Debug, thiserror::Error)]
pub enum ScopeError {
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Device(#[from] FqError),
}

impl ScopeError {
    /// Whether it does not exist now, and may exist later.
    pub fn is_missing(&self) -> bool {
        matches!(
            self,
            ScopeError::Cgroup(CgroupError::Missing { .. })
                | ScopeError::Device(FqError::Missing(_))
        )
    }
}

/// A limit of a spec that cannot be yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waits {
    pub name: String,
    pub scope: Scope,
    /// Its parent, where it waits for that although its own cgroup or device exists.
    pub parent: Option<String>,
}

/// Whether the agent alone finds what a scope matches.
pub fn is_for_the_agent(scope: &Scope) -> bool {
    use SelectorKind::{Container, Labels, Pod};
    matches!(scope, Scope::Select(Selector { kind: Container | Labels | Pod, .. }))
}

/// Why a limit waits whose scope matches nothing, where these are the users.
pub fn missing(scope: &Scope, users: &Users) -> String {
    match scope {
        Scope::Select(Selector { kind: SelectorKind::Pod, .. }) => {
            "only `tidegate agent --kubernetes` knows which pods are here".to_owned()
        }
        scope if is_for_the_agent(scope) => {
            "only `tidegate agent` knows which containers are here".to_owned()
        }
        scope => nothing_on(scope, users),
    }
}

/// That a scope matches nothing. A user that is not logged in exists, as a unit that is stopped does. One
/// that `/etc/passwd` does not have, such as a user of LDAP, is known by number alone.
pub fn nothing_on(scope: &Scope, users: &Users) -> String {
    use SelectorKind::{Container, Exe, Labels, Slice, Unit, User};
    match scope {
        Scope::Select(Selector { kind: User, value })
            if value.parse::<u32>().is_err() && !users.contains_key(value) =>
        {
            format!("no {scope} in /etc/passwd; write the number (`id -u {value}`)")
        }
        Scope::Select(Selector { kind: User, .. }) => format!("nobody is logged in as {scope}"),
        Scope::Select(Selector { kind: Unit | Slice | Container | Labels | Exe, .. }) => {
            format!("no {scope} runs")
        }
        Scope::Select(Selector { kind: SelectorKind::Pod, value }) if !value.contains('/') => {
            format!("there is no pod `{value}/*`")
        }
        scope => format!("there is no {scope}"),
    }
}

/// Has limits wait whose parent does.
pub fn with_parents(wanted: &mut Vec<Wanted>, waiting: &mut Vec<Waits>) {
    loop {
        let waits = |limit: &Wanted| {
            limit.parent.as_ref().is_some_and(|p| waiting.iter().any(|waits| waits.name == *p))
        };
        let Some(at) = wanted.iter().position(waits) else { return };
        let Wanted { name, scope, parent, .. } = wanted.remove(at);
        waiting.push(Waits { name, scope, parent });
    }
}

/// The limits of a host that a plan has to do with: without those that wait, and those inside them, which
/// stay as they are, unless `prune` says that they go. One that holds what another limit of the spec is to
/// have is not set aside.
pub fn set_aside(
    present: &[Present],
    wanted: &[Wanted],
    waiting: &[Waits],
    prune: impl Fn(&str) -> bool,
) -> Vec<Present> {
    let wanted_names: BTreeSet<_> = wanted.iter().map(|limit| limit.name.as_str()).collect();
    let is_asked_for = |is: &Present| {
        let has = parts(&is.scope, &is.members, &is.options);
        !is.state.is_gone()
            && wanted.iter().any(|limit| {
                let shall = parts(&limit.scope, &limit.members, &limit.options);
                shall.iter().any(|part| has.contains(part))
            })
    };
    let waits = |is: &Present| waiting.iter().any(|waits| waits.name == is.name);
    let mut aside: BTreeSet<&str> = present
        .iter()
        .filter(|is| waits(is) && !is_asked_for(is))
        .map(|is| is.name.as_str())
        .collect();
    loop {
        let inside = present.iter().find(|is| {
            let parent = is.parent.as_deref().is_some_and(|parent| aside.contains(parent));
            parent && !aside.contains(is.name.as_str()) && !wanted_names.contains(is.name.as_str())
        });
        let Some(inside) = inside else { break };
        aside.insert(&inside.name);
    }
    let goes = |is: &Present| !waits(is) && prune(&is.name);
    present.iter().filter(|is| !aside.contains(is.name.as_str()) || goes(is)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use tidegate_core::queue_options::VirtualQueueOptions;
    use tidegate_sys::limit::LimitOptions;

    use super::*;
    use crate::{
        plan::{Action, State, plan},
        settings::Asked,
    };

    fn options() -> LimitOptions {
        let queue = VirtualQueueOptions::new("1mbit".parse().unwrap());
        LimitOptions { egress: Some(queue), ..LimitOptions::default() }
    }

    fn wanted(name: &str, scope: &str, parent: Option<&str>) -> Wanted {
        Wanted {
            name: name.to_owned(),
            scope: Scope::Cgroup(scope.to_owned()),
            members: Vec::new(),
            options: options(),
            parent: parent.map(str::to_owned),
            asked: Asked::default(),
        }
    }

    fn present(name: &str, scope: &str, state: State) -> Present {
        let scope = Scope::Cgroup(scope.to_owned());
        let (name, options) = (name.to_owned(), options());
        let (members, gone) = (Vec::new(), Vec::new());
        Present { name, scope, members, gone, state, options, parent: None, other_build: None }
    }

    fn waits(name: &str) -> Waits {
        Waits { name: name.to_owned(), scope: Scope::Cgroup("none".to_owned()), parent: None }
    }

    #[test]
    fn what_waits_says_what_is_true() {
        let users = Users::from([("root".to_owned(), 0)]);
        let nothing_on = |scope: &Scope| nothing_on(scope, &users);
        let said = |kind, name| nothing_on(&crate::spec::scope_of(kind, name).unwrap());
        assert_eq!(said("user", "root"), "nobody is logged in as user `root`");
        assert_eq!(said("user", "1000"), "nobody is logged in as user `1000`");
        let unknown = "no user `anna` in /etc/passwd; write the number (`id -u anna`)";
        assert_eq!(said("user", "anna"), unknown);
        assert_eq!(said("unit", "a.service"), "no unit `a.service` runs");
        assert_eq!(said("cgroup", "a/*"), "there is no cgroup `a/*`");
        let pod = |selector: &str| nothing_on(&Scope::Select(selector.parse().unwrap()));
        assert_eq!(pod("pod:prod"), "there is no pod `prod/*`", "a namespace");
        assert_eq!(pod("pod:prod/api-0"), "there is no pod `prod/api-0`");
    }

    #[test]
    fn a_limit_waits_with_its_parent_wherever_that_is_in_the_file() {
        let mut all =
            vec![wanted("c", "z", Some("b")), wanted("b", "y", Some("a")), wanted("d", "d", None)];
        let mut waiting = vec![waits("a")];
        with_parents(&mut all, &mut waiting);
        assert_eq!(all.iter().map(|limit| limit.name.as_str()).collect::<Vec<_>>(), ["d"]);
        let who: Vec<_> = waiting.iter().map(|w| (w.name.as_str(), w.parent.as_deref())).collect();
        assert_eq!(who, [("a", None), ("b", Some("a")), ("c", Some("b"))]);
    }

    #[test]
    fn what_waits_is_left_as_it_is_and_the_rest_is_planned() {
        let is = [
            present("a", "a", State::ScopeGone),
            Present { parent: Some("a".into()), ..present("inside", "a/b", State::ScopeGone) },
            present("b", "b", State::InForce),
        ];
        for prune in [false, true] {
            let wanted = [wanted("b", "b", None), wanted("c", "c", None)];
            let is = set_aside(&is, &wanted, &[waits("a")], |_| prune);
            let plan = plan(&is, &wanted, prune).unwrap();
            // What is in no file goes if asked, though the limit around it waits.
            let actions = plan.actions.iter().map(|action| match action {
                Action::Add { limit } => ("add", limit.name.as_str()),
                Action::Remove { limit, .. } => ("remove", limit.name.as_str()),
                action => panic!("{action:?}"),
            });
            let all = [("remove", "inside"), ("add", "c")];
            assert_eq!(actions.collect::<Vec<_>>(), all[usize::from(!prune)..]);
            assert!(plan.unmanaged.is_empty());
        }
    }

    #[test]
    fn one_in_force_elsewhere_stays_until_it_can_move_unless_another_is_to_have_its_place() {
        let is = [present("a", "x", State::InForce)];
        assert_eq!(set_aside(&is, &[wanted("b", "y", None)], &[waits("a")], |_| true), []);
        assert_eq!(set_aside(&is, &[wanted("b", "x", None)], &[waits("a")], |_| true), is);
    }
}
