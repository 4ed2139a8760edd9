//! Queueing disciplines: HTB, TBF, fq_codel, the FIFOs and clsact; their classes, filters and counters.
//!
//! The requests are those that `tc` of iproute2 sends for the same words, down to the rate tables
//! that the kernel has not read since 3.8 but still wants from an old-style link layer. What the
//! kernel then reports through `tc -d qdisc show` is the same; a privileged test compares the two.

mod options;

use std::{
    fmt,
    os::fd::{AsRawFd, BorrowedFd},
};

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, Nla};
use netlink_packet_route::{
    RouteNetlinkMessage as Message,
    tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption, TcStats2},
};

pub use options::{FqCodel, Htb, HtbClass, Tbf};

use super::{NetError, Netlink};

const TCA_OPTIONS: u16 = 2;
/// `TCA_STATS_PKT64` (`linux/gen_stats.h`).
const STATS_PKT64: u16 = 8;
const ETH_P_ALL: u16 = 0x0003;

/// The name of a qdisc or class: `major:minor`, printed in hexadecimal as `tc` does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle {
    /// The qdisc.
    pub major: u16,
    /// The class in the qdisc; 0 is the qdisc itself.
    pub minor: u16,
}

impl Handle {
    /// The root of a device's egress.
    pub const ROOT: Self = Self { major: 0xffff, minor: 0xffff };
    /// The parent of clsact.
    pub const CLSACT: Self = Self { major: 0xffff, minor: 0xfff1 };
    /// Filters on what the device receives.
    pub const CLSACT_INGRESS: Self = Self { major: 0xffff, minor: 0xfff2 };
    /// Filters on what the device sends.
    pub const CLSACT_EGRESS: Self = Self { major: 0xffff, minor: 0xfff3 };
    /// Lets the kernel choose.
    pub const UNSPEC: Self = Self { major: 0, minor: 0 };

    /// `major:minor`.
    pub const fn new(major: u16, minor: u16) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (*self, self.minor) {
            (Self::ROOT, _) => f.write_str("root"),
            (_, 0) => write!(f, "{:x}:", self.major),
            _ => write!(f, "{:x}:{:x}", self.major, self.minor),
        }
    }
}

impl From<Handle> for TcHandle {
    fn from(handle: Handle) -> Self {
        Self { major: handle.major, minor: handle.minor }
    }
}

impl From<TcHandle> for Handle {
    fn from(handle: TcHandle) -> Self {
        Self { major: handle.major, minor: handle.minor }
    }
}

/// Where a qdisc or class sits on a device.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The device.
    pub ifindex: u32,
    /// What it hangs from.
    pub parent: Handle,
    pub handle: Handle,
}

/// What to do if the object exists, or does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Make it; an error if it exists.
    Add,
    /// Make it, in place of what exists.
    Replace,
    /// Change it where it is, dropping no packet; an error if it does not exist.
    Change,
}

impl Verb {
    fn flags(self) -> u16 {
        match self {
            Self::Add => NLM_F_CREATE | NLM_F_EXCL,
            Self::Replace => NLM_F_CREATE | NLM_F_REPLACE,
            Self::Change => 0,
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Add => "add",
            Self::Replace => "replace",
            Self::Change => "change",
        })
    }
}

/// A queueing discipline with its options.
pub trait Qdisc {
    /// As the kernel and `tc` call it.
    fn kind(&self) -> &'static str;

    /// Its options as they lie in the message; none if it has none.
    fn options(&self) -> Result<Option<Vec<u8>>, NetError> {
        Ok(None)
    }
}

/// First in, first out, bounded in packets or in bytes.
#[derive(Debug, Clone, Copy)]
pub enum Fifo {
    Packets(u32),
    Bytes(u32),
}

impl Qdisc for Fifo {
    fn kind(&self) -> &'static str {
        match self {
            Self::Packets(_) => "pfifo",
            Self::Bytes(_) => "bfifo",
        }
    }

    fn options(&self) -> Result<Option<Vec<u8>>, NetError> {
        let (Self::Packets(limit) | Self::Bytes(limit)) = self;
        Ok(Some(limit.to_ne_bytes().to_vec()))
    }
}

/// No queue; the hook for filters on both directions. Its place is [`Handle::CLSACT`].
#[derive(Debug, Clone, Copy)]
pub struct Clsact;

impl Qdisc for Clsact {
    fn kind(&self) -> &'static str {
        "clsact"
    }
}

/// Sends packets to another device.
#[derive(Debug, Clone, Copy)]
pub struct Redirect<'a> {
    /// The device whose packets are looked at.
    pub ifindex: u32,
    /// A side of its clsact.
    pub parent: Handle,
    /// Among the filters there; the lowest is first.
    pub priority: u16,
    /// Among those of the priority.
    pub handle: u16,
    /// What looks at the packets.
    pub program: BorrowedFd<'a>,
    /// The device that they are sent by.
    pub to: u32,
}

