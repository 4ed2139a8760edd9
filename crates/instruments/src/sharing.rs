//! Ways in which many limits on cgroups can share programs, to compare what a limit and a packet cost.
//!
//! `bpf/sharing.bpf.c` has the programs: virtual queues without a fair share. Nothing is pinned: all goes
//! with [`Limits`].

use std::{
    collections::BTreeMap,
    fs, io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapType, libbpf_sys,
    skel::{OpenSkel, Skel, SkelBuilder},
};
use tidegate_core::{Direction, Rate, virtual_queue::cost_of_byte};
use tidegate_sys::{cgroup::Cgroup, intf};

use crate::skel;

/// Limits of a chunk.
const CHUNK: u32 = 32;
const HOOKS: [(&str, libbpf_sys::bpf_attach_type); 3] = [
    ("egress", libbpf_sys::BPF_CGROUP_INET_EGRESS),
    ("ingress", libbpf_sys::BPF_CGROUP_INET_INGRESS),
    ("sockops", libbpf_sys::BPF_CGROUP_SOCK_OPS),
];

/// How limits find their state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Each limit has programs and maps of its own.
    Own,
    /// The storage of the cgroup has an index into pooled maps.
    Slot,
    /// The same, with pools of 32 limits in a map of maps.
    Chunk,
    /// The storage of the cgroup is the state.
    Whole,
    /// A hash table has the index, by the id of the cgroup at a level.
    Ancestor,
}

impl Sharing {
    /// All ways.
    pub const ALL: [Sharing; 5] =
        [Sharing::Own, Sharing::Slot, Sharing::Chunk, Sharing::Whole, Sharing::Ancestor];

    /// The first word of the names of its programs and maps.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Sharing::Own => "own",
            Sharing::Slot => "slot",
            Sharing::Chunk => "chunk",
            Sharing::Whole => "whole",
            Sharing::Ancestor => "ancestor",
        }
    }

    /// One loaded copy serves many limits.
    fn is_shared(self) -> bool {
        self != Sharing::Own
    }

    /// The map that says which limit a cgroup has.
    fn places(self) -> Option<&'static str> {
        match self {
            Sharing::Slot => Some("slot_places"),
            Sharing::Chunk => Some("chunk_places"),
            Sharing::Ancestor => Some("ancestor_places"),
            Sharing::Own | Sharing::Whole => None,
        }
    }
}

/// Why programs cannot be loaded, attached or read.
#[derive(Debug, thiserror::Error)]
pub enum SharingError {
    /// libbpf refused.
    #[error("cannot {0}: {1}")]
    Bpf(&'static str, libbpf_rs::Error),
    /// The kernel refused.
    #[error("cannot {0}: {1}")]
    Kernel(&'static str, io::Error),
    /// A map or program is not there.
    #[error("{0} is missing; rebuild")]
    Missing(String),
    /// Only the storage of a cgroup can hold a limit's index for more cgroups.
    #[error("way `{0}` has no limits over several cgroups")]
    OneCgroup(&'static str),
}

fn failed(what: &'static str) -> impl FnOnce(libbpf_rs::Error) -> SharingError {
    move |source| SharingError::Bpf(what, source)
}

/// The kernel memory of maps and programs, as it charges them itself, and their number. What the kernel
/// allocates for a cgroup's storage and for links is in no map's figure.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Of all maps, in bytes.
    pub maps: u64,
    /// Of all programs, in bytes.
    pub programs: u64,
}

/// A loaded copy of the programs, with its maps.
#[derive(Debug)]
struct Copy {
    programs: Vec<OwnedFd>,
    maps: BTreeMap<String, MapHandle>,
}

impl Copy {
    /// `limits`: its capacity; `level`: of the cgroups; `with`: the maps of an earlier copy.
    fn load(
        sharing: Sharing,
        limits: u32,
        level: u32,
        with: Option<&Copy>,
    ) -> Result<Copy, SharingError> {
        let mut storage = MaybeUninit::uninit();
        let mut open = skel::sharing::SharingSkelBuilder::default()
            .open(&mut storage)
            .map_err(failed("open the programs"))?;
        if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
            rodata.level = level;
        }
        let of_way = |name: &str| name.starts_with(sharing.name());
        for mut program in open.open_object_mut().progs_mut() {
            let wanted = program.name().to_str().is_some_and(of_way);
            program.set_autoload(wanted);
        }
        for mut map in open.open_object_mut().maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            if name.ends_with(".rodata") {
                continue;
            }
            if !of_way(&name) {
                map.set_autocreate(false).map_err(failed("leave a map out"))?;
                continue;
            }
            if let Some(earlier) = with.and_then(|copy| copy.maps.get(&name)) {
                map.reuse_fd(earlier.as_fd()).map_err(failed("reuse a map"))?;
            } else if sharing == Sharing::Chunk && map.map_type() == MapType::ArrayOfMaps {
                let chunks = limits.div_ceil(CHUNK);
                map.set_max_entries(chunks).map_err(failed("size a map"))?;
            } else if sharing.is_shared() && map.max_entries() != 0 {
                let entries = map.max_entries() * limits;
                map.set_max_entries(entries).map_err(failed("size a map"))?;
            }
        }
        let loaded = open.load().map_err(failed("load the programs"))?;
        let mut maps = BTreeMap::new();
        for map in loaded.object().maps() {
            let name = map.name().to_string_lossy().into_owned();
            if of_way(&name) {
                maps.insert(name, MapHandle::try_from(&map).map_err(failed("keep a map"))?);
            }
        }
        let mut programs = Vec::new();
        for (hook, _) in HOOKS {
            let name = format!("{}_{hook}", sharing.name());
            let program = loaded.object().progs().find(|p| p.name().to_str() == Some(&name));
            let program = program.ok_or(SharingError::Missing(name))?;
            let fd = program.as_fd().try_clone_to_owned();
            programs.push(fd.map_err(|e| SharingError::Kernel("keep a program", e))?);
        }
        let copy = Copy { programs, maps };
        if sharing == Sharing::Chunk && with.is_none() {
            copy.fill_chunks(limits.div_ceil(CHUNK))?;
        }
        Ok(copy)
    }

