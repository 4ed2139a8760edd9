//! What is in force and what it does, as data that serializes: keys in snake case that carry their unit.
//!
//! The counters' names come from the one table of outcomes. Backlogs are relative to now, so a reading is
//! only good for the moment it was taken.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer, ser::SerializeMap};
use tidegate_core::{
    Direction, Rate, Scheme, Scope,
    class::MAX_DEPTH,
    fair_share::{ONE, TARGET},
    police::{COLOUR_NAMES, Policy},
    prefixes::Prefixes,
    virtual_queue::MAX_SPAN,
};
use tidegate_sys::{
    clock::monotonic_ns,
    intf::{self, OUTCOME_TABLE},
    limit::{Colours, FairShare, LimitError, LimitMaps, LimitOptions, Reading},
    store::{Before, Listing, PinnedLimit, Unreadable},
    xdp::XdpMode,
};

use crate::{
    host,
    plan::{Present, State},
    risk::AtRisk,
    settings::{self, fields::Shown},
    waiting::Queues,
};

/// One limit.
#[derive(Debug, Clone, Serialize)]
pub struct LimitStatus {
    pub name: String,
    /// Its cgroup, device or port, or where it was: a key of that name.
    #[serde(flatten, serialize_with = "scope")]
    pub scope: Scope,
    /// With a selector: its cgroups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub members: Option<Vec<String>>,
    /// The cgroups that its selector matches and that are not in it: nobody had them join.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outside: Vec<String>,
    /// Whether it is enforced.
    pub state: State,
    /// It must be in force: that its cgroup or device is away is an alarm.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub required: bool,
    /// The name of the limit that it is inside of.
    pub parent: Option<String>,
    /// What it has of that at least.
    pub guarantee_bit_s: Option<u64>,
    /// Its part of what that does not guarantee.
    pub weight: Option<u32>,
    #[serde(flatten)]
    pub settings: Settings,
    /// From the workload.
    pub egress: Option<DirectionStatus>,
    /// To the workload.
    pub ingress: Option<DirectionStatus>,
    /// A group has lent it a rate, for longer or not.
    #[serde(skip)]
    pub lent: bool,
    /// Whose packets wait in its queues, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Queues>,
    /// Why it cannot be read; nothing of its settings and counters is known then.
    #[serde(rename = "reason", skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Whose programs it runs, if they are those of another build.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_build: Option<String>,
    /// On a device: programs of others that meet packets before the limit does, and may keep them from it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub programs_before: Vec<Before>,
}

/// What a limit sets for both directions: the settings that its scheme has, by their names.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// What the limit does; `None` if it cannot be read.
    pub options: Option<LimitOptions>,
    /// With `police` in XDP: `native` (in the driver) or `generic` (in the stack), if it is on its device.
    pub xdp_mode: Option<&'static str>,
}

impl Settings {
    pub fn scheme(&self) -> &'static str {
        self.options.map_or("unknown", |options| options.scheme.name())
    }

    /// Whether packets on the loopback interface are limited too.
    pub fn loopback(&self) -> bool {
        self.options.is_some_and(|options| options.loopback)
    }

    /// Whether nobody follows the schedule that its rates are of.
    pub fn is_unfollowed(&self) -> bool {
        self.options.is_some_and(|options| options.unfollowed)
    }

    /// With scheme `police`: meter and actions.
    pub fn police(&self) -> Option<Policy> {
        self.options.filter(|o| o.scheme == Scheme::Police).map(|options| options.police)
    }

    /// Whose packets are limited; empty: everybody's.
    pub fn matched(&self) -> Prefixes {
        self.options.map(|options| options.matched).unwrap_or_default()
    }
}

impl From<LimitOptions> for Settings {
    fn from(options: LimitOptions) -> Settings {
        Settings { options: Some(options), xdp_mode: None }
    }
}

