//! Pods of Kubernetes on this node: which of them a selector matches, and where their cgroups are. Pure: who
//! asks the API server is elsewhere.
//!
//! kubelet makes a cgroup for each pod, whose containers are below it, also init containers and sidecars. Its
//! name has the pod's UID:
//!
//! ```text
//! kubepods.slice/kubepods-podUID.slice                                        driver systemd; `-` is `_`
//! kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice     [/crio-ID.scope]
//! kubepods/besteffort/podUID                                                  driver cgroupfs; [/ID]
//! kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podUID.slice          kubelet --cgroup-root
//! ```
//!
//! So it is looked for at any depth, below a part with `kubepods` in its name. What a workload makes below
//! its own cgroup lies deeper than what kubelet has made, so of several the one that is least deep has it;
//! those in users' slices come last, as users make cgroups there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Pods that are known at most; kubelet takes 110 if nobody says otherwise.
pub const MAX_PODS: usize = 10_000;
/// The annotation by which a pod joins a limit.
pub const JOIN: &str = "tidegate.dev/limit";
/// Those of its rates, as Kubernetes has them.
pub const EGRESS: &str = "kubernetes.io/egress-bandwidth";
pub const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
/// All that say something of limits.
pub const ANNOTATIONS: [&str; 3] = [JOIN, EGRESS, INGRESS];
/// Hexadecimal digits of a UID; that of a static pod is a hash of as many.
const UID_DIGITS: usize = 32;

/// What is known of the pods of this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Pods {
    /// Nobody asks the API server.
    #[default]
    NotAsked,
    /// It has not answered yet.
    NotListed,
    /// By their UID in the API.
    Known(BTreeMap<String, Pod>),
}

/// A pod as the API server tells it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Those of [`ANNOTATIONS`].
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    /// The UID that a static pod has on its node. In the API it has another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub static_uid: Option<String>,
}

impl Pods {
    pub(crate) fn known(&self) -> Option<&BTreeMap<String, Pod>> {
        match self {
            Pods::Known(pods) => Some(pods),
            Pods::NotAsked | Pods::NotListed => None,
        }
    }

    /// Whether the pod with this UID on its node is known.
    pub fn has(&self, uid: &str) -> bool {
        let is_static = |pod: &Pod| pod.static_uid.as_deref() == Some(uid);
        self.known().is_some_and(|pods| pods.contains_key(uid) || pods.values().any(is_static))
    }
}

/// The cgroup of the pod that a cgroup is at or below, and the pod's UID.
pub fn pod_cgroup(path: &str) -> Option<(&str, String)> {
    let (mut end, mut inside) = (0, false);
    for part in path.split('/') {
        end += part.len();
        inside |= part.split(['-', '.']).any(|word| word == "kubepods");
        if let Some(uid) = uid(part).filter(|_| inside) {
            return Some((&path[..end], uid));
        }
        end += 1;
    }
    None
}

fn uid(part: &str) -> Option<String> {
    let uid = match part.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod")?.1.replace('_', "-"),
        None => part.strip_prefix("pod")?.to_owned(),
    };
    let digits = uid.bytes().filter(|byte| *byte != b'-');
    let is_one = digits.clone().count() == UID_DIGITS && { digits }.all(|b| b.is_ascii_hexdigit());
    is_one.then_some(uid)
}
