//! The program that polices what comes in by a device in XDP, with the maps of a limit.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use libbpf_rs::OpenObject;

use crate::{
    bpf::{load_skel, open_skel, random_seed},
    device::{self, Target},
    exempt::set_exempt,
    limit::{LimitError, LimitMaps},
    query, skel, xdp,
};

/// Loads the program with the maps of a limit.
pub(crate) fn load<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    maps: &LimitMaps,
) -> Result<skel::police_xdp::PoliceXdpSkel<'a>, LimitError> {
    const PROGRAM: &str = "police_xdp";
    let mut open = open_skel::<skel::police_xdp::PoliceXdpSkelBuilder>(storage, PROGRAM)?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.flow_seed = random_seed();
    }
    set_exempt!(open, maps.exempt.is_some(), maps.exempt.as_ref(), "police_xdp");
    share!(open, maps);
    load_skel(open, PROGRAM)
}

/// Puts the program on a device that has no other, in the driver if it can, else in the stack. It stays as
/// long as the link is open or pinned.
pub(crate) fn attach(target: &Target, maps: &LimitMaps) -> Result<OwnedFd, LimitError> {
    let name = || target.scope.name().to_owned();
    let taken = |there: Option<xdp::OnDevice>| {
        // A bond refuses a program on a device that is in it.
        let holder = there.map_or_else(
            || "on a device that this one belongs to".to_owned(),
            |there| {
                let name = query::program_name(there.program);
                let name = name.map_or_else(String::new, |name| format!(" (`{name}`)"));
                format!("program {}{name}", there.program)
            },
        );
        LimitError::XdpTaken { device: name(), holder }
    };
    if !device::is_ethernet(target.ifindex) {
        return Err(LimitError::XdpWithoutEthernet(name()));
    }
    if let Some(there) = xdp::on_device(target.ifindex) {
        return Err(taken(Some(there)));
    }
    let mut storage = MaybeUninit::uninit();
    let object = load(&mut storage, maps)?;
    let linked = xdp::link_in_any(object.progs.police_xdp.as_fd(), target.ifindex);
    linked.map(|(link, _)| link).map_err(|e| match xdp::is_taken(&e) {
        true => taken(xdp::on_device(target.ifindex)),
        false => LimitError::AttachDevice { device: name(), source: e.into() },
    })
}
