//! The settings of a limit, a row for each. The spec file, the flags of `run` and `limit`, completions, man
//! pages, `plan`, `status`, the JSON schema and the docs' table are made from these rows. Which scheme has
//! which setting is a column of [`tidegate_core::scheme::SCHEMES`].

use std::{borrow::Cow, fmt};

use serde::{Serialize, Serializer};

use tidegate_core::{
    Direction, Nanos, Rate, Scheme, Span,
    class::{MAX_WEIGHT, MIN_WEIGHT},
    exempt::Exempt,
    fair_share::WEIGHT,
    police::{COLOUR_NAMES, MeterText, colour_index},
    prefixes::Prefixes,
    queue_options::VirtualQueueOptions,
    scheme::{QueueKind, SCHEMES},
    units::MAX_RATE_BIT_S,
};
use tidegate_nic::lane;
use tidegate_sys::limit::LimitOptions;

use super::{MeterSetting, Patch, RateSetting, SettingsProblem, is_parents};
use crate::key::{Key, Kind};

/// One setting.
#[derive(Debug)]
pub struct Field {
    /// Its name, its kind and what is said of it.
    pub key: Key,
    /// Help shows it also if no scheme is named.
    pub common: bool,
    set: fn(&mut Patch, &str) -> Result<(), SettingsProblem>,
    asks: fn(&Patch) -> bool,
    pub(super) show: Show,
}

/// How a setting of a limit is shown.
#[derive(Debug, Clone, Copy)]
pub(super) enum Show {
    /// Another field shows it.
    No,
    /// In differences alone: JSON and text have it elsewhere.
    Apart(fn(&LimitOptions) -> Shown),
    /// Everywhere.
    Whole(fn(&LimitOptions) -> Shown),
    /// Of each direction.
    Each(fn(&VirtualQueueOptions) -> Option<Span>),
}

/// A setting as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shown {
    /// Words of the command line.
    Text(String),
    /// A flag.
    Flag(bool),
    /// A time.
    Time(Nanos),
    /// A list; empty: none.
    List(Vec<String>),
    /// A value that is not set.
    None,
}

impl fmt::Display for Shown {
    /// In words of the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shown::Text(text) => f.write_str(text),
            Shown::Flag(flag) => write!(f, "{flag}"),
            Shown::Time(time) => write!(f, "{time}"),
            Shown::List(list) if !list.is_empty() => f.write_str(&list.join(",")),
            Shown::List(_) | Shown::None => f.write_str("none"),
        }
    }
}

impl Serialize for Shown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Shown::Text(text) => serializer.serialize_str(text),
            Shown::Flag(flag) => serializer.serialize_bool(*flag),
            Shown::Time(time) => serializer.serialize_u64(time.0),
            Shown::List(list) => serializer.collect_seq(list),
            Shown::None => serializer.serialize_none(),
        }
    }
}

impl Field {
    /// Sets what was written, in words of the command line.
    ///
    /// # Errors
    /// [`SettingsProblem`] when it cannot be read.
    pub fn set(&self, patch: &mut Patch, text: &str) -> Result<(), SettingsProblem> {
        (self.set)(patch, text)
    }

    /// Whether something was written that a scheme without this setting cannot give.
    pub fn is_asked(&self, patch: &Patch) -> bool {
        (self.asks)(patch)
    }

    /// The default with a scheme, in words; empty if there is none.
    pub fn default_of(&self, scheme: Scheme) -> Cow<'static, str> {
        match (self.key.name, scheme, scheme.queue(Direction::Egress)) {
            ("burst", _, QueueKind::Bucket) => {
                "what a CUBIC flow over 20ms needs, 250ms at most".into()
            }
            ("mark", Scheme::Carousel, _) => lane::MARK.to_string().into(),
            ("burst" | "mark" | "drop", ..) => {
                let of = |direction| span_of(self.key.name, scheme.queue(direction));
                match Direction::BOTH.map(of) {
                    [egress, ingress] if egress == ingress => egress.to_string().into(),
                    [egress, ingress] => format!("{egress}, ingress {ingress}").into(),
                }
            }
            _ => self.key.default.into(),
        }
    }

    /// The default with each scheme that has this setting, in words; empty if there is none.
    pub fn default(&self) -> Cow<'static, str> {
        let mut groups: Vec<(Vec<&str>, Cow<str>)> = Vec::new();
        for info in SCHEMES.iter().filter(|info| info.has(self.key.name)) {
            let default = self.default_of(info.scheme);
            match groups.iter_mut().find(|(_, of_others)| *of_others == default) {
                Some((schemes, _)) => schemes.push(info.name),
                None => groups.push((vec![info.name], default)),
            }
        }
        if groups.len() == 1 {
            return groups.remove(0).1;
        }
        let groups = groups.iter().map(|(schemes, of)| format!("{}: {of}", schemes.join(", ")));
        groups.collect::<Vec<_>>().join("; ").into()
    }
}

