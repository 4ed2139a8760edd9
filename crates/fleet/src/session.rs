//! Whose datagrams are taken, and that none is taken twice. No clock of another host is asked.
//!
//! A *life* of a node ([`Life`]) that is new here says nothing yet: its datagram may have been recorded. The
//! node that hears it sends a *challenge*, a random number; who sends that back under the life's seal lives
//! now. From then on that life is *proven*: its datagrams are taken, each number once, as a window of
//! [`WINDOW`] tells, and earlier lives of the sender are not heard any more.
//!
//! So what was recorded can be played back neither to a node that has heard it nor to one that has restarted
//! and knows nothing, and no clocks are compared. It costs two datagrams for each pair of nodes and start.
//!
//! **Copies.** An earlier life that answers a challenge though a later one is proven runs beside it: a
//! machine was copied, or two have one name ([`Echoed::Rival`]).
//!
//! **Bounds.** At most [`PEERS_MAX`] nodes are proven and [`STRANGERS_MAX`] are not. Who is new takes the
//! place of the one that was silent for longest: of a stranger at once, of a proven node once it has been
//! silent for [`SILENT`]. A node that was forgotten is challenged again, so nothing recorded is taken.
//!
//! Work for a datagram: O(log nodes).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use tidegate_core::{Nanos, fleet::MemberId};

use super::seal::{Cause, Life, Opened};

/// How far a datagram may be overtaken and still be distinguished from one that came before.
pub const WINDOW: u64 = 128;
/// The most nodes that are proven.
pub const PEERS_MAX: usize = 16_384;
/// The most nodes that have yet to answer a challenge.
pub const STRANGERS_MAX: usize = 1_024;
/// A proven node is not forgotten before it has been silent for so long.
pub const SILENT: Nanos = Nanos(60_000_000_000);
/// A challenge counts for so long.
const CHALLENGE_LASTS: Nanos = Nanos(5_000_000_000);
/// A challenge is repeated, and an old life refused, no more often.
const AGAIN: Nanos = Nanos(200_000_000);

/// Which numbers of a life were taken.
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

/// A life that has been challenged.
#[derive(Debug, Clone, Copy)]
struct Challenge {
    life: Life,
    cookie: u64,
    since: Nanos,
    sent: Nanos,
}

impl Challenge {
    fn new(now: Nanos, life: Life, cookie: u64) -> Challenge {
        Challenge { life, cookie, since: now, sent: now }
    }

    fn is_answered(&self, now: Nanos, life: Life, cookie: u64) -> bool {
        self.life == life && self.cookie == cookie && self.is_good(now)
    }

    fn is_good(&self, now: Nanos) -> bool {
        now.0 < self.since.0.saturating_add(CHALLENGE_LASTS.0)
    }
}

/// A node that was heard.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Where its last datagram that was not for anyone came from ([`Sessions::moved`]).
    pub addr: SocketAddr,
    /// Its proven life; none yet: session 0.
    pub life: Life,
    /// When its last datagram was taken.
    pub heard: Nanos,
    window: Window,
    challenge: Option<Challenge>,
    /// An earlier life that is asked whether it runs beside this one.
    rival: Option<Challenge>,
}

impl Peer {
    /// Whether it has answered a challenge.
    pub fn is_proven(&self) -> bool {
        self.life.session > 0
    }
}

/// What becomes of a datagram that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accept {
    /// Its frames are taken.
    Proven,
    /// Only its handshake is: a challenge is answered, an echo is looked at. The number, if any, is to be
    /// sent as a challenge.
    Unproven(Option<u64>),
    /// It is of an earlier life; an echo is looked at. If there is a number its sender gets an answer, and
    /// challenged with it; else that was done just now.
    Stale(Option<u64>),
    Dropped(Cause),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Echoed {
    /// Nothing: it answers no challenge that counts.
    Nothing,
    /// That this life lives. Comes once for each.
    Proves,
    /// That an earlier life runs beside the one that is proven.
    Rival,
}

/// The nodes that were heard.
#[derive(Debug, Default)]
pub struct Sessions {
    peers: BTreeMap<MemberId, Peer>,
    /// Those that are not proven, and those that are, by when they were heard.
    strangers: BTreeSet<(Nanos, MemberId)>,
    proven: BTreeSet<(Nanos, MemberId)>,
}

