//! The commands of the plugin, on the limits of this host.
//!
//! A limit's name says whose it is: `cni-NETWORK-POD-INTERFACE`. The network and the interface (with the id
//! of its container) are hashes, and by these alone a limit is found again: nothing else has to be stored.
//! POD is for people: `NAMESPACE_NAME` if the runtime says so, else the beginning of the container's id.

use std::{collections::BTreeSet, os::unix::fs::MetadataExt, path::Path, time::Duration};

use serde_json::{Value, json};
use tidegate_core::{Scope, fnv};
use tidegate_host::{
    apply::{Backend, apply},
    host::{Host, LockedHost, present},
    plan::{PlanError, State, Wanted, plan},
    settings::{Asked, differences},
};
use tidegate_sys::{
    features,
    limit::LimitOptions,
    net::{NetError, NetNs, Netlink},
    store::{MAX_NAME_BYTES, Store, StoreError},
};

use crate::{
    bandwidth::Bandwidth,
    error::{CniError, Code},
    request::{Attachment, Command, Pod, Request, VERSIONS},
};

/// Longest part of a container's id in the name of its limit, in bytes.
const CONTAINER_MAX: usize = 24;
/// Longest namespace and pod in the name of a limit, in bytes.
const POD_MAX: usize = MAX_NAME_BYTES - "cni-01234567--0123456789abcdef".len();
/// The namespace has so many of these, and more if the pod needs fewer.
const NAMESPACE_MAX: usize = 12;
/// How long the commands for other containers are waited for: a node that starts has them all at once. The
/// runtime's own time-out is in minutes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Does what is asked for; what is to be printed, if the command has an answer.
///
/// # Errors
/// [`CniError`] as the protocol has it.
pub fn answer(store: &Path, request: &Request) -> Result<Option<Value>, CniError> {
    let Request { version, network, valid, .. } = request;
    match (request.command, &request.attachment) {
        (Command::Version, _) => {
            Ok(Some(json!({ "cniVersion": version, "supportedVersions": VERSIONS })))
        }
        (Command::Add, Some(attachment)) => add(store, request, attachment).map(Some),
        (Command::Check, Some(attachment)) => check(store, request, attachment).map(|()| None),
        (Command::Del, Some(attachment)) => {
            remove(store, |name| is_of(name, network, attachment)).map(|()| None)
        }
        (Command::Gc, _) => {
            let own = network_prefix(network);
            let stay: BTreeSet<_> = valid.iter().map(suffix).collect();
            let stays = |name: &str| stay.iter().any(|suffix| name.ends_with(suffix));
            let goes = |name: &str| name.starts_with(&own) && !stays(name);
            remove(store, goes).map(|()| None)
        }
        // The host can hold limits: that was seen when it was opened.
        (Command::Status, _) => open(store).map(|_| None),
        (Command::Add | Command::Check | Command::Del, None) => {
            Err(CniError::new(Code::Environment, "CNI_CONTAINERID is not set"))
        }
    }
}

fn open(store: &Path) -> Result<Host, CniError> {
    let host = Host::open(store);
    let mut host = host.map_err(|e| CniError::new(Code::Unavailable, e.to_string()))?;
    host.patience(PATIENCE);
    Ok(host)
}

fn store_error(error: StoreError) -> CniError {
    let code = if matches!(error, StoreError::Busy(_)) { Code::TryAgain } else { Code::Limit };
    CniError::new(code, error.to_string())
}

/// Does the work with other writers kept out, and lets them in again whatever came of it.
fn locked<T>(
    host: &Host,
    work: impl FnOnce(&mut LockedHost) -> Result<T, CniError>,
) -> Result<T, CniError> {
    let mut host = host.lock().map_err(store_error)?;
    let done = work(&mut host);
    host.close();
    done
}

/// What a container's limit is on, and what it does.
struct Limit {
    scope: Scope,
    bandwidth: Bandwidth,
}

impl Limit {
    /// The limit that is asked for; `None` if there is none.
    fn of(request: &Request, attachment: &Attachment) -> Result<Option<Limit>, CniError> {
        let Some(bandwidth) = request.bandwidth.clone() else { return Ok(None) };
        let netns = request.netns.as_deref().unwrap_or_default();
        let port = host_interface(Path::new(netns), &attachment.interface)?;
        Ok(Some(Limit { scope: Scope::Port(port), bandwidth }))
    }

