//! The names of pools, and what the directories of a pool and of a limit in one say of each other.

use std::{fs, path::Path};

use super::{StoreError, name_in, symlink};
use crate::BUILD;

/// Prefix of the directory of a pool; no limit's name starts with it.
pub(super) const POOL_PREFIX: char = '+';
/// The first word of the names of pools.
pub(super) const KIND: &str = "cgroups_";
/// The symbolic links of a limit in a pool: to the name of the pool, and to its slot there. Earlier versions
/// have written these names.
pub(super) const POOL: &str = "room";
pub(super) const POOL_SLOT: &str = "place";
/// In the directory of a pool, whose programs it runs.
const POOL_BUILD: &str = "build";

pub(super) fn file_name(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a directory is the pool of limits on cgroups.
pub(super) fn is_slots(dir: &Path) -> bool {
    file_name(dir).strip_prefix(POOL_PREFIX).is_some_and(|name| name.starts_with(KIND))
}

/// The slot of the limit in a directory; 0: it has maps of its own.
pub(super) fn slot_in(dir: &Path) -> u32 {
    let is_pooled = name_in(dir, POOL).is_some_and(|pool| is_slots(Path::new(&pool)));
    let slot = name_in(dir, POOL_SLOT).filter(|_| is_pooled);
    slot.and_then(|slot| slot.parse().ok()).unwrap_or_default()
}

/// Writes down in which slot of which pool the limit in a directory is.
pub(super) fn note_slot(dir: &Path, pool: &Path, slot: u32) -> Result<(), StoreError> {
    symlink(Path::new(&file_name(pool)), &dir.join(POOL))?;
    symlink(Path::new(&slot.to_string()), &dir.join(POOL_SLOT))
}

/// Whose programs a pool runs.
pub(super) fn build_of_pool(dir: &Path) -> Option<String> {
    name_in(dir, POOL_BUILD)
}

/// Writes that a pool runs the programs of this build.
pub(super) fn sign_pool(dir: &Path) -> Result<(), StoreError> {
    let link = dir.join(POOL_BUILD);
    let _ = fs::remove_file(&link);
    symlink(Path::new(BUILD), &link)
}
