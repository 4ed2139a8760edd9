//! What a software NIC does, as data that serializes: keys in snake case that carry their unit, counters from
//! the tables of [`tidegate_nic`].

use serde::{Serialize, Serializer, ser::SerializeMap};
use tidegate_core::Nanos;
use tidegate_nic::{
    backlog::BacklogCounters,
    lane::{LaneCounters, LaneLoad},
    port::PortCounters,
    relay::{End, EndReport, ThreadReport},
    waiter::WaiterCounters,
};

use super::NicSpec;

/// Counters by their names.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Counts(Vec<(&'static str, u64)>);

impl Counts {
    /// One of them; 0 if there is none of this name.
    pub fn of(&self, name: &str) -> u64 {
        self.0.iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value)
    }

    fn add(&mut self, values: impl Iterator<Item = (&'static str, u64)>) {
        for (name, value) in values {
            match self.0.iter_mut().find(|(known, _)| *known == name) {
                Some((_, sum)) => *sum += value,
                None => self.0.push((name, value)),
            }
        }
    }

    /// What was counted since `earlier`; zero where a count began anew meanwhile.
    fn since(&self, earlier: &Counts) -> Counts {
        let counts = self.0.iter();
        Counts(counts.map(|(name, n)| (*name, n.saturating_sub(earlier.of(name)))).collect())
    }
}

impl Serialize for Counts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// All counters at one moment, summed over the threads.
#[derive(Debug, Default, Clone)]
pub struct Reading {
    at: Nanos,
    ends: [EndReading; 2],
    waiter: Counts,
}

#[derive(Debug, Default, Clone)]
struct EndReading {
    open: usize,
    port: Counts,
    lane: Counts,
    load: LaneLoad,
    waited_max: Nanos,
    lateness_max: Nanos,
}

impl Reading {
    /// Sums what the threads report.
    pub fn of(at: Nanos, reports: &[ThreadReport]) -> Reading {
        let mut reading = Reading { at, ..Reading::default() };
        for report in reports {
            for (sum, end) in reading.ends.iter_mut().zip(&report.ends) {
                sum.add(end);
            }
            let waiter = WaiterCounters::TABLE.iter();
            // Averages and maxima do not add up.
            let sums = waiter.filter(|counter| !counter.name.contains("lateness"));
            reading.waiter.add(sums.map(|c| (c.name, (c.value)(&report.waiter))));
        }
        reading
    }
}

impl Reading {
    /// The longest waits that this reading knows of, by end, or those of `others` where they are longer:
    /// a thread tells each only once.
    pub(super) fn raise_waits(&mut self, others: [Nanos; 2]) -> [Nanos; 2] {
        for (end, other) in self.ends.iter_mut().zip(others) {
            end.waited_max = end.waited_max.max(other);
        }
        self.ends.each_ref().map(|end| end.waited_max)
    }
}

impl EndReading {
    fn add(&mut self, end: &EndReport) {
        self.open += end.open;
        self.port.add(PortCounters::TABLE.iter().map(|c| (c.name, (c.value)(&end.port))));
        self.lane.add(LaneCounters::TABLE.iter().map(|c| (c.name, (c.value)(&end.lane))));
        self.lane.add(BacklogCounters::TABLE.iter().map(|c| (c.name, (c.value)(&end.backlog))));
        let shaper =
            [("shaped_packets", end.shaper.departed), ("on_time_packets", end.shaper.on_time)];
        self.lane.add(shaper.into_iter());
        self.load.flows += end.load.flows;
        self.load.waiting_packets += end.load.waiting_packets;
        self.load.waiting_bytes += end.load.waiting_bytes;
        self.load.shaper_packets += end.load.shaper_packets;
        self.waited_max = self.waited_max.max(end.waited_max);
        self.lateness_max = self.lateness_max.max(end.shaper.lateness_max);
    }
}

