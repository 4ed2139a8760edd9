//! What a limit does for a group of hosts: its arrivals and the bytes of its flows are measured, and packets
//! dropped at random. The rate is the limit's own.
//!
//! Scheme `police` does all of it, on cgroups, devices and ports; of others arrivals are known, of `dem` and
//! `spring` also how many flows take all they get. A limit needs
//! no preparation: the first [`LimitMaps::measure`] of a direction has its flows counted from then on, and
//! [`LimitMaps::leave_group`] ends that. All state is in pinned maps, so a daemon that comes back goes on
//! where it was, and while it is away packets are dropped at the last probability.
//!
//! Flows are counted in buffers of fixed size, one for each CPU ([`tidegate_core::fleet::flows`]): [`SETS`] x
//! [`WAYS`] cells of 16 bytes, twice, so that packets fill one buffer while the other is read and cleared. A
//! packet that is on its way through the program while the buffers change may count an interval later.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd},
    path::PathBuf,
};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType, libbpf_sys};
use tidegate_core::{
    Direction, census,
    fleet::{
        flows::{FlowBytes, SETS, WAYS, merge},
        grd,
    },
};

use crate::{
    intf,
    limit::{LimitError, LimitMaps, Reading, lookup, map_error},
};

/// The pins of the buffers in `samples`, by direction.
const SAMPLE_PINS: [&str; intf::DIRECTIONS] = ["sample_egress", "sample_ingress"];
/// Most flows that a measurement has: so many on each CPU.
pub const FLOWS_PER_CPU: usize = SETS * WAYS;

/// The maps of a limit that can act for a group.
#[derive(Debug)]
pub(crate) struct GroupMaps {
    pub(crate) group: MapHandle,
    pub(crate) samples: MapHandle,
    /// Where the limit is pinned, if it is.
    pub(crate) dir: Option<PathBuf>,
}

/// Packets and their bytes on the wire.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Packets, of which one that is still to be cut into segments is one.
    pub packets: u64,
    /// Bytes on the wire.
    pub bytes: u64,
}

/// One direction of a limit, measured.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Measured {
    /// All that came since the limit was put on, before any was dropped; not what is exempt.
    pub arrived: Traffic,
    /// Of this what went on.
    pub passed: Traffic,
    /// Of this what made a sender slower: marked, told or dropped.
    pub slowed: Traffic,
    /// The bytes of flows since the last measurement, before any was dropped, by flow, each once. The first
    /// time, and where flows are not counted, there are none.
    pub flows: Vec<FlowBytes>,
    /// With schemes `dem` and `spring`: the flows of the last period, if there was one lately.
    pub census: Option<census::Sums>,
}

impl intf::Counters {
    /// What met one of the outcomes.
    #[must_use]
    pub fn of(&self, wanted: impl Fn(&intf::Outcome) -> bool) -> Traffic {
        let mut sum = Traffic::default();
        for (index, outcome) in intf::OUTCOME_TABLE.iter().enumerate() {
            if wanted(outcome) {
                sum.packets += self.packets[index];
                sum.bytes += self.bytes[index];
            }
        }
        sum
    }

    /// All that came, before any was dropped; not what is exempt.
    #[must_use]
    pub fn arrived(&self) -> Traffic {
        self.of(|outcome| outcome.name != "exempt")
    }
}

impl LimitMaps {
    /// Measures a direction, and begins the next interval of its flows. One process at a time: two that
    /// measure take flows from each other.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn measure(&self, direction: Direction) -> Result<Measured, LimitError> {
        let flows = match &self.group {
            Some(group) => group.take_flows(direction)?,
            None => Vec::new(),
        };
        let Reading { counters, census, .. } = self.read(direction)?;
        Ok(Measured {
            arrived: counters.arrived(),
            passed: counters.of(|outcome| outcome.passed && outcome.name != "exempt"),
            slowed: counters.of(intf::Outcome::slows),
            flows,
            census,
        })
    }

    /// Has each packet of a direction dropped with this probability, 0 to 1 in steps of 2^-32, before the
    /// limit itself sees it; counted as `drop_early`. It stays until it is set anew. False if the scheme
    /// cannot.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`]; the earlier probability is in force.
    pub fn set_drop(&self, direction: Direction, probability: f64) -> Result<bool, LimitError> {
        let Some(group) = &self.group else { return Ok(false) };
        let now = group.get(direction)?;
        group.set(direction, intf::Group { drop: grd::threshold(probability), ..now })?;
        Ok(true)
    }

    /// The probability that is set.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn drop_probability(&self, direction: Direction) -> Result<f64, LimitError> {
        let Some(group) = &self.group else { return Ok(0.0) };
        Ok(f64::from(group.get(direction)?.drop) / 4_294_967_296.0)
    }

    /// Nothing is dropped at random any more, flows are not counted, and the memory for them is given back.
    ///
    /// # Errors
    /// [`LimitError::Map`].
    pub fn leave_group(&self, direction: Direction) -> Result<(), LimitError> {
        let Some(group) = &self.group else { return Ok(()) };
        group.set(direction, intf::Group::default())?;
        if group.sample(direction)?.is_some() {
            group.samples.delete(&key(direction)).map_err(map_error("samples"))?;
        }
        group.unpin_sample(direction);
        Ok(())
    }
}

