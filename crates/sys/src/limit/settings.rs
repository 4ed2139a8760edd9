//! A map holds the settings of a limit twice, and names the copy that is in force (`tg_limit_of` of
//! `bpf/maps.h`). A packet finds the old settings or the new ones, and so it does where a writer dies.

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::{LimitError, lookup, map_error};
use crate::intf::{self, Copies, DIRECTIONS, LIMITS};

const NAME: &str = "limit";

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
        let copies: Copies = lookup(map, NAME, key(place, 0))?;
        let limit = copies.copy[copies.current()];
        let mut settings = Settings::from(limit);
        for (i, then) in settings.then.iter_mut().enumerate() {
            if limit.until_ns[i] != 0 {
                let thens: Copies = lookup(map, NAME, key(place, 1 + i))?;
                *then = thens.copy[copies.current()];
            }
        }
        Ok(settings)
    }

    /// Puts all settings in force at once.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`]; the earlier ones are in force.
    pub(crate) fn write(&self, map: &MapHandle, place: u32) -> Result<(), LimitError> {
        let at = |i: usize| -> Result<Copies, LimitError> { lookup(map, NAME, key(place, i)) };
        let update = |i: usize, copies: &Copies| {
            map.update(&key(place, i).to_ne_bytes(), bytemuck::bytes_of(copies), MapFlags::ANY)
                .map_err(map_error(NAME))
        };
        let mut copies = at(0)?;
        let to = 1 - copies.current();
        for (i, then) in self.then.iter().enumerate() {
            if self.limit.until_ns[i] != 0 {
                let mut thens = at(1 + i)?;
                thens.copy[to] = *then;
                update(1 + i, &thens)?;
            }
        }
        copies.copy[to] = self.limit;
        update(0, &copies)?;
        copies.in_force = to as u64;
        update(0, &copies)
    }
}

/// Of the limit (0), or of what it is by direction when its time has come.
fn key(place: u32, i: usize) -> u32 {
    place * LIMITS as u32 + i as u32
}
