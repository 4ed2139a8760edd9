//! How a `tidegate run` without the privileges of root has the agent hold its limit: messages on a Unix
//! socket, and the side that asks.
//!
//! A connection is one limit. The first message has the settings as they were written, and the command's
//! cgroup as an open directory. The limit ends with the connection.

use std::{
    fs,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, recvmsg, sendmsg, socket_with, sockopt,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tidegate_sys::names;

use crate::summary::Report;

/// Its name in the run directory.
pub const SOCKET: &str = "agent.sock";
/// Whose members may ask.
pub const GROUP: &str = "tidegate";
/// Bytes of a request at most.
pub const REQUEST_MAX: usize = 4 << 10;
/// Bytes of an answer at most.
pub const ANSWER_MAX: usize = 64 << 10;
/// How long an answer may take. The agent may have to wait for other writers.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Settings by their names, in words of the command line. The cgroup comes with it.
    Limit(Vec<(String, String)>),
    /// The command has ended.
    End { exit_code: u8, elapsed_ns: u64 },
}

/// What the agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    InForce,
    Refused(String),
    /// The limit is off; what it did.
    Ended(Report),
}

/// Why the agent does not hold the limit.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error(
        "limits need the privileges of root: run it with sudo, or have the agent do it. It makes the socket \
         {} for members of group `{GROUP}`, if there is one when it starts: sudo groupadd --system {GROUP}; \
         sudo systemctl restart tidegate-agent", .0.display()
    )]
    NoAgent(PathBuf),
    #[error(
        "only root and members of group `{0}` may limit commands: run it with sudo, or type `sudo usermod \
         -aG {0} $USER` and log in again"
    )]
    NoMember(String),
    #[error("the agent refuses: {0}")]
    Refused(String),
    #[error("the agent does not answer: {0}")]
    Io(#[from] io::Error),
}

/// The group whose members may write to a socket.
fn group_of(socket: &Path) -> String {
    let gid = fs::metadata(socket).ok().map(|meta| meta.gid());
    let name = gid.and_then(|gid| names::group_name(gid).or_else(|| Some(gid.to_string())));
    name.unwrap_or_else(|| GROUP.to_owned())
}

