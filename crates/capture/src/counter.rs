//! Sixteen-bit counters that packets carry: the identification of IPv4, RTP's sequence number. Where they
//! count up by one a packet, a gap in them is packets that were lost.

/// The longest gap that is taken for loss; a longer one is a counter that does not count this flow.
const GAP_MAX: u16 = 16_384;
/// A packet that comes so much too late was overtaken.
const LATE_MAX: u16 = 64;
/// Steps without which nothing is said.
const STEPS_MIN: u64 = 16;
/// Steps of one without which it may count in others.
const ONES_MIN: u64 = 8;

/// What a step of the counter says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The next one, after so many that are missing.
    Missing(u16),
    /// One of those that were missing came late.
    Late,
    /// Nothing.
    Unclear,
}

/// One counter of a flow.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counter {
    last: Option<u16>,
    /// Steps of one.
    ones: u64,
    /// Longer steps ahead.
    gaps: u64,
    late: u64,
    unclear: u64,
    /// Gaps that were packets of the same sender to somebody else.
    shared: u64,
}

impl Counter {
    /// Takes the next packet's value. `shared` says that the sender's other flows account for a gap.
    pub fn step(&mut self, value: u16, shared: bool) -> Step {
        let Some(last) = self.last.replace(value) else { return Step::Missing(0) };
        let ahead = value.wrapping_sub(last);
        match ahead {
            1 => {
                self.ones += 1;
                Step::Missing(0)
            }
            2..=GAP_MAX => {
                self.gaps += 1;
                self.shared += u64::from(shared);
                Step::Missing(ahead - 1)
            }
            _ if ahead != 0 && last.wrapping_sub(value) <= LATE_MAX => {
                self.late += 1;
                self.last = Some(last);
                Step::Late
            }
            _ => {
                self.unclear += 1;
                Step::Unclear
            }
        }
    }

    /// Whether it counts the packets of this flow and no other's.
    pub fn counts(&self) -> bool {
        let steps = self.ones + self.gaps + self.late + self.unclear;
        steps >= STEPS_MIN
            && self.unclear * 20 <= steps
            // Some count by two, or in the other byte order.
            && self.ones >= ONES_MIN
            && self.shared * 10 <= self.gaps
    }

    /// Whether it seems to count all that the sender sends to anybody.
    pub fn is_shared(&self) -> bool {
        self.shared * 10 > self.gaps && self.gaps > 0
    }

    /// Packets that were overtaken.
    pub fn late(&self) -> u64 {
        self.late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(values: impl IntoIterator<Item = u16>) -> (Counter, u64) {
        let (mut counter, mut missing) = (Counter::default(), 0);
        for value in values {
            match counter.step(value, false) {
                Step::Missing(gap) => missing += u64::from(gap),
                Step::Late => missing -= 1,
                Step::Unclear => {}
            }
        }
        (counter, missing)
    }

    #[test]
    fn gaps_are_losses_over_the_wrap() {
        let values = (0..200_000_u32).filter(|v| v % 10 != 0).map(|v| v as u16);
        let (counter, missing) = counter(values);
        assert!(counter.counts());
        assert_eq!(missing, 19_999);
    }

    #[test]
    fn late_packets_are_not_lost() {
        let (counter, missing) =
            counter((0..100).flat_map(|at| [at * 4, at * 4 + 2, at * 4 + 1, at * 4 + 3]));
        assert!(counter.counts());
        assert_eq!((missing, counter.late()), (0, 100));
    }

    #[test]
    fn what_does_not_count_up_says_nothing() {
        assert!(!counter(std::iter::repeat_n(0, 100)).0.counts(), "always zero");
        let random = (0..1_000_u32).map(|v| (v.wrapping_mul(2_654_435_761) >> 13) as u16);
        assert!(!counter(random).0.counts());
        assert!(!counter(0..10).0.counts(), "too few");
    }
}
