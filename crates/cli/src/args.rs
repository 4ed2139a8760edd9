//! The command line: one table, from which help, man pages and completions come.

use std::{ffi::OsString, path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use tidegate_core::Nanos;
use tidegate_host::fleet::API_SOCKET;
use tidegate_host::nic::state::DEFAULT_DIR;
use tidegate_sys::store::DEFAULT_ROOT;

mod agent;
mod burst;
mod daemon;
mod limit;
mod nic;
mod web;

pub use agent::{AgentArgs, ContainersArgs, PodsArgs};
pub use burst::{AnalyzeArgs, BurstVerb, SizeArgs, UdpSource};
pub use daemon::DaemonArgs;
pub use limit::{LimitArgs, command, table};
pub use nic::NicArgs;
pub use web::{HistoryArgs, WebArgs};

/// The shortest interval of `monitor`.
const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// The longest.
const MAX_INTERVAL: Duration = Duration::from_secs(3600);
/// The longest that `explain` watches.
const MAX_SAMPLE: Duration = Duration::from_secs(60);
/// The interval of `top`, also with its keys.
pub const TOP_MIN_INTERVAL: Duration = Duration::from_millis(100);
pub const TOP_MAX_INTERVAL: Duration = Duration::from_secs(60);

/// One of the files that the agent keeps.
const HOST_FILE: &str = "/etc/tidegate/limits.toml";

const ABOUT: &str =
    "Hold a rate limit on a program, a service or a container, without a standing queue";

const AFTER_HELP: &str = "\
Examples:
  tidegate run --egress 50mbit -- rsync -a /data backup:      limit one command
  tidegate limit add backup --unit backup.service --egress 200mbit
  tidegate apply limits.toml                                   limits from a file
  tidegate monitor                                             what is used, every second

Units: bit kbit mbit gbit (rates), b kb mb gb (sizes), us ms s (times); a unit is required.
Exit codes: 0 done; 1 usage or spec error; 2 the kernel refused; 3 `plan` found changes, or `status --check` \
a limit that is not in force; `run` exits as its command did.";

#[derive(Debug, Parser)]
#[command(name = "tidegate", version, about = ABOUT, after_help = AFTER_HELP, max_term_width = 100)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    /// Where limits are pinned: a directory in a BPF file system
    #[arg(long, global = true, env = "TIDEGATE_BPFFS", default_value = DEFAULT_ROOT)]
    #[arg(value_name = "DIR", hide_env_values = true, hide_short_help = true)]
    #[arg(help_heading = "Global options")]
    pub bpffs: PathBuf,
    /// Directory for the sockets, locks and reports of the agent, the page and software NICs
    #[arg(long, global = true, env = "TIDEGATE_RUN_DIR", default_value = DEFAULT_DIR)]
    #[arg(value_name = "DIR", hide_env_values = true, hide_short_help = true)]
    #[arg(help_heading = "Global options")]
    pub run_dir: PathBuf,
    /// The socket of the fleet daemon
    #[arg(long, global = true, env = "TIDEGATE_SOCKET", default_value = API_SOCKET)]
    #[arg(value_name = "PATH", hide_env_values = true, hide_short_help = true)]
    #[arg(help_heading = "Global options")]
    pub socket: PathBuf,
    /// The file in which `limit add --persist` writes limits, and `limit set` and `limit del` change them
    #[arg(long, global = true, env = "TIDEGATE_HOST_FILE", default_value = HOST_FILE)]
    #[arg(value_name = "PATH", hide_env_values = true, hide_short_help = true)]
    #[arg(help_heading = "Global options")]
    pub host_file: PathBuf,
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run one command under a limit
    ///
    /// Limits the command and everything it starts, whatever protocol they use. Passes signals on and exits
    /// as the command does (128+n if signal n ended it, 127 if there is no such command). Nothing is left
    /// behind. If tidegate itself is killed, the limit is removed and the command goes on without it.
    ///
    /// Members of the group `tidegate` need no root: the agent attaches the limit (tidegate-agent(1)).
    #[command(after_help = "\
Examples:
  tidegate run --egress 50mbit -- rsync -a /data backup:
  tidegate run --ingress 10mbit --stats curl -O https://example.org/big.iso
  tidegate run --egress 1mbit --loopback -- ./integration-tests
  tidegate run --parent batch --weight 10 -- ./nightly-report

`tidegate run --scheme SCHEME --help` shows the flags of a scheme.")]
    Run(RunArgs),
    /// Add, change, remove or show a limit
    #[command(subcommand, arg_required_else_help = true)]
    Limit(LimitVerb),
    /// Run a software NIC that shapes traffic between two ports
    ///
    /// Frames that come in at one port leave at the other, each direction at its rate, flows isolated from
    /// each other. The limits hold while it runs. SIGHUP reads the spec again without losing a packet;
    /// SIGTERM and SIGINT end it, and TAP devices that it made go away.
    #[command(after_help = "\
Examples:
  tidegate nic tap:vm0 xdp:eth1 --egress 1gbit --ingress 1gbit
  tidegate nic tap:eth0@blue tap:up0 --egress 50mbit
  tidegate nic --spec nic.toml --json | jq .directions[0].used_bit_s

A spec file:
  [[nic]]
  name  = \"vm0\"
  ports = [\"tap:vm0\", \"xdp:eth1\"]

  [[limit]]
  name    = \"guest\"
  scope   = { port = \"vm0\" }
  egress  = \"1gbit\"
  ingress = \"1gbit\"
  scheme  = \"carousel\"")]
    Nic(NicArgs),
    /// Share limits with other hosts
    ///
    /// Divides the rate of each group among its hosts, by what they want and use. `tidegate apply` attaches
    /// the limits themselves. SIGHUP (and `apply`) has it read the file again; SIGTERM ends it, and its
    /// limits fall back to this host's reserved share.
    #[command(after_help = "\
Examples:
  tidegate daemon --new-key 1 | install -m 600 /dev/stdin /etc/tidegate/fleet.keys
  tidegate apply fleet.toml && tidegate daemon fleet.toml

A spec file:
  [fleet]
  name    = \"prod\"
  keys    = \"/etc/tidegate/fleet.keys\"
  peers   = [\"10.0.0.1\", \"10.0.0.2\", \"10.0.0.3\"]
  acceptors = [\"web-1\", \"web-2\", \"web-3\"]

  [[group]]
  name      = \"uplink\"
  rate      = \"10gbit\"
  algorithm = \"share\"
  members   = [\"backup\"]

  [[limit]]
  name   = \"backup\"
  scope  = { cgroup = \"system.slice/backup.service\" }
  egress = \"5gbit\"")]
    Daemon(DaemonArgs),
    /// Keep this host's limits as its files say
    ///
    /// Reads all `*.toml` of a directory as one spec. Attaches each limit when its service, user, container
    /// or program appears; until then the limit waits. A wrong limit does not affect the others. Files that
    /// change are read again, also at SIGHUP; if one has an error, the limits in force stay. Limits stay when
    /// the agent ends.
    #[command(after_help = "\
Examples:
  tidegate agent
  tidegate status                                        what is in force, what waits, and why

A spec file:
  [[limit]]
  name     = \"backup\"
  scope    = { unit = \"backup.service\" }
  egress   = \"200mbit\"
  schedule = [{ days = \"mon-fri\", from = \"08:00\", to = \"18:00\", egress = \"10mbit\" }]")]
    Agent(AgentArgs),
    /// Ask one engine for its containers
    #[command(hide = true)]
    AgentContainers(ContainersArgs),
    /// Ask the API server of Kubernetes for the pods of a node
    #[command(hide = true)]
    AgentPods(PodsArgs),
    /// Serve a page and metrics of all limits
    ///
    /// The page shows the tree of limits with live rates and an hour of history, the flows of a limit and
    /// what holds them back, and the groups of a fleet. /metrics is for Prometheus. Both are at web.sock in
    /// the run directory, for root and the group `tidegate`, and with --listen at a port. Nothing can be
    /// changed there. An unprivileged process serves the connections.
    #[command(after_help = "\
Examples:
  tidegate web --listen 127.0.0.1:9465                  then open http://127.0.0.1:9465/
  curl --unix-socket /run/tidegate/web.sock http://localhost/metrics")]
    Web(WebArgs),
    /// Serve what a reader of limits says
    #[command(hide = true)]
    WebServer(WebArgs),
    /// Show the last hour of a limit
    ///
    /// `tidegate web` keeps it and must run. A row is a minute.
    #[command(after_help = "\
Examples:
  tidegate history backup
  tidegate history backup --svg > backup.svg")]
    History(HistoryArgs),
    /// Size a policer's burst, or find a policer in a capture
    #[command(subcommand, arg_required_else_help = true)]
    Burst(BurstVerb),
    /// Check a spec file, or the agent's; needs no privileges
    #[command(
        after_help = "Examples:\n  tidegate check limits.toml\n  tidegate check /etc/tidegate"
    )]
    Check(CheckArgs),
    /// Print the JSON schema of spec files
    ///
    /// Editors and other tools check and complete spec files with it.
    #[command(after_help = "Example:\n  tidegate schema > spec.schema.json")]
    Schema,
    /// Show what `apply` would change; exit 3 if anything
    #[command(after_help = "\
Examples:
  tidegate plan limits.toml
  tidegate plan limits.toml --at 2026-03-02T09:00")]
    Plan(PlanAtArgs),
    /// Make the limits of this host match a spec file
    ///
    /// All or nothing: an error changes nothing. Limits that are not in the file are left alone unless
    /// --prune is given; those that a running agent, `tidegate-cni` or the `tidegate run` of a user keeps
    /// always are. A changed rate is changed in
    /// place: no packet and no connection is lost. Applying a file twice changes nothing. A limit whose
    /// cgroup or device does not exist waits; apply the file again when there is one.
    #[command(after_help = "\
Example:
  tidegate apply limits.toml

A spec file:
  [[limit]]
  name    = \"backup\"
  scope   = { cgroup = \"system.slice/backup.service\" }
  egress  = \"200mbit\"
  ingress = \"500mbit\"")]
    Apply(ApplyArgs),
    /// Show all limits, their state and counters
    #[command(after_help = "\
Example:
  tidegate status
  tidegate status --json | jq '.limits[] | select(.state != \"in_force\") | .name'")]
    Status(StatusArgs),
    /// Say what this host can do for limits, and what to do
    ///
    /// Looks at the kernel, cgroups, privileges, hooks and qdiscs, at who else is attached, and at the
    /// limits. Each line is ok, a warning, a problem or unknown, with what to do. Changes nothing. Without
    /// root some checks are unknown. Exits 2 if no limit can work here.
    #[command(after_help = "\
Examples:
  sudo tidegate doctor
  tidegate doctor --json | jq -r '.findings[] | select(.verdict != \"ok\") | .found'")]
    Doctor(LookArgs),
    /// Print usage at an interval
    #[command(after_help = "\
Examples:
  tidegate monitor --interval 200ms
  tidegate monitor --json --count 10 | jq .egress.used_bit_s")]
    Monitor(MonitorArgs),
    /// Say what limits a process, a cgroup or a flow
    ///
    /// Shows the limits of its cgroup and of those above it, also those of a `tidegate run`, what each did in
    /// a short sample, and the TCP sockets that use them, rates in payload. The last line says in one
    /// sentence what holds it back now.
    #[command(after_help = "\
Examples:
  tidegate explain $(pidof rsync)
  tidegate explain system.slice/backup.service
  tidegate explain 10.0.0.1:41234 10.0.0.2:5201
  tidegate explain --json [::1]:80 | jq -r .places[0].sentence

A number is a process. An address with a port is a flow. Anything else is a cgroup (`/7` is cgroup `7`).
Several processes are looked at in turn.")]
    Explain(ExplainArgs),
    /// Watch all limits live
    ///
    /// Shows limits as a tree, each below its parent. Keys: arrows or j and k select, Enter shows
    /// one limit closely, s sorts, p pauses, + and - change the interval, ? lists them all, q ends.
    #[command(after_help = "Example:\n  tidegate top --interval 500ms")]
    Top(TopArgs),
    /// Remove all limits from this host
    #[command(after_help = "Example:\n  tidegate detach --dry-run")]
    Detach(DetachArgs),
    /// Print the completions for a shell
    #[command(after_help = "\
Example:
  tidegate completions bash > /etc/bash_completion.d/tidegate")]
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Write the man pages to a directory
    #[command(hide = true)]
    Man {
        /// The directory, which must exist
        dir: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub enum LimitVerb {
    /// Attach a limit to a service, container, cgroup or device
    #[command(
        override_usage = "tidegate limit add [OPTIONS] --SCOPE VALUE NAME",
        after_help = "\
Examples:
  tidegate limit add backup --unit backup.service --egress 200mbit --persist
  tidegate limit add guest --port tap0 --scheme police --egress 100mbit --ingress 200mbit
  tidegate limit add batch --cgroup system.slice/batch.service --parent system --guarantee 100mbit

`tidegate limit add --scheme SCHEME --help` shows the flags of a scheme."
    )]
    Add(AddArgs),
    /// Change a limit in place; only what is named changes
    ///
    /// No packet and no connection is lost. Thresholds that were never given follow the rate; thresholds
    /// given in bytes keep their present duration. To give a limit another parent, remove it and add it
    /// again, or apply a file that says so.
    #[command(after_help = "\
Examples:
  tidegate limit set backup --egress 100mbit
  tidegate limit set backup --ingress none --loopback=false")]
    Set(SetArgs),
    /// Remove a limit; those inside it first
    #[command(visible_alias = "rm", aliases = ["remove", "delete"])]
    #[command(after_help = "Example:\n  tidegate limit del backup")]
    Del {
        /// Name of the limit
        name: String,
    },
    /// Restore limits that are not in force
    ///
    /// Replaces limits of an earlier version by the same limits of this one. Reattaches limits whose programs
    /// were removed, or whose cgroup or device was recreated. Adds cgroups that match a limit's selector and
    /// came later. Most limits stay in force meanwhile.
    #[command(after_help = "Example:\n  tidegate limit restore")]
    Restore {
        /// Name of the limit [default: all]
        name: Option<String>,
    },
    /// Show one limit, or all
    #[command(visible_alias = "ls", alias = "list")]
    #[command(after_help = "Example:\n  tidegate limit show backup --json")]
    Show {
        /// Name of the limit
        name: Option<String>,
        #[command(flatten)]
        how: StatusArgs,
    },
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The limit to run the command inside: the command shares that limit's rate
    #[arg(long, value_name = "NAME")]
    pub parent: Option<String>,
    #[command(flatten)]
    pub limit: LimitArgs,
    /// Run the command as this user, with that user's environment; `invoker` is the user who called sudo
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// TCP congestion control for the command, such as `dctcp`
    #[arg(long, value_name = "NAME")]
    pub cc: Option<String>,
    /// At the end, say on standard error what the limit did
    #[arg(long)]
    pub stats: bool,
    /// With --stats: as one JSON object
    #[arg(long, requires = "stats")]
    pub json: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct AddArgs {
    /// Name for the limit
    pub name: String,
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// The limit to put this one inside: it shares that limit's rate
    #[arg(long, value_name = "NAME")]
    pub parent: Option<String>,
    /// Replace the root qdisc, also another store's; it is not restored later
    #[arg(long)]
    pub force: bool,
    /// Also write it to the host's file, so that the agent keeps it
    #[arg(long)]
    pub persist: bool,
    #[command(flatten)]
    pub limit: LimitArgs,
}

/// The scope of a limit: one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct ScopeArgs {
    /// The cgroup, or a pattern for several
    #[arg(long, value_name = "PATH")]
    pub cgroup: Option<String>,
    /// A device of this host, such as eth0: what leaves and comes in by it
    #[arg(long, value_name = "NAME")]
    pub dev: Option<String>,
    /// The host's side of a machine's or container's interface, such as tap0
    #[arg(long, value_name = "NAME")]
    pub port: Option<String>,
    /// A unit of systemd, such as web.service or batch.slice, or a pattern for several
    #[arg(long, value_name = "NAME")]
    pub unit: Option<String>,
    /// A user, by name or number: all that runs in their slice
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// A container of Docker or Podman (needs --persist)
    #[arg(long, value_name = "NAME")]
    pub container: Option<String>,
}

