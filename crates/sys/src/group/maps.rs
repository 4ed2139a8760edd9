//! The maps by which a limit acts for a group.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd},
    path::PathBuf,
};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType};
use tidegate_core::{
    Direction,
    fleet::flows::{FlowBytes, merge},
};

use crate::{
    bpf::{create_map, lookup, map_error},
    intf,
    limit::LimitError,
};

/// The pins of the buffers in `samples`, by direction.
const SAMPLE_PINS: [&str; intf::DIRECTIONS] = ["sample_egress", "sample_ingress"];
/// The maps of a limit that can act for a group.
#[derive(Debug)]
pub(crate) struct GroupMaps {
    pub(crate) group: MapHandle,
    pub(crate) samples: MapHandle,
    /// Where the limit is pinned, if it is.
    pub(crate) dir: Option<PathBuf>,
}

fn key(direction: Direction) -> [u8; 4] {
    (intf::index(direction) as u32).to_ne_bytes()
}

impl GroupMaps {
    pub(super) fn get(&self, direction: Direction) -> Result<intf::Group, LimitError> {
        lookup(&self.group, "group", intf::index(direction) as u32)
    }

    pub(super) fn set(&self, direction: Direction, group: intf::Group) -> Result<(), LimitError> {
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

    /// Gives the memory of the buffers back.
    pub(super) fn remove_sample(&self, direction: Direction) -> Result<(), LimitError> {
        if self.sample(direction)?.is_some() {
            self.samples.delete(&key(direction)).map_err(map_error("samples"))?;
        }
        self.unpin_sample(direction);
        Ok(())
    }

    fn make_sample(&self, direction: Direction) -> Result<(), LimitError> {
        let cells = size_of::<intf::FlowCells>();
        let sample = create_map(MapType::PercpuArray, "flows", cells, intf::BUFFERS);
        let mut sample = sample.map_err(map_error("samples"))?;
        if let Some(pin) = self.pin_of(direction) {
            self.unpin_sample(direction);
            sample.pin(pin).map_err(map_error("samples"))?;
        }
        let fd = sample.as_fd().as_raw_fd().to_ne_bytes();
        self.samples.update(&key(direction), &fd, MapFlags::ANY).map_err(map_error("samples"))
    }

    /// The flows that were counted since the last time.
    pub(super) fn take_flows(&self, direction: Direction) -> Result<Vec<FlowBytes>, LimitError> {
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
            let taken = cells.set.iter().flatten().filter(|cell| cell.flow != 0);
            flows.extend(taken.map(|cell| FlowBytes { flow: cell.flow, bytes: cell.bytes }));
        }
        let empty = vec![vec![0; size_of::<intf::FlowCells>()]; cpus.len()];
        sample.update_percpu(&ended, &empty, MapFlags::ANY).map_err(map_error("flows"))?;
        merge(&mut flows);
        Ok(flows)
    }
}
