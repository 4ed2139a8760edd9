//! A limit on a cgroup or device: its eBPF programs, maps and links, from loading to taking off.
//!
//! [`AttachedLimit`] lives as long as the process that holds it (`tidegate run`): when it ends, for
//! any reason, the kernel takes the programs off. [`crate::store`] pins one so that it stays.
//!
//! Three objects share the maps of a limit: `nrm` (both directions of cgroup_skb), `tune` (sock_ops, for
//! new connections) and `adopt` (an iterator, for sockets that exist when the limit comes, changes or goes).

use std::{
    collections::BTreeSet,
    fs, io,
    mem::MaybeUninit,
    net::SocketAddr,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
};

use libbpf_rs::{
    Iter, Link, MapCore, MapFlags, MapHandle, OpenObject,
    skel::{OpenSkel, SkelBuilder},
};
use tidegate_core::{
    Bytes, Class, Nanos, Rate, Scheme, Span, census, class,
    exempt::Exempt,
    fair_share::TARGET,
    police::{Hook, Policy},
    prefixes::Prefixes,
    queue_options::{ConfigError, VirtualQueueOptions},
    virtual_queue::{self, Direction},
};

use crate::{
    cgroup::{Cgroup, Hierarchy},
    device::{Filters, Target},
    edt,
    exempt::{self, set_exempt},
    group::GroupMaps,
    htb, intf,
    police::{self, room::Place},
    query,
    waiting::Waiting,
};

mod error;
mod rate;
pub(crate) mod settings;

pub use error::LimitError;
pub use rate::Lease;

/// The object files of `bpf/`, as libbpf-cargo turned them into Rust.
pub(crate) mod skel {
    #![allow(
        missing_docs,
        unused_qualifications,
        clippy::all,
        clippy::undocumented_unsafe_blocks,
        clippy::unwrap_used
    )]
    pub(crate) mod nrm {
        include!(concat!(env!("OUT_DIR"), "/nrm.skel.rs"));
    }
    pub(crate) mod tune {
        include!(concat!(env!("OUT_DIR"), "/tune.skel.rs"));
    }
    pub(crate) mod adopt {
        include!(concat!(env!("OUT_DIR"), "/adopt.skel.rs"));
    }
}

/// What a limit does; [`LimitOptions::encode`] turns it into what lies in the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitOptions {
    /// From the workload; `None` leaves this direction free.
    pub egress: Option<VirtualQueueOptions>,
    /// To the workload; `None` leaves this direction free.
    pub ingress: Option<VirtualQueueOptions>,
    /// Charge packets on the loopback interface too.
    pub loopback: bool,
    /// How it acts.
    pub scheme: Scheme,
    /// With [`Scheme::Nrm`]: no TCP socket paces faster than the egress limit.
    pub pace_ceiling: bool,
    /// Minimum retransmission time-out of the workload's TCP sockets; zero leaves the kernel's 200 ms.
    pub rto_min: Nanos,
    /// Longest delayed ACK of the workload's TCP sockets; zero leaves the kernel's 200 ms.
    pub delack_max: Nanos,
    /// Its place among the children of its parent; `None`: it has no parent. Its rates are its ceilings.
    pub class: Option<Class>,
    /// With [`Scheme::Police`]: meter and actions.
    pub police: Policy,
    /// Who is not limited.
    pub exempt: Exempt,
    /// With [`Scheme::Police`] on a device: the hosts behind it whose packets it polices; none: everybody's.
    pub matched: Prefixes,
}

impl Default for LimitOptions {
    fn default() -> Self {
        LimitOptions {
            egress: None,
            ingress: None,
            loopback: false,
            scheme: Scheme::Pace,
            pace_ceiling: true,
            rto_min: Nanos(20_000_000),
            delack_max: Nanos(5_000_000),
            class: None,
            police: Policy::default(),
            exempt: Exempt::default(),
            matched: Prefixes::default(),
        }
    }
}

