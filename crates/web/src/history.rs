//! One hour of each limit, in bounded memory: every second of the last five minutes, and every ten seconds
//! of the hour. A reading goes in with its time; nothing here reads a clock.
//!
//! A point takes 16 bytes, a direction 10.6 kB, a thousand limits in both directions 21 MB.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::snapshot::{Direction, Snapshot};

/// Points of a second each.
pub const FINE_MAX: usize = 300;
/// Points of [`COARSE_S`] seconds each.
pub const COARSE_MAX: usize = 360;
/// Seconds of a coarse point.
pub const COARSE_S: u32 = 10;
/// Limits whose history is kept, those that are gone included.
pub const LIMITS_MAX: usize = 2048;
/// Points of an overview, of a minute each.
pub const MINUTES: usize = 60;
/// A limit that is gone is forgotten after this.
const KEPT_S: u32 = COARSE_MAX as u32 * COARSE_S;

/// What a direction did in an interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// When the interval ended: seconds since 1970.
    pub unix_s: u32,
    /// What passed and was charged.
    pub used_bit_s: f32,
    /// What it might use.
    pub may_use_bit_s: f32,
    /// Packets dropped in a second.
    pub dropped_packets_s: f32,
}

/// The last hour of a direction, oldest point first.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// The last five minutes, by the second.
    pub fine: VecDeque<Point>,
    /// The hour, by ten seconds.
    pub coarse: VecDeque<Point>,
}

/// The last hour of a limit.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LimitHistory {
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub egress: Option<Series>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ingress: Option<Series>,
}

#[derive(Debug, Default)]
struct Track {
    series: Series,
    /// Of the reading before: its time, and bytes and packets since the limit was put on.
    before: Option<(u64, u64, u64)>,
    /// Points since the last coarse one: how many, and their sum.
    sum: (u32, [f32; 3]),
}

/// All limits.
#[derive(Debug, Default)]
pub struct History {
    limits: BTreeMap<String, [Track; 2]>,
}

impl History {
    /// Takes a reading. `unix_ns` names its time; intervals are by `monotonic_ns`.
    pub fn push(&mut self, snapshot: &Snapshot, unix_ns: u64, monotonic_ns: u64) {
        let unix_s = u32::try_from(unix_ns / 1_000_000_000).unwrap_or(u32::MAX);
        for limit in &snapshot.limits {
            if limit.egress.is_none() && limit.ingress.is_none() {
                continue;
            }
            if !self.limits.contains_key(&limit.name) {
                if self.limits.len() >= LIMITS_MAX {
                    continue;
                }
                self.limits.insert(limit.name.clone(), <[Track; 2]>::default());
            }
            let Some(tracks) = self.limits.get_mut(&limit.name) else { continue };
            for (track, direction) in tracks.iter_mut().zip([&limit.egress, &limit.ingress]) {
                match direction {
                    Some(direction) => track.push(direction, unix_s, monotonic_ns),
                    None => track.before = None,
                }
            }
        }
        self.limits.retain(|_, tracks| {
            let newest = tracks.iter().filter_map(|track| track.newest(unix_s)).max();
            newest.is_some_and(|at| at.saturating_add(KEPT_S) >= unix_s)
        });
    }

    /// What a direction used in the last interval.
    pub fn used_bit_s(&self, limit: &str, direction: &str) -> Option<f32> {
        let track = &self.limits.get(limit)?[usize::from(direction == "ingress")];
        // Without a reading before there is no interval.
        track.before?;
        Some(track.series.fine.back()?.used_bit_s)
    }

    pub fn of(&self, limit: &str) -> Option<LimitHistory> {
        let [egress, ingress] = self.limits.get(limit)?;
        let series = |track: &Track| {
            let any = !track.series.fine.is_empty();
            any.then(|| track.series.clone())
        };
        Some(LimitHistory { egress: series(egress), ingress: series(ingress) })
    }

    /// What each direction of each limit used in each minute of the last hour, oldest first; `None` where
    /// nothing is known.
    pub fn minutes(
        &self,
        unix_s: u32,
    ) -> impl Iterator<Item = (&str, [Vec<Option<f32>>; 2])> + use<'_> {
        let of = move |track: &Track| track.series.minutes(unix_s);
        self.limits.iter().map(move |(name, tracks)| (&**name, tracks.each_ref().map(of)))
    }
}

impl Track {
    fn push(&mut self, direction: &Direction, unix_s: u32, monotonic_ns: u64) {
        let now = (monotonic_ns, direction.charged().1, direction.dropped().0);
        let Some(before) = self.before.replace(now) else { return };
        let seconds = monotonic_ns.saturating_sub(before.0) as f64 / 1e9;
        if seconds <= 0.0 {
            return;
        }
        // A limit that was put on anew counts from its beginning.
        let since = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let point = Point {
            unix_s,
            used_bit_s: (since(now.1, before.1) * 8.0) as f32,
            may_use_bit_s: direction.may_use_bit_s() as f32,
            dropped_packets_s: since(now.2, before.2) as f32,
        };
        let last = self.series.fine.back().map_or(unix_s, |last| last.unix_s);
        if last / COARSE_S != unix_s / COARSE_S {
            self.end_coarse(last);
        }
        let Point { used_bit_s, may_use_bit_s, dropped_packets_s, .. } = point;
        self.sum.0 += 1;
        let values = [used_bit_s, may_use_bit_s, dropped_packets_s];
        self.sum.1.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        bounded(&mut self.series.fine, point, FINE_MAX);
    }

