//! The published schema and tables are these, and a validator agrees with the reader.

use std::{
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
};

use tidegate_core::choice::CASES;

use super::*;
use crate::spec::Spec;

fn docs(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file)
}

/// Compares what is published with what shall be, or publishes it.
fn is_published(file: &str, shall: impl FnOnce(&str) -> String) {
    let is = fs::read_to_string(docs(file)).unwrap_or_default();
    let shall = shall(&is);
    if std::env::var_os("INSTA_UPDATE").is_some_and(|update| update == "always") {
        fs::write(docs(file), &shall).unwrap();
    } else {
        assert!(is == shall, "docs/{file} is out of date: run this test with INSTA_UPDATE=always");
    }
}

#[test]
fn the_schema_is_published() {
    // The order of members is no part of a schema, and depends on the features of serde_json.
    is_published("spec.schema.json", |is| match serde_json::from_str::<Value>(is) {
        Ok(published) if published == schema() => is.to_owned(),
        _ => serde_json::to_string_pretty(&schema()).unwrap() + "\n",
    });
}

/// The keys of a `[[limit]]`, as a table of Markdown.
fn fields_table() -> String {
    let mut text =
        "| field | what it sets | default | schemes | example |\n|:--|:--|:--|:--|:--|\n"
            .to_owned();
    for key in fields::keys() {
        let Key { name, about, example, .. } = key;
        // A scheme has parents if it has weights.
        let of = if key.name == "parent" { "weight" } else { key.name };
        let has = SCHEMES.iter().filter(|info| info.has(of)).map(|info| info.name);
        let schemes = match has.clone().count() {
            n if n == SCHEMES.len() || n == 0 => "all".to_owned(),
            _ => has.collect::<Vec<_>>().join(", "),
        };
        let default = fields::find(name).map_or(key.default.into(), Field::default);
        let default = if default.is_empty() { "-" } else { &default };
        text += &format!("| `{name}` | {about} | {default} | {schemes} | `{example}` |\n");
    }
    text
}

/// The choices of scheme `auto`, as a table of Markdown.
fn auto_table() -> String {
    let mut text = "| limit on | with | scheme |\n|:--|:--|:--|\n".to_owned();
    for (place, with, scheme) in CASES {
        let with: Vec<_> = with.split(", ").filter(|field| !field.is_empty()).collect();
        let with = match &with[..] {
            [] => "-".to_owned(),
            fields => format!("`{}`", fields.join("` or `")),
        };
        let scheme = match scheme {
            "" => "refused: no scheme fits".to_owned(),
            name => format!("`{name}`"),
        };
        text += &format!("| {place} | {with} | {scheme} |\n");
    }
    text
}

#[test]
fn the_tables_are_published() {
    is_published("spec.md", |is| {
        let blocks = [("fields", fields_table()), ("auto", auto_table())];
        blocks.into_iter().fold(is.to_owned(), |text, (name, table)| {
            let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
            let (before, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("no {begin}"));
            let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("no {end}"));
            format!("{before}{begin}{table}{end}{after}")
        })
    });
}

const VALID: [&str; 10] = [
    "",
    crate::spec::tests::GOOD,
    include_str!("valid.toml"),
    "limit = []",
    "[[nic]]\nname = \"a\"\nports = [\"tap:x\", \"tap:y\"]",
    "[[limit]]\nname = \"a\"\nscope = { dev = \"eth0\" }\nscheme = \"edt\"\negress = \"1 GBIT\"\ningress = \
     \"none\"\nloopback = false\nrto_min = \"0ms\"",
    "[[limit]]\nname = \"a\"\nscope = { dev = \"eth0\" }\nscheme = \"police\"\negress = \"1mbit\"\n\
     meter = { type = \"trtcm\", pir = \"80mbit\", colours = { yellow = [\"cs1\"], red = [\"le\"] } }",
    "[[limit]]\nname = \"b\"\nscope = { cgroup = \"x/y\" }\nparent = \"a\"\nguarantee = \"100mbit\"\n\
     weight = 50\n",
    "labels = true\n[[limit]]\nname = \"a\"\nscope = { exe = \"/bin/x\", args = \"-a *\" }\nmove = true\n\
     schedule = [{ days = \"mon-fri\", to = \"8:00\", egress = \"none\", ingress = \"1mbit\" }]\n\
     [[limit]]\nname = \"b\"\nscope = { container = { labels = \"app=web,x\" } }\neach = true\negress = \
     \"1mbit\"\nrequired = true",
    "annotations = true\n[[limit]]\nname = \"a\"\negress = \"1mbit\"\n\
     scope = { pod = { namespace = \"prod\", name = \"api-*\", labels = \"app=api\", join = true } }",
];

