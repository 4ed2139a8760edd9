//! Exemptions of a limit: prefixes of remote addresses, and DSCPs.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, str::FromStr};

use crate::{
    police::Dscp,
    prefixes::{PrefixError, Prefixes},
};

/// The exemptions of a limit; sorted and without duplicates, so that equal ones compare equal.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Exempt {
    /// Remote addresses.
    pub prefixes: Prefixes,
    /// Bit d is set if DSCP d is exempt.
    pub dscps: u64,
}

impl Exempt {
    /// Adds one exemption: a prefix or address, or `dscp NAME`.
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
        self.prefixes.add(text).map_err(|e| match e {
            PrefixError::None(text) => ExemptError::None(text),
            e => e.into(),
        })
    }

    /// Nobody is exempt.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.prefixes.is_empty() && self.dscps == 0
    }

    /// The exempt DSCPs.
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

/// Why a text is not an exemption. The message says what to type instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExemptError {
    /// Neither prefix nor DSCP.
    #[error(
        "`{0}` is neither a prefix nor a code point; write for example 10.0.0.0/8, 2001:db8::/32 or dscp:ef"
    )]
    None(String),
    /// A prefix that cannot be added.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
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
}
