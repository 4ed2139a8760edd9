//! A server of HTTP/3 of our own, on quinn and h3: it answers each request with so many bytes.
//!
//! Its certificate is made when it starts, and no client checks it. The client is [`load`](super::load) with
//! protocol `http3`.
//!
//! QUIC as quinn has it by default, which is what programs that use it send: CUBIC, paced by the program; at
//! most 1452 bytes of payload in a datagram; segmentation offload of UDP (GSO) is on, so that up to ten
//! datagrams leave in one call and pass the programs of a limit as one packet. All connections of the server
//! share its one UDP socket, as those of any server of QUIC do.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use http::Response;
use quinn::{
    Connection, Endpoint,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::{
    DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls13_signature},
    pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
    version::TLS13,
};
use tokio::runtime;

use crate::testbed::{Child, Site, Testbed, wait};

/// The protocol that both ends name in the handshake.
const ALPN: &[u8] = b"h3";
/// The name in the certificate.
pub(super) const NAME: &str = "lab";
/// The server prints it when it listens.
const READY: &str = "ready";
const READY_WITHIN: Duration = Duration::from_secs(60);

/// The arguments of the server.
#[derive(Debug, Clone, Copy, Args)]
pub struct ServerArgs {
    /// Address and port
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: SocketAddr,
    /// The body of each reply, in bytes
    #[arg(long = "bytes", value_name = "N")]
    pub reply_bytes: usize,
}

/// Starts the server in the testbed.
pub fn start_server<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    args: ServerArgs,
) -> anyhow::Result<Child> {
    let mut command = testbed.tool(site, "http3-server")?;
    command.arg(format!("--listen={}", args.listen)).arg(format!("--bytes={}", args.reply_bytes));
    let mut server = Child::spawn(command)?;
    wait::wait_until("the start of the HTTP/3 server", READY_WITHIN, || {
        server.check_running()?;
        Ok(server.stdout_so_far().contains(READY).then_some(()))
    })?;
    Ok(server)
}

/// The server: answers until killed.
pub fn serve(args: ServerArgs) -> anyhow::Result<()> {
    runtime()?.block_on(async {
        let endpoint = listen(args.listen)?;
        println!("{{\"{READY}\":true}}");
        answer(endpoint, Bytes::from(vec![0; args.reply_bytes])).await;
        Ok(())
    })
}

/// One thread, as the other tools have.
pub(super) fn runtime() -> anyhow::Result<runtime::Runtime> {
    Ok(runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Listens with a certificate of its own.
pub(super) fn listen(address: SocketAddr) -> anyhow::Result<Endpoint> {
    let own = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key.into())?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let quic = QuicServerConfig::try_from(tls)?;
    Endpoint::server(quinn::ServerConfig::with_crypto(Arc::new(quic)), address)
        .with_context(|| format!("cannot listen on {address}"))
}

/// Answers each request of each connection with `body`. A connection that breaks ends alone; one that is
/// silent ends with QUIC's idle time, 30 s.
pub(super) async fn answer(endpoint: Endpoint, body: Bytes) {
    while let Some(incoming) = endpoint.accept().await {
        let body = body.clone();
        tokio::spawn(async move { answer_one(incoming.await?, body).await });
    }
}

pub(super) async fn answer_one(connection: Connection, body: Bytes) -> anyhow::Result<()> {
    let quic = h3_quinn::Connection::new(connection);
    let mut connection = h3::server::Connection::new(quic).await?;
    while let Some(resolver) = connection.accept().await? {
        let body = body.clone();
        tokio::spawn(async move {
            let (_, mut stream) = resolver.resolve_request().await?;
            let length = body.len();
            stream
                .send_response(Response::builder().header("content-length", length).body(())?)
                .await?;
            stream.send_data(body).await?;
            stream.finish().await?;
            anyhow::Ok(())
        });
    }
    Ok(())
}

/// QUIC for a client that believes every certificate.
pub(super) fn client_config() -> anyhow::Result<quinn::ClientConfig> {
    let provider = provider();
    let mut tls = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)))
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let quic = QuicClientConfig::try_from(tls)?;
    Ok(quinn::ClientConfig::new(Arc::new(quic)))
}

/// Of the two that rustls has, the one that builds with a C compiler alone.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Believes every certificate: the server is ours, in a namespace of ours.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("QUIC is TLS 1.3".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Runs a server on the loopback device, in a thread of its own; for tests.
#[cfg(test)]
pub(super) fn serve_here<F>(serve: impl FnOnce(Endpoint) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()>,
{
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime().unwrap().block_on(async {
            let endpoint = listen(([127, 0, 0, 1], 0).into()).unwrap();
            tell.send(endpoint.local_addr().unwrap()).unwrap();
            serve(endpoint).await;
        });
    });
    told.recv_timeout(READY_WITHIN).expect("the server listens")
}
