//! The place of a limit in the maps of a device whose limits have prefixes (see `bpf/police/match.h`): what
//! its packets are known by.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, AsRawFd},
};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use tidegate_core::{
    Direction,
    prefixes::{Prefix, Prefixes},
};

use crate::{
    bpf::{create_map, lookup, map_error},
    clock::boottime,
    exempt,
    intf::{self, CHUNK, FAMILIES, LENGTHS_MAX, Length, Lengths, PlaceKey},
    limit::{LimitError, LimitOptions, settings::Settings},
};

/// Lists of lengths: by direction and version of IP.
const LISTS: usize = intf::DIRECTIONS * FAMILIES;
/// Of a limit in a pool: by what its packets are known.
#[derive(Debug)]
pub(crate) struct Place {
    pub(super) index: u32,
    /// The prefixes of the limit.
    pub(crate) matched: Prefixes,
    pub(super) places: MapHandle,
    pub(super) lengths: MapHandle,
    pub(super) exempts: MapHandle,
}

impl Place {
    /// Where it is in the maps that it shares with others.
    pub(super) fn in_chunk(&self) -> u32 {
        self.index % CHUNK
    }

    /// Puts another limit in force, with its prefixes.
    ///
    /// # Errors
    /// [`LimitError`]; the earlier limit is in force.
    pub(crate) fn change(
        &self,
        map: &MapHandle,
        settings: &Settings,
        options: &LimitOptions,
    ) -> Result<(), LimitError> {
        let earlier = Settings::read(map, self.in_chunk())?;
        let exempted = match earlier.limit.exempts() {
            true => exempt::read(&self.exempts, self.index),
            false => Prefixes::default(),
        };
        let old = keys(&earlier.limit, &self.matched);
        let new = keys(&settings.limit, &options.matched);
        self.enter(&settings.limit, &options.matched)?;
        let done = self
            .write(map, settings, &options.exempt.prefixes)
            .and_then(|()| self.leave(old.difference(&new)));
        if done.is_err() {
            let _ = self.enter(&earlier.limit, &self.matched);
            let _ = Settings::read(map, self.in_chunk())
                .and_then(|now| self.write(map, &earlier.carried_on(&now, boottime()), &exempted));
            let _ = self.leave(new.difference(&old));
        }
        done
    }

    /// The settings of a limit, whose packets do not find them yet, and the prefixes that it exempts.
    pub(crate) fn write(
        &self,
        map: &MapHandle,
        settings: &Settings,
        exempt: &Prefixes,
    ) -> Result<(), LimitError> {
        let earlier = Settings::read(map, self.in_chunk())?.limit;
        settings.write(map, self.in_chunk())?;
        // The trie is gone through from end to end, with what is other limits'.
        if (earlier.flags | settings.limit.flags) & intf::FLAG_EXEMPT == 0 {
            return Ok(());
        }
        exempt::fill(&self.exempts, exempt, self.index)
    }

    /// Has packets find the limit by its prefixes; on an error they find what they did.
    pub(crate) fn enter(&self, limit: &intf::Limit, matched: &Prefixes) -> Result<(), LimitError> {
        let wanted = keys(limit, matched);
        let mut lists = self.lists()?;
        let mut more = false;
        for key in &wanted {
            more |= add_length(&mut lists[list_of(key)], key)?;
        }
        if more {
            self.swap_lists(&lists)?;
        }
        let mut added = Vec::new();
        for key in &wanted {
            if holder(&self.places, key)? == Some(self.index) {
                continue;
            }
            let index = self.index.to_ne_bytes();
            if let Err(e) = self.places.update(bytemuck::bytes_of(key), &index, MapFlags::ANY) {
                self.leave(added.into_iter())?;
                let is_full = self.places.keys().count() >= intf::PREFIXES_MAX as usize;
                return Err(if is_full { LimitError::NoPrefixes } else { map_error("places")(e) });
            }
            added.push(key);
        }
        Ok(())
    }

