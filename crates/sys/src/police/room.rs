//! The room of a device: one program a direction, and the maps, for all its limits with prefixes (see
//! `bpf/match.h`). A limit has a [`Place`] in it.

use std::{
    collections::BTreeSet,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd},
    path::Path,
};

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapType, OpenMapMut, libbpf_sys,
    skel::{OpenSkel, SkelBuilder},
};
use tidegate_core::{Direction, prefixes::Prefix};

use crate::{
    device::{self, Hooked, Side, Target},
    exempt, intf,
    intf::{CHUNK, CHUNKS, FAMILIES, LENGTHS_MAX, Length, Lengths, PlaceKey},
    limit::{
        self, LimitError, LimitMaps, load_error, lookup, map_error, reuse, settings::Settings,
    },
};

mod skel {
    #![allow(
        missing_docs,
        unused_qualifications,
        clippy::all,
        clippy::undocumented_unsafe_blocks,
        clippy::unwrap_used
    )]
    include!(concat!(env!("OUT_DIR"), "/police_match.skel.rs"));
}

/// Limits that a room holds at most.
pub(crate) const PLACES: u32 = CHUNK * CHUNKS;
/// Lists of lengths: by direction and version of IP.
const LISTS: usize = intf::DIRECTIONS * FAMILIES;
/// The names under which the maps are pinned.
const PINS: [&str; 6] = ["places", "lengths", "limits", "queues", "counters", "exempts"];

/// The maps of a device whose limits have prefixes.
#[derive(Debug)]
pub(crate) struct Room {
    /// In the order of [`PINS`].
    maps: [MapHandle; PINS.len()],
}

impl Room {
    fn map(&self, name: &'static str) -> Result<&MapHandle, LimitError> {
        let at = PINS.iter().position(|pin| *pin == name);
        at.and_then(|at| self.maps.get(at)).ok_or(LimitError::Layout(name))
    }

    /// Loads the programs and puts them on a device; with the maps of `earlier`, whose programs are gone.
    pub(crate) fn attach(
        target: &Target,
        earlier: Option<&Room>,
    ) -> Result<(Room, Hooked), LimitError> {
        let mut storage = MaybeUninit::uninit();
        let room = load(&mut storage, target.is_port(), earlier)?;
        let program = |direction| match target.side(direction) {
            Side::Out => (direction, &room.progs.match_out),
            Side::In => (direction, &room.progs.match_in),
        };
        let programs = [Direction::Egress, Direction::Ingress].map(program);
        let hooked = device::attach_matched(target, &programs)?;
        Ok((maps_of(&room)?, hooked))
    }

    /// Opens the one pinned in a directory.
    pub(crate) fn open(dir: &Path) -> Result<Room, LimitError> {
        let open = |name: &'static str| {
            MapHandle::from_pinned_path(dir.join(name)).map_err(map_error(name))
        };
        let [a, b, c, d, e, f] = PINS;
        Ok(Room { maps: [open(a)?, open(b)?, open(c)?, open(d)?, open(e)?, open(f)?] })
    }

    /// The maps to pin, with their names.
    pub(crate) fn pins(&mut self) -> impl Iterator<Item = (&'static str, &mut MapHandle)> {
        PINS.into_iter().zip(&mut self.maps)
    }

    /// The limit that has one of the prefixes of `limit` in any direction, but for `own`.
    pub(crate) fn taken(
        &self,
        limit: &intf::Limit,
        own: Option<u32>,
    ) -> Result<Option<(u32, Prefix)>, LimitError> {
        let places = self.map("places")?;
        for prefix in prefixes(limit) {
            for direction in [Direction::Egress, Direction::Ingress] {
                let there = holder(places, &key(direction, prefix))?;
                if let Some(index) = there.filter(|index| Some(*index) != own) {
                    return Ok(Some((index, prefix)));
                }
            }
        }
        Ok(None)
    }

    /// The maps of the limit at an index, new ones as needed.
    pub(crate) fn take(&self, index: u32) -> Result<LimitMaps, LimitError> {
        let chunk = |name, kind, value_bytes: usize, entries| -> Result<MapHandle, LimitError> {
            let outer = self.map(name)?;
            let chunk = (index / CHUNK).to_ne_bytes();
            if let Some(map) = inner(outer, &chunk).map_err(map_error(name))? {
                return Ok(map);
            }
            let map = create(kind, value_bytes, CHUNK * entries as u32).map_err(map_error(name))?;
            put_inner(outer, &chunk, &map).map_err(map_error(name))?;
            Ok(map)
        };
        let counters = size_of::<intf::PoliceCounters>();
        let maps = LimitMaps {
            limit: chunk("limits", MapType::Array, size_of::<intf::Limit>(), intf::LIMITS)?,
            queues: chunk("queues", MapType::Array, size_of::<intf::Queue>(), intf::QUEUES)?,
            counters: chunk("counters", MapType::PercpuArray, counters, intf::DIRECTIONS)?,
            sockets: None,
            exempt: None,
            parent: None,
            group: None,
            seat: None,
            at: index % CHUNK,
            place: Some(self.place(index)?),
        };
        clear(&maps)?;
        Ok(maps)
    }

    /// Has no packet find the limit in a place, whose maps cannot be read.
    pub(crate) fn forget(&self, index: u32) -> Result<(), LimitError> {
        let places = self.map("places")?;
        for key in places.keys().collect::<Vec<_>>() {
            let value = places.lookup(&key, MapFlags::ANY).map_err(map_error("places"))?;
            if value.is_some_and(|value| value == index.to_ne_bytes()) {
                places.delete(&key).map_err(map_error("places"))?;
            }
        }
        Ok(())
    }

    /// A place that is taken.
    pub(crate) fn place(&self, index: u32) -> Result<Place, LimitError> {
        let again = |name| MapHandle::try_from(self.map(name)?).map_err(map_error(name));
        let [places, lengths, exempts] = ["places", "lengths", "exempts"].map(again);
        Ok(Place { index, places: places?, lengths: lengths?, exempts: exempts? })
    }
}

