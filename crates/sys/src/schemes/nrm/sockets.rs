//! The queues of a limit of schemes `pace` and `nrm`, and the sockets on which it has set something.

use std::{io, mem::MaybeUninit, os::fd::OwnedFd};

use libbpf_rs::{Iter, Link, MapCore, MapFlags, MapHandle, OpenObject};
use tidegate_core::{Direction, Rate, fair_share::TARGET, virtual_queue};

use crate::{
    bpf::{load_error, load_skel, lookup, map_error, open_array, open_map, open_skel, reuse},
    cgroup::{Cgroup, Hierarchy},
    exempt::set_exempt,
    intf,
    limit::{
        Adopt, FairShare, Handle, LimitError, LimitMaps, LimitOptions, ParentMaps, Part, Reading,
        set_parent, slot_pool::SlotPool,
    },
    process::{in_network_namespace, network_namespaces},
    schemes::Pinned,
    skel,
};

/// The queues alone, for reading.
#[derive(Debug)]
pub(crate) struct Queues(pub(super) MapHandle);

impl Queues {
    /// A queue of the limit with a number in the map.
    pub(crate) fn get(&self, at: u32, index: usize) -> Result<intf::NrmQueue, LimitError> {
        lookup(&self.0, "queues", queue_key(at, index))
    }

    pub(super) fn set(
        &self,
        at: u32,
        index: usize,
        queue: &intf::NrmQueue,
    ) -> Result<(), LimitError> {
        self.0
            .update(&queue_key(at, index).to_ne_bytes(), bytemuck::bytes_of(queue), MapFlags::ANY)
            .map_err(map_error("queues"))
    }
}

/// The queues, and the sockets.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(super) queues: Queues,
    pub(super) sockets: MapHandle,
    /// The maps of the parent, for a child.
    pub(super) parent: Option<ParentMaps>,
    /// Where it shares maps with others.
    pub(super) pool: Option<SlotPool>,
}

impl Sockets {
    /// Opens those of a pinned limit.
    pub(super) fn open(pinned: &Pinned<'_>) -> Result<Sockets, LimitError> {
        Ok(Sockets {
            queues: Queues(open_array::<intf::NrmQueue>(pinned.dir, "queues")?),
            sockets: open_map(pinned.dir, "sockets")?,
            parent: ParentMaps::open(pinned.dir)?,
            pool: pinned.pool.map(|(pool, _)| SlotPool::open(pool)).transpose()?,
        })
    }

    /// Loads the iterator over sockets, for the limits of these maps.
    pub(super) fn load_adopt<'a>(
        &self,
        maps: &LimitMaps,
        storage: &'a mut MaybeUninit<OpenObject>,
        adoption: Option<&MapHandle>,
    ) -> Result<skel::adopt::AdoptSkel<'a>, LimitError> {
        let mut open = open_skel::<skel::adopt::AdoptSkelBuilder>(storage, "adopt")?;
        reuse(&mut open.maps.limit, &maps.limit)?;
        reuse(&mut open.maps.queues_of_limit, &self.queues.0)?;
        reuse(&mut open.maps.sockets_of_limit, &self.sockets)?;
        set_parent!(open, self.parent.as_ref(), "adopt");
        set_exempt!(open, maps.exempt.is_some(), maps.exempt.as_ref(), "adopt");
        if let Some(adoption) = adoption {
            reuse(&mut open.maps.adoption, adoption)?;
        }
        load_skel(open, "adopt")
    }
}

/// Where a queue of a limit is in its map.
fn queue_key(at: u32, index: usize) -> u32 {
    at * intf::QUEUES as u32 + index as u32
}

impl Handle for Queues {
    fn read(&self, maps: &LimitMaps, direction: Direction) -> Result<Reading, LimitError> {
        let queue = self.get(maps.at, intf::index(direction))?;
        let part = Part { cost: queue.cost_now, rate_bit_s: queue.rate_bit_s };
        Ok(Reading {
            finish_ns: queue.finish_ns,
            part: Some(part).filter(|part| part.cost != 0),
            fair: Some(FairShare {
                children_until_ns: queue.children_until_ns,
                rtt_ns: queue.rtt_ns,
                held: queue.turns.held,
                ..FairShare::from(&queue.common)
            }),
            at_risk: Some(queue.at_risk),
            counters: maps.counters(direction)?,
            ..Reading::default()
        })
    }
}

