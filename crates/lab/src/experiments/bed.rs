//! The testbed that the experiments with one sender and one receiver share: its meter of the wire, its
//! settings, its congestion controls.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use tidegate_instruments::wire_meter::WireMeter;
use tidegate_sys::congestion::{self, CongestionControl};

use super::wire::Wire;
use crate::{
    context::Context,
    testbed::{Child, Family, LinkSpec, Testbed, TestbedOptions, Topology, command, set_sysctl},
    tools::probe,
};

/// The name under which the path without load is recorded.
pub(super) const IDLE: &str = "idle";
const PROBE_PORT: u16 = 7001;
/// Fine enough for any window of 100 ms to be near one that is measured.
const BIN: Duration = Duration::from_millis(10);
const BINS: u32 = 6000;
/// How long a command may take.
const COMMAND: Duration = Duration::from_secs(60);

/// One sender, one receiver, a meter on the receiver's device.
pub(super) struct Bed {
    // Before the testbed that it is in.
    pub(super) meter: WireMeter,
    pub(super) testbed: Testbed,
}

impl Bed {
    /// Builds it, with a link between the hosts or a plain cable; the tools of the lab are run from
    /// `lab_binary`, or from the running program.
    pub(super) fn new(lab_binary: Option<PathBuf>, link: Option<LinkSpec>) -> anyhow::Result<Bed> {
        let options = TestbedOptions { lab_binary, link, ..TestbedOptions::new(Topology::Pair) };
        let testbed = Testbed::new(options)?;
        let meter = WireMeter::attach(testbed.receiver(0), testbed.receiver_dev(0), BINS, BIN)?;
        Ok(Bed { meter, testbed })
    }

    /// An address of the receiver.
    pub(super) fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.testbed.addr(0, Family::V4), port)
    }

    /// Whether TCP asks for ECN, at both ends.
    pub(super) fn set_ecn(&self, ecn: bool) -> anyhow::Result<()> {
        for host in [self.testbed.sender(), self.testbed.receiver(0)] {
            set_sysctl(host, "net.ipv4.tcp_ecn", if ecn { "1" } else { "0" })?;
        }
        Ok(())
    }

    /// The congestion control of programs on the sender that choose none. The route names it, because the
    /// setting of a namespace takes only those that its host allows to all users.
    pub(super) fn set_control(&self, control: &Control) -> anyhow::Result<()> {
        let (host, dev) = (self.testbed.sender(), self.testbed.sender_dev());
        let from = self.testbed.sender_addr(Family::V4).to_string();
        let to = self.at(0).ip().to_string();
        let mut ip = command(host, "ip")?;
        ip.args(["-4", "route", "replace", &to, "dev", dev, "src", &from]);
        ip.args(["congctl", control.name()]);
        Child::spawn(ip)?.finish(COMMAND)?;
        Ok(())
    }

    /// Begins to count what arrives.
    pub(super) fn start_meter(&mut self) -> anyhow::Result<()> {
        Ok(self.meter.start()?)
    }

    /// Measures the path without load and without a limit, and records it as [`IDLE`].
    pub(super) fn idle(&self, ctx: &mut Context, duration: Duration) -> anyhow::Result<()> {
        ctx.step("the idle path");
        let at = self.at(PROBE_PORT);
        let _server = probe::start_server(&self.testbed, self.testbed.receiver(0), at)?;
        let args = probe::ClientArgs::new(at, duration);
        let client = probe::start_client(&self.testbed, self.testbed.sender(), args)?;
        let report = probe::finish_client(client, args)?;
        let case = ctx.case();
        ctx.record(IDLE, &case, 1)
            .value("rtt_p50_us", report.rtt.p50_us)
            .value("rtt_p99_us", report.rtt.p99_us);
        Ok(())
    }

    /// What has arrived since.
    pub(super) fn wire(&self) -> anyhow::Result<Wire> {
        let bytes = self.meter.bins()?.iter().map(|bin| bin.bytes).collect();
        Ok(Wire::new(bytes, self.meter.bin()))
    }
}

/// A congestion control as an experiment names it, and how to get it.
#[derive(Debug)]
pub(super) struct Control {
    /// As cases name it: `cubic+ecn`.
    pub(super) label: &'static str,
    /// TCP asks for ECN.
    pub(super) ecn: bool,
    held: CongestionControl,
}

impl Control {
    /// Gets the control that a label names: that of the kernel, `+ecn` to ask for ECN besides.
    pub(super) fn get(label: &'static str) -> anyhow::Result<Control> {
        let name = label.strip_suffix("+ecn").unwrap_or(label);
        let ecn = name != label || name == "dctcp";
        Ok(Control { label, ecn, held: congestion::ensure(name)? })
    }

    /// The name that sockets take.
    pub(super) fn name(&self) -> &str {
        self.held.name()
    }
}