    fn options(
        &self,
        request: &Request,
        is: Option<&LimitOptions>,
    ) -> Result<LimitOptions, CniError> {
        self.bandwidth.options(&self.scope, request.scheme, features::kernel(), is)
    }
}

fn add(store: &Path, request: &Request, attachment: &Attachment) -> Result<Value, CniError> {
    let mut result = request.result.clone().ok_or_else(not_chained)?;
    if let Some(object) = result.as_object_mut() {
        object.insert("cniVersion".to_owned(), json!(request.version));
    }
    let is_own = |name: &str| is_of(name, &request.network, attachment);
    let Some(limit) = Limit::of(request, attachment)? else {
        remove(store, is_own)?;
        return Ok(result);
    };
    locked(&open(store)?, |host| {
        host.reserve_journal().map_err(store_error)?;
        let present = host.host().present().map_err(store_error)?;
        let is = present.iter().find(|limit| is_own(&limit.name));
        let options = limit.options(request, is.map(|limit| &limit.options))?;
        let new_name = || limit_name(&request.network, request.pod.as_ref(), attachment);
        let name = is.map_or_else(new_name, |limit| limit.name.clone());
        let (scope, asked) = (limit.scope.clone(), Asked::default());
        let wanted = Wanted { name, scope, options, parent: None, asked, members: Vec::new() };
        let refused = |e: String| CniError::new(Code::Limit, e);
        let plan = plan(&present, &[wanted], false).map_err(|e| match e {
            PlanError::ScopeTaken { scope, other, .. } => refused(format!(
                "{scope} has limit `{other}` already; if its container no longer exists, remove it with \
                 `tidegate limit del {other}`"
            )),
            e => refused(e.to_string()),
        })?;
        apply(host, &plan.actions).map_err(|e| refused(e.to_string()))
    })?;
    Ok(result)
}

fn check(store: &Path, request: &Request, attachment: &Attachment) -> Result<(), CniError> {
    if request.result.is_none() {
        return Err(not_chained());
    }
    let failed = |problem: String| CniError::new(Code::Limit, problem);
    // A container without rates needs no host that can hold limits.
    let names = Store::at(store).names().map_err(store_error)?;
    let name = names.into_iter().find(|name| is_of(name, &request.network, attachment));
    let Some(limit) = Limit::of(request, attachment)? else {
        return match name {
            Some(name) => Err(failed(format!("limit `{name}` is on, and no rate is asked for"))),
            None => Ok(()),
        };
    };
    let host = open(store)?;
    let missing = || failed(format!("there is no limit on {}", limit.scope));
    let name = name.ok_or_else(missing)?;
    let found = host.find(&name).map_err(store_error)?.ok_or_else(missing)?;
    let is = present(&found);
    if is.scope != limit.scope || is.state != State::InForce {
        let problem = format!("limit `{name}` is not in force on {}", limit.scope);
        return Err(failed(problem));
    }
    let options = limit.options(request, Some(&is.options))?;
    match differences(&is.options, &options).first() {
        None => Ok(()),
        Some(d) => Err(failed(format!("limit `{name}` has {} {}, not {}", d.field, d.from, d.to))),
    }
}

/// Takes limits off. All that can go do, whatever becomes of the others.
fn remove(store: &Path, goes: impl Fn(&str) -> bool) -> Result<(), CniError> {
    let names = Store::at(store).names().map_err(store_error)?;
    let names: Vec<_> = names.into_iter().filter(|name| goes(name)).collect();
    // Where there are none the host need not be one that can hold limits.
    if names.is_empty() {
        return Ok(());
    }
    locked(&open(store)?, |host| {
        let gone = |done: &Result<(), StoreError>| !matches!(done, Err(StoreError::Missing(_)));
        let done: Vec<_> = names.iter().map(|name| host.remove(name)).filter(gone).collect();
        done.into_iter().collect::<Result<(), _>>().map_err(store_error)
    })
}

fn not_chained() -> CniError {
    let problem = "there is no prevResult; name this plugin after the one that makes the interface";
    CniError::new(Code::Config, problem)
}

