//! The child that asks the API server of Kubernetes for the pods of this node, and writes a line for each
//! change.
//!
//! It lists them, then watches from there. A watch that ends goes on where it was; if the server has
//! forgotten that (410), they are listed again. Whatever else goes wrong ends the child, and it is started
//! again. Only metadata is asked for, and of that only the few members that are needed are read. It has no
//! capability, may read its credentials, and ends with its parent.

use std::{
    collections::BTreeMap, convert::Infallible, error::Error, io, path::Path, time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Limited};
use hyper::Request;
use kube_client::{
    Client, Config,
    client::Body,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use serde::{Deserialize, de::DeserializeOwned};
use tidegate_host::pods::{ANNOTATIONS, MAX_PODS, Pod};
use tokio::{
    runtime,
    time::{self, Instant},
};

use crate::{
    child::{self, Line, jittered, say},
    rights::{self, Identity},
};

/// Pods in an answer.
const PAGE: u32 = 100;
/// The longest answer that is read, and the longest event.
const ANSWER_MAX: usize = 16 << 20;
const EVENT_MAX: usize = 2 << 20;
/// The longest answer of a refusal.
const REFUSAL_MAX: usize = 64 << 10;
/// How long the server may take for an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a watch is asked to last, about.
const WATCH: Duration = Duration::from_secs(300);
/// A watch that lasted less is renewed after a pause.
const SHORT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);
const LIST: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
const EVENTS: &str =
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";
/// That of a pod that kubelet has from a file: the UID that it has on the node.
const MIRROR: &str = "kubernetes.io/config.mirror";
const GONE: u16 = 410;

