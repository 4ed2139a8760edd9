//! A link: rate, queue, delay, loss and reordering of one direction, as a timestamper.
//!
//! A delay line is a timestamper that adds a constant, so a link needs no queue of its own: it gives each
//! packet the time at which its last bit arrives at the far end, and a timing wheel does the rest.
//!
//! ```text
//! wait  = finish - now                            of the bytes before it, at the link's rate
//! drop if they and the packet are longer than the queue; an idle link takes a packet of any size
//! finish = max(finish, now) + len / rate
//! arrival = finish + delay [+ reorder_by with probability `reorder`]
//! lost on the wire with probability `loss`, after it took its time
//! ```
//!
//! Random bits are an argument, so a seed replays a run. O(1) a packet.

use crate::{
    stamp::Timestamper,
    units::{Bytes, Nanos, Rate},
    verdict::{DropReason, Verdict},
};

/// One direction of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkOptions {
    /// Propagation delay.
    pub delay: Nanos,
    /// Bit rate; `None`: packets take no time to send, and none waits.
    pub rate: Option<Rate>,
    /// How many bytes may wait for the link, including the packet that is being sent; `None`: the only bound
    /// is the wheel's.
    pub queue: Option<Bytes>,
    /// Probability that a packet is lost, 0 to 1.
    pub loss: f64,
    /// Probability that a packet is delayed by [`LinkOptions::reorder_by`], 0 to 1.
    pub reorder: f64,
    /// How much later such a packet arrives: those that follow within this time overtake it.
    pub reorder_by: Nanos,
}

impl Default for LinkOptions {
    /// A link without delay, rate and loss.
    fn default() -> Self {
        Self {
            delay: Nanos(0),
            rate: None,
            queue: None,
            loss: 0.0,
            reorder: 0.0,
            reorder_by: Nanos(0),
        }
    }
}

/// One direction of a link. See the [module](self).
#[derive(Debug, Clone)]
pub struct Link {
    delay: Nanos,
    serializer: Option<Timestamper>,
    queue: Option<Bytes>,
    loss: u64,
    reorder: u64,
    reorder_by: Nanos,
}

impl Link {
    /// An idle link. Probabilities are clamped to 0..=1.
    #[must_use]
    pub fn new(options: LinkOptions) -> Self {
        let LinkOptions { delay, rate, queue, loss, reorder, reorder_by } = options;
        Self {
            delay,
            serializer: rate.map(|rate| Timestamper::new(rate, Nanos(0))),
            queue,
            loss: threshold(loss),
            reorder: threshold(reorder),
            reorder_by,
        }
    }

    /// Sends a packet of `bytes` on the wire: it arrives at [`Verdict::SendAt`], or never. `random` is 64
    /// uniform bits, fresh for each packet.
    pub fn on_packet(&mut self, now: Nanos, bytes: u32, random: u64) -> Verdict {
        let mut arrival = now;
        let waiting = self.backlog(now);
        if let Some(serializer) = &mut self.serializer {
            let longer = |queue: Bytes| waiting.0.saturating_add(bytes.into()) > queue.0;
            if waiting.0 > 0 && self.queue.is_some_and(longer) {
                return Verdict::Drop(DropReason::Full);
            }
            arrival = serializer.stamp(now, bytes);
        }
        let (first, second) = (random >> 32, random & 0xffff_ffff);
        if first < self.loss {
            return Verdict::Drop(DropReason::Lost);
        }
        arrival = Nanos(arrival.0.saturating_add(self.delay.0));
        if second < self.reorder {
            arrival = Nanos(arrival.0.saturating_add(self.reorder_by.0));
        }
        Verdict::SendAt(arrival)
    }

    /// When the last accepted packet has been, or will be, sent; `None` without a rate.
    #[must_use]
    pub fn busy_until(&self) -> Option<Nanos> {
        self.serializer.as_ref().map(Timestamper::last)
    }

    /// Bytes that wait for the link, including the packet that is being sent.
    #[must_use]
    pub fn backlog(&self, now: Nanos) -> Bytes {
        self.serializer.as_ref().map_or(Bytes(0), |serializer| {
            serializer.rate().bytes_in(Nanos(serializer.last().0.saturating_sub(now.0)))
        })
    }
}

