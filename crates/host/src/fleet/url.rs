//! Addresses of registries: `scheme://[user[:password]@]host[:port][/rest]`. Some schemes say TLS.
//!
//! They may hold passwords, which are never shown: neither by an error nor by a log, also where an address is
//! malformed.

use std::fmt;

/// An address of a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Url {
    /// Whether it is reached over TLS.
    pub tls: bool,
    pub user: Option<String>,
    pub password: Option<String>,
    /// The host: a name or an address, without brackets.
    pub host: String,
    pub port: u16,
    /// What follows the slash, without it.
    pub rest: String,
}

/// Why a text is no address of a registry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("expected an address that starts with `{0}://`, or with `{1}://` for TLS")]
    Scheme(&'static str, &'static str),
    #[error(
        "expected a host between `{0}://` or `@` and the port; write for example {0}://10.0.0.9:{1}"
    )]
    Host(&'static str, u16),
    #[error(
        "invalid port; write 1 to 65535 after the host's colon, for example {0}://10.0.0.9:{1}"
    )]
    Port(&'static str, u16),
    /// Bytes that must be escaped, or escapes that are none.
    #[error("write special characters of user and password as % and two digits")]
    Escape,
    #[error("what follows the slash must be the number of a database, such as 0")]
    Database,
}

/// The schemes that are spoken: their port, and their name over TLS.
const SCHEMES: [(&str, u16, &str); 2] = [("redis", 6379, "rediss"), ("http", 2379, "https")];

impl Url {
    /// Reads an address of `scheme`: `redis` or `http`.
    ///
    /// # Errors
    /// [`UrlError`].
    pub fn parse(text: &str, scheme: &str) -> Result<Url, UrlError> {
        let Some((scheme, default_port, over_tls)) = SCHEMES.iter().find(|s| s.0 == scheme) else {
            return Err(UrlError::Scheme(SCHEMES[0].0, SCHEMES[0].2));
        };
        let (found, rest) = text.split_once("://").unwrap_or(("", text));
        let tls = found == *over_tls;
        if !tls && found != *scheme {
            return Err(UrlError::Scheme(scheme, over_tls));
        }
        let (authority, rest) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, place) = match authority.rsplit_once('@') {
            Some((login, place)) => (Some(login), place),
            None => (None, authority),
        };
        let (host, port) = match place.strip_prefix('[').and_then(|p| p.split_once(']')) {
            Some((host, port)) => (host, port.strip_prefix(':')),
            None => match place.rsplit_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (place, None),
            },
        };
        let is_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if host.is_empty() || !host.chars().all(is_host) {
            return Err(UrlError::Host(scheme, *default_port));
        }
        let refuse = |_| UrlError::Port(scheme, *default_port);
        let port = port.map_or(Ok(*default_port), |port| port.parse().map_err(refuse))?;
        if *scheme == "redis" && !rest.is_empty() && rest.parse::<u16>().is_err() {
            return Err(UrlError::Database);
        }
        let (user, password) = match login {
            None => (None, None),
            Some(login) => {
                let (user, password) = match login.split_once(':') {
                    Some((user, password)) => (user, Some(unescaped(password)?)),
                    None => (login, None),
                };
                (Some(unescaped(user)?).filter(|user| !user.is_empty()), password)
            }
        };
        Ok(Url { tls, user, password, host: host.to_owned(), port, rest: rest.to_owned() })
    }
}

/// A text of a spec as it may be shown: what may be a password in the address of a registry is left out.
pub fn shown(text: &str) -> String {
    let key = ["redis", "etcd"].iter().filter_map(|key| {
        let at = text.find(key)? + key.len();
        let value = text[at..].trim_start_matches(['"', '\'', ' ', '\t']);
        value.starts_with('=').then_some(at)
    });
    if let Some(at) = key.min() {
        return format!("{} = ...", &text[..at]);
    }
    if let Some(at) = text.find("://") {
        return format!("{}...", &text[..at + 3]);
    }
    text.rfind('@').map_or_else(|| text.to_owned(), |at| format!("...{}", &text[at..]))
}

fn unescaped(text: &str) -> Result<String, UrlError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |b: Option<u8>| char::from(b?).to_digit(16);
        let (Some(high), Some(low)) = (digit(rest.next()), digit(rest.next())) else {
            return Err(UrlError::Escape);
        };
        bytes.push((high * 16 + low) as u8);
    }
    String::from_utf8(bytes).map_err(|_| UrlError::Escape)
}

/// Without the password: it goes to logs.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = &self.host;
        if host.contains(':') {
            write!(f, "[{host}]:{}", self.port)
        } else {
            write!(f, "{host}:{}", self.port)
        }
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Url({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read() {
        let url = Url::parse("redis://:p%40ss@10.0.0.9/3", "redis").unwrap();
        assert_eq!((url.host.as_str(), url.port, url.rest.as_str()), ("10.0.0.9", 6379, "3"));
        assert_eq!((url.user.as_deref(), url.password.as_deref()), (None, Some("p@ss")));
        assert_eq!(url.to_string(), "10.0.0.9:6379", "no password in a log");
        let over_tls = Url::parse("rediss://:p%40ss@10.0.0.9/3", "redis").unwrap();
        assert_eq!((url.tls, over_tls), (false, Url { tls: true, ..url }));
        let url = Url::parse("http://[::1]:2379", "http").unwrap();
        assert_eq!((url.host.as_str(), url.port), ("::1", 2379));
        assert_eq!(Url::parse("http://root:x@etcd", "http").unwrap().user.as_deref(), Some("root"));
    }

    #[test]
    fn addresses_are_refused() {
        let why = |text: &str| Url::parse(text, "redis").unwrap_err().to_string();
        assert_eq!(why("10.0.0.9:6379"), UrlError::Scheme("redis", "rediss").to_string());
        assert_eq!(why("https://a"), UrlError::Scheme("redis", "rediss").to_string());
        assert_eq!(why("redis://"), UrlError::Host("redis", 6379).to_string());
        assert_eq!(why("redis://a:99999"), UrlError::Port("redis", 6379).to_string());
        assert_eq!(why("redis://a/x"), UrlError::Database.to_string());
        assert_eq!(why("redis://:%x@a"), UrlError::Escape.to_string());
    }
}