pub(super) fn load<'a>(
    storage: &'a mut MaybeUninit<libbpf_rs::OpenObject>,
    is_port: bool,
    earlier: Option<&Room>,
) -> Result<skel::PoliceMatchSkel<'a>, LimitError> {
    const PROGRAM: &str = "police_match";
    limit::quiet_libbpf();
    let mut open =
        skel::PoliceMatchSkelBuilder::default().open(storage).map_err(load_error(PROGRAM))?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.is_port = u8::from(is_port);
    }
    if let Some(Room { maps: [places, lengths, limits, queues, counters, exempts] }) = earlier {
        let with: [(&mut OpenMapMut<'_>, _); PINS.len()] = [
            (&mut open.maps.places_of_device, places),
            (&mut open.maps.lengths_of_device, lengths),
            (&mut open.maps.limits_of_device, limits),
            (&mut open.maps.queues_of_device, queues),
            (&mut open.maps.counters_of_device, counters),
            (&mut open.maps.exempts_of_device, exempts),
        ];
        for (map, with) in with {
            reuse(map, with)?;
        }
    }
    open.load().map_err(load_error(PROGRAM))
}

pub(super) fn maps_of(room: &skel::PoliceMatchSkel<'_>) -> Result<Room, LimitError> {
    let handle =
        |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("police_match"));
    Ok(Room {
        maps: [
            handle(&room.maps.places_of_device)?,
            handle(&room.maps.lengths_of_device)?,
            handle(&room.maps.limits_of_device)?,
            handle(&room.maps.queues_of_device)?,
            handle(&room.maps.counters_of_device)?,
            handle(&room.maps.exempts_of_device)?,
        ],
    })
}

/// Of a limit in a room: by what its packets are known.
#[derive(Debug)]
pub(crate) struct Place {
    index: u32,
    places: MapHandle,
    lengths: MapHandle,
    exempts: MapHandle,
}

impl Place {
    /// Where it is in the maps that it shares with others.
    fn in_chunk(&self) -> u32 {
        self.index % CHUNK
    }

    /// Puts another limit in force: its prefixes, its settings.
    pub(crate) fn write(&self, map: &MapHandle, settings: &Settings) -> Result<(), LimitError> {
        let limit = &settings.limit;
        let earlier = Settings::read(map, self.in_chunk())?.limit;
        // Packets find it as before. Who sets rates many times a second need not, and with CAP_BPF alone may
        // not, look at the lengths.
        if earlier.matched == limit.matched {
            return self.write_settings(map, settings);
        }
        self.enter(limit)?;
        self.write_settings(map, settings)?;
        let (old, new) = (keys(&earlier), keys(limit));
        self.leave(old.difference(&new))
    }

    /// The settings of a limit, whose packets do not find them yet.
    pub(crate) fn write_settings(
        &self,
        map: &MapHandle,
        settings: &Settings,
    ) -> Result<(), LimitError> {
        let limit = &settings.limit;
        let earlier = Settings::read(map, self.in_chunk())?.limit;
        settings.write(map, self.in_chunk())?;
        // The trie is gone through from end to end, with what is other limits'.
        if earlier.exempt.count == 0 && limit.exempt.count == 0 {
            return Ok(());
        }
        exempt::fill_of(&self.exempts, &limit.exempt, self.index)
    }