impl Serialize for Settings {
    /// A time's key ends in its unit.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if self.options.is_none() {
            map.serialize_entry("scheme", self.scheme())?;
        }
        for (key, shown) in self.options.iter().flat_map(settings::whole) {
            match shown {
                Shown::Time(_) => map.serialize_entry(&format!("{}_ns", key.name), &shown)?,
                _ => map.serialize_entry(key.name, &shown)?,
            }
        }
        if let Some(why) = self.options.and_then(|options| options.chosen) {
            map.serialize_entry("scheme_chosen", &why.to_string())?;
        }
        if self.is_unfollowed() {
            map.serialize_entry("unfollowed", &true)?;
        }
        if let Some(mode) = self.xdp_mode {
            map.serialize_entry("xdp_mode", mode)?;
        }
        map.end()
    }
}

/// One direction of a limit.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct DirectionStatus {
    /// The limit; with a parent the most that it may use, see [`hold_ceilings`].
    pub rate_bit_s: u64,
    /// With a parent: what it may use now; `None` while it is silent.
    pub now_bit_s: Option<u64>,
    /// Of what it may use now, what a flow has, or a weight of 100 among the limits inside; `None` while it
    /// is silent.
    pub share: Option<f64>,
    /// Credit of the idle limit.
    pub burst_ns: u64,
    /// Backlog above which congestion is signalled; `None` where they never are.
    pub mark_ns: Option<u64>,
    /// Backlog above which every packet is dropped; `None` where there is no queue.
    pub drop_ns: Option<u64>,
    /// How far the virtual queue is behind; negative for the credit left.
    pub backlog_ns: i64,
    /// The share of each of its flows, with `pace` and `edt` of egress, with `spring` of both directions; else
    /// `None`.
    pub fair: Option<Fair>,
    /// Dropped packets for which TCP waits for a timer, with `pace` and `nrm`.
    pub at_risk: Option<AtRisk>,
    /// Since the limit was put on.
    #[serde(flatten)]
    pub counters: Counts,
    /// The same by the colour that a policer gave.
    #[serde(serialize_with = "colours", skip_serializing_if = "Option::is_none")]
    pub colours: Option<Colours>,
    /// When packets were last made slower.
    #[serde(flatten)]
    pub last: Ages,
}

/// The fair share of a limit among its flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Fair {
    /// Flows that sent data in the last epoch; 0 if nobody has for [`SILENT_NS`].
    pub flows: u32,
    /// What each of them may send, on the wire.
    pub share_bit_s: u64,
    /// Smoothed round-trip time of the flows; `None` before the first, and with schemes `edt` and `spring`.
    pub rtt_ns: Option<u64>,
    /// Connections that were held before they began, ever, modulo 2^32; 0 with schemes `edt` and `spring`.
    pub held: u32,
}

/// After so long without a packet nobody counts as sending.
pub const SILENT_NS: u64 = 1_000_000_000;

/// How long ago the last packet met each outcome that [slows](intf::Outcome::slows), in the order of
/// [`OUTCOME_TABLE`]; `None` is never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ages(pub [Option<u64>; intf::OUTCOMES]);

/// Packets and bytes by outcome, in the order of [`OUTCOME_TABLE`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub packets: [u64; intf::OUTCOMES],
    /// Bytes on the wire.
    pub bytes: [u64; intf::OUTCOMES],
}

impl Serialize for Counts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2 * intf::OUTCOMES))?;
        for (i, outcome) in OUTCOME_TABLE.iter().enumerate() {
            map.serialize_entry(&format!("{}_packets", outcome.name), &self.packets[i])?;
            map.serialize_entry(&format!("{}_bytes", outcome.name), &self.bytes[i])?;
        }
        map.end()
    }
}

