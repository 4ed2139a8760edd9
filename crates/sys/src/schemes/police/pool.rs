//! The pool of a device: one program a direction, and the maps, for all its limits with prefixes (see
//! `bpf/police/match.h`). A limit has a [`Place`] in it.

use std::{mem::MaybeUninit, path::Path};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, OpenMapMut, OpenObject};
use tidegate_core::{
    Direction,
    prefixes::{Prefix, Prefixes},
};

use super::{
    Policer,
    place::{Place, holder, inner, key, keys, put_inner},
};
use crate::{
    bpf::{self, create_map, load_error, load_skel, map_error, open_map, open_skel, reuse},
    device::{self, Hooked, Target},
    intf::{self, CHUNK},
    limit::{LimitError, LimitMaps, settings::Settings},
    query::Side,
    schemes::{LINKS, Successor, successors},
    skel,
};

/// The names under which the maps are pinned.
const PINS: [&str; 6] = ["places", "lengths", "limits", "queues", "counters", "exempts"];

/// The maps of a device whose limits have prefixes.
#[derive(Debug)]
pub(crate) struct MapPool {
    /// In the order of [`PINS`].
    maps: [MapHandle; PINS.len()],
}

impl MapPool {
    fn map(&self, name: &'static str) -> Result<&MapHandle, LimitError> {
        let at = PINS.iter().position(|pin| *pin == name);
        at.and_then(|at| self.maps.get(at)).ok_or(LimitError::Layout(name))
    }

    /// Loads the programs and puts them on a device; with the maps of `earlier`, whose programs are gone.
    pub(crate) fn attach(
        target: &Target,
        earlier: Option<&MapPool>,
    ) -> Result<(MapPool, Hooked), LimitError> {
        let mut storage = MaybeUninit::uninit();
        let pool = load(&mut storage, target.is_port(), earlier)?;
        let program = |direction| match target.side(direction) {
            Side::Out => (direction, &pool.progs.match_out),
            Side::In => (direction, &pool.progs.match_in),
        };
        let programs = Direction::BOTH.map(program);
        let hooked = device::attach_matched(target, &programs)?;
        Ok((maps_of(&pool)?, hooked))
    }

    /// Loads the programs of the pool pinned in a directory once more, with the maps that it has.
    pub(crate) fn reload(dir: &Path, is_port: bool) -> Result<Vec<Successor>, LimitError> {
        let mut storage = MaybeUninit::uninit();
        let pool = load(&mut storage, is_port, Some(&Self::open(dir)?))?;
        let program = |direction| match Side::of(direction, is_port) {
            Side::Out => &pool.progs.match_out,
            Side::In => &pool.progs.match_in,
        };
        let programs = Direction::BOTH.map(program);
        successors(dir, &[(LINKS[0], programs[0]), (LINKS[1], programs[1])])
    }

    /// Opens the one pinned in a directory.
    pub(crate) fn open(dir: &Path) -> Result<MapPool, LimitError> {
        let open = |name| open_map(dir, name);
        let [a, b, c, d, e, f] = PINS;
        Ok(MapPool { maps: [open(a)?, open(b)?, open(c)?, open(d)?, open(e)?, open(f)?] })
    }

    /// The maps to pin, with their names.
    pub(crate) fn pins(&mut self) -> impl Iterator<Item = (&'static str, &mut MapHandle)> {
        PINS.into_iter().zip(&mut self.maps)
    }

    /// The limit that has one of some prefixes in any direction, but for `own`.
    pub(crate) fn taken(
        &self,
        matched: &Prefixes,
        own: Option<u32>,
    ) -> Result<Option<(u32, Prefix)>, LimitError> {
        let places = self.map("places")?;
        for prefix in matched.as_slice().iter().copied() {
            for direction in Direction::BOTH {
                let there = holder(places, &key(direction, prefix))?;
                if let Some(index) = there.filter(|index| Some(*index) != own) {
                    return Ok(Some((index, prefix)));
                }
            }
        }
        Ok(None)
    }

