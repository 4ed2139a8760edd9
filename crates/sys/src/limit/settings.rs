//! A map holds the settings of a limit twice, and names the copy that is in force (`tg_limit_now` of
//! `bpf/common/maps.h`). A packet finds the old settings or the new ones, and so it does where a writer dies.

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use tidegate_core::{Nanos, Rate};

use super::LimitError;
use crate::{
    bpf::{lookup, map_error},
    intf::{self, COPY, DIRECTIONS, LIMITS},
};

const NAME: &str = "limit";

/// Until when a rate is good. The programs themselves look at the time: nobody needs to be there when it
/// comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The end, by `CLOCK_BOOTTIME`.
    pub until: Nanos,
    /// The rate from then on.
    pub then: Rate,
}

/// A limit, and by direction what it is once its lease has ended; that says nothing where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) limit: intf::Limit,
    pub(crate) then: [intf::Limit; DIRECTIONS],
}

impl From<intf::Limit> for Settings {
    /// A limit for ever.
    fn from(limit: intf::Limit) -> Self {
        Settings { limit, then: [intf::Limit::default(); DIRECTIONS] }
    }
}

impl Settings {
    /// Reads the settings in force of the limit at a place in a map.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub(crate) fn read(map: &MapHandle, place: u32) -> Result<Settings, LimitError> {
        let copy = copy_in_force(map, place)?;
        let at = |i: usize| -> Result<intf::Limit, LimitError> {
            Ok(intf::Limit { copy: 0, ..lookup(map, NAME, key(place, copy, i))? })
        };
        let limit = at(0)?;
        let mut settings = Settings::from(limit);
        for (i, then) in settings.then.iter_mut().enumerate() {
            if limit.until_ns[i] != 0 {
                *then = at(1 + i)?;
            }
        }
        Ok(settings)
    }

    /// Puts all settings in force at once.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`]; the earlier ones are in force.
    pub(crate) fn write(&self, map: &MapHandle, place: u32) -> Result<(), LimitError> {
        let was = copy_in_force(map, place)?;
        let to = 1 - was;
        let update = |i: usize, copy: u32, limit: &intf::Limit| {
            map.update(&key(place, copy, i).to_ne_bytes(), bytemuck::bytes_of(limit), MapFlags::ANY)
                .map_err(map_error(NAME))
        };
        for (i, then) in self.then.iter().enumerate() {
            if self.limit.until_ns[i] != 0 {
                update(1 + i, to, then)?;
            }
        }
        // The first entry names the copy in force, which its own settings must not be while they change.
        update(0, to, &intf::Limit { copy: was.into(), ..self.limit })?;
        let first: intf::Limit = lookup(map, NAME, key(place, 0, 0))?;
        update(0, 0, &intf::Limit { copy: to.into(), ..first })
    }
}

fn copy_in_force(map: &MapHandle, place: u32) -> Result<u32, LimitError> {
    let first: intf::Limit = lookup(map, NAME, key(place, 0, 0))?;
    Ok(u32::from(first.copy != 0))
}

/// Of the limit (0), or of what it is by direction when its time has come, in a copy.
fn key(place: u32, copy: u32, i: usize) -> u32 {
    place * LIMITS as u32 + copy * COPY as u32 + i as u32
}
