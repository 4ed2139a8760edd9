//! The schemes: a module with the programs of each.
//!
//! - `nrm`: of `pace` and `nrm`, on cgroups.
//! - [`edt`]: of `edt`, on cgroups and devices.
//! - [`police`]: of `police`, on cgroups and devices, and in XDP.
//! - [`htb`]: the kernel's HTB on devices, with ifb devices for what comes in.
//! - [`acks`]: of `dem` and `spring`, on the ACKs that come back to senders.

pub mod acks;
pub mod edt;
pub mod htb;
pub(crate) mod nrm;
pub mod police;
