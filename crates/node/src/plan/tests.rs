use std::collections::BTreeMap;

use proptest::prelude::*;
use tidegate_core::{Rate, Scope, virtual_queue::VirtualQueueOptions};

use super::*;
use crate::apply::{Gates, apply};

/// A host without a kernel: the rules that a real one enforces, and faults on demand.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) limits: BTreeMap<String, (Scope, Standing, LimitOptions)>,
    /// The verb that fails, counted from 0.
    pub(crate) fails_at: Option<usize>,
    /// Every verb after that one fails too.
    pub(crate) fails_after: bool,
    verbs: usize,
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Fault(&'static str);

impl Model {
    pub(crate) fn new(present: &[Present]) -> Model {
        let limits = present
            .iter()
            .map(|l| (l.name.clone(), (l.scope.clone(), l.standing, l.options)))
            .collect();
        Model { limits, fails_at: None, fails_after: false, verbs: 0 }
    }

    pub(crate) fn present(&self) -> Vec<Present> {
        let limit =
            |(name, (scope, standing, options)): (&String, &(Scope, Standing, _))| Present {
                name: name.clone(),
                scope: scope.clone(),
                standing: *standing,
                options: *options,
            };
        self.limits.iter().map(limit).collect()
    }

    fn count(&mut self) -> Result<(), Fault> {
        let at = self.verbs;
        self.verbs += 1;
        let fault = self.fails_at.is_some_and(|n| at == n || (self.fails_after && at > n));
        if fault { Err(Fault("injected fault")) } else { Ok(()) }
    }
}

impl Gates for Model {
    type Error = Fault;

    fn add(&mut self, name: &str, scope: &Scope, options: &LimitOptions) -> Result<(), Fault> {
        self.count()?;
        if self.limits.contains_key(name) {
            return Err(Fault("name taken"));
        }
        let on = |(on, standing, _): &(Scope, Standing, LimitOptions)| {
            on == scope && *standing != Standing::ScopeGone
        };
        if self.limits.values().any(on) {
            return Err(Fault("scope taken"));
        }
        let standing = Standing::InForce;
        self.limits.insert(name.to_owned(), (scope.clone(), standing, *options));
        Ok(())
    }

    fn change(&mut self, name: &str, options: &LimitOptions) -> Result<(), Fault> {
        self.count()?;
        self.limits.get_mut(name).ok_or(Fault("no such limit"))?.2 = *options;
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<(), Fault> {
        self.count()?;
        self.limits.remove(name).map(|_| ()).ok_or(Fault("no such limit"))
    }
}

fn egress(mbit: u64) -> LimitOptions {
    let queue = Rate::from_bit_s(mbit * 1_000_000).map(VirtualQueueOptions::new);
    LimitOptions { egress: queue, ..LimitOptions::default() }
}

fn limit(name: &str, cgroup: &str, mbit: u64) -> Wanted {
    Wanted { name: name.into(), scope: Scope::Cgroup(cgroup.into()), options: egress(mbit) }
}

pub(crate) fn two_limits() -> Vec<Wanted> {
    vec![limit("a", "x", 1), limit("b", "y", 2)]
}

/// Up to five limits of different names, on different cgroups of a few.
pub(crate) fn wanted() -> impl Strategy<Value = Vec<Wanted>> {
    let names = proptest::sample::subsequence(vec!["a", "b", "c", "d", "e"], 0..=5);
    let cgroups = Just(vec!["u", "v", "w", "x", "y", "z"]).prop_shuffle();
    (names, cgroups, proptest::collection::vec(1u64..4, 5)).prop_map(|(names, cgroups, rates)| {
        let parts = names.iter().zip(cgroups).zip(rates);
        parts.map(|((name, cgroup), rate)| limit(name, cgroup, rate)).collect()
    })
}

pub(crate) fn present() -> impl Strategy<Value = Vec<Present>> {
    let standing = prop_oneof![
        4 => Just(Standing::InForce),
        1 => Just(Standing::ScopeGone),
        1 => Just(Standing::Unhooked),
    ];
    (wanted(), proptest::collection::vec(standing, 5)).prop_map(|(limits, standings)| {
        let parts = limits.into_iter().zip(standings);
        parts
            .map(|(Wanted { name, scope, options }, standing)| Present {
                name,
                scope,
                standing,
                options,
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn once_applied_there_is_nothing_left_to_do(
        present in present(), wanted in wanted(), prune: bool,
    ) {
        let mut host = Model::new(&present);
        let Ok(first) = plan(&host.present(), &wanted, prune) else { return Ok(()) };
        apply(&mut host, &first.actions).unwrap();
        let second = plan(&host.present(), &wanted, prune).unwrap();
        prop_assert_eq!(&second.actions, &[]);
        for limit in &wanted {
            let state = (limit.scope.clone(), Standing::InForce, limit.options);
            prop_assert_eq!(host.limits.get(&limit.name), Some(&state));
        }
        if prune {
            prop_assert_eq!(host.limits.len(), wanted.len());
        }
    }

    #[test]
    fn without_pruning_what_is_not_in_the_file_stays(present in present(), wanted in wanted()) {
        let mut host = Model::new(&present);
        let Ok(plan) = plan(&present, &wanted, false) else { return Ok(()) };
        apply(&mut host, &plan.actions).unwrap();
        for limit in &present {
            let managed = wanted.iter().any(|w| w.name == limit.name);
            prop_assert_eq!(plan.unmanaged.contains(&limit.name), !managed);
            if !managed {
                prop_assert_eq!(&host.limits[&limit.name].2, &limit.options);
            }
        }
    }

    #[test]
    fn pruning_always_finds_a_way(present in present(), wanted in wanted()) {
        prop_assert!(plan(&present, &wanted, true).is_ok());
    }
}

#[test]
fn two_limits_may_change_places() {
    let mut host = Model::new(&[]);
    let first = plan(&[], &two_limits(), false).unwrap();
    apply(&mut host, &first.actions).unwrap();
    let swapped = [limit("a", "y", 1), limit("b", "x", 2)];
    let second = plan(&host.present(), &swapped, false).unwrap();
    let verbs: Vec<_> = second.actions.iter().map(Action::verb).collect();
    assert_eq!(verbs, ["remove", "remove", "add", "add"]);
    apply(&mut host, &second.actions).unwrap();
    assert_eq!(host.limits["a"].0, Scope::Cgroup("y".into()));
}

#[test]
fn a_changed_rate_is_changed_in_place() {
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &two_limits(), false).unwrap().actions).unwrap();
    let plan = plan(&host.present(), &[limit("a", "x", 9), limit("b", "y", 2)], false).unwrap();
    assert_eq!(plan.actions.len(), 1);
    assert!(matches!(&plan.actions[0], Action::Change { name, .. } if name == "a"));
}

#[test]
fn refusals_say_what_to_do() {
    let host = Model::new(&[Present {
        name: "old".into(),
        scope: Scope::Cgroup("x".into()),
        standing: Standing::InForce,
        options: egress(1),
    }]);
    let refusal = plan(&host.present(), &two_limits(), false).unwrap_err().to_string();
    insta::assert_snapshot!(refusal, @"limit `a`: cgroup `x` already has limit `old`, which is not in the file; take that one off with `tidegate limit del old`, or apply with --prune");
    let same = [limit("a", "x", 1), limit("b", "x", 1)];
    let refusal = plan(&[], &same, false).unwrap_err().to_string();
    insta::assert_snapshot!(refusal, @"limits `a` and `b` are both on cgroup `x`; put both directions in one limit, or limit a cgroup above or below it");
}

#[test]
fn other_programs_are_put_in_place_of_the_first() {
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &two_limits(), false).unwrap().actions).unwrap();
    let mut departures = limit("a", "x", 1);
    departures.options.scheme = Scheme::Edt;
    let wanted = [departures, limit("b", "y", 2)];
    let second = plan(&host.present(), &wanted, false).unwrap();
    let reasons: Vec<_> =
        second.actions.iter().map(|action| (action.verb(), action.name())).collect();
    assert_eq!(reasons, [("remove", "a"), ("add", "a")]);
}
