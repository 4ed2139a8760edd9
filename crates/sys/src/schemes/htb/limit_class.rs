//! What the kernel and the programs say of one limit of a tree.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use libbpf_rs::MapHandle;
use tidegate_core::{
    Bytes, Direction, Nanos, Rate, Scheme, flow_count,
    htb::{ROOT_SLOT, SLOTS},
    spring,
};

use super::{
    ROOT, SLOT,
    slot::{MARKED_PIN, SLOTS_PIN, device_of},
    tree,
};
use crate::{
    bpf::{lookup, lookup_cpus, map_error, name_in},
    clock::monotonic_ns,
    device, intf,
    limit::{FairShare, Handle, LimitError, LimitMaps, Reading, settings::Settings},
    net::Netlink,
    schemes::acks::{self, AcksMaps},
    shared::{HtbMarked, HtbSlot},
    waiting::{self, Waiting},
};

/// Places of [`intf::Counters`], by the table of outcomes.
const PASS: usize = 0;
const MARK: usize = 1;
const SLOW: usize = 2;
pub(crate) const DROP_FULL: usize = 3;

/// After so long without an ACK nobody counts as sending.
const SILENT: Nanos = Nanos(2 * flow_count::MAX_PERIOD.0);

/// The share that windows give the flows of a queue.
fn share_of_windows(state: &acks::intf::State) -> FairShare {
    FairShare {
        // More than all is time, and no rate.
        share: state.share.min(spring::ONE) as u32,
        epoch_start_ns: state.epoch_start_ns,
        flows: state.flows.max(state.flows_before),
        ..FairShare::default()
    }
}

/// Where a limit is in its tree.
#[derive(Debug, Clone)]
pub(super) struct LimitClass {
    /// Where the limit on the device is pinned.
    dir: PathBuf,
    /// That limit.
    root: intf::Limit,
    slot: u16,
}

impl LimitClass {
    /// Of the limit that is pinned in `dir`; `None` if its tree is gone.
    pub(super) fn open(dir: &Path, limit: &intf::Limit) -> Option<LimitClass> {
        let Some(root) = name_in(dir, ROOT) else {
            // One that was set aside has left its tree.
            let is_root = !limit.is_child();
            return is_root.then(|| LimitClass {
                dir: dir.to_owned(),
                root: *limit,
                slot: ROOT_SLOT,
            });
        };
        let slot = name_in(dir, SLOT)?.parse().ok()?;
        let dir = dir.parent()?.join(root);
        let map = MapHandle::from_pinned_path(dir.join("limit")).ok()?;
        let root = Settings::read(&map, 0).ok()?.limit.common;
        Some(LimitClass { dir, root, slot })
    }

    fn place(&self, direction: Direction) -> u32 {
        intf::index(direction) as u32 * u32::from(SLOTS) + u32::from(self.slot)
    }

    /// Whether the classes of all limited directions are there.
    fn is_taken(&self) -> bool {
        device::in_namespace(self.root.cgroup_id, || self.is_taken_here()).unwrap_or(false)
    }

    fn is_taken_here(&self) -> bool {
        let Ok(mut netlink) = Netlink::open() else { return false };
        Direction::BOTH.into_iter().all(|direction| {
            match device_of(&mut netlink, &self.root, direction) {
                Ok(None) => true,
                Ok(Some(ifindex)) => {
                    let is_limited = self.slot_of(direction).is_some_and(|s| s.backlog.qdisc != 0);
                    let figures = tree::figures(&mut netlink, ifindex, self.slot);
                    !is_limited || figures.is_ok_and(|figures| figures.is_some())
                }
                Err(_) => false,
            }
        })
    }

    fn slot_of(&self, direction: Direction) -> Option<HtbSlot> {
        let slots = MapHandle::from_pinned_path(self.dir.join(SLOTS_PIN)).ok()?;
        lookup(&slots, SLOTS_PIN, self.place(direction)).ok()
    }