impl Sessions {
    /// Judges a datagram that came from `from`. `random` is 64 uniform bits, fresh for each.
    pub fn accept(&mut self, now: Nanos, from: SocketAddr, opened: &Opened, random: u64) -> Accept {
        let (id, life) = (opened.sender, opened.life);
        if !self.peers.contains_key(&id) {
            self.meet(now, from, id);
        }
        let Some(peer) = self.peers.get_mut(&id) else { return Accept::Dropped(Cause::Crowd) };
        if peer.is_proven() && life < peer.life {
            let again = |c: &Challenge| now.0 >= c.sent.0.saturating_add(AGAIN.0);
            return Accept::Stale(match &mut peer.rival {
                Some(rival) if !again(rival) => None,
                Some(rival) if rival.life == life && rival.is_good(now) => {
                    rival.sent = now;
                    Some(rival.cookie)
                }
                rival => Some(rival.insert(Challenge::new(now, life, random)).cookie),
            });
        }
        if peer.is_proven() && life == peer.life {
            if !peer.window.take(opened.number) {
                return Accept::Dropped(Cause::Replay);
            }
            let before = std::mem::replace(&mut peer.heard, now);
            // One for anyone opens at every node, so whoever gets it may pass it on from anywhere.
            if !opened.for_anyone {
                peer.addr = from;
            }
            self.proven.remove(&(before, id));
            self.proven.insert((now, id));
            return Accept::Proven;
        }
        if !peer.is_proven() {
            let before = std::mem::replace(&mut peer.heard, now);
            self.strangers.remove(&(before, id));
            self.strangers.insert((now, id));
        }
        match peer.challenge.filter(|challenge| challenge.is_good(now)) {
            // A later life than the one that was asked last goes first.
            Some(challenge) if challenge.life > life => Accept::Unproven(None),
            Some(challenge) if challenge.life == life => {
                let again = now.0 >= challenge.sent.0.saturating_add(AGAIN.0);
                if again {
                    peer.challenge = Some(Challenge { sent: now, ..challenge });
                }
                Accept::Unproven(again.then_some(challenge.cookie))
            }
            _ => {
                peer.challenge = Some(Challenge::new(now, life, random));
                Accept::Unproven(Some(random))
            }
        }
    }

    /// Makes room for a stranger.
    fn meet(&mut self, now: Nanos, from: SocketAddr, id: MemberId) {
        if self.strangers.len() >= STRANGERS_MAX
            && let Some((_, longest)) = self.strangers.pop_first()
        {
            self.peers.remove(&longest);
        }
        let peer = Peer {
            addr: from,
            life: Life::default(),
            heard: now,
            window: Window::after(0),
            challenge: None,
            rival: None,
        };
        self.peers.insert(id, peer);
        self.strangers.insert((now, id));
    }

    /// Whether one more may be proven; forgets the one that was silent for longest if that was long.
    fn has_room(&mut self, now: Nanos) -> bool {
        if self.proven.len() < PEERS_MAX {
            return true;
        }
        let longest = self.proven.first().copied();
        match longest.filter(|(heard, _)| now.0 >= heard.0.saturating_add(SILENT.0)) {
            Some(longest) => {
                self.proven.remove(&longest);
                self.peers.remove(&longest.1).is_some()
            }
            None => false,
        }
    }

    /// Takes an echo.
    ///
    /// # Errors
    /// [`Cause::Crowd`]: it lives, and there are as many nodes as can be known.
    pub fn on_echo(
        &mut self,
        now: Nanos,
        from: SocketAddr,
        opened: &Opened,
        cookie: u64,
    ) -> Result<Echoed, Cause> {
        let (id, life) = (opened.sender, opened.life);
        let Some(peer) = self.peers.get_mut(&id) else { return Ok(Echoed::Nothing) };
        if peer.rival.is_some_and(|rival| rival.is_answered(now, life, cookie)) {
            peer.rival = None;
            return Ok(Echoed::Rival);
        }
        if !peer.challenge.is_some_and(|challenge| challenge.is_answered(now, life, cookie)) {
            return Ok(Echoed::Nothing);
        }
        if !peer.is_proven() && !self.has_room(now) {
            return Err(Cause::Crowd);
        }
        let Some(peer) = self.peers.get_mut(&id) else { return Ok(Echoed::Nothing) };
        self.strangers.remove(&(peer.heard, id));
        self.proven.remove(&(peer.heard, id));
        self.proven.insert((now, id));
        peer.challenge = None;
        peer.life = life;
        peer.window = Window::after(opened.number);
        (peer.addr, peer.heard) = (from, now);
        Ok(Echoed::Proves)
    }

