//! The token bucket that explains which packets passed and which were lost.
//!
//! Of a bucket that fills at rate r, the *deficit* q is what is missing until it is full:
//!
//! ```text
//! q = max(0, q - r x time)                  then, for each packet that passes,  q = q + length
//! ```
//!
//! It needs no depth: a policer drops where q > depth - length, so with the right r the deficit is the
//! same, the depth less a part of a packet, at *every* loss, and never above the depth. With a wrong r it
//! drifts: within a busy period (until q is 0 again, when the bucket is full) it rises by as much as r is
//! too low. So:
//!
//! 1. Begin with the goodput from the first loss to the last, which is never too high.
//! 2. Regress the deficits at losses on time, within busy periods. Their slope is what r is off; correct
//!    it, and again.
//! 3. The depth is the median of the deficits at losses, and half of what a packet can miss.
//!
//! A loss that is seen as a gap happened between two packets of its flow: with the flow alone the deficit
//! is the one after the first of them, since it only falls until the next; with other flows between, the
//! highest there.
//!
//! What the bucket holds when the capture begins is unknown, so a first busy period is counted to the depth
//! only if the traffic began in the capture (the bucket had time to fill), and otherwise only for the rate.
//!
//! O(packets x [`ROUNDS`]).

/// Corrections of the rate, at most, from each of some starts.
pub const ROUNDS: usize = 24;
/// The most packets between two of a flow among which the loss is looked for.
pub const BETWEEN_MAX: usize = 4_096;
/// How often a bucket is full until one that began with an unknown content is known.
const REFILLS_MIN: usize = 3;
/// Losses in a busy period from which on the first is left out.
const FIRST_MATTERS: usize = 4;
/// How often the deficit at the beginning is corrected.
const FIRST_ROUNDS: usize = 4;
/// How often the depth is corrected above which packets are lost that nothing counts.
const DEPTH_ROUNDS: usize = 4;
/// Between how many losses local rates are taken.
const NEAR: [usize; 5] = [16, 4, 2, 8, 32];
/// With how many losses at most, at how many rates, so far apart, deficits are compared.
const PROFILE_MARKS_MAX: usize = 2_048;
const PROFILE_STEPS: i32 = 64;
/// What a fit explains, and how closely deficits agree in packets, that is not looked at further.
const SETTLED: f64 = 0.88;
const SETTLED_PACKETS: f64 = 0.4;
const PROFILE_STEP: f64 = 1.04;
/// The path moves packets by so much, as a part of the level, where nothing tells by how much.
pub const PATH_WITHIN: f64 = 1.0 / 3.0;
/// How many of them are corrected further.
const PROFILE_BEST: usize = 6;
/// Where the deficit at losses is no more packets, how fast packets came is looked at.
const SHALLOW_PACKETS: f64 = 3.0;
/// By how much more such a bucket must explain than a deeper one, where more than this share of what seems to
/// have passed may be lost.
const SHALLOW_LEAD: f64 = 0.1;
const UNSURE_MATTERS: f64 = 0.03;
/// So many depths are tried then, so far apart, from two packets on.
const DEPTH_STEPS: i32 = 36;
const DEPTH_STEP: f64 = 1.25;
/// Timestamps are off by so much, besides packets.
const JITTER_NS: f64 = 100_000.0;
/// The errors of timestamps are no more than this part of the level.
const NOISE_MAX: f64 = 0.15;

/// A packet that passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// When.
    pub time_ns: u64,
    /// Its length.
    pub bytes: u32,
    /// It was captured before the bucket, and nothing would tell if it was lost there.
    pub unsure: bool,
}

/// A loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// The pass after which it happened.
    pub after: usize,
    /// The next pass of its flow.
    pub before: usize,
    /// When, if the lost packet was captured.
    pub time_ns: Option<u64>,
    /// Packets that were lost there.
    pub packets: u32,
}

/// What passed and what was lost, of one flow or several.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// In order of time.
    pub passes: Vec<Pass>,
    /// In order of `after`.
    pub marks: Vec<Mark>,
    /// Whether the traffic began in the capture.
    pub began: bool,
    /// How late half of the packets came, at most, through what the path did to them after the bucket, ns.
    pub noise_ns: f64,
}