/// Lowers the ceilings of limits inside others to the lowest on the way up, which is the one that holds.
pub fn hold_ceilings<'a>(limits: impl IntoIterator<Item = &'a mut LimitStatus>) {
    let limits: Vec<_> = limits.into_iter().collect();
    let rates =
        |limit: &LimitStatus| [&limit.egress, &limit.ingress].map(|d| d.map(|d| d.rate_bit_s));
    let above: BTreeMap<_, _> = limits
        .iter()
        .map(|limit| (limit.name.clone(), (limit.parent.clone(), rates(limit))))
        .collect();
    for limit in limits {
        let parent = |name: &Option<String>| above.get(name.as_ref()?);
        for (_, rates) in
            std::iter::successors(parent(&limit.parent), |(p, _)| parent(p)).take(MAX_DEPTH)
        {
            for (direction, theirs) in
                [&mut limit.egress, &mut limit.ingress].into_iter().zip(rates)
            {
                if let (Some(direction), Some(theirs)) = (direction, theirs) {
                    direction.rate_bit_s = direction.rate_bit_s.min(*theirs);
                }
            }
        }
    }
}

impl Serialize for Ages {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let slowing = OUTCOME_TABLE.iter().zip(&self.0).filter(|(outcome, _)| outcome.slows());
        let mut map = serializer.serialize_map(None)?;
        for (outcome, age) in slowing {
            map.serialize_entry(&format!("{}_ago_ns", outcome.name), age)?;
        }
        map.end()
    }
}

impl Ages {
    /// How long ago a packet last met one of the outcomes that pass.
    pub fn of(&self, filter: impl Fn(&intf::Outcome) -> bool) -> Option<u64> {
        let chosen = OUTCOME_TABLE.iter().zip(&self.0).filter(|(outcome, _)| filter(outcome));
        chosen.filter_map(|(_, age)| *age).min()
    }
}

impl Fair {
    /// As the kernel's side has it at `now_ns`; `None` where flows have no share.
    fn of(
        limit: &intf::Limit,
        direction: Direction,
        reading: &Reading,
        now_ns: u64,
    ) -> Option<Fair> {
        let fair = reading.fair?;
        let has_share = match limit.scheme() {
            Scheme::Pace | Scheme::Edt => direction == Direction::Egress,
            scheme => scheme == Scheme::Spring,
        };
        // The share of a limit with children is theirs, not its flows'.
        let is_parent = fair.children_until_ns > now_ns;
        if !has_share || is_parent {
            return None;
        }
        let share = if fair.share == 0 { TARGET } else { fair.share.into() };
        let i = intf::index(direction);
        let part = reading.part.filter(|_| limit.class[i].weight != 0);
        let rate = part.map_or(limit.rate_bit_s[i], |part| part.rate_bit_s);
        Some(Fair {
            flows: if is_silent(&fair, now_ns) { 0 } else { fair.flows },
            share_bit_s: (u128::from(rate) * u128::from(share) / u128::from(ONE)) as u64,
            rtt_ns: (fair.rtt_ns > 0).then_some(fair.rtt_ns),
            held: fair.held,
        })
    }
}

/// `"cgroup": "..."`, `"dev": "..."` or `"port": "..."`.
///
/// # Errors
/// The serializer's.
pub fn scope<S: Serializer>(scope: &Scope, serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(1))?;
    map.serialize_entry(scope.kind(), scope.name())?;
    map.end()
}

/// What was coloured since `earlier`.
fn since(now: &Colours, earlier: &Colours) -> Colours {
    let minus = |now: &[u64; intf::COLOURS], then: &[u64; intf::COLOURS]| {
        std::array::from_fn(|i| now[i].saturating_sub(then[i]))
    };
    Colours {
        packets: minus(&now.packets, &earlier.packets),
        bytes: minus(&now.bytes, &earlier.bytes),
    }
}

/// `{"green_packets": ..., "green_bytes": ...}`.
fn colours<S: Serializer>(colours: &Option<Colours>, serializer: S) -> Result<S::Ok, S::Error> {
    let Some(colours) = colours else { return serializer.serialize_none() };
    let mut map = serializer.serialize_map(Some(2 * intf::COLOURS))?;
    for (i, name) in COLOUR_NAMES.iter().enumerate() {
        map.serialize_entry(&format!("{name}_packets"), &colours.packets[i])?;
        map.serialize_entry(&format!("{name}_bytes"), &colours.bytes[i])?;
    }
    map.end()
}

