//! What a limit has beside its maps and programs, such as a qdisc.

use std::{fmt, net::SocketAddr};

use tidegate_core::Direction;

use super::{LimitError, Reading};
use crate::{intf, waiting::Waiting};

/// A limit whose packets wait in the kernel, opened by its scheme.
pub(crate) trait Handle: fmt::Debug + Send + Sync {
    /// Queue and counters of a direction.
    ///
    /// # Errors
    /// [`LimitError`].
    fn read(&self, direction: Direction) -> Result<Reading, LimitError>;

    /// The parts that it should have and that are not there, by name.
    fn missing(&self) -> Vec<&'static str>;

    /// Puts other settings in force. What waits stays.
    ///
    /// # Errors
    /// [`LimitError`]; the earlier settings are in force.
    fn change(&self, limit: &intf::Limit) -> Result<(), LimitError>;

    /// Whose packets wait in the queue of a direction at this moment; `None` where nobody can tell.
    ///
    /// # Errors
    /// [`LimitError`] when the kernel refuses to look.
    fn waiting(&self, _direction: Direction) -> Result<Option<Waiting>, LimitError> {
        Ok(None)
    }

    /// The connections of a direction that are wanted and that it knows, who sends first.
    fn connections(
        &self,
        _direction: Direction,
        _wanted: &dyn Fn(SocketAddr, SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, SocketAddr)> {
        Vec::new()
    }
}
