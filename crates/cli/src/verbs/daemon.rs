//! What `check`, `plan` and `apply` say of groups.

use serde::Serialize;
use tidegate_core::Direction;
use tidegate_node::{fleet::config::GroupSpec, spec::Spec};

use crate::output::Paint;

/// A group of the file.
#[derive(Serialize)]
pub struct GroupJson<'a> {
    name: &'a str,
    algorithm: &'static str,
    rate_bit_s: u64,
    /// What a host may use that hears of nobody.
    alone_bit_s: u64,
    direction: &'static str,
    members: &'a [String],
    hosts: u32,
    interval_ns: u64,
    line: usize,
}

impl<'a> From<&'a GroupSpec> for GroupJson<'a> {
    fn from(group: &'a GroupSpec) -> GroupJson<'a> {
        GroupJson {
            name: &group.name,
            algorithm: group.algorithm.name(),
            rate_bit_s: group.rate.bit_s(),
            alone_bit_s: group.alone_bit_s(),
            direction: match group.direction {
                Direction::Egress => "egress",
                Direction::Ingress => "ingress",
            },
            members: &group.members,
            hosts: group.hosts,
            interval_ns: group.interval.0,
            line: group.line,
        }
    }
}

/// A group of a plan.
#[derive(Serialize)]
pub struct GroupPlanJson<'a> {
    name: &'a str,
    /// A daemon runs that has the group as the file says.
    in_force: bool,
}

impl<'a> GroupPlanJson<'a> {
    pub fn new(_spec: &Spec, group: &'a GroupSpec) -> GroupPlanJson<'a> {
        GroupPlanJson { name: &group.name, in_force: false }
    }
}

/// What is true of a group, which no `apply` can put in force.
pub fn of_group(spec: &Spec, group: &GroupSpec) -> String {
    let limits = match &group.members[..] {
        [] => "no limits here".to_owned(),
        members => members.join(", "),
    };
    Paint::stdout().yellow(&format!(
        "! group `{}` ({limits}): no daemon runs with it, and its limits keep the rates that they have; start \
         `tidegate daemon {}`",
        group.name, spec.file
    ))
}
