use std::collections::BTreeMap;

use proptest::prelude::*;
use tidegate_core::{Class, Rate, Scope, queue_options::VirtualQueueOptions};
use tidegate_sys::store::contains;

use super::*;
use crate::{
    apply::{Backend, apply},
    settings::inside_another,
    tree::{ancestors, are_kin},
};

/// A limit of the model's host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Held {
    pub(crate) scope: Scope,
    pub(crate) members: Vec<String>,
    pub(crate) gone: Vec<String>,
    pub(crate) state: State,
    pub(crate) options: LimitOptions,
    pub(crate) parent: Option<String>,
    pub(crate) other_build: Option<String>,
}

/// A host without a kernel: the rules that a real one enforces, and faults on demand.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) limits: BTreeMap<String, Held>,
    /// The verb that fails, counted from 0.
    pub(crate) fails_at: Option<usize>,
    /// Every verb after that one fails too.
    pub(crate) fails_after: bool,
    leaving: BTreeSet<String>,
    verbs: usize,
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Fault(&'static str);

impl Model {
    pub(crate) fn new(present: &[Present]) -> Model {
        let held = |limit: &Present| {
            let Present { name, scope, members, gone, state, options, parent, other_build } =
                limit.clone();
            (name, Held { scope, members, gone, state, options, parent, other_build })
        };
        let limits = present.iter().map(held).collect();
        Model { limits, fails_at: None, fails_after: false, leaving: BTreeSet::new(), verbs: 0 }
    }

    pub(crate) fn present(&self) -> Vec<Present> {
        let limit = |(name, held): (&String, &Held)| {
            let Held { scope, members, gone, state, options, parent, other_build } = held.clone();
            let name = name.clone();
            Present { name, scope, members, gone, state, options, parent, other_build }
        };
        self.limits.iter().map(limit).collect()
    }

    /// Those that are enforced, without the members that are gone: these hold nothing.
    pub(crate) fn enforced(&self) -> BTreeMap<String, Held> {
        let mut limits = self.limits.clone();
        limits.retain(|_, held| held.state == State::InForce);
        limits.values_mut().for_each(|held| held.gone.clear());
        limits
    }

    fn put(&mut self, limit: &Wanted) -> Result<(), Fault> {
        self.count()?;
        let Wanted { name, scope, members, options, parent, .. } = limit.clone();
        if self.limits.contains_key(&name) {
            return Err(Fault("name taken"));
        }
        if parent.is_some() != options.class.is_some() {
            return Err(Fault("a class, and no parent, or the other way round"));
        }
        self.check(&name, &scope, &members, parent.as_deref())?;
        let state = state_with(&scope, &members);
        let gone = Vec::new();
        let held = Held { scope, members, gone, state, options, parent, other_build: None };
        self.limits.insert(name, held);
        Ok(())
    }

    /// No two limits have one cgroup unless one is inside the other, and each is inside its parent.
    fn check(
        &self,
        name: &str,
        scope: &Scope,
        members: &[String],
        parent: Option<&str>,
    ) -> Result<(), Fault> {
        let shall = cgroups(scope, members);
        let parents = self.limits.iter().map(|(name, held)| (&**name, held.parent.as_deref()));
        let parents = parents.filter(|(of, _)| *of != name).chain([(name, parent)]).collect();
        let on = |(other, held): (&String, &Held)| {
            let is = cgroups(&held.scope, &held.members);
            let taken = held.scope == *scope || is.iter().any(|path| shall.contains(path));
            taken
                && held.state != State::ScopeGone
                && !self.leaving.contains(other)
                && other != name
                && !are_kin(name, other, &parents)
        };
        if self.limits.iter().any(on) {
            return Err(Fault("scope taken"));
        }
        if let Some(parent) = parent {
            let above = self.limits.get(parent).ok_or(Fault("no such parent"))?;
            let above = cgroups(&above.scope, &above.members);
            if !shall.iter().all(|path| above.iter().any(|above| contains(above, path))) {
                return Err(Fault("the parent is not above"));
            }
        }
        Ok(())
    }

    fn count(&mut self) -> Result<(), Fault> {
        let at = self.verbs;
        self.verbs += 1;
        let fault = self.fails_at.is_some_and(|n| at == n || (self.fails_after && at > n));
        if fault { Err(Fault("injected fault")) } else { Ok(()) }
    }
}

impl Backend for Model {
    type Error = Fault;

    fn add(&mut self, limit: &Wanted) -> Result<(), Fault> {
        if let Some(above) = limit.parent.as_ref().and_then(|parent| self.limits.get(parent)) {
            let directions = |o: &LimitOptions| (o.egress.is_some(), o.ingress.is_some());
            if directions(&above.options) != directions(&limit.options) {
                return Err(Fault("other directions than the parent"));
            }
        }
        self.put(limit)
    }

    fn replace(&mut self, limit: &Wanted) -> Result<(), Fault> {
        // Until its parent, or those inside it, are as they shall be, it may have other directions.
        let earlier = self.limits.remove(&limit.name).ok_or(Fault("nothing to replace"))?;
        let done = self.put(limit);
        if done.is_err() {
            self.limits.insert(limit.name.clone(), earlier);
        }
        done
    }

    fn set_members(&mut self, name: &str, cgroups: &[String]) -> Result<(), Fault> {
        self.count()?;
        let held = self.limits.get(name).ok_or(Fault("no such limit"))?.clone();
        if !matches!(held.scope, Scope::Select(_)) {
            return Err(Fault("no selector"));
        }
        let is_new = |path: &&String| !held.members.contains(path);
        let join: Vec<_> = cgroups.iter().filter(is_new).cloned().collect();
        self.check(name, &held.scope, &join, held.parent.as_deref())?;
        let state = match held.state {
            State::InForce | State::NoMembers => state_with(&held.scope, cgroups),
            state => state,
        };
        let (members, gone) = (cgroups.to_vec(), Vec::new());
        self.limits.insert(name.to_owned(), Held { members, gone, state, ..held });
        Ok(())
    }

    fn leaving(&mut self, names: BTreeSet<String>) {
        self.leaving = names;
    }

    fn change(&mut self, name: &str, options: &LimitOptions) -> Result<(), Fault> {
        self.count()?;
        let held = self.limits.get_mut(name).ok_or(Fault("no such limit"))?;
        if !matches!(held.state, State::InForce | State::NoMembers) {
            return Err(Fault("not in force"));
        }
        if held.parent.is_some() != options.class.is_some() {
            return Err(Fault("another parent"));
        }
        held.options = *options;
        Ok(())
    }

    fn take_over(&mut self, name: &str) -> Result<(), Fault> {
        self.count()?;
        let held = self.limits.get_mut(name).ok_or(Fault("no such limit"))?;
        held.other_build.take().map(drop).ok_or(Fault("of this build already"))
    }

    fn remove(&mut self, name: &str) -> Result<(), Fault> {
        self.count()?;
        if self.limits.values().any(|held| held.parent.as_deref() == Some(name)) {
            return Err(Fault("it has children"));
        }
        self.limits.remove(name).map(|_| ()).ok_or(Fault("no such limit"))
    }
}

/// The cgroups of a limit.
fn cgroups(scope: &Scope, members: &[String]) -> Vec<String> {
    match scope {
        Scope::Cgroup(path) => vec![path.clone()],
        Scope::Select(_) => members.to_vec(),
        _ => Vec::new(),
    }
}

fn state_with(scope: &Scope, members: &[String]) -> State {
    let is_empty = matches!(scope, Scope::Select(_)) && members.is_empty();
    if is_empty { State::NoMembers } else { State::InForce }
}

fn egress(mbit: u64) -> LimitOptions {
    let queue = Rate::from_bit_s(mbit * 1_000_000).map(VirtualQueueOptions::new);
    LimitOptions { egress: queue, ..LimitOptions::default() }
}

fn limit(name: &str, cgroup: &str, mbit: u64) -> Wanted {
    Wanted {
        name: name.into(),
        scope: Scope::Cgroup(cgroup.into()),
        members: Vec::new(),
        options: egress(mbit),
        parent: None,
        asked: Asked::default(),
    }
}

/// One inside another, with a weight.
fn child(name: &str, cgroup: &str, parent: &str, weight: u32) -> Wanted {
    let class = Some(Class { weight, ..Class::default() });
    let options = LimitOptions { class, ..inside_another() };
    Wanted { options, parent: Some(parent.into()), ..limit(name, cgroup, 1) }
}

pub(crate) fn two_limits() -> Vec<Wanted> {
    vec![limit("a", "x", 1), limit("b", "y", 2)]
}

/// Cgroups of a few, some inside others.
const CGROUPS: [&str; 9] = ["u", "u/v", "u/v/w", "u/v/w/x", "u/y", "u/y/z", "s", "s/t", "r"];

/// Up to six limits of different names, on different cgroups of a few; about half are inside another, if
/// there is one above: one of those of the next cgroup upwards that has some. Some have a selector: one of
/// these, if it is inside no other, has the cgroups that are left, too. Some are inside another on its own
/// cgroup, with what else was inside that there.
pub(crate) fn wanted() -> impl Strategy<Value = Vec<Wanted>> {
    let names = proptest::sample::subsequence(vec!["a", "b", "c", "d", "e", "f"], 0..=6);
    let cgroups = Just(CGROUPS.to_vec()).prop_shuffle();
    let more = proptest::collection::vec((1u64..4, any::<bool>(), any::<bool>()), 6);
    let selects = proptest::collection::vec(any::<bool>(), 6);
    let beside = proptest::collection::vec(any::<bool>(), 6);
    (names, cgroups, more, selects, beside).prop_map(|(names, cgroups, more, selects, beside)| {
        let on: BTreeMap<_, _> = cgroups.iter().copied().zip(names.iter().copied()).collect();
        let parts = names.iter().zip(&cgroups).zip(more);
        let limit = |((name, cgroup), (rate, inside, both)): ((&&str, &&str), _)| {
            let parent = ancestors(cgroup).skip(1).find_map(|above| on.get(above));
            if let Some(parent) = parent.filter(|_| inside) {
                return child(name, cgroup, parent, rate as u32 * 100);
            }
            let mut limit = limit(name, cgroup, rate);
            limit.options.ingress = limit.options.egress.filter(|_| both);
            limit
        };
        let mut limits: Vec<_> = parts.map(limit).collect();
        let mut left: Vec<_> = cgroups.iter().skip(names.len()).map(ToString::to_string).collect();
        for (limit, _) in limits.iter_mut().zip(selects).filter(|(_, select)| *select) {
            limit.members = vec![limit.scope.name().to_owned()];
            limit.scope = Scope::of_cgroup(&format!("*{}", limit.name));
            if limit.parent.is_none() {
                limit.members.append(&mut left);
            }
        }
        // One that nobody is inside of may have none.
        let parents: Vec<_> = limits.iter().filter_map(|limit| limit.parent.clone()).collect();
        let mut selectors = limits.iter_mut().filter(|limit| !limit.members.is_empty());
        if let Some(last) = selectors.next_back().filter(|l| !parents.contains(&l.name)) {
            last.members.clear();
        }
        for (i, _) in beside.into_iter().enumerate().filter(|(_, beside)| *beside) {
            put_beside(&mut limits, i);
        }
        limits
    })
}

/// Puts a limit that nobody is inside of on the cgroup of the next one, inside that.
fn put_beside(limits: &mut [Wanted], i: usize) {
    let count = limits.len();
    if i + 1 >= count || limits.iter().any(|l| l.parent.as_ref() == Some(&limits[i].name)) {
        return;
    }
    let (name, parent) = (limits[i].name.clone(), limits[i + 1].name.clone());
    let at = cgroups(&limits[i + 1].scope, &limits[i + 1].members);
    let Some(at) = at.into_iter().next() else { return };
    for limit in limits.iter_mut().filter(|limit| limit.parent.as_ref() == Some(&parent)) {
        if cgroups(&limit.scope, &limit.members).iter().all(|path| contains(&at, path)) {
            limit.parent = Some(name.clone());
        }
    }
    limits[i] = child(&name, &at, &parent, 100);
}

/// What a host may have: children have the directions of their parents, and are gone where those are.
pub(crate) fn present() -> impl Strategy<Value = Vec<Present>> {
    let state = prop_oneof![
        4 => Just(State::InForce),
        1 => Just(State::ScopeGone),
        1 => Just(State::Detached),
    ];
    (wanted(), proptest::collection::vec(state, 6)).prop_map(|(limits, states)| {
        let mut members: Vec<_> = limits.iter().map(Member::from).collect();
        family::resolve(&mut members, true).unwrap();
        let of = |(limit, state): (&Wanted, &State)| {
            let paths = cgroups(&limit.scope, &limit.members).into_iter();
            paths.map(|path| (path, *state)).collect::<Vec<_>>()
        };
        let mut state_of = BTreeMap::new();
        for (path, state) in limits.iter().zip(&states).flat_map(of) {
            let is = state_of.entry(path).or_insert(state);
            *is = if *is == State::ScopeGone { *is } else { state };
        }
        let present = |(member, state): (&Member, &State)| {
            let Wanted { name, scope, members, options, parent, .. } = member.wanted();
            let is_gone =
                |path: &str| ancestors(path).any(|p| state_of.get(p) == Some(&State::ScopeGone));
            let (gone, members): (Vec<_>, Vec<_>) =
                members.into_iter().partition(|path| is_gone(path));
            let state = match (&scope, *state) {
                (Scope::Select(_), _) if members.is_empty() => State::NoMembers,
                (Scope::Select(_), State::ScopeGone) => State::InForce,
                (Scope::Select(_), state) => state,
                (scope, _) if is_gone(scope.name()) => State::ScopeGone,
                (_, state) => state,
            };
            Present { name, scope, members, gone, state, options, parent, other_build: None }
        };
        members.iter().zip(&states).map(present).collect()
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
            let held = &host.limits[&limit.name];
            let state = state_with(&limit.scope, &limit.members);
            prop_assert_eq!((&held.scope, held.state), (&limit.scope, state));
            let sorted = |paths: &[String]| paths.iter().cloned().collect::<BTreeSet<_>>();
            prop_assert_eq!(sorted(&held.members), sorted(&limit.members));
            prop_assert_eq!(&held.gone, &[""; 0]);
            prop_assert_eq!((&held.parent, held.options.class), (&limit.parent, limit.options.class));
        }
        if prune {
            prop_assert_eq!(host.limits.len(), wanted.len());
        }
        for held in host.enforced().values() {
            let Some(parent) = &held.parent else { continue };
            let above = host.limits[parent].options;
            prop_assert_eq!(above.egress.is_some(), held.options.egress.is_some());
            prop_assert_eq!(above.ingress.is_some(), held.options.ingress.is_some());
        }
    }

    #[test]
    fn without_pruning_what_is_not_in_the_file_stays(present in present(), wanted in wanted()) {
        let mut host = Model::new(&present);
        let Ok(plan) = plan(&present, &wanted, false) else { return Ok(()) };
        apply(&mut host, &plan.actions).unwrap();
        for limit in present.iter().filter(|l| !wanted.iter().any(|w| w.name == l.name)) {
            // Taken off or changed only with its parent, and lost only if there is nothing to lose.
            let touched = plan.actions.iter().any(|action| action.name() == limit.name);
            let off = plan.actions.iter().any(|action| {
                match action {
                    Action::Remove { limit: off, .. } | Action::Replace { from: off, .. } => {
                        off.name == limit.name
                    }
                    _ => false,
                }
            });
            prop_assert_eq!(plan.unmanaged.contains(&limit.name), !off);
            prop_assert!(!touched || limit.parent.is_some());
            match host.limits.get(&limit.name) {
                Some(held) => prop_assert_eq!(held.options.class, limit.options.class),
                None => prop_assert!(matches!(limit.state, State::ScopeGone | State::NoMembers)),
            }
        }
    }

    #[test]
    fn pruning_always_finds_a_way(present in present(), wanted in wanted()) {
        prop_assert!(plan(&present, &wanted, true).is_ok());
    }
}

fn verbs(plan: &Plan) -> Vec<(&'static str, &str)> {
    plan.actions.iter().map(|action| (action.verb(), action.name())).collect()
}

fn tree_of(top: &str) -> Vec<Wanted> {
    let below = |path: &str| format!("{top}{path}");
    vec![
        child("c", &below("/b/c"), "b", 100),
        child("b", &below("/b"), "a", 100),
        limit("a", top, 9),
    ]
}

#[test]
fn parents_come_first_and_go_last() {
    let mut host = Model::new(&[]);
    let first = plan(&[], &tree_of("x"), false).unwrap();
    assert_eq!(verbs(&first), [("add", "a"), ("add", "b"), ("add", "c")]);
    apply(&mut host, &first.actions).unwrap();
    let none = plan(&host.present(), &[], true).unwrap();
    assert_eq!(verbs(&none), [("remove", "c"), ("remove", "b"), ("remove", "a")]);
}

#[test]
fn what_is_inside_goes_with_its_parent() {
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &tree_of("x"), false).unwrap().actions).unwrap();
    // Nobody asks for the others, and they stay.
    host.limits.get_mut("a").unwrap().state = State::Detached;
    let again = plan(&host.present(), &[limit("a", "x", 9)], false).unwrap();
    assert_eq!(verbs(&again), [("replace", "a"), ("replace", "b"), ("replace", "c")]);
    assert_eq!(again.unmanaged, [""; 0]);
    // Their programs are where they were.
    host.limits.get_mut("a").unwrap().state = State::InForce;
    let mut both = limit("a", "x", 9);
    both.options.ingress = both.options.egress;
    let widened = plan(&host.present(), &[both], false).unwrap();
    assert_eq!(verbs(&widened), [("change", "a"), ("change", "b"), ("change", "c")]);
    assert_eq!(widened.unmanaged, ["b", "c"]);
}