impl LimitOptions {
    /// As it lies in the map.
    ///
    /// # Errors
    /// [`ConfigError`] for a queue that cannot be built.
    pub fn encode(&self, cgroup_id: u64) -> Result<intf::Limit, ConfigError> {
        let microseconds = |time: Nanos| u32::try_from(time.0 / 1000).unwrap_or(u32::MAX);
        let mut limit = intf::Limit {
            cgroup_id,
            exempt: (&self.exempt).into(),
            matched: (&self.matched).into(),
            rto_min_us: microseconds(self.rto_min),
            delack_max_us: microseconds(self.delack_max),
            ..intf::Limit::default()
        };
        if self.scheme.leaves_sockets_alone() {
            (limit.rto_min_us, limit.delack_max_us) = (0, 0);
        }
        if self.loopback {
            limit.flags |= intf::FLAG_LOOPBACK;
        }
        limit.flags |= match self.scheme {
            Scheme::Pace => intf::FLAG_PACE_FAIR,
            Scheme::Nrm if self.pace_ceiling => intf::FLAG_PACE_CEILING,
            Scheme::Nrm => 0,
            Scheme::Edt => intf::FLAG_EDT,
            Scheme::Police if self.police.hook == Hook::Xdp => intf::FLAG_POLICE | intf::FLAG_XDP,
            Scheme::Police => intf::FLAG_POLICE,
            Scheme::Htb => intf::FLAG_HTB,
            Scheme::Dem => intf::FLAG_HTB | intf::FLAG_DEM,
            Scheme::Spring => intf::FLAG_HTB | intf::FLAG_SPRING,
            Scheme::Carousel => return Err(ConfigError::Scheme(self.scheme)),
        };
        for (direction, queue) in
            [(Direction::Egress, self.egress), (Direction::Ingress, self.ingress)]
        {
            if let Some(mut options) = queue {
                options.kind = self.scheme.queue(direction);
                limit.queue[intf::index(direction)] = options.config()?.into();
                limit.rate_bit_s[intf::index(direction)] = options.rate.bit_s();
                limit.class[intf::index(direction)] =
                    intf::ClassConf::new(self.class, &options.floors());
                if self.scheme == Scheme::Police {
                    limit.police[intf::index(direction)] =
                        intf::Policy::new(&self.police, &options)?;
                }
            }
        }
        Ok(limit)
    }
}

impl LimitOptions {
    /// With a scheme that leaves sockets alone what concerns them counts as not given.
    fn of_sockets(self) -> LimitOptions {
        if !self.scheme.leaves_sockets_alone() {
            return self;
        }
        let LimitOptions { pace_ceiling, rto_min, delack_max, .. } = LimitOptions::default();
        LimitOptions { pace_ceiling, rto_min, delack_max, ..self }
    }
}

