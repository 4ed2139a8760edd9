//! One limit of a group: from its samples to what its flows want, and from there to its rate.

use tidegate_core::{
    Nanos, Rate,
    fleet::{
        average::{Average, TAU},
        flows::FlowRates,
        level::Want,
    },
    units::NANOS_PER_SEC,
    water_fill::{GREEDY_PERCENT, HEADROOM_PERCENT},
};
use tidegate_host::fleet::LEAST_BIT_S;
use tidegate_sys::limit::Lease;

use super::backend::{Done, GroupBackend, Place};

/// Over which time the rates of flows are averaged: what a window of TCP does in a few round trips should not
/// move capacity.
const FLOW_TAU: Nanos = Nanos(700_000_000);
/// The same of how many they are, where a limit counts them: of few periods of a tenth of a second, as these
/// are exact.
const COUNT_TAU: Nanos = Nanos(200_000_000);
/// A limit that holds senders back sees arrivals at its rate and no more: from this part of it demand counts
/// as limited.
pub(super) const LIMITED_FROM: f64 = 0.95;
/// Who was limited so lately takes all it gets: averages need as long to see what a new rate lets through.
const LIMITED_LATELY: Nanos = Nanos(NANOS_PER_SEC);
/// What arrived at a limit that cannot be read any more counts for so long.
const WANTED_LATELY: Nanos = Nanos(3 * NANOS_PER_SEC);
/// The end of a lease is set anew when that moves it by such a part of what is left.
const LEASE_PARTS: u64 = 8;
/// A paced sender learns of another rate with its own packets, and at most doubles each time: from a low rate
/// that takes so many packets' time, and is counted for no longer than this.
const HEARD_BITS: u64 = 4 * 1_514 * 8;
const HEARD_MOST: Nanos = Nanos(5 * NANOS_PER_SEC);
/// Others may change limits for so long before that is said: an `apply` of many takes its time.
const BUSY_REPORTED: Nanos = Nanos(10 * NANOS_PER_SEC);
/// The least rate that every scheme takes; a limit cannot be set to none.
pub(super) const LEAST_RATE: Rate = match Rate::from_bit_s(LEAST_BIT_S) {
    Some(rate) => rate,
    None => unreachable!(),
};
/// A limit that refused a rate is asked again after this: each try may wait for a lock.
const RETRY: Nanos = Nanos(500_000_000);
/// ... and one that somebody else was changing after this.
const RETRY_BUSY: Nanos = Nanos(50_000_000);

/// The most that may be in force of rates that could not be set. An attempt counts for two leases at most:
/// those that come while a greater rate lasts are taken together, and follow when that has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Doubt {
    most: Attempt,
    later: Option<Attempt>,
    /// The greatest rate without an end, or to which one falls.
    then: Rate,
}

/// A rate that may be in force until then.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    rate: Rate,
    until: Nanos,
}

impl Attempt {
    fn with(self, other: Attempt) -> Attempt {
        Attempt { rate: self.rate.max(other.rate), until: self.until.max(other.until) }
    }
}

impl Doubt {
    /// After an attempt to set this rate.
    fn after(earlier: Option<Doubt>, now: Nanos, rate: Rate, lease: Option<Lease>) -> Doubt {
        let until = lease.map_or(Nanos(u64::MAX), |lease| lease.until);
        let (new, then) = (Attempt { rate, until }, lease.map_or(rate, |lease| lease.then));
        let Some(Doubt { most, later, then: before }) = earlier else {
            return Doubt { most: new, later: None, then };
        };
        let then = then.max(before);
        let later = later.map_or(new, |later| later.with(new));
        if most.until <= now {
            return Doubt { most: later, later: None, then };
        }
        match rate >= most.rate {
            true => Doubt { most: most.with(later), later: None, then },
            false => Doubt { most, later: Some(later), then },
        }
    }

    /// What may be in force now or later, in bit/s.
    fn bit_s(self, now: Nanos) -> u64 {
        let lasts = [Some(self.most), self.later].into_iter().flatten();
        let lasts = lasts.filter(|one| now < one.until).map(|one| one.rate);
        lasts.fold(self.then, Rate::max).bit_s()
    }
}

