//! Queueing disciplines that no limit puts on a device, but peers and links of the lab: fq, CAKE and netem;
//! and a filter by destination.
//!
//! As those of `tidegate-sys` they are what `tc` of iproute2 sends for the same words.

use std::net::IpAddr;

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage as Message,
    tc::{TcAttribute, TcMessage},
};
use tidegate_sys::net::{
    Attributes, NetError, Netlink,
    qdisc::{Handle, Qdisc},
};

const TCA_NETEM_RATE: u16 = 6;
const TCA_NETEM_RATE64: u16 = 8;
const TCA_NETEM_LATENCY64: u16 = 10;
const TCA_NETEM_PRNG_SEED: u16 = 14;

const TCA_CAKE_BASE_RATE64: u16 = 2;

const TCA_U32_CLASSID: u16 = 1;
const TCA_U32_SEL: u16 = 5;
const U32_TERMINAL: u8 = 1;
/// Offsets of the destination address from the start of the network header.
const IPV4_DST_OFFSET: i32 = 16;
const IPV6_DST_OFFSET: i32 = 24;

const TCA_OPTIONS: u16 = 2;
const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;
/// Filters of one priority match one protocol, so the two address families need two.
const FILTER_PRIORITY_IPV4: u16 = 10;
const FILTER_PRIORITY_IPV6: u16 = 11;

/// A queue for each flow, whose packets leave at the times that they carry.
#[derive(Debug, Clone, Copy)]
pub struct Fq;

impl Qdisc for Fq {
    fn kind(&self) -> &'static str {
        "fq"
    }
}

/// CAKE, a shaper with a queue for each flow and host, each kept short: as `tc qdisc add ... cake bandwidth
/// RATE`; what else it can is as the kernel has it.
#[derive(Debug, Clone, Copy)]
pub struct Cake {
    pub bandwidth_bit_s: u64,
}

impl Qdisc for Cake {
    fn kind(&self) -> &'static str {
        "cake"
    }

    fn options(&self) -> Result<Option<Vec<u8>>, NetError> {
        let mut options = Attributes::default();
        options.push(TCA_CAKE_BASE_RATE64, &(self.bandwidth_bit_s / 8).to_ne_bytes());
        Ok(Some(options.into_bytes()))
    }
}

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

impl Qdisc for Netem {
    fn kind(&self) -> &'static str {
        "netem"
    }

    /// `struct tc_netem_qopt`, then attributes, without one around them.
    fn options(&self) -> Result<Option<Vec<u8>>, NetError> {
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
        Ok(Some(options))
    }
}

/// Sends packets with a destination in a network to a class.
#[derive(Debug, Clone, Copy)]
pub struct DestinationFilter {
    /// The device.
    pub ifindex: u32,
    /// The qdisc whose packets are looked at.
    pub parent: Handle,
    /// The network's address.
    pub network: IpAddr,
    /// Length of the network's prefix in bits.
    pub prefix_len: u8,
    /// Where matching packets go.
    pub class: Handle,
}

/// Adds a filter that sends packets to a class by their destination address.
pub fn add_filter(netlink: &mut Netlink, filter: &DestinationFilter) -> Result<(), NetError> {
    let DestinationFilter { ifindex, parent, network, prefix_len, class } = *filter;
    let options = u32_destination(network, prefix_len, class)?;
    let mut message = TcMessage::with_index(ifindex as i32);
    message.header.parent = parent.into();
    let (priority, protocol) = match network {
        IpAddr::V4(_) => (FILTER_PRIORITY_IPV4, ETH_P_IP),
        IpAddr::V6(_) => (FILTER_PRIORITY_IPV6, ETH_P_IPV6),
    };
    message.header.info = u32::from(priority) << 16 | u32::from(protocol.to_be());
    message.attributes = vec![
        TcAttribute::Kind("u32".into()),
        TcAttribute::Other(DefaultNla::new(TCA_OPTIONS, options)),
    ];
    let action = format!("add a filter for {network}/{prefix_len} to {parent} of device {ifindex}");
    netlink.request(&action, Message::NewTrafficFilter(message), NLM_F_CREATE | NLM_F_EXCL)
}

