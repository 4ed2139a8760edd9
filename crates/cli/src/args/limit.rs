//! The flags of a limit, made from the table of its settings. Help shows those of the scheme that is named
//! beside it, or those that most need; all are read in any case.

use std::ffi::OsString;

use clap::{
    Arg, ArgAction, ArgMatches, Args, Command, CommandFactory, Error, FromArgMatches,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
    error::ErrorKind,
};
use tidegate_core::{
    Scheme,
    scheme::{SCHEMES, SchemeInfo, Trees},
};
use tidegate_host::{
    key::Kind,
    settings::{
        Patch, SettingsProblem,
        fields::{FIELDS, Field, find},
    },
};

use super::Cli;

/// The flags that a limit on a cgroup never has.
const DEVICES_ALONE: [&str; 2] = ["match", "hook"];

/// The commands that read neither a store, nor the run directory, nor a socket, nor the host's file.
const NOTHING_GLOBAL: [&str; 5] = ["burst", "check", "completions", "man", "schema"];

/// What a limit does; every flag may be left out.
#[derive(Debug)]
pub struct LimitArgs {
    pub patch: Patch,
    /// As given.
    pub given: Vec<(&'static str, String)>,
}

impl FromArgMatches for LimitArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<LimitArgs, Error> {
        let (mut patch, mut given) = (Patch::default(), Vec::new());
        for field in &FIELDS {
            for text in matches.get_many::<String>(field.key.name).into_iter().flatten() {
                let refuse = |e| Error::raw(ErrorKind::ValueValidation, e);
                field.set(&mut patch, text).map_err(refuse)?;
                given.push((field.key.name, text.clone()));
            }
        }
        Ok(LimitArgs { patch, given })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for LimitArgs {
    fn augment_args(command: Command) -> Command {
        // The long form of help gives each flag three lines.
        let help = Arg::new("help").short('h').long("help").help("Print help");
        let help = help.action(ArgAction::HelpShort);
        command.disable_help_flag(true).arg(help).args(FIELDS.iter().map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn flag(field: &'static Field) -> Arg {
    let key = &field.key;
    let help = help(field, &field.default());
    let schemes = SCHEMES.iter().filter(|info| info.has(key.name)).map(|info| info.name);
    let schemes: Vec<_> = schemes.collect();
    let long_help = match schemes.len() {
        n if n == SCHEMES.len() => help.clone(),
        _ => format!("{help}. With scheme {}", schemes.join(", ")),
    };
    let arg = Arg::new(key.name)
        .long(key.name.replace('_', "-"))
        .value_name(key.kind.placeholder())
        .help(help)
        .long_help(long_help)
        .help_heading("Limit");
    let arg = match key.kind {
        Kind::Scheme => return arg.value_parser(scheme_names(|_| true)),
        Kind::Flag => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        Kind::Whole(..) => arg.allow_negative_numbers(true),
        Kind::Actions => arg.action(ArgAction::Append),
        _ => arg,
    };
    arg.value_parser(|text: &str| {
        let read = field.set(&mut Patch::default(), text);
        read.map(|()| text.to_owned())
    })
}

/// A line of help.
fn help(field: &Field, default: &str) -> String {
    match default {
        "" => field.key.about.to_owned(),
        default => format!("{} [default: {default}]", field.key.about),
    }
}

/// All schemes, with what help and completions say of them. They offer some.
fn scheme_names(offers: impl Fn(&SchemeInfo) -> bool) -> PossibleValuesParser {
    let auto = PossibleValue::new("auto").help("the one that fits scope, settings and kernel best");
    let named = SCHEMES.iter().map(|info| {
        // Its limits are made by `tidegate nic`, as the error says.
        let is_elsewhere = info.scheme == Scheme::Carousel;
        PossibleValue::new(info.name).help(info.about).hide(is_elsewhere || !offers(info))
    });
    PossibleValuesParser::new(std::iter::once(auto).chain(named))
}

/// The scheme of a `run`, whose command is in a cgroup.
fn scheme_of_cgroups() -> impl TypedValueParser<Value = String> {
    scheme_names(is_for_cgroups).try_map(|name| match name.parse::<Scheme>() {
        Ok(scheme) if !is_for_cgroups(scheme.info()) => {
            let instead = SCHEMES.iter().filter(|info| is_for_cgroups(info));
            let instead = instead.map(|info| info.scheme).collect();
            Err(SettingsProblem::NotOn { scheme, scope: "cgroup", instead }.as_flags())
        }
        _ => Ok(name),
    })
}

fn is_for_cgroups(info: &SchemeInfo) -> bool {
    !info.cgroups.is_empty()
}

/// The whole command line, for whatever is made from it.
pub fn table() -> Command {
    let table = Cli::command();
    let globals: Vec<_> =
        table.get_arguments().filter(|arg| arg.is_global_set()).cloned().collect();
    // An argument of the command itself takes the place of the global one. It is still read.
    let hide = |command: Command| command.args(globals.iter().cloned().map(|arg| arg.hide(true)));
    let table = NOTHING_GLOBAL.iter().fold(table, |table, name| table.mut_subcommand(name, hide));
    table.mut_subcommand("run", |run| {
        run.mut_arg("scheme", |arg| arg.value_parser(scheme_of_cgroups()))
    })
}

/// The command line whose help fits these arguments.
pub fn command(arguments: &[OsString]) -> Command {
    let scheme = named_scheme(arguments);
    let of = |command: Command, scheme: Option<Scheme>| {
        let info = scheme.map(Scheme::info);
        let command = command.mut_args(|arg| match (find(arg.get_id().as_str()), info) {
            (Some(field), None) => arg.hide(!field.common),
            (Some(field), Some(info)) => arg
                .help(help(field, &field.default_of(info.scheme)))
                .hide(!info.has(field.key.name)),
            (None, Some(info)) if arg.get_id() == "parent" => arg.hide(info.trees == Trees::None),
            (None, _) => arg,
        });
        match info {
            Some(info) => command.after_help(format!("Scheme {}: {}.", info.name, info.about)),
            None => command,
        }
    };
    let of_cgroups = |run: Command| {
        let scheme = scheme.filter(|scheme| is_for_cgroups(scheme.info()));
        of(run, scheme).mut_args(|arg| match DEVICES_ALONE.contains(&arg.get_id().as_str()) {
            true => arg.hide(true),
            false => arg,
        })
    };
    let of_scheme = |command: Command| of(command, scheme);
    table().mut_subcommand("run", of_cgroups).mut_subcommand("limit", |limit| {
        limit.mut_subcommand("add", of_scheme).mut_subcommand("set", of_scheme)
    })
}

/// The scheme that the arguments name, if it is one.
fn named_scheme(arguments: &[OsString]) -> Option<Scheme> {
    let words = arguments.iter().map(|word| word.to_str().unwrap_or_default());
    let mut words = words.take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        match word.strip_prefix("--scheme") {
            Some("") => return words.next()?.parse().ok(),
            Some(value) => return value.strip_prefix('=')?.parse().ok(),
            None => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn help(words: &str) -> String {
        let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        let mut command = command(&words).term_width(100);
        command.try_get_matches_from_mut(&words).unwrap_err().to_string()
    }

    #[test]
    fn help_fits_on_a_screen() {
        for verb in ["run", "limit add", "limit set"] {
            for scheme in ["", " --scheme police", " --scheme nrm", " --scheme=htb"] {
                let help = help(&format!("tidegate {verb} --help{scheme}"));
                assert!(help.lines().count() <= 40, "{} lines:\n{help}", help.lines().count());
                assert!(help.lines().all(|line| line.len() <= 100), "{help}");
            }
        }
    }

    #[test]
    fn run_offers_the_schemes_of_cgroups() {
        let offered = |words: &str| {
            let help = help(words);
            let (_, values) = help.split_once("--scheme <SCHEME>").unwrap();
            let (_, values) = values.split_once("possible values: ").unwrap();
            values.split(']').next().unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(offered("tidegate run --help"), "auto, pace, nrm, edt, police");
        let all = "auto, pace, nrm, edt, police, htb, dem, spring, tbf";
        assert_eq!(offered("tidegate limit add --help"), all);
    }

    #[test]
    fn flags_of_a_scheme_are_shown_with_that_scheme() {
        let (plain, police) =
            (help("tidegate run --help"), help("tidegate run --help --scheme police"));
        assert!(plain.contains("--egress") && !plain.contains("--meter"), "{plain}");
        assert!(police.contains("--meter") && !police.contains("--rto-min"), "{police}");
        assert!(!police.contains("--match") && !police.contains("--hook"), "{police}");
        assert!(help("tidegate limit add --help --scheme police").contains("--hook"));
        assert!(police.contains("Scheme police: a token bucket"), "{police}");
        let nrm = help("tidegate limit add --scheme=nrm -h");
        assert!(nrm.contains("--pace-ceiling") && nrm.contains("--mark"), "{nrm}");
    }

    #[test]
    fn help_of_a_scheme_has_its_own_defaults_and_a_parent_only_in_trees() {
        let of = |scheme: &str| help(&format!("tidegate limit add --scheme {scheme} --help"));
        for (scheme, defaults) in [
            ("pace", ["2ms, ingress 16ms", "4ms, ingress 40ms"]),
            ("nrm", ["500us", "4ms"]),
            ("edt", ["2ms", "10ms"]),
            ("dem", ["10ms", "20ms"]),
        ] {
            for default in defaults {
                let default = format!("[default: {default}]");
                assert!(of(scheme).contains(&default), "{default} in {}", of(scheme));
            }
        }
        assert!(!of("edt").contains("40ms"), "{}", of("edt"));
        for info in SCHEMES.iter().filter(|info| info.scheme != Scheme::Carousel) {
            let has_parent = of(info.name).contains("--parent");
            assert_eq!(has_parent, info.trees != Trees::None, "{}", info.name);
        }
    }

    #[test]
    fn run_refuses_schemes_that_are_not_for_cgroups_before_it_shows_their_flags() {
        for info in SCHEMES.iter().filter(|info| info.cgroups.is_empty()) {
            let refused = help(&format!("tidegate run --scheme {} --help", info.name));
            assert!(refused.contains("write --scheme pace, nrm, edt or police"), "{refused}");
        }
        let common = help("tidegate run --help --scheme htb");
        assert!(common.contains("--loopback") && !common.contains("--ecn"), "{common}");
    }

    #[test]
    fn the_first_line_of_help_fits_into_a_list() {
        fn check(command: &Command) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let (name, hidden) = (command.get_name(), command.is_hide_set());
            assert!(hidden || (1..=60).contains(&about.chars().count()), "{name}: {about}");
            command.get_subcommands().for_each(check);
        }
        table().get_subcommands().for_each(check);
    }

    #[test]
    fn commands_that_use_nothing_of_the_host_show_no_global_options() {
        for words in ["check", "schema", "burst size", "burst analyze", "completions", "man"] {
            let long = help(&format!("tidegate {words} --help"));
            assert!(!long.contains("--bpffs") && !long.contains("Global options"), "{long}");
        }
        assert!(help("tidegate status --help").contains("--bpffs"));
        let words = ["tidegate", "--bpffs", "/a", "check", "x", "--run-dir", "/b"];
        let matches = table().try_get_matches_from(words).unwrap();
        let cli = Cli::from_arg_matches(&matches).unwrap();
        assert_eq!((cli.bpffs.to_str(), cli.run_dir.to_str()), (Some("/a"), Some("/b")));
    }
}