/// The default burst or threshold of a queue. At low rates it is longer: some frames at least.
fn span_of(name: &str, kind: QueueKind) -> Nanos {
    let fastest = Rate::from_bit_s(MAX_RATE_BIT_S).map(VirtualQueueOptions::new);
    let queue = fastest.and_then(|queue| VirtualQueueOptions { kind, ..queue }.config().ok());
    queue.map_or(Nanos(0), |queue| match name {
        "burst" => queue.burst,
        "mark" => queue.mark,
        _ => queue.drop,
    })
}

/// How a member of [`Patch`] is set from text, and whether it asks for something: unless it has the value
/// that says "off", which every scheme can give.
macro_rules! member {
    ($($member:ident).+) => {
        member!($($member).+, |_| true)
    };
    ($($member:ident).+, $asks:expr) => {
        (
            |patch, text| {
                patch.$($member).+ = Some(text.parse()?);
                Ok(())
            },
            |patch| patch.$($member).+.is_some_and($asks),
        )
    };
}

/// Sets a member of a patch from text, and says whether the patch asks for something of it.
type Member = (fn(&mut Patch, &str) -> Result<(), SettingsProblem>, fn(&Patch) -> bool);

/// A row; `set`, `asks` are those of [`member`].
const fn field(key: Key, common: bool, (set, asks): Member, show: Show) -> Field {
    Field { key, common, set, asks, show }
}

/// What a limit has besides its settings.
pub static IDENTITY: [Key; 7] = [
    Key {
        name: "name",
        kind: Kind::Name,
        about: "Name of the limit: 1 to 63 letters, digits, `-` or `_`; begins with a letter or digit",
        example: "name = \"backup\"",
        default: "",
    },
    Key {
        name: "scope",
        kind: Kind::Scope,
        about: "What is limited: a cgroup, unit, slice, user, container, pod, exe, dev or port",
        example: "scope = { cgroup = \"system.slice/backup.service\" }",
        default: "",
    },
    Key {
        name: "parent",
        kind: Kind::Name,
        about: "The limit that it is inside of: it gets a part of that one's rate",
        example: "parent = \"uplink\"",
        default: "none",
    },
    Key {
        name: "each",
        kind: Kind::Flag,
        about: "One limit for each match, named `NAME-MATCH`, instead of one over all of them",
        example: "each = true",
        default: "false",
    },
    Key {
        name: "required",
        kind: Kind::Flag,
        about: "`status --check` fails while the limit waits",
        example: "required = true",
        default: "false",
    },
    Key {
        name: "move",
        kind: Kind::Flag,
        about: "With `exe`: move its processes out of a cgroup that other programs are in, too",
        example: "move = true",
        default: "false",
    },
    Key {
        name: "schedule",
        kind: Kind::Schedule,
        about: "Other rates at times: the first row that covers the moment applies",
        example: "schedule = [{ days = \"mon-fri\", from = \"08:00\", to = \"18:00\", egress = \"10mbit\" }]",
        default: "none",
    },
];