/// One limit of the group.
#[derive(Debug)]
pub(super) struct Gauge {
    pub(super) place: Place,
    /// The most it may have, as the file says.
    pub(super) ceiling: Rate,
    pub(super) measured: Option<Nanos>,
    pub(super) demand: Average,
    flows: FlowRates,
    /// How many take all they get, where the limit counts them.
    count: Average,
    /// The same where the limit says what a flow has. Both are of one sample: with a rate that was set since,
    /// the count would follow the rate, and the rate the count.
    flow_rate: Average,
    pub(super) flow_bit_s: f64,
    found: Option<Rate>,
    /// When it last had all that its rate let through, or was slowed down.
    limited: Option<Nanos>,
    /// How long its flows needed then to hear of another rate.
    hears: Nanos,
    pub(super) applied: Option<Rate>,
    /// Until when the limit has it, as set here; and whether it has an end at all, whoever set that.
    lease: Option<Lease>,
    lent: bool,
    /// From then on nothing is in force any more that an earlier life of the node lent.
    lent_until: Nanos,
    /// The least rate since the last sample.
    least: Option<Rate>,
    /// What could not be set, and may be in force all the same.
    pub(super) doubt: Option<Doubt>,
    /// When a limit that refused is asked again.
    retry: Option<Nanos>,
    pub(super) gone: bool,
    /// Nothing is dropped at random any more.
    pub(super) drops_none: bool,
    /// The probability of drops that was set since the last sample.
    pub(super) dropping: Option<f64>,
    pub(super) error: Option<String>,
    /// Since when its rate could not be set as others change limits.
    busy: Option<Nanos>,
}

impl Gauge {
    /// One that nothing is known of yet. What an earlier life of the node lent it ends by `lent_until`.
    pub(super) fn new(now: Nanos, place: Place, ceiling: Rate, lent_until: Nanos) -> Gauge {
        Gauge {
            place,
            ceiling,
            measured: None,
            demand: Average::new(TAU),
            flows: FlowRates::new(now, FLOW_TAU),
            count: Average::new(COUNT_TAU),
            flow_rate: Average::new(COUNT_TAU),
            flow_bit_s: 0.0,
            found: None,
            limited: None,
            hears: Nanos(0),
            applied: None,
            lease: None,
            lent: false,
            lent_until,
            least: None,
            doubt: None,
            retry: None,
            gone: false,
            drops_none: false,
            dropping: None,
            error: None,
            busy: None,
        }
    }

    /// Takes a sample; the rate that was found, in bit/s.
    pub(super) fn measure<G: GroupBackend>(&mut self, now: Nanos, backend: &mut G) -> u64 {
        let sample = match backend.measure(now, &self.place) {
            Ok(Some(sample)) => sample,
            Ok(None) => {
                (self.gone, self.applied, self.lease, self.error) = (true, None, None, None);
                (self.doubt, self.retry) = (None, None);
                self.drops_none = false;
                self.demand.clear();
                return 0;
            }
            Err(e) => {
                self.error = Some(e.to_string());
                if self.measured.is_some_and(|at| now.0.saturating_sub(at.0) >= WANTED_LATELY.0) {
                    self.demand.clear();
                }
                return self.applied.map_or(0, Rate::bit_s);
            }
        };
        if self.gone {
            (self.gone, self.measured) = (false, None);
        }
        if self.retry.is_none() {
            self.error = None;
        }
        self.doubt = None;
        // Somebody else may have set it meanwhile, or have put the limit on anew.
        self.dropping = None;
        self.applied = Rate::from_bit_s(sample.rate_bit_s);
        self.found = self.applied;
        self.lease = self.lease.filter(|lease| sample.until == Some(lease.until));
        self.lent = sample.until.is_some();
        self.lent_until = sample.until.unwrap_or(self.lent_until);
        let least = std::mem::replace(&mut self.least, self.applied).min(self.applied);
        let elapsed = self.measured.map(|at| Nanos(now.0.saturating_sub(at.0)));
        self.measured = Some(now);
        let Some(elapsed) = elapsed.filter(|elapsed| elapsed.0 > 0) else {
            return sample.rate_bit_s;
        };
        let bits = sample.arrived_bytes as f64 * 8.0;
        let bit_s = bits * NANOS_PER_SEC as f64 / elapsed.0 as f64;
        self.demand.add(bit_s, elapsed);
        let full = least.is_some_and(|rate| bit_s >= rate.bit_s() as f64 * LIMITED_FROM);
        if full || sample.slowed_bytes > 0 {
            self.limited = Some(now);
            let hears =
                |bit_s: u64| Nanos(HEARD_BITS * NANOS_PER_SEC / bit_s.max(1)).min(HEARD_MOST);
            self.hears = sample.flow_bit_s.map_or(Nanos(0), hears);
        }
        self.flows.on_interval(now, sample.flows);
        match sample.flow_count.and_then(|sums| sums.flows()) {
            Some(flows) => drop(self.count.add(flows, elapsed)),
            None => self.count.clear(),
        }
        match sample.flow_bit_s.filter(|bit_s| *bit_s > 0) {
            Some(flow) => drop(self.flow_rate.add((bit_s / flow as f64).max(1.0), elapsed)),
            None => self.flow_rate.clear(),
        }
        let rate = sample.rate_bit_s as f64;
        let used = if self.is_limited(now) { rate } else { self.demand.value().min(rate) };
        self.flow_bit_s = match (self.count.value(), sample.flow_bit_s) {
            (count, _) if count > 0.0 => used / count,
            (_, Some(bit_s)) => bit_s as f64,
            (_, None) => self.flows.typical_bit_s(),
        };
        sample.rate_bit_s
    }

