//! Who keeps packets until their departure: the `fq` qdisc, on every device by which they leave.
//!
//! A device keeps departure times if its root qdisc is `fq`, or `mq` with `fq` on each of its queues. Of a
//! device it is the device itself. Of a cgroup or port it is asked, in each network namespace in which a
//! process of the cgroup lives (of a port: in this one), of the devices to which default routes lead; where
//! there is none, of every device that is up and is not the loopback device. A device without a queue of
//! its own (a bridge, a bond, a VLAN) stands for those below it; of a bridge's ports those of virtual
//! machines and containers count only where there are no others.
//!
//! This is a check at one moment. Routes and qdiscs may change later: `status` asks again, and the program
//! drops beyond the horizon whoever does not wait.

use std::collections::BTreeSet;

use tidegate_core::{Scheme, Scope};

use crate::{
    cgroup::{Cgroup, Hierarchy},
    features,
    net::{Device, NetError, Netlink, qdisc::QueueStats},
    process::{in_network_namespace, network_namespaces},
};

/// Devices that stand for others, one above the other, are followed this deep.
const MAX_DEPTH: usize = 4;
/// Devices of virtual machines and containers.
const GUEST_KINDS: [&str; 2] = ["tun", "veth"];

/// Why departure times would not be kept.
#[derive(Debug, thiserror::Error)]
pub enum FqError {
    /// A device without `fq`.
    #[error(
        "scheme `edt` needs the qdisc `fq` on device `{device}`, which has `{qdisc}`; type: \
         tc qdisc replace dev {device} root fq   (or use scheme `{other}`, which needs no qdisc)"
    )]
    NoFq {
        device: String,
        qdisc: String,
        /// A scheme that limits such a scope without a qdisc.
        other: Scheme,
    },
    /// A kernel without `fq`.
    #[error(
        "scheme `edt` needs the qdisc `fq`, which this kernel does not have; type: modprobe sch_fq, or boot \
         a kernel that has it (or use scheme `{0}`, which needs no qdisc)"
    )]
    NotInKernel(Scheme),
    #[error(
        "scheme `edt` needs a device by which packets leave, and none but the loopback device is up"
    )]
    NoDevice,
    #[error("there is no device `{0}` here; `ip link` shows those there are")]
    Missing(String),
    #[error(transparent)]
    Net(#[from] NetError),
}

/// Checks that packets of `scope` will be kept until their departure. `cgroup` is that of a cgroup scope.
///
/// # Errors
/// [`FqError`] names the first device that does not keep them.
pub(crate) fn check(
    hierarchy: &Hierarchy,
    scope: &Scope,
    cgroup: Option<&Cgroup>,
) -> Result<(), FqError> {
    let namespaces = cgroup.map(|c| network_namespaces(hierarchy, c)).unwrap_or_default();
    if namespaces.is_empty() {
        return check_here(scope);
    }
    let mut result = Ok(());
    for namespace in &namespaces {
        in_network_namespace(namespace, || {
            if result.is_ok() {
                result = check_here(scope);
            }
        });
    }
    result
}

/// In the network namespace of the calling thread.
fn check_here(scope: &Scope) -> Result<(), FqError> {
    let mut netlink = Netlink::open()?;
    let devices = netlink.devices()?;
    let leaving = match scope {
        Scope::Dev(name) => {
            let device = devices.iter().find(|device| device.name == *name);
            vec![device.ok_or_else(|| FqError::Missing(name.clone()))?]
        }
        Scope::Cgroup(_) | Scope::Select(_) | Scope::Port(_) => {
            leaving(&mut netlink, &devices, scope)?
        }
    };
    if leaving.is_empty() {
        return Err(FqError::NoDevice);
    }
    for device in leaving {
        let qdiscs = netlink.qdisc_stats(device.index)?;
        if !keeps_times(&qdiscs) {
            let root = root_of(&qdiscs).map_or("none", |qdisc| &qdisc.kind);
            let other = if scope.is_device() { Scheme::Police } else { Scheme::Pace };
            if features::has_qdisc("fq") == Some(false) {
                return Err(FqError::NotInKernel(other));
            }
            let (device, qdisc) = (device.name.clone(), root.to_owned());
            return Err(FqError::NoFq { device, qdisc, other });
        }
    }
    Ok(())
}

