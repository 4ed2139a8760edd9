//! Who is exempt from a limit: prefixes of addresses at the other end, and code points.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, net::IpAddr, str::FromStr};

use crate::{police::Dscp, prefixes::Prefixes};

/// Prefixes that one limit exempts at most.
pub const MAX_PREFIXES: usize = 32;

/// Addresses that begin alike; those of IPv4 as IPv6 has them (`::ffff:a.b.c.d`, RFC 4291).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    /// The address, all zero beyond the prefix.
    pub address: [u8; 16],
    /// How many of its bits are the prefix, 0 to 128.
    pub bits: u8,
}

/// The bits before an IPv4 address.
const MAPPED_BITS: u8 = 96;

impl FromStr for Prefix {
    type Err = ExemptError;

    fn from_str(text: &str) -> Result<Self, ExemptError> {
        let none = || ExemptError::None(text.to_owned());
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().map_err(|_| none())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| none())?;
        let (octets, before) = match address {
            IpAddr::V4(v4) => (v4.to_ipv6_mapped().octets(), MAPPED_BITS),
            IpAddr::V6(v6) => (v6.octets(), 0),
        };
        let bits = match bits {
            None => 128,
            Some(bits) if bits <= 128 - before => before + bits,
            Some(_) => return Err(none()),
        };
        let prefix = Prefix { address: octets, bits };
        match prefix.masked() == prefix {
            true => Ok(prefix),
            false => Err(ExemptError::HostBits { text: text.to_owned(), network: prefix.masked() }),
        }
    }
}

impl Prefix {
    fn masked(self) -> Prefix {
        let mask = u128::MAX.checked_shl(128 - u32::from(self.bits)).unwrap_or(0);
        let address = (u128::from_be_bytes(self.address) & mask).to_be_bytes();
        Prefix { address, ..self }
    }

    /// Whether it is one of IPv4: `::/0` and its like are not.
    #[must_use]
    pub fn is_v4(&self) -> bool {
        let address = core::net::Ipv6Addr::from(self.address);
        self.bits >= MAPPED_BITS && address.to_ipv4_mapped().is_some()
    }

    /// Whether an address begins with it.
    #[must_use]
    pub fn contains(&self, address: [u8; 16]) -> bool {
        let one = Prefix { address, bits: 128 };
        one.is_v4() == self.is_v4() && Prefix { address, ..*self }.masked().address == self.address
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = core::net::Ipv6Addr::from(self.address);
        match address.to_ipv4_mapped() {
            Some(v4) if self.bits >= MAPPED_BITS => write!(f, "{v4}/{}", self.bits - MAPPED_BITS),
            _ => write!(f, "{address}/{}", self.bits),
        }
    }
}

/// What a limit leaves alone; in order and without doubles, so that equal ones act alike.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Exempt {
    /// Addresses at the other end.
    pub prefixes: Prefixes,
    /// Bit d: code point d is exempt.
    pub dscps: u64,
}

impl Exempt {
    /// Exempts one more: a prefix or address, or `dscp NAME`.
    ///
    /// # Errors
    /// [`ExemptError`]; nothing is added.
    pub fn add(&mut self, text: &str) -> Result<(), ExemptError> {
        let mut words = text.split([' ', ':']).filter(|word| !word.is_empty());
        if words.next() == Some("dscp") {
            let dscp = words.next().and_then(|name| name.parse::<Dscp>().ok());
            let dscp = dscp.filter(|_| words.next().is_none());
            let dscp = dscp.ok_or_else(|| ExemptError::None(text.to_owned()))?;
            self.dscps |= 1 << dscp.value();
            return Ok(());
        }
        self.add_prefix(text.trim().parse()?)
    }

    /// Exempts a prefix.
    ///
    /// # Errors
    /// [`ExemptError::TooMany`].
    pub fn add_prefix(&mut self, prefix: Prefix) -> Result<(), ExemptError> {
        if self.prefixes.insert(prefix) { Ok(()) } else { Err(ExemptError::TooMany) }
    }

