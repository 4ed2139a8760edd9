//! The maps of a limit: reads them, and changes them.

use std::{any::Any, fmt, net::SocketAddr};

use libbpf_rs::MapHandle;
use tidegate_core::{Direction, prefixes::Prefixes};

use super::{
    Carried, LimitError, LimitOptions, ParentMaps, Reading, settings::Settings, slot_pool::SlotPool,
};
use crate::{
    bpf::lookup_cpus,
    cgroup::{Cgroup, Hierarchy},
    clock::boottime,
    exempt,
    group::GroupMaps,
    intf,
    schemes::police::Place,
    waiting::Waiting,
};

/// The scheme's part of a limit in the kernel, beside settings and counters.
pub(crate) trait Handle: Any + fmt::Debug + Send + Sync {
    /// Queue and counters of a direction, by the maps of the limit. It is called without the store's lock,
    /// from any network namespace. A direction without a limit, or without its device, has nothing. Counters
    /// only grow; bytes are those on the wire.
    ///
    /// # Errors
    /// [`LimitError`].
    fn read(&self, maps: &LimitMaps, direction: Direction) -> Result<Reading, LimitError>;

    /// Its maps, each with the name under which it is pinned in the directory of the limit.
    fn maps(&mut self) -> Vec<(&'static str, &mut MapHandle)> {
        Vec::new()
    }

