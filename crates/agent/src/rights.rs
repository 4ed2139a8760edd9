//! A child that talks to others becomes somebody who may do little.

use std::io;

use rustix::{
    process::{Gid, Uid},
    thread::{CapabilitySet, CapabilitySets},
};

/// The user who owns nothing.
pub const NOBODY: u32 = 65534;

/// Whom a child is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
}

/// Becomes that user, if this process may, and gives up all capabilities for good. For a process of one
/// thread.
///
/// # Errors
/// Those of the operating system.
pub fn give_up(who: Identity) -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let (uid, gid) = (Uid::from_raw(who.uid), Gid::from_raw(who.gid));
    let is_root = rustix::process::geteuid().is_root();
    if is_root && rustix::thread::set_thread_groups(&[gid]).is_ok() {
        // This process has one thread.
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    }
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(rustix::thread::set_capabilities(None, none)?)
}
