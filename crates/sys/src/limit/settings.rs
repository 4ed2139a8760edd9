//! A map holds the settings of a limit twice, and names the copy that is in force
//! (`bpf/common/settings.h`). A packet finds the old settings or the new ones, and so it does where a writer
//! dies.

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use tidegate_core::{Nanos, Rate};

use super::LimitError;
use crate::{
    bpf::map_error,
    intf::{self, COPY, DIRECTIONS, Entry, LIMITS},
};

const NAME: &str = "limit";
/// How long an entry may be.
pub(crate) const LENGTHS: [usize; 2] = [size_of::<intf::Limit>(), size_of::<Entry>()];

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
    pub(crate) limit: Entry,
    pub(crate) then: [Entry; DIRECTIONS],
}

impl From<Entry> for Settings {
    /// A limit for ever.
    fn from(limit: Entry) -> Self {
        Settings { limit, then: [Entry::default(); DIRECTIONS] }
    }
}

impl Settings {
    /// Reads the settings in force of the limit at a place in a map.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub(crate) fn read(map: &MapHandle, place: u32) -> Result<Settings, LimitError> {
        let copy = copy_in_force(map, place)?;
        let at = |i: usize| read(map, key(place, copy, i));
        let mut limit = at(0)?;
        limit.copy = 0;
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
        let update = |i: usize, copy: u32, limit: &Entry| {
            // What this scheme's entries have.
            let bytes = &bytemuck::bytes_of(limit)[..map.value_size() as usize];
            map.update(&key(place, copy, i).to_ne_bytes(), bytes, MapFlags::ANY)
                .map_err(map_error(NAME))
        };
        let first = read(map, key(place, 0, 0))?;
        let with_copy = |limit: &Entry, copy: u32| {
            let mut limit = *limit;
            limit.copy = copy.into();
            limit
        };
        for (i, then) in self.then.iter().enumerate() {
            if self.limit.until_ns[i] != 0 {
                update(1 + i, to, then)?;
            }
        }
        // The first entry names the copy in force, which its own settings must not be while they change.
        update(0, to, &with_copy(&self.limit, was))?;
        let first = if to == 0 { self.limit } else { first };
        update(0, 0, &with_copy(&first, to))
    }
}

fn copy_in_force(map: &MapHandle, place: u32) -> Result<u32, LimitError> {
    Ok(u32::from(read(map, key(place, 0, 0))?.copy != 0))
}

/// Reads an entry; of a scheme that has nothing of its own in it, that is zero.
fn read(map: &MapHandle, key: u32) -> Result<Entry, LimitError> {
    let value = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).map_err(map_error(NAME))?;
    let value = value.filter(|value| LENGTHS.contains(&value.len()));
    let value = value.ok_or(LimitError::Layout(NAME))?;
    let mut entry = Entry::default();
    bytemuck::bytes_of_mut(&mut entry)[..value.len()].copy_from_slice(&value);
    Ok(entry)
}

/// Of the limit (0), or of what it is by direction when its time has come, in a copy.
fn key(place: u32, copy: u32, i: usize) -> u32 {
    place * LIMITS as u32 + copy * COPY as u32 + i as u32
}