#[test]
fn what_is_inside_a_removed_cgroup_goes_with_its_limit() {
    let mut tree = tree_of("x");
    tree[0].scope = Scope::of_cgroup("x/b/*");
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &tree, false).unwrap().actions).unwrap();
    host.limits.get_mut("a").unwrap().state = State::Detached;
    host.limits.get_mut("b").unwrap().state = State::ScopeGone;
    let again = plan(&host.present(), &[limit("a", "x", 9)], false).unwrap();
    assert_eq!(verbs(&again), [("remove", "c"), ("remove", "b"), ("replace", "a")]);
    apply(&mut host, &again.actions).unwrap();
    assert_eq!(host.limits.keys().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn another_parent_is_another_limit() {
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &tree_of("x"), false).unwrap().actions).unwrap();
    let mut wanted = tree_of("x");
    wanted[0].parent = Some("a".into());
    let refusal = plan(&host.present(), &wanted, false).unwrap_err().to_string();
    insta::assert_snapshot!(refusal, @"limit `c`: parent: `b` is on a cgroup between the two; the parent must be `b`: write that, or remove the limit and add it again");
    wanted[1] = limit("b", "x/b", 5);
    let second = plan(&host.present(), &wanted, false).unwrap();
    assert_eq!(verbs(&second), [("replace", "b"), ("replace", "c")]);
    assert!(second.actions.iter().any(|action| {
        matches!(action, Action::Replace { reason: Reason::OtherParent, to, .. } if to.name == "c")
    }));
}

