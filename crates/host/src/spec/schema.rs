//! The JSON schema of a spec file, from the tables of its keys.
//!
//! A file that is read is valid by the schema. Not all that is valid is read: bounds of values, and what one
//! limit says of another, are checked by the reader alone.

use std::borrow::Cow;

use serde_json::{Map, Value, json};
use tidegate_core::scheme::SCHEMES;

use super::{fleet, nic};
use crate::{
    key::{Key, Kind},
    schedule::MAX_ROWS,
    settings::{
        Patch,
        fields::{self, FIELDS, Field},
    },
};

const NAME: &str = "^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$";
const FLEET_NAME: &str = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$";
const RATE: &str = "^ *([0-9]+\\.?[0-9]*|\\.[0-9]+) *[kmgtKMGT]?[bB][iI][tT] *$";
const TIME: &str = "^ *([0-9]+\\.?[0-9]*|\\.[0-9]+) *[nmuNMU]?[sS] *$";
const SIZE: &str = "^ *([0-9]+\\.?[0-9]*|\\.[0-9]+) *[kmgKMG]?[bB] *$";

/// The schema of a spec file (JSON Schema, draft 2020-12).
pub fn schema() -> Value {
    let default = |key: &Key| fields::find(key.name).map_or(key.default.into(), Field::default);
    let mut limit = table_with(fields::keys(), &["name", "scope"], default);
    limit["allOf"] =
        SCHEMES.iter().map(|info| refusals(info.name, |field| info.has(field))).collect();
    limit["anyOf"] =
        ["egress", "ingress", "parent", "schedule"].map(|key| json!({ "required": [key] })).into();
    let inside = ["guarantee", "ceiling", "weight"];
    limit["dependentRequired"] = inside
        .into_iter()
        .map(|key| (key.to_owned(), json!(["parent"])))
        .collect::<Map<_, _>>()
        .into();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A spec file of Tidegate",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "limit": { "type": "array", "items": limit },
            "nic": { "type": "array", "items": table(&nic::KEYS, &["name", "ports"]) },
            "fleet": table(&fleet::KEYS, &["name", "keys"]),
            "labels": {
                "type": "boolean",
                "description": "Containers may have rates by their labels tidegate.egress and \
                                tidegate.ingress [default: false]",
            },
            "annotations": {
                "type": "boolean",
                "description": "Pods may have rates by their annotations kubernetes.io/egress-bandwidth \
                                and kubernetes.io/ingress-bandwidth [default: false]",
            },
            "group": {
                "type": "array",
                "items": table(&fleet::GROUP_KEYS, &["name", "rate", "algorithm", "members"]),
            },
        },
    })
}

fn table<'k>(keys: impl IntoIterator<Item = &'k Key>, required: &[&str]) -> Value {
    table_with(keys, required, |key| key.default.into())
}

fn table_with<'k>(
    keys: impl IntoIterator<Item = &'k Key>,
    required: &[&str],
    default: impl Fn(&Key) -> Cow<'static, str>,
) -> Value {
    let properties: Map<_, _> = keys
        .into_iter()
        .map(|key| {
            let mut value = value(key.kind);
            value["description"] = match default(key).as_ref() {
                "" => key.about.into(),
                default => format!("{} [default: {default}]", key.about).into(),
            };
            (key.name.to_owned(), value)
        })
        .collect();
    json!({
        "type": "object",
        "required": required,
        "additionalProperties": false,
        "properties": properties,
    })
}

/// What a limit of a scheme cannot have, unless it says "off".
fn refusals(scheme: &str, has: impl Fn(&str) -> bool) -> Value {
    let missing = FIELDS.iter().filter(|field| !has(field.key.name));
    let off = |field: &Field| match off(field) {
        values if values.is_empty() => json!(false),
        values => json!({ "enum": values }),
    };
    let properties: Map<_, _> =
        missing.map(|field| (field.key.name.to_owned(), off(field))).collect();
    json!({
        "if": { "required": ["scheme"], "properties": { "scheme": { "const": scheme } } },
        "then": { "properties": properties },
    })
}

/// The values of a setting that ask for nothing, which any scheme can have.
fn off(field: &Field) -> Vec<Value> {
    let values = [json!("none"), json!(false), json!("0ms"), json!("auto")];
    let asks_nothing = |value: &Value| {
        let mut patch = Patch::default();
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        field.set(&mut patch, &text).is_ok() && !field.is_asked(&patch)
    };
    let mut values: Vec<_> = values.into_iter().filter(asks_nothing).collect();
    if field.key.kind == Kind::List {
        values.push(json!([]));
    }
    values
}

