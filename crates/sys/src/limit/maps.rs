//! The maps of a limit: reads them, changes them, takes sockets that exist into the limit or out of it.

use std::{io, mem::MaybeUninit, net::SocketAddr, os::fd::OwnedFd};

use libbpf_rs::{Iter, Link, MapCore, MapFlags, MapHandle, OpenObject};
use tidegate_core::{Direction, Rate, fair_share::TARGET, prefixes::Prefixes, virtual_queue};

use super::{
    Carried, Colours, Handle, LimitError, LimitOptions, ParentMaps, Reading, set_parent,
    settings::Settings, slot_pool::SlotPool,
};
use crate::{
    bpf::{load_error, load_skel, lookup, map_error, open_skel, read, reuse},
    cgroup::{Cgroup, Hierarchy},
    clock::{asleep_ns, boottime},
    exempt::{self, set_exempt},
    group::GroupMaps,
    intf,
    process::{in_network_namespace, network_namespaces},
    schemes::police::Place,
    skel,
    waiting::Waiting,
};

/// The maps of a limit.
#[derive(Debug)]
pub struct LimitMaps {
    pub(crate) limit: MapHandle,
    pub(crate) queues: MapHandle,
    pub(crate) counters: MapHandle,
    /// Of schemes that set something on sockets.
    pub(crate) sockets: Option<MapHandle>,
    /// Of limits that exempt somebody.
    pub(crate) exempt: Option<MapHandle>,
    /// Those of its parent that a child works with.
    pub(crate) parent: Option<ParentMaps>,
    /// By which it acts for a group, where the scheme can.
    pub(crate) group: Option<GroupMaps>,
    /// What it has in the kernel beside its maps, where its scheme has something.
    pub(crate) handle: Option<Box<dyn Handle>>,
    /// Of a limit that shares maps with others: its number in them.
    pub(crate) at: u32,
    /// Of one with prefixes: its place among them.
    pub(crate) place: Option<Place>,
    /// Of one on a cgroup: its pool.
    pub(crate) pool: Option<SlotPool>,
    /// What the programs of an earlier version have counted.
    pub(crate) carried: Carried,
}

impl LimitMaps {
    /// The maps that every limit has; whoever loads programs adds what they have besides.
    pub(crate) fn new(limit: MapHandle, queues: MapHandle, counters: MapHandle) -> LimitMaps {
        LimitMaps {
            limit,
            queues,
            counters,
            sockets: None,
            exempt: None,
            parent: None,
            group: None,
            handle: None,
            at: 0,
            place: None,
            pool: None,
            carried: Carried::default(),
        }
    }

    /// What its children work with; `None` if its scheme leaves sockets alone: it has no children.
    pub(crate) fn as_parent(&self) -> Result<Option<ParentMaps>, LimitError> {
        let Some(sockets) = &self.sockets else { return Ok(None) };
        ParentMaps::with(&self.queues, sockets, self.at).map(Some)
    }