#[test]
fn a_parent_that_would_be_pruned_is_missed() {
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &[limit("a", "x", 9)], false).unwrap().actions).unwrap();
    let inside = [child("b", "x/b", "a", 100)];
    assert_eq!(verbs(&plan(&host.present(), &inside, false).unwrap()), [("add", "b")]);
    let refusal = plan(&host.present(), &inside, true).unwrap_err().to_string();
    insta::assert_snapshot!(refusal, @"limit `b`: its parent `a` is in no file, so the agent and `apply --prune` remove it; write it into the file");
}

#[test]
fn two_limits_may_change_places() {
    let mut host = Model::new(&[]);
    let first = plan(&[], &two_limits(), false).unwrap();
    apply(&mut host, &first.actions).unwrap();
    let swapped = [limit("a", "y", 1), limit("b", "x", 2)];
    let second = plan(&host.present(), &swapped, false).unwrap();
    let verbs: Vec<_> = second.actions.iter().map(Action::verb).collect();
    assert_eq!(verbs, ["replace", "replace"]);
    apply(&mut host, &second.actions).unwrap();
    assert_eq!(host.limits["a"].scope, Scope::Cgroup("y".into()));
}

#[test]
fn what_comes_comes_before_what_goes() {
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &two_limits(), false).unwrap().actions).unwrap();
    // Another name for the limit of `x`, and one that nobody asks for any more.
    let renamed = plan(&host.present(), &[limit("c", "x", 1)], true).unwrap();
    assert_eq!(verbs(&renamed), [("add", "c"), ("remove", "a"), ("remove", "b")]);
    apply(&mut host, &renamed.actions).unwrap();
    // A device has one HTB.
    let of = |name: &str, device: &str| {
        let options = LimitOptions { scheme: Scheme::Htb, ..egress(5) };
        Wanted { scope: Scope::Dev(device.to_owned()), options, ..limit(name, "", 5) }
    };
    let first = plan(&[], &[of("h", "eth0")], false).unwrap();
    let mut host = Model::new(&[]);
    apply(&mut host, &first.actions).unwrap();
    let renamed = plan(&host.present(), &[of("i", "eth0")], true).unwrap();
    assert_eq!(verbs(&renamed), [("remove", "h"), ("add", "i")]);
    let moved = plan(&host.present(), &[of("h", "eth1")], true).unwrap();
    assert_eq!(verbs(&moved), [("replace", "h")]);
}

