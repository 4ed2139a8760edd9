//! Peers from an etcd: each node has a key `/tidegate/CLUSTER/NODE` with its address, under a lease that ends
//! by itself. Spoken is the JSON gateway of version 3 (etcd 3.4 and newer).

use std::net::SocketAddr;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use hyper::Method;
use serde_json::{Value, json};
use tidegate_host::fleet::url::Url;

use super::{
    ENTRIES_MAX, ENTRY_LASTS, Entry, PATIENCE, SourceError,
    http::{Asked, ask},
    registry::Connector,
};

const PROTOCOL: SourceError = SourceError::Protocol("an etcd of version 3.4 or newer");

async fn call(
    etcd: &Connector<'_>,
    token: Option<&str>,
    path: &str,
    body: Value,
) -> Result<Value, SourceError> {
    let stream = etcd.connect().await?;
    let (host, body) = (etcd.url.to_string(), body.to_string());
    let asked = Asked { method: Method::POST, host: &host, path, token, body };
    let (status, body) = ask(stream, &asked, PATIENCE).await?;
    let answer: Value = serde_json::from_slice(&body).map_err(|_| PROTOCOL)?;
    if status.is_success() {
        return Ok(answer);
    }
    let why = answer["error"].as_str().or(answer["message"].as_str());
    Err(SourceError::Refused(why.map_or_else(|| status.to_string(), str::to_owned)))
}

async fn token(etcd: &Connector<'_>) -> Result<Option<String>, SourceError> {
    let Url { user: Some(user), password: Some(password), .. } = &etcd.url else {
        return Ok(None);
    };
    let body = json!({ "name": user, "password": password });
    let answer = call(etcd, None, "/v3/auth/authenticate", body).await?;
    answer["token"].as_str().map(|token| Some(token.to_owned())).ok_or(PROTOCOL)
}

fn prefix(own: &Entry) -> String {
    format!("/tidegate/{}/", own.cluster)
}

fn key(own: &Entry) -> String {
    BASE64_STANDARD.encode(format!("{}{}", prefix(own), own.node))
}

/// Enters the node and lists all.
///
/// # Errors
/// [`SourceError`].
pub async fn look(etcd: &Connector<'_>, own: &Entry) -> Result<Vec<SocketAddr>, SourceError> {
    let token = token(etcd).await?;
    let token = token.as_deref();
    // A lease for each entry: the one before ends by itself, and nothing is to be remembered.
    let grant = json!({ "TTL": ENTRY_LASTS.as_secs() });
    let lease = call(etcd, token, "/v3/lease/grant", grant).await?;
    let lease = lease["ID"].as_str().ok_or(PROTOCOL)?.to_owned();
    let value = BASE64_STANDARD.encode(own.addr.to_string());
    let put = json!({ "key": key(own), "value": value, "lease": lease });
    call(etcd, token, "/v3/kv/put", put).await?;
    let from = prefix(own);
    // The slash and what follows it in the alphabet: all that begins with the prefix.
    let end = format!("{}0", &from[..from.len() - 1]);
    let range = json!({
        "key": BASE64_STANDARD.encode(&from),
        "range_end": BASE64_STANDARD.encode(&end),
        "limit": ENTRIES_MAX,
    });
    let found = call(etcd, token, "/v3/kv/range", range).await?;
    let addr = |kv: &Value| {
        let bytes = BASE64_STANDARD.decode(kv["value"].as_str()?).ok()?;
        String::from_utf8(bytes).ok()?.parse().ok()
    };
    Ok(found["kvs"].as_array().into_iter().flatten().filter_map(addr).collect())
}

/// Takes the node's entry out.
///
/// # Errors
/// [`SourceError`].
pub async fn withdraw(etcd: &Connector<'_>, own: &Entry) -> Result<(), SourceError> {
    let token = token(etcd).await?;
    let delete = json!({ "key": key(own) });
    call(etcd, token.as_deref(), "/v3/kv/deleterange", delete).await.map(drop)
}