    /// The parts that it should have and that are not there, by name: the limit is detached then. Asked only
    /// while its cgroup or device is there.
    fn missing(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Puts other settings, which are in the map already, in force. What waits stays. It enters the network
    /// namespace of the device itself. After a kill it is called again with the same settings.
    ///
    /// # Errors
    /// [`LimitError`]; the earlier settings are in force.
    fn change(&self, _limit: &intf::Limit) -> Result<(), LimitError> {
        Ok(())
    }

    /// The flows whose packets wait in the queue of a direction now; `None` where nobody can tell.
    ///
    /// # Errors
    /// [`LimitError`] when the kernel refuses to look.
    fn waiting(&self, _direction: Direction) -> Result<Option<Waiting>, LimitError> {
        Ok(None)
    }

    /// The connections of a direction that are wanted and that it knows, who sends first.
    fn connections(
        &self,
        _direction: Direction,
        _wanted: &dyn Fn(SocketAddr, SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, SocketAddr)> {
        Vec::new()
    }

    /// Takes the TCP sockets in a cgroup into the limit, or gives them back.
    ///
    /// # Errors
    /// [`LimitError`].
    fn adopt(
        &self,
        _maps: &LimitMaps,
        _hierarchy: &Hierarchy,
        _cgroup: &Cgroup,
        _adopt: Adopt,
    ) -> Result<(), LimitError> {
        Ok(())
    }

    /// Gives the queues of a limit that is not attached yet what it may use of `parent` now.
    ///
    /// # Errors
    /// [`LimitError`].
    fn start_in(
        &self,
        _maps: &LimitMaps,
        _parent: &LimitMaps,
        _options: &LimitOptions,
    ) -> Result<(), LimitError> {
        Ok(())
    }

    /// The maps that limits inside of it work with; the limit has this number in them.
    ///
    /// # Errors
    /// [`LimitError::Map`].
    fn as_parent(&self, _at: u32) -> Result<Option<ParentMaps>, LimitError> {
        Ok(None)
    }

    /// The maps of its parent that a child works with.
    fn parent(&self) -> Option<&ParentMaps> {
        None
    }

    /// Of a limit on a cgroup that shares maps with others: their pool.
    fn pool(&self) -> Option<&SlotPool> {
        None
    }

    /// Of one with prefixes: its place among those of its device.
    fn place(&self) -> Option<&Place> {
        None
    }

    /// By which it acts for a group, where the scheme can.
    fn group(&self) -> Option<&GroupMaps> {
        None
    }
}

/// The maps of a limit.
#[derive(Debug)]
pub struct LimitMaps {
    pub(crate) limit: MapHandle,
    pub(crate) counters: MapHandle,
    /// Of limits that exempt somebody.
    pub(crate) exempt: Option<MapHandle>,
    /// Of a limit that shares maps with others: its number in them.
    pub(crate) at: u32,
    /// What the programs of an earlier version have counted.
    pub(crate) carried: Carried,
    /// The scheme's own part.
    pub(crate) own: Box<dyn Handle>,
}

impl LimitMaps {
    /// The maps that every limit has, and the scheme's own part.
    pub(crate) fn new(limit: MapHandle, counters: MapHandle, own: impl Handle) -> LimitMaps {
        LimitMaps {
            limit,
            counters,
            exempt: None,
            at: 0,
            carried: Carried::default(),
            own: Box::new(own),
        }
    }

    /// The scheme's own part, as its type.
    ///
    /// # Errors
    /// [`LimitError::Layout`] if the limit has another scheme.
    pub(crate) fn own_as<T: Handle>(&self) -> Result<&T, LimitError> {
        let own: &dyn Any = &*self.own;
        own.downcast_ref().ok_or(LimitError::Layout("scheme"))
    }

    /// What its children work with; `None` if its scheme leaves sockets alone: it has no children.
    pub(crate) fn as_parent(&self) -> Result<Option<ParentMaps>, LimitError> {
        self.own.as_parent(self.at)
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
        if let Some(place) = self.own.place() {
            return place.change(&self.limit, &settings, options);
        }
        let exempted = self.exempt.as_ref().map(|trie| exempt::read(trie, 0));
        let mut cgroups = cgroups.into_iter();
        let done = self
            .write(settings)
            .and_then(|()| self.exempt(&options.exempt.prefixes))
            .and_then(|()| self.change_beside(&settings.limit))
            .and_then(|()| {
                cgroups.try_for_each(|cgroup| self.adopt(hierarchy, cgroup, Adopt::Take))
            });
        if done.is_err() {
            let _ = self.put_back(&earlier);
            let _ = self.exempt(&exempted.unwrap_or_default());
        }
        done
    }

    /// Exempts prefixes, and no others.
    pub(crate) fn exempt(&self, prefixes: &Prefixes) -> Result<(), LimitError> {
        self.exempt.as_ref().map_or(Ok(()), |trie| exempt::fill(trie, prefixes, 0))
    }

    /// Puts settings in force beside the maps.
    pub(crate) fn change_beside(&self, limit: &intf::Limit) -> Result<(), LimitError> {
        self.own.change(limit)
    }

    /// Gives the queues of a limit that is not attached yet what it may use of `parent` now, so that its
    /// first epoch is not at its ceiling, which may be none.
    pub(crate) fn start_in(
        &self,
        parent: &LimitMaps,
        options: &LimitOptions,
    ) -> Result<(), LimitError> {
        self.own.start_in(self, parent, options)
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
        self.own.waiting(direction)
    }

    /// With `dem` and `spring` the connections of a direction that are wanted, who sends first.
    pub fn connections(
        &self,
        direction: Direction,
        wanted: impl Fn(SocketAddr, SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, SocketAddr)> {
        self.own.connections(direction, &wanted)
    }

    /// Queue and counters of a direction.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn read(&self, direction: Direction) -> Result<Reading, LimitError> {
        let mut reading = self.own.read(self, direction)?;
        self.carried.add_to(intf::index(direction), &mut reading);
        Ok(reading)
    }

    /// Takes the TCP sockets in the cgroup into the limit, or gives them back: in every network
    /// namespace in which a process of the cgroup lives.
    pub(crate) fn adopt(
        &self,
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        adopt: Adopt,
    ) -> Result<(), LimitError> {
        self.own.adopt(self, hierarchy, cgroup, adopt)
    }

    /// The counters of each CPU for a direction, as the scheme has them.
    pub(crate) fn counted<T: bytemuck::Pod>(
        &self,
        direction: Direction,
    ) -> Result<Vec<T>, LimitError> {
        let key = self.at * intf::DIRECTIONS as u32 + intf::index(direction) as u32;
        lookup_cpus(&self.counters, "counters", key)
    }

    /// The counters that all schemes have, summed over CPUs.
    pub(crate) fn counters(&self, direction: Direction) -> Result<intf::Counters, LimitError> {
        let mut sum = intf::Counters::default();
        for cpu in self.counted(direction)? {
            sum.add(&cpu);
        }
        Ok(sum)
    }

    /// A cgroup has left the limit, and its links are gone. The kernel keeps the slot of a cgroup.
    pub(crate) fn leave(&self, cgroup_id: u64) {
        if let Some(pool) = self.own.pool() {
            pool.leave(cgroup_id, self.at);
        }
    }
}

/// What happens to the sockets that exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adopt {
    /// They get what the limit sets on new ones.
    Take,
    /// They lose what the limit had set on them.
    Release,
}
