//! Classes inside classes, and what the rule gives each of them.

use crate::tools::flows::Want;

const MBIT: u64 = 1_000_000;

/// A class below the root.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Class {
    pub(super) name: String,
    /// The class that it is inside of; none: the root.
    pub(super) parent: Option<usize>,
    pub(super) guarantee_bit_s: u64,
    pub(super) weight: u32,
    pub(super) ceiling_bit_s: Option<u64>,
}

/// A root and its classes, each after its parent.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tree {
    pub(super) root_bit_s: u64,
    pub(super) classes: Vec<Class>,
}

impl Tree {
    /// Three leaves, and in the full form a class that holds the first two of them.
    pub(super) fn new(quick: bool) -> Tree {
        let class = |name: &str, parent, guarantee, weight, ceiling: Option<u64>| Class {
            name: name.to_owned(),
            parent,
            guarantee_bit_s: guarantee * MBIT,
            weight,
            ceiling_bit_s: ceiling.map(|mbit| mbit * MBIT),
        };
        if quick {
            return Tree {
                root_bit_s: 200 * MBIT,
                classes: vec![
                    class("web", None, 80, 300, None),
                    class("batch", None, 40, 200, None),
                    class("bulk", None, 20, 100, Some(80)),
                ],
            };
        }
        Tree {
            root_bit_s: 1000 * MBIT,
            classes: vec![
                class("org", None, 600, 300, None),
                class("web", Some(0), 400, 300, None),
                class("batch", Some(0), 200, 200, None),
                class("bulk", None, 100, 100, Some(300)),
            ],
        }
    }

    /// The classes that have traffic of their own: web, batch, bulk.
    pub(super) fn leaves(&self) -> Vec<usize> {
        (0..self.classes.len()).filter(|class| self.inside(Some(*class)).is_empty()).collect()
    }

    fn inside(&self, parent: Option<usize>) -> Vec<usize> {
        let is_inside = |class: &usize| self.classes[*class].parent == parent;
        (0..self.classes.len()).filter(is_inside).collect()
    }

    /// What a class and those inside it can use of the wire, if only `active` leaves send.
    fn most(&self, class: usize, active: &[usize]) -> f64 {
        let ceiling = self.classes[class].ceiling_bit_s.map_or(f64::INFINITY, |rate| rate as f64);
        match self.inside(Some(class)).as_slice() {
            [] if active.contains(&class) => ceiling,
            [] => 0.0,
            inside => inside.iter().map(|one| self.most(*one, active)).sum::<f64>().min(ceiling),
        }
    }

    /// What the rule gives each class of `total_bit_s` if only `active` leaves send, and each as much as it
    /// may: what it is guaranteed, and of the rest a part by its weight, up to its ceiling.
    pub(super) fn parts(&self, total_bit_s: f64, active: &[usize]) -> Vec<f64> {
        let mut parts = vec![0.0; self.classes.len()];
        self.share(None, total_bit_s, active, &mut parts);
        parts
    }

    fn share(&self, parent: Option<usize>, total: f64, active: &[usize], parts: &mut [f64]) {
        let most = |class: usize| self.most(class, active);
        let mut open = self.inside(parent);
        open.retain(|class| most(*class) > 0.0);
        let mut left = total;
        // A round ends the sharing or takes out a class that has its ceiling.
        while !open.is_empty() {
            let sum =
                |of: fn(&Class) -> f64| open.iter().map(|c| of(&self.classes[*c])).sum::<f64>();
            let spare = left - sum(|class| class.guarantee_bit_s as f64);
            let weights = sum(|class| f64::from(class.weight));
            let part = |class: usize| {
                let Class { guarantee_bit_s, weight, .. } = self.classes[class];
                guarantee_bit_s as f64 + spare * f64::from(weight) / weights
            };
            let (full, free): (Vec<usize>, Vec<usize>) =
                open.iter().partition(|class| part(**class) >= most(**class));
            let done = if full.is_empty() { &free } else { &full };
            for class in done {
                parts[*class] = part(*class).min(most(*class));
            }
            left -= done.iter().map(|class| parts[*class]).sum::<f64>();
            open = if full.is_empty() { Vec::new() } else { free };
        }
        for class in self.inside(parent) {
            self.share(Some(class), parts[class], active, parts);
        }
    }
}

