//! The flags of a limit, made from the table of its settings. Help shows those of the scheme that is named
//! beside it, or those that most need; all are read in any case.

use std::ffi::OsString;

use clap::{
    Arg, ArgAction, ArgMatches, Args, Command, CommandFactory, Error, FromArgMatches,
    builder::{PossibleValue, PossibleValuesParser},
    error::ErrorKind,
};
use tidegate_core::{
    Scheme,
    scheme::{SCHEMES, SchemeInfo},
};
use tidegate_host::{
    key::Kind,
    settings::{
        Patch,
        fields::{FIELDS, Field, find},
    },
};

use super::Cli;

/// The flags that a limit on a cgroup never has.
const DEVICES_ALONE: [&str; 2] = ["match", "hook"];

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
    let help = match key.default {
        "" => key.about.to_owned(),
        default => format!("{} [default: {default}]", key.about),
    };
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

/// The whole command line, for whatever is made from it.
pub fn table() -> Command {
    // Its command is in a cgroup.
    Cli::command().mut_subcommand("run", |run| {
        run.mut_arg("scheme", |arg| arg.value_parser(scheme_names(|info| !info.cgroups.is_empty())))
    })
}

/// The command line whose help is for who wrote these arguments.
pub fn command(arguments: &[OsString]) -> Command {
    let scheme = named_scheme(arguments);
    let shown = |field: &Field| scheme.map_or(field.common, |s| s.info().has(field.key.name));
    let of_scheme = |command: Command| {
        let command = command.mut_args(|arg| match find(arg.get_id().as_str()) {
            Some(field) => arg.hide(!shown(field)),
            None => arg,
        });
        match scheme.map(Scheme::info) {
            Some(info) => command.after_help(format!("Scheme {}: {}.", info.name, info.about)),
            None => command,
        }
    };
    let of_cgroups = |run: Command| {
        of_scheme(run).mut_args(|arg| match DEVICES_ALONE.contains(&arg.get_id().as_str()) {
            true => arg.hide(true),
            false => arg,
        })
    };
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
                let help = help(&format!("tidegate {verb}{scheme} --help"));
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
}