/// The other end of a container's interface, which is on this host.
fn host_interface(netns: &Path, interface: &str) -> Result<String, CniError> {
    let shown = netns.display();
    let there = NetNs::at(netns).and_then(|netns| netns.run(|| Netlink::open()?.devices())?);
    let there = there.map_err(|e| CniError::new(Code::Environment, format!("CNI_NETNS: {e}")))?;
    let failed = |problem: String| CniError::new(Code::Limit, problem);
    // Indices of interfaces, by which the other end is found, begin anew in each namespace.
    let inode = |path: &Path| std::fs::metadata(path).map(|file| file.ino()).ok();
    if inode(netns) == inode(Path::new("/proc/thread-self/ns/net")) {
        return Err(failed(format!("{shown} is the host's own network namespace")));
    }
    let inside = there.into_iter().find(|device| device.name == interface);
    let inside = inside.ok_or_else(|| {
        failed(format!("there is no interface `{interface}` in the network namespace {shown}"))
    })?;
    let peer = inside.peer.ok_or_else(|| {
        failed(format!(
            "interface `{interface}` is `{}`, not one end of a veth pair; only these can be limited",
            inside.kind
        ))
    })?;
    // Another pair may have the same indices, but leads elsewhere.
    let leading_there = || {
        let mut netlink = Netlink::open()?;
        let there = netlink.leading_into(&BTreeSet::from([peer]), &NetNs::at(netns)?)?;
        let mut here = netlink.devices()?;
        here.retain(|device| there.contains(&device.index) && device.kind == "veth");
        Ok(here)
    };
    let here = leading_there().map_err(|e: NetError| failed(e.to_string()))?;
    let other = here.into_iter().find(|device| device.peer == Some(inside.index));
    let missing =
        || failed(format!("the other end of interface `{interface}` is not on this host"));
    other.map(|device| device.name).ok_or_else(missing)
}

/// How the names of the limits of a network begin.
fn network_prefix(network: &str) -> String {
    format!("cni-{:08x}-", hash(&[network]) >> 32)
}

/// Whether a name is one that the plugin gives: such a limit is its runtime's to take off.
pub fn is_limit(name: &str) -> bool {
    let hex = |text: &str, len| text.len() == len && text.bytes().all(|b| b.is_ascii_hexdigit());
    let parts = name.strip_prefix("cni-").and_then(|rest| rest.split_once('-'));
    let hashes = parts.and_then(|(network, rest)| Some((network, rest.rsplit_once('-')?.1)));
    hashes.is_some_and(|(network, own)| hex(network, 8) && hex(own, 16))
}

/// How the name of an interface's limit ends.
fn suffix(Attachment { container, interface }: &Attachment) -> String {
    format!("-{:016x}", hash(&[container, interface]))
}

/// Whether a limit is that of an interface, whatever name its pod has. So are those with names of earlier
/// versions, which had no pods in them.
fn is_of(name: &str, network: &str, attachment: &Attachment) -> bool {
    name.starts_with(&network_prefix(network)) && name.ends_with(&suffix(attachment))
}

/// The name of a new limit of an interface.
fn limit_name(network: &str, pod: Option<&Pod>, attachment: &Attachment) -> String {
    let good = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let start = |text: &str, max: usize| text.chars().take(max).map(good).collect::<String>();
    let middle = match pod {
        Some(Pod { namespace, name }) => {
            let free = (POD_MAX - 1).saturating_sub(name.chars().count());
            let namespace = start(namespace, free.max(NAMESPACE_MAX));
            let rest = POD_MAX - 1 - namespace.len();
            format!("{namespace}_{}", start(name, rest))
        }
        None => start(&attachment.container, CONTAINER_MAX),
    };
    format!("{}{middle}{}", network_prefix(network), suffix(attachment))
}

