//! The schemes: how a limit acts on packets.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, str::FromStr};

use crate::virtual_queue::Direction;

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
    /// What it does, in a few words: for `--help`, completions and the table of `docs/README.md`.
    pub about: &'static str,
    /// Its scopes, in words.
    pub scopes: &'static str,
    /// Its page in `docs`.
    pub page: &'static str,
    /// It can be attached to devices and ports, too.
    pub on_devices: bool,
    /// It sets something on TCP sockets.
    pub sets_sockets: bool,
    /// Its packets wait in a qdisc at the root of the device.
    pub has_qdisc: bool,
    /// Its limits may be the parents and children of others.
    pub in_trees: bool,
    /// The kinds of its queues: on egress, on ingress.
    pub queues: [QueueKind; 2],
    /// The settings that a limit of this scheme has, by their names in a spec file. Others are refused.
    pub fields: &'static [&'static str],
    /// The kernel's qdisc in which its packets wait.
    pub qdisc: Option<&'static str>,
    /// Its eBPF programs on cgroups. By the first, for what a cgroup sends, a limit is found.
    pub cgroup_programs: &'static [&'static str],
    /// Its eBPF programs on devices, by which what is left there is known as ours.
    pub device_programs: &'static [&'static str],
    /// The eBPF programs among these that come with the qdisc at the root of a device.
    pub qdisc_programs: &'static [&'static str],
}

/// Every scheme of this version, in the order of [`Scheme`].
pub static SCHEMES: [SchemeInfo; 9] = [
    SchemeInfo {
        scheme: Scheme::Pace,
        name: "pace",
        about: "each TCP connection gets its fair rate or window; a virtual queue stands behind it",
        scopes: "cgroups",
        page: "pace.md",
        on_devices: false,
        sets_sockets: true,
        has_qdisc: false,
        in_trees: true,
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
        on_devices: false,
        sets_sockets: true,
        has_qdisc: false,
        in_trees: true,
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
        on_devices: true,
        sets_sockets: false,
        has_qdisc: false,
        in_trees: false,
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
        about: "a token bucket drops, marks or colours what finds no tokens",
        scopes: "cgroups, devices, ports",
        page: "police.md",
        on_devices: true,
        sets_sockets: false,
        has_qdisc: false,
        in_trees: false,
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
        on_devices: true,
        sets_sockets: false,
        has_qdisc: true,
        in_trees: true,
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
        on_devices: true,
        sets_sockets: false,
        has_qdisc: true,
        in_trees: false,
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
        on_devices: true,
        sets_sockets: false,
        has_qdisc: true,
        in_trees: false,
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
        on_devices: false,
        sets_sockets: false,
        has_qdisc: false,
        in_trees: false,
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
        on_devices: true,
        sets_sockets: false,
        has_qdisc: true,
        in_trees: false,
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
    #[error("unknown scheme `{0}`; use {names}, or leave it out", names = names())]
    Unknown(String),
}

/// All names, as in a sentence.
fn names() -> String {
    let mut text = String::new();
    for (at, info) in SCHEMES.iter().enumerate() {
        text += match at {
            0 => "`",
            at if at + 1 == SCHEMES.len() => " or `",
            _ => ", `",
        };
        text += info.name;
        text += "`";
    }
    text
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
