//! The pods of a world: where their cgroups are, and which of them a selector matches.

use std::collections::BTreeMap;

use super::{Match, World, glob, has_label, user_of};
use crate::pods::{JOIN, Pod, pod_cgroup};

impl World {
    /// The pods that are known and have a cgroup, each with that. O(cgroups + pods).
    pub fn pods(&self) -> Vec<(&Pod, &str)> {
        let Some(pods) = self.pods.known() else { return Vec::new() };
        let mut cgroups = self.pod_cgroups();
        let mut found = Vec::new();
        // Whoever may make pods may write that one is static, so its UID takes no other pod's cgroup.
        let (of_files, of_api): (Vec<_>, Vec<_>) =
            pods.iter().partition(|(_, pod)| pod.static_uid.is_some());
        for (uid, pod) in of_api.into_iter().chain(of_files) {
            let uid = pod.static_uid.as_ref().unwrap_or(uid);
            found.extend(cgroups.remove(uid).map(|cgroup| (pod, cgroup)));
        }
        found
    }

    /// The cgroups of pods, by the UID in their names. Each user may make cgroups of any name in the slice of
    /// that user, so one elsewhere goes first.
    fn pod_cgroups(&self) -> BTreeMap<String, &str> {
        let rank = |path: &str| (user_of(path).is_some(), path.matches('/').count());
        let mut found: BTreeMap<String, &str> = BTreeMap::new();
        for (cgroup, uid) in self.cgroups.keys().filter_map(|path| pod_cgroup(path)) {
            let first = found.entry(uid).or_insert(cgroup);
            if rank(cgroup) < rank(first) {
                *first = cgroup;
            }
        }
        found
    }

    /// How many pods run here that the API server has not listed.
    pub fn unknown_pods(&self) -> usize {
        self.pod_cgroups().keys().filter(|uid| !self.pods.has(uid)).count()
    }

    pub(crate) fn matching_pods(&self, selector: &str) -> Vec<Match> {
        let matching = self.pods().into_iter().filter(|(pod, _)| matches(selector, pod));
        let found = matching
            .map(|(pod, cgroup)| Match { name: pod.name.clone(), cgroup: cgroup.to_owned() });
        found.collect()
    }
}