    /// A proven node greets from `from`, and cannot be reached where it was: it is looked for there.
    pub fn moved(&mut self, id: MemberId, from: SocketAddr) {
        if let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.is_proven()) {
            peer.addr = from;
        }
    }

    /// A node that was heard.
    pub fn get(&self, id: MemberId) -> Option<&Peer> {
        self.peers.get(&id)
    }

    pub fn proven(&self) -> impl Iterator<Item = (MemberId, &Peer)> {
        self.proven.iter().filter_map(|(_, id)| Some((*id, self.peers.get(id)?)))
    }

    /// How many nodes are proven, and how many are not.
    #[cfg(test)]
    pub fn count(&self) -> (usize, usize) {
        (self.proven.len(), self.strangers.len())
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
        of(1, Life { session, salt: 0 }, number)
    }

    fn of(sender: u32, life: Life, number: u64) -> Opened {
        Opened { sender: MemberId(sender), life, number, for_anyone: false, payload: vec![] }
    }

    fn proven(session: u64) -> Sessions {
        let mut sessions = Sessions::default();
        prove(&mut sessions, Nanos(0), session);
        sessions
    }

    fn prove(sessions: &mut Sessions, now: Nanos, session: u64) {
        let judged = sessions.accept(now, from(), &datagram(session, 1), session);
        assert_eq!(judged, Accept::Unproven(Some(session)));
        let echoed = sessions.on_echo(now, from(), &datagram(session, 2), session);
        assert_eq!(echoed, Ok(Echoed::Proves));
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
        assert_eq!(accept(0, 6, 50), Accept::Stale(Some(99)));
        assert_eq!(accept(1, 6, 51), Accept::Stale(None));
        // A later life must show that it lives; the one that is proven is heard meanwhile.
        assert_eq!(accept(0, 8, 1), Accept::Unproven(Some(99)));
        assert_eq!(accept(1, 8, 2), Accept::Unproven(None), "just asked");
        assert_eq!(accept(300_000_000, 8, 3), Accept::Unproven(Some(99)), "asked again");
        assert_eq!(accept(0, 7, 4), Accept::Proven);
        let mut echo = |at: u64, session, cookie| {
            let echo = datagram(session, 4);
            sessions.on_echo(Nanos(at), from(), &echo, cookie).unwrap()
        };
        assert_eq!(echo(2, 8, 98), Echoed::Nothing, "wrong number");
        assert_eq!(echo(2, 7, 99), Echoed::Nothing, "wrong session");
        assert_eq!(echo(6_000_000_000, 8, 99), Echoed::Nothing, "late");
        assert_eq!(echo(3, 8, 99), Echoed::Proves);
        assert_eq!(echo(3, 8, 99), Echoed::Nothing, "once");
        let stale = sessions.accept(Nanos(4_000_000_000), from(), &datagram(7, 5), 1);
        assert_eq!(stale, Accept::Stale(Some(1)));
    }

    /// A datagram for anyone opens at every node, so a stranger can pass it on unchanged.
    #[test]
    fn a_greeting_that_is_passed_on_moves_nobody() {
        let elsewhere = SocketAddr::from(([10, 0, 0, 66], 7946));
        let mut sessions = proven(7);
        let addr = |sessions: &Sessions| sessions.get(MemberId(1)).unwrap().addr;
        let greeting = Opened { for_anyone: true, ..datagram(7, 3) };
        let judged = sessions.accept(Nanos(0), elsewhere, &greeting, 0);
        assert_eq!((judged, addr(&sessions)), (Accept::Proven, from()));
        // One that is for this node shows where its sender is.
        let judged = sessions.accept(Nanos(0), elsewhere, &datagram(7, 4), 0);
        assert_eq!((judged, addr(&sessions)), (Accept::Proven, elsewhere));
    }

    /// A copy has the session of its original, and the salt of its own life.
    #[test]
    fn a_copy_is_another_life_and_the_one_that_is_not_heard_is_found() {
        let (low, high) = (Life { session: 7, salt: 1 }, Life { session: 7, salt: 2 });
        let mut sessions = Sessions::default();
        let now = Nanos(0);
        let first = sessions.accept(now, from(), &of(1, low, 1), 5);
        assert_eq!(first, Accept::Unproven(Some(5)));
        let echoed = sessions.on_echo(now, from(), &of(1, low, 2), 5);
        assert_eq!(echoed, Ok(Echoed::Proves));
        // The other counts from 1 as well, and is no replay of this one.
        let second = sessions.accept(now, from(), &of(1, high, 1), 6);
        assert_eq!(second, Accept::Unproven(Some(6)));
        let echoed = sessions.on_echo(now, from(), &of(1, high, 2), 6);
        assert_eq!(echoed, Ok(Echoed::Proves));
        let stale = sessions.accept(now, from(), &of(1, low, 3), 8);
        assert_eq!(stale, Accept::Stale(Some(8)));
        let echoed = sessions.on_echo(now, from(), &of(1, low, 4), 7);
        assert_eq!(echoed, Ok(Echoed::Nothing), "recorded");
        let echoed = sessions.on_echo(now, from(), &of(1, low, 4), 8);
        assert_eq!(echoed, Ok(Echoed::Rival));
        assert_eq!(sessions.get(MemberId(1)).unwrap().life, high);
    }

    #[test]
    fn who_only_knocks_takes_no_room_from_those_that_are_proven() {
        let mut sessions = proven(7);
        for i in 2..100_000u32 {
            let now = Nanos(u64::from(i) * 1_000);
            let life = Life { session: 1, salt: i };
            let judged = sessions.accept(now, from(), &of(i, life, 1), 3);
            assert!(matches!(judged, Accept::Unproven(Some(3))), "{judged:?}");
            assert!(sessions.count().1 <= STRANGERS_MAX);
        }
        assert_eq!(sessions.count(), (1, STRANGERS_MAX));
        assert_eq!(sessions.peers.len(), 1 + STRANGERS_MAX);
        // The node that was known is heard, and a new one gets in among them.
        assert_eq!(sessions.accept(Nanos(0), from(), &datagram(7, 3), 0), Accept::Proven);
        let (id, life, now) = (200_000, Life { session: 9, salt: 9 }, Nanos(200_000_000));
        assert_eq!(sessions.accept(now, from(), &of(id, life, 1), 4), Accept::Unproven(Some(4)));
        let echoed = sessions.on_echo(now, from(), &of(id, life, 2), 4);
        assert_eq!((echoed, sessions.count()), (Ok(Echoed::Proves), (2, STRANGERS_MAX - 1)));
    }

    #[test]
    fn the_dead_make_room_for_the_living_and_the_living_for_nobody() {
        let mut sessions = Sessions::default();
        let life = Life { session: 1, salt: 1 };
        let prove = |sessions: &mut Sessions, id: u32, now: u64| {
            let now = Nanos(now);
            let Accept::Unproven(Some(cookie)) = sessions.accept(now, from(), &of(id, life, 1), 1)
            else {
                unreachable!()
            };
            sessions.on_echo(now, from(), &of(id, life, 2), cookie)
        };
        let count = PEERS_MAX as u32;
        for id in 0..count {
            assert_eq!(prove(&mut sessions, id, id.into()), Ok(Echoed::Proves));
        }
        assert_eq!(prove(&mut sessions, count, 1_000_000), Err(Cause::Crowd));
        // All but two are heard again.
        for id in 2..count {
            assert_eq!(
                sessions.accept(Nanos(1_000_000), from(), &of(id, life, 3), 1),
                Accept::Proven
            );
        }
        for id in [count + 1, count + 2] {
            assert_eq!(prove(&mut sessions, id, SILENT.0 + 10), Ok(Echoed::Proves));
        }
        assert_eq!(prove(&mut sessions, count + 3, SILENT.0 + 10), Err(Cause::Crowd));
        assert_eq!(sessions.count().0, PEERS_MAX);
        assert!(sessions.get(MemberId(0)).is_none() && sessions.get(MemberId(1)).is_none());
        // What was recorded of one that was forgotten is not taken.
        let recorded = sessions.accept(Nanos(SILENT.0 + 20), from(), &of(0, life, 2), 1);
        assert!(matches!(recorded, Accept::Unproven(_)), "{recorded:?}");
    }

    #[test]
    fn a_node_that_has_restarted_takes_nothing_that_was_recorded() {
        let mut sessions = Sessions::default();
        for number in 1..1_000 {
            let now = Nanos(number * 1_000_000);
            let judged = sessions.accept(now, from(), &datagram(7, number), number);
            assert!(matches!(judged, Accept::Unproven(_)));
            // Recorded echoes have the numbers of other challenges.
            let echo = datagram(7, number);
            let echoed = sessions.on_echo(now, from(), &echo, number + 1_000_000);
            assert_eq!(echoed, Ok(Echoed::Nothing));
        }
    }

    proptest! {
        /// Each number is taken once at most, and always if it is not overtaken by the window.
        #[test]
        fn the_window_takes_each_number_once(numbers in prop::collection::vec(3u64..400, 1..500)) {
            let mut sessions = proven(7);
            let (mut taken, mut highest) = (BTreeSet::new(), 2);
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