impl Serialize for State {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            State::InForce => "in_force",
            State::NoMembers => "waiting",
            State::ScopeGone => "waiting",
            State::Anew | State::Detached => "detached",
            State::NoFq => "no_fq",
            State::Broken => "broken",
        })
    }
}

impl Counts {
    /// The packets and bytes whose outcome's name passes.
    pub fn of(&self, filter: impl Fn(&intf::Outcome) -> bool) -> (u64, u64) {
        let chosen = OUTCOME_TABLE.iter().enumerate().filter(|(_, outcome)| filter(outcome));
        chosen.fold((0, 0), |(p, b), (i, _)| (p + self.packets[i], b + self.bytes[i]))
    }

    /// What passed and was charged to the limit. The ACKs that `dem` and `spring` change go the other way:
    /// they are counted among `mark` and `slow` without their bytes, and are not charged.
    pub fn charged(&self) -> (u64, u64) {
        let outcomes = OUTCOME_TABLE.iter().zip(self.packets.iter().zip(&self.bytes));
        let charged = outcomes
            .filter(|(outcome, _)| outcome.passed && outcome.name != "exempt")
            .filter(|(_, (_, bytes))| **bytes > 0);
        charged.fold((0, 0), |(p, b), (_, (packets, bytes))| (p + packets, b + bytes))
    }

    /// What was dropped, for whatever reason.
    pub fn dropped(&self) -> (u64, u64) {
        self.of(|outcome| !outcome.passed)
    }

    /// Packets of one outcome.
    pub fn packets_of(&self, name: &str) -> u64 {
        self.of(|outcome| outcome.name == name).0
    }

    /// What was counted since `earlier`; zero where a limit has been put on anew meanwhile.
    pub fn since(&self, earlier: &Counts) -> Counts {
        let minus = |now: &[u64; intf::OUTCOMES], then: &[u64; intf::OUTCOMES]| {
            std::array::from_fn(|i| now[i].saturating_sub(then[i]))
        };
        Counts {
            packets: minus(&self.packets, &earlier.packets),
            bytes: minus(&self.bytes, &earlier.bytes),
        }
    }
}

impl LimitStatus {
    /// Reads a pinned limit.
    ///
    /// # Errors
    /// [`LimitError`] when its maps cannot be read.
    pub fn read(pinned: &PinnedLimit) -> Result<LimitStatus, LimitError> {
        let Present { name, scope, members, state, parent, other_build, .. } =
            host::present(pinned);
        let members = matches!(scope, Scope::Select(_)).then_some(members);
        let mut status = Self::of_maps(name, scope, state, pinned.maps(), &pinned.options())?;
        status.settings.xdp_mode = pinned.xdp_mode.map(XdpMode::name);
        let programs_before = pinned.programs_before();
        Ok(LimitStatus { members, parent, other_build, programs_before, ..status })
    }

    /// The same; one whose maps cannot be read is broken.
    pub fn read_or_broken(pinned: &PinnedLimit) -> LimitStatus {
        Self::read(pinned).unwrap_or_else(|e| {
            let Present { name, scope, parent, .. } = host::present(pinned);
            Self::unknown(name, scope, parent, e.to_string())
        })
    }

    /// What is known of a limit that cannot be read.
    pub fn broken(limit: &Unreadable) -> LimitStatus {
        let scope = limit.scope.clone().unwrap_or_else(|| Scope::Cgroup("?".to_owned()));
        let other_build = limit.intent.as_ref().map(|intent| intent.build.clone());
        let (name, parent) = (limit.name.clone(), limit.parent.clone());
        LimitStatus { other_build, ..Self::unknown(name, scope, parent, limit.why.clone()) }
    }