/// A flow of a leaf, in steps from the start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sends {
    /// Which of the leaves.
    pub(super) leaf: usize,
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) want: Want,
}

/// A step of the time line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Phase {
    pub(super) name: &'static str,
    /// The leaf that the probe is in.
    pub(super) probe: usize,
    /// Leaves that come back as it begins.
    pub(super) back: &'static [usize],
}

/// The leaves by their place among the leaves.
pub(super) const WEB: usize = 0;
pub(super) const BATCH: usize = 1;
pub(super) const BULK: usize = 2;
/// Connections of one class where it has several.
const MANY: usize = 8;

/// What happens, a step each.
pub(super) const PHASES: [Phase; 6] = [
    Phase { name: "all greedy", probe: WEB, back: &[] },
    Phase { name: "batch idle", probe: WEB, back: &[] },
    Phase { name: "batch is back", probe: WEB, back: &[BATCH] },
    Phase { name: "bulk alone", probe: BULK, back: &[] },
    Phase { name: "8 flows in batch", probe: WEB, back: &[WEB, BATCH] },
    Phase { name: "flood in bulk", probe: WEB, back: &[] },
];

/// The flows of all steps.
pub(super) fn sends(root_bit_s: u64) -> Vec<Sends> {
    let greedy = |leaf, from, to| Sends { leaf, from, to, want: Want::Greedy };
    let mut sends = vec![
        greedy(WEB, 0, 3),
        greedy(WEB, 4, 6),
        greedy(BATCH, 0, 1),
        greedy(BATCH, 2, 3),
        greedy(BATCH, 4, 6),
        greedy(BULK, 0, 5),
        Sends { leaf: BULK, from: 5, to: 6, want: Want::Flood(root_bit_s) },
    ];
    sends.extend(vec![greedy(BATCH, 4, 5); MANY - 1]);
    sends
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mbit(tree: &Tree, active: &[usize]) -> Vec<f64> {
        let parts = tree.parts(tree.root_bit_s as f64, active);
        parts.iter().map(|part| (part / 1e5).round() / 10.0).collect()
    }

    #[test]
    fn the_rule() {
        let tree = Tree::new(true);
        assert_eq!(tree.leaves(), [0, 1, 2]);
        assert_eq!(mbit(&tree, &[0, 1, 2]), [110.0, 60.0, 30.0]);
        assert_eq!(mbit(&tree, &[0, 2]), [155.0, 0.0, 45.0]);
        // A ceiling leaves the rest to others, and alone nothing more.
        assert_eq!(mbit(&tree, &[2]), [0.0, 0.0, 80.0]);
        let mut low = tree;
        low.classes[2].ceiling_bit_s = Some(25 * MBIT);
        assert_eq!(mbit(&low, &[0, 1, 2]), [113.0, 62.0, 25.0]);
    }

    #[test]
    fn the_rule_inside_a_class() {
        let tree = Tree::new(false);
        assert_eq!(tree.leaves(), [1, 2, 3]);
        assert_eq!(mbit(&tree, &[1, 2, 3]), [825.0, 535.0, 290.0, 175.0]);
        assert_eq!(mbit(&tree, &[1, 3]), [825.0, 825.0, 0.0, 175.0]);
        assert_eq!(mbit(&tree, &[3]), [0.0, 0.0, 0.0, 300.0]);
    }

    #[test]
    fn someone_sends_in_every_step() {
        let sends = sends(1);
        for step in 0..PHASES.len() as u32 {
            assert!(sends.iter().any(|one| one.from <= step && step < one.to), "{step}");
        }
    }
}