/// How the depth is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DepthBasis {
    /// The bucket was full, and then empty, so many times.
    Refilled(u32),
    /// It was full when the traffic began, and never again.
    Began,
    /// It was never seen full: it may be deeper.
    AtLeast,
}

/// A token bucket, and how well it explains a series.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit {
    /// Rate.
    pub rate_bit_s: f64,
    /// The rate's 95 % confidence interval, half of it.
    pub rate_within_bit_s: f64,
    /// Depth.
    pub depth_bytes: f64,
    /// The depth's 95 % confidence interval, half of it.
    pub depth_within_bytes: f64,
    /// How the depth is known.
    pub basis: DepthBasis,
    /// The share of losses at which the bucket was empty.
    pub explained: f64,
    /// The share of passes that it would have dropped.
    pub violated: f64,
    /// Mean and median of the tokens at losses and at passes.
    pub tokens: TokenStatistics,
    /// Losses.
    pub marks: usize,
    /// The deficit at losses, bytes.
    pub level_bytes: f64,
    /// Half of the losses have a deficit that is no further from that, bytes.
    pub spread_bytes: f64,
    /// Deficits that differ by no more count as equal, bytes.
    pub tolerance_bytes: f64,
    /// The probability that a loss finds fewer tokens than a packet that passes. Losses by chance have 0.5.
    pub loss_rank: f64,
    /// The share of losses whose deficits are equal but for a path that moves packets by an unknown time.
    pub explained_loosely: f64,
}

/// Tokens when packets came.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TokenStatistics {
    /// Mean at losses, bytes.
    pub loss_mean: f64,
    /// Median at losses, bytes.
    pub loss_median: f64,
    /// Mean at passes, bytes.
    pub pass_mean: f64,
    /// Median at passes, bytes.
    pub pass_median: f64,
}

/// The deficit at a loss.
#[derive(Debug, Clone, Copy)]
struct Point {
    /// The busy period; the one in which the series begins is 0.
    period: u32,
    /// The part of it in which all is known: it ends at a pass that may have been lost.
    stretch: u32,
    time: f64,
    deficit: f64,
    /// Nanoseconds until the lost packet came, after a pass, about.
    wait: f64,
}

/// How well a rate explains a series: what the search compares.
#[derive(Debug, Clone, Copy)]
struct Level {
    /// Bytes/ns.
    rate: f64,
    /// The deficit at the beginning, and the most that the bucket may hold: what the walk began with.
    first: f64,
    holds: f64,
    /// The deficit at losses, and the other figures of [`Fit`].
    bytes: f64,
    spread: f64,
    tolerance: f64,
    explained: f64,
    violated: f64,
    /// No deficit is left out, as too few losses follow a full bucket.
    all: bool,
}

/// Deficits at a rate, in bytes/ns.
struct Walk {
    points: Vec<Point>,
    /// Right before each pass.
    at_passes: Vec<f64>,
}

impl Series {
    /// The longest packet.
    pub fn packet(&self) -> f64 {
        self.passes.iter().map(|pass| pass.bytes).max().unwrap_or(1).into()
    }

