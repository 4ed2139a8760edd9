//! Requests at risk: packets that a limit dropped and that leave TCP with nothing in flight. No ACK tells it
//! of the loss, so their requests wait for a timer, 200 ms or more. Where requests are fine there are none.

use serde::{Serialize, Serializer, ser::SerializeMap};
use tidegate_core::Direction;
use tidegate_sys::intf::{self, RISK_TABLE, Risk};

/// Packets by cause, in the order of [`RISK_TABLE`]; `None` where nobody can tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AtRisk(pub [Option<u64>; intf::RISKS]);

impl AtRisk {
    /// The packets that a limit has counted in a direction since it was put on. The packets in flight of a
    /// sender elsewhere are not known, so on ingress only connections that begin are counted.
    pub fn of(direction: Direction, counted: [u64; intf::RISKS]) -> AtRisk {
        let known = |risk: &Risk| direction == Direction::Egress || risk.on_ingress;
        AtRisk(std::array::from_fn(|i| known(&RISK_TABLE[i]).then_some(counted[i])))
    }

    pub fn packets(&self) -> u64 {
        self.0.iter().flatten().sum()
    }

    /// Whether every cause is known, so that zero means that no request waits.
    pub fn is_whole(&self) -> bool {
        self.0.iter().all(Option::is_some)
    }

    /// The causes that there are, with their packets.
    pub fn causes(&self) -> impl Iterator<Item = (&'static Risk, u64)> {
        let counted = RISK_TABLE.iter().zip(self.0);
        counted.filter_map(|(risk, packets)| Some((risk, packets.filter(|packets| *packets > 0)?)))
    }

    /// In words; `None` where there are none.
    pub fn words(&self) -> Option<String> {
        let causes = self.causes().map(|(risk, packets)| format!("{packets} {}", risk.name));
        let causes = causes.collect::<Vec<_>>().join(", ");
        let packets = match self.packets() {
            0 => return None,
            1 => "1 packet".to_owned(),
            n => format!("{n} packets"),
        };
        Some(format!("{packets} dropped with nothing else in flight ({causes})"))
    }

    /// What was counted since `earlier`; zero where a limit has been put on anew meanwhile.
    pub fn since(&self, earlier: &AtRisk) -> AtRisk {
        let minus = |now: u64, then: Option<u64>| now.saturating_sub(then.unwrap_or(0));
        AtRisk(std::array::from_fn(|i| self.0[i].map(|now| minus(now, earlier.0[i]))))
    }
}

impl Serialize for AtRisk {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(intf::RISKS))?;
        for (risk, packets) in RISK_TABLE.iter().zip(self.0) {
            map.serialize_entry(&format!("{}_packets", risk.name), &packets)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTED: [u64; intf::RISKS] = [3, 2, 0];

    #[test]
    fn nobody_knows_what_a_sender_elsewhere_has_in_flight() {
        let egress = AtRisk::of(Direction::Egress, COUNTED);
        assert_eq!((egress.packets(), egress.is_whole()), (5, true));
        let ingress = AtRisk::of(Direction::Ingress, COUNTED);
        assert_eq!((ingress.packets(), ingress.is_whole()), (3, false));
        let json = serde_json::to_string(&ingress).unwrap();
        insta::assert_snapshot!(json, @r#"{"connecting_packets":3,"credit_used_packets":null,"not_paced_packets":null}"#);
    }

    #[test]
    fn only_causes_that_there_are_are_named() {
        let now = AtRisk::of(Direction::Egress, COUNTED);
        let names =
            |at_risk: &AtRisk| at_risk.causes().map(|(r, n)| (r.name, n)).collect::<Vec<_>>();
        assert_eq!(names(&now), [("connecting", 3), ("credit_used", 2)]);
        let earlier = AtRisk([Some(3), Some(1), Some(7)]);
        assert_eq!(names(&now.since(&earlier)), [("credit_used", 1)], "put on anew");
    }
}
