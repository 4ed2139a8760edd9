//! The rate that a source of regular bursts gets through a policer.

use crate::{
    token_bucket::{BucketConfig, BucketError, TokenBucket},
    units::{Bytes, NANOS_PER_SEC, Nanos, Rate},
};

/// The most packets that [`bursty_source`] follows.
pub const PACKETS_MAX: u64 = 4_000_000;
/// Bursts after which the bucket surely has settled.
const SETTLE: u64 = 32;

/// A source that sends a burst and then rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BurstySource {
    /// Bytes of a burst.
    pub burst: Bytes,
    /// From the start of one burst to that of the next.
    pub period: Nanos,
    /// Bytes of a packet; the last of a burst may be shorter.
    pub packet: u32,
    /// Line rate of a burst.
    pub line: Rate,
}

/// The part of a burst that passed, in the long run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// Bytes a burst, on average.
    pub bytes: Bytes,
    /// Their rate.
    pub rate_bit_s: u64,
    /// Packets sent during the measurement.
    pub sent_packets: u64,
    /// Packets that passed of these.
    pub passed_packets: u64,
}

/// Sends the source's packets through the bucket, one by one, until the result repeats. Exact but for the
/// rounding of a packet's time to a nanosecond.
///
/// As a fluid: a burst of S bytes lasts S / line. At its start the bucket holds T, which is `min(B, what was
/// left + rate x rest)`, and it passes `min(S, T + rate x S / line)`.
///
/// # Errors
/// [`BucketError`] if the bucket cannot be.
///
/// O(packets of 64 bursts), at most [`PACKETS_MAX`].
pub fn bursty_source(
    rate: Rate,
    bucket: Bytes,
    source: &BurstySource,
) -> Result<Passed, BucketError> {
    let config = BucketConfig::new(rate, bucket)?;
    let mut bucket = TokenBucket::new(config, Nanos(0));
    let packet = u64::from(source.packet.max(1));
    let each = source.burst.0.div_ceil(packet).max(1);
    let bursts = (2 * SETTLE).min(PACKETS_MAX / each).max(1);
    // A source that cannot send a burst in a period sends all the time.
    let period = source.period.max(source.line.time_for(source.burst));
    let (mut bytes, mut sent, mut passed, mut measured) = (0, 0, 0, 0);
    for burst in 0..bursts {
        let start = burst.saturating_mul(period.0);
        let settled = burst >= bursts / 2;
        measured += u64::from(settled);
        for at in 0..each.min(PACKETS_MAX) {
            let gone = at * packet;
            let now = start.saturating_add(source.line.time_for(Bytes(gone)).0);
            let length = packet.min(source.burst.0.saturating_sub(gone));
            let through = bucket.on_packet(Nanos(now), length as u32);
            if settled {
                sent += 1;
                passed += u64::from(through);
                bytes += if through { length } else { 0 };
            }
        }
    }
    let time = u128::from(period.0) * u128::from(measured);
    let bit_s = u128::from(bytes) * 8 * u128::from(NANOS_PER_SEC) / time.max(1);
    Ok(Passed {
        bytes: Bytes(bytes / measured.max(1)),
        rate_bit_s: u64::try_from(bit_s).unwrap_or(u64::MAX),
        sent_packets: sent,
        passed_packets: passed,
    })
}
