//! The meters, the group and the prefixes of a policer.

use std::path::Path;

use libbpf_rs::MapHandle;
use tidegate_core::Direction;

use super::Place;
use crate::{
    bpf::{lookup, open_array, open_map},
    clock::asleep_ns,
    group::GroupMaps,
    intf,
    limit::{Colours, Handle, LimitError, LimitMaps, Reading},
};

/// The pins of the maps by which it acts for a group.
const GROUP: &str = "group";
const SAMPLES: &str = "samples";

/// The meters, and what only some limits have.
#[derive(Debug)]
pub(crate) struct Policer {
    pub(crate) meters: MapHandle,
    /// By which it acts for a group. Limits with prefixes do not.
    pub(crate) group: Option<GroupMaps>,
    /// Of one with prefixes: its place among them.
    pub(crate) place: Option<Place>,
}

impl Policer {
    /// Opens that of a limit that is pinned in a directory.
    pub(super) fn open(dir: &Path, place: Option<Place>) -> Result<Policer, LimitError> {
        let group = || {
            let (group, samples) = (open_map(dir, GROUP)?, open_map(dir, SAMPLES)?);
            Ok::<_, LimitError>(GroupMaps { group, samples, dir: Some(dir.to_owned()) })
        };
        Ok(Policer {
            meters: open_array::<intf::Meter>(dir, "queues")?,
            group: dir.join(GROUP).exists().then(group).transpose()?,
            place,
        })
    }
}

impl Handle for Policer {
    fn read(&self, maps: &LimitMaps, direction: Direction) -> Result<Reading, LimitError> {
        let mut counters = intf::Counters::default();
        let mut colours = Colours::default();
        for cpu in maps.counted::<intf::PoliceCounters>(direction)? {
            counters.add(&cpu.common);
            colours.add(&cpu);
        }
        let key = (maps.at as usize * intf::DIRECTIONS + intf::index(direction)) as u32;
        let meter: intf::Meter = lookup(&self.meters, "queues", key)?;
        // A policer's clock runs on while the host sleeps.
        let asleep_ns = asleep_ns();
        counters.last_ns = counters.last_ns.map(|at| at.saturating_sub(asleep_ns));
        Ok(Reading {
            finish_ns: meter.side().full_ns.saturating_sub(asleep_ns),
            counters,
            colours: Some(colours),
            ..Reading::default()
        })
    }

    fn maps(&mut self) -> Vec<(&'static str, &mut MapHandle)> {
        let group = self.group.iter_mut();
        let group = group.flat_map(|of| [(GROUP, &mut of.group), (SAMPLES, &mut of.samples)]);
        std::iter::once(("queues", &mut self.meters)).chain(group).collect()
    }

    fn place(&self) -> Option<&Place> {
        self.place.as_ref()
    }

    fn group(&self) -> Option<&GroupMaps> {
        self.group.as_ref()
    }
}
