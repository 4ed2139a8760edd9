//! Keeps idle CPUs awake while an experiment runs.
//!
//! A CPU that idles sleeps, and wakes late when a packet comes: by microseconds where it sleeps deeply, and
//! by milliseconds in a virtual machine, whose hypervisor takes it away meanwhile. This is latency of the
//! machine, whatever limit the packet passes. So the kernel is asked for a wake-up latency of zero, as other
//! instruments of latency do (PM QoS, `Documentation/power/pm_qos_interface.rst`): its idle loop polls then.
//! Busy CPUs are not affected, and time of the idle loop counts as idle.

use std::{
    fs::File,
    io::{self, Write},
};

/// The request to the kernel; it holds as long as the file is open.
const DEVICE: &str = "/dev/cpu_dma_latency";
/// The longest wake-up, in microseconds.
const LATENCY_US: i32 = 0;

/// CPUs stay awake while this value lives.
#[derive(Debug)]
pub struct Awake {
    _request: Option<File>,
}

impl Awake {
    /// Asks the kernel. Where it has no such request, or this process may not ask, CPUs sleep as before.
    #[must_use]
    pub fn keep() -> Awake {
        let ask = || {
            let mut file = File::options().write(true).open(DEVICE)?;
            file.write_all(&LATENCY_US.to_ne_bytes()).map(|()| file)
        };
        let asked: io::Result<File> = ask();
        Awake { _request: asked.ok() }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn root_idle_cpus_stay_awake() {
        let Ok(mut file) = File::open(DEVICE) else {
            eprintln!("SKIP root_idle_cpus_stay_awake: {DEVICE} cannot be opened");
            return;
        };
        let _awake = Awake::keep();
        let mut latency_us = [0xff; 4];
        file.read_exact(&mut latency_us).unwrap();
        assert_eq!(i32::from_ne_bytes(latency_us), LATENCY_US);
    }
}