/// The schema of a value.
fn value(kind: Kind) -> Value {
    let text = |pattern: &str| json!({ "type": "string", "pattern": pattern });
    let either = |one: Value, other: Value| json!({ "anyOf": [one, other] });
    let texts = json!({ "type": "array", "items": { "type": "string" } });
    match kind {
        Kind::Name => text(NAME),
        Kind::FleetName => text(FLEET_NAME),
        Kind::Text => json!({ "type": "string" }),
        Kind::Rate => text(RATE),
        Kind::RateOrNone => either(text(RATE), json!({ "const": "none" })),
        Kind::Span => either(text(TIME), text(SIZE)),
        Kind::SpanOrNone => json!({ "anyOf": [text(TIME), text(SIZE), { "const": "none" }] }),
        Kind::Time => text(TIME),
        Kind::Percent => text("^ *[0-9]{1,3} *%$"),
        Kind::Whole(min, max) => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Flag => json!({ "type": "boolean" }),
        Kind::Word(words) => json!({ "enum": words }),
        Kind::Scheme => {
            let names = SCHEMES.iter().map(|info| info.name);
            json!({ "enum": std::iter::once("auto").chain(names).collect::<Vec<_>>() })
        }
        Kind::List => either(json!({ "type": "string" }), texts),
        Kind::Names => texts,
        Kind::Pair => json!({
            "type": "array",
            "items": { "type": "string" },
            "minItems": 2,
            "maxItems": 2,
        }),
        Kind::Meter => either(json!({ "const": "none" }), meter()),
        Kind::Actions => {
            let action = text("^(pass|drop|ce|dscp[ :].+)$");
            json!({
                "type": "object",
                "additionalProperties": false,
                "properties": { "green": action, "yellow": action, "red": action },
            })
        }
        Kind::Schedule => json!({
            "type": "array",
            "maxItems": MAX_ROWS,
            "items": {
                "type": "object",
                "additionalProperties": false,
                "anyOf": [{ "required": ["egress"] }, { "required": ["ingress"] }],
                "properties": {
                    "days": { "type": "string" },
                    "from": text("^ *[0-9]{1,2}:[0-9]{1,2} *$"),
                    "to": text("^ *[0-9]{1,2}:[0-9]{1,2} *$"),
                    "egress": value(Kind::RateOrNone),
                    "ingress": value(Kind::RateOrNone),
                },
            },
        }),
        Kind::Scope => {
            let device = text("^[^/: ]+$");
            let name = text("^[^/\\s]+$");
            let labels = json!({
                "type": "object",
                "required": ["labels"],
                "additionalProperties": false,
                "properties": { "labels": { "type": "string", "minLength": 1 } },
            });
            let pod = json!({
                "type": "object",
                "minProperties": 1,
                "additionalProperties": false,
                "properties": {
                    "namespace": name,
                    "name": name,
                    "labels": { "type": "string", "minLength": 1 },
                    "join": { "type": "boolean" },
                },
            });
            json!({
                "type": "object",
                "minProperties": 1,
                "maxProperties": 2,
                "anyOf": [{ "maxProperties": 1 }, { "required": ["exe", "args"] }],
                "additionalProperties": false,
                "properties": {
                    "cgroup": { "type": "string", "minLength": 1 },
                    "unit": text("^[^/\\s]*\\.[^/\\s]*$"),
                    "slice": text("^[^/\\s]*\\.slice$"),
                    "user": { "type": ["string", "integer"], "pattern": "^[^/\\s]+$" },
                    "container": either(name.clone(), labels),
                    "pod": pod,
                    "exe": text("^/\\S*$"),
                    "args": { "type": "string" },
                    "dev": device,
                    "port": device,
                },
            })
        }
    }
}

fn meter() -> Value {
    let span = value(Kind::Span);
    let flag = json!({ "enum": [true, false, "true", "false"] });
    let points = json!({ "type": "array", "items": { "type": "string" } });
    let colours = json!({
        "anyOf": [
            { "type": "string" },
            {
                "type": "object",
                "additionalProperties": false,
                "properties": { "green": points, "yellow": points, "red": points },
            },
        ],
    });
    json!({
        "type": "object",
        "required": ["type"],
        "additionalProperties": false,
        "properties": {
            "type": { "enum": ["srtcm", "trtcm", "rfc4115"] },
            "cbs": span, "ebs": span, "pbs": span,
            "pir": value(Kind::Rate), "eir": value(Kind::Rate),
            "colour_aware": flag, "color_aware": flag,
            "colours": colours, "colors": colours,
        },
    })
}

#[cfg(test)]
mod tests;