impl Handle for Sockets {
    fn read(&self, maps: &LimitMaps, direction: Direction) -> Result<Reading, LimitError> {
        self.queues.read(maps, direction)
    }

    fn maps(&mut self) -> Vec<(&'static str, &mut MapHandle)> {
        let own = [("queues", &mut self.queues.0), ("sockets", &mut self.sockets)];
        let above = self.parent.iter_mut().flat_map(ParentMaps::pins);
        own.into_iter().chain(above).collect()
    }

    /// In every network namespace in which a process of the cgroup lives.
    fn adopt(
        &self,
        maps: &LimitMaps,
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        adopt: Adopt,
    ) -> Result<(), LimitError> {
        let namespaces = network_namespaces(hierarchy, cgroup);
        if namespaces.is_empty() {
            return Ok(());
        }
        let what = intf::Adoption {
            cgroup_id: cgroup.id(),
            level: cgroup.level(),
            slot: self.pool.as_ref().map_or(0, |_| maps.at),
            release: u32::from(adopt == Adopt::Release),
            pad: 0,
        };
        if let Some(pool) = &self.pool {
            let (adoption, link) = pool.adopter()?;
            return go_through(&adoption, &link, &what, &namespaces);
        }
        let mut storage = MaybeUninit::uninit();
        let object = self.load_adopt(maps, &mut storage, None)?;
        let link = object.progs.adopt.attach().map_err(load_error("adopt"))?;
        let adoption = MapHandle::try_from(&object.maps.adoption).map_err(load_error("adopt"))?;
        go_through(&adoption, &link, &what, &namespaces)
    }

    fn start_in(
        &self,
        maps: &LimitMaps,
        parent: &LimitMaps,
        options: &LimitOptions,
    ) -> Result<(), LimitError> {
        let (Some(class), theirs) = (options.class, parent.limit()?) else { return Ok(()) };
        for direction in Direction::BOTH {
            let (queue, rate) = (options.queue(direction), theirs.rate(direction));
            let (Some(queue), Some(rate)) = (queue, rate) else { continue };
            let index = intf::index(direction);
            let above = parent.own_as::<Sockets>()?.queues.get(parent.at, index)?;
            let rate =
                Rate::from_bit_s(above.rate_bit_s).filter(|_| above.cost_now != 0).unwrap_or(rate);
            let share = if above.share == 0 { TARGET } else { above.share.into() };
            let rate = class.rate(queue.rate, rate, share);
            let ours = intf::NrmQueue {
                cost_now: virtual_queue::cost_of_byte(rate),
                rate_bit_s: rate.bit_s(),
                ..intf::NrmQueue::default()
            };
            self.queues.set(maps.at, index, &ours)?;
        }
        Ok(())
    }

    fn as_parent(&self, at: u32) -> Result<Option<ParentMaps>, LimitError> {
        ParentMaps::with(&self.queues.0, &self.sockets, at).map(Some)
    }

    fn parent(&self) -> Option<&ParentMaps> {
        self.parent.as_ref()
    }

    fn pool(&self) -> Option<&SlotPool> {
        self.pool.as_ref()
    }
}

/// Has the iterator go through the sockets of network namespaces.
fn go_through(
    adoption: &MapHandle,
    link: &Link,
    what: &intf::Adoption,
    namespaces: &[OwnedFd],
) -> Result<(), LimitError> {
    adoption
        .update(&0u32.to_ne_bytes(), bytemuck::bytes_of(what), MapFlags::ANY)
        .map_err(map_error("adoption"))?;
    for namespace in namespaces {
        in_network_namespace(namespace, || {
            // A socket that ends meanwhile is no loss; neither is a namespace.
            let _ = Iter::new(link).map(|mut iter| io::copy(&mut iter, &mut io::sink()));
        });
    }
    Ok(())
}