#[test]
fn a_changed_rate_is_changed_in_place() {
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &two_limits(), false).unwrap().actions).unwrap();
    let plan = plan(&host.present(), &[limit("a", "x", 9), limit("b", "y", 2)], false).unwrap();
    assert_eq!(plan.actions.len(), 1);
    assert!(matches!(&plan.actions[0], Action::Change { name, .. } if name == "a"));
}

/// What another build has made goes on with other programs, and what else the file says is changed then.
#[test]
fn a_limit_of_another_build_is_taken_over() {
    let wanted = two_limits();
    let mut host = Model::new(&[]);
    apply(&mut host, &plan(&[], &wanted, false).unwrap().actions).unwrap();
    for name in ["a", "b"] {
        host.limits.get_mut(name).unwrap().other_build = Some("0.0.1".to_owned());
    }
    let wanted = [limit("a", "x", 9)];
    let verbs = |host: &Model| {
        let plan = plan(&host.present(), &wanted, false).unwrap();
        plan.actions.iter().map(|a| (a.verb(), a.name().to_owned())).collect::<Vec<_>>()
    };
    let both = ["take_over", "change"].map(|verb| (verb, "a".to_owned()));
    assert_eq!(verbs(&host), both);
    let actions = plan(&host.present(), &wanted, false).unwrap().actions;
    apply(&mut host, &actions).unwrap();
    assert_eq!(verbs(&host), []);
    assert!(host.limits["b"].other_build.is_some(), "not in the file, left alone");
}