impl From<&intf::Limit> for LimitOptions {
    /// What a user would write for a limit as it lies in the map: a threshold that is the default at its rate
    /// counts as not given, so that it follows when the rate changes. [`LimitOptions::encode`] gives the same
    /// limit again.
    fn from(limit: &intf::Limit) -> LimitOptions {
        let fair = limit.flags & intf::FLAG_PACE_FAIR != 0;
        let scheme = match limit.flags {
            flags if flags & intf::FLAG_EDT != 0 => Scheme::Edt,
            flags if flags & intf::FLAG_POLICE != 0 => Scheme::Police,
            flags if flags & intf::FLAG_DEM != 0 => Scheme::Dem,
            flags if flags & intf::FLAG_SPRING != 0 => Scheme::Spring,
            flags if flags & intf::FLAG_HTB != 0 => Scheme::Htb,
            _ if fair => Scheme::Pace,
            _ => Scheme::Nrm,
        };
        let queue = |direction| {
            let default = VirtualQueueOptions {
                kind: scheme.queue(direction),
                ..VirtualQueueOptions::new(limit.rate(direction)?)
            };
            let (config, floors) = (default.config().ok(), default.floors());
            let conf = &limit.queue[intf::index(direction)];
            let class = &limit.class[intf::index(direction)];
            let given = |time: u64, bytes: u32, default: Option<Nanos>, floor: Bytes| {
                let bytes = Bytes(u64::from(bytes));
                match bytes.0 {
                    _ if default == Some(Nanos(time)) && bytes == floor => None,
                    0 => Some(Span::Time(Nanos(time))),
                    _ => Some(Span::Size(bytes)),
                }
            };
            Some(VirtualQueueOptions {
                burst: given(
                    conf.burst_ns,
                    class.burst_bytes,
                    config.map(|c| c.burst),
                    floors.burst,
                ),
                mark: given(conf.mark_ns, class.mark_bytes, config.map(|c| c.mark), floors.mark),
                drop: given(conf.drop_ns, class.drop_bytes, config.map(|c| c.drop), floors.drop),
                ..default
            })
        };
        LimitOptions {
            egress: queue(Direction::Egress),
            ingress: queue(Direction::Ingress),
            loopback: limit.flags & intf::FLAG_LOOPBACK != 0,
            scheme,
            pace_ceiling: fair || limit.flags & intf::FLAG_PACE_CEILING != 0,
            rto_min: Nanos(u64::from(limit.rto_min_us) * 1000),
            delack_max: Nanos(u64::from(limit.delack_max_us) * 1000),
            class: limit.class.iter().find_map(intf::ClassConf::class),
            police: Policy {
                hook: if limit.flags & intf::FLAG_XDP != 0 { Hook::Xdp } else { Hook::Auto },
                ..limit.police.iter().find_map(intf::Policy::policy).unwrap_or_default()
            },
            exempt: Exempt::from(&limit.exempt),
            matched: Prefixes::from(&limit.matched),
        }
        .of_sockets()
    }
}

impl intf::Limit {
    /// The virtual queue of a direction at its present rate, with `queue` as it is now.
    #[must_use]
    pub fn queue_now(&self, queue: &intf::Queue, direction: Direction) -> intf::QueueConf {
        let (ceiling, class) =
            (self.queue[intf::index(direction)], self.class[intf::index(direction)]);
        if class.weight == 0 || queue.cost_now == 0 {
            return ceiling;
        }
        class::config_at(&ceiling.into(), &class.floors(), queue.cost_now).into()
    }

    /// The rate of a direction, if it is limited.
    #[must_use]
    pub fn rate(&self, direction: Direction) -> Option<Rate> {
        Rate::from_bit_s(self.rate_bit_s[intf::index(direction)])
    }
}

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
    /// With scheme `htb`: where its packets wait, who counts them.
    pub(crate) seat: Option<htb::Seat>,
    /// Of a limit with prefixes, which shares maps with others: its number in them, and its place.
    pub(crate) at: u32,
    pub(crate) place: Option<Place>,
}

/// What a child works with of its parent.
#[derive(Debug)]
pub(crate) struct ParentMaps {
    pub(crate) queues: MapHandle,
    pub(crate) sockets: MapHandle,
}

impl ParentMaps {
    /// `None` for a limit whose scheme leaves sockets alone: it has no children.
    fn of(maps: &LimitMaps) -> Result<Option<ParentMaps>, LimitError> {
        let Some(sockets) = &maps.sockets else { return Ok(None) };
        let again = |map: &MapHandle| MapHandle::try_from(map).map_err(map_error("parent"));
        Ok(Some(ParentMaps { queues: again(&maps.queues)?, sockets: again(sockets)? }))
    }
}

