//! Network plumbing: namespaces, links, addresses, queueing disciplines, and the TCP sockets
//! of a namespace.
//!
//! Everything speaks rtnetlink directly; no `ip` or `tc` process is started. A [`Netlink`] handle
//! belongs to the namespace of the thread that opened it, for as long as it lives, so one process
//! can hold handles to many namespaces at once.
//!
//! What this module does not do: it keeps no state of its own and repairs nothing. Each call is one
//! request to the kernel, and an error means that this request changed nothing.

mod changes;
pub mod diag;
pub mod holders;
mod link;
mod netlink;
mod netns;
mod path;
pub mod qdisc;
mod queues;
mod spawn;
mod tcp_info;
#[cfg(test)]
pub(crate) mod tun_path;

use std::io;

pub use changes::DeviceChanges;
pub use link::{Device, VethPair, check_name};
pub use netlink::{Attributes, Netlink};
pub use netns::NetNs;
pub use queues::rx_queues;
pub use spawn::{SpawnInto, prepare};
pub use tcp_info::{TCP_INFO_BYTES, TcpInfo};

/// Why a request to the kernel's network stack failed. The kernel's state is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    #[error("cannot {action}: {}", reason(.source, .detail))]
    Refused {
        /// What was asked, as a phrase that follows "cannot".
        action: String,
        source: io::Error,
        /// The kernel's own words (netlink extended acknowledgement); may be empty.
        detail: String,
    },
    #[error("cannot {action}: the kernel's answer is malformed: {detail}")]
    Malformed { action: String, detail: String },
    /// A name or a number is outside what the kernel can take.
    #[error("{field} is {read}: {expected}")]
    Invalid { field: &'static str, read: String, expected: &'static str },
}

impl NetError {
    pub(crate) fn refused(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Refused { action: action.into(), source: source.into(), detail: String::new() }
    }

    /// The error number, if the kernel gave one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// True if the kernel does not know what was named: a device, or a kind of qdisc.
    pub fn is_absent(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOENT | libc::ENODEV))
    }

    /// True if what was to be made exists already.
    pub fn is_exists(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }
}

fn reason(source: &io::Error, detail: &str) -> String {
    let hint = match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (run as root: this needs CAP_NET_ADMIN)",
        Some(libc::EOPNOTSUPP) => " (the kernel lacks this feature)",
        _ => "",
    };
    if detail.is_empty() { format!("{source}{hint}") } else { format!("{source}: {detail}{hint}") }
}
