//! The programs of scheme `edt`: on a cgroup, on what leaves by a device, or on what comes in by a port (see
//! [`crate::device`]).

use std::{mem::MaybeUninit, path::Path};

use libbpf_rs::{MapHandle, OpenObject, ProgramMut, skel::OpenSkel};
use tidegate_core::{Direction, Scope};

use crate::{
    bpf::{
        self, load_error, load_skel, lookup, open_array, open_fitted, prepare, random_seed, reuse,
    },
    cgroup::{Cgroup, Hierarchy},
    device::{self, Target},
    exempt::set_exempt,
    fq::{self, FqError},
    intf,
    limit::{
        AttachedLimit, FairShare, Handle, LimitError, LimitMaps, LimitOptions, Loaded, Reading,
    },
    remains::InTheWay,
    schemes::{AttachPoint, LINKS, MapsByName, Pinned, Programs, Scheme, Successor, successors},
    skel,
};

/// For which limit a program is loaded.
enum Work<'a> {
    /// A new one.
    New(&'a intf::Entry, &'a LimitOptions),
    /// One that is there, with its maps.
    Again(&'a LimitMaps),
}

/// Loads the program of one place and hands it to `use_it`.
fn load<T>(
    place: AttachPoint,
    work: Work<'_>,
    use_it: impl FnOnce(&ProgramMut<'_>) -> Result<T, LimitError>,
) -> Result<(LimitMaps, T), LimitError> {
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let mut open = open_fitted!(skel::edt::EdtSkelBuilder, &mut storage, "edt");
    open.progs.edt_cgroup.set_autoload(place == AttachPoint::Cgroup);
    open.progs.edt_device.set_autoload(place == AttachPoint::Device);
    open.progs.edt_port.set_autoload(place == AttachPoint::Port);
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.flow_seed = random_seed();
    }
    let (exempts, earlier) = match work {
        Work::New(_, options) => (!options.exempt.is_empty(), None),
        Work::Again(maps) => (maps.exempt.is_some(), Some(maps)),
    };
    set_exempt!(open, exempts, earlier.and_then(|maps| maps.exempt.as_ref()), "edt");
    if let Some(maps) = earlier {
        reuse(&mut open.maps.limit, &maps.limit)?;
        reuse(&mut open.maps.queues_of_limit, &maps.own_as::<Departures>()?.queues)?;
        reuse(&mut open.maps.counters, &maps.counters)?;
    }
    prepare(open.open_object_mut(), "edt")?;
    let edt = load_skel(open, "edt")?;
    let handle = |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("edt"));
    let maps = LimitMaps {
        exempt: exempts.then(|| handle(&edt.maps.exempt_prefixes)).transpose()?,
        ..LimitMaps::new(
            handle(&edt.maps.limit)?,
            handle(&edt.maps.counters)?,
            Departures { queues: handle(&edt.maps.queues_of_limit)? },
        )
    };
    if let Work::New(limit, options) = work {
        maps.write(*limit)?;
        maps.exempt(&options.exempt.prefixes)?;
    }
    let program = match place {
        AttachPoint::Cgroup => &edt.progs.edt_cgroup,
        AttachPoint::Device => &edt.progs.edt_device,
        AttachPoint::Port => &edt.progs.edt_port,
    };
    let used = use_it(program)?;
    Ok((maps, used))
}

/// The queues by which packets get their departures.
#[derive(Debug)]
struct Departures {
    queues: MapHandle,
}

impl Handle for Departures {
    fn read(&self, maps: &LimitMaps, direction: Direction) -> Result<Reading, LimitError> {
        let index = intf::index(direction) as u32;
        let queue: intf::EdtQueue = lookup(&self.queues, "queues", index)?;
        Ok(Reading {
            finish_ns: queue.common.finish_ns,
            fair: Some(FairShare::from(&queue.common)),
            counters: maps.counters(direction)?,
            ..Reading::default()
        })
    }

    fn maps(&mut self) -> Vec<(&'static str, &mut MapHandle)> {
        vec![("queues", &mut self.queues)]
    }
}

/// Scheme `edt`.
pub(crate) struct Edt;

impl Scheme for Edt {
    fn links(&self, _limit: &intf::Limit) -> &'static [&'static str] {
        &LINKS[..1]
    }

    fn load(
        &self,
        cgroup_id: u64,
        options: &LimitOptions,
        _parent: Option<&LimitMaps>,
        _programs: Programs,
    ) -> Result<Loaded, LimitError> {
        let limit = options.encode(cgroup_id)?;
        let keep = |program: &ProgramMut<'_>| bpf::keep(program, "edt_cgroup");
        let (maps, program) = load(AttachPoint::Cgroup, Work::New(&limit, options), keep)?;
        Ok(Loaded { maps, programs: vec![(LINKS[0], program)] })
    }

    fn attach_device(
        &self,
        hierarchy: &Hierarchy,
        target: &Target,
        options: &LimitOptions,
        in_the_way: &InTheWay,
    ) -> Result<AttachedLimit, LimitError> {
        fq::check(hierarchy, &target.scope, None)?;
        let limit = target.encode(options)?;
        let attach = |program: &ProgramMut<'_>| {
            in_the_way.remove(None)?;
            device::attach(target, &[(Direction::Egress, program)])
        };
        let (maps, hooked) = load(AttachPoint::of(&limit), Work::New(&limit, options), attach)?;
        Ok(AttachedLimit::on_device(maps, hooked))
    }

    fn reload(
        &self,
        dir: &Path,
        limit: &intf::Limit,
        maps: &LimitMaps,
    ) -> Result<Vec<Successor>, LimitError> {
        let next = |program: &ProgramMut<'_>| successors(dir, &[(LINKS[0], program)]);
        let (_, successors) = load(AttachPoint::of(limit), Work::Again(maps), next)?;
        Ok(successors)
    }

    fn open(&self, pinned: &Pinned<'_>) -> Result<Box<dyn Handle>, LimitError> {
        let queues = open_array::<intf::EdtQueue>(pinned.dir, "queues")?;
        Ok(Box::new(Departures { queues }))
    }

    fn of_program(&self, maps: &mut MapsByName) -> Option<Box<dyn Handle>> {
        Some(Box::new(Departures { queues: maps.remove("queues_of_limit")? }))
    }

    fn why_unkept(
        &self,
        hierarchy: &Hierarchy,
        scope: &Scope,
        cgroup: Option<&Cgroup>,
    ) -> Option<FqError> {
        fq::check(hierarchy, scope, cgroup).err()
    }
}

#[cfg(test)]
mod kernel_tests;