impl ScopeArgs {
    /// The flag that was given, and its value; `None` only if clap let none through.
    pub fn given(&self) -> Option<(&'static str, &str)> {
        let ScopeArgs { cgroup, dev, port, unit, user, container } = self;
        let flags = [
            ("cgroup", cgroup),
            ("dev", dev),
            ("port", port),
            ("unit", unit),
            ("user", user),
            ("container", container),
        ];
        flags.into_iter().find_map(|(kind, value)| Some((kind, value.as_deref()?)))
    }
}

#[derive(Debug, Args)]
pub struct SetArgs {
    /// Name of the limit
    pub name: String,
    #[command(flatten)]
    pub limit: LimitArgs,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The spec file, or a directory whose `*.toml` are read as the agent does; `-` reads standard input
    pub file: PathBuf,
    #[command(flatten)]
    pub look: LookArgs,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The spec file; `-` reads standard input
    pub file: PathBuf,
    /// Remove limits that are not in the file and that nobody else keeps
    #[arg(long)]
    pub prune: bool,
    #[command(flatten)]
    pub look: LookArgs,
}

#[derive(Debug, Args)]
pub struct PlanAtArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// What schedules say at this local time, such as 2026-03-02T09:00 [default: now]
    #[arg(long, value_name = "TIME", value_parser = local_time)]
    pub at: Option<jiff::civil::DateTime>,
}