/// Gives an object that is open the maps of its parent, or leaves them out; the skeletons have no common
/// type.
macro_rules! set_parent {
    ($open:expr, $parent:expr, $program:literal) => {
        let parent: Option<&ParentMaps> = $parent;
        if let Some(rodata) = $open.maps.rodata_data.as_deref_mut() {
            rodata.has_parent = u8::from(parent.is_some());
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

/// The links of a limit, by the name under which they are pinned.
pub(crate) type Links = Vec<(&'static str, Link)>;

/// A limit in force as long as this value lives.
#[derive(Debug)]
pub struct AttachedLimit {
    pub(crate) maps: LimitMaps,
    pub(crate) links: Links,
    /// On a device of a kernel without tcx links.
    pub(crate) filters: Option<Filters>,
    /// Of a policer in XDP.
    pub(crate) xdp: Option<OwnedFd>,
}

/// What a limit's queue and counters say at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The virtual queue and the fair share.
    pub queue: intf::Queue,
    /// Counters, summed over CPUs.
    pub counters: intf::Counters,
    /// With scheme `police`: packets and bytes by colour.
    pub colours: Option<Colours>,
    /// With schemes `dem` and `spring`: its flows in the last period, if there was one lately.
    pub census: Option<census::Sums>,
}

/// Packets and bytes by the colour that a policer gave them: green, yellow, red.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Colours {
    /// Packets.
    pub packets: [u64; intf::COLOURS],
    /// Bytes on the wire.
    pub bytes: [u64; intf::COLOURS],
}

impl Colours {
    fn add(&mut self, cpu: &intf::PoliceCounters) {
        let sum = |to: &mut [u64], from: &[u64]| {
            to.iter_mut().zip(from).for_each(|(t, f)| *t = t.wrapping_add(*f));
        };
        sum(&mut self.packets, &cpu.packets);
        sum(&mut self.bytes, &cpu.bytes);
    }
}

pub(crate) fn load_error(program: &'static str) -> impl FnOnce(libbpf_rs::Error) -> LimitError {
    move |source| LimitError::Load { program, source }
}

pub(crate) fn map_error(map: &'static str) -> impl FnOnce(libbpf_rs::Error) -> LimitError {
    move |source| LimitError::Map { map, source }
}

impl LimitMaps {
    /// The limit as it is in force.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn limit(&self) -> Result<intf::Limit, LimitError> {
        self.limit_at(rate::now())
    }

    /// Puts another limit in force, for packets from now on and for the sockets that exist. The backlog stays
    /// what it is in bytes, as far as the new thresholds go. A rate that a group has lent still ends when it
    /// did.
    ///
    /// # Errors
    /// [`LimitError`]; the earlier limit is in force.
    pub fn set(
        &self,
        hierarchy: &Hierarchy,
        cgroup: Option<&Cgroup>,
        limit: &intf::Limit,
    ) -> Result<(), LimitError> {
        let (earlier, now) = (self.settings()?, rate::now());
        self.write(self.keep_leases(limit.carried_on(&self.limit_at(now)?, now))?)?;
        let adopted = cgroup.map_or(Ok(()), |cgroup| self.adopt(hierarchy, cgroup, Adopt::Take));
        if adopted.is_err() {
            self.write(earlier)?;
        }
        adopted
    }

    /// Gives the queues of a limit that is not attached yet what it may use of `parent` now, so that its
    /// first epoch is not at its ceiling, which may be none.
    fn start_in(&self, parent: &LimitMaps, options: &LimitOptions) -> Result<(), LimitError> {
        let (Some(class), theirs) = (options.class, parent.limit()?) else { return Ok(()) };
        for (direction, queue) in
            [(Direction::Egress, options.egress), (Direction::Ingress, options.ingress)]
        {
            let (Some(queue), Some(rate)) = (queue, theirs.rate(direction)) else { continue };
            let index = intf::index(direction);
            let above: intf::Queue = lookup(&parent.queues, "queues", index as u32)?;
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
                .update(&(index as u32).to_ne_bytes(), bytemuck::bytes_of(&ours), MapFlags::ANY)
                .map_err(map_error("queues"))?;
        }
        Ok(())
    }

    /// The keys of what a direction has in its queues and counters.
    fn queue_key(&self, index: usize) -> u32 {
        self.at * intf::QUEUES as u32 + index as u32
    }

    fn counters_key(&self, index: usize) -> u32 {
        self.at * intf::DIRECTIONS as u32 + index as u32
    }

    /// Puts settings in force. Those of a policer must not be older than those that are
    /// ([`intf::Limit::carried_on`]): packets would take them for what a late one has, and be dropped.
    pub(crate) fn write(&self, settings: impl Into<settings::Settings>) -> Result<(), LimitError> {
        let settings = settings.into();
        if let Some(place) = &self.place {
            return place.write(&self.limit, &settings);
        }
        settings.write(&self.limit, self.at)?;
        self.exempt.as_ref().map_or(Ok(()), |trie| exempt::fill(trie, &settings.limit.exempt))
    }

    /// Whose packets wait in the queue of a direction at this moment; `None` where there is none, or nobody
    /// can tell.
    ///
    /// # Errors
    /// [`LimitError`] when the kernel refuses to look.
    pub fn waiting(&self, direction: Direction) -> Result<Option<Waiting>, LimitError> {
        self.seat.as_ref().map_or(Ok(None), |seat| seat.waiting(direction))
    }

    /// With `dem` and `spring` the connections of a direction that are wanted, who sends first.
    pub fn connections(
        &self,
        direction: Direction,
        wanted: impl Fn(SocketAddr, SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, SocketAddr)> {
        self.seat.as_ref().map_or_else(Vec::new, |seat| seat.connections(direction, wanted))
    }

    /// Queue and counters of a direction.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn read(&self, direction: Direction) -> Result<Reading, LimitError> {
        if let Some(seat) = &self.seat {
            return seat.read(direction);
        }
        let index = intf::index(direction);
        let mut queue: intf::Queue = lookup(&self.queues, "queues", self.queue_key(index))?;
        let per_cpu = self
            .counters
            .lookup_percpu(&self.counters_key(index).to_ne_bytes(), MapFlags::ANY)
            .map_err(map_error("counters"))?
            .unwrap_or_default();
        let mut counters = intf::Counters::default();
        let mut colours: Option<Colours> = None;
        for cpu in &per_cpu {
            let bytes = cpu.get(..size_of::<intf::Counters>());
            let one = bytes.and_then(|b| bytemuck::try_pod_read_unaligned(b).ok());
            counters.add(&one.ok_or(LimitError::Layout("counters"))?);
            // Those of a policer are longer.
            let bytes = cpu.get(..size_of::<intf::PoliceCounters>());
            let one = bytes.and_then(|b| bytemuck::try_pod_read_unaligned(b).ok());
            if let Some(one) = one {
                colours.get_or_insert_default().add(&one);
            }
        }
        if colours.is_some() {
            let intf::Side { full_ns, skipped_ns, .. } = *intf::Meter::from(queue).side();
            // A policer's clock runs on while the host sleeps.
            let asleep_ns = rate::asleep_ns();
            let finish_ns = full_ns.saturating_sub(asleep_ns);
            queue = intf::Queue { finish_ns, skipped_ns, ..intf::Queue::default() };
            counters.last_ns = counters.last_ns.map(|at| at.saturating_sub(asleep_ns));
        }
        Ok(Reading { queue, counters, colours, census: None })
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
        let mut storage = MaybeUninit::uninit();
        let mut open = skel::adopt::AdoptSkelBuilder::default()
            .open(&mut storage)
            .map_err(load_error("adopt"))?;
        if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
            rodata.release = u8::from(adopt == Adopt::Release);
            rodata.level = cgroup.level();
        }
        reuse(&mut open.maps.limit, &self.limit)?;
        reuse(&mut open.maps.queues_of_limit, &self.queues)?;
        reuse(&mut open.maps.sockets_of_limit, sockets)?;
        set_parent!(open, self.parent.as_ref(), "adopt");
        set_exempt!(open, self.exempt.is_some(), self.exempt.as_ref(), "adopt");
        let object = open.load().map_err(load_error("adopt"))?;
        let link = object.progs.adopt.attach().map_err(load_error("adopt"))?;
        for namespace in network_namespaces(hierarchy, cgroup) {
            in_network_namespace(&namespace, || {
                // A socket that ends meanwhile is no loss; neither is a namespace.
                let _ = Iter::new(&link).map(|mut iter| io::copy(&mut iter, &mut io::sink()));
            });
        }
        Ok(())
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

pub(crate) fn lookup<T: bytemuck::Pod>(
    map: &MapHandle,
    name: &'static str,
    key: u32,
) -> Result<T, LimitError> {
    let value = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).map_err(map_error(name))?;
    let value = value.filter(|bytes| bytes.len() == size_of::<T>());
    value
        .and_then(|bytes| bytemuck::try_pod_read_unaligned(&bytes).ok())
        .ok_or(LimitError::Layout(name))
}

pub(crate) fn reuse(
    map: &mut libbpf_rs::OpenMapMut<'_>,
    with: &MapHandle,
) -> Result<(), LimitError> {
    map.reuse_fd(with.as_fd()).map_err(load_error("companion"))
}

/// The network namespaces of the processes at and below a cgroup.
pub(crate) fn network_namespaces(hierarchy: &Hierarchy, cgroup: &Cgroup) -> Vec<OwnedFd> {
    let mut seen = BTreeSet::new();
    let mut namespaces = Vec::new();
    for path in hierarchy.find_below(cgroup.path(), |_| true) {
        let processes = hierarchy.open(&path).and_then(|group| group.processes());
        for pid in processes.unwrap_or_default() {
            let Ok(file) = fs::File::open(format!("/proc/{pid}/ns/net")) else { continue };
            if file.metadata().is_ok_and(|m| seen.insert(m.ino())) {
                namespaces.push(OwnedFd::from(file));
            }
        }
    }
    namespaces
}

pub(crate) fn in_network_namespace(namespace: &OwnedFd, work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let kind = rustix::thread::LinkNameSpaceType::Network;
            if rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(kind)).is_ok() {
                work();
            }
        });
    });
}

