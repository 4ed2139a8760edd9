//! Where others look at a daemon: HTTP over a Unix socket, and metrics for Prometheus on loopback.
//!
//! ```text
//!   GET /v1/status    what the node knows and does, JSON       POST /v1/reload   reads the spec again
//!   GET /metrics      the same in numbers, text
//! ```
//!
//! The socket is its owner's alone (mode 600), so who may open it may reload. Connections are bounded, and
//! one that says nothing is closed.

use std::{
    convert::Infallible,
    fs, io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::Path,
    sync::Arc,
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{Semaphore, mpsc, oneshot},
    task, time,
};

use super::{
    discovery::http::{Asked, ask},
    status::NodeStatus,
};

/// The most connections at a time, for each of socket and metrics.
pub const CONNECTIONS_MAX: usize = 16;
/// The most requests that wait for the node.
pub const REQUESTS_MAX: usize = 64;
/// A connection is closed after so long.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is asked of the node.
#[derive(Debug)]
pub enum Ask {
    Status(oneshot::Sender<Box<NodeStatus>>),
    /// To read the spec again; what changed, or why not.
    Reload(oneshot::Sender<Result<Vec<String>, String>>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// The Unix socket: everything.
    Socket,
    /// The port of the metrics: these alone.
    Metrics,
}

/// Why the socket cannot be had, or a daemon not asked.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error(
        "{0}: another tidegate daemon runs there; end that first, or write another `api` in [fleet]"
    )]
    Taken(String),
    #[error("{0}: is no socket; write another `api` in [fleet]")]
    NoSocket(String),
    #[error("{path}: {source}")]
    Io { path: String, source: io::Error },
    #[error("{path}: {why}")]
    Answer { path: String, why: String },
}

/// Opens the socket. What a process left that is no more is removed.
///
/// # Errors
/// [`ApiError`].
pub fn bind(path: &Path) -> Result<UnixListener, ApiError> {
    let name = || path.display().to_string();
    let error = |source| ApiError::Io { path: path.display().to_string(), source };
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(error)?;
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(ApiError::NoSocket(name())),
        Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => {
            return Err(ApiError::Taken(name()));
        }
        Ok(_) => fs::remove_file(path).map_err(error)?,
        Err(_) => {}
    }
    // Nobody else may connect between the two calls: the mode is right from the start.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = bound.map_err(error)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(error)?;
    Ok(listener)
}

/// Something that takes connections.
pub trait Listener {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + 'static;

    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>>;
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<UnixStream> {
        Ok(self.accept().await?.0)
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        Ok(self.accept().await?.0)
    }
}

/// Answers until it is dropped; within a [`task::LocalSet`].
pub async fn serve(listener: impl Listener, asks: mpsc::Sender<Ask>, door: Door) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.next().await {
            Ok(stream) => {
                let asks = asks.clone();
                task::spawn_local(async move {
                    converse(stream, asks, door).await;
                    drop(permit);
                });
            }
            // Out of descriptors, for example: later is better than never.
            Err(_) => time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn converse<S>(stream: S, requests: mpsc::Sender<Ask>, door: Door)
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let requests = requests.clone();
        async move { Ok::<_, Infallible>(answer(&request, &requests, door).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(PATIENCE).keep_alive(false);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let _ = time::timeout(PATIENCE, connection).await;
}

fn text(status: StatusCode, kind: &str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    if let Ok(kind) = kind.parse() {
        response.headers_mut().insert("content-type", kind);
    }
    response
}

const PLAIN: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

async fn answer(
    request: &Request<Incoming>,
    requests: &mpsc::Sender<Ask>,
    door: Door,
) -> Response<Full<Bytes>> {
    let busy = || text(StatusCode::SERVICE_UNAVAILABLE, PLAIN, "the node is busy or ends\n");
    let status = async || {
        let (tell, reply) = oneshot::channel();
        requests.try_send(Ask::Status(tell)).ok()?;
        reply.await.ok()
    };
    match (door, request.method(), request.uri().path()) {
        (_, &Method::GET, "/metrics") => match status().await {
            Some(status) => text(StatusCode::OK, METRICS, super::metrics::render(&status)),
            None => busy(),
        },
        (Door::Socket, &Method::GET, "/v1/status") => match status().await {
            Some(status) => match serde_json::to_vec(&status) {
                Ok(body) => text(StatusCode::OK, JSON, body),
                Err(e) => text(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, e.to_string()),
            },
            None => busy(),
        },
        (Door::Socket, &Method::POST, "/v1/reload") => {
            let (tell, reply) = oneshot::channel();
            if requests.try_send(Ask::Reload(tell)).is_err() {
                return busy();
            }
            match reply.await {
                Ok(Ok(changes)) => {
                    let body = serde_json::json!({ "changes": changes }).to_string();
                    text(StatusCode::OK, JSON, body)
                }
                Ok(Err(why)) => text(StatusCode::CONFLICT, PLAIN, why),
                Err(_) => busy(),
            }
        }
        _ => text(
            StatusCode::NOT_FOUND,
            PLAIN,
            "there are GET /metrics and, on the Unix socket, GET /v1/status and POST /v1/reload\n",
        ),
    }
}

/// Asks a daemon; `None` if none runs.
///
/// # Errors
/// [`ApiError`] if something is there that is no daemon, or it may not be asked.
fn request(path: &Path, method: Method, what: &str) -> Result<Option<Bytes>, ApiError> {
    let name = || path.display().to_string();
    let error = |source| ApiError::Io { path: name(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(error)?.block_on(async {
        let stream = match UnixStream::connect(path).await {
            Ok(stream) => stream,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                return Ok(None);
            }
            Err(e) => return Err(error(e)),
        };
        let asked =
            Asked { method, host: "localhost", path: what, token: None, body: String::new() };
        let answered = ask(stream, &asked, PATIENCE).await;
        let refuse = |why: String| ApiError::Answer { path: name(), why };
        let (status, body) = answered.map_err(|e| refuse(e.to_string()))?;
        if status.is_success() {
            return Ok(Some(body));
        }
        Err(refuse(String::from_utf8_lossy(&body).trim().to_owned()))
    })
}

/// What a daemon knows and does; `None` if none runs.
///
/// # Errors
/// [`ApiError`] if something is there that is no daemon, or it may not be asked.
pub fn status(path: &Path) -> Result<Option<NodeStatus>, ApiError> {
    let Some(body) = request(path, Method::GET, "/v1/status")? else { return Ok(None) };
    let parsed = serde_json::from_slice(&body);
    parsed.map(Some).map_err(|e| ApiError::Answer {
        path: path.display().to_string(),
        why: format!("another version of tidegate runs there: {e}"),
    })
}

/// Has a daemon read its spec again; what changed, `None` if none runs.
///
/// # Errors
/// [`ApiError`], also if the daemon does not take the spec.
pub fn reload(path: &Path) -> Result<Option<Vec<String>>, ApiError> {
    let Some(body) = request(path, Method::POST, "/v1/reload")? else { return Ok(None) };
    let answer: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let changes = answer["changes"].as_array().into_iter().flatten();
    Ok(Some(changes.filter_map(|c| c.as_str().map(str::to_owned)).collect()))
}