    fn fill_chunks(&self, chunks: u32) -> Result<(), SharingError> {
        for (name, kind, value_bytes, entries) in [
            ("chunk_limits", MapType::Array, size_of::<intf::Limit>(), intf::LIMITS),
            ("chunk_queues", MapType::Array, size_of::<intf::NrmQueue>(), intf::DIRECTIONS),
            ("chunk_counters", MapType::PercpuArray, size_of::<intf::Counters>(), intf::DIRECTIONS),
        ] {
            for chunk in 0..chunks {
                let opts = libbpf_sys::bpf_map_create_opts {
                    sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
                    ..libbpf_sys::bpf_map_create_opts::default()
                };
                let entries = CHUNK * entries as u32;
                let map =
                    MapHandle::create(kind, Some("chunk"), 4, value_bytes as u32, entries, &opts)
                        .map_err(failed("make a chunk"))?;
                let fd = map.as_fd().as_raw_fd().to_ne_bytes();
                self.map(name)?
                    .update(&chunk.to_ne_bytes(), &fd, MapFlags::ANY)
                    .map_err(failed("add a chunk"))?;
            }
        }
        Ok(())
    }

    fn map(&self, name: &str) -> Result<&MapHandle, SharingError> {
        self.maps.get(name).ok_or_else(|| SharingError::Missing(name.to_owned()))
    }

    /// A map of the pool, and where in it a slot begins.
    fn pooled(&self, name: &str, slot: u32) -> Result<(MapHandle, u32), SharingError> {
        let map = self.map(name)?;
        if map.map_type() != MapType::ArrayOfMaps {
            let again = MapHandle::try_from(map).map_err(failed("open a map"))?;
            return Ok((again, slot));
        }
        let id = map.lookup(&(slot / CHUNK).to_ne_bytes(), MapFlags::ANY);
        let id = id.map_err(failed("find a chunk"))?.and_then(|id| id.try_into().ok());
        let id =
            id.map(u32::from_ne_bytes).ok_or_else(|| SharingError::Missing(name.to_owned()))?;
        Ok((MapHandle::from_map_id(id).map_err(failed("open a chunk"))?, slot % CHUNK))
    }
}

/// A cgroup in a limit: the links at its hooks.
#[derive(Debug)]
struct Member {
    limit: u32,
    cgroup: u64,
    links: Vec<OwnedFd>,
}

/// Limits on cgroups, by number from 1 on.
#[derive(Debug)]
pub struct Limits {
    sharing: Sharing,
    /// Of a way without sharing one for each limit, from the first on.
    copies: Vec<Copy>,
    capacity: u32,
    level: u32,
    members: Vec<Member>,
}

impl Limits {
    /// Loads programs and maps for limits 1 to `limits`, on cgroups at one level of the hierarchy (which
    /// matters to [`Sharing::Ancestor`] alone).
    ///
    /// # Errors
    /// [`SharingError`].
    pub fn new(sharing: Sharing, limits: u32, level: u32) -> Result<Limits, SharingError> {
        libbpf_rs::set_print(None);
        let capacity = limits + 1;
        let copies = match sharing.is_shared() {
            true => vec![Copy::load(sharing, capacity, level, None)?],
            false => Vec::new(),
        };
        Ok(Limits { sharing, copies, capacity, level, members: Vec::new() })
    }

