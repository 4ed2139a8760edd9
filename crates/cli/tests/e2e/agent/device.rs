//! Devices that come, go and change their names.

use std::{
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Instant,
};

use tidegate_agent::agent::CHECK;
use tidegate_sys::net::{NetNs, VethPair};

use super::{Bed, limit};
use crate::{
    common::{Place, text, wait_for},
    edt::into,
    need_root,
};

/// Of so many rounds one has no stall of the machine.
const ROUNDS: usize = 5;

fn namespace() -> NetNs {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    NetNs::create(&format!("tidegate-agent-{}-{number}", std::process::id())).unwrap()
}

fn text_of(tidegate: &mut Command) -> String {
    text(&tidegate.arg("status").output().unwrap())
}

impl Bed<'_> {
    fn netns(&self) -> &NetNs {
        self.netns.as_ref().unwrap()
    }

    fn make_device(&self, name: &str) {
        let pair = VethPair { name, peer: &format!("{name}p"), peer_netns: None };
        self.netns().netlink().unwrap().add_veth(&pair).unwrap();
    }

    fn remove_device(&self, name: &str) {
        let mut netlink = self.netns().netlink().unwrap();
        let index = netlink.index_of(name).unwrap();
        netlink.delete_link(index).unwrap();
    }

    fn rename_device(&self, from: &str, to: &str) {
        let mut command = into(self.netns(), "ip");
        let output = command.args(["link", "set", "dev", from, "name", to]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Waits until this device alone has a qdisc of Tidegate at its root.
    fn wait_limited(&self, name: &str) {
        wait_for("the limit on one device", || {
            let qdiscs = text(&into(self.netns(), "tc").args(["qdisc", "show"]).output().unwrap());
            let mut ours = qdiscs.lines().filter(|line| line.contains(" 7467: "));
            let found = ours.next()?.split(' ').nth(4)?;
            (found == name && ours.next().is_none()).then_some(())
        });
    }

    /// The count of limits in force, as systemd and people read it.
    fn counts(&self) -> String {
        let table = text_of(&mut self.tidegate());
        let line = table.lines().find(|line| line.starts_with("Agent")).unwrap_or_default();
        line.rsplit(": ").next().unwrap_or_default().to_owned()
    }
}

#[test]
fn root_agent_follows_a_device_that_is_removed_and_made_again() {
    need_root!();
    let place = Place::new();
    let mut bed = Bed::new(&place, &place.group);
    bed.netns = Some(namespace());
    let leaf = place.child("leaf");
    let required = "egress = \"20mbit\"\nrequired = true";
    let inside = "egress = \"5mbit\"\nparent = \"uplink\"";
    let text = limit("uplink", "dev = \"eth77\"", required)
        + &limit("leaf", &format!("cgroup = \"{}\"", leaf.path()), inside);
    bed.write("a.toml", &text);
    let _agent = bed.start();
    assert_eq!(bed.wait_said("uplink", "waiting"), "there is no device `eth77`");
    assert_eq!(bed.wait_said("leaf", "waiting"), "its parent `uplink` waits or is refused");
    assert_eq!(bed.counts(), "0 of 2 limits in force");
    assert_eq!(bed.check(), Some(3), "it is required");
    let table = text_of(&mut bed.tidegate());
    assert!(!table.contains("there is no cgroup"), "{table}");
    // An agent without events would find it when it looks at its limits, `CHECK` after the last look at the
    // earliest. That look was after the beginning of the round.
    let in_time = (0..ROUNDS).any(|_| {
        let began = Instant::now();
        bed.make_device("eth77");
        bed.wait_said("uplink", "in_force");
        bed.wait_said("leaf", "in_force");
        assert_eq!((bed.check(), bed.counts().as_str()), (Some(0), "2 of 2 limits in force"));
        bed.remove_device("eth77");
        assert_eq!(bed.wait_said("uplink", "waiting"), "there is no device `eth77`");
        bed.wait_said("leaf", "waiting");
        assert_eq!(bed.check(), Some(3));
        // Made by another name, it is not the one that is asked for.
        bed.make_device("other");
        bed.rename_device("other", "eth77");
        bed.wait_said("uplink", "in_force");
        bed.wait_limited("eth77");
        bed.rename_device("eth77", "other");
        bed.wait_said("uplink", "waiting");
        // It stays where it is until it can move.
        bed.wait_limited("other");
        bed.make_device("eth77");
        bed.wait_said("uplink", "in_force");
        bed.wait_limited("eth77");
        bed.remove_device("eth77");
        bed.remove_device("other");
        began.elapsed() < CHECK
    });
    assert!(in_time, "each round took {CHECK:?}: devices are found by the clock alone");
    assert!(bed.tidegate().arg("detach").output().unwrap().status.success());
}
