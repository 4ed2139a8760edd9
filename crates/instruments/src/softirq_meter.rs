//! Measures the CPU time that the network's softirqs take from others: what no process has in its bill.
//!
//! Two small eBPF programs at the beginning and end of each softirq, of the whole machine. What runs inside
//! the processes that are named is left out, because it is in their CPU time already. The sum of both is what
//! traffic costs, also on a machine on which others work.

use std::{mem::MaybeUninit, time::Duration};

use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle,
    skel::{OpenSkel, SkelBuilder},
};

use crate::skel;

/// Most processes that can be named.
pub const PROCESSES_MAX: usize = 64;

/// Why softirqs cannot be measured. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum SoftirqMeterError {
    #[error("cannot {action}: {source} (run as root, on a kernel with tracepoints)")]
    Bpf {
        /// What was asked, as a phrase that follows "cannot".
        action: &'static str,
        source: libbpf_rs::Error,
    },
    #[error("{0} processes: name at most {PROCESSES_MAX}")]
    Processes(usize),
}

/// A meter of the whole machine. Dropping it detaches it.
#[derive(Debug)]
pub struct SoftirqMeter {
    times: MapHandle,
    _links: [Link; 2],
}

impl SoftirqMeter {
    /// Counts from now on, but not what runs in the processes of `own`.
    ///
    /// # Errors
    /// If the kernel has no tracepoints, for want of rights, or if there are more than [`PROCESSES_MAX`].
    pub fn attach(own: &[u32]) -> Result<Self, SoftirqMeterError> {
        if own.len() > PROCESSES_MAX {
            return Err(SoftirqMeterError::Processes(own.len()));
        }
        let refused = |action| move |source| SoftirqMeterError::Bpf { action, source };
        let mut object = MaybeUninit::uninit();
        let open = skel::softirq_meter::SoftirqMeterSkelBuilder::default()
            .open(&mut object)
            .map_err(refused("open the softirq meter"))?;
        let loaded = open.load().map_err(refused("load the softirq meter"))?;
        for process in own {
            loaded
                .maps
                .softirq_own
                .update(&process.to_ne_bytes(), &[1], MapFlags::ANY)
                .map_err(refused("name a process to the softirq meter"))?;
        }
        let times = MapHandle::try_from(&loaded.maps.softirq_times)
            .map_err(refused("keep the softirq meter's map"))?;
        let attach = refused("attach the softirq meter");
        // The end first: an end without a beginning counts nothing.
        let ends = loaded.progs.softirq_ends.attach().map_err(attach)?;
        let begins = loaded.progs.softirq_begins.attach().map_err(attach)?;
        Ok(Self { times, _links: [begins, ends] })
    }

    /// CPU time until now, of all CPUs.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub fn spent(&self) -> Result<Duration, SoftirqMeterError> {
        let read = self.times.lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY);
        let cpus = read.map_err(|source| SoftirqMeterError::Bpf {
            action: "read the softirq meter",
            source,
        })?;
        // struct softirq_time: when one began, and what was spent.
        let spent = |time: &Vec<u8>| {
            time.get(8..16).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
        };
        Ok(Duration::from_nanos(cpus.iter().flatten().map(spent).sum()))
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn root_softirqs_of_others_are_counted() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIP root_softirqs_of_others_are_counted: needs root");
            return;
        }
        // This process is not named, so what loopback does inside it counts.
        let meter = SoftirqMeter::attach(&[]).unwrap();
        let before = meter.spent().unwrap();
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..1000 {
            sender.send_to(&[0; 100], receiver.local_addr().unwrap()).unwrap();
        }
        assert!(meter.spent().unwrap() > before);
    }

    #[test]
    fn too_many_processes_are_refused() {
        let error = SoftirqMeter::attach(&[1; PROCESSES_MAX + 1]).unwrap_err();
        assert_eq!(error.to_string(), "65 processes: name at most 64");
    }
}
