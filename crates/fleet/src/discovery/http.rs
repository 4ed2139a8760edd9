//! One request over HTTP/1.1, its answer bounded.

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time,
};

use super::SourceError;

/// The longest answer that is read.
pub const ANSWER_MAX: usize = 4 << 20;

/// A request.
#[derive(Debug, Clone)]
pub struct Asked<'a> {
    /// GET or POST.
    pub method: Method,
    /// The host, for the header.
    pub host: &'a str,
    pub path: &'a str,
    /// For the header `Authorization`.
    pub token: Option<&'a str>,
    pub body: String,
}

/// Asks over a connection that is open; status and body of the answer.
///
/// # Errors
/// [`SourceError`].
pub async fn ask<S>(
    stream: S,
    asked: &Asked<'_>,
    patience: Duration,
) -> Result<(StatusCode, Bytes), SourceError>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let broken = |e: hyper::Error| SourceError::Io(std::io::Error::other(e));
    let ask = async {
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let Asked { method, host, path, token, body } = asked;
        let mut request = Request::builder()
            .method(method.clone())
            .uri(*path)
            .header("host", *host)
            .header("content-type", "application/json")
            .header("connection", "close");
        if let Some(token) = token {
            request = request.header("authorization", *token);
        }
        let request = request
            .body(Full::new(Bytes::from(body.clone())))
            .map_err(|e| SourceError::Refused(e.to_string()))?;
        let answer = async {
            let answer = sender.send_request(request).await.map_err(broken)?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await;
            let body = body.map_err(|_| SourceError::Protocol("HTTP of a bounded length"))?;
            Ok((status, body.to_bytes()))
        };
        tokio::pin!(answer);
        let mut connection = Box::pin(connection);
        tokio::select! {
            biased;
            done = &mut answer => done,
            ended = &mut connection => {
                ended.map_err(broken)?;
                answer.await
            }
        }
    };
    time::timeout(patience, ask).await.unwrap_or(Err(SourceError::Late))
}
