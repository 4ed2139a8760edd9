//! Limits on what a guest sends, each where a host would put it: a guest whose only device leads to a router
//! or bridge, the host, and the guest's peer behind that ([`Road`](super::policers::Road)).
//!
//! | name | what it is | where on the host |
//! |---|---|---|
//! | `idle` | nothing, and no load | |
//! | `unlimited` | nothing | |
//! | `htb` | the kernel's HTB with a queue of 1000 packets, as `tc` sets it up | the peer's side |
//! | `tidegate-htb` | `tidegate limit add --scheme htb` | the guest's port |
//! | `htb-ecn` | `tidegate limit add --scheme htb --ecn K`: HTB that marks from K on | the guest's port |
//! | `dem`, `spring` | `tidegate limit add --scheme dem`, `--scheme spring` | the guest's port |
//! | `edt` | `tidegate limit add --scheme edt`, which needs `fq` | the guest's port |
//! | `police` | `tidegate limit add --scheme police` | the guest's port |

use std::fmt;

use anyhow::Context as _;
use tidegate_core::{Direction, Rate};

use crate::{
    context::Context,
    testbed::{Store, Testbed, peers::Peer},
};

const LIMIT: &str = "guest";
/// From where on He et al. show a marking HTB in their text, and this machine's `htb-ecn` marks unless told.
pub(super) const MARK_BYTES: u64 = 60_000;

/// A limit, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shaper {
    Idle,
    Unlimited,
    Htb,
    TidegateHtb,
    /// The queue from which on it marks, in bytes.
    HtbEcn(u64),
    Dem,
    Spring,
    Edt,
    Police,
}

impl Shaper {
    pub(super) fn name(self) -> &'static str {
        match self {
            Shaper::Idle => "idle",
            Shaper::Unlimited => "unlimited",
            Shaper::Htb => "htb",
            Shaper::TidegateHtb => "tidegate-htb",
            Shaper::HtbEcn(_) => "htb-ecn",
            Shaper::Dem => "dem",
            Shaper::Spring => "spring",
            Shaper::Edt => "edt",
            Shaper::Police => "police",
        }
    }

    /// Puts it on what the testbed's sender sends to its first receiver.
    ///
    /// # Errors
    ///
    /// [`Skip`](crate::stop::Skip) where the kernel has no such thing; nothing is left of it.
    pub(super) fn apply<'a>(
        self,
        ctx: &Context,
        testbed: &'a Testbed,
        rate: Rate,
    ) -> anyhow::Result<Shaped<'a>> {
        let host = testbed.router().context("there is no host to limit on")?;
        let towards_peer = testbed.router_dev_to(0);
        let peer = match self {
            Shaper::Idle | Shaper::Unlimited => return Ok(Shaped { store: None, peer: None }),
            Shaper::Htb => Some(Peer::htb_on(host, &towards_peer, rate.bit_s())?),
            Shaper::Edt => Some(Peer::fq_on(host, &towards_peer)?),
            _ => None,
        };
        let words = self.words(testbed.router_dev(), rate);
        let store = words.map(|words| -> anyhow::Result<Store<'_>> {
            let mut store = Store::new(&ctx.tidegate, host)?;
            store.tidegate(words)?;
            Ok(store)
        });
        Ok(Shaped { store: store.transpose()?, peer })
    }

    /// The arguments of `tidegate`; none for what is not its own.
    fn words(self, port: &str, rate: Rate) -> Option<Vec<String>> {
        let scheme = match self {
            Shaper::Idle | Shaper::Unlimited | Shaper::Htb => return None,
            Shaper::TidegateHtb | Shaper::HtbEcn(_) => "htb",
            other => other.name(),
        };
        let words = ["limit", "add", LIMIT, "--port", port, "--scheme", scheme, "--egress"];
        let mut words: Vec<String> = words.map(str::to_owned).into();
        words.push(rate.to_string());
        if let Shaper::HtbEcn(bytes) = self {
            words.extend(["--ecn".to_owned(), format!("{bytes}b")]);
        }
        Some(words)
    }
}

impl fmt::Display for Shaper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A limit in force. Dropping it takes it off.
pub(super) struct Shaped<'a> {
    // The limit before the qdisc that it needs.
    store: Option<Store<'a>>,
    peer: Option<Peer>,
}

impl Shaped<'_> {
    /// Takes it off and says how many packets it has dropped; one that is yet to be segmented counts once.
    pub(super) fn finish(mut self) -> anyhow::Result<u64> {
        if let Some(store) = &self.store {
            return store.drops(LIMIT, Direction::Egress);
        }
        let Some(peer) = &mut self.peer else { return Ok(0) };
        Ok(peer.qdisc_stats()?.iter().map(|stats| u64::from(stats.drops)).max().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_becomes_words() {
        let rate = Rate::from_bit_s(2_000_000_000).unwrap();
        let words = |shaper: Shaper| shaper.words("up", rate).map(|words| words.join(" "));
        assert_eq!(
            words(Shaper::HtbEcn(60_000)).unwrap(),
            "limit add guest --port up --scheme htb --egress 2gbit --ecn 60000b"
        );
        assert_eq!(
            words(Shaper::Spring).unwrap(),
            "limit add guest --port up --scheme spring --egress 2gbit"
        );
        assert_eq!(
            words(Shaper::TidegateHtb).unwrap(),
            "limit add guest --port up --scheme htb --egress 2gbit"
        );
        assert_eq!((words(Shaper::Htb), words(Shaper::Unlimited)), (None, None));
    }
}