/// A time of the host's zone, in which schedules are.
fn local_time(text: &str) -> Result<jiff::civil::DateTime, String> {
    if text.parse::<jiff::Timestamp>().is_ok() {
        return Err("schedules are in the host's local time; write it without an offset".to_owned());
    }
    text.parse().map_err(|_| "not a date and time; write for example 2026-03-02T09:00".to_owned())
}

#[derive(Debug, Args)]
pub struct ApplyArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Replace existing root qdiscs where a scheme needs its own, also those of another store's limits; they
    /// are not restored later
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Clone, Copy, Args)]
pub struct LookArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, Args)]
pub struct StatusArgs {
    /// Also show the flows that have packets in the queue
    #[arg(long)]
    pub flows: bool,
    /// End with 3 if a limit is not in force
    #[arg(long)]
    pub check: bool,
    #[command(flatten)]
    pub look: LookArgs,
}

#[derive(Debug, Args)]
pub struct MonitorArgs {
    /// Time between two lines
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    pub interval: Duration,
    /// Stop after N intervals
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Print JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Process ids, a cgroup, or a TCP flow by one or both of its addresses
    #[arg(required = true, num_args = 1.., value_name = "PID|CGROUP|FLOW")]
    pub subject: Vec<String>,
    /// How long to watch
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = sample)]
    pub sample: Duration,
    /// Show all sockets, not only the fastest
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub look: LookArgs,
}