    /// Every limit of a store, sorted by name.
    pub fn all(listing: &Listing) -> Vec<LimitStatus> {
        let readable = listing.limits.iter().map(Self::read_or_broken);
        let mut all: Vec<_> = readable.chain(listing.unreadable.iter().map(Self::broken)).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn unknown(name: String, scope: Scope, parent: Option<String>, why: String) -> LimitStatus {
        LimitStatus {
            name,
            scope,
            members: None,
            state: State::Broken,
            required: false,
            parent,
            guarantee_bit_s: None,
            weight: None,
            settings: Settings { options: None, xdp_mode: None },
            egress: None,
            ingress: None,
            lent: false,
            waiting: None,
            why: Some(why),
            other_build: None,
            programs_before: Vec::new(),
            outside: Vec::new(),
        }
    }

    /// Reads what a limit does by its maps.
    ///
    /// # Errors
    /// [`LimitError`] when they cannot be read.
    pub fn of_maps(
        name: String,
        scope: Scope,
        state: State,
        maps: &LimitMaps,
        options: &LimitOptions,
    ) -> Result<LimitStatus, LimitError> {
        let limit = maps.limit()?;
        let direction = |direction| match limit.rate(direction) {
            None => Ok(None),
            Some(_) => DirectionStatus::read(&limit, maps, direction).map(Some),
        };
        let class = options.class;
        let guarantee = class.and_then(|class| class.guarantee);
        Ok(LimitStatus {
            name,
            scope,
            members: None,
            state,
            required: false,
            parent: None,
            guarantee_bit_s: guarantee.map(Rate::bit_s),
            weight: class.map(|class| class.weight),
            settings: (*options).into(),
            egress: direction(Direction::Egress)?,
            ingress: direction(Direction::Ingress)?,
            lent: maps.is_lent()?,
            waiting: None,
            why: None,
            other_build: None,
            programs_before: Vec::new(),
            outside: Vec::new(),
        })
    }

    /// The limited directions with their names.
    pub fn directions(&self) -> impl Iterator<Item = (&'static str, &DirectionStatus)> {
        let egress = self.egress.iter().map(|d| ("egress", d));
        egress.chain(self.ingress.iter().map(|d| ("ingress", d)))
    }
}

impl DirectionStatus {
    /// What it may use now: with a parent its present part, else the limit.
    pub fn may_use_bit_s(&self) -> u64 {
        self.now_bit_s.unwrap_or(self.rate_bit_s)
    }

