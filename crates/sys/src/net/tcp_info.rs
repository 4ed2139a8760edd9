//! What TCP says of a connection.

use std::time::Duration;

/// What the sender's side of a TCP connection knows (`struct tcp_info`).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// How long TCP waits for an ACK before it sends again.
    pub retransmission_timeout: Duration,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// The smallest round-trip time seen; zero before the first sample.
    pub rtt_min: Duration,
    /// Segments retransmitted since the connection began.
    pub retransmitted_segments: u32,
    /// Data segments sent since the connection began, retransmissions included.
    pub data_segments_sent: u32,
    pub cwnd_segments: u32,
    /// The rate at which the connection paces itself; `u64::MAX` is no pacing.
    pub pacing_bytes_s: u64,
    /// The most at which it may pace itself (`SO_MAX_PACING_RATE`); `u64::MAX` is unlimited.
    pub max_pacing_bytes_s: u64,
    /// The rate at which data last arrived; no more than what the program sent.
    pub delivery_bytes_s: u64,
    /// Payload sent since the connection began, retransmissions included.
    pub bytes_sent: u64,
    /// Payload received since the connection began.
    pub bytes_received: u64,
    /// For how long there was something to send, or in flight.
    pub busy: Duration,
    /// For how long of that the receiver's window was full.
    pub receiver_limited: Duration,
}

/// Up to and including `tcpi_bytes_sent`; there since Linux 4.19.
pub const TCP_INFO_BYTES: usize = 208;

impl TcpInfo {
    /// Offsets are those of `struct tcp_info` in `linux/tcp.h`, which only grows at its end.
    pub fn parse(raw: &[u8; TCP_INFO_BYTES]) -> Self {
        let u32_at =
            |at: usize| u32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let u64_at = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&raw[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        let time_at = |at: usize| Duration::from_micros(u64_at(at));
        Self {
            retransmission_timeout: Duration::from_micros(u32_at(8).into()),
            rtt: Duration::from_micros(u32_at(68).into()),
            // The kernel starts the minimum at its largest value.
            rtt_min: match u32_at(148) {
                u32::MAX => Duration::ZERO,
                us => Duration::from_micros(us.into()),
            },
            retransmitted_segments: u32_at(100),
            data_segments_sent: u32_at(156),
            cwnd_segments: u32_at(80),
            pacing_bytes_s: u64_at(104),
            max_pacing_bytes_s: u64_at(112),
            delivery_bytes_s: u64_at(160),
            bytes_sent: u64_at(200),
            bytes_received: u64_at(128),
            busy: time_at(168),
            receiver_limited: time_at(176),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_at_their_offsets() {
        let mut raw = [0; TCP_INFO_BYTES];
        for (at, value) in [(68, 1500u32), (100, 7), (148, 30), (156, 99), (80, 10)] {
            raw[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        raw[104..112].copy_from_slice(&u64::MAX.to_ne_bytes());
        raw[200..208].copy_from_slice(&(1u64 << 33).to_ne_bytes());
        let info = TcpInfo::parse(&raw);
        assert_eq!(info.rtt, Duration::from_micros(1500));
        assert_eq!(info.rtt_min, Duration::from_micros(30));
        assert_eq!((info.retransmitted_segments, info.data_segments_sent), (7, 99));
        assert_eq!(info.cwnd_segments, 10);
        assert_eq!((info.pacing_bytes_s, info.bytes_sent), (u64::MAX, 1 << 33));
    }
}