fn matches(selector: &str, pod: &Pod) -> bool {
    let mut parts = selector.splitn(3, '/');
    let mut is_part = |text: &str| parts.next().is_none_or(|pattern| glob(pattern)(text));
    if !is_part(&pod.namespace) || !is_part(&pod.name) {
        return false;
    }
    let mut labels = parts.next().into_iter().flat_map(|labels| labels.split(',')).map(str::trim);
    labels.all(|label| match label.strip_prefix(JOIN).and_then(|rest| rest.strip_prefix('=')) {
        Some(limit) => pod.annotations.get(JOIN).is_some_and(|joins| joins == limit),
        None => has_label(&pod.labels, label),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::Pods;

    const UID: &str = "1f2e3d4c-5b6a-4978-8796-a5b4c3d2e1f0";
    const OTHER: &str = "00000000-1111-4222-8333-444444444444";
    const HASH: &str = "9d8f7e6c5b4a39281706f5e4d3c2b1a0";
    const ID: &str = "4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c9d1e2a3b4f5c";

    fn pod(namespace: &str, name: &str, labels: &str) -> Pod {
        let labels = labels.split(',').filter_map(|label| label.split_once('='));
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Pod { namespace, name, labels, ..Pod::default() }
    }

    fn world(paths: &[&str], pods: &[(&str, Pod)]) -> World {
        let cgroups = paths.iter().map(|path| ((*path).to_owned(), 1)).collect();
        let pods = pods.iter().map(|(uid, pod)| ((*uid).to_owned(), pod.clone())).collect();
        World { cgroups, pods: Pods::Known(pods), ..World::default() }
    }

    fn found(world: &World, selector: &str) -> Vec<String> {
        let found = world.find(&format!("pod:{selector}").parse().unwrap()).matches;
        found.into_iter().map(|found| found.cgroup).collect()
    }

    #[test]
    fn the_cgroup_of_a_pod_is_found_whatever_made_it() {
        let table = [
            ("kubepods.slice/kubepods-podSYS.slice", "SYS"),
            ("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podSYS.slice", "SYS"),
            ("kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podSYS.slice", "SYS"),
            ("kubepods/podUID", "UID"),
            ("kubepods/burstable/podUID", "UID"),
            ("kubepods/besteffort/podHASH", "HASH"),
            ("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podHASH.slice", "HASH"),
            ("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podSYS.slice", "SYS"),
            ("docker/ID/kubelet/kubepods/podUID", "UID"),
            ("custom.slice/custom-kubepods.slice/custom-kubepods-podSYS.slice", "SYS"),
        ];
        let full = |text: &str| {
            let system = UID.replace('-', "_");
            text.replace("SYS", &system).replace("UID", UID).replace("HASH", HASH).replace("ID", ID)
        };
        for (path, uid) in table {
            let (path, uid) = (full(path), if uid == "HASH" { HASH } else { UID }.to_owned());
            assert_eq!(pod_cgroup(&path), Some((path.as_str(), uid.clone())));
            for below in ["cri-containerd-ID.scope", "crio-ID.scope", "ID", "podUID", "x/y"] {
                let below = full(&format!("{path}/{below}"));
                assert_eq!(pod_cgroup(&below), Some((path.as_str(), uid.clone())), "{below}");
            }
        }
        for no in [
            "kubepods.slice",
            "kubepods.slice/kubepods-burstable.slice",
            "kubepods/burstable/podx",
            "machine.slice/machine-libpod_pod_ID.slice/libpod-ID.scope",
            "system.slice/podUID",
            "kubepods/podUIDf",
            "kubepods/UID",
        ] {
            assert_eq!(pod_cgroup(&full(no)), None, "{no}");
        }
    }

    #[test]
    fn pods_are_selected_by_namespace_name_and_labels() {
        let paths = [format!("kubepods/pod{UID}"), format!("kubepods/burstable/pod{OTHER}")];
        let labels = "app=api,app.kubernetes.io/name=web";
        let mut joins = pod("dev", "job", "app=job");
        joins.annotations.insert(JOIN.to_owned(), "shared".to_owned());
        let pods =
            [(UID, pod("prod", "api-0", labels)), (OTHER, joins), (HASH, pod("prod", "x", ""))];
        let world = world(&[&paths[0], &paths[1]], &pods);
        for prod in [
            "prod",
            "pr*",
            "prod/api-?",
            "*/api-0",
            "prod/*/app=api",
            "*/*/app.kubernetes.io/name=web,app",
        ] {
            assert_eq!(found(&world, prod), [paths[0].clone()], "{prod}");
        }
        assert_eq!(found(&world, "*/*/tidegate.dev/limit=shared"), [paths[1].clone()]);
        assert_eq!(found(&world, "dev/*/app=job,tidegate.dev/limit=shared"), [paths[1].clone()]);
        for none in
            ["prod/*/tidegate.dev/limit=shared", "*/*/tidegate.dev/limit=other", "pro", "prod/x"]
        {
            assert_eq!(found(&world, none), [""; 0], "{none}");
        }
        assert_eq!(world.unknown_pods(), 0);
        let unlisted = World { pods: Pods::NotListed, ..world };
        assert_eq!((found(&unlisted, "prod"), unlisted.unknown_pods()), (Vec::new(), 2));
    }

    #[test]
    fn a_static_pod_has_the_cgroup_of_its_hash_and_of_nobody_else() {
        let paths = [format!("kubepods/pod{UID}"), format!("kubepods/burstable/pod{HASH}")];
        let of = |uid: &str, name| Pod {
            static_uid: Some(uid.to_owned()),
            ..pod("kube-system", name, "")
        };
        // It says that it is static, and has the UID of another.
        let pods = [("0", of(UID, "liar")), ("1", of(HASH, "etcd")), (UID, pod("prod", "api", ""))];
        let world = world(&[&paths[0], &paths[1]], &pods);
        assert_eq!(found(&world, "kube-system"), [paths[1].clone()]);
        assert_eq!(found(&world, "prod"), [paths[0].clone()]);
        assert!(world.pods.has(HASH) && !world.pods.has(OTHER));
    }

    #[test]
    fn what_a_workload_makes_is_not_another_pods_cgroup() {
        let real = format!("kubepods/burstable/pod{UID}");
        let own = format!("kubepods/pod{OTHER}/a/b/kubepods/pod{UID}");
        let user = format!("user.slice/user-1.slice/user@1.service/kubepods/pod{UID}");
        let world = world(&[&user, &own, &real], &[(UID, pod("prod", "api", ""))]);
        assert_eq!(found(&world, "prod"), [real]);
    }

    #[test]
    fn a_cgroup_in_a_users_slice_takes_no_pods_place() {
        let real = format!("docker/{ID}/kubelet/kubepods/burstable/pod{UID}");
        let users = format!("user.slice/user-1.slice/user@1.service/kubepods/pod{UID}");
        let world = world(&[&users, &real], &[(UID, pod("prod", "api", ""))]);
        assert_eq!(found(&world, "prod"), [real]);
    }
}
