//! What a runtime asks for: a command and names from the environment, the rest from the configuration.

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tidegate_host::settings::SchemeSetting;

use crate::{
    bandwidth::Bandwidth,
    error::{CniError, Code},
};

/// The versions of the protocol that are spoken, the newest last.
pub const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Limit an interface.
    Add,
    /// Take its limit off.
    Del,
    /// Say whether it is limited as it should be.
    Check,
    /// Take off the limits of all interfaces but some.
    Gc,
    /// Say whether an interface could be limited.
    Status,
    /// Say which versions are spoken.
    Version,
}

/// An interface of a container, by the runtime's names.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Attachment {
    /// The container's id.
    #[serde(rename = "containerID")]
    pub container: String,
    /// The interface's name in the container.
    #[serde(rename = "ifname")]
    pub interface: String,
}

/// The pod that a container is of, as Kubernetes names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
}

impl Pod {
    /// Reads it from `CNI_ARGS`, a list such as `K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0`. The list is the
    /// runtime's and may have anything else in it.
    fn read(args: &str) -> Option<Pod> {
        let value = |key| {
            let pairs = args.split(';').filter_map(|pair| pair.split_once('='));
            let found = pairs.filter(|(name, _)| *name == key).map(|(_, value)| value).next()?;
            (!found.is_empty()).then(|| found.to_owned())
        };
        Some(Pod { namespace: value("K8S_POD_NAMESPACE")?, name: value("K8S_POD_NAME")? })
    }
}

/// A configuration that was read, and what it is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What is to be done.
    pub command: Command,
    /// The version of the protocol to answer in.
    pub version: String,
    /// The network's name.
    pub network: String,
    /// The interface; of commands that have one.
    pub attachment: Option<Attachment>,
    /// The pod, if the runtime names it.
    pub pod: Option<Pod>,
    /// The path of the container's network namespace; of commands that need it.
    pub netns: Option<String>,
    /// The rates; `None` if nothing is limited.
    pub bandwidth: Option<Bandwidth>,
    /// The scheme that the configuration names.
    pub scheme: Option<SchemeSetting>,
    /// The result of the plugins before this one.
    pub result: Option<Value>,
    /// The interfaces that still exist.
    pub valid: Vec<Attachment>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(rename = "cniVersion", default = "oldest")]
    version: String,
    #[serde(default)]
    name: String,
    #[serde(rename = "runtimeConfig", default)]
    runtime: Runtime,
    #[serde(flatten)]
    bandwidth: Bandwidth,
    #[serde(default)]
    scheme: Option<String>,
    #[serde(rename = "prevResult", default)]
    result: Option<Value>,
    #[serde(rename = "cni.dev/valid-attachments", default, deserialize_with = "given")]
    valid: Option<Vec<Attachment>>,
}

#[derive(Default, Deserialize)]
struct Runtime {
    #[serde(default)]
    bandwidth: Option<Bandwidth>,
}

/// A configuration without a version is of this one.
fn oldest() -> String {
    VERSIONS[0].to_owned()
}

/// The version that a configuration names, whatever else is wrong with it.
pub(crate) fn version_in(config: &str) -> Option<String> {
    let config: Value = serde_json::from_str(config).ok()?;
    Some(config.get("cniVersion")?.as_str()?.to_owned())
}