    /// Deficits at a rate, from a first one on. A pass that may have been lost takes tokens only where the
    /// deficit stays below `depth`.
    fn walk(&self, rate: f64, first: f64, depth: f64) -> Walk {
        let origin = self.passes.first().map_or(0, |pass| pass.time_ns);
        let (mut deficit, mut last, mut period) = (first, origin, 0_u32);
        let mut after = Vec::with_capacity(self.passes.len());
        let mut at_passes = Vec::with_capacity(self.passes.len());
        let mut period_of = Vec::with_capacity(self.passes.len());
        let mut stretch = 0_u32;
        for pass in &self.passes {
            deficit -= rate * pass.time_ns.saturating_sub(last) as f64;
            if deficit <= 0.0 {
                // The first pass of all begins no new period.
                period += u32::from(!after.is_empty());
                deficit = 0.0;
            }
            last = pass.time_ns;
            at_passes.push(deficit);
            if !pass.unsure || deficit + f64::from(pass.bytes) <= depth {
                deficit += f64::from(pass.bytes);
            }
            after.push(deficit);
            stretch += u32::from(pass.unsure);
            period_of.push((period, stretch));
        }
        let points = self.marks.iter().filter(|mark| mark.after < after.len()).map(|mark| {
            let end =
                mark.before.min(mark.after + BETWEEN_MAX).min(after.len()).max(mark.after + 1);
            let between = mark.after..end;
            let at = if mark.time_ns.is_some() {
                mark.after
            } else {
                between.fold(mark.after, |best, at| if after[at] > after[best] { at } else { best })
            };
            let time = mark.time_ns.unwrap_or(self.passes[at].time_ns);
            let idle = time.saturating_sub(self.passes[at].time_ns) as f64;
            // As long as its predecessor had waited, or as the lost ones would fill the gap evenly.
            let since = |from: usize, to: usize| {
                let (from, to) = (self.passes[from].time_ns, self.passes[to].time_ns);
                to.saturating_sub(from) as f64
            };
            let gap = since(mark.after, mark.before.min(after.len() - 1));
            let even = gap / (f64::from(mark.packets) + 1.0);
            let wait = if mark.time_ns.is_some() {
                idle
            } else {
                since(at.saturating_sub(1), at).min(even)
            };
            Point {
                wait,
                period: period_of[at].0,
                stretch: period_of[at].1,
                time: time.saturating_sub(origin) as f64,
                deficit: (after[at] - rate * idle).max(0.0),
            }
        });
        Walk { points: points.collect(), at_passes }
    }

    /// The bucket that explains the series best; none if there are fewer than three losses.
    pub fn fit(&self) -> Option<Fit> {
        self.details(&self.search()?)
    }

    fn search(&self) -> Option<Level> {
        let (first, last) = (self.marks.first()?, self.marks.last()?);
        if self.marks.len() < 3 || self.passes.len() < 3 {
            return None;
        }
        let goodput = self.goodput(first.after, last.after)?;
        let mut best: Option<Level> = None;
        // A mean over cycles of full and empty may be a fixed point too: begin also within them.
        let locals = NEAR.iter().flat_map(|near| [0.5, 0.75].map(|share| (*near, share)));
        let locals = locals.map(|(near, share)| self.local_rate(near, share));
        for start in std::iter::once(Some(goodput)).chain(locals).flatten() {
            let Some(level) = self.refine(start, f64::INFINITY) else { continue };
            if best.as_ref().is_none_or(|best| level.score() > best.score()) {
                best = Some(level);
            }
            if best.as_ref().is_some_and(|best| self.is_settled(best)) {
                return best;
            }
        }
        best
    }

    /// The same; where no drift shows, since each busy period has only a loss or two, also the rate at
    /// which the periods agree. Some hundred times as long.
    pub fn fit_thoroughly(&self) -> Option<Fit> {
        let best = self.search()?;
        let overrated = self.is_overrated_at(best.bytes);
        if self.is_settled(&best) && !overrated {
            return self.details(&best);
        }
        let profiled = if self.marks.len() > PROFILE_MARKS_MAX {
            let beginning = self.beginning(PROFILE_MARKS_MAX).profile();
            let level = beginning.and_then(|fit| self.refine(fit.rate_bit_s / 8e9, f64::INFINITY));
            level.and_then(|level| self.details(&level))
        } else {
            self.profile()
        };
        let unseen = self.search_unseen().and_then(|level| self.details(&level));
        let profiled =
            profiled.into_iter().chain(unseen).max_by(|a, b| a.score().total_cmp(&b.score()));
        let enough = best.score() - if overrated { SHALLOW_LEAD } else { 0.0 };
        profiled.filter(|fit| fit.score() > enough).or_else(|| self.details(&best))
    }

    /// Whether a rate at which all was let pass may explain the losses as well as the true one: every deficit
    /// is one packet then, and packets that were lost unseen seem to have passed.
    pub fn is_overrated(&self, fit: &Fit) -> bool {
        self.is_overrated_at(fit.level_bytes)
    }

    fn is_overrated_at(&self, level_bytes: f64) -> bool {
        level_bytes <= SHALLOW_PACKETS * self.packet() && self.lacks_losses()
    }