    fn read_here(&self, direction: Direction) -> Result<Reading, LimitError> {
        let mut reading = Reading::default();
        let mut netlink = Netlink::open()?;
        // On a device that is gone there is nothing to be read.
        let Ok(Some(ifindex)) = device_of(&mut netlink, &self.root, direction) else {
            return Ok(reading);
        };
        let Some(figures) = tree::figures(&mut netlink, ifindex, self.slot)? else {
            return Ok(reading);
        };
        let marked = self.marked(direction)?;
        let rate = self.slot_of(direction).map(|slot| slot.backlog.rate_bit_s);
        let now_ns = monotonic_ns();
        if let Some(rate) = rate.and_then(Rate::from_bit_s) {
            reading.finish_ns = monotonic_ns() + rate.time_for(Bytes(figures.waiting_bytes)).0;
        }
        let counters = &mut reading.counters;
        counters.packets[PASS] = figures.sent_packets.saturating_sub(marked.packets);
        counters.bytes[PASS] = figures.sent_bytes.saturating_sub(marked.bytes);
        counters.packets[MARK] = marked.packets;
        counters.bytes[MARK] = marked.bytes;
        counters.packets[DROP_FULL] = figures.dropped_packets;
        let acks = acks::dir_of(&self.dir, direction);
        if self.slot == ROOT_SLOT && acks.exists() {
            // Programs that somebody took off are reported by `unhooked`.
            let Ok(maps) = AcksMaps::open(&acks) else { return Ok(reading) };
            let ours = maps.counters()?;
            // ACKs go the other way: none of their bytes are this direction's.
            counters.packets[MARK] += ours.packets[MARK];
            counters.packets[SLOW] += ours.packets[SLOW];
            // The queue has never seen these: of senders that ignore their windows.
            counters.packets[DROP_FULL] += ours.packets[DROP_FULL];
            counters.bytes[DROP_FULL] += ours.bytes[DROP_FULL];
            counters.last_ns = ours.last_ns;
            let state = maps.state()?;
            if self.root.scheme() == Scheme::Spring {
                reading.fair = Some(share_of_windows(&state));
            }
            let silent = now_ns.saturating_sub(state.flow_count.start_ns) > SILENT.0;
            reading.flow_count = (!silent).then(|| state.flow_count.before.into());
        }
        Ok(reading)
    }

    fn marked(&self, direction: Direction) -> Result<HtbMarked, LimitError> {
        let map = MapHandle::from_pinned_path(self.dir.join(MARKED_PIN))
            .map_err(map_error(MARKED_PIN))?;
        let mut sum = HtbMarked::default();
        for cpu in lookup_cpus::<HtbMarked>(&map, MARKED_PIN, self.place(direction))? {
            sum.packets += cpu.packets;
            sum.bytes += cpu.bytes;
        }
        Ok(sum)
    }
}

/// A limit whose tree is gone, or does not have it yet.
#[derive(Debug)]
pub(super) struct NoClass {
    /// The part that it lacks, by name.
    pub(super) lacks: Option<&'static str>,
}

impl Handle for NoClass {
    fn read(&self, _maps: &LimitMaps, _direction: Direction) -> Result<Reading, LimitError> {
        Ok(Reading::default())
    }

    fn missing(&self) -> Vec<&'static str> {
        self.lacks.into_iter().collect()
    }
}

/// The store changes the tree as a whole.
impl Handle for LimitClass {
    /// The backlog as a queue that would be behind by so much, and the counters: what HTB has sent, what was
    /// marked, what the queue has dropped. Bytes that were dropped are not known.
    fn read(&self, _maps: &LimitMaps, direction: Direction) -> Result<Reading, LimitError> {
        device::in_namespace(self.root.cgroup_id, || self.read_here(direction))
            .unwrap_or_else(|| Ok(Reading::default()))
    }

    fn missing(&self) -> Vec<&'static str> {
        let mut missing = if self.is_taken() { Vec::new() } else { vec!["qdisc"] };
        if self.slot == ROOT_SLOT {
            missing.extend(acks::gone(&self.dir, &self.root));
        }
        missing
    }

    fn waiting(&self, direction: Direction) -> Result<Option<Waiting>, LimitError> {
        let backlog = self.slot_of(direction).map(|slot| slot.backlog);
        match backlog.filter(|backlog| backlog.qdisc != 0) {
            Some(backlog) => waiting::look(&backlog),
            None => Ok(None),
        }
    }

    fn connections(
        &self,
        direction: Direction,
        wanted: &dyn Fn(SocketAddr, SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, SocketAddr)> {
        let dir = acks::dir_of(&self.dir, direction);
        if self.slot != ROOT_SLOT || !dir.exists() {
            return Vec::new();
        }
        AcksMaps::open(&dir).map_or_else(|_| Vec::new(), |maps| maps.known(wanted))
    }
}