impl AttachedLimit {
    /// Loads the programs of a limit and attaches them to the cgroup. One with a class takes its part of
    /// `parent`, whose cgroup contains this one.
    ///
    /// # Errors
    /// [`LimitError`]; nothing is attached.
    pub fn attach(
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        options: &LimitOptions,
        parent: Option<&LimitMaps>,
    ) -> Result<AttachedLimit, LimitError> {
        let attached = Self::load(hierarchy, cgroup, options, parent)?;
        attached.maps.adopt(hierarchy, cgroup, Adopt::Take)?;
        Ok(attached)
    }

    /// The same, but for the sockets that exist.
    pub(crate) fn load(
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        options: &LimitOptions,
        parent: Option<&LimitMaps>,
    ) -> Result<AttachedLimit, LimitError> {
        match options.scheme {
            Scheme::Edt => return edt::attach_cgroup(hierarchy, cgroup, options),
            Scheme::Police => return police::attach_cgroup(cgroup, options),
            // Only inside a limit on a device, which the store alone knows.
            Scheme::Htb | Scheme::Dem | Scheme::Spring => {
                return Err(ConfigError::Scheme(options.scheme).into());
            }
            Scheme::Pace | Scheme::Nrm | Scheme::Carousel => {}
        }
        let limit = options.encode(cgroup.id())?;
        quiet_libbpf();

        let mut storage = MaybeUninit::uninit();
        let exempts = !options.exempt.is_empty();
        let nrm = load_nrm(&mut storage, parent, exempts)?;
        let handle = |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("nrm"));
        let maps = LimitMaps {
            limit: handle(&nrm.maps.limit)?,
            queues: handle(&nrm.maps.queues_of_limit)?,
            counters: handle(&nrm.maps.counters)?,
            sockets: Some(handle(&nrm.maps.sockets_of_limit)?),
            exempt: exempts.then(|| handle(&nrm.maps.exempt_prefixes)).transpose()?,
            parent: parent.map(ParentMaps::of).transpose()?.flatten(),
            seat: None,
            at: 0,
            place: None,
            group: None,
        };