    fn copy(&self, limit: u32) -> Result<&Copy, SharingError> {
        let index = if self.sharing.is_shared() { 0 } else { limit as usize - 1 };
        self.copies.get(index).ok_or_else(|| SharingError::Missing(format!("limit {limit}")))
    }

    /// Puts a limit on a cgroup. It is the next one, or one that exists: then it has one more cgroup.
    ///
    /// # Errors
    /// [`SharingError`].
    pub fn attach(&mut self, limit: u32, cgroup: &Cgroup, rate: Rate) -> Result<(), SharingError> {
        if !self.sharing.is_shared() && limit as usize > self.copies.len() {
            self.copies.push(Copy::load(self.sharing, 1, self.level, None)?);
        }
        let is_new = !self.members.iter().any(|member| member.limit == limit);
        if !is_new && self.sharing == Sharing::Whole {
            return Err(SharingError::OneCgroup(self.sharing.name()));
        }
        if is_new && self.sharing != Sharing::Whole {
            self.write(limit, rate)?;
        }
        let copy = self.copy(limit)?;
        let mut links = Vec::new();
        for ((_, hook), program) in HOOKS.into_iter().zip(&copy.programs) {
            links.push(link(program.as_fd(), cgroup.as_fd(), hook)?);
        }
        // The kernel makes the storage of a cgroup when the first program with it is attached.
        let key = cgroup.id().to_ne_bytes();
        if let Some(places) = self.sharing.places() {
            let place = [limit, 0].map(u32::to_ne_bytes).concat();
            copy.map(places)?
                .update(&key, &place, MapFlags::ANY)
                .map_err(failed("write the place of a cgroup"))?;
        } else if self.sharing == Sharing::Whole {
            let mut state = bytemuck::bytes_of(&[conf(rate); intf::DIRECTIONS]).to_vec();
            state.extend(vec![0; intf::DIRECTIONS * size_of::<intf::NrmQueue>()]);
            copy.map("whole_states")?
                .update(&key, &state, MapFlags::ANY)
                .map_err(failed("write the state of a cgroup"))?;
        }
        self.members.push(Member { limit, cgroup: cgroup.id(), links });
        Ok(())
    }

    /// Takes a cgroup out of its limit.
    pub fn detach(&mut self, cgroup: &Cgroup) {
        self.members.retain(|member| member.cgroup != cgroup.id());
    }

    /// Attaches a cgroup that has been in the limit before, without writing to any map.
    ///
    /// # Errors
    /// [`SharingError`].
    pub fn attach_again(&mut self, limit: u32, cgroup: &Cgroup) -> Result<(), SharingError> {
        let mut links = Vec::new();
        for ((_, hook), program) in HOOKS.into_iter().zip(&self.copy(limit)?.programs) {
            links.push(link(program.as_fd(), cgroup.as_fd(), hook)?);
        }
        self.members.push(Member { limit, cgroup: cgroup.id(), links });
        Ok(())
    }

    /// Loads the programs anew, with the same maps, and puts them in the place of the earlier ones: no
    /// packet passes without a program. Returns the ids of the programs at the first cgroup.
    ///
    /// # Errors
    /// [`SharingError`].
    pub fn replace_programs(&mut self) -> Result<(), SharingError> {
        let capacity = self.capacity;
        for (index, earlier) in self.copies.iter_mut().enumerate() {
            let copy = Copy::load(self.sharing, capacity, self.level, Some(earlier))?;
            let is_mine =
                |member: &&Member| self.sharing.is_shared() || member.limit as usize == index + 1;
            for member in self.members.iter().filter(is_mine) {
                for (link, program) in member.links.iter().zip(&copy.programs) {
                    update_link(link.as_fd(), program.as_fd())?;
                }
            }
            *earlier = copy;
        }
        Ok(())
    }

    fn write(&self, limit: u32, rate: Rate) -> Result<(), SharingError> {
        let settings = intf::Limit { queue: [conf(rate); intf::DIRECTIONS], ..Default::default() };
        let slot = if self.sharing.is_shared() { limit } else { 0 };
        let name = format!("{}_limits", self.sharing.name());
        let (map, slot) = self.copy(limit)?.pooled(&name, slot)?;
        let key = (slot * intf::LIMITS as u32).to_ne_bytes();
        map.update(&key, bytemuck::bytes_of(&settings), MapFlags::ANY)
            .map_err(failed("write a limit"))
    }