#[test]
fn refusals_say_what_to_do() {
    let host = Model::new(&[Present {
        name: "old".into(),
        scope: Scope::Cgroup("x".into()),
        members: Vec::new(),
        gone: Vec::new(),
        state: State::InForce,
        options: egress(1),
        parent: None,
        other_build: None,
    }]);
    let refusal = plan(&host.present(), &two_limits(), false).unwrap_err().to_string();
    insta::assert_snapshot!(refusal, @"limit `a`: cgroup `x` already has limit `old`, which is not in the file; remove that one with `tidegate limit del old`, or apply with --prune");
    let same = [limit("a", "x", 1), limit("b", "x", 1)];
    let refusal = plan(&[], &same, false).unwrap_err().to_string();
    insta::assert_snapshot!(refusal, @"limits `a` and `b` are both on cgroup `x`; put both directions in one limit, write one as the parent of the other, or limit a cgroup above or below it");
}

#[test]
fn limits_inside_one_another_are_on_one_cgroup() {
    let mut host = Model::new(&[]);
    let nested = [child("c", "x", "b", 1), child("b", "x", "a", 1), limit("a", "x", 9)];
    apply(&mut host, &plan(&[], &nested, false).unwrap().actions).unwrap();
    assert_eq!(plan(&host.present(), &nested, false).unwrap().actions, []);
    // Siblings are not, wherever the other one is; nor is one that is inside none of them.
    let present = host.present();
    let refusal = |wanted: &[Wanted]| plan(&present, wanted, false).unwrap_err().to_string();
    insta::assert_snapshot!(refusal(&[child("b", "x", "a", 1), child("d", "x", "a", 1)]), @"limits `b` and `d` are both on cgroup `x`; put both directions in one limit, write one as the parent of the other, or limit a cgroup above or below it");
    insta::assert_snapshot!(refusal(&[child("d", "x", "a", 1)]), @"limit `d`: cgroup `x` already has limit `b`, which is not in the file; remove that one with `tidegate limit del b`, or apply with --prune");
    insta::assert_snapshot!(refusal(&[limit("d", "x", 1)]), @"limit `d`: cgroup `x` already has limit `a`, which is not in the file; remove that one with `tidegate limit del a`, or apply with --prune");
    insta::assert_snapshot!(join(&present, &child("d", "x", "a", 1)).unwrap_err().to_string(), @"limit `d`: parent: `b` is inside `a` on the same cgroup; write one of the two as the parent of the other");
    insta::assert_snapshot!(refusal(&[child("d", "x/y", "a", 1)]), @"limit `d`: parent: `b` is on a cgroup between the two; the parent must be `b`: write that, or remove the limit and add it again");
    // The tree is turned round.
    let turned = [child("a", "x", "b", 1), child("b", "x", "c", 1), limit("c", "x", 9)];
    let turn = plan(&host.present(), &turned, false).unwrap();
    apply(&mut host, &turn.actions).unwrap();
    assert_eq!(plan(&host.present(), &turned, false).unwrap().actions, []);
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
    assert_eq!(reasons, [("replace", "a")]);
}

