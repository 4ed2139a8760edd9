//! Why a limit cannot be put on, read or changed.

use rustix::io::Errno;
use tidegate_core::{
    Scheme, Scope, htb::SLOTS, queue_options::ConfigError, scheme::list, scope::shown,
};

use crate::{cgroup::CgroupError, fq::FqError, intf, net::NetError};

/// The advice for a program that was not loaded.
fn advice(error: &libbpf_rs::Error) -> &'static str {
    // The kernel's number is in the words of libbpf's errors alone.
    let words = format!("{error:#}");
    let is = |code: Errno| words.contains(&format!("(os error {})", code.raw_os_error()));
    if is(Errno::MFILE) || is(Errno::NFILE) {
        "allow this process more open files: `ulimit -n 1024`"
    } else if is(Errno::AGAIN) {
        "signals to this process interrupted the kernel's check; try again"
    } else {
        "`uname -r` must be 6.1 or newer"
    }
}

/// Why a limit could not be put on, read or changed. Unless said otherwise the host is as before.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// The kernel refused a program.
    #[error("the kernel refused the eBPF program `{program}`: {source}; {}", advice(source))]
    Load { program: &'static str, source: libbpf_rs::Error },
    /// Another program holds the cgroup (or one above it) for itself alone.
    #[error(
        "cgroup `{}` does not take another eBPF program: {holder}; detach that one first \
         (`bpftool cgroup show` lists it) or have its tool attach it with BPF_F_ALLOW_MULTI",
        shown(cgroup)
    )]
    Occupied { cgroup: String, holder: String },
    /// Attaching failed for another reason.
    #[error("could not attach `{program}` to cgroup `{}`: {source}", shown(cgroup))]
    Attach { program: &'static str, cgroup: String, source: libbpf_rs::Error },
    /// Nobody would keep packets until their departure.
    #[error(transparent)]
    Fq(#[from] FqError),
    /// The kernel refused the program on a device.
    #[error("could not attach the eBPF program to device `{device}`: {source}")]
    AttachDevice { device: String, source: libbpf_rs::Error },
    /// Another XDP program is on the device, which can have one.
    #[error(
        "device `{device}` has an XDP program already: {holder}; let its owner remove it (`ip link \
         set dev {device} xdp off` does if it has none), or write hook = \"auto\""
    )]
    XdpTaken { device: String, holder: String },
    /// Its packets have no link header, and XDP's program reads Ethernet's.
    #[error(
        "device `{0}` carries IP without Ethernet's header, which the XDP program reads; write hook = \
         \"auto\""
    )]
    XdpWithoutEthernet(String),
    /// A qdisc that somebody has put on the device.
    #[error(
        "device `{device}` has a root qdisc of somebody else: `{kind} {handle}`; remove it with `tc qdisc \
         del dev {device} root`, or say --force to replace it (it is not restored later)"
    )]
    ForeignQdisc { device: String, kind: String, handle: String },
    /// The kernel has no such qdisc.
    #[error(
        "the kernel has no qdisc `{kind}` (CONFIG_NET_SCH_{}); on this device use scheme {}",
        kind.to_uppercase(),
        list("`", |info| !info.devices.is_empty() && !info.has_qdisc)
    )]
    NoQdisc {
        /// Its kind, such as `htb`.
        kind: &'static str,
    },
    /// The kernel has no ifb devices.
    #[error(
        "the kernel has no ifb devices (CONFIG_IFB), through which scheme `htb` sends what comes in; limit \
         what leaves alone"
    )]
    NoIfb,
    /// The kernel cannot send a packet from one device to another.
    #[error(
        "the kernel has no tc action mirred (CONFIG_NET_ACT_MIRRED, CONFIG_NET_CLS_BPF), by which scheme \
         `htb` sends what comes in to an ifb device; limit what leaves alone"
    )]
    NoMirred,
    /// A tree is full.
    #[error("the tree of limits holds its {} limits already; remove some first", SLOTS - 1)]
    NoSlot,
    /// A scheme whose limits have one scope.
    #[error(
        "scheme `{0}` limits one cgroup or device; limits over several cgroups have {schemes}",
        schemes = list("`", |info| !info.cgroups.is_empty())
    )]
    NoMembers(Scheme),
    /// A member of a tree that a packet could not name.
    #[error("{what} cannot be inside a limit on a device: {why}")]
    NoMember { what: Scope, why: &'static str },
    /// The kernel's network stack refused.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The qdisc in which packets should wait is not there.
    #[error("device {ifindex} has lost the queue of the limit; reattach it with `tidegate apply`")]
    NoQueue { ifindex: u32 },
    /// A device knows no more prefixes.
    #[error(
        "the limits of this device have their {} prefixes already; write shorter ones that contain \
         several",
        intf::PREFIXES_MAX
    )]
    NoPrefixes,
    /// A packet would be looked for too often.
    #[error(
        "the limits of this device have prefixes of {} different lengths already, in one direction and \
         version of IP; use lengths that are there",
        intf::LENGTHS_MAX
    )]
    NoLengths,
    /// A device has no place for another limit with prefixes.
    #[error(
        "this device holds its {} limits with prefixes already; remove some first",
        intf::PLACES
    )]
    NoPlace,
    /// A map could not be read or written.
    #[error("map `{map}` of the limit: {source}")]
    Map { map: &'static str, source: libbpf_rs::Error },
    /// A map does not hold what this version writes.
    #[error("its map `{0}` has another layout: another version of tidegate has made it")]
    Layout(&'static str),
    /// Nobody has written down what was asked, or in words that this version has not.
    #[error("what was asked of it cannot be read: another version of tidegate has made it")]
    Intent,
    /// Its maps are another version's.
    #[error("{} version of tidegate, {build}, has made it", if *is_newer { "a newer" } else { "an earlier" })]
    Version {
        build: String,
        /// Whether it is newer than this one.
        is_newer: bool,
    },
    /// The thresholds or rates are out of range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

#[cfg(test)]
mod tests {
    use libbpf_rs::ErrorExt as _;

    use super::*;

    #[test]
    fn a_program_that_is_not_loaded_has_the_advice_of_its_cause() {
        let said = |code: Errno| {
            let source = libbpf_rs::Error::from_raw_os_error(code.raw_os_error());
            let source = source.context("failed to load object");
            LimitError::Load { program: "nrm", source }.to_string()
        };
        for (code, advice) in [
            (Errno::MFILE, "`ulimit -n 1024`"),
            (Errno::AGAIN, "interrupted the kernel's check; try again"),
            (Errno::INVAL, "`uname -r` must be 6.1 or newer"),
        ] {
            assert!(said(code).ends_with(advice), "{}", said(code));
        }
    }
}
