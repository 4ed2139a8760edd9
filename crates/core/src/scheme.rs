//! The schemes: how a limit acts on packets.

use alloc::{borrow::ToOwned, format, string::String, vec::Vec};
use core::{fmt, str::FromStr};

use crate::{scope::Scope, virtual_queue::Direction};

/// How a limit acts on packets.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Every TCP flow of this host gets its fair share ([`crate::fair_share`]): as its pacing rate for what
    /// it sends, as its receive window ([`crate::receive_window`]) for what it receives. The virtual queue
    /// limits what ignores both.
    #[default]
    Pace,
    /// The virtual queue of NRM alone ([`crate::virtual_queue`]).
    Nrm,
    /// Departure times ([`crate::edt`]), kept by the `fq` qdisc.
    Edt,
    /// A token bucket ([`crate::token_bucket`]) that drops packets without tokens.
    Police,
    /// The kernel's Hierarchical Token Bucket ([`crate::htb`]), in which packets wait.
    Htb,
    /// HTB, and ECE in the ACKs that come back to its senders ([`crate::dem`]).
    Dem,
    /// HTB, and the windows in those ACKs ([`crate::spring`]).
    Spring,
    /// The shaper of Carousel ([`crate::shaper`]), in a software NIC between two ports.
    Carousel,
    /// The kernel's token bucket filter, in whose one queue packets wait.
    Tbf,
}

/// The properties of a scheme: a row of [`SCHEMES`].
#[derive(Debug)]
pub struct SchemeInfo {
    /// The scheme.
    pub scheme: Scheme,
    /// As a user writes it.
    pub name: &'static str,
    /// Its effect in a few words: for `--help`, completions and the table of `docs/README.md`.
    pub about: &'static str,
    /// Its scopes, in words.
    pub scopes: &'static str,
    /// Its page in `docs`.
    pub page: &'static str,
    /// The directions that it limits on a cgroup; none: it does not work there.
    pub cgroups: &'static [Direction],
    /// The same on a device.
    pub devices: &'static [Direction],
    /// The same on a port.
    pub ports: &'static [Direction],
    /// It takes TCP sockets in, sets something on them and gives them back. Only such a limit can be the
    /// parent of limits on cgroups.
    pub sets_sockets: bool,
    /// It puts a qdisc of ours at the root of the device. The store allows one such limit a device, writes it
    /// to the journal and removes it.
    pub has_qdisc: bool,
    /// The trees in which its limits may be the parents and children of others.
    pub trees: Trees,
    /// The kinds of its queues: on egress, on ingress.
    pub queues: [QueueKind; 2],
    /// The settings that a limit of this scheme has, by their names in a spec file. Others are refused.
    pub fields: &'static [&'static str],
    /// The kind of qdisc that the kernel must have.
    pub qdisc: Option<&'static str>,
    /// Its eBPF programs on cgroups, with names of 15 letters at most: the kernel cuts longer ones. By the
    /// first, for what a cgroup sends, a limit is found.
    pub cgroup_programs: &'static [&'static str],
    /// Its eBPF programs on devices, by which what is left there is known as ours.
    pub device_programs: &'static [&'static str],
    /// The eBPF programs among these that come with the qdisc at the root of a device.
    pub qdisc_programs: &'static [&'static str],
}

/// The trees in which limits are inside others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trees {
    /// In none.
    None,
    /// Limits on cgroups.
    OfCgroups,
    /// Limits on cgroups and ports inside that of a device.
    OfADevice,
}

const NONE: &[Direction] = &[];
const EGRESS: &[Direction] = &[Direction::Egress];
const INGRESS: &[Direction] = &[Direction::Ingress];
const BOTH: &[Direction] = &Direction::BOTH;

