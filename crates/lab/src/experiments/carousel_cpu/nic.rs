//! `tidegate nic` between the two hosts of a testbed, as a user starts it.

use std::{
    net::{IpAddr, Ipv4Addr},
    process::Command,
    time::Duration,
};

use anyhow::ensure;
use tempfile::TempDir;
use tidegate_core::Rate;

use crate::{
    context::Context,
    testbed::{Child, Testbed, wait::wait_until},
};

/// The TAP device in both hosts.
pub(super) const DEVICE: &str = "carousel0";
/// Where the receiver is behind the NIC.
pub(super) const RECEIVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 78, 0, 2));
const SENDER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 78, 0, 1));
const BITS: u8 = 24;
const START: Duration = Duration::from_secs(60);

/// What its thread does while it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Auto,
    Poll,
    Sleep,
}

/// A software NIC that runs, and the devices that it made. They go with it.
pub(super) struct Nic {
    child: Child,
    _run_dir: TempDir,
}

impl Nic {
    /// Starts one that limits what the sender sends.
    pub(super) fn start(
        ctx: &Context,
        testbed: &Testbed,
        rate: Rate,
        wait: Wait,
    ) -> anyhow::Result<Nic> {
        let hosts = [(testbed.sender(), SENDER), (testbed.receiver(0), RECEIVER)];
        let run_dir = tempfile::tempdir()?;
        // It need not be told to end with the lab: its devices are in namespaces that go.
        let mut command = Command::new(&ctx.tidegate);
        command.arg("--run-dir").arg(run_dir.path().join("run")).arg("nic");
        command.args(hosts.map(|(netns, _)| format!("tap:{DEVICE}@{}", netns.name())));
        command.args(["--egress", &rate.to_string(), "--name", "lab", "--wait"]);
        command.arg(match wait {
            Wait::Auto => "auto",
            Wait::Poll => "poll",
            Wait::Sleep => "sleep",
        });
        tidegate_sys::net::prepare(&mut command, tidegate_sys::net::SpawnInto::default())?;
        let mut child = Child::spawn(command)?;
        wait_until("the start of tidegate nic", START, || {
            child.check_running()?;
            Ok(child.output().stderr.contains(" runs: ").then_some(()))
        })?;
        for (netns, address) in hosts {
            let mut netlink = netns.netlink()?;
            let index = netlink.index_of(DEVICE)?;
            netlink.add_address(index, address, BITS)?;
        }
        Ok(Nic { child, _run_dir: run_dir })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.pid()
    }

    pub(super) fn finish(self) -> anyhow::Result<()> {
        let said = self.child.stop()?.stderr;
        ensure!(!said.contains("warning:"), "tidegate nic said: {}", said.trim());
        Ok(())
    }
}