    /// The maps of the limit at an index, new ones as needed.
    pub(crate) fn take(&self, index: u32, matched: &Prefixes) -> Result<LimitMaps, LimitError> {
        let chunk = |name, kind, value_bytes: usize, entries| -> Result<MapHandle, LimitError> {
            let outer = self.map(name)?;
            let chunk = (index / CHUNK).to_ne_bytes();
            if let Some(map) = inner(outer, &chunk).map_err(map_error(name))? {
                return Ok(map);
            }
            let map = create_map(kind, "chunk", value_bytes, CHUNK * entries as u32)
                .map_err(map_error(name))?;
            put_inner(outer, &chunk, &map).map_err(map_error(name))?;
            Ok(map)
        };
        let counters = size_of::<intf::PoliceCounters>();
        let meters = size_of::<intf::Meter>();
        let own = Policer {
            meters: chunk("queues", MapType::Array, meters, intf::DIRECTIONS)?,
            group: None,
            place: Some(self.place(index, matched)?),
        };
        let maps = LimitMaps {
            at: index % CHUNK,
            ..LimitMaps::new(
                chunk("limits", MapType::Array, size_of::<intf::Entry>(), intf::LIMITS)?,
                chunk("counters", MapType::PercpuArray, counters, intf::DIRECTIONS)?,
                own,
            )
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

    /// A place that is taken, by a limit of some prefixes.
    pub(crate) fn place(&self, index: u32, matched: &Prefixes) -> Result<Place, LimitError> {
        let again = |name| MapHandle::try_from(self.map(name)?).map_err(map_error(name));
        let [places, lengths, exempts] = ["places", "lengths", "exempts"].map(again);
        Ok(Place {
            index,
            matched: *matched,
            places: places?,
            lengths: lengths?,
            exempts: exempts?,
        })
    }
}

pub(super) fn load<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    is_port: bool,
    earlier: Option<&MapPool>,
) -> Result<skel::police_match::PoliceMatchSkel<'a>, LimitError> {
    const PROGRAM: &str = "police_match";
    let mut open = open_skel::<skel::police_match::PoliceMatchSkelBuilder>(storage, PROGRAM)?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.is_port = u8::from(is_port);
    }
    if let Some(MapPool { maps: [places, lengths, limits, queues, counters, exempts] }) = earlier {
        let with: [(&mut OpenMapMut<'_>, _); PINS.len()] = [
            (&mut open.maps.places_of_device, places),
            (&mut open.maps.lengths_of_device, lengths),
            (&mut open.maps.limits_of_device, limits),
            (&mut open.maps.meters_of_device, queues),
            (&mut open.maps.counters_of_device, counters),
            (&mut open.maps.exempts_of_device, exempts),
        ];
        for (map, with) in with {
            reuse(map, with)?;
        }
    }
    load_skel(open, PROGRAM)
}

pub(super) fn maps_of(
    pool: &skel::police_match::PoliceMatchSkel<'_>,
) -> Result<MapPool, LimitError> {
    let handle =
        |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("police_match"));
    Ok(MapPool {
        maps: [
            handle(&pool.maps.places_of_device)?,
            handle(&pool.maps.lengths_of_device)?,
            handle(&pool.maps.limits_of_device)?,
            handle(&pool.maps.meters_of_device)?,
            handle(&pool.maps.counters_of_device)?,
            handle(&pool.maps.exempts_of_device)?,
        ],
    })
}

/// Takes the limit off: packets find it no more, and its place is as new.
pub(crate) fn vacate(place: &Place, maps: &LimitMaps) -> Result<(), LimitError> {
    let limit = Settings::read(&maps.limit, place.in_chunk())?.limit;
    place.leave(keys(&limit, &place.matched).iter())?;
    place.write(&maps.limit, &intf::Entry::default().into(), &Prefixes::default())?;
    clear(maps)
}

/// A place as new.
fn clear(maps: &LimitMaps) -> Result<(), LimitError> {
    let own = |entries: usize| maps.at * entries as u32..(maps.at + 1) * entries as u32;
    bpf::clear::<intf::Entry>(&maps.limit, "limit", own(intf::LIMITS))?;
    bpf::clear::<intf::Meter>(&maps.own_as::<Policer>()?.meters, "queues", own(intf::DIRECTIONS))?;
    bpf::clear::<intf::PoliceCounters>(&maps.counters, "counters", own(intf::DIRECTIONS))
}
