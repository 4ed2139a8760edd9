//! `[[nic]]`, and the limits that it holds.

use tidegate_nic::source::PortName;

use super::*;
use crate::key::{Key, nearest};

/// A `[[limit]]` of scheme `carousel`, which is a software NIC's.
pub(super) struct Carousel {
    pub(super) name: String,
    pub(super) scope: Scope,
    pub(super) patch: Patch,
    pub(super) line: usize,
    /// Its scope in the text.
    pub(super) at: Range<usize>,
}

const NAME: &str = "name";
const PORTS: &str = "ports";

/// The keys of a `[[nic]]`.
pub(super) static KEYS: [Key; 2] = [
    Key {
        name: NAME,
        kind: Kind::Name,
        about: "Name of the software NIC",
        example: "name = \"vm0\"",
        default: "",
    },
    Key {
        name: PORTS,
        kind: Kind::Pair,
        about: "The workload's port, then the other one: `tap:NAME` or `xdp:NAME`, with `@NETNS` in another \
                network namespace",
        example: "ports = [\"tap:vm0\", \"xdp:eth1\"]",
        default: "",
    },
];

impl Reader<'_> {
    pub(super) fn nics(&self, value: &Value<'_>) -> Result<Vec<NicSpec>, SpecError> {
        let Some(tables) = value.get_ref().as_array() else {
            return Err(self.wrong_type(value, "nic", "double brackets"));
        };
        let mut nics: Vec<NicSpec> = Vec::new();
        for table in tables.iter() {
            let Some(fields) = table.get_ref().as_table() else {
                return Err(self.wrong_type(table, "nic", "a table"));
            };
            let nic = self.nic(fields, &table.span())?;
            let at = |field| fields.get(field).map_or(table.span(), Spanned::span);
            if let Some(other) = nics.iter().find(|other| other.name == nic.name) {
                let problem = NicError::SameName(other.line).into();
                return Err(self.at(&at(NAME), Some(NAME), problem));
            }
            let theirs = |port: &PortName| nics.iter().find(|other| other.ports.contains(port));
            let taken = nic.ports.iter().find_map(|port| Some((port, theirs(port)?)));
            if let Some((port, other)) = taken {
                let problem = NicError::SamePort(port.clone(), other.name.clone()).into();
                return Err(self.at(&at(PORTS), Some(PORTS), problem));
            }
            nics.push(nic);
        }
        Ok(nics)
    }

    fn nic(&self, fields: &Table<'_>, span: &Range<usize>) -> Result<NicSpec, SpecError> {
        let (mut name, mut ports) = (None, None);
        for (key, value) in in_order(fields) {
            match key.get_ref().as_ref() {
                "name" => {
                    let text = self.text(value, NAME)?;
                    let refuse = |_| NicError::Name(text.to_owned()).into();
                    store::check_name(text)
                        .map_err(|e| self.at(&value.span(), Some(NAME), refuse(e)))?;
                    name = Some(text.to_owned());
                }
                "ports" => ports = Some(self.ports(value)?),
                other => {
                    let hint = match nearest(other, KEYS.iter().map(|key| key.name)) {
                        Some(known) => format!("did you mean `{known}`?"),
                        None => "a nic has name and ports; its limits are `[[limit]]` tables with \
                                 scheme = \"carousel\""
                            .to_owned(),
                    };
                    let problem = Problem::UnknownField { field: other.to_owned(), hint };
                    return Err(self.at(&key.span(), None, problem));
                }
            }
        }
        let missing = |field| self.at(span, Some(field), Problem::Missing(example(field)));
        let name = name.ok_or_else(|| missing(NAME))?;
        let ports = ports.ok_or_else(|| missing(PORTS))?;
        Ok(NicSpec { name, ports, limits: Vec::new(), line: self.line(span) })
    }

    fn ports(&self, value: &Value<'_>) -> Result<[PortName; 2], SpecError> {
        let Some(list) = value.get_ref().as_array() else {
            return Err(self.wrong_type(value, PORTS, "a list of two"));
        };
        let mut ports = Vec::new();
        for value in list.iter() {
            let port = self.text(value, PORTS)?.parse::<PortName>();
            ports.push(
                port.map_err(|e| self.at(&value.span(), Some(PORTS), NicError::Port(e).into()))?,
            );
        }
        let refuse = |problem: NicError| self.at(&value.span(), Some(PORTS), problem.into());
        let ports = <[PortName; 2]>::try_from(ports).map_err(|p| refuse(NicError::Two(p.len())))?;
        if ports[0] == ports[1] {
            return Err(refuse(NicError::Itself(ports[0].clone())));
        }
        Ok(ports)
    }

    /// Refuses what the scheme does not have.
    pub(super) fn check_carousel(
        &self,
        patch: &Patch,
        fields: &Table<'_>,
        span: &Range<usize>,
    ) -> Result<(), SpecError> {
        let refuse = |field, problem| {
            let at = fields.get(field).map_or(span.clone(), Spanned::span);
            self.at(&at, Some(field), problem)
        };
        patch.check_fields(Scheme::Carousel).map_err(|e| refuse(e.field, e.problem.into()))?;
        crate::nic::check(patch).map_err(|(field, problem)| refuse(field, problem.into()))
    }

    /// Gives a limit to the software NIC whose port it is on.
    pub(super) fn hand_over(&self, limit: Carousel, nics: &mut [NicSpec]) -> Result<(), SpecError> {
        let Carousel { name, scope, patch, line, at } = limit;
        let reader = Reader { limit: Some(name.clone()), ..*self };
        let mut found = nics.iter_mut().flat_map(|nic| {
            let ends: Vec<_> = nic.ends(scope.name()).collect();
            let limits = &mut nic.limits;
            ends.first().copied().map(|end| (end, ends.len(), limits))
        });
        let refuse = |problem: NicError| Err(reader.at(&at, Some("scope"), problem.into()));
        let Some((end, ends, limits)) = found.next() else {
            return refuse(NicError::NoPort(scope.name().to_owned()));
        };
        if ends > 1 || found.next().is_some() {
            return refuse(NicError::ManyPorts(scope.name().to_owned()));
        }
        limits.push(crate::nic::NicLimit::new(name, scope, end, &patch, line));
        Ok(())
    }
}