    /// The rate of a limit that counts flows by what is acknowledged to them, if they took all of it lately.
    pub(super) fn held_bit_s(&self, now: Nanos) -> f64 {
        let held = self.count.value() > 0.0 && self.is_limited(now);
        self.applied.filter(|_| held).map_or(0.0, |rate| rate.bit_s() as f64)
    }

    /// Whether it had all that its rate let through, so lately that its averages still rise.
    fn is_limited(&self, now: Nanos) -> bool {
        let lately = |at: Nanos| now.0.saturating_sub(at.0) < LIMITED_LATELY.0 + self.hears.0;
        self.limited.is_some_and(lately)
    }

    /// What its flows want.
    pub(super) fn want(&self, now: Nanos) -> Want {
        let demand = self.demand.value();
        if demand < 1.0 {
            return Want::default();
        }
        let rate = self.applied.map_or(f64::MAX, |rate| rate.bit_s() as f64);
        let greedy = self.is_limited(now) || demand * 100.0 >= rate * GREEDY_PERCENT as f64;
        let found = self.found.map_or(f64::MAX, |rate| rate.bit_s() as f64);
        // A flow that has just come has no rate from which the demand could be computed.
        let flow = self.flow_bit_s;
        let flows = match self.count.value() {
            count if count > 0.0 => count.max(1.0),
            _ if self.flow_rate.value() > 0.0 => self.flow_rate.value(),
            _ if flow > 0.0 => (demand.min(found) / flow).max(1.0),
            _ => 1.0,
        };
        let demand_bit_s = if greedy {
            u64::MAX
        } else {
            (demand * (100 + HEADROOM_PERCENT) as f64 / 100.0) as u64
        };
        Want { flows: flows as f32, demand_bit_s }
    }

    /// Whether the limit can be asked to change its rate now.
    pub(super) fn is_open(&self, now: Nanos) -> bool {
        !self.gone && self.retry.is_none_or(|at| now >= at)
    }

    /// The rate that is known to be in force; none if that was never read, is in doubt, or may have ended.
    pub(super) fn in_force(&self, now: Nanos) -> Option<Rate> {
        let is_known = self.doubt.is_none() && self.lent == self.lease.is_some();
        let ended = self.lease.filter(|lease| lease.until <= now).map(|lease| lease.then);
        ended.or(self.applied).filter(|_| is_known)
    }

    /// The rates that a group may have given to the limit.
    pub(super) fn lent_rates(&self) -> [Option<Rate>; 3] {
        let doubt = self.doubt.map(|doubt| doubt.most.rate);
        [self.applied, doubt, self.lease.map(|lease| lease.then)]
    }

    /// Whether the limit, as it was read last, has one of these rates, or one that ends: nobody else lends.
    pub(super) fn is_of(&self, lent: &[Option<Rate>]) -> bool {
        self.lent || self.applied.is_none() || lent.contains(&self.applied)
    }

    /// What is in force was never read, or is what an earlier life lent.
    fn is_unknown(&self) -> bool {
        !self.gone && self.lease.is_none() && (self.applied.is_none() || self.lent)
    }

    /// Whether nothing is known of the limit but that what an earlier life lent it has ended: it passes what
    /// is the host's in any case, or a part of that.
    pub(super) fn has_ended(&self, now: Nanos) -> bool {
        self.is_unknown() && now >= self.lent_until
    }

    /// What the limit passes at most before `until`, in bit/s: what was set, what it falls back to if that
    /// may be sooner, and what may be in force though it could not be set. A limit that is gone comes back
    /// with `then`. One that was never read has what the file lets it have, as long as that may be lent, and
    /// at most `own` from then on.
    pub(super) fn claim_bit_s(
        &self,
        now: Nanos,
        until: Option<Nanos>,
        then: Rate,
        own: u64,
    ) -> u64 {
        if self.gone {
            return then.bit_s();
        }
        let rate = self.applied.unwrap_or(self.ceiling).bit_s();
        let rate = match self.lease {
            Some(lease) if lease.until <= now => lease.then.bit_s(),
            Some(lease) if until.is_none_or(|until| lease.until < until) => {
                rate.max(lease.then.bit_s())
            }
            None if self.has_ended(now) => own,
            None if self.lent => rate.max(own),
            _ => rate,
        };
        self.doubt.map_or(rate, |doubt| rate.max(doubt.bit_s(now)))
    }

