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
    /// Queue delay above which ECN-capable packets are marked [default: 1ms, at least four frames]
    #[arg(long, value_name = "TIME|SIZE")]
    pub mark: Option<Span>,
    #[command(flatten)]
    pub tuning: NicTuning,
    /// Print usage at this interval [default: 1s on a terminal or with --json, else never]
    #[arg(long, value_name = "TIME", value_parser = interval)]
    pub interval: Option<Duration>,
    /// Print JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// Flags that few need.
#[derive(Debug, Args)]
#[command(next_help_heading = "Tuning")]
pub struct NicTuning {
    /// Threads, each with a queue of both ports and a shaper for each direction; limits are divided among
    /// them
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=THREADS_MAX as i64))]
    pub shapers: u32,
    /// How a thread waits: sleep, poll (exact, uses a CPU), or auto (sleeps when there is time)
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub wait: Wait,
    /// Keep the TAP devices that it makes when it ends
    #[arg(long)]
    pub persistent: bool,
    /// Flows in each direction; more share queues
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
    /// Standing queue delay above which packets that cannot be marked are dropped [default: 1ms, at least two
    /// frames]
    #[arg(long, value_name = "TIME")]
    pub codel_target: Option<Nanos>,
    /// Time that a sender has to react before more is dropped [default: 20ms, plus the target above 1ms]
    #[arg(long, value_name = "TIME")]
    pub codel_interval: Option<Nanos>,
    /// Cut segments that take longer than this at the limit
    #[arg(long, value_name = "TIME", default_value = "600us")]
    pub segment: Nanos,
    /// Slot of the timing wheel
    #[arg(long, value_name = "TIME", default_value = "2us")]
    pub granularity: Nanos,
    /// Reach of the timing wheel
    #[arg(long, value_name = "TIME", default_value = "2s")]
    pub horizon: Nanos,
}

/// How a thread waits.
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
