//! The schemes: how a limit acts on packets.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, str::FromStr};

use crate::virtual_queue::Direction;

/// How a limit acts on packets.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Every TCP flow of this host is told its fair share ([`crate::fair_share`]): as its pacing rate for
    /// what it sends, as its receive window ([`crate::receive_window`]) for what it receives. The virtual
    /// queue stands behind it for what does not heed it.
    #[default]
    Pace,
    /// The virtual queue of NRM alone ([`crate::virtual_queue`]).
    Nrm,
    /// Departure times ([`crate::edt`]), kept by the `fq` qdisc.
    Edt,
    /// A token bucket ([`crate::token_bucket`]) that drops what finds no tokens.
    Police,
    /// The kernel's Hierarchical Token Bucket ([`crate::htb`]), in which packets wait.
    Htb,
    /// HTB, and ECE in the ACKs that come back to its senders ([`crate::dem`]).
    Dem,
    /// HTB, and the windows in those ACKs ([`crate::spring`]).
    Spring,
    /// The shaper of Carousel ([`crate::shaper`]), in a software NIC between two ports.
    Carousel,
}

impl Scheme {
    /// Every scheme of this version.
    pub const ALL: [Scheme; 8] = [
        Scheme::Pace,
        Scheme::Nrm,
        Scheme::Edt,
        Scheme::Police,
        Scheme::Htb,
        Scheme::Dem,
        Scheme::Spring,
        Scheme::Carousel,
    ];

    /// Whether its programs sit on devices and ports, too.
    #[must_use]
    pub fn is_for_devices(self) -> bool {
        matches!(self, Scheme::Edt | Scheme::Police) || self.has_htb()
    }

    /// Whether its packets wait in the kernel's HTB.
    #[must_use]
    pub fn has_htb(self) -> bool {
        matches!(self, Scheme::Htb | Scheme::Dem | Scheme::Spring)
    }

    /// Whether it sets nothing on sockets.
    #[must_use]
    pub fn leaves_sockets_alone(self) -> bool {
        !matches!(self, Scheme::Pace | Scheme::Nrm)
    }

    /// What stands behind it in a direction, for the defaults of its thresholds.
    #[must_use]
    pub fn queue(self, direction: Direction) -> QueueKind {
        match self {
            Scheme::Edt => QueueKind::Departures,
            Scheme::Police => QueueKind::Bucket,
            Scheme::Htb => QueueKind::Qdisc,
            Scheme::Dem | Scheme::Spring => QueueKind::ShortQdisc,
            Scheme::Pace if direction == Direction::Egress => QueueKind::Paced,
            Scheme::Pace => QueueKind::Windows,
            _ => QueueKind::Alone,
        }
    }

    /// As a user writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Pace => "pace",
            Scheme::Nrm => "nrm",
            Scheme::Edt => "edt",
            Scheme::Police => "police",
            Scheme::Htb => "htb",
            Scheme::Dem => "dem",
            Scheme::Spring => "spring",
            Scheme::Carousel => "carousel",
        }
    }
}

/// What the thresholds of a limit are for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// A virtual queue that works alone.
    #[default]
    Alone,
    /// The flows are paced at their fair share ([`crate::fair_share`]) and the queue is their safety net: its
    /// defaults leave room for the bursts of many paced flows that happen to meet.
    Paced,
    /// The flows are told their fair share as a receive window ([`crate::receive_window`]): what they send at
    /// once is a window, not a segment.
    Windows,
    /// Packets wait for their departure ([`crate::edt`]); `drop` is the horizon.
    Departures,
    /// The bucket of a policer ([`crate::token_bucket`]): it is `burst` deep, and drops when that is gone.
    Bucket,
    /// Packets wait in a qdisc ([`crate::htb`]), which holds as much as `drop` says; they are marked only if
    /// a threshold is given.
    Qdisc,
    /// The same, kept short by what its senders are told ([`crate::dem`], [`crate::spring`]): a host that
    /// stalls finds it empty, and what it could not send meanwhile it may send after.
    ShortQdisc,
}

/// Why a text is no scheme.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    /// No scheme at all.
    #[error(
        "unknown scheme `{0}`; use `pace`, `nrm`, `edt`, `police`, `htb`, `dem`, `spring` or \
         `carousel`, or leave it out"
    )]
    Unknown(String),
}

impl FromStr for Scheme {
    type Err = SchemeError;

    fn from_str(text: &str) -> Result<Self, SchemeError> {
        if let Some(scheme) = Scheme::ALL.into_iter().find(|scheme| scheme.name() == text) {
            return Ok(scheme);
        }
        Err(SchemeError::Unknown(text.to_owned()))
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
