//! A software NIC: two ports, and the limits of scheme `carousel` on what passes between them.
//!
//! - here: what a user may say of one, in a spec file or on a command line;
//! - [`run`]: one that runs;
//! - [`sample`]: what it does, as data that serializes;
//! - [`state`]: where others see that it runs, and what it does.
//!
//! Nothing of it stays on the host: its limits are in force while it runs.

use std::fmt;

use tidegate_core::{
    Direction, Nanos, Rate, Scope, Span,
    units::{MAX_RATE_BIT_S, MIN_RATE_BIT_S},
};
use tidegate_nic::{
    lane::LaneLimit,
    relay::End,
    source::{PortName, PortNameError},
};

use crate::settings::{Patch, RateSetting};

pub mod run;
pub mod sample;
pub mod state;

/// Credit that an idle limit saves up, where none is said.
pub const BURST: Nanos = Nanos(1_000_000);
/// The longest burst or mark.
pub const MAX_SPAN: Nanos = Nanos(10_000_000_000);

/// One `[[nic]]` with its limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicSpec {
    pub name: String,
    /// Its ports: A, B.
    pub ports: [PortName; 2],
    /// Its limits, in the order of the file.
    pub limits: Vec<NicLimit>,
    /// The line on which it starts, from 1; 0 if it is of no file.
    pub line: usize,
}

/// A limit of a software NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicLimit {
    pub name: String,
    /// Its port, and from which side it is seen.
    pub scope: Scope,
    /// Which port that is.
    pub end: End,
    /// From the workload.
    pub egress: Option<LaneLimit>,
    /// To the workload.
    pub ingress: Option<LaneLimit>,
    /// The line on which it starts, from 1; 0 if it is of no file.
    pub line: usize,
}

/// Why there is no such software NIC, or no such limit of one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NicError {
    #[error(
        "nic name `{0}` must be 1 to 63 letters, digits, `-` or `_`, and start with a letter or digit"
    )]
    Name(String),
    #[error("a nic of this name is on line {0} already; give each its own name")]
    SameName(usize),
    #[error("port `{0}` is one of nic `{1}` already; a port belongs to one nic")]
    SamePort(PortName, String),
    #[error(transparent)]
    Port(#[from] PortNameError),
    #[error("{0} ports; a nic has two, write for example `ports = [\"tap:vm0\", \"xdp:eth1\"]`")]
    Two(usize),
    #[error("port `{0}` twice; a nic has two different ones")]
    Itself(PortName),
    #[error(
        "no `[[nic]]` of this file has a port `{0}`; write one, for example with `ports = [\"tap:{0}\", \
         \"xdp:eth1\"]`, or use another scheme"
    )]
    NoPort(String),
    #[error("several ports are called `{0}`; name its network namespace too, as in `{0}@blue`")]
    ManyPorts(String),
    #[error("neither egress nor ingress has a rate; give one of them, for example 50mbit")]
    NoDirection,
    #[error("{0} is out of range; a limit is between 8kbit and 100gbit")]
    Rate(Rate),
    #[error("{span} is longer than {MAX_SPAN} at {rate}; make it shorter")]
    Span { span: Span, rate: Rate },
}

