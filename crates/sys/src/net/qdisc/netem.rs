//! The options of netem as bytes, as iproute2's `q_netem.c` sends them.

use super::super::netlink::Attributes;

const TCA_NETEM_RATE: u16 = 6;
const TCA_NETEM_RATE64: u16 = 8;
const TCA_NETEM_LATENCY64: u16 = 10;
const TCA_NETEM_PRNG_SEED: u16 = 14;

/// netem: delay, rate and loss of what leaves a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Netem {
    /// How long each packet is held up, in nanoseconds.
    pub delay_ns: u64,
    /// At what rate packets leave; none: at once.
    pub rate_bit_s: Option<u64>,
    /// How many packets it holds, those that are only delayed among them; it drops the rest.
    pub limit_packets: u32,
    /// Probability that a packet is lost, 0 to 1.
    pub loss: f64,
    /// Decides which are lost; kernels before 6.6 do not take it, and it is then not sent.
    pub seed: Option<u64>,
}

impl Netem {
    /// `struct tc_netem_qopt`, then attributes, without one around them.
    pub(super) fn encode(&self) -> Vec<u8> {
        // The kernel's scale: all 32 bits are certainty.
        let loss = (self.loss.clamp(0.0, 1.0) * f64::from(u32::MAX)).round() as u32;
        let mut attributes = Attributes::default();
        attributes.push(TCA_NETEM_LATENCY64, &self.delay_ns.to_ne_bytes());
        if let Some(rate_bit_s) = self.rate_bit_s {
            let bytes_s = rate_bit_s / 8;
            if bytes_s > u32::MAX.into() {
                attributes.push(TCA_NETEM_RATE64, &bytes_s.to_ne_bytes());
            }
            // `struct tc_netem_rate`: bytes a second, then overhead and cells, which are none.
            let mut rate = [0; 16];
            rate[..4].copy_from_slice(&u32::try_from(bytes_s).unwrap_or(u32::MAX).to_ne_bytes());
            attributes.push(TCA_NETEM_RATE, &rate);
        }
        if let Some(seed) = self.seed {
            attributes.push(TCA_NETEM_PRNG_SEED, &seed.to_ne_bytes());
        }
        // latency in ticks (the attribute has it exactly), limit, loss, gap, duplicate, jitter
        let mut options = Vec::with_capacity(96);
        for field in [0, self.limit_packets, loss, 0, 0, 0] {
            options.extend_from_slice(&field.to_ne_bytes());
        }
        options.extend(attributes.into_bytes());
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_stand_in_their_places() {
        let netem = Netem {
            delay_ns: 10_000_000,
            rate_bit_s: Some(100_000_000_000),
            limit_packets: 1000,
            loss: 1.0,
            seed: Some(7),
        };
        let bytes = netem.encode();
        let word = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap());
        assert_eq!((word(0), word(4), word(8)), (0, 1000, u32::MAX));
        let attribute = |at: usize| (word(at) & 0xffff, word(at) >> 16, word(at + 4));
        assert_eq!(attribute(24), (12, 10, 10_000_000));
        assert_eq!(attribute(36), (12, 8, (12_500_000_000u64 & 0xffff_ffff) as u32));
        assert_eq!(attribute(48), (20, 6, u32::MAX));
        assert_eq!(attribute(68), (12, 14, 7));
        assert_eq!(bytes.len(), 80);
    }
}
