//! Keeps a testbed up, for a person to look around in: `ip netns exec NAME ...`.

use std::{io::Write, net::IpAddr, time::Duration};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::testbed::{
    Family, Testbed, TestbedOptions, Topology,
    wait::{Interrupted, pass_time},
};

/// What to keep.
#[derive(Debug, Args)]
pub struct HoldArgs {
    /// Which hosts, and how they are joined
    #[arg(long, default_value = "pair")]
    pub topology: Shape,
}

/// The topologies by their names on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Shape {
    /// One sender, one receiver
    Pair,
    /// One sender, a router, two receivers
    TwoReceivers,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The sender's namespace.
    pub sender: String,
    /// The router's namespace, if there is one.
    pub router: Option<String>,
    pub receivers: Vec<HeldReceiver>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldReceiver {
    pub netns: String,
    pub addresses: Vec<IpAddr>,
}

/// Builds, prints what it built, and waits for SIGINT or SIGTERM.
pub fn hold(args: &HoldArgs) -> anyhow::Result<()> {
    let topology = match args.topology {
        Shape::Pair => Topology::Pair,
        Shape::TwoReceivers => Topology::TwoReceivers,
    };
    let testbed = Testbed::new(TestbedOptions::new(topology))?;
    let receivers = (0..testbed.receiver_count()).map(|index| HeldReceiver {
        netns: testbed.receiver(index).name().into(),
        addresses: [Family::V4, Family::V6].map(|family| testbed.addr(index, family)).into(),
    });
    super::print(&Held {
        sender: testbed.sender().name().into(),
        router: testbed.router().map(|router| router.name().into()),
        receivers: receivers.collect(),
    })?;
    std::io::stdout().flush()?;
    match pass_time(Duration::MAX) {
        Err(error) if error.is::<Interrupted>() => Ok(()),
        other => other,
    }
}