    /// The limit as it is in force.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn limit(&self) -> Result<intf::Entry, LimitError> {
        self.limit_at(boottime())
    }

    /// The options of a limit that nobody has pinned, read back from its maps: those in force, as a user
    /// would write them.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn options(&self) -> Result<LimitOptions, LimitError> {
        let mut options = LimitOptions::from(&self.limit()?);
        if let Some(trie) = &self.exempt {
            options.exempt.prefixes = exempt::read(trie, 0);
        }
        Ok(options)
    }

    /// Puts another limit in force, for packets from now on and for the sockets that exist in its cgroups.
    /// The backlog stays what it is in bytes, as far as the new thresholds go. A rate that a group has lent
    /// still ends when it did.
    ///
    /// # Errors
    /// [`LimitError`]; the earlier limit is in force.
    pub fn set<'a>(
        &self,
        hierarchy: &Hierarchy,
        cgroups: impl IntoIterator<Item = &'a Cgroup>,
        limit: &intf::Entry,
        options: &LimitOptions,
    ) -> Result<(), LimitError> {
        let (earlier, now) = (self.settings()?, boottime());
        let settings = self.keep_leases(limit.carried_on(&self.limit_at(now)?, now), options)?;
        if let Some(place) = &self.place {
            return place.change(&self.limit, &settings, options);
        }
        let exempted = self.exempt.as_ref().map(|trie| exempt::read(trie, 0));
        self.write(settings)?;
        self.exempt(&options.exempt.prefixes)?;
        let done = self.change_beside(&settings.limit);
        let mut cgroups = cgroups.into_iter();
        let done = done.and_then(|()| {
            cgroups.try_for_each(|cgroup| self.adopt(hierarchy, cgroup, Adopt::Take))
        });
        if done.is_err() {
            self.write(earlier)?;
            self.exempt(&exempted.unwrap_or_default())?;
        }
        done
    }

    /// Exempts prefixes, and no others.
    pub(crate) fn exempt(&self, prefixes: &Prefixes) -> Result<(), LimitError> {
        self.exempt.as_ref().map_or(Ok(()), |trie| exempt::fill(trie, prefixes, 0))
    }

    /// Puts settings in force beside the maps.
    pub(crate) fn change_beside(&self, limit: &intf::Limit) -> Result<(), LimitError> {
        self.handle.as_ref().map_or(Ok(()), |handle| handle.change(limit))
    }

    /// Gives the queues of a limit that is not attached yet what it may use of `parent` now, so that its
    /// first epoch is not at its ceiling, which may be none.
    pub(crate) fn start_in(
        &self,
        parent: &LimitMaps,
        options: &LimitOptions,
    ) -> Result<(), LimitError> {
        let (Some(class), theirs) = (options.class, parent.limit()?) else { return Ok(()) };
        for direction in Direction::BOTH {
            let (queue, rate) = (options.queue(direction), theirs.rate(direction));
            let (Some(queue), Some(rate)) = (queue, rate) else { continue };
            let index = intf::index(direction);
            let above: intf::Queue = lookup(&parent.queues, "queues", parent.queue_key(index))?;
            let rate =
                Rate::from_bit_s(above.rate_bit_s).filter(|_| above.cost_now != 0).unwrap_or(rate);
            let share = if above.share == 0 { TARGET } else { above.share.into() };
            let rate = class.rate(queue.rate, rate, share);
            let ours = intf::Queue {
                cost_now: virtual_queue::cost_of_byte(rate),
                rate_bit_s: rate.bit_s(),
                ..intf::Queue::default()
            };
            self.queues
                .update(
                    &self.queue_key(index).to_ne_bytes(),
                    bytemuck::bytes_of(&ours),
                    MapFlags::ANY,
                )
                .map_err(map_error("queues"))?;
        }
        Ok(())
    }

    /// Puts settings in force. Those of a policer must not be older than those that are
    /// ([`intf::Entry::carried_on`]): packets would take them for what a late one has, and be dropped.
    pub(crate) fn write(&self, settings: impl Into<Settings>) -> Result<(), LimitError> {
        settings.into().write(&self.limit, self.at)
    }

    /// Whose packets wait in the queue of a direction at this moment; `None` where there is none, or nobody
    /// can tell.
    ///
    /// # Errors
    /// [`LimitError`] when the kernel refuses to look.
    pub fn waiting(&self, direction: Direction) -> Result<Option<Waiting>, LimitError> {
        self.handle.as_ref().map_or(Ok(None), |handle| handle.waiting(direction))
    }

    /// With `dem` and `spring` the connections of a direction that are wanted, who sends first.
    pub fn connections(
        &self,
        direction: Direction,
        wanted: impl Fn(SocketAddr, SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, SocketAddr)> {
        self.handle.as_ref().map_or_else(Vec::new, |handle| handle.connections(direction, &wanted))
    }

    /// Queue and counters of a direction.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn read(&self, direction: Direction) -> Result<Reading, LimitError> {
        let mut reading = self.read_now(direction)?;
        self.carried.add_to(intf::index(direction), &mut reading);
        Ok(reading)
    }

    /// Where the queue of a direction is in its map.
    fn queue_key(&self, index: usize) -> u32 {
        let is_meter = self.queues.value_size() as usize == size_of::<intf::Meter>();
        let queues = if is_meter { intf::DIRECTIONS } else { intf::QUEUES };
        self.at * queues as u32 + index as u32
    }

    /// What its present programs have counted.
    fn read_now(&self, direction: Direction) -> Result<Reading, LimitError> {
        if let Some(handle) = &self.handle {
            return handle.read(direction);
        }
        let index = intf::index(direction);
        let key = self.at * intf::DIRECTIONS as u32 + index as u32;
        let cpus = self.counters.lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY);
        let mut counters = intf::Counters::default();
        let mut colours: Option<Colours> = None;
        for cpu in cpus.map_err(map_error("counters"))?.unwrap_or_default() {
            counters.add(&read(&cpu, "counters")?);
            // Those of a policer are longer.
            if let Ok(one) = read(&cpu, "counters") {
                colours.get_or_insert_default().add(&one);
            }
        }
        let queue = if colours.is_some() {
            let meter: intf::Meter = lookup(&self.queues, "queues", self.queue_key(index))?;
            let intf::Side { full_ns, skipped_ns, .. } = *meter.side();
            // A policer's clock runs on while the host sleeps.
            let asleep_ns = asleep_ns();
            let finish_ns = full_ns.saturating_sub(asleep_ns);
            counters.last_ns = counters.last_ns.map(|at| at.saturating_sub(asleep_ns));
            intf::Queue { finish_ns, skipped_ns, ..intf::Queue::default() }
        } else {
            lookup(&self.queues, "queues", self.queue_key(index))?
        };
        Ok(Reading { queue, counters, colours, flow_count: None })
    }

    /// Takes the TCP sockets in the cgroup into the limit, or gives them back: in every network
    /// namespace in which a process of the cgroup lives.
    pub(crate) fn adopt(
        &self,
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        adopt: Adopt,
    ) -> Result<(), LimitError> {
        let Some(sockets) = &self.sockets else { return Ok(()) };
        let namespaces = network_namespaces(hierarchy, cgroup);
        if namespaces.is_empty() {
            return Ok(());
        }
        let what = intf::Adoption {
            cgroup_id: cgroup.id(),
            level: cgroup.level(),
            slot: self.pool.as_ref().map_or(0, |_| self.at),
            release: u32::from(adopt == Adopt::Release),
            pad: 0,
        };
        if let Some(pool) = &self.pool {
            let (adoption, link) = pool.adopter()?;
            return go_through(&adoption, &link, &what, &namespaces);
        }
        let mut storage = MaybeUninit::uninit();
        let object = self.load_adopt(&mut storage, sockets, None)?;
        let link = object.progs.adopt.attach().map_err(load_error("adopt"))?;
        let adoption = MapHandle::try_from(&object.maps.adoption).map_err(load_error("adopt"))?;
        go_through(&adoption, &link, &what, &namespaces)
    }

    /// Loads the iterator over sockets, for the limits of these maps.
    pub(crate) fn load_adopt<'a>(
        &self,
        storage: &'a mut MaybeUninit<OpenObject>,
        sockets: &MapHandle,
        adoption: Option<&MapHandle>,
    ) -> Result<skel::adopt::AdoptSkel<'a>, LimitError> {
        let mut open = open_skel::<skel::adopt::AdoptSkelBuilder>(storage, "adopt")?;
        reuse(&mut open.maps.limit, &self.limit)?;
        reuse(&mut open.maps.queues_of_limit, &self.queues)?;
        reuse(&mut open.maps.sockets_of_limit, sockets)?;
        set_parent!(open, self.parent.as_ref(), "adopt");
        set_exempt!(open, self.exempt.is_some(), self.exempt.as_ref(), "adopt");
        if let Some(adoption) = adoption {
            reuse(&mut open.maps.adoption, adoption)?;
        }
        load_skel(open, "adopt")
    }

    /// A cgroup has left the limit, and its links are gone. The kernel keeps the slot of a cgroup.
    pub(crate) fn leave(&self, cgroup_id: u64) {
        if let Some(pool) = &self.pool {
            pool.leave(cgroup_id, self.at);
        }
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

/// What happens to the sockets that exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adopt {
    /// They get what the limit sets on new ones.
    Take,
    /// They lose what the limit had set on them.
    Release,
}
