//! Where others look at a daemon: HTTP over a Unix socket.
//!
//! ```text
//!   GET /v1/status    what the node knows and does, JSON       POST /v1/reload   reads the spec again
//! ```
//!
//! The socket is its owner's alone (mode 600), so who may open it may reload. `tidegate web` has the metrics.

use std::{
    io,
    path::{Path, PathBuf},
};

use hyper::{Method, Request, StatusCode, body::Incoming};
use tokio::{
    net::UnixListener,
    sync::{mpsc, oneshot},
};

use super::{
    http::{self, Answer, HttpError, JSON, Listener, PLAIN},
    status::NodeStatus,
};

/// The most connections at a time.
pub const CONNECTIONS_MAX: usize = 16;
/// The most requests that wait for the node.
pub const REQUESTS_MAX: usize = 64;

/// What is asked of the node.
#[derive(Debug)]
pub enum Ask {
    Status(oneshot::Sender<Box<NodeStatus>>),
    /// To read the spec again; what changed, or why not.
    Reload(oneshot::Sender<Result<Vec<String>, String>>),
}

/// Opens the socket. What a process left that is no more is removed.
///
/// # Errors
/// [`HttpError`].
pub fn bind(path: &Path) -> Result<UnixListener, HttpError> {
    let refused = |path, why: &str| HttpError::Answer { path, why: why.to_owned() };
    let listener = http::bind(path).map_err(|error| match error {
        HttpError::Taken(path) => refused(
            path,
            "another tidegate daemon runs there; end that first, or write another `api` in [fleet]",
        ),
        HttpError::NoSocket(path) => refused(path, "is no socket; write another `api` in [fleet]"),
        other => other,
    })?;
    let path = path.display().to_string();
    UnixListener::from_std(listener).map_err(|source| HttpError::Io { path, source })
}

/// Answers until it is dropped; within a [`task::LocalSet`](tokio::task::LocalSet).
pub async fn serve(listener: impl Listener, asks: mpsc::Sender<Ask>) {
    let answer = async move |request: &Request<Incoming>| answer(request, &asks).await;
    http::serve(listener, CONNECTIONS_MAX, answer).await;
}

async fn answer(request: &Request<Incoming>, requests: &mpsc::Sender<Ask>) -> Answer {
    let busy =
        || http::answer(StatusCode::SERVICE_UNAVAILABLE, PLAIN, "the node is busy or ends\n");
    let status = async || {
        let (tell, reply) = oneshot::channel();
        requests.try_send(Ask::Status(tell)).ok()?;
        reply.await.ok()
    };
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/v1/status") => match status().await {
            Some(status) => match serde_json::to_vec(&status) {
                Ok(body) => http::answer(StatusCode::OK, JSON, body),
                Err(e) => http::answer(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, e.to_string()),
            },
            None => busy(),
        },
        (&Method::POST, "/v1/reload") => {
            let (tell, reply) = oneshot::channel();
            if requests.try_send(Ask::Reload(tell)).is_err() {
                return busy();
            }
            match reply.await {
                Ok(Ok(changes)) => {
                    let body = serde_json::json!({ "changes": changes }).to_string();
                    http::answer(StatusCode::OK, JSON, body)
                }
                Ok(Err(why)) => http::answer(StatusCode::CONFLICT, PLAIN, why),
                Err(_) => busy(),
            }
        }
        _ => http::answer(
            StatusCode::NOT_FOUND,
            PLAIN,
            "there are GET /v1/status and POST /v1/reload\n",
        ),
    }
}

/// What a daemon knows and does; `None` if none runs.
///
/// # Errors
/// [`HttpError`] if something is there that is no daemon, or it may not be asked.
pub fn status(path: &Path) -> Result<Option<NodeStatus>, HttpError> {
    let Some(body) = http::request(path, Method::GET, "/v1/status")? else { return Ok(None) };
    let parsed = serde_json::from_slice(&body);
    parsed.map(Some).map_err(|e| HttpError::Answer {
        path: path.display().to_string(),
        why: format!("another version of tidegate runs there: {e}"),
    })
}

/// The socket, if a daemon has left it there that has died: one that ends removes it.
pub fn left(path: &Path) -> Option<PathBuf> {
    let asked = std::os::unix::net::UnixStream::connect(path);
    let died = asked.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused);
    died.then(|| path.to_owned())
}

/// Has a daemon read its spec again; what changed, `None` if none runs.
///
/// # Errors
/// [`HttpError`], also if the daemon does not take the spec.
pub fn reload(path: &Path) -> Result<Option<Vec<String>>, HttpError> {
    let Some(body) = http::request(path, Method::POST, "/v1/reload")? else { return Ok(None) };
    let answer: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let changes = answer["changes"].as_array().into_iter().flatten();
    Ok(Some(changes.filter_map(|c| c.as_str().map(str::to_owned)).collect()))
}
