//! One rtnetlink socket: requests, acknowledgements, dumps, and the attribute encoder that the
//! options of queueing disciplines need.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::NetError;

/// `struct nlmsghdr`, which precedes the text of an extended acknowledgement.
const NLMSGHDR_BYTES: usize = 16;
/// `NLMSGERR_ATTR_MSG`: the kernel's own words.
const EXT_ACK_TEXT: u16 = 1;

/// A handle to the routing netlink of one network namespace.
///
/// It stays with the namespace in which it was opened, whichever thread uses it later.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// Opens a handle to the namespace of the calling thread.
    pub fn open() -> Result<Self, NetError> {
        let refused = |e| NetError::refused("open a netlink socket", e);
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(refused)?;
        socket.bind_auto().map_err(refused)?;
        socket.connect(&SocketAddr::new(0, 0)).map_err(refused)?;
        socket.set_ext_ack(true).map_err(refused)?;
        // The refused request comes back as its header only, so that the kernel's text follows
        // at a known place.
        socket.set_cap_ack(true).map_err(refused)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends a request and waits for its acknowledgement.
    pub fn request(
        &mut self,
        action: &str,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), NetError> {
        self.send(action, message, NLM_F_ACK | flags)?;
        self.collect(action, |_| {})
    }

    /// Asks for one object (`NLM_F_ACK`), or for all of a kind (`NLM_F_DUMP`).
    pub(crate) fn ask(
        &mut self,
        action: &str,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<Vec<RouteNetlinkMessage>, NetError> {
        let mut answers = Vec::new();
        self.send(action, message, flags)?;
        self.collect(action, |answer| answers.push(answer))?;
        Ok(answers)
    }

    fn send(
        &mut self,
        action: &str,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), NetError> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        packet.finalize();
        let mut buffer = vec![0; packet.buffer_len()];
        packet.serialize(&mut buffer);
        self.socket.send(&buffer, 0).map_err(|e| NetError::refused(action, e))?;
        Ok(())
    }

    /// Reads answers to the last request until its end, an acknowledgement or an error.
    fn collect(
        &mut self,
        action: &str,
        mut each: impl FnMut(RouteNetlinkMessage),
    ) -> Result<(), NetError> {
        let malformed = |detail: String| NetError::Malformed { action: action.into(), detail };
        loop {
            let (datagram, _) =
                self.socket.recv_from_full().map_err(|e| NetError::refused(action, e))?;
            let mut rest = datagram.as_slice();
            while !rest.is_empty() {
                let packet = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(|e| malformed(e.to_string()))?;
                let padded_len = (packet.header.length as usize).next_multiple_of(4);
                rest = rest.get(padded_len..).unwrap_or_default();
                // An earlier request of this handle may have failed half-way through its answers.
                if packet.header.sequence_number != self.sequence {
                    continue;
                }
                match packet.payload {
                    NetlinkPayload::InnerMessage(message) => each(message),
                    NetlinkPayload::Done(done) if done.code == 0 => return Ok(()),
                    NetlinkPayload::Done(done) => {
                        let source = io::Error::from_raw_os_error(done.code.abs());
                        return Err(NetError::refused(action, source));
                    }
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(()),
                    NetlinkPayload::Error(error) => {
                        let has_text = packet.header.flags & NLM_F_ACK_TLVS != 0;
                        let detail =
                            if has_text { ext_ack_text(&error.header) } else { String::new() };
                        return Err(NetError::Refused {
                            action: action.into(),
                            source: error.to_io(),
                            detail,
                        });
                    }
                    NetlinkPayload::Overrun(_) => return Err(malformed("overrun".into())),
                    _ => {}
                }
            }
        }
    }
}

fn ext_ack_text(capped_request: &[u8]) -> String {
    let attributes = capped_request.get(NLMSGHDR_BYTES..).unwrap_or_default();
    NlasIterator::new(attributes)
        .flatten()
        .find(|attribute| attribute.kind() == EXT_ACK_TEXT)
        .map(|text| String::from_utf8_lossy(text.value()).trim_end_matches('\0').to_owned())
        .unwrap_or_default()
}

/// Writes netlink attributes: a 16-bit length, a 16-bit kind, the value, padding to 4 bytes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    pub fn push(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        // The longest value here is a rate table of 1024 bytes.
        debug_assert!(value.len() < usize::from(u16::MAX) - 4);
        let len = (value.len() + 4) as u16;
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_their_length_is_not() {
        let mut attributes = Attributes::default();
        attributes.push(7, &[1, 2, 3, 4, 5]).push(8, &[]);
        let mut expected = vec![];
        expected.extend_from_slice(&9u16.to_ne_bytes());
        expected.extend_from_slice(&7u16.to_ne_bytes());
        expected.extend_from_slice(&[1, 2, 3, 4, 5, 0, 0, 0]);
        expected.extend_from_slice(&4u16.to_ne_bytes());
        expected.extend_from_slice(&8u16.to_ne_bytes());
        assert_eq!(attributes.into_bytes(), expected);
    }

    #[test]
    fn the_kernel_text_follows_the_capped_header() {
        let mut answer = vec![0; NLMSGHDR_BYTES];
        let mut text = Attributes::default();
        text.push(EXT_ACK_TEXT, b"no such class\0");
        answer.extend(text.into_bytes());
        assert_eq!(ext_ack_text(&answer), "no such class");
        assert_eq!(ext_ack_text(&[]), "");
    }
}
