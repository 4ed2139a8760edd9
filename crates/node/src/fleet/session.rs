//! Whose datagrams are taken, and that none is taken twice. No clock of another host is asked.
//!
//! A *session* is one life of a node. A datagram of a session that is new here says nothing yet: it may have
//! been recorded. The node that hears it sends a *challenge*, a random number; who sends that back under the
//! session's seal lives now. From then on the session is *proven*: its datagrams are taken, each number
//! once, as a window of [`WINDOW`] tells, and earlier sessions of the sender are not heard any more.
//!
//! So what was recorded can be played back neither to a node that has heard it nor to one that has restarted
//! and knows nothing, and no clocks are compared. It costs two datagrams for each pair of nodes and start.

use std::{collections::BTreeMap, net::SocketAddr};

use tidegate_core::{Nanos, fleet::MemberId};

use super::seal::{Cause, Opened};

/// How far a datagram may be overtaken and still be told from one that came before.
pub const WINDOW: u64 = 128;
/// The most nodes that are known.
pub const PEERS_MAX: usize = 16_384;
/// A challenge counts for so long.
const CHALLENGE_LASTS: Nanos = Nanos(5_000_000_000);
/// A challenge is told again, and an old life told off, no more often.
const AGAIN: Nanos = Nanos(200_000_000);

/// Which numbers of a session were taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Window {
    highest: u64,
    /// Bit i: `highest - i` was taken.
    taken: u128,
}

impl Window {
    /// Everything up to `number` counts as taken.
    fn after(number: u64) -> Window {
        Window { highest: number, taken: u128::MAX }
    }

    /// Takes a number; false if it was taken before or is too old to tell.
    fn take(&mut self, number: u64) -> bool {
        if number > self.highest {
            let by = number - self.highest;
            self.taken = if by < WINDOW { self.taken << by } else { 0 };
            self.taken |= 1;
            self.highest = number;
            return true;
        }
        let behind = self.highest - number;
        if behind >= WINDOW || self.taken & (1 << behind) != 0 {
            return false;
        }
        self.taken |= 1 << behind;
        true
    }
}

/// A session that has been challenged.
#[derive(Debug, Clone, Copy)]
struct Challenge {
    session: u64,
    cookie: u64,
    since: Nanos,
    told: Nanos,
}

/// A node that was heard.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its name; none until it is proven.
    pub name: Option<String>,
    /// Where its last datagram came from.
    pub addr: SocketAddr,
    /// Its proven session; 0: none yet.
    pub session: u64,
    /// When its last datagram was taken.
    pub heard: Nanos,
    window: Window,
    challenge: Option<Challenge>,
    told_off: Option<Nanos>,
}

/// What becomes of a datagram that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accept {
    /// Its frames are taken.
    Proven,
    /// Only its handshake is: a challenge is answered, an echo is looked at. The number, if any, is to be
    /// sent as a challenge.
    Unproven(Option<u64>),
    /// It is of an earlier life. Its sender is to be told, if it was not just now.
    Stale {
        /// Whether to say so.
        tell: bool,
    },
    /// Nothing.
    Dropped(Cause),
}

/// The nodes that were heard.
#[derive(Debug, Default)]
pub struct Sessions {
    peers: BTreeMap<MemberId, Peer>,
}

impl Sessions {
    /// Judges a datagram that came from `from`. `random` is 64 uniform bits, fresh for each.
    pub fn accept(&mut self, now: Nanos, from: SocketAddr, opened: &Opened, random: u64) -> Accept {
        let room = self.peers.len() < PEERS_MAX;
        let peer = match self.peers.entry(opened.sender) {
            std::collections::btree_map::Entry::Occupied(peer) => peer.into_mut(),
            std::collections::btree_map::Entry::Vacant(_) if !room => {
                return Accept::Dropped(Cause::Crowd);
            }
            std::collections::btree_map::Entry::Vacant(place) => place.insert(Peer {
                name: None,
                addr: from,
                session: 0,
                heard: now,
                window: Window::after(0),
                challenge: None,
                told_off: None,
            }),
        };
        if opened.session < peer.session {
            let tell = peer.told_off.is_none_or(|at| now.0 >= at.0.saturating_add(AGAIN.0));
            if tell {
                peer.told_off = Some(now);
            }
            return Accept::Stale { tell };
        }
        if opened.session == peer.session && peer.session > 0 {
            if !peer.window.take(opened.number) {
                return Accept::Dropped(Cause::Replay);
            }
            (peer.addr, peer.heard) = (from, now);
            return Accept::Proven;
        }
        let good = |c: &Challenge| now.0 < c.since.0.saturating_add(CHALLENGE_LASTS.0);
        match peer.challenge.filter(good) {
            // A later life than the one that was asked last goes first.
            Some(challenge) if challenge.session > opened.session => Accept::Unproven(None),
            Some(challenge) if challenge.session == opened.session => {
                let again = now.0 >= challenge.told.0.saturating_add(AGAIN.0);
                if again {
                    peer.challenge = Some(Challenge { told: now, ..challenge });
                }
                Accept::Unproven(again.then_some(challenge.cookie))
            }
            _ => {
                let (session, cookie) = (opened.session, random);
                peer.challenge = Some(Challenge { session, cookie, since: now, told: now });
                Accept::Unproven(Some(cookie))
            }
        }
    }