/// Every setting.
pub static FIELDS: [Field; 20] = [
    field(
        Key {
            name: "egress",
            kind: Kind::RateOrNone,
            about: "Rate from the workload, such as 50mbit; `none`: no limit",
            example: "egress = \"50mbit\"",
            default: "",
        },
        true,
        member!(egress),
        Show::Apart(|o| rate(o, o.egress)),
    ),
    field(
        Key {
            name: "ingress",
            kind: Kind::RateOrNone,
            about: "Rate to the workload, such as 50mbit; `none`: no limit",
            example: "ingress = \"50mbit\"",
            default: "",
        },
        true,
        member!(ingress, |rate| rate != RateSetting::Free),
        Show::Apart(|o| rate(o, o.ingress)),
    ),
    field(
        Key {
            name: "guarantee",
            kind: Kind::RateOrNone,
            about: "Inside a parent: the rate that it always gets",
            example: "guarantee = \"100mbit\"",
            default: "none",
        },
        true,
        member!(guarantee),
        Show::Apart(|o| {
            let guarantee = o.class.and_then(|class| class.guarantee);
            guarantee.map_or(Shown::None, |rate| Shown::Text(rate.to_string()))
        }),
    ),
    field(
        Key {
            name: "ceiling",
            kind: Kind::RateOrNone,
            about: "Inside a parent: the most in each direction",
            example: "ceiling = \"500mbit\"",
            default: "none",
        },
        true,
        member!(ceiling),
        Show::No,
    ),
    field(
        Key {
            name: "weight",
            kind: Kind::Whole(MIN_WEIGHT as i64, MAX_WEIGHT as i64),
            about: "Inside a parent: its part of what is not guaranteed",
            example: "weight = 100",
            default: "100",
        },
        true,
        (
            |patch, text| {
                let whole = text.parse().map_err(|_| SettingsProblem::Whole(text.to_owned()));
                patch.weight = Some(whole?);
                Ok(())
            },
            |patch| patch.weight.is_some(),
        ),
        Show::Apart(|o| {
            let weight = o.class.map_or(WEIGHT, |class| class.weight);
            Shown::Text(weight.to_string())
        }),
    ),
    field(
        Key {
            name: "scheme",
            kind: Kind::Scheme,
            about: "How the limit acts",
            example: "scheme = \"pace\"",
            default: "auto",
        },
        true,
        member!(scheme, |_| false),
        Show::Whole(|o| Shown::Text(o.scheme.to_string())),
    ),
    field(
        Key {
            name: "burst",
            kind: Kind::Span,
            about: "Credit that an idle limit saves up",
            example: "burst = \"1ms\"",
            default: "",
        },
        false,
        member!(burst),
        Show::Each(|queue| queue.burst),
    ),
    field(
        Key {
            name: "mark",
            kind: Kind::Span,
            about: "Backlog that slows senders",
            example: "mark = \"0.5ms\"",
            default: "",
        },
        false,
        member!(mark),
        Show::Each(|queue| queue.mark),
    ),
    field(
        Key {
            name: "ecn",
            kind: Kind::SpanOrNone,
            about: "Backlog above which ECN-capable packets are marked; `none`: never",
            example: "ecn = \"60kb\"",
            default: "none",
        },
        false,
        member!(ecn),
        Show::Each(|queue| queue.mark),
    ),
    field(
        Key {
            name: "drop",
            kind: Kind::Span,
            about: "Backlog above which packets are dropped; edt: horizon of departures",
            example: "drop = \"4ms\"",
            default: "",
        },
        false,
        member!(drop),
        Show::Each(|queue| queue.drop),
    ),
    field(
        Key {
            name: "meter",
            kind: Kind::Meter,
            about: "A second bucket: srtcm,ebs=SIZE, trtcm,pir=RATE or rfc4115,eir=RATE; colour_aware reads \
                    the DSCP",
            example: "meter = { type = \"srtcm\", ebs = \"200kb\", colour_aware = true }",
            default: "none",
        },
        false,
        (
            |patch, text| {
                let meter: Option<MeterText> =
                    if text.trim() == "none" { None } else { Some(text.parse()?) };
                patch.police.set_meter(meter.as_ref())
            },
            |patch| patch.police.meter.is_some_and(|meter| meter != MeterSetting::None),
        ),
        Show::Whole(|o| o.police.meter.map_or(Shown::None, |m| Shown::Text(m.to_string()))),
    ),
    field(
        Key {
            name: "actions",
            kind: Kind::Actions,
            about: "For green, yellow and red packets: pass, drop, ce (mark, or drop what is not \
                    ECN-capable) or dscp:NAME",
            example: "actions = { yellow = \"dscp af12\", red = \"drop\" }",
            default: "red=drop",
        },
        false,
        (
            |patch, text| {
                text.split(',').try_for_each(|part| {
                    let (colour, action) = part
                        .split_once('=')
                        .ok_or_else(|| SettingsProblem::Action(part.to_owned()))?;
                    patch.police.actions[colour_index(colour.trim())?] = Some(action.parse()?);
                    Ok(())
                })
            },
            |patch| patch.police.actions.iter().any(Option::is_some),
        ),
        Show::Whole(|o| {
            let each = COLOUR_NAMES.iter().zip(o.police.actions);
            Shown::List(each.map(|(name, action)| format!("{name}={action}")).collect())
        }),
    ),
    field(
        Key {
            name: "fair",
            kind: Kind::Flag,
            about: "Give the flows equal parts of the rate",
            example: "fair = true",
            default: "false",
        },
        false,
        member!(police.fair, |fair| fair),
        Show::Whole(|o| Shown::Flag(o.police.fair)),
    ),
    field(
        Key {
            name: "hook",
            kind: Kind::Word(&["auto", "xdp"]),
            about: "Where the ingress of a device is limited: `auto` (tcx or clsact) or `xdp` (in the \
                    driver if it can)",
            example: "hook = \"xdp\"",
            default: "auto",
        },
        false,
        member!(police.hook, |hook| hook != tidegate_core::police::Hook::Auto),
        Show::Whole(|o| Shown::Text(o.police.hook.to_string())),
    ),
    field(
        Key {
            name: "match",
            kind: Kind::List,
            about: "The hosts behind a device that are limited; the longest matching prefix counts",
            example: "match = [\"10.0.0.0/24\", \"2001:db8:1::/48\"]",
            default: "none: all",
        },
        false,
        member!(matched, |prefixes: Prefixes| !prefixes.is_empty()),
        Show::Whole(|o| Shown::List(prefixes(&o.matched))),
    ),
    field(
        Key {
            name: "exempt",
            kind: Kind::List,
            about: "Traffic that is not limited, such as 10.0.0.0/8,dscp:ef",
            example: "exempt = [\"10.0.0.0/8\", \"2001:db8::/32\", \"dscp ef\"]",
            default: "none",
        },
        true,
        member!(exempt, |exempt: Exempt| !exempt.is_empty()),
        Show::Whole(|o| {
            let dscps = o.exempt.dscps().map(|dscp| format!("dscp:{dscp}"));
            Shown::List(prefixes(&o.exempt.prefixes).into_iter().chain(dscps).collect())
        }),
    ),
    field(
        Key {
            name: "loopback",
            kind: Kind::Flag,
            about: "Limit traffic on the loopback interface too",
            example: "loopback = true",
            default: "false",
        },
        true,
        member!(loopback, |loopback| loopback),
        Show::Whole(|o| Shown::Flag(o.loopback)),
    ),
    field(
        Key {
            name: "pace_ceiling",
            kind: Kind::Flag,
            about: "Let no TCP socket pace faster than the egress rate",
            example: "pace_ceiling = false",
            default: "true",
        },
        false,
        member!(pace_ceiling),
        Show::Whole(|o| Shown::Flag(o.pace_ceiling)),
    ),
    field(
        Key {
            name: "rto_min",
            kind: Kind::Time,
            about: "Minimum RTO of TCP sockets; 0ms: the kernel's",
            example: "rto_min = \"20ms\"",
            default: "20ms",
        },
        false,
        member!(rto_min, |time| time != Nanos(0)),
        Show::Whole(|o| Shown::Time(o.rto_min)),
    ),
    field(
        Key {
            name: "delack_max",
            kind: Kind::Time,
            about: "Longest delayed ACK of TCP sockets; 0ms: the kernel's",
            example: "delack_max = \"5ms\"",
            default: "5ms",
        },
        false,
        member!(delack_max, |time| time != Nanos(0)),
        Show::Whole(|o| Shown::Time(o.delack_max)),
    ),
];

