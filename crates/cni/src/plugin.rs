//! The commands of the plugin, on the limits of this host.
//!
//! A limit's name says whose it is: `cni-NETWORK-CONTAINER-INTERFACE`, where the network and the interface
//! are hashes, and the container is the beginning of its id. So nothing but the limits has to be stored.

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
    store::{Store, StoreError},
};

use crate::{
    bandwidth::Bandwidth,
    error::{CniError, Code},
    request::{Attachment, Command, Request, VERSIONS},
};

/// Longest part of a container's id in the name of its limit, in bytes.
const CONTAINER_MAX: usize = 24;
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
            let own = limit_name(network, attachment);
            remove(store, |name| name == own).map(|()| None)
        }
        (Command::Gc, _) => {
            let stay: Vec<_> = valid.iter().map(|it| limit_name(network, it)).collect();
            let own = network_prefix(network);
            let goes = |name: &str| name.starts_with(&own) && !stay.iter().any(|it| it == name);
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
    let name = limit_name(&request.network, attachment);
    let Some(limit) = Limit::of(request, attachment)? else {
        if has_limit(store, &name)? {
            remove(store, |it| it == name)?;
        }
        return Ok(result);
    };
    locked(&open(store)?, |host| {
        host.reserve_journal().map_err(store_error)?;
        let present = host.host().present().map_err(store_error)?;
        let is = present.iter().find(|limit| limit.name == name).map(|limit| &limit.options);
        let options = limit.options(request, is)?;
        let (scope, asked) = (limit.scope.clone(), Asked::default());
        let wanted = Wanted { name, scope, options, parent: None, asked, members: Vec::new() };
        let refused = |e: String| CniError::new(Code::Limit, e);
        let plan = plan(&present, &[wanted], false).map_err(|e| match e {
            PlanError::ScopeTaken { scope, other, .. } => refused(format!(
                "{scope} has limit `{other}` already; if that is of a container that is no more, take it off \
                 with `tidegate limit del {other}`"
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
    let name = limit_name(&request.network, attachment);
    let failed = |problem: String| CniError::new(Code::Limit, problem);
    let Some(limit) = Limit::of(request, attachment)? else {
        return match has_limit(store, &name)? {
            true => Err(failed(format!("limit `{name}` is on, and no rate is asked for"))),
            false => Ok(()),
        };
    };
    let found = open(store)?.find(&name).map_err(store_error)?;
    let found = found.ok_or_else(|| failed(format!("there is no limit on {}", limit.scope)))?;
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

/// Whether there is a limit of this name. A container without rates needs no host that can hold limits.
fn has_limit(store: &Path, name: &str) -> Result<bool, CniError> {
    let names = Store::at(store).names().map_err(store_error)?;
    Ok(names.iter().any(|it| it == name))
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
#[must_use]
pub fn is_limit(name: &str) -> bool {
    let hex = |text: &str, len| text.len() == len && text.bytes().all(|b| b.is_ascii_hexdigit());
    let parts = name.strip_prefix("cni-").and_then(|rest| rest.split_once('-'));
    let hashes = parts.and_then(|(network, rest)| Some((network, rest.rsplit_once('-')?.1)));
    hashes.is_some_and(|(network, own)| hex(network, 8) && hex(own, 16))
}

/// The name of an interface's limit.
fn limit_name(network: &str, attachment: &Attachment) -> String {
    let Attachment { container, interface } = attachment;
    let good = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let start: String = container.chars().take(CONTAINER_MAX).map(good).collect();
    format!("{}{start}-{:016x}", network_prefix(network), hash(&[container, interface]))
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
            limit_name("net", &attachment(&id, "eth0")),
            limit_name("net", &attachment(&id, "eth1")),
            limit_name("other", &attachment(&id, "eth0")),
            limit_name("net", &attachment(&format!("{id}0"), "eth0")),
            limit_name("net", &attachment("a.b_c", "eth0")),
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
