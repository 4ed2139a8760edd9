//! Where others reach this node. What is written counts; else what the route to one of them says.
//!
//! Names may not resolve and routes may not be there when a host starts. Then the address is that of the
//! default route; without one it is looked for again and again, and the daemon answers meanwhile.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use tokio::{select, sync::mpsc, time};

use super::{Event, FleetSpec, NodeStatus, NotifyState, Signals, TURN_MAX, notify};
use crate::{
    api::Ask,
    discovery::{Found, WAIT, longer, resolve_all},
};

/// Addresses of documentation (RFC 5737, RFC 3849), to which the route is the default one.
const ANYWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// Where others reach this node.
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnAddress {
    pub(super) addr: SocketAddr,
    /// It is that of the default route, as no route to another node was known.
    pub(super) guessed: bool,
}

/// The address from which a datagram to `to` would be sent. Nothing is sent.
pub(super) fn source_to(to: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

/// The address as far as it is known now, or why it cannot.
async fn look(fleet: &FleetSpec) -> Result<OwnAddress, String> {
    let own = |ip| SocketAddr::new(ip, fleet.listen.port());
    if let Some(addr) = fleet.advertise {
        return Ok(OwnAddress { addr, guessed: false });
    }
    if !fleet.listen.ip().is_unspecified() {
        return Ok(OwnAddress { addr: fleet.listen, guessed: false });
    }
    let mut names: Vec<String> = fleet.peers.clone();
    names.extend(fleet.dns.clone());
    names.extend([&fleet.redis, &fleet.etcd].into_iter().flatten().map(ToString::to_string));
    let Found { addresses, failed } = resolve_all(&names).await;
    let mut why = failed.map(|e| e.to_string());
    for to in addresses {
        match source_to(to) {
            Ok(ip) => return Ok(OwnAddress { addr: own(ip), guessed: false }),
            Err(e) => why = Some(format!("{to}: {e}")),
        }
    }
    let found = ANYWHERE.iter().find_map(|to| source_to(SocketAddr::new(*to, 9)).ok());
    match found.filter(|ip| !ip.is_unspecified() && !ip.is_loopback()) {
        Some(ip) => Ok(OwnAddress { addr: own(ip), guessed: true }),
        None => Err(why.unwrap_or_else(|| "there is no route to anywhere".to_owned())),
    }
}

/// Looks for the address until there is one; `None` if a signal ends the daemon before. Meanwhile it says
/// what it waits for, to who asks and to the log.
pub(super) async fn find(
    fleet: &FleetSpec,
    asks: &mut mpsc::Receiver<Ask>,
    signals: &mut Signals,
    watchdog: Option<Duration>,
    mut say: impl FnMut(&Event),
    status: impl Fn(&str) -> NodeStatus,
) -> Option<OwnAddress> {
    let mut wait = WAIT;
    let mut warned = String::new();
    loop {
        let pause = if warned.is_empty() { Duration::ZERO } else { wait };
        let next = Box::pin(async move {
            time::sleep(pause).await;
            look(fleet).await
        });
        let found = until(next, asks, signals, watchdog, &warned, &status).await?;
        let why = match found {
            Ok(own) => return Some(own),
            Err(why) => why,
        };
        let text = format!(
            "cannot tell yet where others reach this node: {why}; its limits keep what they have, and it is \
             looked for again; if that stays so, write for example advertise = \"10.0.0.1:7946\" in [fleet]"
        );
        if warned.is_empty() {
            // It runs, and waits for the network as long as that takes.
            notify(&[NotifyState::Ready]);
        } else {
            wait = longer(wait);
        }
        if text != warned {
            say(&Event::Warning(text.clone()));
            warned = text;
        }
    }
}

/// Waits for a look, and answers meanwhile; `None` if a signal ends it.
async fn until(
    mut next: impl Future<Output = Result<OwnAddress, String>> + Unpin,
    asks: &mut mpsc::Receiver<Ask>,
    signals: &mut Signals,
    watchdog: Option<Duration>,
    warned: &str,
    status: &impl Fn(&str) -> NodeStatus,
) -> Option<Result<OwnAddress, String>> {
    loop {
        select! {
            found = &mut next => return Some(found),
            () = time::sleep(watchdog.unwrap_or(TURN_MAX)) => {}
            Some(ask) = asks.recv() => match ask {
                Ask::Status(tell) => _ = tell.send(Box::new(status(warned))),
                Ask::Reload(tell) => _ = tell.send(Err(warned.to_owned())),
            },
            _ = signals.term.recv() => return None,
            _ = signals.int.recv() => return None,
        }
        if watchdog.is_some() {
            notify(&[NotifyState::Watchdog]);
        }
    }
}