    /// What a limit that cannot be set now passes once its lease has ended, in bit/s; none if it can be set.
    /// One that is gone comes back with `then`, and one of which nothing is known has `own` at most.
    pub(super) fn keeps_bit_s(&self, then: Rate, own: u64) -> Option<u64> {
        let keeps = match self.lease {
            _ if self.gone => then.bit_s(),
            Some(lease) => lease.then.bit_s(),
            None if self.is_unknown() => own,
            None => self.applied.map_or(own, Rate::bit_s),
        };
        let end = Nanos(u64::MAX);
        let keeps = self.doubt.map_or(keeps, |doubt| keeps.max(doubt.bit_s(end)));
        (self.gone || self.retry.is_some()).then_some(keeps)
    }

    /// Whether the limit has this rate for about so long: an end that is a little early does no harm. Where
    /// it rises at the end, as an idle limit does, one that is late does none.
    fn has(&self, now: Nanos, rate: Rate, lease: Option<Lease>) -> bool {
        let lent = match (self.lease, lease) {
            (None, None) => !self.lent,
            (Some(is), Some(to)) if rate < to.then => is.then == to.then && is.until >= to.until,
            (Some(is), Some(to)) => {
                let (early, left) =
                    (to.until.0.checked_sub(is.until.0), to.until.0.saturating_sub(now.0));
                is.then == to.then && early.is_some_and(|early| early <= left / LEASE_PARTS)
            }
            _ => false,
        };
        lent && self.applied == Some(rate) && self.doubt.is_none()
    }

