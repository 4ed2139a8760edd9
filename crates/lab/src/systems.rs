//! The systems that experiments compare, and how each is put on a testbed.
//!
//! | name | what it is | where |
//! |---|---|---|
//! | `unlimited` | nothing | |
//! | `htb`, `tbf` | the kernel's, as `tc` sets them up | the sender's device |
//! | `htb-20ms` | HTB whose class has a queue of 20 ms | the sender's device |
//! | `fq`, `fq_codel` | HTB whose class has the queue of that name | the sender's device |
//! | `cake` | CAKE with a bandwidth | the sender's device |
//! | `nrm`, `pace` | `tidegate run --scheme`, as a user starts it | a cgroup |
//! | `nrm-paper` | NRM as published ([`tidegate_instruments::paper`]) | a cgroup |
//!
//! [`System::apply`] gives an [`Applied`]: while it lives the limit is in force, for every program
//! that is started at [`Applied::site`]. It takes the limit off when it is dropped, also after a failure.
//!
//! A limit on what a host *receives* has no plain peer: a qdisc only limits what leaves. TBF then stands at
//! the far end of the cable, on the sender's device, where a receiver could not put it: it is the ideal.

use std::{fmt, time::Duration};

use anyhow::{Context as _, anyhow};
use serde_json::Value;
use tidegate_core::{Direction, Rate};
use tidegate_instruments::paper::{NrmPaper, PaperOptions};
use tidegate_sys::net::{NetNs, SpawnInto, prepare};

use crate::{
    context::Context,
    stop::Skip,
    testbed::{
        Cgroup, Child, Site, Testbed,
        peers::{Peer, TbfOptions},
        wait::wait_until,
    },
    tools::stay::Staying,
};

/// How long `tidegate run` may take to start its command, and to end after it.
const START: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(60);
/// The queue of `htb-20ms`.
const SHORT_QUEUE: Duration = Duration::from_millis(20);

/// A way to limit a rate, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum System {
    /// No limit.
    Unlimited,
    /// The kernel's hierarchical token bucket, one class.
    Htb,
    /// The same with a queue of 20 ms.
    HtbShort,
    /// The kernel's token bucket filter.
    Tbf,
    /// HTB, with a queue for each flow that sends it at its pacing rate.
    Fq,
    /// HTB, with a queue for each flow that is kept short.
    FqCodel,
    /// The kernel's CAKE.
    Cake,
    /// Tidegate's virtual queue.
    Nrm,
    /// Tidegate's default: every TCP socket paced at its fair share.
    Pace,
    /// NRM as published.
    NrmPaper,
}

impl System {
    /// The name by which reports and figures know it.
    pub fn name(self) -> &'static str {
        match self {
            System::Unlimited => "unlimited",
            System::Htb => "htb",
            System::HtbShort => "htb-20ms",
            System::Tbf => "tbf",
            System::Fq => "fq",
            System::FqCodel => "fq_codel",
            System::Cake => "cake",
            System::Nrm => "nrm",
            System::Pace => "pace",
            System::NrmPaper => "nrm-paper",
        }
    }

    /// Puts the limit on: on the testbed's sender for egress, on its (first) receiver for ingress.
    ///
    /// # Errors
    ///
    /// [`Skip`] where the system cannot limit that way; nothing is left of it.
    pub fn apply(
        self,
        ctx: &Context,
        testbed: &Testbed,
        case: &LimitCase,
    ) -> anyhow::Result<Applied> {
        let force = match self {
            System::Unlimited => Force::None,
            System::Htb => Force::Peer(Peer::htb(testbed, self.device_bit_s(case)?)?),
            System::HtbShort => {
                Force::Peer(Peer::htb_short(testbed, self.device_bit_s(case)?, SHORT_QUEUE)?)
            }
            System::Tbf => {
                let rate_bit_s = self.device_bit_s(case)?;
                Force::Peer(Peer::tbf(testbed, rate_bit_s, TbfOptions::usual(rate_bit_s))?)
            }
            System::Fq => Force::Peer(Peer::htb_fq(testbed, self.device_bit_s(case)?)?),
            System::FqCodel => Force::Peer(Peer::htb_fq_codel(testbed, self.device_bit_s(case)?)?),
            System::Cake => Force::Peer(Peer::cake(testbed, self.device_bit_s(case)?)?),
            System::Nrm | System::Pace => {
                Force::Run(TidegateRun::start(ctx, testbed, &self.words(case)?)?)
            }
            System::NrmPaper => {
                let cgroup = Cgroup::create()?;
                let rate = |bit_s: Option<u64>| bit_s.map(rate).transpose();
                let options = PaperOptions {
                    egress: rate(case.egress_bit_s)?,
                    ingress: rate(case.ingress_bit_s)?,
                };
                let directory = std::fs::File::open(cgroup.path())?;
                let paper = NrmPaper::attach(std::os::fd::AsFd::as_fd(&directory), options)?;
                Force::Paper { paper, cgroup }
            }
        };
        Ok(Applied { force })
    }

    /// Whether the kernel has what the system is made of, as far as kernels differ in it.
    ///
    /// # Errors
    ///
    /// [`Skip`] where it has not.
    pub fn check_kernel(self) -> anyhow::Result<()> {
        match self {
            System::Fq | System::FqCodel | System::Cake => Peer::check_kernel(self.name()),
            _ => Ok(()),
        }
    }

    /// The one rate that a qdisc at the sender can limit.
    fn device_bit_s(self, case: &LimitCase) -> Result<u64, Skip> {
        match (case.egress_bit_s, case.ingress_bit_s) {
            (Some(rate_bit_s), None) | (None, Some(rate_bit_s)) => Ok(rate_bit_s),
            _ => Err(Skip(format!("{self} limits what leaves a device"))),
        }
    }

    /// The arguments of `tidegate run`, without the command.
    fn words(self, case: &LimitCase) -> anyhow::Result<Vec<String>> {
        let mut words: Vec<String> =
            ["run", "--stats", "--json", "--scheme", self.name()].map(str::to_owned).into();
        for (flag, bit_s) in [("--egress", case.egress_bit_s), ("--ingress", case.ingress_bit_s)] {
            if let Some(bit_s) = bit_s {
                words.extend([flag.to_owned(), rate(bit_s)?.to_string()]);
            }
        }
        if case.kernel_timers {
            words.extend(["--rto-min", "0ms", "--delack-max", "0ms"].map(str::to_owned));
        }
        Ok(words)
    }
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitCase {
    /// From the sender.
    pub egress_bit_s: Option<u64>,
    /// To the (first) receiver.
    pub ingress_bit_s: Option<u64>,
    /// `nrm` and `pace` leave the kernel's retransmission and delayed-ACK timers as they are.
    pub kernel_timers: bool,
}

