//! The schemes. Each has a module here, its eBPF programs in a folder of `bpf/`, and a row of [`SCHEMES`] in
//! `tidegate-core`, which holds all that needs no kernel.
//!
//! The store and `run` ask a scheme by the trait `Scheme`, and what a limit has in the kernel beside its
//! settings and counters by the trait `Handle`. So a new scheme is a module, two lines here and a row. By
//! name the store knows the tree of `htb`, the pools of `police`, and the qdiscs that it removes.
//!
//! [`SCHEMES`]: tidegate_core::scheme::SCHEMES

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use libbpf_rs::{MapHandle, ProgramMut};

use tidegate_core::{self as core, queue_options::ConfigError};

use crate::{
    bpf::load_error,
    cgroup::{Cgroup, Hierarchy},
    device::Target,
    fq::FqError,
    intf,
    limit::{AttachedLimit, Handle, LimitError, LimitMaps, LimitOptions, Loaded},
    remains::InTheWay,
};

pub mod acks;
pub mod edt;
pub mod htb;
pub(crate) mod nrm;
pub mod police;
mod tbf;

/// The pins of the links of a limit: of the programs for both directions, and for the sockets.
pub(crate) const LINKS: [&str; 3] = ["egress", "ingress", "sockops"];

/// Where the programs of a limit sit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttachPoint {
    Cgroup,
    Device,
    Port,
}

impl AttachPoint {
    pub(crate) fn of(limit: &intf::Limit) -> AttachPoint {
        match limit.ifindex {
            0 => AttachPoint::Cgroup,
            _ if limit.flags & intf::FLAG_PORT != 0 => AttachPoint::Port,
            _ => AttachPoint::Device,
        }
    }
}

/// A program that takes the place of another one.
pub(crate) struct Successor {
    /// The pin of the link, or beside that of the filter's program.
    pub(crate) pin: PathBuf,
    pub(crate) program: OwnedFd,
    /// Of a filter that sends packets to a device.
    pub(crate) redirected_to: Option<u32>,
}

/// Programs that are loaded, each for a link pinned in `dir`.
pub(crate) fn successors(
    dir: &Path,
    programs: &[(&str, &ProgramMut<'_>)],
) -> Result<Vec<Successor>, LimitError> {
    let successor = |(link, program): &(&str, &ProgramMut<'_>)| {
        let program = program.as_fd().try_clone_to_owned();
        let program = program.map_err(|e| load_error("successor")(e.into()))?;
        Ok(Successor { pin: dir.join(link), program, redirected_to: None })
    };
    programs.iter().map(successor).collect()
}

/// A limit as it is pinned.
pub(crate) struct Pinned<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) limit: &'a intf::Limit,
    /// The options that the user has asked for.
    pub(crate) asked: &'a LimitOptions,
    /// Where it shares maps with others: the directory of their pool, and its slot there.
    pub(crate) pool: Option<(&'a Path, u32)>,
}

/// The maps of a program, by the kernel's name for them, of 15 letters at most.
pub(crate) type MapsByName = BTreeMap<String, MapHandle>;

/// How the limits of a scheme are pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pinning {
    /// Each has its own maps and programs.
    Own,
    /// Limits on cgroups share maps and programs (see `store/slots.rs`). The others have their own.
    Shared,
    /// Those on and inside a device are one tree of classes (see `store/htb.rs`).
    Tree,
}

/// Which programs a limit gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Programs {
    /// The programs of both directions, so that its settings can be changed in place.
    All,
    /// The programs that its settings need, as these will not change. No limit can be inside it.
    Needed,
}