    fn end_coarse(&mut self, last_s: u32) {
        let (count, sums) = std::mem::take(&mut self.sum);
        if count > 0 {
            let [used_bit_s, may_use_bit_s, dropped_packets_s] = sums.map(|sum| sum / count as f32);
            let unix_s = (last_s / COARSE_S + 1) * COARSE_S;
            let point = Point { unix_s, used_bit_s, may_use_bit_s, dropped_packets_s };
            bounded(&mut self.series.coarse, point, COARSE_MAX);
        }
    }

    /// The time of the last point; now if there was a reading but no point yet.
    fn newest(&self, unix_s: u32) -> Option<u32> {
        let point = self.series.fine.back().map(|point| point.unix_s);
        point.or_else(|| self.before.map(|_| unix_s))
    }
}

impl Series {
    fn minutes(&self, unix_s: u32) -> Vec<Option<f32>> {
        let mut minutes = vec![(0_u32, 0.0_f32); MINUTES];
        let mut add = |point: &Point, weight: u32| {
            let ago = unix_s.saturating_sub(point.unix_s) as usize / 60;
            if let Some((count, sum)) = MINUTES.checked_sub(ago + 1).map(|at| &mut minutes[at]) {
                *count += weight;
                *sum += point.used_bit_s * weight as f32;
            }
        };
        self.coarse.iter().for_each(|point| add(point, COARSE_S));
        // Seconds that are in no coarse point yet.
        let coarse_to = self.coarse.back().map_or(0, |point| point.unix_s);
        self.fine.iter().filter(|point| point.unix_s >= coarse_to).for_each(|p| add(p, 1));
        let mean = |(count, sum): (u32, f32)| (count > 0).then(|| sum / count as f32);
        minutes.into_iter().map(mean).collect()
    }
}

fn bounded(points: &mut VecDeque<Point>, point: Point, max: usize) {
    if points.len() >= max {
        points.pop_front();
    }
    points.push_back(point);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::tests::snapshot;

    const SECOND: u64 = 1_000_000_000;
    const START_S: u64 = 1_700_000_000;

    /// A host whose limit `batch` has passed so many bytes.
    fn host(snapshot: &mut Snapshot, bytes: u64) -> &Snapshot {
        let egress = snapshot.limits[0].egress.as_mut().unwrap();
        egress.counters.insert("pass_bytes".to_owned(), bytes.into());
        snapshot
    }

    fn after(seconds: u64, bytes_s: u64) -> History {
        let (mut history, mut snapshot) = (History::default(), snapshot());
        for second in 0..=seconds {
            let now = second * SECOND;
            history.push(host(&mut snapshot, second * bytes_s), START_S * SECOND + now, now);
        }
        history
    }

    #[test]
    fn rates_are_what_was_counted_and_a_limit_put_on_anew_begins_at_zero() {
        let mut history = after(2, 125_000);
        assert_eq!(history.used_bit_s("batch", "egress"), Some(1e6));
        assert_eq!(history.used_bit_s("batch", "ingress"), None);
        assert_eq!(history.used_bit_s("web", "egress"), None, "it waits");
        history.push(host(&mut snapshot(), 0), START_S * SECOND + 3 * SECOND, 3 * SECOND);
        assert_eq!(history.used_bit_s("batch", "egress"), Some(0.0));
    }

    #[test]
    fn memory_is_bounded_and_old_points_give_way() {
        let history = after(2 * 3600, 1000);
        let egress = history.of("batch").unwrap().egress.unwrap();
        assert_eq!((egress.fine.len(), egress.coarse.len()), (FINE_MAX, COARSE_MAX));
        assert!(egress.coarse.iter().all(|point| point.used_bit_s == 8000.0));
        let span = egress.coarse.back().unwrap().unix_s - egress.coarse[0].unix_s;
        assert_eq!(span, (COARSE_MAX as u32 - 1) * COARSE_S);
        assert_eq!(size_of::<Point>(), 16, "see the head of this file");
    }

    #[test]
    fn an_overview_has_every_minute_that_is_known() {
        let history = after(600, 1000);
        let now = START_S as u32 + 600;
        let (_, [egress, ingress]) =
            history.minutes(now).find(|(name, _)| *name == "batch").unwrap();
        assert_eq!((egress.len(), ingress.len()), (MINUTES, MINUTES));
        assert!(egress[MINUTES - 10..].iter().all(|rate| *rate == Some(8000.0)), "{egress:?}");
        assert!(egress[..MINUTES - 11].iter().all(Option::is_none));
    }

    #[test]
    fn a_limit_that_is_gone_is_forgotten_after_an_hour() {
        let mut history = after(10, 1000);
        let empty = Snapshot::default();
        let push = |history: &mut History, at: u64| {
            history.push(&empty, (START_S + at) * SECOND, at * SECOND);
        };
        push(&mut history, 10 + 3599);
        assert!(history.of("batch").is_some());
        push(&mut history, 10 + 3601);
        assert!(history.of("batch").is_none());
    }

    #[test]
    fn more_limits_than_are_kept_are_left_out() {
        let mut history = History::default();
        let one = snapshot().limits.remove(0);
        let limits = (0..LIMITS_MAX + 5).map(|i| {
            let mut limit = one.clone();
            limit.name = format!("l{i}");
            limit
        });
        let many = Snapshot { limits: limits.collect(), ..Snapshot::default() };
        history.push(&many, START_S * SECOND, 0);
        history.push(&many, (START_S + 1) * SECOND, SECOND);
        assert_eq!(history.limits.len(), LIMITS_MAX);
    }
}
