//! A limit in force.

use std::os::fd::{AsFd, OwnedFd};

use super::{LimitError, LimitMaps, maps::Adopt};
use crate::{
    bpf::{self, Links},
    cgroup::{Cgroup, Hierarchy},
    device::{Filters, Hooked},
    root_qdisc::Undo,
};

/// A limit for cgroups that is loaded and attached nowhere.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) maps: LimitMaps,
    /// Its programs, by the names of their links.
    pub(crate) programs: Vec<(&'static str, OwnedFd)>,
}

impl Loaded {
    /// Puts its programs on a cgroup.
    pub(crate) fn attach(&self, cgroup: &Cgroup) -> Result<Links, LimitError> {
        match self.maps.own.pool() {
            Some(pool) => pool.enter(&self.programs, cgroup, self.maps.at),
            None => attach(&self.programs, cgroup),
        }
    }
}

/// Puts programs on a cgroup.
pub(crate) fn attach(
    programs: &[(&'static str, OwnedFd)],
    cgroup: &Cgroup,
) -> Result<Links, LimitError> {
    let attach = |(name, program): &(&'static str, OwnedFd)| {
        Ok((*name, bpf::attach(program.as_fd(), name, cgroup)?))
    };
    programs.iter().map(attach).collect()
}

/// A limit in force as long as this value lives.
#[derive(Debug)]
pub struct AttachedLimit {
    pub(crate) maps: LimitMaps,
    pub(crate) links: Links,
    /// On a device of a kernel without tcx links.
    pub(crate) filters: Option<Filters>,
    /// Of a policer in XDP.
    pub(crate) xdp: Option<OwnedFd>,
    /// The qdisc that it has put at the root of its device.
    pub(crate) qdisc: Undo,
}

impl AttachedLimit {
    /// On a cgroup.
    pub(crate) fn new(maps: LimitMaps, links: Links) -> AttachedLimit {
        AttachedLimit { maps, links, filters: None, xdp: None, qdisc: Undo::nothing() }
    }

    pub(crate) fn on_device(maps: LimitMaps, Hooked { links, filters }: Hooked) -> AttachedLimit {
        AttachedLimit { filters, ..Self::new(maps, links) }
    }

    /// What is not pinned stays when this value ends.
    pub(crate) fn keep(&mut self) {
        self.filters.iter_mut().for_each(Filters::keep);
        self.qdisc.keep();
    }

    pub fn maps(&self) -> &LimitMaps {
        &self.maps
    }

    /// Takes the programs off and gives the sockets of the cgroup back.
    ///
    /// # Errors
    /// [`LimitError`]; the programs are off all the same.
    pub fn detach(self, hierarchy: &Hierarchy, cgroup: &Cgroup) -> Result<(), LimitError> {
        // Programs first: a connection that opens meanwhile must not be set again.
        drop(self.links);
        drop(self.xdp);
        self.maps.adopt(hierarchy, cgroup, Adopt::Release)
    }
}
