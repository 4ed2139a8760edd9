//! A flow as a user writes it, or copies it from `ss` or `iperf3`.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

/// One address, or the two of a connection in either order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// An address and port of it.
    pub one: SocketAddr,
    /// The other, if it was named.
    pub other: Option<SocketAddr>,
}

impl Flow {
    /// Reads `A:p`, `A:p-B:q`, `A:p B:q`, or `A port p connected to B port q`. `None` if it is nothing of the
    /// kind; IPv6 addresses with a port stand in brackets.
    pub fn parse(text: &str) -> Option<Flow> {
        // An IPv4 address has no dash, and an IPv6 one neither.
        let text = text.replace(['-', ',', '>'], " ");
        let mut addresses = Vec::new();
        let mut words = text.split_whitespace().peekable();
        while let Some(word) = words.next() {
            if ["local", "connected", "to"].contains(&word) {
                continue;
            }
            let address = if words.next_if_eq(&"port").is_some() {
                SocketAddr::new(ip(word)?, words.next()?.parse().ok()?)
            } else {
                let (address, port) = word.rsplit_once(':')?;
                let bare = address.starts_with('[') || !address.contains(':');
                SocketAddr::new(ip(address).filter(|_| bare)?, port.parse().ok()?)
            };
            addresses.push(SocketAddr::new(address.ip().to_canonical(), address.port()));
        }
        match addresses[..] {
            [one] => Some(Flow { one, other: None }),
            [one, other] => Some(Flow { one, other: Some(other) }),
            _ => None,
        }
    }

    /// Whether a connection is meant.
    pub fn is(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        match self.other {
            None => self.one == local || self.one == remote,
            Some(other) => [(self.one, other), (other, self.one)].contains(&(local, remote)),
        }
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.other {
            None => write!(f, "{}", self.one),
            Some(other) => write!(f, "{} {other}", self.one),
        }
    }
}

/// The first address of a text with something else than a port behind its colon, and what is there.
pub(super) fn without_port(text: &str) -> Option<(&str, &str)> {
    text.split_whitespace().find_map(|word| {
        let (address, port) = word.rsplit_once(':')?;
        (ip(address).is_some() && port.parse::<u16>().is_err()).then_some((word, port))
    })
}

/// An address, with or without brackets and zone.
fn ip(text: &str) -> Option<IpAddr> {
    let text = text.split('%').next()?;
    text.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn flows_are_read_as_tools_print_them() {
        let (a, b): (SocketAddr, SocketAddr) =
            ("10.0.0.1:5201".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
        let one = Some(Flow { one: a, other: None });
        let two = Some(Flow { one: a, other: Some(b) });
        for (text, flow) in [
            ("10.0.0.1:5201", one),
            ("[::ffff:10.0.0.1]:5201", one),
            ("10.0.0.1:5201-10.0.0.2:80", two),
            ("10.0.0.1:5201 10.0.0.2:80", two),
            ("10.0.0.1:5201 -> 10.0.0.2:80", two),
            ("local 10.0.0.1 port 5201 connected to 10.0.0.2 port 80", two),
        ] {
            assert_eq!(Flow::parse(text), flow, "{text}");
        }
        let v6 = Flow::parse("[::1]:80").unwrap();
        assert_eq!(v6.one, "[::1]:80".parse().unwrap());
        assert_eq!(Flow::parse("[::1]%lo:80"), Some(v6));
        assert_eq!(Flow::parse("::1 port 80"), Some(v6));
    }

    #[test]
    fn what_is_no_flow_is_left_to_others() {
        for text in
            ["", "1234", "system.slice/a.service", "10.0.0.1", "::1:80", "a:80", "1.2.3.4:x"]
        {
            assert_eq!(Flow::parse(text), None, "{text}");
        }
        assert_eq!(Flow::parse("1.1.1.1:1 1.1.1.1:2 1.1.1.1:3"), None);
    }

    #[test]
    fn what_is_no_port_is_told_from_none() {
        for (text, found) in [
            ("10.0.0.1:99999", Some(("10.0.0.1:99999", "99999"))),
            ("10.0.0.1:5201 [::1]:x", Some(("[::1]:x", "x"))),
            ("10.0.0.1:", Some(("10.0.0.1:", ""))),
            ("10.0.0.1:5201", None),
        ] {
            assert_eq!(without_port(text), found, "{text}");
        }
    }

    #[test]
    fn one_address_is_either_end_and_two_are_in_any_order() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (a, b, c) = (address("10.0.0.1:1"), address("10.0.0.2:2"), address("10.0.0.3:3"));
        let one = Flow { one: a, other: None };
        assert!(one.is(a, b) && one.is(b, a) && !one.is(b, c));
        let two = Flow { one: a, other: Some(b) };
        assert!(two.is(a, b) && two.is(b, a) && !two.is(a, c));
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_back(a: [u8; 4], b: [u8; 16], p: u16, q: u16) {
            let one = SocketAddr::new(a.into(), p);
            let other = SocketAddr::new(IpAddr::from(b).to_canonical(), q);
            for flow in [Flow { one, other: None }, Flow { one: other, other: Some(one) }] {
                prop_assert_eq!(Flow::parse(&flow.to_string()), Some(flow));
            }
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = Flow::parse(&text);
        }
    }
}
