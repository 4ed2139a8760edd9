//! Scheme `auto`: the scheme of a limit that names none. Pure.
//!
//! Schemes are tried in an order that the scope gives. The first one that has every setting that was given,
//! can be where it shall be, and has what it needs of the kernel is taken:
//!
//! | where | order |
//! |:--|:--|
//! | a cgroup | `pace`, `nrm`, `police`, `edt` |
//! | a cgroup or port inside the limit of a device | `htb` |
//! | a device or port | `spring`, `police`, `htb`, `edt` |

use alloc::{string::String, vec::Vec};
use core::{fmt, str::FromStr};

use crate::{
    scheme::{SCHEMES, Scheme, Trees},
    scope::Scope,
};

/// A limit that names no scheme.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Its scope.
    pub scope: &'a Scope,
    /// It is inside another limit.
    pub has_parent: bool,
    /// The limit above all that it is inside of is on a device.
    pub in_device: bool,
    /// Other limits are inside it.
    pub is_parent: bool,
    /// The settings that it gives, by their names in a spec file.
    pub fields: &'a [&'static str],
}

/// Features of the kernel that some schemes need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// The qdisc HTB.
    pub htb: bool,
    /// Devices of kind ifb, to which incoming packets are redirected before they meet a qdisc.
    pub ifb: bool,
    /// The qdisc fq.
    pub fq: bool,
}

impl Kernel {
    /// One that has everything.
    pub const WHOLE: Kernel = Kernel { htb: true, ifb: true, fq: true };
}

/// The scheme of a limit that names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// It.
    pub scheme: Scheme,
    /// Why it is this one.
    pub why: Why,
}

/// Why a scheme was chosen: it is the first choice there, or what is against the first choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The first choice on a cgroup.
    Cgroup,
    /// The first choice on a device or port.
    Device,
    /// All limits inside that of a device have its scheme.
    InDevice,
    /// The first choice lacks a setting.
    Field(Scheme, &'static str),
    /// The first choice neither has a parent nor is one.
    Alone(Scheme),
    /// The kernel has no HTB.
    NoHtb,
    /// The kernel has no ifb.
    NoIfb,
    /// The kernel has no fq.
    NoFq,
}

/// No scheme is as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no scheme fits: {}; leave something out, or name a scheme", list(.0))]
pub struct NoScheme(Vec<(Scheme, Why)>);

fn list(against: &[(Scheme, Why)]) -> String {
    let mut text = String::new();
    for (at, (scheme, why)) in against.iter().enumerate() {
        text += if at == 0 { "" } else { ", " };
        text += &match why {
            Why::Field(..) | Why::Alone(_) => alloc::format!("{why}"),
            why => alloc::format!("{why} for `{scheme}`"),
        };
    }
    text
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Cgroup => f.write_str("first choice on a cgroup"),
            Why::Device => f.write_str("first choice on a device"),
            Why::InDevice => f.write_str("inside the limit of a device"),
            Why::Field(scheme, field) => write!(f, "`{scheme}` has no `{field}`"),
            Why::Alone(scheme) => write!(f, "`{scheme}` neither has a parent nor is one"),
            Why::NoHtb => f.write_str("the kernel has no HTB"),
            Why::NoIfb => f.write_str("the kernel has no ifb"),
            Why::NoFq => f.write_str("the kernel has no fq"),
        }
    }
}

impl FromStr for Why {
    type Err = ();

    /// As it is [shown](fmt::Display).
    fn from_str(text: &str) -> Result<Why, ()> {
        let words: Vec<_> = text.split('`').collect();
        if let ["", scheme, verb, rest @ ..] = &words[..] {
            let scheme = scheme.parse().map_err(drop)?;
            return match rest {
                [field, ""] => {
                    let mut fields = SCHEMES.iter().flat_map(|info| info.fields);
                    fields.find(|known| *known == field).map(|field| Why::Field(scheme, field))
                }
                [] if verb.contains("parent") => Some(Why::Alone(scheme)),
                _ => None,
            }
            .ok_or(());
        }
        let plain = [Why::Cgroup, Why::Device, Why::InDevice, Why::NoHtb, Why::NoIfb, Why::NoFq];
        plain.into_iter().find(|why| alloc::format!("{why}") == text).ok_or(())
    }
}

/// The schemes that are tried, and why the first one is first.
fn order(request: &Request<'_>) -> (&'static [Scheme], Why) {
    match request.scope {
        _ if request.in_device => (&[Scheme::Htb], Why::InDevice),
        Scope::Cgroup(_) | Scope::Select(_) => {
            (&[Scheme::Pace, Scheme::Nrm, Scheme::Police, Scheme::Edt], Why::Cgroup)
        }
        Scope::Dev(_) | Scope::Port(_) => {
            (&[Scheme::Spring, Scheme::Police, Scheme::Htb, Scheme::Edt], Why::Device)
        }
    }
}

/// The reason why a scheme cannot be taken; `None` if it can.
fn against(scheme: Scheme, request: &Request<'_>, kernel: Kernel) -> Option<Why> {
    let info = scheme.info();
    if let Some(field) = request.fields.iter().find(|field| !info.has(field)) {
        return Some(Why::Field(scheme, field));
    }
    if (request.has_parent || request.is_parent) && info.trees == Trees::None {
        return Some(Why::Alone(scheme));
    }
    // What comes in by the device meets a qdisc only on an ifb device.
    let incoming = match request.scope {
        Scope::Cgroup(_) | Scope::Select(_) => "",
        Scope::Dev(_) => "ingress",
        Scope::Port(_) => "egress",
    };
    match info.qdisc {
        Some("htb") if !kernel.htb => Some(Why::NoHtb),
        Some("htb") if !kernel.ifb && request.fields.contains(&incoming) => Some(Why::NoIfb),
        Some("fq") if !kernel.fq => Some(Why::NoFq),
        _ => None,
    }
}

