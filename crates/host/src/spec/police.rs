//! Reads what only policers have: `meter` and `actions`.

use tidegate_core::police::{COLOUR_NAMES, ColourMap, Dscp, MeterText, PolicyError, colour_index};
use toml::de::DeValue;

use super::{Problem, Reader, SpecError, Table, Value, in_order};
use crate::settings::{Patch, SettingsProblem};

impl From<PolicyError> for Problem {
    fn from(problem: PolicyError) -> Problem {
        SettingsProblem::from(problem).into()
    }
}

const METER: &str = "meter";
const ACTIONS: &str = "actions";

impl Reader<'_> {
    /// `{ type = "srtcm", cbs = "100kb", ebs = "200kb", colour_aware = true }`.
    pub(super) fn meter(&self, value: &Value<'_>, patch: &mut Patch) -> Result<(), SpecError> {
        let set = |patch: &mut Patch, meter: Option<&MeterText>| {
            let set = patch.police.set_meter(meter);
            set.map_err(|e| self.at(&value.span(), Some(METER), e.into()))
        };
        let Some(table) = value.get_ref().as_table() else {
            return match value.get_ref().as_str() {
                Some("none") => set(patch, None),
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
            set.map_err(|e| self.at(&value.span(), Some(METER), e.into()))?;
        }
        set(patch, Some(&meter))
    }

    /// `{ yellow = ["af12"], red = ["af13"] }`.
    fn colours(&self, table: &Table<'_>) -> Result<ColourMap, SpecError> {
        let mut masks = [0u64; COLOUR_NAMES.len()];
        for (key, value) in in_order(table) {
            let refuse = |e: PolicyError| self.at(&value.span(), Some(METER), e.into());
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
    pub(super) fn actions(&self, value: &Value<'_>, patch: &mut Patch) -> Result<(), SpecError> {
        let Some(table) = value.get_ref().as_table() else {
            return Err(self.wrong_type(value, ACTIONS, "a table"));
        };
        for (key, value) in in_order(table) {
            let refuse = |e: PolicyError| self.at(&value.span(), Some(ACTIONS), e.into());
            let colour = colour_index(key.get_ref()).map_err(refuse)?;
            let action = self.text(value, ACTIONS)?.parse().map_err(refuse)?;
            patch.police.actions[colour] = Some(action);
        }
        Ok(())
    }
}