    /// Packets and bytes that have passed in all cgroups of a limit.
    ///
    /// # Errors
    /// [`SharingError`].
    pub fn passed(&self, limit: u32, direction: Direction) -> Result<(u64, u64), SharingError> {
        let copy = self.copy(limit)?;
        let index = intf::index(direction);
        let size = size_of::<intf::Counters>();
        let (map, key, at) = if self.sharing == Sharing::Whole {
            let member = self.members.iter().find(|member| member.limit == limit);
            let id = member.map_or(0, |member| member.cgroup);
            let map = MapHandle::try_from(copy.map("whole_counters")?);
            (map.map_err(failed("open a map"))?, id.to_ne_bytes().to_vec(), index * size)
        } else {
            let slot = if self.sharing.is_shared() { limit } else { 0 };
            let (map, slot) = copy.pooled(&format!("{}_counters", self.sharing.name()), slot)?;
            let key = slot * intf::DIRECTIONS as u32 + index as u32;
            (map, key.to_ne_bytes().to_vec(), 0)
        };
        // libbpf-rs reads values of per-CPU arrays and hashes alone by CPU.
        let cpus = libbpf_rs::num_possible_cpus().map_err(failed("count the CPUs"))?;
        let stride = (map.value_size() as usize).next_multiple_of(8);
        let mut values = vec![0u8; stride * cpus];
        // SAFETY: the descriptor is open, the key has the length of the map's keys, and `values` has room for
        // one value a possible CPU, each rounded up to eight bytes, as the kernel writes them.
        let ret = unsafe {
            libbpf_sys::bpf_map_lookup_elem(
                map.as_fd().as_raw_fd(),
                key.as_ptr().cast(),
                values.as_mut_ptr().cast(),
            )
        };
        if ret < 0 {
            return Err(SharingError::Kernel("read counters", io::Error::from_raw_os_error(-ret)));
        }
        let one = |cpu: &[u8]| -> Option<(u64, u64)> {
            let one: intf::Counters =
                bytemuck::try_pod_read_unaligned(cpu.get(at..at + size)?).ok()?;
            Some((one.packets[0], one.bytes[0]))
        };
        let sum = |(p, b), (q, c)| (p + q, b + c);
        Ok(values.chunks_exact(stride).filter_map(one).fold((0, 0), sum))
    }

    /// What maps and programs take.
    ///
    /// # Errors
    /// [`SharingError::Kernel`].
    pub fn memory(&self) -> Result<Memory, SharingError> {
        let mut memory = Memory::default();
        for copy in &self.copies {
            for program in &copy.programs {
                memory.programs += of_descriptor(program.as_fd(), "memlock")?;
            }
            for map in copy.maps.values() {
                memory.maps += of_descriptor(map.as_fd(), "memlock")?;
            }
            if self.sharing == Sharing::Chunk {
                for name in ["chunk_limits", "chunk_queues", "chunk_counters"] {
                    for slot in (0..self.capacity).step_by(CHUNK as usize) {
                        let (chunk, _) = copy.pooled(name, slot)?;
                        memory.maps += of_descriptor(chunk.as_fd(), "memlock")?;
                    }
                }
            }
        }
        Ok(memory)
    }

    /// Run time in nanoseconds and runs of all egress programs, which the kernel counts while
    /// `kernel.bpf_stats_enabled` is 1.
    ///
    /// # Errors
    /// [`SharingError::Kernel`].
    pub fn egress_runs(&self) -> Result<(u64, u64), SharingError> {
        let mut sum = (0, 0);
        for program in self.copies.iter().filter_map(|copy| copy.programs.first()) {
            sum.0 += of_descriptor(program.as_fd(), "run_time_ns")?;
            sum.1 += of_descriptor(program.as_fd(), "run_cnt")?;
        }
        Ok(sum)
    }
}

/// A limit with the usual thresholds.
fn conf(rate: Rate) -> intf::QueueConf {
    intf::QueueConf {
        cost: cost_of_byte(rate),
        burst_ns: 1_000_000,
        mark_ns: 5_000_000,
        large_drop_ns: 8_000_000,
        drop_ns: 10_000_000,
    }
}

/// A number that the kernel says of an open map or program.
fn of_descriptor(fd: BorrowedFd<'_>, word: &str) -> Result<u64, SharingError> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
    let text = fs::read_to_string(path).map_err(|e| SharingError::Kernel("read fdinfo", e))?;
    let line = text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(':'));
    line.and_then(|value| value.trim().parse().ok())
        .ok_or_else(|| SharingError::Missing(word.to_owned()))
}

fn link(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    hook: libbpf_sys::bpf_attach_type,
) -> Result<OwnedFd, SharingError> {
    // SAFETY: both descriptors are open, and no options are given.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(program.as_raw_fd(), cgroup.as_raw_fd(), hook, std::ptr::null())
    };
    if fd < 0 {
        return Err(SharingError::Kernel("attach a program", io::Error::from_raw_os_error(-fd)));
    }
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> Result<(), SharingError> {
    // SAFETY: both descriptors are open, and no options are given.
    let ret = unsafe {
        libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), std::ptr::null())
    };
    if ret < 0 {
        return Err(SharingError::Kernel("replace a program", io::Error::from_raw_os_error(-ret)));
    }
    Ok(())
}
