//! The child that asks one engine, Docker or Podman, for its containers, and writes a line for each change.
//!
//! Both speak the same API over a Unix socket. Two requests are enough: the list, and the events. Of an
//! answer only the few members that are needed are read, so states and fields that one engine adds are no
//! error. It has no capability, the user of its socket, and ends with its parent.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    io,
    path::Path,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tidegate_host::world::{Container, is_container_id};
use tokio::{net::UnixStream, runtime, time};

use crate::{
    child::{self, LINE_MAX, Line, say},
    rights::{self, Identity},
};

/// The longest answer that is read.
const ANSWER_MAX: usize = LINE_MAX / 2;
/// The longest event.
const EVENT_MAX: usize = 1 << 20;
/// How long an engine may take for the list.
const PATIENCE: Duration = Duration::from_secs(30);
/// Events that follow the first one within this are asked for together with it ...
const GATHER: Duration = Duration::from_millis(1);
/// ... but nothing is put off longer.
const GATHER_MAX: Duration = Duration::from_millis(100);
/// Containers that are asked for at once at most.
const ASKED_MAX: usize = 64;
/// Containers that have only been made are listed too: their names are known before they run.
const LIST: &str = "/containers/json?all=true";
const EVENTS: &str = "/events?filters=%7B%22type%22%3A%5B%22container%22%5D%7D";
/// What an event may say of which a container has other names or labels, or is new.
const CHANGES: [&str; 6] = ["create", "init", "start", "rename", "update", "restart"];
const ENDS: [&str; 2] = ["destroy", "remove"];

/// Why an engine cannot be asked.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("answers {0}")]
    Status(hyper::StatusCode),
    #[error("answers with something else than containers: {0}")]
    Json(#[from] serde_json::Error),
    #[error("answers with more than is read")]
    TooLong,
    #[error("does not answer in time")]
    Late,
    #[error("has closed the connection")]
    Closed,
    #[error("request: {0}")]
    Request(#[from] hyper::http::Error),
}

/// A container in a list; other members are not read.
#[derive(Debug, Deserialize)]
struct Listed {
    #[serde(rename = "Id")]
    id: String,
    #[serde(rename = "Names", default)]
    names: Option<Vec<String>>,
    #[serde(rename = "Labels", default)]
    labels: Option<BTreeMap<String, String>>,
}

/// An event of a container. New engines also write `status` and `id`; old ones write only these.
#[derive(Debug, Deserialize)]
struct Happened {
    #[serde(rename = "Action", default)]
    action: String,
    #[serde(default)]
    status: String,
    #[serde(rename = "Actor", default)]
    actor: Actor,
    #[serde(default)]
    id: String,
}

#[derive(Debug, Default, Deserialize)]
struct Actor {
    #[serde(rename = "ID", default)]
    id: String,
}

/// Asks until the engine or the parent is gone. Does not return before.
///
/// # Errors
/// Those of the operating system before it has begun.
pub fn run(socket: &Path, who: Identity) -> io::Result<()> {
    rights::give_up(who)?;
    child::end_with_parent();
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let Err(failure) = runtime.block_on(ask(socket));
    say(&Line::<Container>::Away(failure.to_string()))
}

async fn ask(socket: &Path) -> Result<Infallible, Failure> {
    // Events are listened to first, so that nothing is missed between.
    let mut events = get(socket, EVENTS).await?;
    say(&Line::Listed(list(socket, LIST).await?))?;
    let mut part = BytesMut::new();
    loop {
        // With many containers an engine takes long to answer, and each container causes several events.
        let mut changed = BTreeSet::new();
        let mut frame = Some(events.body_mut().frame().await);
        let until = Instant::now() + GATHER_MAX;
        while let Some(next) = frame {
            if let Ok(data) = next.ok_or(Failure::Closed)??.into_data() {
                take(&mut part, &data, &mut changed)?;
            }
            let more = time::timeout(GATHER, events.body_mut().frame());
            let waits = changed.len() < ASKED_MAX && Instant::now() < until;
            frame = if waits { more.await.ok() } else { None };
        }
        let mut changed = changed.into_iter().map(|id| format!("%22{id}%22")).peekable();
        while changed.peek().is_some() {
            let ids: Vec<_> = changed.by_ref().take(ASKED_MAX).collect();
            let path = format!("{LIST}&filters=%7B%22id%22%3A%5B{}%5D%7D", ids.join("%2C"));
            for (id, container) in list(socket, &path).await? {
                say(&Line::Changed(id, container))?;
            }
        }
    }
}

/// Takes the events that are whole, tells which containers are gone, and adds those to ask for.
fn take(part: &mut BytesMut, data: &[u8], changed: &mut BTreeSet<String>) -> Result<(), Failure> {
    part.extend_from_slice(data);
    if part.len() > EVENT_MAX {
        return Err(Failure::TooLong);
    }
    // Objects follow each other, with or without lines between.
    let mut stream = serde_json::Deserializer::from_slice(part).into_iter::<Happened>();
    for event in stream.by_ref() {
        let Happened { action, status, actor, id } = match event {
            Ok(event) => event,
            Err(e) if e.is_eof() => break,
            Err(e) => return Err(e.into()),
        };
        let action = if action.is_empty() { status } else { action };
        let id = if actor.id.is_empty() { id } else { actor.id };
        // Podman removes pods, networks and volumes, too.
        if !is_container_id(&id) {
            continue;
        }
        if ENDS.contains(&action.as_str()) {
            changed.remove(&id);
            say(&Line::<Container>::Gone(id))?;
        } else if CHANGES.contains(&action.as_str()) {
            changed.insert(id);
        }
    }
    let read = stream.byte_offset();
    let _ = part.split_to(read);
    Ok(())
}

async fn list(socket: &Path, path: &str) -> Result<BTreeMap<String, Container>, Failure> {
    let answer = async {
        let body = get(socket, path).await?.into_body();
        let body = Limited::new(body, ANSWER_MAX).collect().await;
        Ok::<_, Failure>(body.map_err(|_| Failure::TooLong)?.to_bytes())
    };
    let bytes = time::timeout(PATIENCE, answer).await.map_err(|_| Failure::Late)??;
    let listed: Vec<Listed> = serde_json::from_slice(&bytes)?;
    Ok(listed.into_iter().map(known).collect())
}

/// Names begin with `/`. The first is the container's own; others are what linked ones call it.
fn known(listed: Listed) -> (String, Container) {
    let names = listed.names.unwrap_or_default();
    let own =
        names.iter().map(|name| name.trim_start_matches('/')).find(|name| !name.contains('/'));
    let name = own.unwrap_or_default().to_owned();
    (listed.id, Container { name, labels: listed.labels.unwrap_or_default() })
}

async fn get(socket: &Path, path: &str) -> Result<hyper::Response<Incoming>, Failure> {
    let stream = time::timeout(PATIENCE, UnixStream::connect(socket));
    let stream = stream.await.map_err(|_| Failure::Late)??;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::get(path).header("host", "localhost").body(Empty::<Bytes>::new())?;
    let answer = time::timeout(PATIENCE, sender.send_request(request));
    let answer = answer.await.map_err(|_| Failure::Late)??;
    if !answer.status().is_success() {
        return Err(Failure::Status(answer.status()));
    }
    Ok(answer)
}