/// The options of a u32 filter that matches a destination: one 32-bit comparison for each word of
/// the address that the prefix reaches.
fn u32_destination(network: IpAddr, prefix_len: u8, class: Handle) -> Result<Vec<u8>, NetError> {
    let (octets, offset) = match network {
        IpAddr::V4(v4) => (v4.octets().to_vec(), IPV4_DST_OFFSET),
        IpAddr::V6(v6) => (v6.octets().to_vec(), IPV6_DST_OFFSET),
    };
    if usize::from(prefix_len) > octets.len() * 8 {
        return Err(NetError::Invalid {
            field: "the prefix length",
            read: prefix_len.to_string(),
            expected: "use at most 32 for IPv4, 128 for IPv6",
        });
    }
    let mut keys = Vec::new();
    let mut count = 0u8;
    for (word, chunk) in octets.chunks_exact(4).enumerate() {
        let bits = u32::from(prefix_len).saturating_sub(32 * word as u32).min(32);
        // A filter needs a key; a prefix of 0 becomes one that matches anything.
        if bits == 0 && word > 0 {
            break;
        }
        let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
        let value = u32::from_be_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]) & mask;
        keys.extend(mask.to_be_bytes());
        keys.extend(value.to_be_bytes());
        keys.extend((offset + 4 * word as i32).to_ne_bytes());
        keys.extend(0i32.to_ne_bytes());
        count += 1;
    }
    // struct tc_u32_sel: flags, offshift, nkeys, padding, then offsets and hash that are not used.
    let mut selector = vec![U32_TERMINAL, 0, count, 0];
    selector.resize(16, 0);
    selector.extend(keys);
    let class_id = u32::from(class.major) << 16 | u32::from(class.minor);
    let mut options = Attributes::default();
    options.push(TCA_U32_CLASSID, &class_id.to_ne_bytes()).push(TCA_U32_SEL, &selector);
    Ok(options.into_bytes())
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::NlasIterator;

    use super::*;

    fn attribute(options: &[u8], kind: u16) -> Option<Vec<u8>> {
        NlasIterator::new(options).flatten().find(|a| a.kind() == kind).map(|a| a.value().to_vec())
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn a_destination_becomes_masked_words() {
        let class = Handle::new(1, 0x10);
        let v4 = u32_destination("10.1.2.3".parse().unwrap(), 24, class).unwrap();
        let selector = attribute(&v4, TCA_U32_SEL).unwrap();
        assert_eq!(selector[..4], [1, 0, 1, 0]);
        assert_eq!(selector[16..24], [255, 255, 255, 0, 10, 1, 2, 0]);
        assert_eq!(word(&selector, 24), 16);
        assert_eq!(word(&attribute(&v4, TCA_U32_CLASSID).unwrap(), 0), 0x0001_0010);

        let v6 = u32_destination("fd00::1".parse().unwrap(), 128, class).unwrap();
        let selector = attribute(&v6, TCA_U32_SEL).unwrap();
        assert_eq!((selector[2], selector.len()), (4, 16 + 4 * 16));
        assert_eq!(word(&selector, 16 + 3 * 16 + 8), 36);

        let any = u32_destination("0.0.0.0".parse().unwrap(), 0, class).unwrap();
        assert_eq!(attribute(&any, TCA_U32_SEL).unwrap()[2], 1);
        assert!(u32_destination("10.0.0.0".parse().unwrap(), 33, class).is_err());
    }

    #[test]
    fn options_of_netem_stand_in_their_places() {
        let netem = Netem {
            delay_ns: 10_000_000,
            rate_bit_s: Some(100_000_000_000),
            limit_packets: 1000,
            loss: 1.0,
            seed: Some(7),
        };
        let bytes = netem.options().unwrap().unwrap();
        let word = |at: usize| word(&bytes, at);
        assert_eq!((word(0), word(4), word(8)), (0, 1000, u32::MAX));
        let attribute = |at: usize| (word(at) & 0xffff, word(at) >> 16, word(at + 4));
        assert_eq!(attribute(24), (12, 10, 10_000_000));
        assert_eq!(attribute(36), (12, 8, (12_500_000_000u64 & 0xffff_ffff) as u32));
        assert_eq!(attribute(48), (20, 6, u32::MAX));
        assert_eq!(attribute(68), (12, 14, 7));
        assert_eq!(bytes.len(), 80);
    }
}