/// All keys of a `[[limit]]`.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    IDENTITY.iter().chain(FIELDS.iter().map(|field| &field.key))
}

/// The setting of this name.
pub fn find(name: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.key.name == name)
}

fn rate(of: &LimitOptions, queue: Option<VirtualQueueOptions>) -> Shown {
    match queue {
        None => Shown::None,
        Some(queue) if is_parents(of, queue.rate) => Shown::Text("the parent's".to_owned()),
        Some(queue) => Shown::Text(queue.rate.to_string()),
    }
}

fn prefixes(prefixes: &Prefixes) -> Vec<String> {
    prefixes.as_slice().iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn schemes_have_known_fields() {
        let known: BTreeSet<_> = keys().map(|key| key.name).collect();
        assert_eq!(known.len(), FIELDS.len() + IDENTITY.len(), "a name twice");
        let of_schemes: BTreeSet<_> =
            SCHEMES.iter().flat_map(|info| info.fields).copied().collect();
        assert!(of_schemes.is_subset(&known), "{of_schemes:?}");
        for field in &FIELDS {
            assert!(SCHEMES.iter().any(|info| info.has(field.key.name)), "{}", field.key.name);
        }
    }

    #[test]
    fn defaults_are_those_of_each_scheme() {
        let default = |name| find(name).unwrap().default();
        insta::assert_snapshot!(default("burst"), @"pace, nrm, edt, htb, carousel, tbf: 1ms; police: what a CUBIC flow over 20ms needs, 250ms at most; dem, spring: 10ms");
        insta::assert_snapshot!(default("mark"), @"pace: 2ms, ingress 16ms; nrm: 500us; edt: 2ms; carousel: 1ms");
        insta::assert_snapshot!(default("drop"), @"pace: 4ms, ingress 40ms; nrm: 4ms; edt: 10ms; htb, dem, spring, tbf: 20ms");
        assert_eq!((default("weight"), default("egress")), ("100".into(), "".into()));
    }
}