/// The probability as a bound for 32 uniform bits.
fn threshold(probability: f64) -> u64 {
    // From 0 to 2^32, where every draw is below: a cast of a float saturates, and takes NaN to zero.
    (probability.clamp(0.0, 1.0) * 4_294_967_296.0) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rate(bit_s: u64) -> Option<Rate> {
        Rate::from_bit_s(bit_s)
    }

    #[test]
    fn adds_its_times_up() {
        let mut link = Link::new(LinkOptions {
            delay: Nanos(10_000_000),
            rate: rate(8_000_000),
            queue: Some(Bytes(2_500)),
            ..LinkOptions::default()
        });
        let now = Nanos(1_000_000_000);
        let mut send = |at: u64| link.on_packet(Nanos(at), 1_000, u64::MAX);
        assert_eq!(send(now.0), Verdict::SendAt(Nanos(now.0 + 11_000_000)));
        assert_eq!(send(now.0), Verdict::SendAt(Nanos(now.0 + 12_000_000)));
        assert_eq!(send(now.0), Verdict::Drop(DropReason::Full));
        assert_eq!(send(now.0 + 500_000), Verdict::SendAt(Nanos(now.0 + 13_000_000)));
        assert_eq!(send(now.0 + 9_000_000), Verdict::SendAt(Nanos(now.0 + 20_000_000)));
    }

    #[test]
    fn a_packet_longer_than_the_queue_passes_an_idle_link() {
        let queue = Some(Bytes(100));
        let mut link =
            Link::new(LinkOptions { rate: rate(8_000), queue, ..LinkOptions::default() });
        assert!(link.on_packet(Nanos(0), 1_500, 0).passes());
        assert!(!link.on_packet(Nanos(0), 1_500, 0).passes());
    }

    #[test]
    fn a_clock_that_steps_far_back_finds_a_full_queue() {
        let queue = Some(Bytes(u64::MAX - 1));
        let mut link =
            Link::new(LinkOptions { rate: rate(u64::MAX), queue, ..LinkOptions::default() });
        assert!(link.on_packet(Nanos(u64::MAX), 1_500, 0).passes());
        assert_eq!(link.backlog(Nanos(0)), Bytes(u64::MAX));
        assert_eq!(link.on_packet(Nanos(0), 1_500, 0), Verdict::Drop(DropReason::Full));
    }

    #[test]
    fn probabilities_have_their_ends() {
        for (loss, random, passes) in
            [(0.0, 0, true), (1.0, u64::MAX, false), (0.5, 0, false), (0.5, u64::MAX, true)]
        {
            let mut link = Link::new(LinkOptions { loss, ..LinkOptions::default() });
            assert_eq!(link.on_packet(Nanos(0), 1_500, random).passes(), passes, "{loss} {random}");
        }
        let mut link =
            Link::new(LinkOptions { reorder: 0.5, reorder_by: Nanos(7), ..LinkOptions::default() });
        assert_eq!(link.on_packet(Nanos(1), 1, u64::MAX << 32), Verdict::SendAt(Nanos(8)));
        assert_eq!(link.on_packet(Nanos(1), 1, u64::MAX), Verdict::SendAt(Nanos(1)));
    }

    proptest! {
        /// Without reordering a link keeps the order, never sends faster than its rate, and never holds
        /// more than its queue and one packet.
        #[test]
        fn is_a_queue(
            bit_s in 100_000u64..10_000_000_000,
            queue in 1_500u64..200_000,
            packets in prop::collection::vec((0u64..1_000_000, 60u32..1_514), 1..300),
        ) {
            let mut link = Link::new(LinkOptions {
                rate: rate(bit_s),
                queue: Some(Bytes(queue)),
                ..LinkOptions::default()
            });
            let (mut now, mut last) = (0u64, 0u64);
            for (gap, bytes) in packets {
                now += gap;
                let sent = link.on_packet(Nanos(now), bytes, u64::MAX);
                prop_assert!(link.backlog(Nanos(now)).0 <= queue + 1);
                if let Verdict::SendAt(at) = sent {
                    let least = rate(bit_s).unwrap().time_for(Bytes(bytes.into())).0;
                    prop_assert!(at.0 >= now.max(last) + least);
                    last = at.0;
                }
            }
        }
    }
}
