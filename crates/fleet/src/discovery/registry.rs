//! Connections to registries, over TLS where the address says so.

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tidegate_host::fleet::{TlsFiles, url::Url};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task,
};
use tokio_rustls::TlsConnector;

use super::SourceError;

/// The largest file that is read. All authorities that a host trusts take a quarter of it.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// Where a registry is, and what a connection to it needs.
#[derive(Debug, Clone)]
pub struct Registry {
    pub url: Url,
    pub tls: TlsFiles,
}

/// A connection, encrypted or not.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Registry {
    /// Opens a connection.
    ///
    /// # Errors
    /// [`SourceError`].
    pub async fn connect(&self) -> Result<Box<dyn Stream>, SourceError> {
        let host = &self.url.host;
        let stream = TcpStream::connect((host.as_str(), self.url.port)).await?;
        if !self.url.tls {
            return Ok(Box::new(stream));
        }
        let files = self.tls.clone();
        let config =
            task::spawn_blocking(move || client(&files)).await.map_err(io::Error::other)?;
        let name = ServerName::try_from(host.clone())
            .map_err(|_| SourceError::Tls(format!("`{host}` can be no name in a certificate")))?;
        Ok(Box::new(TlsConnector::from(Arc::new(config?)).connect(name, stream).await?))
    }
}

/// What a connection needs to know whom it may trust.
fn client(files: &TlsFiles) -> Result<ClientConfig, SourceError> {
    let refuse = |e: rustls::Error| SourceError::Tls(e.to_string());
    let mut roots = RootCertStore::empty();
    match &files.ca {
        Some(path) => {
            for cert in certificates(path)? {
                roots.add(cert).map_err(|e| in_file(path, e))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                let why = "this host trusts no authority: name one with tls_ca, or install ca-certificates";
                return Err(SourceError::Tls(why.to_owned()));
            }
        }
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(refuse)?
        .with_root_certificates(roots);
    let (Some(cert), Some(key)) = (&files.cert, &files.key) else {
        return Ok(config.with_no_client_auth());
    };
    let text = read(key)?;
    let private = PrivateKeyDer::from_pem_slice(&text).map_err(|e| in_file(key, e))?;
    config.with_client_auth_cert(certificates(cert)?, private).map_err(refuse)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, SourceError> {
    let text = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|e| in_file(path, e))?;
    if found.is_empty() {
        return Err(in_file(path, "there is no certificate in it"));
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, SourceError> {
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|e| in_file(path, e))?;
    file.take(FILE_MAX_BYTES).read_to_end(&mut bytes).map_err(|e| in_file(path, e))?;
    Ok(bytes)
}

fn in_file(path: &Path, why: impl std::fmt::Display) -> SourceError {
    SourceError::Tls(format!("{}: {why}", path.display()))
}
