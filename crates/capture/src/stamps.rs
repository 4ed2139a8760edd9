//! The clock of a sender, as the time stamps of its packets show it (RFC 7323).

use crate::trace::Event;

/// Ticks of the clocks that hosts take time stamps from, ns: 1 us, 1 ms, 4 ms, 10 ms, 100 ms.
const TICKS_NS: [u64; 5] = [1_000, 1_000_000, 4_000_000, 10_000_000, 100_000_000];
/// By how much a clock may differ from them, to be recognised.
const TICK_WITHIN: f64 = 0.1;
/// Ticks that must have passed.
const TICKS_MIN: u32 = 100;
/// Two flows whose stamps are no further apart have one clock. A host that gives each flow its own offset
/// (RFC 7323, section 5.4) spreads them over all that a stamp can be, which is 71 minutes or more.
const ONE_CLOCK_NS: i64 = 4_000_000_000;

/// The sender's clock, as its time stamps show it.
#[derive(Debug, Clone, Copy, Default)]
pub struct StampClock {
    /// The first packet with a stamp: when it came, ns, and the stamp.
    first: Option<(u64, u32)>,
    /// The last one.
    last: Option<(u64, u32)>,
    /// How early the fastest packet came that is no longer remembered, ns, and the tick assumed then.
    least: Option<(i64, u64)>,
}

impl StampClock {
    /// Takes a packet's stamp.
    pub fn see(&mut self, time_ns: u64, stamp: Option<u32>) {
        if let Some(stamp) = stamp {
            self.first.get_or_insert((time_ns, stamp));
            self.last = Some((time_ns, stamp));
        }
    }

    /// The clock's tick, ns.
    pub fn tick_ns(&self) -> Option<u64> {
        let ((from, first), (to, last)) = (self.first?, self.last?);
        let ticks = last.wrapping_sub(first);
        if !(TICKS_MIN..=u32::MAX / 2).contains(&ticks) {
            return None;
        }
        let tick = to.saturating_sub(from) as f64 / f64::from(ticks);
        let near = |known: &u64| (tick / *known as f64 - 1.0).abs() < TICK_WITHIN;
        TICKS_NS.into_iter().find(|known| near(known))
    }

    /// How late a packet came, ns, from an origin that is the same for all packets.
    pub(crate) fn late_ns(&self, event: &Event, tick_ns: u64) -> Option<i64> {
        let (from, first) = self.first.filter(|_| event.stamp != 0)?;
        let ticks = i64::from(event.stamp.wrapping_sub(first) as i32);
        let time = i64::try_from(event.time_ns.saturating_sub(from)).ok()?;
        Some(time - ticks * tick_ns as i64)
    }

    /// What a lateness by another flow's clock is more by this one, ns; none if they are two clocks.
    pub(crate) fn ahead_of(&self, other: &StampClock, tick_ns: u64) -> Option<i64> {
        let ((from, first), (other_from, other_first)) = (self.first?, other.first?);
        let time = i64::try_from(other_from).ok()? - i64::try_from(from).ok()?;
        let ticks = i64::from(other_first.wrapping_sub(first) as i32);
        let ahead = time - ticks * tick_ns as i64;
        (other.tick_ns() == Some(tick_ns) && ahead.abs() < ONE_CLOCK_NS).then_some(ahead)
    }

    /// How early the fastest packet came.
    pub(crate) fn least_ns<'a>(
        &self,
        events: impl Iterator<Item = &'a Event>,
        tick_ns: u64,
    ) -> Option<i64> {
        let before = self.least.filter(|(_, tick)| *tick == tick_ns).map(|(least, _)| least);
        events.filter_map(|event| self.late_ns(event, tick_ns)).chain(before).min()
    }

    /// Packets that will be forgotten.
    pub fn forget<'a>(&mut self, events: impl Iterator<Item = &'a Event>) {
        let Some(tick_ns) = self.tick_ns() else { return };
        self.least = self.least_ns(events, tick_ns).map(|least| (least, tick_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A clock of 1 ms that is `offset` ahead, as a flow from `from_ns` on shows it for two seconds.
    fn clock(from_ns: u64, offset: u32) -> StampClock {
        let mut clock = StampClock::default();
        for time_ns in [from_ns, from_ns + 2 * SECOND] {
            clock.see(time_ns, Some(offset.wrapping_add((time_ns / 1_000_000) as u32)));
        }
        clock
    }

    fn event(time_ns: u64, stamp: u32) -> Event {
        Event { time_ns, stamp, ..Event::default() }
    }

    #[test]
    fn the_tick_is_that_of_a_known_clock() {
        assert_eq!(clock(SECOND, 7).tick_ns(), Some(1_000_000));
        assert_eq!(StampClock::default().tick_ns(), None);
        let mut odd = StampClock::default();
        odd.see(0, Some(1));
        odd.see(2 * SECOND, Some(1_001));
        assert_eq!(odd.tick_ns(), None);
    }

    /// The stamps of two flows of a host that gives all flows one clock, also where the stamps overflow.
    #[test]
    fn flows_of_one_clock_share_an_origin() {
        for offset in [7, u32::MAX - 5_500] {
            let first = clock(SECOND, offset);
            let later = clock(5 * SECOND, offset);
            assert_eq!(first.ahead_of(&later, 1_000_000), Some(0));
        }
        // The second one's first packet had waited for 30 ms.
        let mut late = clock(5 * SECOND, 7);
        late.first = late.first.map(|(time_ns, stamp)| (time_ns + 30_000_000, stamp));
        let first = clock(SECOND, 7);
        assert_eq!(first.ahead_of(&late, 1_000_000), Some(30_000_000));
        // A packet that did not wait is the least of both, whichever flow's origin counts.
        let quick = event(6 * SECOND, 7 + 6_000);
        let by_late = late.late_ns(&quick, 1_000_000).unwrap() + 30_000_000;
        assert_eq!(first.late_ns(&quick, 1_000_000), Some(by_late));
    }

    #[test]
    fn flows_of_two_clocks_share_nothing() {
        let first = clock(SECOND, 7);
        assert_eq!(first.ahead_of(&clock(SECOND, 7 + 3_600_000), 1_000_000), None);
        assert_eq!(first.ahead_of(&clock(SECOND, 7), 4_000_000), None);
        assert_eq!(first.ahead_of(&StampClock::default(), 1_000_000), None);
    }

    /// What is forgotten is still the least.
    #[test]
    fn the_least_outlives_the_window() {
        let mut clock = clock(0, 7);
        let (quick, slow) = (event(SECOND, 1_007), event(SECOND + 20_000_000, 1_007));
        clock.forget([quick].iter());
        assert_eq!(clock.least_ns([slow].iter(), 1_000_000), Some(0));
    }
}