/// A scheme in the kernel. The store takes a limit off: it detaches the links and removes the pins,
/// the qdisc at the root of the device and the ifb device. A scheme that leaves more than that adds it to
/// `store/recover.rs`.
pub(crate) trait Scheme: Sync {
    /// The names of the links of a limit, of those that the store detaches: `LINKS` and `XDP_PIN`. On a
    /// device the direction of the workload names them.
    fn links(&self, limit: &intf::Limit) -> &'static [&'static str];

    /// Makes the maps of a limit for cgroups, writes settings and exempt prefixes, loads the programs, and
    /// attaches nothing. It is for the cgroup of this id, or for any with 0. Inside another limit it gets its
    /// part of `parent`.
    ///
    /// # Errors
    /// [`LimitError`].
    fn load(
        &self,
        _cgroup_id: u64,
        options: &LimitOptions,
        _parent: Option<&LimitMaps>,
        _programs: Programs,
    ) -> Result<Loaded, LimitError> {
        Err(ConfigError::Scheme(options.scheme).into())
    }

    /// Loads the programs of a limit, writes the settings, and attaches the programs to a device, in whose
    /// network namespace it runs. All that can be refused before is refused before it removes what is
    /// `in_the_way`. A qdisc that somebody has put there is only replaced with its `force`.
    /// Directions are those of the workload: on a port, what leaves the device is its ingress.
    ///
    /// # Errors
    /// [`LimitError`]; nothing is attached.
    fn attach_device(
        &self,
        _hierarchy: &Hierarchy,
        _target: &Target,
        options: &LimitOptions,
        _in_the_way: &InTheWay,
    ) -> Result<AttachedLimit, LimitError> {
        Err(ConfigError::Scheme(options.scheme).into())
    }

    /// Loads the programs of a limit that is pinned in `dir` once more, with the maps that it has, when
    /// another build has loaded them. A link without a successor keeps the program of that build. Who was
    /// killed begins again.
    ///
    /// # Errors
    /// [`LimitError`]; nothing is attached.
    fn reload(
        &self,
        dir: &Path,
        limit: &intf::Limit,
        maps: &LimitMaps,
    ) -> Result<Vec<Successor>, LimitError>;

    /// Opens what a limit that is pinned has beside its settings and counters: all of [`Handle::maps`], by
    /// its name.
    ///
    /// # Errors
    /// [`LimitError`].
    fn open(&self, pinned: &Pinned<'_>) -> Result<Box<dyn Handle>, LimitError>;

    /// The same of a limit that nobody has pinned, for reading. It takes its own maps out of those of the
    /// egress program on a cgroup. `None`: such a limit is not seen.
    fn of_program(&self, maps: &mut MapsByName) -> Option<Box<dyn Handle>>;

    /// How its limits are pinned.
    fn pinning(&self) -> Pinning {
        Pinning::Own
    }

    /// Whether its programs end a rate that is lent, by themselves, when its time is over. Not so where a
    /// qdisc keeps the rate.
    fn ends_leases(&self) -> bool {
        true
    }

    /// Why packets would not be kept until their departure, where the scheme gives them one.
    fn why_unkept(
        &self,
        _hierarchy: &Hierarchy,
        _scope: &core::Scope,
        _cgroup: Option<&Cgroup>,
    ) -> Option<FqError> {
        None
    }
}

/// Whether a limit shares programs with others.
pub(crate) fn share_programs(options: &LimitOptions) -> bool {
    of(options.scheme).pinning() == Pinning::Shared
}

/// A scheme by its name.
pub(crate) fn of(scheme: core::Scheme) -> &'static dyn Scheme {
    match scheme {
        core::Scheme::Pace | core::Scheme::Nrm => &nrm::Nrm,
        core::Scheme::Edt => &edt::Edt,
        core::Scheme::Police => &police::Police,
        core::Scheme::Htb => &htb::HTB,
        core::Scheme::Dem | core::Scheme::Spring => &htb::WITH_ACKS,
        core::Scheme::Carousel => &InUserSpace,
        core::Scheme::Tbf => &tbf::TokenBucketFilter,
    }
}

/// Whether a rate that is lent to a limit of this scheme ends by itself.
pub fn ends_leases(scheme: core::Scheme) -> bool {
    of(scheme).ends_leases()
}

/// Whether a limit needs other programs, or maps, to become another one. Else its settings are changed in
/// place.
pub fn needs_other_programs(from: &LimitOptions, to: &LimitOptions) -> bool {
    let programs = |options: &LimitOptions| {
        let info = options.scheme.info();
        // Each direction of a qdisc has a device of its own.
        let directions = (options.egress.is_some(), options.ingress.is_some());
        let qdisc = info.has_qdisc.then_some((options.scheme, directions));
        (info.cgroup_programs, info.device_programs, qdisc)
    };
    programs(from) != programs(to)
        || from.exempt.is_empty() != to.exempt.is_empty()
        // Limits that share programs share the prefixes that they exempt.
        || (of(to.scheme).pinning() == Pinning::Shared
            && from.exempt.prefixes != to.exempt.prefixes)
        || from.matched.is_empty() != to.matched.is_empty()
}

/// Scheme `carousel`: it has nothing in the kernel.
struct InUserSpace;

impl Scheme for InUserSpace {
    fn links(&self, _limit: &intf::Limit) -> &'static [&'static str] {
        &[]
    }

    fn reload(
        &self,
        _dir: &Path,
        _limit: &intf::Limit,
        _maps: &LimitMaps,
    ) -> Result<Vec<Successor>, LimitError> {
        Ok(Vec::new())
    }

    fn open(&self, pinned: &Pinned<'_>) -> Result<Box<dyn Handle>, LimitError> {
        Err(ConfigError::Scheme(pinned.limit.scheme()).into())
    }

    fn of_program(&self, _maps: &mut MapsByName) -> Option<Box<dyn Handle>> {
        None
    }
}