#[derive(Debug, Args)]
pub struct TopArgs {
    /// Time between two refreshes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = top_interval)]
    pub interval: Duration,
}

#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Only list what would be removed
    #[arg(long)]
    pub dry_run: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    within(text, MIN_INTERVAL, MAX_INTERVAL)
}

fn sample(text: &str) -> Result<Duration, String> {
    within(text, MIN_INTERVAL, MAX_SAMPLE)
}

fn top_interval(text: &str) -> Result<Duration, String> {
    within(text, TOP_MIN_INTERVAL, TOP_MAX_INTERVAL)
}

fn within(text: &str, min: Duration, max: Duration) -> Result<Duration, String> {
    let time = Nanos::from_str(text).map_err(|e| e.to_string())?;
    let time = Duration::from_nanos(time.0);
    if (min..=max).contains(&time) {
        return Ok(time);
    }
    let [min, max] = [min, max].map(|d| Nanos(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)));
    Err(format!("out of range; write {min} to {max}, for example 1s"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_table_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_time_is_local() {
        let at = |time| Cli::try_parse_from(["tidegate", "plan", "a.toml", "--at", time]);
        assert!(at("2026-03-02T09:00").is_ok());
        for time in ["2026-03-02T09:00Z", "2026-03-02T09:00+09:00"] {
            let error = at(time).unwrap_err().to_string();
            assert!(error.contains("without an offset"), "{error}");
        }
    }

    #[test]
    fn a_command_keeps_its_own_flags() {
        let cli = Cli::try_parse_from(["tidegate", "run", "--egress", "5mbit", "curl", "-O", "x"]);
        let Verb::Run(args) = cli.unwrap().verb else { unreachable!() };
        assert_eq!(args.command, ["curl", "-O", "x"]);
    }
}