/// A field that cannot be as written.
pub type FieldError = (&'static str, NicError);

/// Whether a limit of scheme `carousel` can be so.
///
/// # Errors
/// The field, and what is wrong with it.
pub fn check(patch: &Patch) -> Result<(), FieldError> {
    let rates = [("egress", rate(patch.egress)), ("ingress", rate(patch.ingress))];
    if rates.iter().all(|(_, rate)| rate.is_none()) {
        return Err(("egress", NicError::NoDirection));
    }
    for (field, rate) in rates {
        let Some(rate) = rate else { continue };
        if !(MIN_RATE_BIT_S..=MAX_RATE_BIT_S).contains(&rate.bit_s()) {
            return Err((field, NicError::Rate(rate)));
        }
        for (field, span) in [("burst", patch.burst), ("mark", patch.mark)] {
            if let Some(span) = span.filter(|span| span.at(rate) > MAX_SPAN) {
                return Err((field, NicError::Span { span, rate }));
            }
        }
    }
    Ok(())
}

fn rate(setting: Option<RateSetting>) -> Option<Rate> {
    match setting {
        Some(RateSetting::Limit(rate)) => Some(rate),
        Some(RateSetting::Free) | None => None,
    }
}

impl NicLimit {
    /// The limit that results from what was written.
    pub fn new(name: String, scope: Scope, end: End, patch: &Patch, line: usize) -> NicLimit {
        let limit = |setting| {
            let rate = rate(setting)?;
            let burst = patch.burst.map_or(BURST, |burst| burst.at(rate));
            Some(LaneLimit { rate, burst, mark: patch.mark.map(|mark| mark.at(rate)) })
        };
        NicLimit {
            name,
            scope,
            end,
            egress: limit(patch.egress),
            ingress: limit(patch.ingress),
            line,
        }
    }

    pub fn direction(&self, direction: Direction) -> Option<LaneLimit> {
        match direction {
            Direction::Egress => self.egress,
            Direction::Ingress => self.ingress,
        }
    }

    /// The end to which a direction leads. What a workload behind a port sends comes in there; what this host
    /// sends by a device goes out there.
    pub fn leads_to(&self, direction: Direction) -> End {
        let behind_port = !matches!(self.scope, Scope::Dev(_));
        if behind_port == (direction == Direction::Egress) { self.end.other() } else { self.end }
    }
}

impl NicSpec {
    /// Its ends whose port has this name: `vm0`, or `vm0@netns`.
    pub fn ends<'a>(&'a self, name: &'a str) -> impl Iterator<Item = End> + 'a {
        let is = move |port: &PortName| {
            let full = port.to_string();
            port.device == name || full.split_once(':').is_some_and(|(_, text)| text == name)
        };
        End::BOTH.into_iter().filter(move |end| is(&self.ports[*end as usize]))
    }

    /// What holds on what leads to `to`: of several limits the least.
    pub fn lane_limit(&self, to: End) -> Option<LaneLimit> {
        self.held_to(to).map(|(_, _, limit)| limit).min_by_key(|limit| limit.rate)
    }

    /// The limits on what leads to `to`, each with its direction.
    pub fn held_to(&self, to: End) -> impl Iterator<Item = (&NicLimit, Direction, LaneLimit)> {
        let each = move |limit: &'_ NicLimit, direction| {
            (limit.leads_to(direction) == to).then(|| limit.direction(direction)).flatten()
        };
        self.limits.iter().flat_map(move |limit| {
            let both = Direction::BOTH;
            both.into_iter()
                .filter_map(move |direction| Some((limit, direction, each(limit, direction)?)))
        })
    }
}

impl fmt::Display for NicSpec {
    /// As in a sentence: "nic `vm0` (tap:vm0, xdp:eth1)".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = &self.ports;
        write!(f, "nic `{}` ({a}, {b})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Spec;

    const GOOD: &str = r#"
[[nic]]
name  = "vm0"
ports = ["tap:vm0", "xdp:eth1@up"]

[[limit]]
name    = "guest"
scope   = { port = "vm0" }
egress  = "1gbit"
ingress = "100mbit"
scheme  = "carousel"
mark    = "2ms"

[[limit]]
name    = "uplink"
scope   = { dev = "eth1@up" }
egress  = "500mbit"
scheme  = "carousel"
burst   = "15kb"

[[limit]]
name    = "backup"
scope   = { cgroup = "a" }
egress  = "10mbit"
"#;

    fn refusal(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from}");
        Spec::parse("nic.toml", &GOOD.replacen(from, to, 1)).unwrap_err().to_string()
    }

    #[test]
    fn directions_are_the_workloads() {
        let spec = Spec::parse("nic.toml", GOOD).unwrap();
        assert_eq!((spec.limits.len(), spec.nics.len()), (1, 1));
        let nic = &spec.nics[0];
        assert_eq!(nic.to_string(), "nic `vm0` (tap:vm0, xdp:eth1@up)");
        let names = |to| nic.held_to(to).map(|(l, d, _)| (l.name.as_str(), d)).collect::<Vec<_>>();
        let (egress, ingress) = (Direction::Egress, Direction::Ingress);
        assert_eq!(names(End::B), [("guest", egress), ("uplink", egress)]);
        assert_eq!(names(End::A), [("guest", ingress)]);
        let to_b = nic.lane_limit(End::B).unwrap();
        assert_eq!((to_b.rate.to_string(), to_b.burst), ("500mbit".into(), Nanos(245_760)));
        let to_a = nic.lane_limit(End::A).unwrap();
        assert_eq!((to_a.burst, to_a.mark), (BURST, Some(Nanos(2_000_000))));
    }