fn key(direction: Direction) -> [u8; 4] {
    (intf::index(direction) as u32).to_ne_bytes()
}

impl GroupMaps {
    fn get(&self, direction: Direction) -> Result<intf::Group, LimitError> {
        lookup(&self.group, "group", intf::index(direction) as u32)
    }

    fn set(&self, direction: Direction, group: intf::Group) -> Result<(), LimitError> {
        self.group
            .update(&key(direction), bytemuck::bytes_of(&group), MapFlags::ANY)
            .map_err(map_error("group"))
    }

    /// The buffers of a direction; `None` as long as none are made, or if they cannot be opened.
    pub(crate) fn sample(&self, direction: Direction) -> Result<Option<MapHandle>, LimitError> {
        let id = self.samples.lookup(&key(direction), MapFlags::ANY);
        // What user space sees of a map in a map is its number, by which only `CAP_SYS_ADMIN` opens it. So
        // the buffers of a pinned limit are pinned, too.
        let id = id.map_err(map_error("samples"))?;
        let id = id.and_then(|id| Some(u32::from_ne_bytes(id.as_slice().try_into().ok()?)));
        let Some(id) = id else { return Ok(None) };
        let pinned = self.pin_of(direction).and_then(|pin| MapHandle::from_pinned_path(pin).ok());
        let is_it = |map: &MapHandle| map.info().is_ok_and(|info| info.info.id == id);
        if let Some(pinned) = pinned.filter(is_it) {
            return Ok(Some(pinned));
        }
        match MapHandle::from_map_id(id) {
            Err(e) if e.kind() == ErrorKind::PermissionDenied => Ok(None),
            opened => opened.map(Some).map_err(map_error("samples")),
        }
    }

    fn pin_of(&self, direction: Direction) -> Option<PathBuf> {
        let name = SAMPLE_PINS[intf::index(direction)];
        self.dir.as_ref().map(|dir| dir.join(name))
    }

    fn unpin_sample(&self, direction: Direction) {
        if let Some(pin) = self.pin_of(direction) {
            let _ = fs::remove_file(pin);
        }
    }

    fn make_sample(&self, direction: Direction) -> Result<(), LimitError> {
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
            ..Default::default()
        };
        let (key_bytes, cells) = (size_of::<u32>() as u32, size_of::<intf::FlowCells>() as u32);
        let (kind, name) = (MapType::PercpuArray, Some("flows"));
        let mut sample = MapHandle::create(kind, name, key_bytes, cells, intf::BUFFERS, &options)
            .map_err(map_error("samples"))?;
        if let Some(pin) = self.pin_of(direction) {
            self.unpin_sample(direction);
            sample.pin(pin).map_err(map_error("samples"))?;
        }
        let fd = sample.as_fd().as_raw_fd().to_ne_bytes();
        self.samples.update(&key(direction), &fd, MapFlags::ANY).map_err(map_error("samples"))
    }

    /// The flows that were counted since the last time.
    fn take_flows(&self, direction: Direction) -> Result<Vec<FlowBytes>, LimitError> {
        let now = self.get(direction)?;
        let Some(sample) = self.sample(direction)? else {
            self.make_sample(direction)?;
            self.set(direction, intf::Group { sample: 1, ..now })?;
            return Ok(Vec::new());
        };
        let next = if now.sample == 1 { 2 } else { 1 };
        self.set(direction, intf::Group { sample: next, ..now })?;
        let Some(ended) = now.sample.checked_sub(1).map(u32::to_ne_bytes) else {
            return Ok(Vec::new());
        };
        let cpus = sample.lookup_percpu(&ended, MapFlags::ANY).map_err(map_error("flows"))?;
        let cpus = cpus.ok_or(LimitError::Layout("flows"))?;
        let mut flows = Vec::new();
        for cpu in &cpus {
            let cells: intf::FlowCells =
                bytemuck::try_pod_read_unaligned(cpu).map_err(|_| LimitError::Layout("flows"))?;
            let taken = cells.sets.iter().flatten().filter(|cell| cell.flow != 0);
            flows.extend(taken.map(|cell| FlowBytes { flow: cell.flow, bytes: cell.bytes }));
        }
        let empty = vec![vec![0; size_of::<intf::FlowCells>()]; cpus.len()];
        sample.update_percpu(&ended, &empty, MapFlags::ANY).map_err(map_error("flows"))?;
        merge(&mut flows);
        Ok(flows)
    }
}

#[cfg(test)]
mod tests;
