//! Peers from a Redis: each node has a key `tidegate:CLUSTER:NODE` with its address, which ends by itself.
//!
//! RESP2, as far as it is needed: commands as arrays of bulk strings, answers read within bounds.

use std::net::SocketAddr;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

use super::{
    ENTRIES_MAX, ENTRY_LASTS, Entry, SourceError,
    registry::{Registry, Stream},
};

/// The longest string that is read.
const BULK_MAX: usize = 64 << 10;
/// The longest line.
const LINE_MAX: u64 = 4 << 10;
/// Rounds of SCAN: more would be a Redis with very many other keys, for which it is not.
const SCANS_MAX: usize = 1_000;
/// Keys that a round looks at.
const SCAN_COUNT: &str = "1000";

const PROTOCOL: SourceError = SourceError::Protocol("a Redis");

#[derive(Debug, PartialEq)]
enum Answer {
    Text(String),
    Number(i64),
    Bulk(Option<Vec<u8>>),
    List(Vec<Answer>),
}

impl Answer {
    fn text(&self) -> Option<&str> {
        match self {
            Answer::Bulk(Some(bytes)) => str::from_utf8(bytes).ok(),
            Answer::Text(text) => Some(text),
            _ => None,
        }
    }
}

struct Connection {
    stream: BufReader<Box<dyn Stream>>,
}

async fn line(stream: &mut (impl AsyncBufRead + Unpin)) -> Result<String, SourceError> {
    let mut line = String::new();
    stream.take(LINE_MAX).read_line(&mut line).await?;
    line.strip_suffix("\r\n").map(str::to_owned).ok_or(PROTOCOL)
}

/// Reads an answer; lists are at most two deep, as those of SCAN.
async fn answer(
    stream: &mut (impl AsyncBufRead + Unpin),
    depth: u32,
) -> Result<Answer, SourceError> {
    let head = line(stream).await?;
    let (kind, rest) = head.split_at_checked(1).ok_or(PROTOCOL)?;
    let number = || rest.parse::<i64>().map_err(|_| PROTOCOL);
    Ok(match kind {
        "+" => Answer::Text(rest.to_owned()),
        "-" => return Err(SourceError::Refused(rest.to_owned())),
        ":" => Answer::Number(number()?),
        "$" => match usize::try_from(number()?) {
            Err(_) => Answer::Bulk(None),
            Ok(length) if length > BULK_MAX => return Err(PROTOCOL),
            Ok(length) => {
                let mut bytes = vec![0; length + 2];
                stream.read_exact(&mut bytes).await?;
                bytes.truncate(length);
                Answer::Bulk(Some(bytes))
            }
        },
        "*" if depth > 0 => {
            let length = usize::try_from(number()?).unwrap_or(0);
            if length > 2 * ENTRIES_MAX {
                return Err(PROTOCOL);
            }
            let mut list = Vec::new();
            for _ in 0..length {
                list.push(Box::pin(answer(stream, depth - 1)).await?);
            }
            Answer::List(list)
        }
        _ => return Err(PROTOCOL),
    })
}

impl Connection {
    async fn open(registry: &Registry) -> Result<Connection, SourceError> {
        let mut connection =
            Connection { stream: BufReader::new(registry.connector().await?.connect().await?) };
        let url = &registry.url;
        if let Some(password) = &url.password {
            let mut words = vec!["AUTH"];
            words.extend(url.user.as_deref());
            words.push(password);
            connection.ask(&words).await?;
        }
        if !url.rest.is_empty() && url.rest != "0" {
            connection.ask(&["SELECT", &url.rest]).await?;
        }
        Ok(connection)
    }

    async fn ask(&mut self, words: &[&str]) -> Result<Answer, SourceError> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend(format!("${}\r\n{word}\r\n", word.len()).bytes());
        }
        self.stream.get_mut().write_all(&bytes).await?;
        self.stream.get_mut().flush().await?;
        answer(&mut self.stream, 2).await
    }
}

fn key(own: &Entry) -> String {
    format!("tidegate:{}:{}", own.cluster, own.node)
}

/// Enters the node and lists all.
///
/// # Errors
/// [`SourceError`].
pub async fn look(registry: &Registry, own: &Entry) -> Result<Vec<SocketAddr>, SourceError> {
    let mut redis = Connection::open(registry).await?;
    let lasts = ENTRY_LASTS.as_secs().to_string();
    redis.ask(&["SET", &key(own), &own.addr.to_string(), "EX", &lasts]).await?;
    let pattern = format!("tidegate:{}:*", own.cluster);
    let (mut cursor, mut keys) = ("0".to_owned(), Vec::new());
    for _ in 0..SCANS_MAX {
        let scan = ["SCAN", &cursor, "MATCH", &pattern, "COUNT", SCAN_COUNT];
        let Answer::List(parts) = redis.ask(&scan).await? else { return Err(PROTOCOL) };
        let [next, Answer::List(found)] = &parts[..] else { return Err(PROTOCOL) };
        let next = next.text().ok_or(PROTOCOL)?.to_owned();
        keys.extend(found.iter().filter_map(Answer::text).map(str::to_owned));
        cursor = next;
        if cursor == "0" || keys.len() >= ENTRIES_MAX {
            break;
        }
    }
    keys.truncate(ENTRIES_MAX);
    if keys.is_empty() {
        return Ok(Vec::new());
    }
    let mut get = vec!["MGET"];
    get.extend(keys.iter().map(String::as_str));
    let Answer::List(values) = redis.ask(&get).await? else { return Err(PROTOCOL) };
    let addr = |value: &Answer| value.text()?.parse().ok();
    Ok(values.iter().filter_map(addr).collect())
}

/// Takes the node's entry out.
///
/// # Errors
/// [`SourceError`].
pub async fn withdraw(registry: &Registry, own: &Entry) -> Result<(), SourceError> {
    Connection::open(registry).await?.ask(&["DEL", &key(own)]).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(text: &[u8]) -> Result<Answer, SourceError> {
        answer(&mut BufReader::new(text), 2).await
    }

    #[tokio::test]
    async fn answers_read_within_bounds() {
        let bulk = |text: &str| Answer::Bulk(Some(text.as_bytes().to_vec()));
        assert_eq!(read(b"+OK\r\n").await.unwrap(), Answer::Text("OK".into()));
        assert_eq!(read(b":7\r\n").await.unwrap(), Answer::Number(7));
        assert_eq!(read(b"$-1\r\n").await.unwrap(), Answer::Bulk(None));
        let scan = b"*2\r\n$1\r\n0\r\n*1\r\n$2\r\nab\r\n";
        let list = Answer::List(vec![bulk("0"), Answer::List(vec![bulk("ab")])]);
        assert_eq!(read(scan).await.unwrap(), list);
        let refused = read(b"-NOAUTH Authentication required.\r\n").await.unwrap_err();
        assert_eq!(refused.to_string(), "refuses: NOAUTH Authentication required.");
        for bad in
            [&b"HTTP/1.1 400\r\n"[..], b"$999999999\r\n", b"*1\r\n*1\r\n*1\r\n", b"", b"$x\r\n"]
        {
            assert!(read(bad).await.is_err(), "{bad:?}");
        }
    }
}
