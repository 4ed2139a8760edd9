//! A TCP/IP stack in user space on the NIC: [smoltcp](https://docs.rs/smoltcp)'s `Device`, one for each flow.
//!
//! smoltcp asks its device for leave to send before it says which socket wants to, so an interface of
//! smoltcp here has one flow, and a connection that is paced alone has an interface of its own. A
//! [`FlowDevice`] borrows what it needs for one call of `Interface::poll`; a flow without allowance gives no
//! token, the socket keeps its bytes, and [`Event::Writable`](crate::nic::Event::Writable) says when to poll
//! that interface again. So nothing is dropped between the socket and the wire, however slow the flow.
//!
//! The link is taken as one between two known stations: each packet gets the same Ethernet header, and there
//! is no ARP (smoltcp's `Medium::Ip`).

use std::collections::VecDeque;

use smoltcp::{
    phy::{self, DeviceCapabilities, Medium},
    time::Instant,
};

use crate::{Packet, PacketPool, Producer, checksum, headers::ETHERNET_BYTES, nic::Flow};

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];

/// Who sends to whom on the link, and how much at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Station {
    /// The MAC address of this end.
    pub source: [u8; 6],
    /// The MAC address of the other: the next hop.
    pub destination: [u8; 6],
    /// The largest IP packet, in bytes.
    pub mtu_bytes: usize,
}

/// What an interface of smoltcp sends and receives by. See the [module](self).
pub struct FlowDevice<'a> {
    /// Who sends.
    pub producer: &'a mut Producer,
    /// The flow that all packets of the interface are of.
    pub flow: Flow,
    /// What packets are made of: a buffer for all that its flows may have in the shaper, and one.
    pub pool: &'a mut PacketPool,
    /// Frames that have arrived for this interface.
    pub arrivals: &'a mut VecDeque<Packet>,
    /// The link.
    pub station: Station,
}

impl FlowDevice<'_> {
    /// A buffer for a packet, if the flow may send one.
    fn leave_to_send(&mut self) -> Option<Packet> {
        if !self.producer.poll_writable(self.flow) {
            return None;
        }
        self.pool.take(ETHERNET_BYTES + self.station.mtu_bytes)
    }
}

impl phy::Device for FlowDevice<'_> {
    type RxToken<'a>
        = RxToken
    where
        Self: 'a;
    type TxToken<'a>
        = TxToken<'a>
    where
        Self: 'a;

    fn receive(&mut self, _now: Instant) -> Option<(RxToken, TxToken<'_>)> {
        self.arrivals.front()?;
        // What arrives may want an answer: it waits for the leave to give one.
        let packet = self.leave_to_send()?;
        let mut arrived = self.arrivals.pop_front()?;
        // What comes from this host may come without checksum: there is none on the way to break it.
        let vnet = *arrived.vnet();
        if vnet.needs_checksum() {
            let (start, offset) = (vnet.csum_start.into(), vnet.csum_offset.into());
            checksum::complete(arrived.frame_mut(), start, offset);
        }
        let (flow, station) = (self.flow, self.station);
        let answer = TxToken { packet, producer: &mut *self.producer, flow, station };
        Some((RxToken(arrived), answer))
    }

    fn transmit(&mut self, _now: Instant) -> Option<TxToken<'_>> {
        let packet = self.leave_to_send()?;
        let (flow, station) = (self.flow, self.station);
        Some(TxToken { packet, producer: &mut *self.producer, flow, station })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.station.mtu_bytes;
        capabilities
    }
}

/// A frame that has arrived.
#[derive(Debug)]
pub struct RxToken(Packet);

impl phy::RxToken for RxToken {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0.frame().get(ETHERNET_BYTES..).unwrap_or_default())
    }
}

/// Leave to send one packet.
pub struct TxToken<'a> {
    packet: Packet,
    producer: &'a mut Producer,
    flow: Flow,
    station: Station,
}

impl phy::TxToken for TxToken<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(mut self, len: usize, f: F) -> R {
        self.packet.set_len(ETHERNET_BYTES + len);
        let (header, ip) = self.packet.frame_mut().split_at_mut(ETHERNET_BYTES);
        let result = f(ip);
        let version = ip.first().map_or(4, |byte| byte >> 4);
        header[..6].copy_from_slice(&self.station.destination);
        header[6..12].copy_from_slice(&self.station.source);
        header[12..].copy_from_slice(if version == 6 { &ETHERTYPE_IPV6 } else { &ETHERTYPE_IPV4 });
        // It was asked for leave, and nobody else has had the producer since.
        let _ = self.producer.submit(self.flow, self.packet, 0);
        result
    }
}
