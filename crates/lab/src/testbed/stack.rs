//! Counters of a host's TCP, as `nstat` shows them: who waited for a timer, and what was sent again.

use std::{fs, ops};

use anyhow::Context as _;
use tidegate_sys::net::NetNs;

/// Counters since the namespace was made, or their growth over a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StackCounters {
    /// Retransmission timers that ran out (`TCPTimeouts`).
    pub timeouts: u64,
    /// Segments sent again that were lost again (`TCPLostRetransmit`).
    pub lost_retransmits: u64,
    /// Tail loss probes (`TCPLossProbes`).
    pub loss_probes: u64,
    /// SYNs and answers to them that were sent again (`TCPSynRetrans`), those included that `pace` holds.
    /// Each is in `retransmits`, and in `timeouts` too.
    pub syn_retransmits: u64,
    /// Segments sent again (`RetransSegs`).
    pub retransmits: u64,
}

impl StackCounters {
    pub fn read(host: &NetNs) -> anyhow::Result<StackCounters> {
        let read = || ["netstat", "snmp"].map(|file| fs::read_to_string(net_file(file)));
        let [netstat, snmp] = host.run(read)?;
        StackCounters::parse(&netstat.context("no netstat")?, &snmp.context("no snmp")?)
    }

    fn parse(netstat: &str, snmp: &str) -> anyhow::Result<StackCounters> {
        let of = |text, group, name| {
            counter(text, group, name).with_context(|| format!("the kernel counts no {name}"))
        };
        Ok(StackCounters {
            timeouts: of(netstat, "TcpExt:", "TCPTimeouts")?,
            lost_retransmits: of(netstat, "TcpExt:", "TCPLostRetransmit")?,
            loss_probes: of(netstat, "TcpExt:", "TCPLossProbes")?,
            syn_retransmits: of(netstat, "TcpExt:", "TCPSynRetrans")?,
            retransmits: of(snmp, "Tcp:", "RetransSegs")?,
        })
    }
}

impl ops::Add for StackCounters {
    type Output = StackCounters;

    fn add(self, other: StackCounters) -> StackCounters {
        StackCounters {
            timeouts: self.timeouts + other.timeouts,
            lost_retransmits: self.lost_retransmits + other.lost_retransmits,
            loss_probes: self.loss_probes + other.loss_probes,
            syn_retransmits: self.syn_retransmits + other.syn_retransmits,
            retransmits: self.retransmits + other.retransmits,
        }
    }
}

impl ops::Sub for StackCounters {
    type Output = StackCounters;

    fn sub(self, before: StackCounters) -> StackCounters {
        StackCounters {
            timeouts: self.timeouts.saturating_sub(before.timeouts),
            lost_retransmits: self.lost_retransmits.saturating_sub(before.lost_retransmits),
            loss_probes: self.loss_probes.saturating_sub(before.loss_probes),
            syn_retransmits: self.syn_retransmits.saturating_sub(before.syn_retransmits),
            retransmits: self.retransmits.saturating_sub(before.retransmits),
        }
    }
}

fn net_file(name: &str) -> String {
    format!("/proc/thread-self/net/{name}")
}

/// A counter in the text of `/proc/net/netstat` or `/proc/net/snmp`: a line of names, a line of values.
fn counter(text: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with(group));
    let names = lines.next()?.split_ascii_whitespace();
    let values = lines.next()?.split_ascii_whitespace();
    names.zip(values).find_map(|(found, value)| (found == name).then(|| value.parse().ok())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_name() {
        let netstat = "TcpExt: TCPTimeouts TCPLossProbes TCPLostRetransmit TCPSynRetrans\n\
                       TcpExt: 3 14 15 2\n\
                       IpExt: InNoRoutes TCPTimeouts\n\
                       IpExt: 9 9\n";
        let snmp = "Ip: Forwarding RetransSegs\nIp: 1 64\n\
                    Tcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 92 0\n";
        let after = StackCounters::parse(netstat, snmp).unwrap();
        let expected = StackCounters {
            timeouts: 3,
            lost_retransmits: 15,
            loss_probes: 14,
            syn_retransmits: 2,
            retransmits: 92,
        };
        assert_eq!(after, expected);
        assert_eq!((after + after) - after, expected);
        assert!(StackCounters::parse(snmp, netstat).is_err());
    }

    #[test]
    fn this_kernel_counts_them() {
        let [netstat, snmp] = ["netstat", "snmp"].map(net_file).map(fs::read_to_string);
        StackCounters::parse(&netstat.unwrap(), &snmp.unwrap()).unwrap();
    }
}