    /// Whether so much of what seems to have passed may be lost that it matters.
    pub fn lacks_losses(&self) -> bool {
        let unsure = self.passes.iter().filter(|pass| pass.unsure).count();
        unsure as f64 > UNSURE_MATTERS * self.passes.len() as f64
    }

    /// The bucket where some of what seems to have passed may be lost. Its rate shows between losses amid
    /// which all is known; then the depths are tried, since which of the rest passed depends on it.
    fn search_unseen(&self) -> Option<Level> {
        if !self.lacks_losses() {
            return None;
        }
        let packet = self.packet();
        let better = |a: &Level, b: &Level| a.score().total_cmp(&b.score());
        let of_depths = |rate: f64| {
            let depths = (0..DEPTH_STEPS).map(|n| 2.0 * packet * DEPTH_STEP.powi(n));
            let levels = depths.filter_map(|depth| {
                let walk = self.walk(rate, 0.0, depth);
                self.level(rate, 0.0, depth, &walk)
            });
            levels.max_by(better)
        };
        let best = NEAR.iter().filter_map(|near| self.quiet_rate(*near)).filter_map(of_depths);
        best.filter_map(|level| self.refine(level.rate, level.holds)).max_by(better)
    }

    /// The middle rate from a loss to the one `near` losses later, where nothing between them may be lost
    /// unseen.
    fn quiet_rate(&self, near: usize) -> Option<f64> {
        let mut unsure = Vec::with_capacity(self.passes.len() + 1);
        unsure.push(0_usize);
        for pass in &self.passes {
            unsure.push(unsure[unsure.len() - 1] + usize::from(pass.unsure));
        }
        let ends = self.marks.windows(near + 1).map(|marks| (marks[0].after, marks[near].after));
        let quiet = ends.filter(|(from, to)| {
            from < to && *to < self.passes.len() && unsure[to + 1] == unsure[from + 1]
        });
        let mut rates: Vec<f64> = quiet.filter_map(|(from, to)| self.goodput(from, to)).collect();
        median(&mut rates)
    }

    /// Its beginning, with so many losses.
    fn beginning(&self, marks: usize) -> Series {
        let end = self.marks.get(marks).map_or(self.passes.len(), |mark| mark.after + 1);
        Series { passes: self.passes[..end].to_vec(), marks: self.marks[..marks].to_vec(), ..*self }
    }

    /// The rate of many at which the deficits agree best, and between which rates they do about as well.
    fn profile(&self) -> Option<Fit> {
        let goodput = self.goodput(self.marks.first()?.after, self.marks.last()?.after)?;
        let packet = self.packet();
        let scan = |from: f64, step: f64| {
            let rates = (0..PROFILE_STEPS).map(move |n| from * step.powi(n));
            let levels =
                rates.filter_map(|rate| Some(self.level_at(rate, packet, f64::INFINITY)?.1));
            // One packet at each loss is what a rate above all that was sent gives.
            levels.filter(|level| level.bytes > SHALLOW_PACKETS * packet).collect::<Vec<Level>>()
        };
        let better = |a: &Level, b: &Level| a.score().total_cmp(&b.score());
        let mut coarse = scan(goodput * 0.9, PROFILE_STEP);
        coarse.sort_by(|a, b| better(b, a));
        coarse.truncate(PROFILE_BEST);
        let refined = coarse.iter().filter_map(|level| self.refine(level.rate, f64::INFINITY));
        let best = refined.filter(|level| level.bytes > SHALLOW_PACKETS * packet);
        let best = best.chain(coarse.iter().copied()).max_by(better)?;
        // Around it more finely, for the best and for how far others are as good.
        let fine = PROFILE_STEP.powf(2.0 / f64::from(PROFILE_STEPS));
        let near = scan(best.rate / PROFILE_STEP, fine);
        let best = near.iter().copied().chain([best]).max_by(better)?;
        let alike = near.iter().filter(|level| level.score() > best.score() - 0.02);
        let away = alike.map(|level| (level.rate - best.rate).abs() * 8e9).fold(0.0, f64::max);
        let fit = self.details(&best)?;
        let rate_within_bit_s = away.max(fit.rate_bit_s * (fine - 1.0));
        let blur = rate_within_bit_s / fit.rate_bit_s * fit.depth_bytes;
        let depth_within_bytes = fit.depth_within_bytes.min(packet / 2.0 + blur);
        Some(Fit { rate_within_bit_s, depth_within_bytes, ..fit })
    }

