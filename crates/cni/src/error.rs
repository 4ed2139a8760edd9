//! The errors of the protocol.

use serde_json::{Value, json};

/// What kind of error it is: the numbers of the CNI specification, and one of this plugin from 100 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// A version of the protocol that is not spoken.
    Version = 1,
    /// A variable of the environment is missing or wrong.
    Environment = 4,
    /// Something could not be read.
    Io = 5,
    /// The configuration is no JSON, or not of this form.
    Decode = 6,
    /// The configuration cannot be so.
    Config = 7,
    /// Another writer keeps this one out; later it works.
    TryAgain = 11,
    /// No limit works on this host.
    Unavailable = 50,
    /// The host refused the limit, or does not have it.
    Limit = 100,
}

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CniError {
    /// Its kind.
    pub code: Code,
    /// What went wrong, and what to do.
    pub message: String,
}

impl CniError {
    /// An error of a kind.
    pub fn new(code: Code, message: impl Into<String>) -> CniError {
        CniError { code, message: message.into() }
    }

    /// As the protocol has it.
    pub fn to_json(&self, version: &str) -> Value {
        json!({ "cniVersion": version, "code": self.code as u32, "msg": self.message })
    }
}
