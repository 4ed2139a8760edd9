//! A limit on a cgroup or device: its eBPF programs, maps and links, from loading to taking off.
//!
//! [`AttachedLimit`] lives as long as the process that holds it (`tidegate run`): when it ends, for
//! any reason, the kernel takes the programs off. [`crate::store`] pins one so that it stays.

use tidegate_core::{Scheme, queue_options::ConfigError};

use crate::{
    cgroup::{Cgroup, Hierarchy},
    device::Target,
    schemes::edt,
    schemes::nrm,
    schemes::police,
};

mod attached;
mod error;
mod maps;
mod options;
mod rate;
mod reading;
pub(crate) mod settings;

pub use attached::AttachedLimit;
pub(crate) use attached::Links;
pub use error::LimitError;
pub use maps::LimitMaps;
pub(crate) use maps::{Adopt, ParentMaps, set_parent};
pub use options::LimitOptions;
pub use reading::{Colours, Reading};
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
        let attached = Self::load(hierarchy, cgroup, options, parent)?;
        attached.maps.adopt(hierarchy, cgroup, Adopt::Take)?;
        Ok(attached)
    }

    /// The same, but for the sockets that exist.
    pub(crate) fn load(
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        options: &LimitOptions,
        parent: Option<&LimitMaps>,
    ) -> Result<AttachedLimit, LimitError> {
        match options.scheme {
            Scheme::Edt => edt::attach_cgroup(hierarchy, cgroup, options),
            Scheme::Police => police::attach_cgroup(cgroup, options),
            // Only inside a limit on a device, which the store alone knows.
            Scheme::Htb | Scheme::Dem | Scheme::Spring | Scheme::Carousel => {
                Err(ConfigError::Scheme(options.scheme).into())
            }
            Scheme::Pace | Scheme::Nrm => nrm::attach_cgroup(cgroup, options, parent),
        }
    }

    /// The same on a device, with a scheme that is for devices.
    ///
    /// # Errors
    /// [`LimitError`]; nothing is attached.
    pub fn attach_device(
        hierarchy: &Hierarchy,
        target: &Target,
        options: &LimitOptions,
    ) -> Result<AttachedLimit, LimitError> {
        match options.scheme {
            Scheme::Edt => edt::attach_device(hierarchy, target, options),
            Scheme::Police => police::attach_device(target, options),
            scheme => Err(ConfigError::Scheme(scheme).into()),
        }
    }
}
