//! Where a limit is, where it was put on, and what of it is no longer there.

use std::path::Path;

use tidegate_core::Scope;

use super::{
    DEV, PORT, PinnedLimit, cgroup_in,
    members::{Member, cgroup_of_link, members_in, selector_in},
    name_in,
};
use crate::{cgroup::Hierarchy, device, fq::FqError, intf, schemes};

/// Where a limit is.
pub(super) struct Whereabouts {
    /// Now; `None` if that is gone.
    pub(super) scope: Option<Scope>,
    pub(super) installed_on: Option<Scope>,
    /// Whether that is gone, and another one of its name is there.
    pub(super) is_anew: bool,
    /// The hooks at which it is no longer.
    pub(super) unhooked: Vec<&'static str>,
    /// With a selector.
    pub(super) members: Vec<Member>,
}

impl Whereabouts {
    pub(super) fn of(hierarchy: &Hierarchy, dir: &Path, limit: &intf::Limit) -> Whereabouts {
        if limit.ifindex != 0 {
            return of_device(dir, limit);
        }
        let Some(selector) = selector_in(dir) else { return of_cgroup(hierarchy, dir, limit) };
        let hooks = schemes::of(limit.scheme()).links(limit);
        let members = members_in(hierarchy, dir, hooks);
        let is_lost = |hook: &&&str| members.iter().any(|member| member.unhooked.contains(*hook));
        let unhooked = hooks.iter().filter(is_lost).copied().collect();
        let scope = Some(Scope::Select(selector));
        Whereabouts { scope: scope.clone(), installed_on: scope, is_anew: false, unhooked, members }
    }
}

impl PinnedLimit {
    /// Why its packets would not be kept until their departure.
    pub(super) fn find_unkept(&self, hierarchy: &Hierarchy) -> Option<FqError> {
        let scheme = schemes::of(self.limit.scheme());
        match &self.scope {
            Some(scope) if scope.is_device() => scheme.why_unkept(hierarchy, scope, None),
            _ => self.cgroups(hierarchy).iter().find_map(|cgroup| {
                let scope = Scope::Cgroup(cgroup.path().to_owned());
                scheme.why_unkept(hierarchy, &scope, Some(cgroup))
            }),
        }
    }
}

fn of_cgroup(hierarchy: &Hierarchy, dir: &Path, limit: &intf::Limit) -> Whereabouts {
    let installed_on = cgroup_in(hierarchy, dir);
    let is_it = |path: &String| hierarchy.open(path).is_ok_and(|c| c.id() == limit.cgroup_id);
    // A cgroup of version 2 cannot be renamed, but has another path in another cgroup namespace.
    let remembered = installed_on.clone().filter(is_it);
    let cgroup = remembered.or_else(|| hierarchy.path_of(limit.cgroup_id));
    let hooked = |name: &&str| cgroup_of_link(&dir.join(name)) == Some(limit.cgroup_id);
    let hooks = schemes::of(limit.scheme()).links(limit);
    let unhooked = match cgroup {
        Some(_) => hooks.iter().copied().filter(|name| !hooked(name)).collect(),
        None => Vec::new(),
    };
    let is_anew =
        cgroup.is_none() && installed_on.as_ref().is_some_and(|p| hierarchy.open(p).is_ok());
    Whereabouts {
        is_anew,
        scope: cgroup.map(Scope::Cgroup),
        installed_on: installed_on.map(Scope::Cgroup),
        unhooked,
        members: Vec::new(),
    }
}

fn of_device(dir: &Path, limit: &intf::Limit) -> Whereabouts {
    let (mark, kind): (_, fn(String) -> Scope) =
        if limit.flags & intf::FLAG_PORT != 0 { (PORT, Scope::Port) } else { (DEV, Scope::Dev) };
    let installed_on = name_in(dir, mark).map(kind);
    let remembered = installed_on.clone().filter(|scope| device::is_there(scope, limit));
    // It may have been renamed: the limit goes on.
    let renamed = || {
        let is_here = device::is_in_this_namespace(limit);
        is_here.then(|| device::name_of(limit.ifindex)).flatten().map(kind)
    };
    let is_here = |scope| device::Target::find(scope).is_ok_and(|t| t.namespace == limit.cgroup_id);
    let is_anew = remembered.is_none() && installed_on.as_ref().is_some_and(is_here);
    let scope = remembered.or_else(renamed);
    let unhooked = match scope {
        Some(_) => device::unhooked(dir, limit, schemes::of(limit.scheme()).links(limit)),
        None => Vec::new(),
    };
    Whereabouts { scope, installed_on, is_anew, unhooked, members: Vec::new() }
}