    /// Sets the rate. False if the limit has another: it refused, or is gone.
    pub(super) fn apply<G: GroupBackend>(
        &mut self,
        now: Nanos,
        backend: &mut G,
        rate: Rate,
        lease: Option<Lease>,
    ) -> bool {
        if self.has(now, rate, lease) {
            return true;
        }
        // A limit that rises when its lease ends does so after those that fall.
        let lease = lease.map(|lease| match rate < lease.then {
            true => {
                let later = lease.until.0.saturating_sub(now.0) / LEASE_PARTS;
                Lease { until: Nanos(lease.until.0.saturating_add(later)), ..lease }
            }
            false => lease,
        });
        let done = backend.set_rate(&self.place, rate, lease);
        if !matches!(done, Ok(Done::Busy)) {
            self.busy = None;
        }
        let refused = match done {
            Ok(Done::Set) => {
                (self.applied, self.gone, self.error) = (Some(rate), false, None);
                (self.lease, self.lent) = (lease, lease.is_some());
                (self.doubt, self.retry) = (None, None);
                self.least = self.least.min(self.applied);
                return true;
            }
            Ok(Done::Gone) => {
                (self.applied, self.lease, self.gone) = (None, None, true);
                (self.doubt, self.retry) = (None, None);
                return false;
            }
            Ok(Done::Busy) => {
                let since = *self.busy.get_or_insert(now);
                if now.0.saturating_sub(since.0) >= BUSY_REPORTED.0 {
                    let s = BUSY_REPORTED.0 / NANOS_PER_SEC;
                    self.error =
                        Some(format!("another tidegate has been changing limits for {s} s"));
                }
                self.retry = Some(Nanos(now.0.saturating_add(RETRY_BUSY.0)));
                return false;
            }
            Ok(Done::Cannot) => "its rate cannot be set".to_owned(),
            Err(e) => e.to_string(),
        };
        self.doubt = Some(Doubt::after(self.doubt, now, rate, lease));
        self.retry = Some(Nanos(now.0.saturating_add(RETRY.0)));
        self.error = Some(refused);
        false
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::{Direction, flow_count::Sums};

    use super::*;
    use crate::backend::Sample;

    /// A limit whose next samples are given.
    struct Given(Sample);

    /// A limit of which another process keeps everybody out.
    struct Locked;

    impl GroupBackend for Locked {
        type Error = std::convert::Infallible;

        fn measure(&mut self, _: Nanos, _: &Place) -> Result<Option<Sample>, Self::Error> {
            Ok(Some(Sample { rate_bit_s: RATE, ..Sample::default() }))
        }

        fn set_rate(&mut self, _: &Place, _: Rate, _: Option<Lease>) -> Result<Done, Self::Error> {
            Ok(Done::Busy)
        }

        fn set_drop(&mut self, _: &Place, _: f64) -> Result<Done, Self::Error> {
            Ok(Done::Cannot)
        }

        fn leave(&mut self, _: &Place) -> Result<(), Self::Error> {
            Ok(())
        }
    }

    impl GroupBackend for Given {
        type Error = std::convert::Infallible;

        fn measure(&mut self, _: Nanos, _: &Place) -> Result<Option<Sample>, Self::Error> {
            Ok(Some(self.0.clone()))
        }

        fn set_rate(&mut self, _: &Place, _: Rate, _: Option<Lease>) -> Result<Done, Self::Error> {
            Ok(Done::Set)
        }

        fn set_drop(&mut self, _: &Place, _: f64) -> Result<Done, Self::Error> {
            Ok(Done::Cannot)
        }

        fn leave(&mut self, _: &Place) -> Result<(), Self::Error> {
            Ok(())
        }
    }

    const RATE: u64 = 10_000_000;
    const INTERVAL: u64 = 100_000_000;

    fn gauge() -> Gauge {
        let place = Place { limit: "a".to_owned(), direction: Direction::Egress };
        Gauge::new(Nanos(0), place, Rate::from_bit_s(RATE).unwrap(), Nanos(0))
    }

    /// Of so many flows that use a part of the rate, in per cent.
    fn sample(flows: u64, percent: u64) -> Sample {
        let part = 65_536 * percent / 100 / flows;
        let sums = |power| flows * part.pow(power);
        Sample {
            arrived_bytes: RATE / 8 / 10 * percent / 100,
            flow_count: Some(Sums { parts: sums(1), squares: sums(2), cubes: sums(3), flows }),
            rate_bit_s: RATE,
            ..Sample::default()
        }
    }

    #[test]
    fn a_gate_that_is_busy_keeps_its_rate_and_is_reported_when_that_lasts() {
        let mut gauge = gauge();
        let rate = Rate::from_bit_s(RATE / 2).unwrap();
        let try_at = |gauge: &mut Gauge, now: u64| {
            let now = Nanos(now);
            gauge.measure(now, &mut Locked);
            assert!(!gauge.apply(now, &mut Locked, rate, None), "nothing may rely on it");
            assert_eq!(gauge.applied, Rate::from_bit_s(RATE));
            gauge.error.clone()
        };
        for at in (INTERVAL..BUSY_REPORTED.0).step_by(INTERVAL as usize) {
            assert_eq!(try_at(&mut gauge, at), None);
        }
        let why = try_at(&mut gauge, INTERVAL + BUSY_REPORTED.0).unwrap();
        assert!(why.contains("has been changing limits for 10 s"), "{why}");
        // Once it could be set, it counts anew.
        let mut given = Given(sample(1, 100));
        assert!(gauge.apply(Nanos(2 * BUSY_REPORTED.0), &mut given, rate, None));
        assert_eq!(try_at(&mut gauge, 3 * BUSY_REPORTED.0), None);
    }

    #[test]
    fn flows_that_a_gate_counts_are_as_many_as_it_counts() {
        let mut gauge = gauge();
        let mut now = Nanos(0);
        let mut after = |gauge: &mut Gauge, given: Sample, intervals: u64| {
            for _ in 0..intervals {
                now.0 += INTERVAL;
                gauge.measure(now, &mut Given(given.clone()));
            }
            (gauge.want(now), gauge.held_bit_s(now))
        };
        after(&mut gauge, sample(3, 100), 1);
        let (want, held) = after(&mut gauge, sample(3, 100), 1);
        assert!((want.flows - 3.0).abs() < 0.01, "the first count is right: {want:?}");
        assert_eq!((want.demand_bit_s, held), (u64::MAX, RATE as f64));
        let (want, _) = after(&mut gauge, sample(7, 100), 10);
        assert!((want.flows - 7.0).abs() < 0.1, "soon: {want:?}");
        assert!((gauge.flow_bit_s / (RATE as f64 / 7.0) - 1.0).abs() < 0.02);
        // They leave half of it, and it is some time until that is believed.
        let (want, held) = after(&mut gauge, sample(7, 50), 30);
        assert!((RATE / 2..RATE * 6 / 10).contains(&want.demand_bit_s), "{want:?}");
        assert_eq!(held, 0.0);
        assert!((want.flows - 7.0).abs() < 0.1, "{want:?}");
        // One that tells no more counts by what arrives.
        let (want, _) = after(&mut gauge, Sample { flow_count: None, ..sample(7, 50) }, 10);
        assert_eq!(want.flows, 1.0);
    }
}
