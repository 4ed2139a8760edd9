//! The tree put in force: as classes of HTB on the sender's device, or as limits of Tidegate on cgroups
//! inside each other.

use std::{
    ffi::OsStr,
    fs,
    net::{IpAddr, Ipv4Addr},
};

use tidegate_core::{Direction, Rate};
use tidegate_sys::net::qdisc::HtbClass;

use super::tree::{Class, Tree};
use crate::{
    context::Context,
    systems::System,
    testbed::{
        Cgroup, Site, Store, Testbed,
        peers::{HtbNode, Peer, receiver_class},
        unique_name,
    },
};

/// The limit that the others are inside of.
pub(super) const ROOT: &str = "root";
/// A class of HTB sends so much in one round for each unit of weight: one of 100 a quarter of a large packet.
const QUANTUM_BYTES: u32 = 150;
/// The network of the addresses by which classes are told apart.
const V4_BITS: u8 = 24;

/// The receiver's address of a class: HTB knows the class by it.
pub(super) fn addr(class: usize) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, 100 + class as u8).into()
}

/// Gives the receiver the addresses of so many classes.
pub(super) fn add_addresses(testbed: &Testbed, classes: usize) -> anyhow::Result<()> {
    let mut netlink = testbed.receiver(0).netlink()?;
    let index = netlink.index_of(testbed.receiver_dev(0))?;
    for class in 0..classes {
        netlink.add_address(index, addr(class), V4_BITS)?;
    }
    Ok(())
}

/// The tree in force; dropping it takes it off.
pub(super) enum Force<'a> {
    Htb { peer: Peer },
    Limits(Limits<'a>),
}

impl<'a> Force<'a> {
    pub(super) fn apply(
        ctx: &Context,
        testbed: &'a Testbed,
        tree: &Tree,
        system: System,
    ) -> anyhow::Result<Force<'a>> {
        if system != System::Htb {
            return Ok(Force::Limits(Limits::apply(ctx, testbed, tree, system)?));
        }
        let leaves = tree.leaves();
        let node = |(index, class): (usize, &Class)| HtbNode {
            parent: class.parent,
            shape: HtbClass {
                ceil_bit_s: Some(class.ceiling_bit_s.unwrap_or(tree.root_bit_s)),
                quantum_bytes: class.weight * QUANTUM_BYTES,
                ..HtbClass::new(class.guarantee_bit_s)
            },
            to: leaves.contains(&index).then(|| addr(index)),
        };
        let nodes: Vec<HtbNode> = tree.classes.iter().enumerate().map(node).collect();
        Ok(Force::Htb { peer: Peer::htb_tree(testbed, tree.root_bit_s, &nodes)? })
    }

    /// Packets that each class, and last the root, has dropped until now; one that is yet to be segmented
    /// counts once.
    pub(super) fn drops(&mut self, tree: &Tree) -> anyhow::Result<Vec<u64>> {
        match self {
            Force::Htb { peer } => {
                let stats = peer.class_stats()?;
                let of = |class: usize| {
                    let own = stats.iter().find(|stats| stats.handle == receiver_class(class));
                    own.map_or(0, |stats| u64::from(stats.drops))
                };
                // Where classes wait, the root drops nothing.
                Ok((0..tree.classes.len()).map(of).chain([0]).collect())
            }
            Force::Limits(limits) => {
                let names = tree.classes.iter().map(|class| class.name.as_str());
                names
                    .chain([ROOT])
                    .map(|name| limits.store.drops(name, Direction::Egress))
                    .collect()
            }
        }
    }

    /// Where to start what belongs to a class.
    pub(super) fn site<'b>(&'b self, testbed: &'b Testbed, class: usize) -> Site<'b> {
        let site = Site::from(testbed.sender());
        match self {
            Force::Htb { .. } => site,
            Force::Limits(limits) => site.in_cgroup(&limits.cgroups[class]),
        }
    }
}

/// Limits of Tidegate in a store of their own.
pub(super) struct Limits<'a> {
    store: Store<'a>,
    // Those inside before those that they are in; the root last.
    cgroups: Vec<Cgroup>,
    _root: Cgroup,
}

impl<'a> Limits<'a> {
    fn apply(
        ctx: &Context,
        testbed: &'a Testbed,
        tree: &Tree,
        system: System,
    ) -> anyhow::Result<Limits<'a>> {
        let root = Cgroup::create()?;
        let mut cgroups: Vec<Cgroup> = Vec::new();
        for class in &tree.classes {
            let above = class.parent.map_or(&root, |parent| &cgroups[parent]);
            let cgroup = above.create_below(&class.name)?;
            cgroups.push(cgroup);
        }
        let spec = spec(tree, system, &root, &cgroups)?;
        let store = Store::new(&ctx.tidegate, testbed.sender())?;
        let mut limits = Limits { store, cgroups, _root: root };
        let file = ctx.out_dir.join(format!("{}.toml", unique_name("limits")));
        fs::create_dir_all(&ctx.out_dir)?;
        fs::write(&file, spec)?;
        let applied = limits.store.tidegate([OsStr::new("apply"), file.as_os_str()]);
        fs::remove_file(&file)?;
        applied.map(|()| limits)
    }
}

impl Drop for Limits<'_> {
    fn drop(&mut self) {
        self.store.detach();
        while self.cgroups.pop().is_some() {}
    }
}

/// The tree as `tidegate apply` reads it.
fn spec(tree: &Tree, system: System, root: &Cgroup, cgroups: &[Cgroup]) -> anyhow::Result<String> {
    let rate =
        |bit_s: u64| Rate::from_bit_s(bit_s).map(|rate| rate.to_string()).unwrap_or_default();
    let limit = |name: &str, cgroup: &Cgroup| {
        let scope = cgroup.name();
        format!(
            "[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{scope}\" }}\nscheme = \"{system}\"\n"
        )
    };
    let mut text = limit(ROOT, root) + &format!("egress = \"{}\"\n\n", rate(tree.root_bit_s));
    for (class, cgroup) in tree.classes.iter().zip(cgroups) {
        let Class { name, parent, guarantee_bit_s, weight, ceiling_bit_s } = class;
        let parent = parent.map_or(ROOT, |parent| &tree.classes[parent].name);
        let guarantee = rate(*guarantee_bit_s);
        text += &limit(name, cgroup);
        text += &format!("parent = \"{parent}\"\nguarantee = \"{guarantee}\"\nweight = {weight}\n");
        text += &ceiling_bit_s
            .map_or_else(String::new, |most| format!("ceiling = \"{}\"\n", rate(most)));
        text.push('\n');
    }
    Ok(text)
}