/// Whether a scheme that was chosen earlier can be kept.
#[must_use]
pub fn keeps(scheme: Scheme, request: &Request<'_>) -> bool {
    order(request).0.contains(&scheme) && against(scheme, request, Kernel::WHOLE).is_none()
}

/// The scheme of a limit that names none.
///
/// # Errors
/// [`NoScheme`] says what is against each.
pub fn choose(request: &Request<'_>, kernel: Kernel) -> Result<Choice, NoScheme> {
    let (schemes, mut why) = order(request);
    let mut refused = Vec::new();
    for scheme in schemes {
        match against(*scheme, request, kernel) {
            None => return Ok(Choice { scheme: *scheme, why }),
            Some(reason) => {
                if refused.is_empty() {
                    why = reason;
                }
                refused.push((*scheme, reason));
            }
        }
    }
    Err(NoScheme(refused))
}

/// One row of [`CASES`]: what is limited, with which settings beside its rates, and the scheme that is
/// picked; empty if none fits.
type Case = (&'static str, &'static str, &'static str);

/// The table of the documentation: which scheme `auto` picks when.
pub const CASES: [Case; 15] = [
    ("a cgroup, alone or in a tree of cgroups", "", "pace"),
    ("a cgroup", "pace_ceiling", "nrm"),
    ("a cgroup", "meter, actions, fair", "police"),
    ("a cgroup or port inside the limit of a device", "", "htb"),
    ("a device or port", "", "spring"),
    ("a device or port", "match, meter, actions, fair, hook", "police"),
    ("a device or port", "exempt", "police"),
    ("a device or port", "ecn", "htb"),
    ("a device or port, egress alone", "mark", "edt"),
    ("a device that limits are inside of", "", "htb"),
    ("a device or port, without HTB in the kernel", "", "police"),
    ("a device with ingress, without ifb in the kernel", "", "police"),
    ("a port with egress, without ifb in the kernel", "", "police"),
    ("a device with egress alone, without ifb in the kernel", "", "spring"),
    ("a device or port, egress alone, without fq in the kernel", "mark", ""),
];

#[cfg(test)]
mod tests {
    use std::{string::ToString, vec};

    use super::*;

    #[test]
    fn it_picks_what_the_table_says() {
        for (place, with, scheme) in CASES {
            let device = Scope::Dev("eth0".into());
            let (port, cgroup) = (Scope::Port("tap0".into()), Scope::Cgroup("a".into()));
            let mut scopes = vec![];
            for (word, scope) in [("cgroup", &cgroup), ("device", &device), ("port", &port)] {
                let here = place.split("inside").next().unwrap_or_default();
                scopes.extend(here.contains(word).then_some(scope));
            }
            let kernel = Kernel {
                htb: !place.contains("without HTB"),
                ifb: !place.contains("without ifb"),
                fq: !place.contains("without fq"),
            };
            let in_device = place.contains("inside the limit of a device");
            let mut rates = vec!["egress"];
            if !place.contains("alone,") && !place.contains("egress alone") && !in_device {
                rates.push("ingress");
            }
            let settings = with.split(", ").filter(|field| !field.is_empty());
            let settings: Vec<Option<&'static str>> =
                if with.is_empty() { vec![None] } else { settings.map(Some).collect() };
            for scope in scopes {
                for field in &settings {
                    let fields: Vec<_> = rates.iter().copied().chain(*field).collect();
                    let request = Request {
                        scope,
                        has_parent: in_device,
                        in_device,
                        is_parent: place.contains("limits are inside of"),
                        fields: &fields,
                    };
                    let choice = choose(&request, kernel);
                    if scheme.is_empty() {
                        assert!(choice.is_err(), "{place}: {field:?}: {choice:?}");
                        continue;
                    }
                    let choice = choice.unwrap();
                    assert_eq!(choice.scheme.name(), scheme, "{place}: {field:?}: {}", choice.why);
                    assert!(keeps(choice.scheme, &request));
                    assert_eq!(choice.why.to_string().parse(), Ok(choice.why));
                }
            }
        }
    }

    #[test]
    fn where_nothing_fits_it_says_what_is_against_each() {
        let scope = Scope::Dev("eth0".into());
        let fields = ["egress", "meter", "ecn"];
        let request = Request {
            scope: &scope,
            has_parent: false,
            in_device: false,
            is_parent: false,
            fields: &fields,
        };
        let error = choose(&request, Kernel::WHOLE).unwrap_err().to_string();
        assert_eq!(
            error,
            "no scheme fits: `spring` has no `meter`, `police` has no `ecn`, `htb` has no `meter`, `edt` has \
             no `meter`; leave something out, or name a scheme"
        );
        let request = Request { fields: &["egress", "mark"], ..request };
        let error = choose(&request, Kernel { fq: false, ..Kernel::WHOLE }).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("`htb` has no `mark`, the kernel has no fq for `edt`;"), "{error}");
    }
}