    /// Whether a fit need not be bettered.
    fn is_settled(&self, level: &Level) -> bool {
        let close = SETTLED_PACKETS * self.packet() + level.rate * JITTER_NS / 2.0;
        level.explained - level.violated > SETTLED && level.spread <= close
    }

    /// Bytes/ns from one pass to another, of what surely passed.
    fn goodput(&self, from: usize, to: usize) -> Option<f64> {
        let to = to.min(self.passes.len().checked_sub(1)?);
        let time = self.passes[to].time_ns.checked_sub(self.passes[from.min(to)].time_ns)?;
        let sure = self.passes[from.min(to) + 1..=to].iter().filter(|pass| !pass.unsure);
        let bytes: u64 = sure.map(|pass| u64::from(pass.bytes)).sum();
        (time > 0 && bytes > 0).then(|| bytes as f64 / time as f64)
    }

    /// The rate from a loss to the one `near` losses later, at that share of all.
    fn local_rate(&self, near: usize, share: f64) -> Option<f64> {
        let ends = self.marks.windows(near + 1).step_by(near);
        let rates = ends.filter_map(|marks| self.goodput(marks[0].after, marks[near].after));
        let mut rates: Vec<f64> = rates.collect();
        rates.sort_by(f64::total_cmp);
        rates.get((rates.len() as f64 * share) as usize).copied()
    }

    /// Corrects a rate. `holds` is what the bucket may hold, as far as it is known.
    fn refine(&self, start: f64, holds: f64) -> Option<Level> {
        let packet = self.packet();
        let mut rate = start;
        let mut best: Option<Level> = None;
        let mut last: Option<Level> = None;
        for round in 0..ROUNDS {
            let holds = last.map_or(holds, |level| level.holds_bytes(packet));
            let (walk, level) = self.level_at(rate, packet, holds)?;
            if best.as_ref().is_none_or(|best| level.score() > best.score()) {
                best = Some(level);
            }
            last = Some(level);
            // What is far from the rest is no loss of this policer; at first nothing is known of the rest.
            let reach = if round < 4 { f64::INFINITY } else { 2.0 * level.tolerance };
            let (slope, _) = regress(&walk.points, level.bytes, reach);
            let next = (rate + slope).clamp(rate * 0.2, rate * 5.0);
            if !next.is_finite() || (next / rate - 1.0).abs() < 1e-9 {
                break;
            }
            rate = next;
        }
        // The corrections end where the deficit does not drift; unless they went astray.
        last.filter(|last| best.as_ref().is_none_or(|best| last.score() >= best.score() - 0.02))
            .or(best)
    }

    /// What a rate explains. A capture that begins amid traffic begins with a deficit, which is what the
    /// first losses lack of the later ones.
    /// `holds` is what the bucket may hold, as far as it is known.
    fn level_at(&self, rate: f64, packet: f64, mut holds: f64) -> Option<(Walk, Level)> {
        let mut first = 0.0;
        let mut walk = self.walk(rate, first, holds);
        let mut level = self.level(rate, first, holds, &walk)?;
        if self.passes.iter().any(|pass| pass.unsure) {
            for _ in 0..DEPTH_ROUNDS {
                let before = holds;
                holds = level.holds_bytes(packet);
                if holds == before {
                    break;
                }
                walk = self.walk(rate, first, holds);
                level = self.level(rate, first, holds, &walk)?;
            }
        }
        for _ in 0..FIRST_ROUNDS {
            let mut begin: Vec<f64> =
                walk.points.iter().filter(|p| p.period == 0).map(|p| p.deficit).collect();
            let all = begin.len() == walk.points.len();
            let lack = median(&mut begin).map_or(0.0, |begin| level.bytes - begin);
            if self.began || all || lack <= packet {
                break;
            }
            first += lack;
            walk = self.walk(rate, first, holds);
            level = self.level(rate, first, holds, &walk)?;
        }
        Some((walk, level))
    }

    /// Whether the bucket was full before a loss: in later periods, and in the first if the traffic began
    /// here.
    fn is_known(&self, point: &Point) -> bool {
        point.period > 0 || self.began
    }