    #[test]
    fn refusals_say_what_to_type() {
        let file = |from, to| refusal(from, to).replace("nic.toml:", "");
        insta::assert_snapshot!(file("[\"tap:vm0\", \"xdp:eth1@up\"]", "\"tap:vm0\""), @r#"4: ports: expected a list of two, found the text "tap:vm0"; write for example `ports = ["tap:vm0", "xdp:eth1"]`"#);
        insta::assert_snapshot!(file(", \"xdp:eth1@up\"", ""), @r#"4: ports: 1 ports; a nic has two, write for example `ports = ["tap:vm0", "xdp:eth1"]`"#);
        insta::assert_snapshot!(file("xdp:eth1@up", "tap:vm0"), @"4: ports: port `tap:vm0` twice; a nic has two different ones");
        insta::assert_snapshot!(file("xdp:eth1@up", "eth1"), @"4: ports: `eth1` has no kind of port; write `tap:eth1` or `xdp:eth1`");
        insta::assert_snapshot!(file("ports =", "port ="), @"4: unknown field `port`; did you mean `ports`?");
        insta::assert_snapshot!(file("name  = \"vm0\"\n", ""), @r#"2: name: missing; write for example `name = "backup"`"#);
        insta::assert_snapshot!(file("\"vm0\"\n", "\"a b\"\n"), @"3: name: nic name `a b` must be 1 to 63 letters, digits, `-` or `_`, and start with a letter or digit");
        insta::assert_snapshot!(file("port = \"vm0\"", "port = \"vm1\""), @r#"8: limit `guest`: scope: no `[[nic]]` of this file has a port `vm1`; write one, for example with `ports = ["tap:vm1", "xdp:eth1"]`, or use another scheme"#);
        insta::assert_snapshot!(file("port = \"vm0\"", "cgroup = \"b\""), @r#"11: limit `guest`: scheme: scheme `carousel` works on ports of `tidegate nic`; on a cgroup write scheme = "pace", "nrm" or "police""#);
        let refused = file("burst   = \"15kb\"", "drop = \"15kb\"");
        assert!(refused.starts_with("19: limit `uplink`: drop: scheme `carousel` has no `drop`; it has egress, ingress, burst, mark; leave this out, or write scheme = \"pace\""), "{refused}");
        insta::assert_snapshot!(file("egress  = \"500mbit\"", "egress = \"1bit\""), @"17: limit `uplink`: egress: 1bit is out of range; a limit is between 8kbit and 100gbit");
        insta::assert_snapshot!(file("\"2ms\"", "\"20s\""), @"12: limit `guest`: mark: 20s is longer than 10s at 1gbit; make it shorter");
        insta::assert_snapshot!(file("egress  = \"500mbit\"\n", ""), @"14: limit `uplink`: egress: neither egress nor ingress has a rate; give one of them, for example 50mbit");
    }

    #[test]
    fn ports_with_one_name_are_distinguished() {
        let text = GOOD
            .replace("tap:vm0", "tap:eth1@guest")
            .replace("port = \"vm0\"", "port = \"eth1@guest\"");
        assert_eq!(Spec::parse("x", &text).unwrap().nics[0].limits[0].end, End::A);
        let text = text.replace("eth1@guest\" }", "eth1\" }");
        let error = Spec::parse("x", &text).unwrap_err().to_string();
        assert!(
            error.contains("several ports are called `eth1`; name its network namespace"),
            "{error}"
        );
    }

    #[test]
    fn a_nic_may_stand_alone_but_not_share() {
        let alone = "[[nic]]\nname = \"a\"\nports = [\"tap:x\", \"tap:y\"]\n";
        assert_eq!(Spec::parse("x", alone).unwrap().nics.len(), 1);
        let two = |name: &str, port: &str| {
            let other =
                format!("[[nic]]\nname = \"{name}\"\nports = [\"tap:{port}\", \"tap:z\"]\n");
            Spec::parse("x", &(alone.to_owned() + &other)).map_err(|e| e.to_string())
        };
        assert!(two("b", "w").is_ok());
        assert_eq!(
            two("a", "w").unwrap_err(),
            "x:5: name: a nic of this name is on line 1 already; give each its own name"
        );
        assert_eq!(
            two("b", "y").unwrap_err(),
            "x:6: ports: port `tap:y` is one of nic `a` already; a port belongs to one nic"
        );
    }
}
