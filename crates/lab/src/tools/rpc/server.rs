//! The server of [`super`], and what both ends say on a connection.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
};

use anyhow::{Context, ensure};
use clap::Args;
use rustix::net::sockopt::set_tcp_congestion;

use super::Direction;

/// What is written or read at once.
pub(super) const CHUNK_BYTES: usize = 256 * 1024;
/// First words of a connection, so that a stray one is told from a client.
const MAGIC: u32 = 0x7469_6465;
const CC_NAME_BYTES: usize = 16;
const HELLO_BYTES: usize = 4 + 4 + 8 + 8 + CC_NAME_BYTES;

/// What a server is told.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// Address and port
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: SocketAddr,
}

/// The server: answers until killed.
pub fn serve(args: &ServerArgs) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.listen)
        .with_context(|| format!("cannot listen on {}", args.listen))?;
    loop {
        let (stream, _) = listener.accept()?;
        // A client that goes ends its thread; that is no error of the server.
        thread::spawn(move || answer(stream));
    }
}

pub(in crate::tools) fn answer(mut stream: TcpStream) -> anyhow::Result<()> {
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello)?;
    let hello = Hello::decode(&hello)?;
    stream.set_nodelay(true)?;
    set_cc(&stream, &hello.cc)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let (in_bytes, out_bytes) = match hello.direction {
        Direction::Send => (hello.request_bytes, hello.reply_bytes),
        Direction::Receive => (hello.reply_bytes, hello.request_bytes),
    };
    loop {
        receive_bytes(&mut stream, in_bytes, &mut chunk)?;
        send_bytes(&mut stream, out_bytes, &mut chunk)?;
    }
}

pub(super) fn send_bytes(
    stream: &mut TcpStream,
    mut bytes: u64,
    chunk: &mut [u8],
) -> io::Result<()> {
    while bytes > 0 {
        let len = bytes.min(chunk.len() as u64) as usize;
        stream.write_all(&chunk[..len])?;
        bytes -= len as u64;
    }
    Ok(())
}

pub(super) fn receive_bytes(
    stream: &mut TcpStream,
    mut bytes: u64,
    chunk: &mut [u8],
) -> io::Result<()> {
    while bytes > 0 {
        let want = bytes.min(chunk.len() as u64) as usize;
        match stream.read(&mut chunk[..want])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => bytes -= len as u64,
        }
    }
    Ok(())
}

/// What the server must know of a connection; the first thing on it.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::tools) struct Hello {
    pub(in crate::tools) direction: Direction,
    pub(in crate::tools) request_bytes: u64,
    pub(in crate::tools) reply_bytes: u64,
    pub(in crate::tools) cc: String,
}

impl Hello {
    pub(in crate::tools) fn encode(&self) -> anyhow::Result<Vec<u8>> {
        ensure!(self.cc.len() <= CC_NAME_BYTES, "no congestion control is named {:?}", self.cc);
        let mut bytes = Vec::with_capacity(HELLO_BYTES);
        bytes.extend(MAGIC.to_be_bytes());
        bytes.extend(u32::from(self.direction == Direction::Receive).to_be_bytes());
        bytes.extend(self.request_bytes.to_be_bytes());
        bytes.extend(self.reply_bytes.to_be_bytes());
        bytes.extend(self.cc.as_bytes());
        bytes.resize(HELLO_BYTES, 0);
        Ok(bytes)
    }

    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> anyhow::Result<Self> {
        let u32_at = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
        ensure!(u32_at(0) == MAGIC, "this is no rpc-client");
        let cc: Vec<u8> = bytes[24..].iter().copied().take_while(|&b| b != 0).collect();
        Ok(Self {
            direction: if u32_at(4) == 0 { Direction::Send } else { Direction::Receive },
            request_bytes: u64_at(8),
            reply_bytes: u64_at(16),
            cc: String::from_utf8(cc)?,
        })
    }
}

pub(super) fn set_cc(stream: &TcpStream, cc: &str) -> anyhow::Result<()> {
    if cc.is_empty() {
        return Ok(());
    }
    set_tcp_congestion(stream, cc).with_context(|| {
        format!(
            "cannot use the congestion control {cc:?} \
             (see /proc/sys/net/ipv4/tcp_available_congestion_control)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_comes_back_as_it_went() {
        let hello = Hello {
            direction: Direction::Receive,
            request_bytes: 1 << 40,
            reply_bytes: 64,
            cc: "cubic".into(),
        };
        let bytes: [u8; HELLO_BYTES] = hello.encode().unwrap().try_into().unwrap();
        assert_eq!(Hello::decode(&bytes).unwrap(), hello);
        assert!(Hello::decode(&[0; HELLO_BYTES]).is_err());
    }
}
