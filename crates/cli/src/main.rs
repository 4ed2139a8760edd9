//! The `tidegate` binary: every verb, thin. What a verb does is in `tidegate-host`; here are the command
//! line, what is printed, and the exit code.

mod args;
mod output;
mod refusal;
mod verbs;

use std::{
    env,
    io::{stdin, stdout},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::FromArgMatches;
use tidegate_agent::directory;
use tidegate_sys::store::DEFAULT_ROOT;

use crate::args::{Cli, Verb};

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().collect();
    let started_as = arguments.first().map(Path::new).and_then(Path::file_name);
    if started_as.is_some_and(|name| name == tidegate_cni::PROGRAM) {
        let store = env::var_os("TIDEGATE_BPFFS").map_or(DEFAULT_ROOT.into(), PathBuf::from);
        return tidegate_cni::run(&store, stdin(), stdout());
    }
    let mut command = args::command(&arguments);
    let read = command.try_get_matches_from_mut(&arguments);
    let read = read.and_then(|m| Cli::from_arg_matches(&m).map_err(|e| e.format(&mut command)));
    let cli = match read {
        Ok(cli) => cli,
        Err(error) => return refusal::usage(&error),
    };
    // Its command would inherit that.
    if !matches!(cli.verb, Verb::Run(_)) {
        tidegate_sys::descriptors::allow_many();
    }
    tidegate_sys::names::use_built_in();
    let (store, run_dir, files) = (&cli.bpffs, &cli.run_dir, directory::of(&cli.host_file));
    let done = match cli.verb {
        Verb::Run(args) => verbs::run::run(store, run_dir, &args),
        Verb::Limit(verb) => verbs::limit::run(store, run_dir, &cli.socket, &cli.host_file, verb),
        Verb::Nic(args) => verbs::nic::run(run_dir, &args),
        Verb::Daemon(args) => verbs::daemon::run(store, &args),
        Verb::Agent(args) => verbs::agent::run(store, run_dir, &args),
        Verb::AgentContainers(args) => verbs::agent::containers(&args),
        Verb::AgentPods(args) => verbs::agent::pods(&args),
        Verb::Web(args) => verbs::web::run(store, (run_dir, files), &cli.socket, &args),
        Verb::WebServer(args) => verbs::web::serve(&args),
        Verb::History(args) => verbs::web::history(run_dir, &args),
        Verb::Burst(verb) => verbs::burst::run(&verb),
        Verb::Schema => verbs::generate::schema(),
        Verb::Check(args) => verbs::spec::check(&args),
        Verb::Plan(args) => verbs::spec::plan(store, run_dir, &args),
        Verb::Apply(args) => verbs::spec::apply(store, run_dir, &args),
        Verb::Status(args) => verbs::status::all(store, (run_dir, files), &cli.socket, args),
        Verb::Doctor(args) => verbs::doctor::run(store, (run_dir, files), &cli.socket, args),
        Verb::Monitor(args) => verbs::monitor::run(store, &args),
        Verb::Explain(args) => verbs::explain::run(store, &args),
        Verb::Top(args) => verbs::top::run(store, run_dir, &args),
        Verb::Detach(args) => verbs::detach::run(store, run_dir, &args),
        Verb::Completions { shell } => verbs::generate::completions(shell),
        Verb::Man { dir } => verbs::generate::man(&dir),
    };
    done.unwrap_or_else(|error| refusal::report(&error))
}
