//! What a node acts on, with everything that can go wrong there: gates as the kernel has them, and a disk.
//!
//! Each outlives the process of its node. Time is that of the host's clock.

use std::{cell::RefCell, collections::BTreeMap, io, ops::Range, rc::Rc};

use tidegate_core::{
    Nanos, Rate,
    fleet::share::Saved,
    units::{MAX_RATE_BIT_S, MIN_RATE_BIT_S, NANOS_PER_SEC},
};
use tidegate_fleet::{
    backend::{Done, GroupBackend, Place, Sample},
    storage::{Storage, StorageError, Stored},
};
use tidegate_sys::limit::Lease;

/// A gate that refused is tried again within this.
const TRIED_AGAIN: Nanos = Nanos(NANOS_PER_SEC);

/// What wants to go through a limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Load {
    Idle,
    /// So many flows take all they get.
    Greedy(u32),
    /// One that has no more than this, in bit/s.
    Bounded(u64),
}

/// What is wrong with a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateFault {
    None,
    /// EPERM: it can be read and not be set.
    Refuses,
    /// Neither read nor set.
    Unreadable,
    /// It answers after so long, and sets nothing before.
    Slow(Nanos),
    /// It is set, and says that it is not.
    FailsLate,
    /// The limit, or what it was on, is gone.
    Gone,
    /// Somebody else changes limits until then, by the host's clock.
    Busy(Nanos),
}

/// A rate that a limit had before the one that it has now.
#[derive(Debug, Clone, Copy)]
struct Earlier {
    rate_bit_s: u64,
    lease: Option<Lease>,
    /// Somewhere between these times it came into force, and the next one by `to`.
    from: Nanos,
    to: Nanos,
}

/// A limit as the kernel has it.
#[derive(Debug, Clone)]
pub struct Limit {
    pub rate_bit_s: u64,
    pub lease: Option<Lease>,
    /// Since when that may be in force.
    from: Nanos,
    /// Of changes that are not instant.
    earlier: Vec<Earlier>,
    pub load: Load,
    pub fault: GateFault,
    /// The part of packets that is dropped at random.
    pub drop: f64,
    /// Since when it counts: the node has it in its group, and has set it.
    pub member: Option<Nanos>,
    /// It has entered the group, with a rate of its own that the node has yet to set.
    pub enters: bool,
    /// Since when it cannot be set; none once it has been set again.
    unset: Option<Nanos>,
    /// When its last fault ended.
    mended: Nanos,
    /// It has left the group, with this for its own, in bit/s. It counts while it passes more than that.
    pub leaves: Option<u64>,
    measured: Option<Nanos>,
    /// With 1, the gate says that senders were slowed down when they were.
    tells_slowed: bool,
}

impl Limit {
    pub fn new(rate_bit_s: u64, tells_slowed: bool) -> Limit {
        Limit {
            rate_bit_s,
            lease: None,
            from: Nanos(0),
            earlier: Vec::new(),
            load: Load::Idle,
            fault: GateFault::None,
            drop: 0.0,
            member: Some(Nanos(0)),
            enters: false,
            unset: None,
            mended: Nanos(0),
            leaves: None,
            measured: None,
            tells_slowed,
        }
    }

    /// What is in force, as the programs have it that look at the time.
    fn in_force(&self, now: Nanos) -> u64 {
        in_force(now, self.rate_bit_s, self.lease)
    }

    /// The most that it may pass, in bit/s.
    pub fn passes(&self, now: Nanos) -> u64 {
        if self.fault == GateFault::Gone {
            return 0;
        }
        let is = (now >= self.from || self.earlier.is_empty()).then(|| self.in_force(now));
        let was = self.earlier.iter().filter(|one| (one.from..one.to).contains(&now));
        is.into_iter()
            .chain(was.map(|one| in_force(now, one.rate_bit_s, one.lease)))
            .max()
            .unwrap_or(0)
    }

    fn set(&mut self, now: Nanos, called: Range<Nanos>, rate: Rate, lease: Option<Lease>) {
        self.earlier.retain(|one| now < one.to);
        let Limit { rate_bit_s, lease: before, from, .. } = *self;
        self.earlier.push(Earlier { rate_bit_s, lease: before, from, to: called.end });
        // Of calls that a killed process was about to make none is made any more.
        self.earlier.iter_mut().for_each(|one| one.to = one.to.min(called.end));
        (self.rate_bit_s, self.lease, self.from) = (rate.bit_s(), lease, called.start);
        self.unset = None;
    }