/// Sends a message, with a file if there is one.
///
/// # Errors
/// Those of the operating system.
pub fn send(
    to: impl AsFd,
    message: &impl Serialize,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.as_slice();
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    sendmsg(to, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a message of so many bytes at most, and the file that came with it; `None` at the end.
///
/// # Errors
/// Those of the operating system, and of what is no such message.
pub fn receive<T: DeserializeOwned>(
    from: impl AsFd,
    max: usize,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut text = vec![0; max];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffer = [IoSliceMut::new(&mut text)];
    let got = recvmsg(from, &mut buffer, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
    }
    match got.bytes {
        0 => Ok(None),
        bytes => Ok(Some((serde_json::from_slice(&text[..bytes])?, file))),
    }
}

/// A limit that the agent holds; it ends with this.
#[derive(Debug)]
pub struct Asked(OwnedFd);

impl Asked {
    /// Has the agent put a limit on a cgroup of this user.
    ///
    /// # Errors
    /// [`AskError`].
    pub fn connect(socket: &Path) -> Result<Asked, AskError> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let fd = socket_with(family, kind, SocketFlags::CLOEXEC, None).map_err(io::Error::from)?;
        for which in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&fd, which, Some(PATIENCE)).map_err(io::Error::from)?;
        }
        let address = SocketAddrUnix::new(socket).map_err(io::Error::from)?;
        connect(&fd, &address).map_err(|e| match e {
            rustix::io::Errno::NOENT | rustix::io::Errno::CONNREFUSED => {
                AskError::NoAgent(socket.to_owned())
            }
            // Its agent found no group, and has the socket for root alone.
            rustix::io::Errno::ACCESS if fs::metadata(socket).is_ok_and(|meta| meta.gid() == 0) => {
                AskError::NoAgent(socket.to_owned())
            }
            rustix::io::Errno::ACCESS => AskError::NoMember(group_of(socket)),
            e => AskError::Io(e.into()),
        })?;
        Ok(Asked(fd))
    }

    /// Has it put a limit on a cgroup.
    ///
    /// # Errors
    /// [`AskError`].
    pub fn limit(&self, cgroup: impl AsFd, settings: &[(String, String)]) -> Result<(), AskError> {
        let sent = send(&self.0, &Request::Limit(settings.to_vec()), Some(cgroup.as_fd()));
        // An agent that refuses at once may have closed its end before.
        match self.answer().or_else(|e| sent.and(Err(e)))? {
            Answer::InForce => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Has the agent take the limit off, and say what it did.
    ///
    /// # Errors
    /// [`AskError`].
    pub fn end(self, exit_code: u8, elapsed_ns: u64) -> Result<Report, AskError> {
        send(&self.0, &Request::End { exit_code, elapsed_ns }, None)?;
        match self.answer()? {
            Answer::Ended(report) => Ok(report),
            other => Err(unexpected(other)),
        }
    }

    fn answer(&self) -> io::Result<Answer> {
        let answer = match receive(&self.0, ANSWER_MAX) {
            // The other end is closed, and has not read all. What it sent before comes after this error.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => receive(&self.0, ANSWER_MAX)?,
            answer => answer?,
        };
        let ended = || io::Error::new(io::ErrorKind::UnexpectedEof, "it has ended");
        Ok(answer.ok_or_else(ended)?.0)
    }
}

fn unexpected(answer: Answer) -> AskError {
    match answer {
        Answer::Refused(why) => AskError::Refused(why),
        _ => AskError::Io(io::Error::new(io::ErrorKind::InvalidData, "another answer")),
    }
}

#[cfg(test)]
mod tests {
    use rustix::{
        event::{PollFd, PollFlags, Timespec, poll},
        net::socketpair,
    };

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        socketpair(family, kind, SocketFlags::NONBLOCK, None).unwrap()
    }

    fn received(text: &[u8]) -> io::Result<Option<(Request, Option<OwnedFd>)>> {
        let (a, b) = pair();
        rustix::net::send(&a, text, SendFlags::empty()).unwrap();
        receive(&b, REQUEST_MAX)
    }

    #[test]
    fn a_message_arrives_with_its_file() {
        let (a, b) = pair();
        let sent = Request::Limit(vec![("egress".to_owned(), "5mbit".to_owned())]);
        send(&a, &sent, Some(b.as_fd())).unwrap();
        let (request, file) = receive::<Request>(&b, REQUEST_MAX).unwrap().unwrap();
        assert!(request == sent && file.is_some());
        send(&a, &Request::End { exit_code: 3, elapsed_ns: 4 }, None).unwrap();
        assert!(receive::<Request>(&b, REQUEST_MAX).unwrap().unwrap().1.is_none());
        drop(a);
        // A program that another test starts has that end, too, until it runs.
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        poll(&mut [PollFd::new(&b, PollFlags::IN)], Some(&patience)).unwrap();
        assert!(receive::<Request>(&b, REQUEST_MAX).unwrap().is_none());
    }

    #[test]
    fn who_is_refused_unheard_is_told_so() {
        for heard in [false, true] {
            let (agent, user) = pair();
            let asked = Asked(user);
            send(&asked.0, &Request::Limit(Vec::new()), None).unwrap();
            if heard {
                receive::<Request>(&agent, REQUEST_MAX).unwrap();
            }
            send(&agent, &Answer::Refused("too many".to_owned()), None).unwrap();
            drop(agent);
            assert!(matches!(asked.answer(), Ok(Answer::Refused(_))), "{heard}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for text in ["x", "{}", "{\"limit\": 1}", "{\"end\": {\"exit_code\": 300}}", "\"limit\""] {
            assert!(received(text.as_bytes()).is_err(), "{text}");
        }
        let long = format!("{{\"limit\": [[\"{}\", \"\"]]}}", "x".repeat(REQUEST_MAX));
        assert!(received(long.as_bytes()).unwrap_err().to_string().contains("too long"));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 1..200)) {
            let _ = received(&bytes);
        }
    }
}
