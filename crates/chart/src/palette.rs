//! One colour a system, the same in every figure.
//!
//! The colours are those of Okabe and Ito (Color Universal Design, 2008), which stay apart for eyes
//! that do not see red or green, with a grey for the system that has no limit.

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

/// What strangers get, in this order.
const FREE: [RGBColor; 9] = [BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, GREY, BLACK];

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

/// A colour for each system of a figure, distinct while there are no more than nine. What follows a comma
/// tells several curves of one system apart: the first of them has the system's colour.
pub fn colours(systems: &[&str]) -> Vec<RGBColor> {
    let known = |system: &str| {
        let system = system.split(',').next();
        KNOWN.iter().find(|(name, _)| Some(*name) == system).map(|(_, colour)| *colour)
    };
    let mut taken: Vec<Option<RGBColor>> = Vec::with_capacity(systems.len());
    for system in systems {
        let colour = known(system).filter(|colour| !taken.contains(&Some(*colour)));
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

    #[test]
    fn a_system_keeps_its_colour() {
        assert_eq!(colours(&["htb", "pace"]), [VERMILLION, GREEN]);
        assert_eq!(colours(&["pace", "unlimited", "htb"]), [GREEN, GREY, VERMILLION]);
        assert_eq!(colours(&["htb, 1 Gbit/s", "pace, 1 Gbit/s"]), [VERMILLION, GREEN]);
    }

    /// Nine of them, of the known ones and strangers, in many orders.
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
        let colours = colours(&["x"; 12]);
        assert_eq!(colours[..9], FREE);
        assert_eq!(colours[9..], FREE[..3]);
    }
}
