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
    #[must_use]
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
