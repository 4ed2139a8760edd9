//! Connections to registries, over TLS where the address says so.

use std::{
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
use tidegate_sys::files::open_regular;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task,
};
use tokio_rustls::TlsConnector;

use super::SourceError;

/// The largest file that is read. All authorities that a host trusts take a quarter of it.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// Where a registry is, and what connections to it need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registry {
    pub url: Url,
    pub tls: TlsFiles,
}

/// Makes connections to a registry, with its files as they were when this was made.
pub struct Connector<'a> {
    pub url: &'a Url,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// A connection, encrypted or not.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Registry {
    /// Reads its files, if there are any.
    ///
    /// # Errors
    /// [`SourceError::Tls`].
    pub async fn connector(&self) -> Result<Connector<'_>, SourceError> {
        let (url, files) = (&self.url, self.tls.clone());
        if !url.tls {
            return Ok(Connector { url, tls: None });
        }
        let name = ServerName::try_from(url.host.clone()).map_err(|_| {
            SourceError::Tls(format!("`{}` can be no name in a certificate", url.host))
        })?;
        let config =
            task::spawn_blocking(move || client(&files)).await.map_err(io::Error::other)?;
        Ok(Connector { url, tls: Some((TlsConnector::from(Arc::new(config?)), name)) })
    }
}

impl Connector<'_> {
    /// Opens a connection.
    ///
    /// # Errors
    /// [`SourceError::Io`].
    pub async fn connect(&self) -> Result<Box<dyn Stream>, SourceError> {
        let stream = TcpStream::connect((self.url.host.as_str(), self.url.port)).await?;
        Ok(match &self.tls {
            Some((tls, name)) => Box::new(tls.connect(name.clone(), stream).await?),
            None => Box::new(stream),
        })
    }
}

/// The TLS side of a connection: whom it trusts, and the certificate that it shows.
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
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                let why = found.errors.first().map_or(String::new(), |e| format!(" ({e})"));
                return Err(SourceError::Tls(format!(
                    "this host trusts no authority{why}: name one with tls_ca, or install ca-certificates"
                )));
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
    let file = open_regular(path).map_err(|e| in_file(path, e))?;
    file.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|e| in_file(path, e))?;
    if bytes.len() as u64 > FILE_MAX_BYTES {
        return Err(in_file(path, "is longer than 1 MiB"));
    }
    Ok(bytes)
}

fn in_file(path: &Path, why: impl std::fmt::Display) -> SourceError {
    SourceError::Tls(format!("{}: {why}", path.display()))
}