        let mut tune_storage = MaybeUninit::uninit();
        let mut tune = skel::tune::TuneSkelBuilder::default()
            .open(&mut tune_storage)
            .map_err(load_error("tune"))?;
        if let Some(rodata) = tune.maps.rodata_data.as_deref_mut() {
            // The kernel's coarse clocks go on with each tick.
            let tick = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse);
            rodata.tick_ns = tick.tv_nsec as u64;
        }
        reuse(&mut tune.maps.limit, &maps.limit)?;
        reuse(&mut tune.maps.queues_of_limit, &maps.queues)?;
        if let Some(sockets) = &maps.sockets {
            reuse(&mut tune.maps.sockets_of_limit, sockets)?;
        }
        set_parent!(tune, maps.parent.as_ref(), "tune");
        set_exempt!(tune, exempts, maps.exempt.as_ref(), "tune");
        let tune = tune.load().map_err(load_error("tune"))?;

        maps.write(limit)?;
        if let Some(parent) = parent {
            maps.start_in(parent, options)?;
        }
        let links = vec![
            ("egress", attach(&nrm.progs.nrm_egress, "nrm_egress", cgroup)?),
            ("ingress", attach(&nrm.progs.nrm_ingress, "nrm_ingress", cgroup)?),
            ("sockops", attach(&tune.progs.tune, "tune", cgroup)?),
        ];
        Ok(AttachedLimit { maps, links, filters: None, xdp: None })
    }

    /// The same on a device, with a scheme that is for devices.
    ///
    /// # Errors
    /// [`LimitError`]; nothing is attached.
    pub fn attach_device(
        hierarchy: &Hierarchy,
        target: &Target,
        options: &LimitOptions,
    ) -> Result<AttachedLimit, LimitError> {
        match options.scheme {
            Scheme::Edt => edt::attach_device(hierarchy, target, options),
            Scheme::Police => police::attach_device(target, options),
            scheme => Err(ConfigError::Scheme(scheme).into()),
        }
    }

    /// Its maps.
    #[must_use]
    pub fn maps(&self) -> &LimitMaps {
        &self.maps
    }

    /// Takes the programs off and gives the sockets of the cgroup back.
    ///
    /// # Errors
    /// [`LimitError`]; the programs are off all the same.
    pub fn detach(self, hierarchy: &Hierarchy, cgroup: &Cgroup) -> Result<(), LimitError> {
        // Programs first: a connection that opens meanwhile must not be set again.
        drop(self.links);
        drop(self.xdp);
        self.maps.adopt(hierarchy, cgroup, Adopt::Release)
    }
}

