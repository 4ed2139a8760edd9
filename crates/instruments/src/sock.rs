//! Socket calls for measurements that neither the standard library nor rustix has: what TCP knows of a
//! connection, and the time at which the kernel received a datagram.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd},
    ptr,
};

use tidegate_sys::net::{TCP_INFO_BYTES, TcpInfo};

/// Reads `TCP_INFO`.
pub fn tcp_info(socket: impl AsFd) -> io::Result<TcpInfo> {
    let mut raw = [0u8; TCP_INFO_BYTES];
    let mut len = TCP_INFO_BYTES as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `raw` and sets `len` to their number.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            raw.as_mut_ptr().cast(),
            &mut len,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    if (len as usize) < TCP_INFO_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "TCP_INFO is too short: Linux 6.1 or newer is needed",
        ));
    }
    Ok(TcpInfo::parse(&raw))
}

/// Reads `TCP_WINDOW_CLAMP`: the most that the connection's receive window may be, in bytes.
///
/// # Errors
/// The kernel's.
pub fn window_clamp(socket: impl AsFd) -> io::Result<u32> {
    tcp_option(socket, libc::TCP_WINDOW_CLAMP)
}

/// Reads `TCP_SYNCNT`: how often the kernel sends a SYN, or of a socket that listens the answer to one,
/// again. A listener that has none of its own has the host's number for SYNs here, and uses the one for
/// answers.
///
/// # Errors
/// The kernel's.
pub fn syn_retries(socket: impl AsFd) -> io::Result<u32> {
    tcp_option(socket, libc::TCP_SYNCNT)
}

/// Reads an option of TCP that is a number.
fn tcp_option(socket: impl AsFd, option: libc::c_int) -> io::Result<u32> {
    let mut value = 0u32;
    let mut len = size_of::<u32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `value`.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw mut value).cast(),
            &mut len,
        )
    };
    if done == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// Asks the kernel to note when each datagram arrives; read the notes with [`recv_stamped`].
pub fn stamp_received(socket: impl AsFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the option's value is one `int`, which outlives the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_TIMESTAMPNS,
            ptr::from_ref(&on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the priority of what the socket sends (`SO_PRIORITY`). The name of a class of a qdisc, as
/// `major << 16 | minor`, sends it there.
///
/// Errors: `EPERM` without the capability `CAP_NET_ADMIN` for more than 6.
pub fn set_priority(socket: impl AsFd, priority: u32) -> io::Result<()> {
    // SAFETY: the option's value is one 32-bit integer, which outlives the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PRIORITY,
            ptr::from_ref(&priority).cast(),
            size_of_val(&priority) as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Receives one datagram into `buffer`. Returns its length and when the kernel received it, in
/// nanoseconds of `CLOCK_REALTIME`; `None` if the socket does not stamp.
pub fn recv_stamped(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Option<u64>)> {
    // Room for one aligned control message with a timespec, and to spare.
    let mut control = [0u64; 8];
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: a `msghdr` is integers and pointers, for which all zeros is a value.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: `message` points to `iov` and `control`, both alive, with their true lengths.
    let len = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &mut message, 0) };
    if len < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut stamp_ns = None;
    // SAFETY: `message` was filled in by recvmsg and `control` is alive.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a whole header within `control`.
        let (level, kind) = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
        if level == libc::SOL_SOCKET && kind == libc::SCM_TIMESTAMPNS {
            // SAFETY: the payload of SCM_TIMESTAMPNS is a timespec; it may be unaligned.
            let at =
                unsafe { ptr::read_unaligned(libc::CMSG_DATA(header).cast::<libc::timespec>()) };
            stamp_ns = Some(at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64);
        }
        // SAFETY: `header` is a header of `message`.
        header = unsafe { libc::CMSG_NXTHDR(&message, header) };
    }
    Ok((len as usize, stamp_ns))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn a_live_connection_has_a_window() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(tcp_info(&stream).unwrap().cwnd_segments > 0);
    }

    #[test]
    fn a_stamped_socket_tells_when() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        stamp_received(&socket).unwrap();
        socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        let (len, stamp_ns) = recv_stamped(&socket, &mut [0; 8]).unwrap();
        let now_ns = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        let age_ns = now_ns.abs_diff(stamp_ns.unwrap());
        assert_eq!(len, 1);
        assert!(age_ns < 10_000_000_000, "{age_ns}");
    }
}