    pub fn put_on(&mut self, rate_bit_s: u64) {
        (self.rate_bit_s, self.lease, self.from, self.unset) = (rate_bit_s, None, Nanos(0), None);
        self.earlier.clear();
    }

    pub fn breaks(&mut self, now: Nanos, fault: GateFault) {
        match fault {
            GateFault::None => self.mended = now,
            GateFault::Busy(until) => self.mended = until,
            GateFault::Slow(_) => {}
            _ => self.unset = self.unset.or(Some(now)),
        }
        self.fault = fault;
    }

    /// Whether it has had a rate without an end, or one that has ended, and could not be set, since before
    /// then.
    fn is_stuck_since(&self, now: Nanos, then: Nanos) -> bool {
        let has_ended = self.lease.is_none_or(|lease| lease.until <= now);
        self.member.is_some() && has_ended && self.unset.is_some_and(|at| at <= then)
    }

    /// Something has gone wrong that may have kept it from being set; mended so lately that the node may not
    /// have tried again.
    pub fn is_unset(&self, now: Nanos) -> bool {
        self.unset.is_some()
            || self.fault != GateFault::None
            || now.0 < self.mended.0 + TRIED_AGAIN.0
    }
}

fn in_force(now: Nanos, rate_bit_s: u64, lease: Option<Lease>) -> u64 {
    let ended = lease.filter(|lease| lease.until <= now);
    ended.map_or(rate_bit_s, |lease| lease.then.bit_s())
}

/// What the host has besides its process.
#[derive(Debug, Default)]
pub struct Kernel {
    pub limits: BTreeMap<String, Limit>,
    /// The time of the call that is made now, and how long it took so far.
    pub now: Nanos,
    pub took: Nanos,
    /// Rates that were asked for and that no scheme takes.
    pub illegal: Vec<u64>,
    pub disk: Disk,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum DiskFault {
    #[default]
    None,
    Full,
    /// What is written is there after so long.
    Slow(Nanos),
    /// An error is told; what was to be written is there or not.
    Torn,
}

#[derive(Debug, Default)]
pub struct Disk {
    pub fault: DiskFault,
    pub saved: BTreeMap<String, Saved>,
    writing: BTreeMap<String, (Saved, Nanos)>,
    torn: u64,
}

impl Disk {
    /// The process is gone; what was being written is there or not.
    pub fn kill(&mut self, is_there: bool) {
        let writing = std::mem::take(&mut self.writing);
        if is_there {
            self.saved.extend(writing.into_iter().map(|(group, (saved, _))| (group, saved)));
        }
    }
}

impl Kernel {
    /// How many limits have entered their group beside one that cannot be lowered, or could not within
    /// `lease`.
    pub fn entered(&self, now: Nanos, lease: Nanos) -> u64 {
        let is_beside = |since: Nanos| {
            let lately = now >= since && now.0 - since.0 <= lease.0;
            lately || self.limits.values().any(|other| other.is_stuck_since(now, since))
        };
        self.limits.values().filter(|limit| limit.member.is_some_and(is_beside)).count() as u64
    }
}

pub type Shared = Rc<RefCell<Kernel>>;

/// Gates and storage of a node: the kernel's side of them.
#[derive(Debug, Clone)]
pub struct Local(pub Shared);

#[derive(Debug, thiserror::Error)]
pub enum GateError {
    #[error("Operation not permitted (os error 1)")]
    Refused,
    #[error("{0} bit/s is not from 8 kbit/s to 100 Gbit/s")]
    Rate(u64),
    #[error("there is no limit `{0}`")]
    Unknown(String),
}

impl GroupBackend for Local {
    type Error = GateError;