/// Each with what is wrong in it.
const INVALID: [&str; 19] = [
    "[[limit]]\nname = \"a.b\"\nscope = { cgroup = \"a\" }\negress = \"1mbit\"",
    "[[limit]]\nname = \"a\"\nscope = { pod = \"api\" }\negress = \"1mbit\"",
    "[[limits]]\nname = \"a\"",
    "[[limit]]\nname = \"a\"\negress = \"1mbit\"",
    "[[limit]]\nscope = { cgroup = \"a\" }\negress = \"1mbit\"",
    "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }",
    "[[limit]]\nname = \"a b\"\nscope = { cgroup = \"a\" }\negress = \"1mbit\"",
    "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\", dev = \"b\" }\negress = \"1mbit\"",
    "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }\negress = \"50mbps\"",
    "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }\negress = 50",
    "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }\negress = \"1mbit\"\nrate = \"1mbit\"",
    "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }\negress = \"1mbit\"\nweight = 5",
    "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }\negress = \"1mbit\"\nscheme = \"fast\"",
    "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }\negress = \"1mbit\"\n\
     scheme = \"police\"\nmark = \"1ms\"",
    "[[limit]]\nname = \"a\"\nscope = { dev = \"a\" }\ningress = \"1mbit\"\nscheme = \"edt\"",
    "[[nic]]\nname = \"a\"\nports = [\"tap:x\"]",
    "[fleet]\nname = \"prod\"",
    "[[limit]]\nname = \"a\"\nscope = { unit = \"web\" }\negress = \"1mbit\"",
    "[[limit]]\nname = \"a\"\nscope = { user = \"u\" }\nschedule = [{ days = \"mon\" }]",
];

/// What a validator says of each document.
fn validate(documents: &[Value]) -> Option<Vec<bool>> {
    const SCRIPT: &str = "import json, sys\nfrom jsonschema import Draft202012Validator as V\n\
                          schema, documents = json.load(sys.stdin)\nV.check_schema(schema)\n\
                          print(json.dumps([V(schema).is_valid(d) for d in documents]))";
    let mut python = Command::new("python3");
    let has = python.args(["-c", "from jsonschema import Draft202012Validator"]).output();
    if !has.is_ok_and(|output| output.status.success()) {
        return None;
    }
    let mut child = Command::new("python3")
        .args(["-c", SCRIPT])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let text = json!([schema(), documents]).to_string();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn a_validator_says_what_the_reader_says() {
    let read = |text: &&str| toml::from_str::<Value>(text).unwrap();
    for (text, valid) in VALID.iter().map(|t| (t, true)).chain(INVALID.iter().map(|t| (t, false))) {
        let parsed = Spec::parse("x", text);
        assert_eq!(parsed.is_ok(), valid, "{text}: {parsed:?}");
    }
    let documents: Vec<_> = VALID.iter().chain(&INVALID).map(read).collect();
    let Some(said) = validate(&documents) else {
        return println!("SKIP a_validator_says_what_the_reader_says: needs python3-jsonschema");
    };
    let expected: Vec<_> = (0..documents.len()).map(|at| at < VALID.len()).collect();
    for ((document, said), expected) in documents.iter().zip(&said).zip(&expected) {
        assert_eq!(said, expected, "{document}");
    }
}
