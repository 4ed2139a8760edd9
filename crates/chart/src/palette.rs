//! One colour a system, the same in every figure.
//!
//! The colours are those of Okabe and Ito (Color Universal Design, 2008), which stay apart for eyes
//! that do not see red or green, with a grey for the system that has no limit. Four of Paul Tol's follow.

use plotters::style::RGBColor;

const ORANGE: RGBColor = RGBColor(0xE6, 0x9F, 0x00);
const SKY: RGBColor = RGBColor(0x56, 0xB4, 0xE9);
const GREEN: RGBColor = RGBColor(0x00, 0x9E, 0x73);
const YELLOW: RGBColor = RGBColor(0xF0, 0xE4, 0x42);
const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xB2);
const VERMILLION: RGBColor = RGBColor(0xD5, 0x5E, 0x00);
const PURPLE: RGBColor = RGBColor(0xCC, 0x79, 0xA7);
const GREY: RGBColor = RGBColor(0x99, 0x99, 0x99);
const BLACK: RGBColor = RGBColor(0x33, 0x33, 0x33);
const WINE: RGBColor = RGBColor(0x88, 0x22, 0x55);
const OLIVE: RGBColor = RGBColor(0x99, 0x99, 0x33);
const TEAL: RGBColor = RGBColor(0x44, 0xAA, 0x99);
const INDIGO: RGBColor = RGBColor(0x33, 0x22, 0x88);

/// What strangers get, in this order.
const FREE: [RGBColor; 13] =
    [BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, GREY, BLACK, WINE, OLIVE, TEAL, INDIGO];

/// The systems we know. Two that share a colour are not compared with each other; if they are, the
/// later one in the figure gets a free colour.
const KNOWN: &[(&str, RGBColor)] = &[
    ("unlimited", GREY),
    ("baseline", GREY),
    ("htb", VERMILLION),
    ("tbf", ORANGE),
    ("fq", PURPLE),
    ("edt", PURPLE),
    ("police", YELLOW),
    ("nrm", BLUE),
    ("nrm-paper", SKY),
    ("pace", GREEN),
    ("tidegate", GREEN),
    ("dem", SKY),
    ("spring", BLUE),
    ("carousel", GREEN),
    ("wheel", GREEN),
    ("nothing", GREY),
    ("ctb", VERMILLION),
    ("gtb", ORANGE),
    ("grd", BLUE),
    ("fps", GREEN),
];

/// The colours of a report: a system has the same one in all its figures, while there are no more systems
/// than colours. Empty: each figure stands alone.
#[derive(Debug, Clone, Default)]
pub struct Palette(Vec<(String, RGBColor)>);

impl Palette {
    /// The colours of a report with these systems.
    pub fn of(systems: &[&str]) -> Palette {
        let systems = crate::distinct(systems.iter().copied());
        let colours = Palette::default().colours(&systems);
        Palette(systems.into_iter().map(str::to_owned).zip(colours).collect())
    }

    /// A colour for each system of a figure, distinct while there are enough.
    pub fn colours(&self, systems: &[&str]) -> Vec<RGBColor> {
        let given = |system: &str| self.0.iter().find(|(name, _)| name == system).map(|(_, c)| *c);
        colours_where(systems, |system| given(system).or_else(|| known(system)))
    }
}

/// The colour of a system that we know. What follows a comma tells several curves of one system apart: the
/// first of them has the system's colour.
fn known(system: &str) -> Option<RGBColor> {
    let system = system.split(',').next();
    KNOWN.iter().find(|(name, _)| Some(*name) == system).map(|(_, colour)| *colour)
}

/// The colours that systems want, and free ones for those whose colour is taken, or that want none.
fn colours_where(systems: &[&str], wanted: impl Fn(&str) -> Option<RGBColor>) -> Vec<RGBColor> {
    let mut taken: Vec<Option<RGBColor>> = Vec::with_capacity(systems.len());
    for system in systems {
        let colour = wanted(system).filter(|colour| !taken.contains(&Some(*colour)));
        taken.push(colour);
    }
    for at in 0..taken.len() {
        if taken[at].is_none() {
            let free = FREE.iter().find(|colour| !taken.contains(&Some(**colour)));
            taken[at] = Some(*free.unwrap_or(&FREE[at % FREE.len()]));
        }
    }
    taken.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn colours(systems: &[&str]) -> Vec<RGBColor> {
        Palette::default().colours(systems)
    }

    /// The systems of `low-latency`, whose figures do not have all of them, nor in one order.
    #[test]
    fn a_system_has_one_colour_in_all_figures_of_a_report() {
        let all = ["idle", "htb", "spring", "htb-ecn", "dem"];
        let report = Palette::of(&all);
        let whole = report.colours(&all);
        assert_eq!(crate::distinct(whole.iter()).len(), all.len());
        for figure in [&["htb-ecn", "dem"][..], &["spring", "idle", "htb"], &["dem", "spring"]] {
            for (system, colour) in figure.iter().zip(report.colours(figure)) {
                let at = all.iter().position(|name| name == system).unwrap();
                assert_eq!(colour, whole[at], "{system}");
            }
        }
    }

    #[test]
    fn a_system_keeps_its_colour() {
        assert_eq!(colours(&["htb", "pace"]), [VERMILLION, GREEN]);
        assert_eq!(colours(&["pace", "unlimited", "htb"]), [GREEN, GREY, VERMILLION]);
        assert_eq!(colours(&["htb, 1 Gbit/s", "pace, 1 Gbit/s"]), [VERMILLION, GREEN]);
    }

    /// As many as there are colours, of the known ones and strangers, in many orders.
    #[test]
    fn no_two_systems_of_a_figure_look_alike() {
        let known = KNOWN.iter().map(|(name, _)| *name);
        let names: Vec<&str> = known.chain(["a", "b", "c"]).collect();
        for (start, step) in (0..names.len()).flat_map(|at| [1, 2, 3, 5].map(|step| (at, step))) {
            let systems: Vec<&str> =
                (0..FREE.len()).map(|i| names[(start + i * step) % names.len()]).collect();
            let colours = colours(&systems);
            assert_eq!(crate::distinct(colours.iter()).len(), systems.len(), "{systems:?}");
        }
    }

    #[test]
    fn more_systems_than_colours_use_each_before_one_again() {
        let colours = colours(&["x"; 16]);
        assert_eq!(colours[..13], FREE);
        assert_eq!(colours[13..], FREE[..3]);
    }
}