    /// Whether a loss finds the deficit of the others.
    ///
    /// Packets that come more slowly than the rate empty no bucket: with a rate above all that was sent every
    /// deficit is one packet, and nothing is explained.
    fn is_explained(&self, level: &Level, packet: f64, point: &Point) -> bool {
        let near = (point.deficit - level.bytes).abs() <= level.tolerance
            || (!self.is_known(point) && point.deficit < level.bytes && !level.all);
        near && (level.bytes > SHALLOW_PACKETS * packet || point.wait * level.rate <= 1.1 * packet)
    }

    fn level(&self, rate: f64, first: f64, holds: f64, walk: &Walk) -> Option<Level> {
        let packet = self.packet();
        let known = walk.points.iter().filter(|point| self.is_known(point));
        let mut deficits: Vec<f64> = known.map(|p| p.deficit).collect();
        let all = deficits.len() * 5 < walk.points.len();
        if all {
            deficits = walk.points.iter().map(|p| p.deficit).collect();
        }
        let bytes = median(&mut deficits)?;
        let noise = (rate * self.noise_ns).min(NOISE_MAX * bytes);
        let tolerance = (1.5 * packet).max(0.03 * bytes).max(rate * JITTER_NS).max(noise);
        let mut apart: Vec<f64> = walk.points.iter().map(|p| (p.deficit - bytes).abs()).collect();
        let spread = median(&mut apart)?;
        let (explained, violated) = (0.0, 0.0);
        let mut level =
            Level { rate, first, holds, bytes, spread, tolerance, explained, violated, all };
        let inside = walk.points.iter().filter(|point| self.is_explained(&level, packet, point));
        level.explained = inside.count() as f64 / walk.points.len() as f64;
        // A bucket of that depth has no room for these.
        let over = walk.at_passes.iter().filter(|q| **q > bytes + tolerance).count();
        level.violated = over as f64 / walk.at_passes.len().max(1) as f64;
        Some(level)
    }

    /// All that a level tells.
    fn details(&self, level: &Level) -> Option<Fit> {
        let packet = self.packet();
        let Level { rate, bytes, tolerance, .. } = *level;
        let walk = self.walk(rate, level.first, level.holds);
        let explained = |point: &&Point| self.is_explained(level, packet, point);
        let inside: Vec<&Point> = walk.points.iter().filter(explained).collect();
        let depth = bytes + packet / 2.0;
        let off = |p: &&Point| (p.deficit - bytes).abs() <= tolerance.max(PATH_WITHIN * bytes);
        let loose = walk.points.iter().filter(off).count();
        let (_, slope_error) = regress(&walk.points, bytes, tolerance);
        // Neighbouring losses err alike.
        let rate_error = 2.0 * 1.96 * slope_error;

        let mut refilled: Vec<u32> =
            inside.iter().filter(|p| p.period > 0).map(|p| p.period).collect();
        refilled.dedup();
        let basis = match refilled.len() {
            0 if self.began => DepthBasis::Began,
            // Begun with an unknown deficit, it seems full too early, until it has been full some times.
            0..REFILLS_MIN if !self.began => DepthBasis::AtLeast,
            // Nor is it full just because an even source leaves it as empty as it was.
            _ if !self.began && bytes <= SHALLOW_PACKETS * packet => DepthBasis::AtLeast,
            times => DepthBasis::Refilled(times.try_into().unwrap_or(u32::MAX)),
        };
        // How long a wrong rate had to blur the deficit.
        let span = typical_span(&inside);
        let blur = rate_error * span;
        // What a loss finds is anything up to a packet, or always the same: no number of losses tells which.
        let depth_within = packet / 2.0 + blur;
        let mut at_passes: Vec<f64> = walk.at_passes.iter().map(|q| (depth - q).max(0.0)).collect();
        let mut at_losses: Vec<f64> =
            walk.points.iter().map(|p| (depth - p.deficit).max(0.0)).collect();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        Some(Fit {
            rate_bit_s: rate * 8e9,
            rate_within_bit_s: rate_error * 8e9,
            depth_bytes: depth,
            depth_within_bytes: depth_within,
            basis,
            explained: level.explained,
            violated: level.violated,
            tokens: TokenStatistics {
                loss_mean: mean(&at_losses),
                loss_median: median(&mut at_losses)?,
                pass_mean: mean(&at_passes),
                pass_median: median(&mut at_passes)?,
            },
            marks: walk.points.len(),
            level_bytes: bytes,
            spread_bytes: level.spread,
            tolerance_bytes: tolerance,
            loss_rank: rank(&mut at_losses, &mut at_passes),
            explained_loosely: loose as f64 / walk.points.len() as f64,
        })
    }
}