/// Every scheme of this version, in the order of [`Scheme`]. Limits that are in force hold the number of a
/// row, so a new one goes to the end, and none is moved or removed.
pub static SCHEMES: [SchemeInfo; 9] = [
    SchemeInfo {
        scheme: Scheme::Pace,
        name: "pace",
        about: "each TCP connection gets its fair rate or window; a virtual queue stands behind it",
        scopes: "cgroups",
        page: "pace.md",
        cgroups: BOTH,
        devices: NONE,
        ports: NONE,
        sets_sockets: true,
        has_qdisc: false,
        trees: Trees::OfCgroups,
        queues: [QueueKind::Paced, QueueKind::Windows],
        fields: &[
            "egress",
            "ingress",
            "ceiling",
            "guarantee",
            "weight",
            "burst",
            "mark",
            "drop",
            "exempt",
            "loopback",
            "rto_min",
            "delack_max",
        ],
        qdisc: None,
        cgroup_programs: &["nrm_egress", "nrm_ingress", "tune"],
        device_programs: &[],
        qdisc_programs: &[],
    },
    SchemeInfo {
        scheme: Scheme::Nrm,
        name: "nrm",
        about: "a virtual queue alone marks (ECN), reduces congestion windows and drops",
        scopes: "cgroups",
        page: "nrm.md",
        cgroups: BOTH,
        devices: NONE,
        ports: NONE,
        sets_sockets: true,
        has_qdisc: false,
        trees: Trees::OfCgroups,
        queues: [QueueKind::Alone; 2],
        fields: &[
            "egress",
            "ingress",
            "ceiling",
            "guarantee",
            "weight",
            "burst",
            "mark",
            "drop",
            "exempt",
            "loopback",
            "pace_ceiling",
            "rto_min",
            "delack_max",
        ],
        qdisc: None,
        cgroup_programs: &["nrm_egress", "nrm_ingress", "tune"],
        device_programs: &[],
        qdisc_programs: &[],
    },
    SchemeInfo {
        scheme: Scheme::Edt,
        name: "edt",
        about: "each packet gets a departure time, and the qdisc `fq` keeps it until then; egress only",
        scopes: "cgroups, devices, ports",
        page: "edt.md",
        cgroups: EGRESS,
        devices: EGRESS,
        ports: EGRESS,
        sets_sockets: false,
        has_qdisc: false,
        trees: Trees::None,
        queues: [QueueKind::Departures; 2],
        fields: &["egress", "burst", "mark", "drop", "exempt", "loopback"],
        qdisc: Some("fq"),
        cgroup_programs: &["edt_cgroup"],
        device_programs: &["edt_device", "edt_port"],
        qdisc_programs: &[],
    },
    SchemeInfo {
        scheme: Scheme::Police,
        name: "police",
        about: "a token bucket drops, marks or recolours the packets beyond it",
        scopes: "cgroups, devices, ports",
        page: "police.md",
        cgroups: BOTH,
        devices: BOTH,
        ports: BOTH,
        sets_sockets: false,
        has_qdisc: false,
        trees: Trees::None,
        queues: [QueueKind::Bucket; 2],
        fields: &[
            "egress", "ingress", "burst", "meter", "actions", "fair", "hook", "match", "exempt",
            "loopback",
        ],
        qdisc: None,
        cgroup_programs: &["police_egress", "police_ingress"],
        device_programs: &["police_in", "police_out", "police_xdp", "match_in", "match_out"],
        qdisc_programs: &[],
    },
    SchemeInfo {
        scheme: Scheme::Htb,
        name: "htb",
        about: "packets wait in the kernel's HTB",
        scopes: "devices, ports, and cgroups inside their limits",
        page: "htb.md",
        cgroups: NONE,
        devices: BOTH,
        ports: BOTH,
        sets_sockets: false,
        has_qdisc: true,
        trees: Trees::OfADevice,
        queues: [QueueKind::Qdisc; 2],
        fields: &["egress", "ingress", "ceiling", "guarantee", "weight", "burst", "ecn", "drop"],
        qdisc: Some("htb"),
        cgroup_programs: &[],
        device_programs: &["htb_in", "htb_out", "htb_stamp"],
        qdisc_programs: &["htb_in", "htb_out"],
    },
    SchemeInfo {
        scheme: Scheme::Dem,
        name: "dem",
        about: "HTB with a short queue; ECE in the ACKs that come back slows the senders down",
        scopes: "devices, ports",
        page: "acks.md",
        cgroups: NONE,
        devices: BOTH,
        ports: BOTH,
        sets_sockets: false,
        has_qdisc: true,
        trees: Trees::None,
        queues: [QueueKind::ShortQdisc; 2],
        fields: &["egress", "ingress", "burst", "drop"],
        qdisc: Some("htb"),
        cgroup_programs: &[],
        device_programs: &["htb_in", "htb_out", "acks_back", "acks_data"],
        qdisc_programs: &["htb_in", "htb_out"],
    },
    SchemeInfo {
        scheme: Scheme::Spring,
        name: "spring",
        about: "HTB with a short queue; the ACKs that come back carry smaller receive windows",
        scopes: "devices, ports",
        page: "acks.md",
        cgroups: NONE,
        devices: BOTH,
        ports: BOTH,
        sets_sockets: false,
        has_qdisc: true,
        trees: Trees::None,
        queues: [QueueKind::ShortQdisc; 2],
        fields: &["egress", "ingress", "burst", "drop"],
        qdisc: Some("htb"),
        cgroup_programs: &[],
        device_programs: &["htb_in", "htb_out", "acks_back", "acks_data"],
        qdisc_programs: &["htb_in", "htb_out"],
    },
    SchemeInfo {
        scheme: Scheme::Carousel,
        name: "carousel",
        about: "a timing wheel in user space, between the two ports of `tidegate nic`",
        scopes: "ports of `tidegate nic`",
        page: "carousel.md",
        cgroups: NONE,
        devices: NONE,
        ports: NONE,
        sets_sockets: false,
        has_qdisc: false,
        trees: Trees::None,
        queues: [QueueKind::Alone; 2],
        fields: &["egress", "ingress", "burst", "mark"],
        qdisc: None,
        cgroup_programs: &[],
        device_programs: &[],
        qdisc_programs: &[],
    },
    SchemeInfo {
        scheme: Scheme::Tbf,
        name: "tbf",
        about: "packets that leave wait in the kernel's token bucket filter, in one queue",
        scopes: "devices, ports",
        page: "tbf.md",
        cgroups: NONE,
        devices: EGRESS,
        ports: INGRESS,
        sets_sockets: false,
        has_qdisc: true,
        trees: Trees::None,
        queues: [QueueKind::Qdisc; 2],
        fields: &["egress", "ingress", "burst", "drop"],
        qdisc: Some("tbf"),
        cgroup_programs: &[],
        device_programs: &["tbf_out"],
        qdisc_programs: &["tbf_out"],
    },
];