/// A limit of scheme `police` for some prefixes of one device.
fn matched(name: &str, prefixes: &str) -> Wanted {
    let matched = prefixes.parse().unwrap();
    let options = LimitOptions { scheme: Scheme::Police, matched, ..egress(5) };
    Wanted { scope: Scope::Dev("eth0".to_owned()), options, ..limit(name, "", 5) }
}

/// Cgroups move from one limit to another without a moment without any.
#[test]
fn cgroups_join_before_they_leave() {
    let select = |name: &str, members: &[&str]| Wanted {
        scope: Scope::of_cgroup(&format!("{name}/*")),
        members: members.iter().map(ToString::to_string).collect(),
        ..limit(name, "", 5)
    };
    let mut host = Model::new(&[]);
    let first = plan(&[], &[select("a", &["x", "y"]), select("b", &[])], false).unwrap();
    apply(&mut host, &first.actions).unwrap();
    assert_eq!(host.limits["b"].state, State::NoMembers);
    host.limits.get_mut("a").unwrap().gone = vec!["old".to_owned()];
    let wanted = [select("a", &["y"]), select("b", &["x"])];
    let second = plan(&host.present(), &wanted, false).unwrap();
    let steps = second.actions.iter().map(|action| match action {
        Action::Members { name, join, leave, .. } => format!("{name} +{join:?} -{leave:?}"),
        other => panic!("{other:?}"),
    });
    assert_eq!(steps.collect::<Vec<_>>(), [r#"b +["x"] -[]"#, r#"a +[] -["x", "old"]"#]);
    apply(&mut host, &second.actions).unwrap();
    assert_eq!(plan(&host.present(), &wanted, false).unwrap().actions, []);
    let both = [select("a", &["y"]), select("b", &["x", "y"])];
    let refusal = plan(&host.present(), &both, false).unwrap_err().to_string();
    assert!(refusal.contains("limits `a` and `b` are both on cgroup `y`"), "{refusal}");
    let single = [limit("c", "x", 1)];
    let refusal = plan(&host.present(), &single, false).unwrap_err().to_string();
    assert!(refusal.contains("cgroup `x` already has limit `b`"), "{refusal}");
}

#[test]
fn prefixes_of_a_device_are_apart() {
    let held = |limit: &Wanted| {
        let Wanted { name, scope, options, parent, .. } = limit.clone();
        let (members, gone, state) = (Vec::new(), Vec::new(), State::InForce);
        Present { name, scope, members, gone, options, parent, state, other_build: None }
    };
    let of = |is: &[Wanted], shall: &[Wanted], prune| {
        let is: Vec<_> = is.iter().map(held).collect();
        plan(&is, shall, prune).map(|plan| {
            verbs(&plan).iter().map(|(verb, name)| format!("{verb} {name}")).collect::<Vec<_>>()
        })
    };
    let (a, b) = (matched("a", "10.0.0.1,10.0.0.2"), matched("b", "10.0.0.3"));
    let is = [a.clone(), b.clone()];
    assert_eq!(of(&[], &is, false).unwrap(), ["add a", "add b"]);
    assert_eq!(of(&is[..1], &is[1..], false).unwrap(), ["add b"], "another prefix");
    // In place, but for one that another limit has, or none at all.
    let more = matched("b", "10.0.0.3,10.0.0.4");
    assert_eq!(of(&is, &[a.clone(), more], false).unwrap(), ["change b"]);
    let swapped = [matched("a", "10.0.0.3"), matched("b", "10.0.0.1")];
    let steps = of(&is, &swapped, false).unwrap();
    assert_eq!(steps, ["remove a", "remove b", "add a", "add b"]);
    assert_eq!(of(&is, &[a.clone(), matched("b", "none")], false).unwrap(), ["replace b"]);
    let refusal = |is: &[Wanted], shall: &[Wanted]| of(is, shall, false).unwrap_err().to_string();
    let taken = matched("c", "10.0.0.0/24,10.0.0.2");
    assert!(
        refusal(&is, std::slice::from_ref(&taken))
            .contains("already has limit `a` for 10.0.0.2/32")
    );
    assert_eq!(
        of(&is, std::slice::from_ref(&taken), true).unwrap(),
        ["remove a", "add c", "remove b"]
    );
    assert!(refusal(&[], &[a, taken]).contains("both have 10.0.0.2/32 of device `eth0`"));
}

/// What cannot be read is put on anew if somebody asks for it, and else is left alone and binds nobody.
#[test]
fn a_limit_that_cannot_be_read_disturbs_no_plan() {
    let broken = |name: &str, scope: Scope, parent: Option<&str>| Present {
        name: name.into(),
        scope,
        members: Vec::new(),
        gone: Vec::new(),
        state: State::Broken,
        options: LimitOptions::default(),
        parent: parent.map(str::to_owned),
        other_build: None,
    };
    let present = [
        broken("tree", Scope::Dev("eth0".into()), None),
        broken("leaf", Scope::Cgroup("x/leaf".into()), Some("tree")),
    ];
    let others = plan(&present, &[limit("new", "y", 5)], false).unwrap();
    assert!(matches!(&others.actions[..], [Action::Add { .. }]), "{:?}", others.actions);
    assert_eq!(others.unmanaged, ["tree", "leaf"]);
    // Its place is not free.
    let taken = plan(&present, &[limit("new", "x/leaf", 5)], false).unwrap_err();
    assert!(matches!(taken, PlanError::ScopeTaken { other, .. } if other == "leaf"));
    // It still limits, as far as anybody knows: it goes when its successor comes.
    let again = [limit("new", "y", 5), limit("leaf", "x/leaf", 5), limit("more", "z", 5)];
    let again = plan(&present, &again, false).unwrap();
    assert!(
        matches!(
            &again.actions[..],
            [
                Action::Add { .. },
                Action::Replace { reason: Reason::Broken, .. },
                Action::Add { .. }
            ]
        ),
        "{:?}",
        again.actions
    );
    // On a device it may hold what another limit needs.
    let mut up = limit("up", "eth0", 5);
    (up.scope, up.options.scheme) = (Scope::Dev("eth0".into()), Scheme::Htb);
    let renamed = plan(&present, &[up], true).unwrap();
    let words: Vec<_> = renamed.actions.iter().map(|a| (a.verb(), a.name())).collect();
    assert_eq!(words, [("remove", "leaf"), ("remove", "tree"), ("add", "up")]);
    let pruned = plan(&present, &[], true).unwrap();
    let names: Vec<_> = pruned.actions.iter().map(Action::name).collect();
    assert_eq!(names, ["leaf", "tree"], "children first");
    // What was taken off cannot be put back if nobody knows what it did, and that is said.
    let mut host = Model::new(&present);
    host.fails_at = Some(2);
    let error = apply(&mut host, &again.actions).unwrap_err().to_string();
    assert!(error.contains("replace `leaf`: it could not be read"), "{error}");
    assert_eq!(host.enforced().into_keys().collect::<Vec<_>>(), ["leaf"], "its successor stays");
    // Else it is put on as it was.
    let mut known = present[1].clone();
    (known.options, known.parent) = (egress(7), None);
    let mut host = Model::new(&[known]);
    let again = plan(&host.present(), &[limit("leaf", "x/leaf", 5), limit("more", "z", 5)], false);
    host.fails_at = Some(1);
    let error = apply(&mut host, &again.unwrap().actions).unwrap_err();
    assert!(matches!(error, crate::apply::ApplyError::RolledBack { .. }), "{error}");
    assert_eq!(host.enforced()["leaf"].options, egress(7));
}