/// Opens and loads the virtual queue's object, for a limit in `parent` if there is one.
pub(crate) fn load_nrm<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    parent: Option<&LimitMaps>,
    exempts: bool,
) -> Result<skel::nrm::NrmSkel<'a>, LimitError> {
    let mut open = skel::nrm::NrmSkelBuilder::default().open(storage).map_err(load_error("nrm"))?;
    let parent = parent.map(ParentMaps::of).transpose()?.flatten();
    set_parent!(open, parent.as_ref(), "nrm");
    set_exempt!(open, exempts, None, "nrm");
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.flow_seed = u64::from(edt::random_seed()) << 32 | u64::from(edt::random_seed());
    }
    open.load().map_err(load_error("nrm"))
}

pub(crate) fn attach(
    program: &libbpf_rs::ProgramMut<'_>,
    name: &'static str,
    cgroup: &Cgroup,
) -> Result<Link, LimitError> {
    program.attach_cgroup(cgroup.as_fd().as_raw_fd()).map_err(|source| {
        let denied = matches!(source.kind(), libbpf_rs::ErrorKind::PermissionDenied);
        match query::exclusive_holder(cgroup).filter(|_| denied) {
            Some(holder) => LimitError::Occupied { cgroup: cgroup.path().to_owned(), holder },
            None => LimitError::Attach { program: name, cgroup: cgroup.path().to_owned(), source },
        }
    })
}

/// Keeps libbpf's own messages off the terminal; errors carry what matters.
pub(crate) fn quiet_libbpf() {
    libbpf_rs::set_print(None);
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod admission_tests;

#[cfg(test)]
mod asking_tests;

#[cfg(test)]
mod kernel_tests;

#[cfg(test)]
mod pacing_tests;

#[cfg(test)]
mod race_tests;

#[cfg(test)]
mod thread_tests;

#[cfg(test)]
mod timer_tests;

#[cfg(test)]
pub(crate) mod tree_tests;

#[cfg(test)]
mod unpaced_tests;

#[cfg(test)]
mod window_tests;