/// A filter of a qdisc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// Packets meet low ones first.
    pub priority: u16,
    /// Its name among those of its priority.
    pub handle: Handle,
    /// `bpf`, `u32` ...
    pub kind: String,
    /// The kernel's id of its program.
    pub program: Option<u32>,
}

/// The counters of a qdisc or class.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Its kind, such as `htb`.
    pub kind: String,
    pub handle: Handle,
    /// What it hangs from.
    pub parent: Handle,
    /// Bytes sent, the headers of a packet yet to be segmented counted for each segment.
    pub sent_bytes: u64,
    /// Packets sent, counted after segmentation.
    pub sent_packets: u64,
    pub drops: u32,
    /// How often a packet had to wait for its rate.
    pub overlimits: u32,
    /// Packets in the queue now.
    pub queued_packets: u32,
    /// Bytes in the queue now.
    pub backlog_bytes: u32,
}

impl Netlink {
    /// Adds, replaces or changes a qdisc.
    pub fn set_qdisc(
        &mut self,
        verb: Verb,
        place: Place,
        qdisc: &dyn Qdisc,
    ) -> Result<(), NetError> {
        let kind = qdisc.kind();
        let message = tc_message(place, kind, qdisc.options()?);
        let action =
            format!("{verb} the {kind} qdisc at {} of device {}", place.parent, place.ifindex);
        self.request(&action, Message::NewQueueDiscipline(message), verb.flags())
    }

    /// Deletes the qdisc below `parent`, with its classes and filters. What is queued is dropped.
    pub fn delete_qdisc(&mut self, ifindex: u32, parent: Handle) -> Result<(), NetError> {
        let place = Place { ifindex, parent, handle: Handle::UNSPEC };
        let action = format!("delete the qdisc at {parent} of device {ifindex}");
        self.request(&action, Message::DelQueueDiscipline(header_only(place)), 0)
    }

    /// Adds, replaces or changes an HTB class.
    pub fn set_class(
        &mut self,
        verb: Verb,
        place: Place,
        class: &HtbClass,
    ) -> Result<(), NetError> {
        let message = tc_message(place, "htb", Some(class.encode()?));
        let action = format!("{verb} the class {} of device {}", place.handle, place.ifindex);
        self.request(&action, Message::NewTrafficClass(message), verb.flags())
    }

    /// Deletes a class that has no children and no filters pointing to it.
    pub fn delete_class(&mut self, ifindex: u32, class: Handle) -> Result<(), NetError> {
        let place = Place { ifindex, parent: Handle::UNSPEC, handle: class };
        let action = format!("delete the class {class} of device {ifindex}");
        self.request(&action, Message::DelTrafficClass(header_only(place)), 0)
    }

    /// Adds a filter for every packet that a program (`SCHED_CLS`) looks at: where the program returns -1,
    /// the packet goes to another device's egress (action `mirred`), with 0 to the next filter.
    pub fn add_redirect(&mut self, redirect: &Redirect<'_>, verb: Verb) -> Result<(), NetError> {
        let Redirect { ifindex, parent, priority, handle, program, to } = *redirect;
        let options = options::bpf_redirect(program.as_raw_fd(), to);
        let place = Place { ifindex, parent, handle: Handle::new(0, handle) };
        let mut message = tc_message(place, "bpf", Some(options));
        message.header.info = u32::from(priority) << 16 | u32::from(ETH_P_ALL.to_be());
        let action =
            format!("add a filter that redirects to device {to} at {parent} of device {ifindex}");
        self.request(&action, Message::NewTrafficFilter(message), verb.flags())
    }

    /// The filters below `parent`, in the order in which packets meet them; none if there is no such parent.
    pub fn filters(&mut self, ifindex: u32, parent: Handle) -> Result<Vec<Filter>, NetError> {
        let place = Place { ifindex, parent, handle: Handle::UNSPEC };
        let action = format!("list the filters at {parent} of device {ifindex}");
        let answers =
            self.ask(&action, Message::GetTrafficFilter(header_only(place)), NLM_F_DUMP)?;
        // A filter comes as two messages; only the one with a handle is the filter itself.
        let filters = answers.into_iter().filter_map(|answer| match answer {
            Message::NewTrafficFilter(m) if m.header.handle != TcHandle::UNSPEC => Some(filter(m)),
            _ => None,
        });
        Ok(filters.collect())
    }

