//! The rates of limits whose group decides them. A file says the most that such a limit may use; what it has
//! now is the daemon's affair, and applying the file again leaves it alone.

use std::collections::BTreeMap;

use tidegate_core::{Direction, Rate};

use super::backend::Place;
use tidegate_host::{
    fleet::GroupSpec,
    plan::{Action, Plan, Present, Wanted},
    spec::Spec,
};

/// The wanted limits of a spec, those of groups with the rate that they have. One that is new starts with its
/// part of what a host may use that hears of nobody.
pub fn kept(spec: &Spec, present: &[Present], wanted: &[Wanted]) -> Vec<Wanted> {
    let mut wanted = wanted.to_vec();
    for group in &spec.groups {
        let alone = group.alone_bit_s() / group.members.len().max(1) as u64;
        for limit in wanted.iter_mut().filter(|limit| group.members.contains(&limit.name)) {
            let is = present.iter().find(|is| is.name == limit.name);
            let is = is.and_then(|is| Some(is.options.queue(group.direction)?.rate));
            let Some(queue) = limit.options.queue_mut(group.direction) else { continue };
            let rate = is.or_else(|| Rate::from_bit_s(alone)).unwrap_or(queue.rate);
            queue.rate = rate.min(queue.rate);
        }
    }
    wanted
}

/// Has limits of groups that a plan takes off and puts on again start with their part of what a host may use
/// that hears of nobody: what a group had lent them had an end, and is not a new limit's for ever.
pub fn begin_alone(spec: &Spec, plan: &mut Plan) {
    for group in &spec.groups {
        let alone = group.alone_bit_s() / group.members.len().max(1) as u64;
        let Some(alone) = Rate::from_bit_s(alone) else { continue };
        for action in &mut plan.actions {
            // What is taken off comes back so if the plan cannot be carried out.
            let (name, options) = match action {
                Action::Add { limit } => (&limit.name, vec![&mut limit.options]),
                Action::Remove { limit, .. } => (&limit.name, vec![&mut limit.options]),
                Action::Replace { from, to, .. } => {
                    (&to.name, vec![&mut from.options, &mut to.options])
                }
                Action::Change { .. } | Action::Members { .. } | Action::TakeOver { .. } => {
                    continue;
                }
            };
            if !group.members.contains(name) {
                continue;
            }
            for options in options {
                if let Some(queue) = options.queue_mut(group.direction) {
                    queue.rate = queue.rate.min(alone);
                }
            }
        }
    }
}

/// The groups of a spec, each with the rates that its members have in the file.
pub fn with_ceilings(spec: &Spec) -> Vec<(GroupSpec, Vec<Rate>)> {
    let rate = |group: &GroupSpec, name: &String| {
        let limit = spec.limits.iter().find(|limit| limit.name == *name)?;
        Some(limit.options.queue(group.direction)?.rate)
    };
    // A spec that was parsed has a rate for each.
    let of = |group: &GroupSpec| {
        let ceilings = group.members.iter().map(|name| rate(group, name).unwrap_or(group.rate));
        (group.clone(), ceilings.collect())
    };
    spec.groups.iter().map(of).collect()
}

/// The rates of the limits that are in no group.
pub fn of_no_group(spec: &Spec) -> BTreeMap<Place, Rate> {
    let mut own = BTreeMap::new();
    for limit in &spec.limits {
        for direction in Direction::BOTH {
            let is_in = |group: &GroupSpec| {
                group.direction == direction && group.members.contains(&limit.name)
            };
            if let Some(queue) = limit.options.queue(direction)
                && !spec.groups.iter().any(is_in)
            {
                let place = Place { limit: limit.name.clone(), direction };
                own.insert(place, queue.rate);
            }
        }
    }
    own
}

#[cfg(test)]
mod tests {
    use tidegate_core::Scope;
    use tidegate_sys::limit::LimitOptions;

    use super::*;
    use tidegate_host::plan::{State, plan};

    const SPEC: &str = r#"
        [fleet]
        name = "prod"
        keys = "k"
        [[group]]
        name = "uplink"
        rate = "10gbit"
        algorithm = "fps"
        members = ["a"]
        hosts = 10
        [[limit]]
        name = "a"
        scope = { cgroup = "a" }
        egress = "5gbit"
        ingress = "5gbit"
    "#;

    fn wanted(text: &str) -> (Spec, Vec<Wanted>) {
        let spec = Spec::parse("f", text).unwrap();
        let of = |limit: &tidegate_host::spec::LimitSpec| Wanted {
            name: limit.name.clone(),
            scope: limit.scope.clone(),
            members: Vec::new(),
            options: limit.options,
            parent: None,
            asked: limit.asked,
        };
        let wanted = spec.limits.iter().map(of).collect();
        (spec, wanted)
    }

    fn rate(options: &LimitOptions) -> String {
        options.egress.unwrap().rate.to_string()
    }

    #[test]
    fn a_new_limit_starts_alone_and_one_that_is_keeps_what_it_has() {
        let (spec, wanted) = wanted(SPEC);
        let first = kept(&spec, &[], &wanted);
        assert_eq!(rate(&first[0].options), "1gbit");
        assert_eq!(first[0].options.ingress.unwrap().rate.to_string(), "5gbit", "not the group's");
        let mut options = wanted[0].options;
        let is = |options| Present {
            name: "a".into(),
            scope: Scope::Cgroup("a".into()),
            members: Vec::new(),
            gone: Vec::new(),
            state: State::InForce,
            options,
            parent: None,
            other_build: None,
        };
        options.egress.as_mut().unwrap().rate = "3.2gbit".parse().unwrap();
        let plan_of = |present: Present| {
            let present = [present];
            plan(&present, &kept(&spec, &present, &wanted), false).unwrap().actions
        };
        assert!(plan_of(is(options)).is_empty(), "applying again changes nothing");
        options.egress.as_mut().unwrap().rate = "9gbit".parse().unwrap();
        let actions = plan_of(is(options));
        let [Action::Change { to, .. }] = &actions[..] else { unreachable!() };
        assert_eq!(rate(to), "5gbit", "never above what the file says");

        // One whose programs were taken off is put on again: what it was lent is not its own.
        let present = [Present { state: State::Detached, ..is(options) }];
        let mut plan = plan(&present, &kept(&spec, &present, &wanted), false).unwrap();
        begin_alone(&spec, &mut plan);
        let [Action::Replace { from, to, .. }] = &plan.actions[..] else { unreachable!() };
        assert_eq!([rate(&from.options), rate(&to.options)], ["1gbit", "1gbit"]);
    }
}