impl LimitCase {
    /// A limit on what the sender sends.
    pub fn egress(bit_s: u64) -> LimitCase {
        LimitCase { egress_bit_s: Some(bit_s), ..LimitCase::default() }
    }

    /// A limit on what the receiver receives.
    pub fn ingress(bit_s: u64) -> LimitCase {
        LimitCase { ingress_bit_s: Some(bit_s), ..LimitCase::default() }
    }
}

/// What a system did to packets, in both directions together. Packets that are yet to be segmented
/// count once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Passed with ECN congestion experienced.
    pub marked: u64,
    /// Passed, the local sender told to reduce its window.
    pub slowed: u64,
    pub dropped: u64,
    /// Of these, packets for which TCP waits for a timer; `None` where nobody counts them.
    pub at_risk: Option<u64>,
}

/// A system in force.
#[derive(Debug)]
pub struct Applied {
    force: Force,
}

#[derive(Debug)]
enum Force {
    None,
    Peer(Peer),
    // The program goes before its cgroup.
    Paper { paper: NrmPaper, cgroup: Cgroup },
    Run(TidegateRun),
}

impl Applied {
    /// Where to start the programs that are to be limited, on the host of `netns`.
    pub fn site<'a>(&'a self, netns: &'a NetNs) -> Site<'a> {
        let site = Site::from(netns);
        match &self.force {
            Force::None | Force::Peer(_) => site,
            Force::Paper { cgroup, .. } => site.in_cgroup(cgroup),
            Force::Run(run) => match &run.cgroup {
                Some(cgroup) => site.in_cgroup(cgroup),
                None => site,
            },
        }
    }

    /// Takes the system off and says what it did; `None` for one that counts nothing.
    ///
    /// # Errors
    ///
    /// When it could not be asked, or did not end well. It is off all the same.
    pub fn finish(self) -> anyhow::Result<Option<Counters>> {
        match self.force {
            Force::None => Ok(None),
            Force::Peer(mut peer) => {
                let drops = peer.qdisc_stats()?.iter().map(|stats| u64::from(stats.drops)).max();
                Ok(drops.map(|dropped| Counters { dropped, ..Counters::default() }))
            }
            Force::Paper { paper, .. } => {
                let mut sum = Counters::default();
                for direction in [Direction::Egress, Direction::Ingress] {
                    let counters = paper.counters(direction)?;
                    sum.marked += counters.marked.packets;
                    sum.slowed += counters.slowed.packets;
                    sum.dropped += counters.dropped.packets;
                }
                Ok(Some(sum))
            }
            Force::Run(run) => run.finish().map(Some),
        }
    }
}

