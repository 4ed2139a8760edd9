//! Limits as the kernel has them: whoever holds them, by the links on cgroups.
//!
//! The store knows what is pinned in it. A `tidegate run` keeps its limit to itself, and so does another
//! store; but each limit is a link of an egress program, the program names its maps, and maps can be opened
//! by their ids. Reading all limits takes O(links on this host).

use std::{
    mem,
    os::fd::{AsFd, AsRawFd},
};

use libbpf_rs::{
    MapCore, MapHandle, Program,
    libbpf_sys::{BPF_CGROUP_INET_EGRESS, bpf_prog_get_info_by_fd, bpf_prog_info},
};

use tidegate_core::scheme::SCHEMES;

use crate::{
    limit::{Carried, LimitMaps, slot_pool::slot_of},
    links::{self, On},
    schemes::{self, MapsByName},
};

/// Maps that a program of a limit has at most, constants included.
const MAX_MAPS: usize = 32;
/// Limits that one look at the kernel reads at most.
pub const MAX_ATTACHED: usize = 8192;

/// A limit that the kernel enforces on a cgroup.
#[derive(Debug)]
pub struct Attached {
    pub cgroup_id: u64,
    pub id: LimitId,
    pub maps: LimitMaps,
}

/// What tells limits apart, whoever has put them on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LimitId {
    /// The kernel's id of the map of its settings.
    map: u32,
    /// Its slot in that, if others have theirs there, too.
    slot: u32,
}

impl LimitId {
    pub(crate) fn of(settings: &MapHandle, slot: u32) -> Option<LimitId> {
        Some(LimitId { map: settings.info().ok()?.info.id, slot })
    }
}

impl LimitMaps {
    /// `None` if the kernel cannot be asked.
    pub fn id(&self) -> Option<LimitId> {
        LimitId::of(&self.limit, self.at)
    }
}

/// The limits on those cgroups whose id passes, at most [`MAX_ATTACHED`]. What cannot be opened, because it
/// goes while we look, is left out. One that another version of Tidegate has put on may have maps that cannot
/// be read.
pub fn attached(wanted: impl Fn(u64) -> bool) -> Vec<Attached> {
    let mut found = Vec::new();
    for link in links::all() {
        let On::Cgroup { id: cgroup_id, attach_type } = link.on else { continue };
        if attach_type != BPF_CGROUP_INET_EGRESS || !wanted(cgroup_id) {
            continue;
        }
        let Some(maps) = maps_of(link.program, cgroup_id) else { continue };
        let Some(id) = maps.id() else { continue };
        found.push(Attached { cgroup_id, id, maps });
        if found.len() >= MAX_ATTACHED {
            break;
        }
    }
    found
}

/// The maps of a limit by its program on a cgroup; `None` if the program is another one, or has gone.
fn maps_of(program: u32, cgroup_id: u64) -> Option<LimitMaps> {
    let (name, ids) = program_maps(program)?;
    let scheme =
        SCHEMES.iter().find(|info| info.cgroup_programs.first() == Some(&name.as_str()))?.scheme;
    // The maps of a parent have the same names and are met later (maps.h): the first ones are the limit's
    // own.
    let mut maps = MapsByName::new();
    for id in ids {
        let Ok(map) = MapHandle::from_map_id(id) else { continue };
        maps.entry(map.name().to_string_lossy().into_owned()).or_insert(map);
    }
    let own = schemes::of(scheme).of_program(&mut maps)?;
    let mut take = |name| maps.remove(name);
    let (limit, counters, exempt) = (take("limit")?, take("counters")?, take("exempt_prefixes"));
    let at = take("slots_of_cgroup").map_or(0, |slots| slot_of(&slots, cgroup_id));
    Some(LimitMaps { limit, counters, exempt, at, carried: Carried::default(), own })
}

/// The name of a program, and the ids of its maps.
fn program_maps(id: u32) -> Option<(String, Vec<u32>)> {
    let program = Program::fd_from_id(id).ok()?;
    let mut ids = [0u32; MAX_MAPS];
    // SAFETY: the struct is integers and arrays of them, for which all zeros is a value.
    let mut info: bpf_prog_info = unsafe { mem::zeroed() };
    info.nr_map_ids = MAX_MAPS as u32;
    info.map_ids = ids.as_mut_ptr() as u64;
    let mut len = size_of::<bpf_prog_info>() as u32;
    // SAFETY: the descriptor is open; `info` has `len` bytes and points to `ids`, which has room for as many
    // entries as it says; all outlive the call.
    let ret = unsafe {
        bpf_prog_get_info_by_fd(program.as_fd().as_raw_fd(), &raw mut info, &raw mut len)
    };
    if ret != 0 {
        return None;
    }
    let name = info.name.iter().take_while(|c| **c != 0).map(|c| char::from(*c as u8)).collect();
    Some((name, ids[..MAX_MAPS.min(info.nr_map_ids as usize)].to_vec()))
}
