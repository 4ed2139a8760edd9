//! `tidegate completions`, `man` and `schema`: what the tables of flags and settings yield.

use std::{
    fs,
    io::{Write, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use clap_complete::Shell;
use clap_mangen::roff::{Roff, bold, italic, roman};
use tidegate_core::scheme::SCHEMES;
use tidegate_host::settings::fields::FIELDS;

use crate::{args::table, refusal::UsageError};

pub fn completions(shell: Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut table(), "tidegate", &mut script);
    stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

pub fn schema() -> Result<ExitCode> {
    writeln!(stdout().lock(), "{}", serde_json::to_string_pretty(&tidegate_host::spec::schema())?)?;
    Ok(ExitCode::SUCCESS)
}

pub fn man(dir: &Path) -> Result<ExitCode> {
    let refuse = |e| UsageError(format!("{}: {e}; name a directory that exists", dir.display()));
    clap_mangen::generate_to(table(), dir).map_err(refuse)?;
    fs::write(dir.join("tidegate-schemes.7"), schemes().render()).map_err(refuse)?;
    Ok(ExitCode::SUCCESS)
}

/// The page of the schemes: a section for each, with what it does and its flags.
fn schemes() -> Roff {
    let mut page = Roff::new();
    let version = concat!("tidegate ", env!("CARGO_PKG_VERSION"));
    page.control("TH", ["tidegate-schemes", "7", "", version]);
    page.control("SH", ["NAME"]);
    page.text([roman(
        "tidegate-schemes - how limits act on packets, and the flags of each scheme",
    )]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([
        roman("Without "),
        bold("--scheme"),
        roman(" the scheme is chosen by scope, settings and kernel. The flags are those of "),
        bold("tidegate run"),
        roman(", "),
        bold("tidegate limit add"),
        roman(" and "),
        bold("tidegate limit set"),
        roman("; in a spec file their names have _ for -."),
    ]);
    for info in &SCHEMES {
        page.control("SH", [info.name.to_uppercase().as_str()]);
        page.text([roman(format!("Scheme {}: {}. On {}.", info.name, info.about, info.scopes))]);
        for field in FIELDS.iter().filter(|field| info.fields.contains(&field.key.name)) {
            let key = &field.key;
            page.control("TP", []);
            let flag = format!("--{}", key.name.replace('_', "-"));
            page.text([bold(flag), roman(" "), italic(key.kind.placeholder())]);
            let default = match field.default_of(info.scheme).as_ref() {
                "" => String::new(),
                default => format!(" (default: {default})"),
            };
            page.text([roman(format!("{}{default}.", key.about))]);
        }
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([
        bold("tidegate-limit-add"),
        roman("(1), "),
        bold("tidegate-run"),
        roman("(1), "),
        bold("tidegate-doctor"),
        roman("(1)"),
    ]);
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_the_schemes_has_a_section_for_each_with_its_flags() {
        let page = schemes().render();
        for info in &SCHEMES {
            let head = format!(".SH {}\n", info.name.to_uppercase());
            let section = page.split_once(&head).unwrap_or_else(|| panic!("{head}: {page}")).1;
            let section = section.split(".SH").next().unwrap();
            let flags = section.matches(".TP").count();
            assert_eq!(flags, info.fields.len(), "{}: {section}", info.name);
        }
    }
}