/// A `tidegate run` whose command stays until it is told to go.
#[derive(Debug)]
struct TidegateRun {
    child: Child,
    /// Known once the command runs.
    cgroup: Option<Cgroup>,
}

impl TidegateRun {
    fn start(ctx: &Context, testbed: &Testbed, words: &[String]) -> anyhow::Result<TidegateRun> {
        let mut command = std::process::Command::new(&ctx.tidegate);
        command.args(words).arg("--").arg(testbed.lab_binary()).args(["tool", "stay"]);
        // It need not die with the lab: its command's input closes then, and it ends in good order.
        let into = SpawnInto { netns: Some(testbed.sender()), ..SpawnInto::default() };
        prepare(&mut command, into)?;
        let mut run = TidegateRun { child: Child::spawn_open(command)?, cgroup: None };
        let staying = wait_until("the start of tidegate run", START, || {
            run.child.check_running()?;
            Ok(serde_json::from_str::<Staying>(&run.child.stdout_so_far()).ok())
        })?;
        run.cgroup = Some(Cgroup::of_process(staying.pid)?);
        Ok(run)
    }

    fn finish(mut self) -> anyhow::Result<Counters> {
        let status = self.child.wind_up(END)?.context("tidegate run did not end")?;
        let stderr = self.child.output().stderr;
        if !status.success() {
            return Err(anyhow!("tidegate run ended with {status}: {}", stderr.trim()));
        }
        counters_in(&stderr)
            .with_context(|| format!("tidegate run --stats --json said: {}", stderr.trim()))
    }
}

impl Drop for TidegateRun {
    fn drop(&mut self) {
        // If it does not end, the child's own drop kills it.
        let _ = self.child.wind_up(END);
    }
}

fn rate(bit_s: u64) -> anyhow::Result<Rate> {
    Rate::from_bit_s(bit_s).context("a limit of zero")
}

/// Reads the summary that `tidegate run --stats --json` writes on standard error, a line among others.
pub(crate) fn counters_in(stderr: &str) -> anyhow::Result<Counters> {
    let line = stderr.lines().rfind(|line| line.starts_with('{')).context("no summary")?;
    let summary: Value = serde_json::from_str(line)?;
    let sum = |names: &[&str]| -> anyhow::Result<u64> {
        let directions = ["egress", "ingress"].iter().map(|name| &summary[*name]);
        let of = |direction: &Value, name: &&str| {
            direction[format!("{name}_packets")].as_u64().with_context(|| format!("no {name}"))
        };
        directions
            .filter(|direction| !direction.is_null())
            .flat_map(|direction| names.iter().map(move |name| of(direction, name)))
            .sum()
    };
    let at_risk = |direction: &Value| -> Option<u64> {
        let causes = direction["at_risk"].as_object()?.values();
        Some(causes.filter_map(Value::as_u64).sum())
    };
    Ok(Counters {
        marked: sum(&["mark"])?,
        slowed: sum(&["slow"])?,
        dropped: sum(&["drop_full", "drop_reserve", "drop_early"])?,
        at_risk: ["egress", "ingress"]
            .iter()
            .filter_map(|name| at_risk(&summary[*name]))
            .reduce(|a, b| a + b),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_becomes_words() {
        let words = |system: System, case| system.words(&case).unwrap().join(" ");
        assert_eq!(
            words(System::Pace, LimitCase::egress(1_500_000_000)),
            "run --stats --json --scheme pace --egress 1.5gbit"
        );
        let case = LimitCase { kernel_timers: true, ..LimitCase::ingress(10_000_000) };
        assert_eq!(
            words(System::Nrm, case),
            "run --stats --json --scheme nrm --ingress 10mbit --rto-min 0ms --delack-max 0ms"
        );
        assert!(System::Nrm.words(&LimitCase::egress(0)).is_err());
    }

    #[test]
    fn the_summary_is_found_among_warnings() {
        let stderr = "tidegate: warning: x\n\
            {\"exit_code\":0,\"egress\":{\"rate_bit_s\":1,\"mark_packets\":3,\"slow_packets\":4,\
             \"drop_full_packets\":1,\"drop_reserve_packets\":10,\"drop_early_packets\":100,\
             \"at_risk\":{\"connecting_packets\":3,\"credit_used_packets\":4,\
             \"not_paced_packets\":null}},\
             \"ingress\":null}\n";
        let expected = Counters { marked: 3, slowed: 4, dropped: 111, at_risk: Some(7) };
        assert_eq!(counters_in(stderr).unwrap(), expected);
        assert!(counters_in("tidegate: no such command").is_err());
        assert!(counters_in("{\"egress\":{}}").is_err());
    }

    #[test]
    fn names_are_those_of_the_figures() {
        assert_eq!(format!("{:>10}", System::NrmPaper), " nrm-paper");
    }
}