    fn read(
        limit: &intf::Limit,
        maps: &LimitMaps,
        direction: Direction,
    ) -> Result<DirectionStatus, LimitError> {
        let reading = maps.read(direction)?;
        let i = intf::index(direction);
        let conf = limit.queue_now(reading.part, direction);
        let now_ns = monotonic_ns();
        let ago = |at: u64| (at > 0).then(|| now_ns.saturating_sub(at));
        let fair = reading.fair.filter(|fair| !is_silent(fair, now_ns));
        let part = reading.part.filter(|_| limit.class[i].weight != 0 && fair.is_some());
        // What the kernel's HTB has saved up it does not say.
        let scheme = limit.scheme();
        let credit_ns = if scheme.info().has_qdisc { 0 } else { conf.burst_ns };
        let [mark_ns, drop_ns] = thresholds(scheme, conf.mark_ns, conf.drop_ns);
        let share = |share: u32| (f64::from(share) / ONE as f64 * 1e4).round() / 1e4;
        Ok(DirectionStatus {
            rate_bit_s: limit.rate_bit_s[i],
            now_bit_s: part.map(|part| part.rate_bit_s),
            share: fair.filter(|fair| fair.share != 0).map(|fair| share(fair.share)),
            burst_ns: conf.burst_ns,
            mark_ns,
            drop_ns,
            backlog_ns: match scheme {
                // A policer's time is that at which its bucket is full.
                Scheme::Police => {
                    let empty_ns = reading.finish_ns.wrapping_sub(conf.burst_ns);
                    backlog_ns(empty_ns, now_ns, conf.burst_ns)
                }
                _ => backlog_ns(reading.finish_ns, now_ns, credit_ns),
            },
            fair: Fair::of(limit, direction, &reading, now_ns),
            at_risk: reading.at_risk.map(|counted| AtRisk::of(direction, counted)),
            last: Ages(reading.counters.last_ns.map(ago)),
            counters: Counts { packets: reading.counters.packets, bytes: reading.counters.bytes },
            colours: reading.colours,
        })
    }
}

/// The backlogs above which a limit marks and drops: a policer has no queue, and some schemes never mark.
pub fn thresholds(scheme: Scheme, mark_ns: u64, drop_ns: u64) -> [Option<u64>; 2] {
    let has_queue = scheme != Scheme::Police;
    let marks = has_queue && mark_ns < MAX_SPAN.0;
    [marks.then_some(mark_ns), has_queue.then_some(drop_ns)]
}

/// Whether nobody has used the share lately.
fn is_silent(fair: &FairShare, now_ns: u64) -> bool {
    now_ns.saturating_sub(fair.epoch_start_ns) > SILENT_NS
}

/// The distance of the theoretical finish time from now; an idle queue has its whole burst as credit.
fn backlog_ns(finish_ns: u64, now_ns: u64, burst_ns: u64) -> i64 {
    let credit = i64::try_from(burst_ns).unwrap_or(i64::MAX);
    (finish_ns.wrapping_sub(now_ns) as i64).max(-credit)
}

/// What a limit did in an interval.
#[derive(Debug, Clone, Serialize)]
pub struct LimitSample {
    /// When the interval ended: nanoseconds since 1970.
    pub unix_ns: u64,
    pub interval_ns: u64,
    pub name: String,
    /// Its cgroup, device or port, or where it was: a key of that name.
    #[serde(flatten, serialize_with = "scope")]
    pub scope: Scope,
    /// Whether it is enforced.
    pub state: State,
    /// The name of the limit that it is inside of.
    pub parent: Option<String>,
    /// From the workload.
    pub egress: Option<DirectionSample>,
    /// To the workload.
    pub ingress: Option<DirectionSample>,
}

/// What one direction did in an interval.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct DirectionSample {
    /// The limit; with a parent the most that it may use.
    pub rate_bit_s: u64,
    /// With a parent: what it may use at the end of the interval; `None` while it is silent.
    pub now_bit_s: Option<u64>,
    /// Of what it may use now, what a flow has, or a weight of 100 among the limits inside.
    pub share: Option<f64>,
    /// What passed and was charged, as a rate on the wire.
    pub used_bit_s: u64,
    /// At the end of the interval.
    pub backlog_ns: i64,
    /// In the interval.
    pub at_risk: Option<AtRisk>,
    /// In the interval.
    #[serde(flatten)]
    pub counters: Counts,
    /// In the interval, by the colour that a policer gave.
    #[serde(serialize_with = "colours", skip_serializing_if = "Option::is_none")]
    pub colours: Option<Colours>,
}

impl LimitSample {
    /// What a limit did between two readings.
    pub fn between(
        earlier: Option<&LimitStatus>,
        now: &LimitStatus,
        interval_ns: u64,
        unix_ns: u64,
    ) -> LimitSample {
        let direction = |then: Option<&DirectionStatus>, now: Option<&DirectionStatus>| {
            let now = now?;
            // A limit that has come meanwhile counts from its beginning.
            let zero = Counts::default();
            let counters = now.counters.since(then.map_or(&zero, |then| &then.counters));
            let bits = u128::from(counters.charged().1) * 8 * 1_000_000_000;
            let used = bits / u128::from(interval_ns.max(1));
            Some(DirectionSample {
                rate_bit_s: now.rate_bit_s,
                now_bit_s: now.now_bit_s,
                share: now.share,
                used_bit_s: u64::try_from(used).unwrap_or(u64::MAX),
                backlog_ns: now.backlog_ns,
                at_risk: now.at_risk.map(|at_risk| {
                    at_risk.since(&then.and_then(|then| then.at_risk).unwrap_or_default())
                }),
                counters,
                colours: now.colours.map(|colours| {
                    let then = then.and_then(|then| then.colours).unwrap_or_default();
                    since(&colours, &then)
                }),
            })
        };
        LimitSample {
            unix_ns,
            interval_ns,
            name: now.name.clone(),
            scope: now.scope.clone(),
            state: now.state,
            parent: now.parent.clone(),
            egress: direction(earlier.and_then(|e| e.egress.as_ref()), now.egress.as_ref()),
            ingress: direction(earlier.and_then(|e| e.ingress.as_ref()), now.ingress.as_ref()),
        }
    }

