//! Prefixes of addresses: those that a limit exempts, and those that it polices.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, net::IpAddr, str::FromStr};

/// Most prefixes of one list.
pub const MAX_PREFIXES: usize = 32;

/// Addresses that begin alike; IPv4 addresses are mapped into IPv6 (`::ffff:a.b.c.d`, RFC 4291).
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
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let none = || PrefixError::None(text.to_owned());
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
            false => Err(PrefixError::HostBits { text: text.to_owned(), network: prefix.masked() }),
        }
    }
}

impl Prefix {
    fn masked(self) -> Prefix {
        let mask = u128::MAX.checked_shl(128 - u32::from(self.bits)).unwrap_or(0);
        let address = (u128::from_be_bytes(self.address) & mask).to_be_bytes();
        Prefix { address, ..self }
    }

    /// Whether it is an IPv4 prefix: `::/0` and its like are not.
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

/// Some prefixes; sorted and without duplicates, so that equal ones compare equal.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Prefixes {
    prefixes: [Prefix; MAX_PREFIXES],
    count: usize,
}

impl Prefixes {
    /// Adds one. False if the list is full: it has [`MAX_PREFIXES`].
    pub fn insert(&mut self, prefix: Prefix) -> bool {
        let Err(place) = self.as_slice().binary_search(&prefix) else { return true };
        if self.count == MAX_PREFIXES {
            return false;
        }
        self.prefixes[place..=self.count].rotate_right(1);
        self.prefixes[place] = prefix;
        self.count += 1;
        true
    }

    /// Adds one as a user writes it.
    ///
    /// # Errors
    /// [`PrefixError`]; nothing is added.
    pub fn add(&mut self, text: &str) -> Result<(), PrefixError> {
        if self.insert(text.trim().parse()?) { Ok(()) } else { Err(PrefixError::TooMany) }
    }

    /// The prefixes, sorted.
    #[must_use]
    pub fn as_slice(&self) -> &[Prefix] {
        &self.prefixes[..self.count]
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl FromStr for Prefixes {
    type Err = PrefixError;

    /// As on a command line: `10.0.0.0/24,2001:db8:1::/48`, or `none`.
    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let mut prefixes = Prefixes::default();
        if text.trim() != "none" {
            text.split(',').try_for_each(|part| prefixes.add(part))?;
        }
        Ok(prefixes)
    }
}

impl fmt::Display for Prefixes {
    /// As on a command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let mut comma = "";
        for prefix in self.as_slice() {
            write!(f, "{comma}{prefix}")?;
            comma = ",";
        }
        Ok(())
    }
}

/// Why a text is not a list of prefixes. The message says what to type instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    /// Invalid prefix.
    #[error("`{0}` is no prefix; write for example 10.0.0.0/24, 10.0.0.7 or 2001:db8:1::/48")]
    None(String),
    /// The address has bits beyond the prefix.
    #[error("`{text}` has bits beyond its prefix; write {network}, or a longer prefix")]
    HostBits {
        /// As written.
        text: String,
        /// The prefix that was probably meant.
        network: Prefix,
    },
    /// More than the list holds.
    #[error("more than {MAX_PREFIXES} prefixes; write shorter ones that contain several")]
    TooMany,
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn prefixes_read_as_they_are_written() {
        for text in ["10.0.0.0/24", "10.0.0.0/24,2001:db8:1::/48", "0.0.0.0/0", "::/0", "none"] {
            assert_eq!(text.parse::<Prefixes>().unwrap().to_string(), text);
        }
        let prefixes: Prefixes = "2001:db8::/32, 10.1.2.3,10.0.0.0/8,10.1.2.3/32".parse().unwrap();
        assert_eq!(prefixes.to_string(), "10.0.0.0/8,10.1.2.3/32,2001:db8::/32");
        let refusal = |text: &str| text.parse::<Prefixes>().unwrap_err().to_string();
        assert!(refusal("10.1.0.0/8").contains("write 10.0.0.0/8, or a longer prefix"));
        assert!(refusal("dscp:ef").contains("`dscp:ef` is no prefix"));
        assert!(refusal("").contains("is no prefix"));
        let many: std::vec::Vec<_> = (0..33).map(|i| std::format!("10.{i}.0.0/16")).collect();
        assert_eq!(many[..32].join(",").parse::<Prefixes>().unwrap().as_slice().len(), 32);
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