/// What speaks for a bucket: losses explained, less passes violated, less a little for deficits that differ.
fn score(explained: f64, violated: f64, spread: f64, tolerance: f64) -> f64 {
    explained - violated - 0.1 * spread / tolerance
}

impl Level {
    /// The most that the bucket may hold, in bytes. Where the deficits at losses differ, it is less than
    /// their median, as packets that were lost unseen are a part of them.
    fn holds_bytes(&self, packet: f64) -> f64 {
        let less = if self.spread > packet / 2.0 { self.spread } else { 0.0 };
        (self.bytes + packet / 2.0 - less).max(packet)
    }

    fn score(&self) -> f64 {
        score(self.explained, self.violated, self.spread, self.tolerance)
    }
}

impl Fit {
    /// What speaks for it: losses explained, less passes violated, less a little for deficits that differ.
    pub fn score(&self) -> f64 {
        score(self.explained, self.violated, self.spread_bytes, self.tolerance_bytes)
    }
}

/// The middle length of the periods, in ns.
fn typical_span(points: &[&Point]) -> f64 {
    let mut spans: Vec<f64> = points
        .chunk_by(|a, b| a.period == b.period)
        .filter_map(|period| Some(period.last()?.time - period.first()?.time))
        .collect();
    median(&mut spans).unwrap_or(0.0)
}

/// The slope of deficits on time within periods, bytes/ns, and its standard error. Leaves out what is
/// further than `reach` from `level`. Where a pass may have been lost, the deficit is unknown from there on.
fn regress(points: &[Point], level: f64, reach: f64) -> (f64, f64) {
    let near = |p: &&Point| (p.deficit - level).abs() <= reach;
    let (mut sxx, mut sxy, mut syy, mut count, mut periods) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for period in points.chunk_by(|a, b| (a.period, a.stretch) == (b.period, b.stretch)) {
        // The first loss finds anything up to a packet, those after it only what was added meanwhile.
        let first = usize::from(period.len() >= FIRST_MATTERS);
        let inside: Vec<&Point> = period[first..].iter().filter(near).collect();
        if inside.len() < 2 {
            continue;
        }
        let n = inside.len() as f64;
        let time = inside.iter().map(|p| p.time).sum::<f64>() / n;
        let deficit = inside.iter().map(|p| p.deficit).sum::<f64>() / n;
        for point in inside {
            let (x, y) = (point.time - time, point.deficit - deficit);
            sxx += x * x;
            sxy += x * y;
            syy += y * y;
        }
        count += n;
        periods += 1.0;
    }
    if sxx <= 0.0 {
        return (0.0, f64::INFINITY);
    }
    let slope = sxy / sxx;
    let rest = (syy - slope * sxy).max(0.0);
    let freedom: f64 = count - periods - 1.0;
    (slope, if freedom > 0.0 { (rest / freedom / sxx).sqrt() } else { f64::INFINITY })
}

/// The probability that one of `low` is below one of `high`; equal ones count half (Mann and Whitney).
fn rank(low: &mut [f64], high: &mut [f64]) -> f64 {
    low.sort_by(f64::total_cmp);
    high.sort_by(f64::total_cmp);
    let above = |value: &f64| {
        let not_below = high.len() - high.partition_point(|other| other < value);
        let above = high.len() - high.partition_point(|other| other <= value);
        (not_below + above) as f64 / 2.0
    };
    let pairs = (low.len() * high.len()).max(1) as f64;
    low.iter().map(above).sum::<f64>() / pairs
}

/// The middle value; none of none.
fn median(values: &mut [f64]) -> Option<f64> {
    let middle = values.len() / 2;
    if values.is_empty() {
        return None;
    }
    Some(*values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

#[cfg(test)]
mod tests;