    /// The limited directions with their names.
    pub fn directions(&self) -> impl Iterator<Item = (&'static str, &DirectionSample)> {
        let egress = self.egress.iter().map(|d| ("egress", d));
        egress.chain(self.ingress.iter().map(|d| ("ingress", d)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_marks_and_what_has_no_queue_has_no_threshold() {
        assert_eq!(thresholds(Scheme::Police, 0, 0), [None, None]);
        assert_eq!(thresholds(Scheme::Htb, MAX_SPAN.0, 5), [None, Some(5)]);
        assert_eq!(thresholds(Scheme::Pace, 3, 5), [Some(3), Some(5)]);
    }

    fn reading(pass_bytes: u64) -> LimitStatus {
        let mut counters = Counts::default();
        counters.bytes[0] = pass_bytes;
        counters.packets[0] = pass_bytes / 1000;
        let settings = LimitOptions::default().into();
        let egress = DirectionStatus {
            rate_bit_s: 8_000_000,
            now_bit_s: None,
            share: None,
            burst_ns: 1,
            mark_ns: Some(2),
            drop_ns: Some(3),
            backlog_ns: -1,
            fair: None,
            at_risk: None,
            counters,
            colours: None,
            last: Ages::default(),
        };
        LimitStatus {
            members: None,
            name: "a".into(),
            scope: Scope::Cgroup("x".into()),
            state: State::ScopeGone,
            required: false,
            parent: None,
            guarantee_bit_s: None,
            weight: None,
            settings,
            egress: Some(egress),
            ingress: None,
            lent: false,
            waiting: None,
            why: None,
            other_build: None,
            programs_before: Vec::new(),
            outside: Vec::new(),
        }
    }

    #[test]
    fn an_idle_queue_has_its_burst_as_credit_and_no_more() {
        assert_eq!(backlog_ns(0, 1_000_000, 500), -500);
        assert_eq!(backlog_ns(1_000_200, 1_000_000, 500), 200);
        assert_eq!(backlog_ns(999_900, 1_000_000, 500), -100);
    }

    #[test]
    fn rates_are_what_was_counted_over_the_interval() {
        let second = 1_000_000_000;
        let sample = |then: Option<&LimitStatus>, now: &LimitStatus| {
            LimitSample::between(then, now, second, 0).egress.unwrap().used_bit_s
        };
        assert_eq!(sample(Some(&reading(1_000_000)), &reading(2_000_000)), 8_000_000);
        assert_eq!(sample(None, &reading(1_000)), 8_000);
        assert_eq!(sample(Some(&reading(5_000)), &reading(1_000)), 0, "put on anew");
    }

    #[test]
    fn keys_carry_their_unit_and_counters_come_from_the_table() {
        let json = serde_json::to_string(&reading(1000)).unwrap();
        insta::assert_snapshot!(json, @r#"{"name":"a","cgroup":"x","state":"waiting","parent":null,"guarantee_bit_s":null,"weight":null,"scheme":"pace","exempt":[],"loopback":false,"rto_min_ns":20000000,"delack_max_ns":5000000,"egress":{"rate_bit_s":8000000,"now_bit_s":null,"share":null,"burst_ns":1,"mark_ns":2,"drop_ns":3,"backlog_ns":-1,"fair":null,"at_risk":null,"pass_packets":1,"pass_bytes":1000,"mark_packets":0,"mark_bytes":0,"slow_packets":0,"slow_bytes":0,"drop_full_packets":0,"drop_full_bytes":0,"drop_reserve_packets":0,"drop_reserve_bytes":0,"drop_early_packets":0,"drop_early_bytes":0,"exempt_packets":0,"exempt_bytes":0,"mark_ago_ns":null,"slow_ago_ns":null,"drop_full_ago_ns":null,"drop_reserve_ago_ns":null,"drop_early_ago_ns":null},"ingress":null}"#);
    }
}