    /// Nobody is exempt.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.prefixes.is_empty() && self.dscps == 0
    }

    /// The code points.
    pub fn dscps(&self) -> impl Iterator<Item = Dscp> {
        let dscps = self.dscps;
        (0..64).filter(move |dscp| dscps >> dscp & 1 != 0).filter_map(Dscp::new)
    }
}

impl FromStr for Exempt {
    type Err = ExemptError;

    /// As on a command line: `10.0.0.0/8,2001:db8::/32,dscp:ef`, or `none`.
    fn from_str(text: &str) -> Result<Self, ExemptError> {
        let mut exempt = Exempt::default();
        if text.trim() != "none" {
            text.split(',').try_for_each(|part| exempt.add(part))?;
        }
        Ok(exempt)
    }
}

impl fmt::Display for Exempt {
    /// As on a command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let mut comma = "";
        if !self.prefixes.is_empty() {
            write!(f, "{}", self.prefixes)?;
            comma = ",";
        }
        for dscp in self.dscps() {
            write!(f, "{comma}dscp:{dscp}")?;
            comma = ",";
        }
        Ok(())
    }
}

/// Why a text exempts nobody. The message says what to type instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExemptError {
    /// Neither prefix nor code point.
    #[error(
        "`{0}` is neither a prefix nor a code point; write for example 10.0.0.0/8, 2001:db8::/32 or dscp:ef"
    )]
    None(String),
    /// The address goes on behind the prefix.
    #[error("`{text}` has bits beyond its prefix; write {network}, or a longer prefix")]
    HostBits {
        /// As written.
        text: String,
        /// What was probably meant.
        network: Prefix,
    },
    /// More than there is room for.
    #[error("more than {MAX_PREFIXES} prefixes; write shorter ones that contain several")]
    TooMany,
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn what_is_exempt_reads_as_it_is_written() {
        for text in ["10.0.0.0/8", "2001:db8::/32,dscp:ef", "0.0.0.0/0", "::/0", "none", "dscp:63"]
        {
            assert_eq!(text.parse::<Exempt>().unwrap().to_string(), text);
        }
        let exempt: Exempt = "fe80::/10,10.1.2.3,10.0.0.0/8,10.1.2.3,dscp af11".parse().unwrap();
        assert_eq!(exempt.to_string(), "10.0.0.0/8,10.1.2.3/32,fe80::/10,dscp:af11");
        let refusal = |text: &str| text.parse::<Exempt>().unwrap_err().to_string();
        assert!(refusal("10.1.0.0/8").contains("write 10.0.0.0/8, or a longer prefix"));
        assert!(refusal("10.0.0.0/33").contains("neither a prefix"));
        assert!(refusal("dscp ef cs1").contains("neither a prefix"));
        assert!(refusal("eth0").contains("neither a prefix"));
        let many: std::vec::Vec<_> = (0..33).map(|i| std::format!("10.{i}.0.0/16")).collect();
        assert_eq!(many[..32].join(",").parse::<Exempt>().unwrap().prefixes.as_slice().len(), 32);
        assert!(refusal(&many.join(",")).contains("more than 32 prefixes"));
    }

    #[test]
    fn a_prefix_contains_what_begins_with_it() {
        let octets = |text: &str| text.parse::<Prefix>().unwrap().address;
        let contains = |prefix: &str, address: &str| {
            prefix.parse::<Prefix>().unwrap().contains(octets(address))
        };
        assert!(contains("10.0.0.0/8", "10.255.0.1") && !contains("10.0.0.0/8", "11.0.0.1"));
        assert!(contains("2001:db8::/32", "2001:db8::1") && !contains("0.0.0.0/0", "::1"));
        assert!(!contains("::/0", "10.0.0.1") && contains("0.0.0.0/0", "10.0.0.1"));
    }
}