    pub fn delete_filter(
        &mut self,
        ifindex: u32,
        parent: Handle,
        filter: &Filter,
    ) -> Result<(), NetError> {
        let place = Place { ifindex, parent, handle: filter.handle };
        let mut message = tc_message(place, &filter.kind, None);
        message.header.info = u32::from(filter.priority) << 16 | u32::from(ETH_P_ALL.to_be());
        let action = format!("delete the filter {} of device {ifindex}", filter.priority);
        self.request(&action, Message::DelTrafficFilter(message), 0)
    }

    /// The counters of every qdisc of a device.
    pub fn qdisc_stats(&mut self, ifindex: u32) -> Result<Vec<QueueStats>, NetError> {
        let all = self.qdiscs()?.into_iter();
        Ok(all.filter(|(of, _)| *of == ifindex).map(|(_, stats)| stats).collect())
    }

    /// Those of all devices, each with the index of its device.
    pub fn qdiscs(&mut self) -> Result<Vec<(u32, QueueStats)>, NetError> {
        let all = Place { ifindex: 0, parent: Handle::UNSPEC, handle: Handle::UNSPEC };
        let query = Message::GetQueueDiscipline(header_only(all));
        let answers = self.ask("list the qdiscs", query, NLM_F_DUMP)?;
        let qdiscs = answers.into_iter().filter_map(|answer| match answer {
            Message::NewQueueDiscipline(m) => Some((m.header.index as u32, stats(m))),
            _ => None,
        });
        Ok(qdiscs.collect())
    }

    /// The counters of every class of a device.
    pub fn class_stats(&mut self, ifindex: u32) -> Result<Vec<QueueStats>, NetError> {
        let place = Place { ifindex, parent: Handle::UNSPEC, handle: Handle::UNSPEC };
        let action = format!("list the classes of device {ifindex}");
        let answers =
            self.ask(&action, Message::GetTrafficClass(header_only(place)), NLM_F_DUMP)?;
        let classes = answers.into_iter().filter_map(|answer| match answer {
            Message::NewTrafficClass(m) => Some(stats(m)),
            _ => None,
        });
        Ok(classes.collect())
    }
}

fn header_only(place: Place) -> TcMessage {
    let mut message = TcMessage::with_index(place.ifindex as i32);
    message.header.parent = place.parent.into();
    message.header.handle = place.handle.into();
    message
}

fn tc_message(place: Place, kind: &str, options: Option<Vec<u8>>) -> TcMessage {
    let mut message = header_only(place);
    message.attributes.push(TcAttribute::Kind(kind.into()));
    if let Some(options) = options {
        message.attributes.push(TcAttribute::Other(DefaultNla::new(TCA_OPTIONS, options)));
    }
    message
}

fn filter(message: TcMessage) -> Filter {
    let mut filter = Filter {
        priority: (message.header.info >> 16) as u16,
        handle: message.header.handle.into(),
        kind: String::new(),
        program: None,
    };
    for attribute in message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => filter.kind = kind,
            TcAttribute::Options(options) => {
                filter.program = options.into_iter().find_map(|option| match option {
                    TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(id),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    filter
}

fn stats(message: TcMessage) -> QueueStats {
    let mut stats = QueueStats {
        handle: message.header.handle.into(),
        parent: message.header.parent.into(),
        ..QueueStats::default()
    };
    for attribute in message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => stats.kind = kind,
            TcAttribute::Stats2(parts) => {
                for part in parts {
                    match part {
                        TcStats2::Basic(basic) => {
                            stats.sent_bytes = basic.bytes;
                            stats.sent_packets = basic.packets.into();
                        }
                        // Behind the one of 32 bits, from 2^32 on.
                        TcStats2::Other(nla) if nla.kind() == STATS_PKT64 => {
                            let mut packets = [0; 8];
                            if nla.value_len() == packets.len() {
                                nla.emit_value(&mut packets);
                                stats.sent_packets = u64::from_ne_bytes(packets);
                            }
                        }
                        TcStats2::Queue(queue) => {
                            stats.drops = queue.drops;
                            stats.overlimits = queue.overlimits;
                            stats.queued_packets = queue.qlen;
                            stats.backlog_bytes = queue.backlog;
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    stats
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::tc::TcStatsBasic;

    use super::*;

    #[test]
    fn packets_are_counted_beyond_32_bits() {
        let mut basic = TcStatsBasic::default();
        (basic.bytes, basic.packets) = (7_000_000_000_000, 5);
        let packets = (1u64 << 32) + 5;
        let wide = DefaultNla::new(STATS_PKT64, packets.to_ne_bytes().to_vec());
        let mut message = TcMessage::default();
        let parts = vec![TcStats2::Basic(basic), TcStats2::Other(wide)];
        message.attributes.push(TcAttribute::Stats2(parts));
        assert_eq!(stats(message).sent_packets, packets);
    }
}