    fn measure(&mut self, _: Nanos, place: &Place) -> Result<Option<Sample>, GateError> {
        let Kernel { limits, now, took, .. } = &mut *self.0.borrow_mut();
        let unknown = || GateError::Unknown(place.limit.clone());
        let limit = limits.get_mut(&place.limit).ok_or_else(unknown)?;
        match limit.fault {
            GateFault::Gone => {
                limit.measured = None;
                return Ok(None);
            }
            GateFault::Unreadable => return Err(GateError::Refused),
            GateFault::Slow(time) => took.0 += time.0,
            _ => {}
        }
        let elapsed = limit.measured.replace(*now).map_or(0, |at| now.0.saturating_sub(at.0));
        let rate = limit.in_force(*now);
        let (demand, flows) = match limit.load {
            Load::Idle => (0, 0),
            Load::Greedy(flows) => (rate, u64::from(flows)),
            Load::Bounded(most) => (most.min(rate), 1),
        };
        let bytes = u128::from(demand) * u128::from(elapsed) / 8 / u128::from(NANOS_PER_SEC);
        let slows = limit.tells_slowed && matches!(limit.load, Load::Greedy(_));
        Ok(Some(Sample {
            arrived_bytes: bytes as u64,
            slowed_bytes: if slows { bytes as u64 / 100 } else { 0 },
            flow_bit_s: (flows > 0).then(|| demand / flows),
            rate_bit_s: rate,
            until: limit.lease.map(|lease| lease.until).filter(|until| until > now),
            ..Sample::default()
        }))
    }

    fn set_rate(
        &mut self,
        place: &Place,
        rate: Rate,
        lease: Option<Lease>,
    ) -> Result<Done, GateError> {
        let Kernel { limits, now, took, illegal, .. } = &mut *self.0.borrow_mut();
        let unknown = || GateError::Unknown(place.limit.clone());
        let limit = limits.get_mut(&place.limit).ok_or_else(unknown)?;
        for rate in [rate, lease.map_or(rate, |lease| lease.then)] {
            if !(MIN_RATE_BIT_S..=MAX_RATE_BIT_S).contains(&rate.bit_s()) {
                illegal.push(rate.bit_s());
                return Err(GateError::Rate(rate.bit_s()));
            }
        }
        match limit.fault {
            GateFault::Gone => return Ok(Done::Gone),
            GateFault::Refuses | GateFault::Unreadable => return Err(GateError::Refused),
            GateFault::Busy(until) if *now < until => {
                limit.unset = limit.unset.or(Some(*now));
                return Ok(Done::Busy);
            }
            GateFault::Slow(_) | GateFault::None | GateFault::FailsLate | GateFault::Busy(_) => {}
        }
        let called = Nanos(now.0 + took.0);
        if let GateFault::Slow(time) = limit.fault {
            took.0 += time.0;
        }
        let done = Nanos(now.0 + took.0);
        if std::mem::take(&mut limit.enters) {
            limit.member = Some(done);
        }
        limit.set(*now, called..done, rate, lease);
        if limit.fault == GateFault::FailsLate {
            return Err(GateError::Refused);
        }
        Ok(Done::Set)
    }

    fn set_drop(&mut self, place: &Place, probability: f64) -> Result<Done, GateError> {
        let limits = &mut self.0.borrow_mut().limits;
        let unknown = || GateError::Unknown(place.limit.clone());
        let limit = limits.get_mut(&place.limit).ok_or_else(unknown)?;
        match limit.fault {
            GateFault::Gone => return Ok(Done::Gone),
            GateFault::Refuses | GateFault::Unreadable => return Err(GateError::Refused),
            _ => limit.drop = probability,
        }
        Ok(Done::Set)
    }

    fn leave(&mut self, place: &Place) -> Result<(), GateError> {
        self.set_drop(place, 0.0).map(drop)
    }
}

impl Storage for Local {
    fn load(&mut self, group: &str) -> Result<Option<Saved>, StorageError> {
        Ok(self.0.borrow().disk.saved.get(group).copied())
    }

    fn save(&mut self, group: &str, saved: Saved) -> Result<Stored, StorageError> {
        let Kernel { disk, now, .. } = &mut *self.0.borrow_mut();
        let error = |kind| StorageError { path: "state".into(), source: io::Error::from(kind) };
        match disk.fault {
            DiskFault::Full => return Err(error(io::ErrorKind::StorageFull)),
            DiskFault::Torn => {
                disk.torn += 1;
                if disk.torn.is_multiple_of(2) {
                    disk.saved.insert(group.to_owned(), saved);
                }
                return Err(error(io::ErrorKind::Interrupted));
            }
            DiskFault::Slow(time) => {
                let ready = match disk.writing.get(group) {
                    Some((writes, ready)) if *writes == saved => *ready,
                    _ => Nanos(now.0 + time.0),
                };
                if *now < ready {
                    disk.writing.insert(group.to_owned(), (saved, ready));
                    return Ok(Stored::Pending);
                }
            }
            DiskFault::None => {}
        }
        disk.writing.remove(group);
        disk.saved.insert(group.to_owned(), saved);
        Ok(Stored::Durably)
    }
}