/// The same on every host and in every version.
fn hash(parts: &[&str]) -> u64 {
    // No name has a zero.
    fnv(parts.iter().flat_map(|part| part.bytes().chain([0])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(container: &str, interface: &str) -> Attachment {
        Attachment { container: container.to_owned(), interface: interface.to_owned() }
    }

    #[test]
    fn an_interface_has_a_name_of_its_own_that_can_be_a_limits() {
        let id = "8f1c".repeat(16);
        let names = [
            limit_name("net", None, &attachment(&id, "eth0")),
            limit_name("net", None, &attachment(&id, "eth1")),
            limit_name("other", None, &attachment(&id, "eth0")),
            limit_name("net", None, &attachment(&format!("{id}0"), "eth0")),
            limit_name("net", None, &attachment("a.b_c", "eth0")),
        ];
        for (i, name) in names.iter().enumerate() {
            assert!(tidegate_sys::store::check_name(name).is_ok(), "{name}");
            assert!(!names[..i].contains(name), "{name}");
            assert!(is_limit(name), "{name}");
            assert_eq!(name.starts_with(&network_prefix("net")), i != 2, "{name}");
        }
        for other in
            ["cni-web", "cni-e53f18ba", "cni-e53f18ba-a", "web", "cni-web-a-0cf56b686b3ab552"]
        {
            assert!(!is_limit(other), "{other}");
        }
        // It must be found again by every later version.
        assert_eq!(names[0], "cni-e53f18ba-8f1c8f1c8f1c8f1c8f1c8f1c-0cf56b686b3ab552");
    }

    #[test]
    fn a_limit_has_the_name_of_its_pod_and_is_found_without_it() {
        let name = |namespace: &str, pod: &str, container: &str| {
            let pod = Pod { namespace: namespace.to_owned(), name: pod.to_owned() };
            limit_name("net", Some(&pod), &attachment(container, "eth0"))
        };
        let web = "web-7d4b9c6f5-x2x8q";
        let names = [
            name("shop", web, "c1"),
            name("shop", web, "c2"),
            name("kube-system", "a.b", "c3"),
            name(&"n".repeat(63), &"p".repeat(253), "c4"),
            name(&"n".repeat(63), "p", "c5"),
            name("ä", "é=..", "c6"),
        ];
        let middles = names.each_ref().map(|name| &name[13..name.len() - 17]);
        let shop = "shop_web-7d4b9c6f5-x2x8q";
        assert_eq!(middles[..3], [shop, shop, "kube-system_a_b"]);
        assert_eq!(middles[3], format!("{}_{}", "n".repeat(12), "p".repeat(20)));
        assert_eq!(middles[4], format!("{}_p", "n".repeat(31)));
        for (i, name) in names.iter().enumerate() {
            assert!(tidegate_sys::store::check_name(name).is_ok(), "{name}");
            assert!(is_limit(name), "{name}");
            for container in 1..=names.len() {
                let own = attachment(&format!("c{container}"), "eth0");
                assert_eq!(is_of(name, "net", &own), container == i + 1, "{name}");
                assert!(!is_of(name, "other", &own), "{name}");
            }
        }
        // As an earlier version has named it.
        let id = "8f1c".repeat(16);
        let earlier = "cni-e53f18ba-8f1c8f1c8f1c8f1c8f1c8f1c-0cf56b686b3ab552";
        assert!(is_of(earlier, "net", &attachment(&id, "eth0")));
    }

    /// Indices are those of a namespace: another container's interface may have the same ones.
    #[test]
    fn root_an_interface_with_the_same_numbers_is_not_taken_for_the_other_end() {
        if !rustix::process::geteuid().is_root() {
            return println!(
                "SKIP root_an_interface_with_the_same_numbers_is_not_taken_for_the_other_end: needs root"
            );
        }
        let name = |end| format!("tidegate-same-{end}-{}", std::process::id());
        let [host, own, elsewhere, others] =
            ["a", "b", "c", "d"].map(|end| NetNs::create(&name(end)).unwrap());
        let pair = |here: &NetNs, there: &NetNs, peer: &str| {
            let (here, there) = (here.name(), there.name());
            let words = format!(
                "-n {here} link add out index 70 type veth peer name {peer} index 80 netns {there}"
            );
            let done = std::process::Command::new("ip").args(words.split(' ')).status().unwrap();
            assert!(done.success(), "ip {words}");
        };
        pair(&elsewhere, &own, "eth0");
        pair(&host, &others, "eth0");
        let found = |netns: &NetNs| {
            let path = Path::new("/run/netns").join(netns.name());
            host.run(|| host_interface(&path, "eth0")).unwrap()
        };
        assert_eq!(found(&others).unwrap(), "out");
        let said = found(&own).unwrap_err().to_string();
        assert!(said.contains("is not on this host"), "{said}");
    }

    /// A container that has no limit can be deleted on any host: here without root.
    #[test]
    fn where_nothing_is_to_be_taken_off_no_host_is_asked_for() {
        remove(Path::new("/nonexistent/tidegate"), |_| true).unwrap();
    }
}