impl Scheme {
    /// Its row of [`SCHEMES`].
    #[must_use]
    pub fn info(self) -> &'static SchemeInfo {
        &SCHEMES[self as usize]
    }

    /// The kind of its queue in a direction, for the defaults of its thresholds.
    #[must_use]
    pub fn queue(self, direction: Direction) -> QueueKind {
        let [egress, ingress] = self.info().queues;
        if direction == Direction::Egress { egress } else { ingress }
    }

    /// As a user writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.info().name
    }
}

impl SchemeInfo {
    /// Whether its limits have a setting, by its name in a spec file.
    #[must_use]
    pub fn has(&self, field: &str) -> bool {
        field == "scheme" || self.fields.contains(&field)
    }

    /// The directions that it limits on a scope, without a parent; none: it does not work there.
    #[must_use]
    pub fn on(&self, scope: &Scope) -> &'static [Direction] {
        match scope {
            Scope::Cgroup(_) | Scope::Select(_) => self.cgroups,
            Scope::Dev(_) => self.devices,
            Scope::Port(_) => self.ports,
        }
    }
}

/// The kind of queue that a limit's thresholds are for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// A virtual queue alone.
    #[default]
    Alone,
    /// The flows are paced at their fair share ([`crate::fair_share`]) and the queue is their safety net: its
    /// defaults leave room for the bursts of many paced flows that happen to meet.
    Paced,
    /// The flows have their fair share as a receive window ([`crate::receive_window`]): they send a window at
    /// once, not a segment.
    Windows,
    /// Packets wait for their departure ([`crate::edt`]); `drop` is the horizon.
    Departures,
    /// The bucket of a policer ([`crate::token_bucket`]): it is `burst` deep, and drops when it is empty.
    Bucket,
    /// Packets wait in a qdisc ([`crate::htb`]) of the length `drop`; they are marked only if a threshold is
    /// given.
    Qdisc,
    /// The same, kept short by ACKs to its senders ([`crate::dem`], [`crate::spring`]): a host that stalls
    /// finds it empty, and may send later what it could not send meanwhile.
    ShortQdisc,
}