fn leaving<'d>(
    netlink: &mut Netlink,
    devices: &'d [Device],
    scope: &Scope,
) -> Result<Vec<&'d Device>, FqError> {
    let is_scope = |device: &Device| scope.is_device() && device.name == scope.name();
    let routes = netlink.default_route_devices()?;
    let usable = |device: &&Device| device.up && !device.loopback && !is_scope(device);
    let mut chosen: Vec<_> =
        devices.iter().filter(usable).filter(|device| routes.contains(&device.index)).collect();
    if chosen.is_empty() {
        chosen = devices.iter().filter(usable).collect();
    }
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for _ in 0..MAX_DEPTH {
        let mut below = Vec::new();
        for device in chosen {
            if !seen.insert(device.index) {
                continue;
            }
            let under = devices_below(device, devices, |device| usable(&device));
            let queueless =
                root_of(&netlink.qdisc_stats(device.index)?).is_none_or(|q| q.kind == "noqueue");
            if queueless && !under.is_empty() {
                below.extend(under);
            } else {
                found.push(device);
            }
        }
        chosen = below;
    }
    Ok(found)
}

/// Those through which a device sends.
fn devices_below<'d>(
    device: &Device,
    devices: &'d [Device],
    usable: impl Fn(&Device) -> bool,
) -> Vec<&'d Device> {
    let is_below =
        |other: &Device| other.master == Some(device.index) || device.below == Some(other.index);
    let below: Vec<_> = devices.iter().filter(|other| is_below(other) && usable(other)).collect();
    let is_guest = |device: &&Device| GUEST_KINDS.contains(&device.kind.as_str());
    if below.iter().all(is_guest) {
        return below;
    }
    below.into_iter().filter(|device| !is_guest(device)).collect()
}

fn root_of(qdiscs: &[QueueStats]) -> Option<&QueueStats> {
    qdiscs.iter().find(|qdisc| qdisc.parent == crate::net::qdisc::Handle::ROOT)
}

/// `fq` at the root, or `mq` with nothing but `fq`.
fn keeps_times(qdiscs: &[QueueStats]) -> bool {
    match root_of(qdiscs) {
        Some(root) if root.kind == "fq" => true,
        Some(root) if root.kind == "mq" => {
            let mut queues = qdiscs
                .iter()
                .filter(|q| q.parent.major == root.handle.major && q.parent.minor != 0)
                .peekable();
            queues.peek().is_some() && queues.all(|queue| queue.kind == "fq")
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::qdisc::Handle;

    fn qdisc(kind: &str, parent: Handle, major: u16) -> QueueStats {
        QueueStats {
            kind: kind.into(),
            handle: Handle::new(major, 0),
            parent,
            ..QueueStats::default()
        }
    }

    #[test]
    fn fq_at_the_root_or_on_every_queue_keeps_times() {
        let clsact = || qdisc("clsact", Handle::CLSACT, 0xffff);
        let mq = || qdisc("mq", Handle::ROOT, 0x8001);
        let queue = |kind, minor| qdisc(kind, Handle::new(0x8001, minor), 0);
        assert!(keeps_times(&[clsact(), qdisc("fq", Handle::ROOT, 1)]));
        assert!(keeps_times(&[mq(), queue("fq", 1), queue("fq", 2), clsact()]));
        assert!(!keeps_times(&[mq(), queue("fq", 1), queue("pfifo_fast", 2)]));
        assert!(!keeps_times(&[mq()]));
        assert!(!keeps_times(&[qdisc("fq_codel", Handle::ROOT, 0)]));
        assert!(!keeps_times(&[]));
    }

    #[test]
    fn a_bridge_stands_for_its_uplinks() {
        let device = |index, kind: &str, master| Device {
            index,
            name: format!("d{index}"),
            up: true,
            loopback: false,
            kind: kind.into(),
            master,
            below: None,
            peer: None,
        };
        let bridge = device(1, "bridge", None);
        let all = [bridge.clone(), device(2, "", Some(1)), device(3, "tun", Some(1))];
        let names = |all: &[Device]| -> Vec<u32> {
            devices_below(&bridge, all, |_| true).iter().map(|d| d.index).collect()
        };
        assert_eq!(names(&all), [2]);
        assert_eq!(names(&[bridge.clone(), device(3, "tun", Some(1))]), [3]);
        let vlan = Device { below: Some(2), ..device(4, "vlan", None) };
        let below = devices_below(&vlan, &all, |_| true);
        assert_eq!(below.iter().map(|d| d.index).collect::<Vec<_>>(), [2]);
    }
}
