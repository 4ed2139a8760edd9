//! A limit on a cgroup or device: its eBPF programs, maps and links, from loading to taking off.
//!
//! [`AttachedLimit`] lives as long as the process that holds it (`tidegate run`): when it ends, for
//! any reason, the kernel takes the programs off. [`crate::store`] pins one so that it stays.

use tidegate_core::Scope;

use crate::{
    cgroup::{Cgroup, Hierarchy},
    device::Target,
    remains::InTheWay,
    schemes::{self, Programs},
};

mod attached;
mod carried;
mod error;
mod maps;
mod options;
mod parent;
mod rate;
mod reading;
pub(crate) mod settings;
pub(crate) mod slot_pool;

pub use attached::AttachedLimit;
pub(crate) use attached::{Loaded, attach};
pub(crate) use carried::Carried;
pub use error::LimitError;
pub use maps::LimitMaps;
pub(crate) use maps::{Adopt, Handle};
pub use options::LimitOptions;
pub(crate) use parent::{ParentMaps, set_parent};
pub use reading::{Colours, FairShare, Part, Reading};
pub use settings::Lease;

impl AttachedLimit {
    /// Loads the programs of a limit and attaches them to the cgroup. One with a class takes its part of
    /// `parent`, whose cgroup contains this one.
    ///
    /// # Errors
    /// [`LimitError`]; nothing is attached.
    pub fn attach(
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        options: &LimitOptions,
        parent: Option<&LimitMaps>,
    ) -> Result<AttachedLimit, LimitError> {
        let attached = Self::load(hierarchy, cgroup, options, parent, Programs::All)?;
        attached.maps.adopt(hierarchy, cgroup, Adopt::Take)?;
        Ok(attached)
    }

    /// The same for a cgroup in which no socket was made yet, with as few programs as that needs: its
    /// directions stay as they are, and no limit can be inside it.
    ///
    /// # Errors
    /// [`LimitError`]; nothing is attached.
    pub fn attach_new(
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        options: &LimitOptions,
        parent: Option<&LimitMaps>,
    ) -> Result<AttachedLimit, LimitError> {
        Self::load(hierarchy, cgroup, options, parent, Programs::Needed)
    }

    /// The same, with these programs.
    pub(crate) fn load(
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        options: &LimitOptions,
        parent: Option<&LimitMaps>,
        programs: Programs,
    ) -> Result<AttachedLimit, LimitError> {
        let scheme = schemes::of(options.scheme);
        let scope = Scope::Cgroup(cgroup.path().to_owned());
        if let Some(why) = scheme.why_unkept(hierarchy, &scope, Some(cgroup)) {
            return Err(why.into());
        }
        let loaded = scheme.load(cgroup.id(), options, parent, programs)?;
        let links = loaded.attach(cgroup)?;
        Ok(AttachedLimit::new(loaded.maps, links))
    }

    /// The same on a device, with a scheme that is for devices (see `Scheme::attach_device`).
    ///
    /// # Errors
    /// [`LimitError`]; nothing is attached.
    pub(crate) fn attach_device(
        hierarchy: &Hierarchy,
        target: &Target,
        options: &LimitOptions,
        in_the_way: &InTheWay,
    ) -> Result<AttachedLimit, LimitError> {
        schemes::of(options.scheme).attach_device(hierarchy, target, options, in_the_way)
    }
}