    /// Forgets prefixes, where they are its own.
    pub(super) fn leave<'a>(
        &self,
        keys: impl Iterator<Item = &'a PlaceKey>,
    ) -> Result<(), LimitError> {
        let mut gone = BTreeSet::new();
        for key in keys {
            if holder(&self.places, key)? == Some(self.index) {
                self.places.delete(bytemuck::bytes_of(key)).map_err(map_error("places"))?;
                gone.insert(key.what);
            }
        }
        // A length that no prefix has any more is not looked for; mostly another one has it.
        if !gone.is_empty() {
            for key in self.places.keys() {
                gone.remove(&key_of(&key).what);
                if gone.is_empty() {
                    break;
                }
            }
        }
        if gone.is_empty() {
            return Ok(());
        }
        let mut lists = self.lists()?;
        for what in gone {
            let key = PlaceKey { what, ..PlaceKey::default() };
            remove_length(&mut lists[list_of(&key)], bits_of(&key));
        }
        self.swap_lists(&lists)
    }

    /// Forgets prefixes that the limit does not have, or not any more.
    pub(crate) fn forget_others(&self, limit: &intf::Limit) -> Result<(), LimitError> {
        let own = keys(limit, &self.matched);
        let all = self.places.keys().map(|key| key_of(&key));
        let others: Vec<_> = all.filter(|key| !own.contains(key)).collect();
        self.leave(others.iter())
    }

    /// Whether all packets of the limit find it.
    pub(crate) fn is_entered(&self, limit: &intf::Limit) -> bool {
        let Ok(lists) = self.lists() else { return false };
        keys(limit, &self.matched).iter().all(|key| {
            let list = &lists[list_of(key)];
            let listed = list.length.iter().take(list.count as usize);
            listed.clone().any(|length| length.bits == bits_of(key))
                && matches!(holder(&self.places, key), Ok(Some(index)) if index == self.index)
        })
    }

    fn lists(&self) -> Result<[Lengths; LISTS], LimitError> {
        let mut lists = [Lengths::default(); LISTS];
        if let Some(map) =
            inner(&self.lengths, &0u32.to_ne_bytes()).map_err(map_error("lengths"))?
        {
            for (i, list) in lists.iter_mut().enumerate() {
                *list = lookup(&map, "lengths", i as u32)?;
            }
        }
        Ok(lists)
    }

    /// Packets see the old ones or the new.
    fn swap_lists(&self, lists: &[Lengths; LISTS]) -> Result<(), LimitError> {
        let done = || {
            let map = create_map(MapType::Array, "chunk", size_of::<Lengths>(), LISTS as u32)?;
            for (i, list) in lists.iter().enumerate() {
                let key = (i as u32).to_ne_bytes();
                map.update(&key, bytemuck::bytes_of(list), MapFlags::ANY)?;
            }
            put_inner(&self.lengths, &0u32.to_ne_bytes(), &map)
        };
        done().map_err(map_error("lengths"))
    }
}

pub(super) fn key(direction: Direction, prefix: Prefix) -> PlaceKey {
    let what = (intf::index(direction) as u32) << 16 | u32::from(prefix.is_v4()) << 8;
    PlaceKey { address: bytemuck::cast(prefix.address), what: what | u32::from(prefix.bits) }
}

/// What packets of a limit are known by, in the directions that it limits.
pub(super) fn keys(limit: &intf::Limit, matched: &Prefixes) -> BTreeSet<PlaceKey> {
    let directions = Direction::BOTH.into_iter();
    let limited = directions.filter(|direction| limit.rate(*direction).is_some());
    limited
        .flat_map(|direction| matched.as_slice().iter().map(move |prefix| key(direction, *prefix)))
        .collect()
}

fn key_of(bytes: &[u8]) -> PlaceKey {
    bytemuck::try_pod_read_unaligned(bytes).unwrap_or_default()
}

fn bits_of(key: &PlaceKey) -> u32 {
    key.what & 0xff
}

fn list_of(key: &PlaceKey) -> usize {
    let (direction, family) = (key.what >> 16, key.what >> 8 & 0xff);
    (direction as usize * FAMILIES + family as usize).min(LISTS - 1)
}

/// Whether it was not there.
fn add_length(list: &mut Lengths, key: &PlaceKey) -> Result<bool, LimitError> {
    let (bits, count) = (bits_of(key), (list.count as usize).min(LENGTHS_MAX));
    let place = list.length[..count].partition_point(|length| length.bits > bits);
    if list.length[..count].get(place).is_some_and(|length| length.bits == bits) {
        return Ok(false);
    }
    if count == LENGTHS_MAX {
        return Err(LimitError::NoLengths);
    }
    let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0).to_be_bytes();
    list.length[place..=count].rotate_right(1);
    list.length[place] = Length { mask: bytemuck::cast(mask), bits };
    list.count += 1;
    Ok(true)
}

fn remove_length(list: &mut Lengths, bits: u32) {
    let count = (list.count as usize).min(LENGTHS_MAX);
    if let Some(place) = list.length[..count].iter().position(|length| length.bits == bits) {
        list.length[place..count].rotate_left(1);
        list.length[count - 1] = Length::default();
        list.count -= 1;
    }
}

/// The index of the limit that has a prefix.
pub(super) fn holder(places: &MapHandle, key: &PlaceKey) -> Result<Option<u32>, LimitError> {
    let index =
        places.lookup(bytemuck::bytes_of(key), MapFlags::ANY).map_err(map_error("places"))?;
    Ok(index.and_then(|index| Some(u32::from_ne_bytes(index.as_slice().try_into().ok()?))))
}

/// A map in a map; user space sees its number.
pub(super) fn inner(outer: &MapHandle, key: &[u8]) -> Result<Option<MapHandle>, libbpf_rs::Error> {
    let id = outer.lookup(key, MapFlags::ANY)?;
    let id = id.and_then(|id| Some(u32::from_ne_bytes(id.as_slice().try_into().ok()?)));
    id.map(MapHandle::from_map_id).transpose()
}

pub(super) fn put_inner(
    outer: &MapHandle,
    key: &[u8],
    map: &MapHandle,
) -> Result<(), libbpf_rs::Error> {
    outer.update(key, &map.as_fd().as_raw_fd().to_ne_bytes(), MapFlags::ANY)
}
