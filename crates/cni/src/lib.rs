//! The CNI plugin `tidegate-cni`: a drop-in for the plugin `bandwidth`.
//!
//! A container runtime starts it after the plugin that made the container's interface, with a command and
//! names in the environment and a configuration on standard input. It limits the host's side of the
//! interface, and gives back the result of the plugins before it. [`request`] reads what was asked,
//! [`plugin`] does it on this host, [`error`] has the errors of the protocol.
//!
//! The protocol is the [CNI specification](https://www.cni.dev/docs/spec/), versions 0.3.0 to 1.1.0; the
//! configuration is that of the plugin `bandwidth`.

#![forbid(unsafe_code)]

pub mod bandwidth;
pub mod error;
pub mod plugin;
pub mod request;
mod subnets;

use std::{
    io::{Read, Write},
    path::Path,
    process::ExitCode,
};

use error::{CniError, Code};
use request::{Request, VERSIONS};

/// The name under which a runtime starts the plugin.
pub const PROGRAM: &str = "tidegate-cni";
/// Longest configuration that is read, in bytes.
const CONFIG_MAX: u64 = 4 << 20;

/// Does what the environment and `stdin` ask for with the limits pinned in `store`; the answer goes to
/// `stdout`, as the protocol wants it of errors, too.
pub fn run(store: &Path, stdin: impl Read, mut stdout: impl Write) -> ExitCode {
    let mut config = String::new();
    let read = stdin.take(CONFIG_MAX).read_to_string(&mut config);
    let environment = |name: &str| std::env::var(name).ok();
    let version = request::version_in(&config).unwrap_or_else(|| VERSIONS[0].to_owned());
    let answer = read
        .map_err(|e| CniError::new(Code::Io, format!("standard input cannot be read: {e}")))
        .and_then(|_| Request::read(environment, &config))
        .and_then(|request| plugin::answer(store, &request));
    let (text, code) = match answer {
        Ok(answer) => (answer.map(|answer| answer.to_string()), ExitCode::SUCCESS),
        Err(error) => (Some(error.to_json(&version).to_string()), ExitCode::FAILURE),
    };
    match text.map_or(Ok(()), |text| writeln!(stdout, "{text}")) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}