    /// Takes an echo. True if it proves the session, which it does once.
    pub fn on_echo(
        &mut self,
        now: Nanos,
        from: SocketAddr,
        opened: &Opened,
        cookie: u64,
        name: &str,
    ) -> bool {
        let Some(peer) = self.peers.get_mut(&opened.sender) else { return false };
        let proves = peer.challenge.is_some_and(|c| {
            c.session == opened.session
                && c.cookie == cookie
                && now.0 < c.since.0.saturating_add(CHALLENGE_LASTS.0)
        });
        if proves {
            peer.challenge = None;
            peer.session = opened.session;
            peer.window = Window::after(opened.number);
            (peer.addr, peer.heard) = (from, now);
            peer.name = Some(name.to_owned());
        }
        proves
    }

    /// A node that was heard.
    #[must_use]
    pub fn get(&self, id: MemberId) -> Option<&Peer> {
        self.peers.get(&id)
    }

    /// All that are proven.
    pub fn proven(&self) -> impl Iterator<Item = (MemberId, &Peer)> {
        self.peers.iter().filter(|(_, peer)| peer.session > 0).map(|(id, peer)| (*id, peer))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn from() -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], 7946))
    }

    fn datagram(session: u64, number: u64) -> Opened {
        Opened { sender: MemberId(1), session, number, for_anyone: false, payload: vec![] }
    }

    fn proven(session: u64) -> Sessions {
        let mut sessions = Sessions::default();
        prove(&mut sessions, Nanos(0), session);
        sessions
    }

    fn prove(sessions: &mut Sessions, now: Nanos, session: u64) {
        let judged = sessions.accept(now, from(), &datagram(session, 1), session);
        assert_eq!(judged, Accept::Unproven(Some(session)));
        assert!(sessions.on_echo(now, from(), &datagram(session, 2), session, "a"));
    }

    #[test]
    fn a_session_is_proven_once_and_a_recorded_one_never() {
        let mut sessions = proven(7);
        let mut accept = |at: u64, session, number| {
            sessions.accept(Nanos(at), from(), &datagram(session, number), 99)
        };
        assert_eq!(accept(0, 7, 3), Accept::Proven);
        assert_eq!(accept(0, 7, 3), Accept::Dropped(Cause::Replay));
        assert_eq!(accept(0, 7, 2), Accept::Dropped(Cause::Replay), "from before it was proven");
        assert_eq!(accept(0, 6, 50), Accept::Stale { tell: true });
        assert_eq!(accept(1, 6, 51), Accept::Stale { tell: false });
        // A later life must show that it lives; the one that is proven is heard meanwhile.
        assert_eq!(accept(0, 8, 1), Accept::Unproven(Some(99)));
        assert_eq!(accept(1, 8, 2), Accept::Unproven(None), "just asked");
        assert_eq!(accept(300_000_000, 8, 3), Accept::Unproven(Some(99)), "asked again");
        assert_eq!(accept(0, 7, 4), Accept::Proven);
        assert!(!sessions.on_echo(Nanos(2), from(), &datagram(8, 4), 98, "a"), "wrong number");
        assert!(!sessions.on_echo(Nanos(2), from(), &datagram(7, 4), 99, "a"), "wrong session");
        assert!(!sessions.on_echo(Nanos(6_000_000_000), from(), &datagram(8, 4), 99, "a"), "late");
        assert!(sessions.on_echo(Nanos(3), from(), &datagram(8, 4), 99, "a"));
        assert!(!sessions.on_echo(Nanos(3), from(), &datagram(8, 4), 99, "a"), "once");
        let stale = sessions.accept(Nanos(4_000_000_000), from(), &datagram(7, 5), 1);
        assert_eq!(stale, Accept::Stale { tell: true });
    }

    #[test]
    fn a_node_that_has_restarted_takes_nothing_that_was_recorded() {
        let mut sessions = Sessions::default();
        for number in 1..1_000 {
            let now = Nanos(number * 1_000_000);
            let judged = sessions.accept(now, from(), &datagram(7, number), number);
            assert!(matches!(judged, Accept::Unproven(_)));
            // Recorded echoes have the numbers of other challenges.
            assert!(!sessions.on_echo(now, from(), &datagram(7, number), number + 1_000_000, "a"));
        }
    }

    proptest! {
        /// Each number is taken once at most, and always if it is not overtaken by the window.
        #[test]
        fn the_window_takes_each_number_once(numbers in prop::collection::vec(3u64..400, 1..500)) {
            let mut sessions = proven(7);
            let (mut taken, mut highest) = (std::collections::BTreeSet::new(), 2);
            for number in numbers {
                let judged = sessions.accept(Nanos(0), from(), &datagram(7, number), 0);
                let is_new = taken.insert(number);
                if judged == Accept::Proven {
                    prop_assert!(is_new);
                } else {
                    prop_assert_eq!(judged, Accept::Dropped(Cause::Replay));
                    prop_assert!(!is_new || number + WINDOW <= highest);
                }
                highest = highest.max(number);
            }
        }
    }
}
