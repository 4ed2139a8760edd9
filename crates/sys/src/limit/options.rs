//! What a limit does, as a user says it and as it lies in the map.

use tidegate_core::{
    Bytes, Class, Direction, Nanos, Rate, Scheme, Span,
    choice::Why,
    class,
    exempt::Exempt,
    police::{Hook, Policy},
    prefixes::Prefixes,
    queue_options::{ConfigError, VirtualQueueOptions},
    scheme::QueueKind,
};

use super::Part;
use crate::intf;

/// What a limit does; [`LimitOptions::encode`] turns it into what lies in the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitOptions {
    /// From the workload; `None` leaves this direction free.
    pub egress: Option<VirtualQueueOptions>,
    /// To the workload; `None` leaves this direction free.
    pub ingress: Option<VirtualQueueOptions>,
    /// Charge packets on the loopback interface too.
    pub loopback: bool,
    pub scheme: Scheme,
    /// Why the scheme was chosen; `None`: it was named. Not in the map.
    pub chosen: Option<Why>,
    /// Its rates are those of a schedule at one moment, and nobody follows the schedule. Not in the map.
    pub unfollowed: bool,
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
            chosen: None,
            unfollowed: false,
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
    /// The queue of a direction; `None` if that is free.
    pub fn queue(&self, direction: Direction) -> Option<VirtualQueueOptions> {
        match direction {
            Direction::Egress => self.egress,
            Direction::Ingress => self.ingress,
        }
    }

    /// The same, to be changed.
    pub fn queue_mut(&mut self, direction: Direction) -> &mut Option<VirtualQueueOptions> {
        match direction {
            Direction::Egress => &mut self.egress,
            Direction::Ingress => &mut self.ingress,
        }
    }

    /// As it lies in the map. Prefixes lie elsewhere.
    ///
    /// # Errors
    /// [`ConfigError`] for a queue that cannot be built.
    pub fn encode(&self, cgroup_id: u64) -> Result<intf::Entry, ConfigError> {
        let microseconds = |time: Nanos| u32::try_from(time.0 / 1000).unwrap_or(u32::MAX);
        let mut limit = intf::Entry::from(intf::Limit {
            cgroup_id,
            scheme: self.scheme as u32,
            rto_min_us: microseconds(self.rto_min),
            delack_max_us: microseconds(self.delack_max),
            ..intf::Limit::default()
        });
        limit.set_exempt(&self.exempt);
        let sets_sockets = self.scheme.info().sets_sockets;
        if !sets_sockets {
            (limit.rto_min_us, limit.delack_max_us) = (0, 0);
        }
        let is_fair = self.scheme.queue(Direction::Egress) == QueueKind::Paced;
        let polices = self.scheme.queue(Direction::Ingress) == QueueKind::Bucket;
        for (flag, is_set) in [
            (intf::FLAG_LOOPBACK, self.loopback),
            (intf::FLAG_PACE_FAIR, is_fair),
            (intf::FLAG_PACE_CEILING, sets_sockets && !is_fair && self.pace_ceiling),
            (intf::FLAG_XDP, polices && self.police.hook == Hook::Xdp),
            (intf::FLAG_MATCH, !self.matched.is_empty()),
        ] {
            limit.flags |= if is_set { flag } else { 0 };
        }
        for direction in Direction::BOTH {
            if let Some(mut options) = self.queue(direction) {
                options.kind = self.scheme.queue(direction);
                limit.queue[intf::index(direction)] = options.config()?.into();
                limit.rate_bit_s[intf::index(direction)] = options.rate.bit_s();
                limit.class[intf::index(direction)] =
                    intf::ClassConf::new(self.class, &options.floors());
                if options.kind == QueueKind::Bucket {
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
        if self.scheme.info().sets_sockets {
            return self;
        }
        let LimitOptions { pace_ceiling, rto_min, delack_max, .. } = LimitOptions::default();
        LimitOptions { pace_ceiling, rto_min, delack_max, ..self }
    }
}

impl From<&intf::Entry> for LimitOptions {
    /// What a user would write for a limit as it lies in the map, without its prefixes: a threshold that is
    /// the default at its rate counts as not given, so that it follows when the rate changes.
    /// [`LimitOptions::encode`] gives the same limit again.
    fn from(limit: &intf::Entry) -> LimitOptions {
        let scheme = limit.scheme();
        let paces = limit.flags & (intf::FLAG_PACE_FAIR | intf::FLAG_PACE_CEILING) != 0;
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
            chosen: None,
            unfollowed: false,
            pace_ceiling: paces,
            rto_min: Nanos(u64::from(limit.rto_min_us) * 1000),
            delack_max: Nanos(u64::from(limit.delack_max_us) * 1000),
            class: limit.class.iter().find_map(intf::ClassConf::class),
            police: Policy {
                hook: if limit.flags & intf::FLAG_XDP != 0 { Hook::Xdp } else { Hook::Auto },
                ..limit.police.iter().find_map(intf::Policy::policy).unwrap_or_default()
            },
            exempt: Exempt { dscps: limit.exempt_dscps, ..Exempt::default() },
            matched: Prefixes::default(),
        }
        .of_sockets()
    }
}

impl intf::Limit {
    /// The virtual queue of a direction at its present rate, with the part of its parent that it has now.
    pub fn queue_now(&self, part: Option<Part>, direction: Direction) -> intf::QueueConf {
        let (ceiling, class) =
            (self.queue[intf::index(direction)], self.class[intf::index(direction)]);
        let Some(part) = part.filter(|_| class.weight != 0) else { return ceiling };
        class::config_at(&ceiling.into(), &class.floors(), part.cost).into()
    }

    /// The rate of a direction, if it is limited.
    pub fn rate(&self, direction: Direction) -> Option<Rate> {
        Rate::from_bit_s(self.rate_bit_s[intf::index(direction)])
    }
}

#[cfg(test)]
mod tests;