/// Why a text is not a scheme.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    /// An unknown scheme.
    #[error("unknown scheme `{0}`; use {names}, or leave it out", names = list("`", |_| true))]
    Unknown(String),
}

/// The names of some schemes, each in quotes, as in a sentence: the last one after "or".
#[must_use]
pub fn list(quote: &str, is_in: impl Fn(&SchemeInfo) -> bool) -> String {
    let names = SCHEMES.iter().filter(|info| is_in(info)).map(|info| info.name);
    let names: Vec<_> = names.map(|name| format!("{quote}{name}{quote}")).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => names.concat(),
    }
}

impl FromStr for Scheme {
    type Err = SchemeError;

    fn from_str(text: &str) -> Result<Self, SchemeError> {
        let found = SCHEMES.iter().find(|info| info.name == text);
        found.map(|info| info.scheme).ok_or_else(|| SchemeError::Unknown(text.to_owned()))
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_scheme_has_its_own_row() {
        for (at, info) in SCHEMES.iter().enumerate() {
            assert_eq!(info.scheme as usize, at);
            assert_eq!(info.name.parse(), Ok(info.scheme));
        }
        // Limits of earlier versions hold these numbers.
        let names: Vec<_> = SCHEMES.iter().map(|info| info.name).collect();
        let earlier = ["pace", "nrm", "edt", "police", "htb", "dem", "spring", "carousel", "tbf"];
        assert!(names.starts_with(&earlier), "{names:?}");
    }

    #[test]
    fn the_kernel_cuts_no_name_of_a_program() {
        for info in &SCHEMES {
            for name in [info.cgroup_programs, info.device_programs, info.qdisc_programs].concat() {
                assert!(name.len() <= 15, "{name}");
            }
        }
    }

    #[test]
    fn what_is_said_of_its_scopes_is_what_the_columns_say() {
        for info in SCHEMES.iter().filter(|info| info.scheme != Scheme::Carousel) {
            let on_cgroups = !info.cgroups.is_empty() || info.trees == Trees::OfADevice;
            assert_eq!(info.scopes.contains("cgroups"), on_cgroups, "{}", info.name);
            assert_eq!(info.scopes.contains("devices"), !info.devices.is_empty(), "{}", info.name);
            assert_eq!(info.scopes.contains("ports"), !info.ports.is_empty(), "{}", info.name);
            for direction in BOTH {
                let columns = [info.cgroups, info.devices, info.ports];
                let limits = columns.iter().any(|column| column.contains(direction));
                let field = direction.name();
                assert_eq!(info.has(field), limits, "{}: {field}", info.name);
            }
        }
    }

    #[test]
    fn who_mistypes_a_scheme_reads_which_there_are() {
        let error = "pase".parse::<Scheme>().unwrap_err();
        let text = std::format!("{error}");
        assert!(text.starts_with("unknown scheme `pase`; use `pace`, `nrm`, `edt`"), "{text}");
        let last = SCHEMES.last().map_or("", |info| info.name);
        assert!(text.ends_with(&std::format!(" or `{last}`, or leave it out")), "{text}");
    }
}