/// Why the API server cannot be asked.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("no service account here, and no --kubeconfig")]
    NoAccount(#[from] InClusterError),
    #[error(transparent)]
    Config(#[from] KubeconfigError),
    #[error(transparent)]
    Kube(#[from] kube_client::Error),
    #[error("answers {code}: {message}")]
    Status { code: u16, message: String },
    #[error("answers with something else than pods: {0}")]
    Json(#[from] serde_json::Error),
    #[error("answers with something else than pods: {0}")]
    Other(&'static str),
    #[error("answers with more than is read")]
    TooLong,
    #[error("does not answer in time")]
    Late,
    #[error("request")]
    Request(#[from] hyper::http::Error),
}

/// A list, a page of it or an event; other members are not read.
#[derive(Debug, Deserialize)]
struct List {
    metadata: Metadata,
    /// None, or null, for none.
    items: Option<Vec<Object>>,
}

#[derive(Debug, Deserialize)]
struct Happened {
    #[serde(rename = "type")]
    kind: String,
    object: Object,
}

/// A pod, or a refusal.
#[derive(Debug, Deserialize)]
struct Object {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    code: u16,
    #[serde(default)]
    message: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    uid: String,
    namespace: String,
    name: String,
    resource_version: String,
    r#continue: String,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<Owner>>,
}

#[derive(Debug, Deserialize)]
struct Owner {
    #[serde(default)]
    kind: String,
}

/// How a watch has ended.
enum End {
    Closed,
    /// The server has forgotten where it was.
    Gone,
}

/// Asks until the server or the parent is gone. Does not return before.
///
/// # Errors
/// Those of the operating system before it has begun.
pub fn run(node: &str, kubeconfig: Option<&Path>, who: Identity) -> io::Result<()> {
    rights::give_up(who)?;
    child::end_with_parent();
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let Err(failure) = runtime.block_on(ask(node, kubeconfig));
    say(&Line::<Pod>::Away(with_sources(&failure)))
}

fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text += &format!(": {more}");
        }
        source = error.source();
    }
    text
}

async fn ask(node: &str, kubeconfig: Option<&Path>) -> Result<Infallible, Failure> {
    let mut config = match kubeconfig {
        Some(file) => {
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(Kubeconfig::read_from(file)?, &options).await?
        }
        None => Config::incluster_env()?,
    };
    // The parent does that.
    config.default_retry = false;
    config.connect_timeout = Some(PATIENCE);
    let pods = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{node}");
    let mut watch = Watch {
        client: Client::try_from(config)?,
        pods,
        known: BTreeMap::new(),
        version: String::new(),
    };
    loop {
        watch.list().await?;
        let listed = watch.version.clone();
        loop {
            let began = Instant::now();
            match watch.follow().await? {
                End::Gone if watch.version == listed => {
                    return Err(Failure::Other("what it has listed just now is gone"));
                }
                End::Gone => break,
                End::Closed if began.elapsed() < SHORT => time::sleep(jittered(PAUSE)).await,
                End::Closed => {}
            }
        }
    }
}

struct Watch {
    client: Client,
    /// The pods of this node.
    pods: String,
    /// As they were last written.
    known: BTreeMap<String, Pod>,
    /// Up to where.
    version: String,
}

impl Watch {
    async fn list(&mut self) -> Result<(), Failure> {
        self.known.clear();
        let mut more = String::new();
        loop {
            let path = format!("{}&limit={PAGE}{more}", self.pods);
            let body = self.get(&path, LIST).await?;
            let List { metadata, items } = read(body, ANSWER_MAX).await?;
            for Object { metadata, .. } in items.into_iter().flatten() {
                let (uid, pod) = known(metadata)?;
                self.known.insert(uid, pod);
            }
            if self.known.len() > MAX_PODS {
                return Err(Failure::TooLong);
            }
            if metadata.r#continue.is_empty() {
                self.version = token(metadata.resource_version)?;
                return Ok(say(&Line::Listed(self.known.clone()))?);
            }
            more = format!("&continue={}", token(metadata.r#continue)?);
        }
    }

    async fn follow(&mut self) -> Result<End, Failure> {
        let path = format!(
            "{}&watch=1&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={}",
            self.pods,
            self.version,
            jittered(WATCH).as_secs()
        );
        let mut body = match self.get(&path, EVENTS).await {
            Err(Failure::Status { code: GONE, .. }) => return Ok(End::Gone),
            body => body?,
        };
        let mut part = BytesMut::new();
        loop {
            let frame = time::timeout(2 * WATCH, body.frame()).await;
            let Ok(Some(Ok(frame))) = frame else { return Ok(End::Closed) };
            let Ok(data) = frame.into_data() else { continue };
            part.extend_from_slice(&data);
            while let Some(end) = part.iter().position(|byte| *byte == b'\n') {
                if self.happened(serde_json::from_slice(&part.split_to(end + 1))?)? {
                    return Ok(End::Gone);
                }
            }
            if part.len() > EVENT_MAX {
                return Err(Failure::TooLong);
            }
        }
    }

    /// Tells what has changed by an event; true if there will be no more of them.
    fn happened(&mut self, Happened { kind, object }: Happened) -> Result<bool, Failure> {
        let Object { metadata, code, message } = object;
        let version = metadata.resource_version.clone();
        match kind.as_str() {
            "ADDED" | "MODIFIED" => {
                let (uid, pod) = known(metadata)?;
                if self.known.get(&uid) != Some(&pod) {
                    self.known.insert(uid.clone(), pod.clone());
                    say(&Line::Changed(uid, pod))?;
                }
                if self.known.len() > MAX_PODS {
                    return Err(Failure::TooLong);
                }
            }
            "DELETED" => {
                if self.known.remove(&metadata.uid).is_some() {
                    say(&Line::<Pod>::Gone(metadata.uid))?;
                }
            }
            "BOOKMARK" => {}
            "ERROR" if code == GONE => return Ok(true),
            "ERROR" => return Err(Failure::Status { code, message }),
            _ => return Err(Failure::Other("an event of an unknown kind")),
        }
        self.version = token(version)?;
        Ok(false)
    }

    async fn get(&self, path: &str, accept: &str) -> Result<Body, Failure> {
        let request = Request::get(path).header("accept", accept).body(Body::empty())?;
        let answer = time::timeout(PATIENCE, self.client.send(request));
        let answer = answer.await.map_err(|_| Failure::Late)??;
        if answer.status().is_success() {
            return Ok(answer.into_body());
        }
        let status = answer.status();
        let refusal = read::<Object>(answer.into_body(), REFUSAL_MAX).await;
        let message = match refusal {
            Ok(Object { message, .. }) if !message.is_empty() => message,
            _ => status.canonical_reason().unwrap_or_default().to_owned(),
        };
        Err(Failure::Status { code: status.as_u16(), message })
    }
}

async fn read<T: DeserializeOwned>(body: Body, bytes_max: usize) -> Result<T, Failure> {
    let body = time::timeout(PATIENCE, Limited::new(body, bytes_max).collect());
    let body = body.await.map_err(|_| Failure::Late)?;
    let bytes: Bytes = body.map_err(|_| Failure::TooLong)?.to_bytes();
    Ok(serde_json::from_slice(&bytes)?)
}

/// A version or the like, which goes into a path as it is.
fn token(text: String) -> Result<String, Failure> {
    let is_safe = |b: u8| b.is_ascii_alphanumeric() || b"-_.=".contains(&b);
    match !text.is_empty() && text.bytes().all(is_safe) {
        true => Ok(text),
        false => Err(Failure::Other("a version that is none")),
    }
}

fn known(metadata: Metadata) -> Result<(String, Pod), Failure> {
    let Metadata { uid, namespace, name, labels, annotations, owner_references, .. } = metadata;
    if uid.is_empty() || namespace.is_empty() || name.is_empty() {
        return Err(Failure::Other("a pod without a name"));
    }
    let (labels, mut annotations) = (labels.unwrap_or_default(), annotations.unwrap_or_default());
    let of_node = owner_references.iter().flatten().any(|owner| owner.kind == "Node");
    let static_uid = annotations.remove(MIRROR).filter(|_| of_node);
    annotations.retain(|name, _| ANNOTATIONS.contains(&name.as_str()));
    Ok((uid, Pod { namespace, name, labels, annotations, static_uid }))
}