    /// Has packets find the limit by its prefixes; on an error they find what they did.
    pub(crate) fn enter(&self, limit: &intf::Limit) -> Result<(), LimitError> {
        let wanted = keys(limit);
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
    fn leave<'a>(&self, keys: impl Iterator<Item = &'a PlaceKey>) -> Result<(), LimitError> {
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

    /// Forgets prefixes that the settings of the limit do not name.
    pub(crate) fn forget_others(&self, limit: &intf::Limit) -> Result<(), LimitError> {
        let own = keys(limit);
        let all = self.places.keys().map(|key| key_of(&key));
        let others: Vec<_> = all.filter(|key| !own.contains(key)).collect();
        self.leave(others.iter())
    }

    /// Takes the limit off: packets find it no more, and its place is as new.
    pub(crate) fn vacate(&self, maps: &LimitMaps) -> Result<(), LimitError> {
        let limit = Settings::read(&maps.limit, self.in_chunk())?.limit;
        self.leave(keys(&limit).iter())?;
        self.write_settings(&maps.limit, &intf::Limit::default().into())?;
        clear(maps)
    }

    /// Whether all packets of the limit find it.
    pub(crate) fn is_entered(&self, limit: &intf::Limit) -> bool {
        let Ok(lists) = self.lists() else { return false };
        keys(limit).iter().all(|key| {
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
            let map = create(MapType::Array, size_of::<Lengths>(), LISTS as u32)?;
            for (i, list) in lists.iter().enumerate() {
                let key = (i as u32).to_ne_bytes();
                map.update(&key, bytemuck::bytes_of(list), MapFlags::ANY)?;
            }
            put_inner(&self.lengths, &0u32.to_ne_bytes(), &map)
        };
        done().map_err(map_error("lengths"))
    }
}

/// The prefixes of a limit.
fn prefixes(limit: &intf::Limit) -> impl Iterator<Item = Prefix> {
    let conf = &limit.matched;
    let all = conf.address.iter().zip(conf.bits).take(conf.count as usize);
    all.map(|(address, bits)| Prefix { address: *address, bits })
}

fn key(direction: Direction, prefix: Prefix) -> PlaceKey {
    let what = (intf::index(direction) as u32) << 16 | u32::from(prefix.is_v4()) << 8;
    PlaceKey { address: prefix.address, what: what | u32::from(prefix.bits) }
}

/// What packets of a limit are known by, in the directions that it limits.
fn keys(limit: &intf::Limit) -> BTreeSet<PlaceKey> {
    let directions = [Direction::Egress, Direction::Ingress].into_iter();
    let limited = directions.filter(|direction| limit.rate(*direction).is_some());
    limited
        .flat_map(|direction| prefixes(limit).map(move |prefix| key(direction, prefix)))
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
fn holder(places: &MapHandle, key: &PlaceKey) -> Result<Option<u32>, LimitError> {
    let index =
        places.lookup(bytemuck::bytes_of(key), MapFlags::ANY).map_err(map_error("places"))?;
    Ok(index.and_then(|index| Some(u32::from_ne_bytes(index.as_slice().try_into().ok()?))))
}

/// A place as new.
fn clear(maps: &LimitMaps) -> Result<(), LimitError> {
    let place = maps.at;
    for i in 0..intf::LIMITS as u32 {
        let key = (place * intf::LIMITS as u32 + i).to_ne_bytes();
        let limit = intf::Limit::default();
        maps.limit
            .update(&key, bytemuck::bytes_of(&limit), MapFlags::ANY)
            .map_err(map_error("limit"))?;
    }
    for i in 0..intf::QUEUES as u32 {
        let key = (place * intf::QUEUES as u32 + i).to_ne_bytes();
        let queue = intf::Queue::default();
        maps.queues
            .update(&key, bytemuck::bytes_of(&queue), MapFlags::ANY)
            .map_err(map_error("queues"))?;
    }
    let cpus = libbpf_rs::num_possible_cpus().map_err(map_error("counters"))?;
    let zero = vec![vec![0; size_of::<intf::PoliceCounters>()]; cpus];
    for i in 0..intf::DIRECTIONS as u32 {
        let key = (place * intf::DIRECTIONS as u32 + i).to_ne_bytes();
        maps.counters.update_percpu(&key, &zero, MapFlags::ANY).map_err(map_error("counters"))?;
    }
    Ok(())
}

fn create(kind: MapType, value_bytes: usize, entries: u32) -> Result<MapHandle, libbpf_rs::Error> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let key_bytes = size_of::<u32>() as u32;
    MapHandle::create(kind, Some("chunk"), key_bytes, value_bytes as u32, entries, &options)
}

/// A map in a map; user space sees its number.
fn inner(outer: &MapHandle, key: &[u8]) -> Result<Option<MapHandle>, libbpf_rs::Error> {
    let id = outer.lookup(key, MapFlags::ANY)?;
    let id = id.and_then(|id| Some(u32::from_ne_bytes(id.as_slice().try_into().ok()?)));
    id.map(MapHandle::from_map_id).transpose()
}

fn put_inner(outer: &MapHandle, key: &[u8], map: &MapHandle) -> Result<(), libbpf_rs::Error> {
    outer.update(key, &map.as_fd().as_raw_fd().to_ne_bytes(), MapFlags::ANY)
}