impl Request {
    /// Reads what is asked for; `variable` looks a variable of the environment up.
    ///
    /// # Errors
    /// [`CniError`] as the protocol has it.
    pub fn read(
        variable: impl Fn(&str) -> Option<String>,
        config: &str,
    ) -> Result<Request, CniError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let needed = |name: &str| {
            let missing = || CniError::new(Code::Environment, format!("{name} is not set"));
            variable(name).ok_or_else(missing)
        };
        let command = match &needed("CNI_COMMAND")?[..] {
            "ADD" => Command::Add,
            "DEL" => Command::Del,
            "CHECK" => Command::Check,
            "GC" => Command::Gc,
            "STATUS" => Command::Status,
            "VERSION" => Command::Version,
            other => {
                let problem = format!(
                    "CNI_COMMAND is `{other}`; it is ADD, DEL, CHECK, GC, STATUS or VERSION"
                );
                return Err(CniError::new(Code::Environment, problem));
            }
        };
        let config =
            if config.trim().is_empty() && command == Command::Version { "{}" } else { config };
        let config: Config = serde_json::from_str(config).map_err(|e| {
            CniError::new(Code::Decode, format!("the configuration cannot be read: {e}"))
        })?;
        let has_attachment = matches!(command, Command::Add | Command::Del | Command::Check);
        let attachment = match has_attachment {
            true => Some(attachment(needed("CNI_CONTAINERID")?, needed("CNI_IFNAME")?)?),
            false => None,
        };
        let netns = match command {
            Command::Add | Command::Check => Some(needed("CNI_NETNS")?),
            _ => variable("CNI_NETNS"),
        };
        if command != Command::Version {
            check(command, &config)?;
        }
        // What is written in the configuration goes before the runtime's.
        let bandwidth = config.bandwidth.or(config.runtime.bandwidth.unwrap_or_default());
        // What cannot be so was never added.
        if matches!(command, Command::Add | Command::Check) {
            bandwidth.check()?;
        }
        let scheme = config.scheme.map(|scheme| scheme.parse()).transpose();
        let scheme = scheme.map_err(|e| CniError::new(Code::Config, format!("scheme: {e}")))?;
        Ok(Request {
            command,
            version: config.version,
            network: config.name,
            attachment,
            pod: variable("CNI_ARGS").and_then(|args| Pod::read(&args)),
            netns,
            bandwidth: (!bandwidth.is_none()).then_some(bandwidth),
            scheme,
            result: config.result,
            valid: config.valid.unwrap_or_default(),
        })
    }
}

/// Checks what all commands need of a configuration.
fn check(command: Command, config: &Config) -> Result<(), CniError> {
    let version = &config.version[..];
    if !VERSIONS.contains(&version) {
        let spoken = VERSIONS.join(", ");
        let problem = format!("cniVersion is `{version}`; this plugin speaks {spoken}");
        return Err(CniError::new(Code::Version, problem));
    }
    let first = match command {
        Command::Check => "0.4.0",
        Command::Gc | Command::Status => "1.1.0",
        _ => VERSIONS[0],
    };
    let place = |version: &str| VERSIONS.iter().position(|known| *known == version);
    if place(version) < place(first) {
        let problem = format!("cniVersion is `{version}`, which has no such command; {first} has");
        return Err(CniError::new(Code::Version, problem));
    }
    if config.name.is_empty() {
        return Err(CniError::new(Code::Config, "the configuration has no name of the network"));
    }
    if command == Command::Gc && config.valid.is_none() {
        let problem = "GC needs `cni.dev/valid-attachments`: the interfaces that keep their limits";
        return Err(CniError::new(Code::Config, problem));
    }
    Ok(())
}

/// A list that is there. Runtimes in Go write an empty one as null.
fn given<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<Attachment>>, D::Error> {
    Option::<Vec<Attachment>>::deserialize(from).map(|list| Some(list.unwrap_or_default()))
}

/// The names of an interface, as the specification has them.
fn attachment(container: String, interface: String) -> Result<Attachment, CniError> {
    let letter = |c: char| c.is_ascii_alphanumeric();
    let inner = |c: char| letter(c) || matches!(c, '_' | '.' | '-');
    if !container.starts_with(letter) || !container.chars().all(inner) {
        let problem = format!(
            "CNI_CONTAINERID is `{container}`; it begins with a letter or digit, and has these, `_`, `.` \
             and `-`"
        );
        return Err(CniError::new(Code::Environment, problem));
    }
    if !tidegate_host::spec::is_device_name(&interface) {
        let problem = format!("CNI_IFNAME is `{interface}`, which is no name of an interface");
        return Err(CniError::new(Code::Environment, problem));
    }
    Ok(Attachment { container, interface })
}

#[cfg(test)]
mod tests;
