//! The maps of the limit that contains another one: their pins, and how programs get them.

use std::{io, os::unix::fs::symlink, path::Path};

use libbpf_rs::{MapCore, MapHandle};

use super::LimitError;
use crate::bpf::{map_error, name_in, open_map};

/// The pins of the maps.
const QUEUES: &str = "parent_queues";
const SOCKETS: &str = "parent_sockets";
/// The symbolic link to the parent's number in them, if that shares them with others.
const SLOT: &str = "parent_place";

/// What a child works with of its parent.
#[derive(Debug)]
pub(crate) struct ParentMaps {
    pub(crate) queues: MapHandle,
    pub(crate) sockets: MapHandle,
    /// The parent's number in its maps.
    pub(crate) at: u32,
}

impl ParentMaps {
    /// The same maps once more.
    pub(crate) fn again(&self) -> Result<ParentMaps, LimitError> {
        Self::with(&self.queues, &self.sockets, self.at)
    }

    /// Those of a limit, with its number in them.
    pub(crate) fn with(
        queues: &MapHandle,
        sockets: &MapHandle,
        at: u32,
    ) -> Result<ParentMaps, LimitError> {
        let again = |map: &MapHandle| MapHandle::try_from(map).map_err(map_error("parent"));
        Ok(ParentMaps { queues: again(queues)?, sockets: again(sockets)?, at })
    }

    /// What tells the parent from all other limits of the host, as a part of a file's name.
    pub(crate) fn key(&self) -> Result<String, LimitError> {
        let info = self.queues.info().map_err(map_error(QUEUES))?;
        Ok(format!("{}_{}", info.info.id, self.at))
    }

    /// Those pinned in the directory of a limit, or of a pool; `None` if it is in no other limit.
    pub(crate) fn open(dir: &Path) -> Result<Option<ParentMaps>, LimitError> {
        if !dir.join(QUEUES).exists() {
            return Ok(None);
        }
        let open = |pin| open_map(dir, pin);
        let at = name_in(dir, SLOT).and_then(|at| at.parse().ok()).unwrap_or_default();
        Ok(Some(ParentMaps { queues: open(QUEUES)?, sockets: open(SOCKETS)?, at }))
    }

    /// The maps with their pins.
    pub(crate) fn pins(&mut self) -> [(&'static str, &mut MapHandle); 2] {
        [(QUEUES, &mut self.queues), (SOCKETS, &mut self.sockets)]
    }

    /// Writes the parent's number beside the pins.
    pub(crate) fn remember_place(&self, dir: &Path) -> io::Result<()> {
        if self.at == 0 { Ok(()) } else { symlink(self.at.to_string(), dir.join(SLOT)) }
    }
}

/// Gives an object that is open the maps of its parent, or leaves them out; the skeletons have no common
/// type.
macro_rules! set_parent {
    ($open:expr, $parent:expr, $program:literal) => {
        let parent: Option<&ParentMaps> = $parent;
        if let Some(rodata) = $open.maps.rodata_data.as_deref_mut() {
            rodata.has_parent = u8::from(parent.is_some());
            rodata.parent_slot = parent.map_or(0, |parent| parent.at);
        }
        for (map, of_parent) in [
            (&mut $open.maps.queues_of_limit_above, parent.map(|p| &p.queues)),
            (&mut $open.maps.sockets_of_limit_above, parent.map(|p| &p.sockets)),
        ] {
            match of_parent {
                Some(with) => reuse(map, with)?,
                None => map.set_autocreate(false).map_err(load_error($program))?,
            }
        }
    };
}

pub(crate) use set_parent;
