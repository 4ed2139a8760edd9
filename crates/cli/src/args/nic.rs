//! The flags of `tidegate nic`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use tidegate_core::{Bytes, Nanos, Span};
use tidegate_host::settings::{Patch, RateSetting};
use tidegate_nic::{
    lane::LaneOptions,
    relay::{RelayOptions, THREADS_MAX},
    source::PortName,
    waiter::Mode,
};

use super::interval;

#[derive(Debug, Args)]
pub struct NicArgs {
    /// The workload's port, then the other one: `tap:NAME` (attached to if it exists, else made) or
    /// `xdp:NAME` (a device that exists), with `@NETNS` if it is in another network namespace
    #[arg(value_name = "PORT", num_args = 2, required_unless_present = "spec")]
    pub ports: Vec<PortName>,
    /// Ports and limits from a spec file, which is read again on SIGHUP
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ports", "egress", "ingress", "burst", "mark"])]
    pub spec: Option<PathBuf>,
    /// Which `[[nic]]` of the spec; without one, its name [default: the device of the first port]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Rate from the workload, such as 50mbit
    #[arg(long, value_name = "RATE")]
    pub egress: Option<RateSetting>,
    /// Rate to the workload, such as 50mbit
    #[arg(long, value_name = "RATE")]
    pub ingress: Option<RateSetting>,
    /// Credit that an idle limit saves up, as time or bytes [default: 1ms]
    #[arg(long, value_name = "TIME|SIZE")]
    pub burst: Option<Span>,
    /// Packets that waited longer are marked, if their sender hears ECN marks [default: 1ms, at least four
    /// frames]
    #[arg(long, value_name = "TIME|SIZE")]
    pub mark: Option<Span>,
    #[command(flatten)]
    pub tuning: NicTuning,
    /// Print what it does every so often [default: 1s on a terminal or with --json, else never]
    #[arg(long, value_name = "TIME", value_parser = interval)]
    pub interval: Option<Duration>,
    /// Print JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// What few need to set.
#[derive(Debug, Args)]
#[command(next_help_heading = "Tuning")]
pub struct NicTuning {
    /// Threads, each with a queue of both ports and a shaper for each direction; limits are divided among
    /// them
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=THREADS_MAX as i64))]
    pub shapers: u32,
    /// What a thread does while it waits: sleep, poll (in time, and takes a CPU), or sleep where there is
    /// time
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub wait: Wait,
    /// TAP devices that it makes stay when it ends
    #[arg(long)]
    pub persistent: bool,
    /// Flows that are told apart, in each direction
    #[arg(long, value_name = "N", default_value_t = LaneOptions::default().flows as u32)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub flows: u32,
    /// Packets that may wait, in each direction
    #[arg(long, value_name = "N", default_value_t = LaneOptions::default().packets as u32)]
    #[arg(value_parser = clap::value_parser!(u32).range(16..=1 << 20))]
    pub packets: u32,
    /// Bytes that may wait, in each direction [default: 50 ms of the rate, at least 256kb]
    #[arg(long, value_name = "SIZE")]
    pub queue: Option<Bytes>,
    /// Standing wait from which packets that cannot be marked are dropped [default: 1ms, at least two frames]
    #[arg(long, value_name = "TIME")]
    pub codel_target: Option<Nanos>,
    /// How long a sender may take to react before more is dropped [default: 20ms and what the target has
    /// above 1ms]
    #[arg(long, value_name = "TIME")]
    pub codel_interval: Option<Nanos>,
    /// Segments that take longer than this at the limit are cut into frames
    #[arg(long, value_name = "TIME", default_value = "600us")]
    pub segment: Nanos,
    /// How finely departure times are told apart
    #[arg(long, value_name = "TIME", default_value = "2us")]
    pub granularity: Nanos,
    /// How far ahead the timing wheel reaches
    #[arg(long, value_name = "TIME", default_value = "2s")]
    pub horizon: Nanos,
}

/// What a thread does while it waits.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Wait {
    Poll,
    Sleep,
    Auto,
}

impl NicArgs {
    pub fn patch(&self) -> Patch {
        let Self { egress, ingress, burst, mark, .. } = *self;
        Patch { egress, ingress, burst, mark, ..Patch::default() }
    }

    pub fn relay(&self) -> RelayOptions {
        let tuning = &self.tuning;
        let lane = LaneOptions {
            flows: tuning.flows as usize,
            packets: tuning.packets as usize,
            bytes: tuning.queue,
            granularity: tuning.granularity,
            horizon: tuning.horizon,
            segment: tuning.segment,
            mark: None,
            target: tuning.codel_target,
            interval: tuning.codel_interval,
        };
        let mode = match tuning.wait {
            Wait::Poll => Mode::Poll,
            Wait::Sleep => Mode::Sleep,
            Wait::Auto => Mode::Auto,
        };
        RelayOptions { lane, mode }
    }
}
