//! Whose packets a limit is for: prefixes of the addresses behind a device.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, str::FromStr};

use crate::exempt::{ExemptError, MAX_PREFIXES, Prefix};

/// Some prefixes; in order and without doubles, so that equal ones act alike.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Prefixes {
    prefixes: [Prefix; MAX_PREFIXES],
    count: usize,
}

impl Prefixes {
    /// Adds one. False if there is no room for it: there are [`MAX_PREFIXES`].
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
    /// [`MatchError`]; nothing is added.
    pub fn add(&mut self, text: &str) -> Result<(), MatchError> {
        let prefix = text.trim().parse().map_err(|e| match e {
            ExemptError::HostBits { text, network } => MatchError::HostBits { text, network },
            _ => MatchError::None(text.trim().to_owned()),
        })?;
        if self.insert(prefix) { Ok(()) } else { Err(MatchError::TooMany) }
    }

    /// They, sorted.
    #[must_use]
    pub fn as_slice(&self) -> &[Prefix] {
        &self.prefixes[..self.count]
    }

    /// There are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl FromStr for Prefixes {
    type Err = MatchError;

    /// As on a command line: `10.0.0.0/24,2001:db8:1::/48`, or `none`.
    fn from_str(text: &str) -> Result<Self, MatchError> {
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

/// Why a text is no list of prefixes. The message says what to type instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// No prefix.
    #[error("`{0}` is no prefix; write for example 10.0.0.0/24, 10.0.0.7 or 2001:db8:1::/48")]
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
}
