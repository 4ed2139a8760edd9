//! Reads what only policers have: `meter` and `actions`.

use tidegate_core::{
    police::{Action, COLOUR_NAMES, ColourMap, Dscp, MeterText, PolicyError, colour_index},
    units::Span,
};
use toml::de::DeValue;

use super::{Problem, Reader, SpecError, Table, Value, in_order};
use crate::settings::{MeterSetting, PoliceProblem, SettingsProblem};

impl From<PoliceProblem> for Problem {
    fn from(problem: PoliceProblem) -> Problem {
        Problem::Settings(SettingsProblem::Police(problem))
    }
}

impl From<PolicyError> for Problem {
    fn from(problem: PolicyError) -> Problem {
        PoliceProblem::from(problem).into()
    }
}

const METER: &str = "meter";
const ACTIONS: &str = "actions";

impl Reader<'_> {
    /// `{ type = "srtcm", cbs = "100kb", ebs = "200kb", colour_aware = true }`, and the committed burst if it
    /// is in it.
    pub(super) fn meter(
        &self,
        value: &Value<'_>,
    ) -> Result<(MeterSetting, Option<Span>), SpecError> {
        let Some(table) = value.get_ref().as_table() else {
            return match value.get_ref().as_str() {
                Some("none") => Ok((MeterSetting::None, None)),
                _ => Err(self.wrong_type(value, METER, "a table")),
            };
        };
        let mut meter = MeterText::default();
        for (key, value) in in_order(table) {
            let text = match (key.get_ref().as_ref(), value.get_ref()) {
                ("colours" | "colors", DeValue::Table(colours)) => {
                    meter.set_colours(self.colours(colours)?);
                    continue;
                }
                (_, DeValue::String(text)) => text.to_string(),
                (_, DeValue::Boolean(flag)) => flag.to_string(),
                _ => return Err(self.wrong_type(value, METER, "a text in quotes")),
            };
            let set = meter.set(key.get_ref(), &text);
            set.map_err(|e| self.at(&value.span(), Some(METER), PoliceProblem::from(e).into()))?;
        }
        let refuse = |e| self.at(&value.span(), Some(METER), PoliceProblem::from(e).into());
        Ok((MeterSetting::Meter(meter.meter().map_err(refuse)?), meter.cbs))
    }

    /// `{ yellow = ["af12"], red = ["af13"] }`.
    fn colours(&self, table: &Table<'_>) -> Result<ColourMap, SpecError> {
        let mut masks = [0u64; COLOUR_NAMES.len()];
        for (key, value) in in_order(table) {
            let refuse = |e| self.at(&value.span(), Some(METER), PoliceProblem::from(e).into());
            let colour = colour_index(key.get_ref()).map_err(refuse)?;
            let Some(names) = value.get_ref().as_array() else {
                return Err(self.wrong_type(value, METER, "a list of code points"));
            };
            for name in names.iter() {
                let dscp: Dscp = self.text(name, METER)?.parse().map_err(refuse)?;
                masks[colour] |= 1 << dscp.value();
            }
        }
        let [green, yellow, red] = masks;
        Ok(ColourMap { yellow: yellow & !green, red: red & !green })
    }

    /// `{ green = "pass", yellow = "dscp af12", red = "drop" }`.
    pub(super) fn actions(&self, value: &Value<'_>) -> Result<[Option<Action>; 3], SpecError> {
        let Some(table) = value.get_ref().as_table() else {
            return Err(self.wrong_type(value, ACTIONS, "a table"));
        };
        let mut actions = [None; 3];
        for (key, value) in in_order(table) {
            let refuse = |e| self.at(&value.span(), Some(ACTIONS), PoliceProblem::from(e).into());
            let colour = colour_index(key.get_ref()).map_err(refuse)?;
            actions[colour] = Some(self.text(value, ACTIONS)?.parse().map_err(refuse)?);
        }
        Ok(actions)
    }
}