/// What a software NIC did in an interval.
#[derive(Debug, Clone, Serialize)]
pub struct NicSample {
    /// When the interval ended: nanoseconds since 1970.
    pub unix_ns: u64,
    pub interval_ns: u64,
    pub nic: String,
    /// From the first port to the second, and back.
    pub directions: [DirectionSample; 2],
    pub ports: [PortSample; 2],
    /// How its threads waited, in the interval.
    pub threads: Counts,
}

/// What went from one port to the other.
#[derive(Debug, Clone, Serialize)]
pub struct DirectionSample {
    /// The device that it came from.
    pub from: String,
    /// The device that it went to.
    pub to: String,
    pub limits: Vec<String>,
    /// The least of these limits.
    pub rate_bit_s: Option<u64>,
    /// What passed, as a rate on the wire.
    pub used_bit_s: u64,
    /// How long a packet waited on average.
    pub wait_ns_average: u64,
    /// How long one waited at most.
    pub wait_ns_max: u64,
    /// The most that a packet left after its time, since the start.
    pub lateness_ns_max: u64,
    /// Flows with packets here, at the end of the interval.
    pub flows: usize,
    /// Packets that wait in front of the shaper, at the end of the interval.
    pub waiting_packets: usize,
    pub waiting_bytes: u64,
    /// Packets in the shaper, at the end of the interval.
    pub shaper_packets: usize,
    /// In the interval.
    #[serde(flatten)]
    pub counters: Counts,
}

/// What happened at a port.
#[derive(Debug, Clone, Serialize)]
pub struct PortSample {
    /// As the user wrote it.
    pub port: String,
    /// Whether it is open, with all its queues.
    pub up: bool,
    /// In the interval.
    #[serde(flatten)]
    pub counters: Counts,
}

impl NicSample {
    /// What `spec` did between two readings; `queues` is how many a port has.
    pub fn between(
        spec: &NicSpec,
        queues: usize,
        (earlier, now): (&Reading, &Reading),
        unix_ns: u64,
    ) -> NicSample {
        let interval_ns = now.at.0.saturating_sub(earlier.at.0);
        let direction = |to: End| {
            let (then, is) = (&earlier.ends[to as usize], &now.ends[to as usize]);
            let counters = is.lane.since(&then.lane);
            let bits = u128::from(counters.of("passed_bytes")) * 8 * 1_000_000_000;
            let used = bits / u128::from(interval_ns.max(1));
            DirectionSample {
                from: spec.ports[to.other() as usize].device.clone(),
                to: spec.ports[to as usize].device.clone(),
                limits: spec.held_to(to).map(|(limit, ..)| limit.name.clone()).collect(),
                rate_bit_s: spec.lane_limit(to).map(|limit| limit.rate.bit_s()),
                used_bit_s: u64::try_from(used).unwrap_or(u64::MAX),
                wait_ns_average: counters.of("waited_ns") / counters.of("passed_packets").max(1),
                wait_ns_max: is.waited_max.0,
                lateness_ns_max: is.lateness_max.0,
                flows: is.load.flows,
                waiting_packets: is.load.waiting_packets,
                waiting_bytes: is.load.waiting_bytes,
                shaper_packets: is.load.shaper_packets,
                counters,
            }
        };
        let port = |end: End| {
            let (then, is) = (&earlier.ends[end as usize], &now.ends[end as usize]);
            PortSample {
                port: spec.ports[end as usize].to_string(),
                up: is.open == queues,
                counters: is.port.since(&then.port),
            }
        };
        NicSample {
            unix_ns,
            interval_ns,
            nic: spec.name.clone(),
            directions: [direction(End::B), direction(End::A)],
            ports: End::BOTH.map(port),
            threads: now.waiter.since(&earlier.waiter),
        }
    }
}

impl DirectionSample {
    /// Packets dropped, for whatever reason.
    pub fn dropped(&self) -> u64 {
        let names = ["drop_early_packets", "drop_full_packets", "drop_gone_packets"];
        names.iter().map(|name| self.counters.of(name)).sum()
    }
}
