//! From packets to a report.

use std::{collections::HashMap, io::Read, net::IpAddr};

use crate::{
    fit::{Fit, Series},
    flow::Flow,
    group::{self, Group},
    headers::{self, FlowKey, Fragment, Packet, Transport},
    reader::{CaptureError, Frame, Reader},
    report::{CaptureReport, Curve, Estimate, FlowReport, GroupReport, Report},
    series::merge,
    verdict::{self, Judgement, Verdict},
};

/// The most flows that are known at a time; then one that was not seen for long is forgotten.
pub const FLOWS_MAX: usize = 16_384;
/// The most packets that are remembered of all flows together.
pub const EVENTS_MAX: usize = 4 << 20;
/// The most senders whose identification is known.
const SENDERS_MAX: usize = 4_096;
/// Fragments whose first part is known.
const FRAGMENTS: usize = 64;
/// Flows among which one is chosen to be forgotten.
const CHOICES: usize = 16;
/// Names that a report has besides.
const NAMES: usize = 5;
/// Points of a curve.
const CURVE_POINTS: usize = 4_000;

/// What is reported.
#[derive(Debug, Clone)]
pub struct Options {
    /// At most so many flows.
    pub top: usize,
    /// Only flows whose text has this in it.
    pub flow: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options { top: 10, flow: None }
    }
}

/// Reads a capture to its end, or to where it is damaged: what was read before that is reported, with a
/// warning.
///
/// # Errors
/// [`CaptureError`] if there is no IP packet in it, or nothing could be read.
pub fn analyze(source: impl Read, options: &Options) -> Result<Report, CaptureError> {
    let mut reader = Reader::new(source)?;
    let mut analyzer = Analyzer::default();
    let warning = loop {
        match reader.read() {
            Ok(Some(frame)) => analyzer.frame(&frame),
            Ok(None) => break None,
            Err(
                error @ (CaptureError::Truncated { packets }
                | CaptureError::Damaged { packets, .. }),
            ) if packets > 0 => {
                break Some(error);
            }
            Err(error) => return Err(error),
        }
    };
    if analyzer.first_ns.is_none() {
        if let Some(error) = warning {
            return Err(error);
        }
        return Err(CaptureError::NoIp { packets: reader.packets(), link: analyzer.unread_link });
    }
    let mut report = analyzer.report(options);
    report.capture.file_bytes = reader.bytes();
    report.capture.warning = warning.map(|error| error.to_string());
    Ok(report)
}

/// The judgement of a window.
#[derive(Debug)]
struct Window {
    fit: Option<Fit>,
    judgement: Judgement,
    losses: usize,
    /// When it began and ended, ns since 1970.
    time_ns: (u64, u64),
}

/// The flows of a capture.
#[derive(Debug, Default)]
pub struct Analyzer {
    slots: Vec<Flow>,
    places: HashMap<FlowKey, usize>,
    /// Of each flow, of the windows that are over, the one with most losses.
    busiest: HashMap<FlowKey, Window>,
    /// Remembered packets of all flows.
    events: usize,
    /// Where the next flow to be forgotten is looked for.
    hand: usize,
    /// The last identification of each sender.
    senders: HashMap<IpAddr, u16>,
    fragments: Vec<(FlowKey, u32, FlowKey)>,
    next_fragment: usize,
    packets: u64,
    skipped: u64,
    first_ns: Option<u64>,
    last_ns: u64,
    stamps_back: u64,
    evicted: u64,
    forgotten: u64,
    unread_link: Option<i32>,
    /// Fewer than [`EVENTS_MAX`].
    events_max: Option<usize>,
}

impl Analyzer {
    /// One that remembers at most so many packets of all flows together, and no more than [`EVENTS_MAX`].
    pub fn with_events_max(events: usize) -> Self {
        Analyzer { events_max: Some(events.min(EVENTS_MAX)), ..Analyzer::default() }
    }

    fn events_max(&self) -> usize {
        self.events_max.unwrap_or(EVENTS_MAX)
    }

    /// Takes a packet as it was captured.
    pub fn frame(&mut self, frame: &Frame<'_>) {
        self.packets += 1;
        let Some(packet) = headers::parse(frame) else {
            self.skipped += 1;
            if !headers::reads(frame.link) {
                self.unread_link = Some(frame.link);
            }
            return;
        };
        self.packet(packet);
    }

    fn packet(&mut self, mut packet: Packet) {
        self.first_ns.get_or_insert(packet.time_ns);
        self.stamps_back += u64::from(packet.time_ns < self.last_ns);
        self.last_ns = self.last_ns.max(packet.time_ns);
        self.join_fragment(&mut packet);
        let shared = self.is_shared(&packet);
        let at = match self.places.get(&packet.key) {
            Some(at) => *at,
            None => self.place(&packet),
        };
        let flow = &mut self.slots[at];
        self.events += usize::from(flow.packet(&packet, shared));
        if flow.trace.is_full() {
            let first = self.first_ns.unwrap_or(0);
            let held = flow.trace.len();
            let fit = keep_busiest(&mut self.busiest, flow, first);
            flow.end_window(fit, first);
            self.events -= held - flow.trace.len();
        }
        if let Transport::Tcp(tcp) = packet.transport
            && tcp.ack.is_some()
            && let Some(at) = self.places.get(&packet.key.reversed())
        {
            self.slots[*at].acknowledged(&tcp, packet.time_ns);
        }
        if self.events > self.events_max() {
            self.forget_traces();
        }
    }

    /// Gives a later fragment the ports of the first.
    fn join_fragment(&mut self, packet: &mut Packet) {
        match packet.fragment {
            Fragment::Whole => {}
            Fragment::First(id) => {
                let bare = FlowKey { source_port: 0, destination_port: 0, ..packet.key };
                let entry = (bare, id, packet.key);
                if self.fragments.len() < FRAGMENTS {
                    self.fragments.push(entry);
                } else {
                    self.fragments[self.next_fragment] = entry;
                    self.next_fragment = (self.next_fragment + 1) % FRAGMENTS;
                }
            }
            Fragment::Later(id) => {
                let known =
                    self.fragments.iter().find(|(bare, i, _)| *bare == packet.key && *i == id);
                if let Some((.., key)) = known {
                    packet.key = *key;
                }
                // All fragments have one identification: it counts the first.
                packet.ip_id = None;
            }
        }
    }

    /// Whether the identification is the next one of this sender, but not of this flow.
    fn is_shared(&mut self, packet: &Packet) -> bool {
        let Some(id) = packet.ip_id.filter(|_| !packet.key.is_tcp()) else { return false };
        if self.senders.len() >= SENDERS_MAX && !self.senders.contains_key(&packet.key.source) {
            self.senders.clear();
        }
        let last = self.senders.insert(packet.key.source, id);
        last.is_some_and(|last| id.wrapping_sub(last) == 1)
    }

    /// A place for a new flow.
    fn place(&mut self, packet: &Packet) -> usize {
        let flow = Flow::new(packet);
        let at = if self.slots.len() < FLOWS_MAX {
            self.slots.push(flow);
            self.slots.len() - 1
        } else {
            // Of some in a row, the one with least losses, then that was silent for longest.
            let choices = (0..CHOICES).map(|step| (self.hand + step) % FLOWS_MAX);
            let worth = |at: &usize| (self.slots[*at].losses, self.slots[*at].last_ns);
            let at = choices.min_by_key(worth).unwrap_or(self.hand);
            self.hand = (self.hand + CHOICES) % FLOWS_MAX;
            self.evicted += 1;
            self.events -= self.slots[at].trace.len();
            self.places.remove(&self.slots[at].key);
            self.busiest.remove(&self.slots[at].key);
            self.slots[at] = flow;
            at
        };
        self.places.insert(packet.key, at);
        at
    }

    /// Forgets the packets of the flows that tell least, until half of the memory is free.
    fn forget_traces(&mut self) {
        let mut order: Vec<usize> =
            (0..self.slots.len()).filter(|at| !self.slots[*at].trace.is_empty()).collect();
        order.sort_by_key(|at| (self.slots[*at].losses, self.slots[*at].packets));
        for at in order {
            if self.events <= self.events_max() / 2 {
                break;
            }
            let flow = &mut self.slots[at];
            let first = self.first_ns.unwrap_or(0);
            keep_busiest(&mut self.busiest, flow, first);
            self.events -= flow.trace.len();
            flow.forget(flow.trace.len(), first);
            flow.trace.shrink();
            self.forgotten += 1;
        }
    }

    /// What the packets so far came to.
    pub fn report(&self, options: &Options) -> Report {
        let start = self.first_ns.unwrap_or(0);
        let mut order: Vec<&Flow> = self.slots.iter().filter(|flow| flow.packets > 0).collect();
        let losses = |flow: &Flow| flow.lost_by(flow.source().0);
        order.sort_by_cached_key(|flow| std::cmp::Reverse((losses(flow), flow.bytes)));
        let count = order.len() as u64;
        let wanted = |flow: &Flow| {
            options.flow.as_ref().is_none_or(|text| flow.key.to_string().contains(text.as_str()))
        };
        let series: Vec<Series> =
            order.iter().take(group::FLOWS_MAX).map(|flow| merge(&[flow], start)).collect();
        let alone: Vec<Option<Fit>> = series.iter().map(Series::fit_thoroughly).collect();
        let looked_at = &order[..series.len()];
        let groups = group::find(looked_at, &alone, start);
        let of_group = |flow: &Flow| {
            let in_group = |group: &Group| group.flows.iter().any(|at| order[*at].key == flow.key);
            groups.iter().position(in_group)
        };
        let numbered = groups.iter().enumerate();
        let group_reports: Vec<GroupReport> =
            numbered.map(|(number, group)| group_report(number, group, &order, start)).collect();
        let flows = order.iter().enumerate().filter(|(_, flow)| wanted(flow)).take(options.top);
        let of_group = |flow: &Flow| of_group(flow).map(|number| &group_reports[number]);
        let flows = flows.map(|(at, flow)| {
            let busiest = self.busiest.get(&flow.key);
            let series = merge(&[flow], start);
            // The fit takes most of the time: those that the groups needed are not made again.
            let fit = alone.get(at).copied().unwrap_or_else(|| series.fit_thoroughly());
            flow_report(flow, &order, &series, fit, of_group(flow), busiest, start)
        });
        let flows = flows.collect();
        let capture = CaptureReport {
            packets: self.packets,
            skipped_packets: self.skipped,
            file_bytes: 0,
            duration_s: self.last_ns.saturating_sub(start) as f64 / 1e9,
            start_unix_s: start as f64 / 1e9,
            stamps_back: self.stamps_back,
            flows: count,
            evicted_flows: self.evicted,
            forgotten_windows: self.forgotten,
            warning: None,
        };
        let names = order.iter().take(NAMES).map(|flow| flow.key.to_string()).collect();
        Report { capture, flows, groups: group_reports, names }
    }
}

impl Window {
    fn judge(flow: &Flow, peers: &[&Flow], series: &Series, fit: Option<Fit>) -> Window {
        let judgement = verdict::judge(&[flow], peers, series, fit.as_ref());
        let first_ns = flow.trace.events().next().map_or(flow.first_ns, |event| event.time_ns);
        Window { fit, judgement, losses: series.marks.len(), time_ns: (first_ns, flow.last_ns) }
    }
}

/// Judges the window of a flow, and keeps that if no window before had as many losses. Its fit.
fn keep_busiest(
    busiest: &mut HashMap<FlowKey, Window>,
    flow: &Flow,
    capture_start_ns: u64,
) -> Option<Fit> {
    let series = merge(&[flow], capture_start_ns);
    let fit = series.fit();
    let window = Window::judge(flow, &[flow], &series, fit);
    let most = busiest.get(&flow.key).map_or(0, |busiest| busiest.losses);
    if window.losses > most {
        busiest.insert(flow.key, window);
    }
    fit
}

/// The report on a flow, by the window with most losses: the last one, or `busiest` of those before.
fn flow_report(
    flow: &Flow,
    peers: &[&Flow],
    series: &Series,
    fit: Option<Fit>,
    group: Option<&GroupReport>,
    busiest: Option<&Window>,
    start: u64,
) -> FlowReport {
    let (loss_source, vantage) = flow.source();
    let last = Window::judge(flow, peers, series, fit);
    let fits: Vec<Fit> = flow.fits.iter().copied().chain(last.fit).collect();
    let window = busiest.filter(|busiest| busiest.losses > last.losses).unwrap_or(&last);
    let Judgement { mut verdict, mut evidence, delay } = window.judgement.clone();
    if !flow.trace.is_whole() && window.losses > 0 {
        let seconds = |ns: u64| ns.saturating_sub(start) as f64 / 1e9;
        let (from, to) = window.time_ns;
        let (from, to) = (seconds(from), seconds(to));
        evidence.push(format!(
            "judged by the {} places with loss from {from:.1} to {to:.1} s",
            window.losses
        ));
    }
    if let Some(group) = group {
        verdict = group.verdict;
        let number = group.group;
        evidence = vec![format!("together with the other flows of group {number}, not alone")];
    }
    let duration_s = (flow.last_ns - flow.first_ns) as f64 / 1e9;
    let tells = matches!(verdict, Verdict::Policed | Verdict::TailDrop | Verdict::Shaped)
        && group.is_none();
    let fit = window.fit.filter(|_| tells);
    FlowReport {
        flow: flow.key.to_string(),
        packets: flow.packets,
        bytes: flow.bytes,
        duration_s,
        rate_bit_s: if duration_s > 0.0 { flow.bytes as f64 * 8.0 / duration_s } else { 0.0 },
        lost_packets: flow.lost_by(loss_source),
        loss_source,
        vantage,
        vantage_why: flow.vantage_why(),
        reordered_packets: flow.reordered(),
        rtt_median_ms: flow.tcp.as_ref().and_then(|tcp| Some(tcp.trips.quantile_ns(0.5)? / 1e6)),
        runs: flow.all_runs(start).report(start),
        estimate: fit.as_ref().map(|fit| Estimate::new(fit, &fits, frames(&[flow]))),
        verdict,
        evidence,
        delay_before_loss: delay,
        uncaptured_packets: flow.missed,
        group: group.map(|group| group.group),
        curve: fit.map(|fit| curve(series, &fit, start)).unwrap_or_default(),
    }
}

fn group_report(number: usize, group: &Group, order: &[&Flow], start: u64) -> GroupReport {
    let flows: Vec<&Flow> = group.flows.iter().map(|at| order[*at]).collect();
    let Judgement { verdict, mut evidence, delay } =
        verdict::judge(&flows, order, &group.series, Some(&group.fit));
    evidence
        .insert(0, format!("{} flows fit one bucket better together than each alone", flows.len()));
    GroupReport {
        group: number,
        flows: flows.iter().map(|flow| flow.key.to_string()).collect(),
        estimate: Estimate::new(&group.fit, &[group.fit], frames(&flows)),
        verdict,
        evidence,
        delay_before_loss: delay,
        curve: curve(&group.series, &group.fit, start),
    }
}

/// Bytes on the wire over bytes from the IP header on.
fn frames(flows: &[&Flow]) -> f64 {
    let wire: u64 = flows.iter().map(|flow| flow.wire_bytes).sum();
    let ip: u64 = flows.iter().map(|flow| flow.bytes).sum();
    if ip > 0 { wire as f64 / ip as f64 } else { 1.0 }
}

/// The tokens over time, thinned out: of what lies together, the fullest and the emptiest.
fn curve(series: &Series, fit: &Fit, start: u64) -> Curve {
    let rate = fit.rate_bit_s / 8e9;
    let depth = fit.depth_bytes;
    let seconds = |ns: u64| ns.saturating_sub(start) as f64 / 1e9;
    let mut all = Vec::with_capacity(series.passes.len() * 2);
    let (mut tokens, mut last) = (depth, series.passes.first().map_or(0, |p| p.time_ns));
    let mut after = Vec::with_capacity(series.passes.len());
    for pass in &series.passes {
        let time = pass.time_ns.saturating_sub(last) as f64;
        if tokens + rate * time > depth {
            let full = last + ((depth - tokens) / rate) as u64;
            all.push((seconds(full), depth));
        }
        tokens = depth.min(tokens + rate * time);
        last = pass.time_ns;
        all.push((seconds(pass.time_ns), tokens));
        tokens = (tokens - f64::from(pass.bytes)).max(0.0);
        all.push((seconds(pass.time_ns), tokens));
        after.push(tokens);
    }
    let near = all.len().div_ceil(CURVE_POINTS / 2).max(1);
    let thin = |points: &[(f64, f64)]| {
        let by = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let low = points.iter().min_by(by).copied();
        let high = points.iter().max_by(by).copied();
        let mut both: Vec<_> = low.into_iter().chain(high).collect();
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        both
    };
    let losses: Vec<(f64, f64)> = series
        .marks
        .iter()
        .filter_map(|mark| {
            let time = mark.time_ns.unwrap_or(series.passes.get(mark.after)?.time_ns);
            Some((seconds(time), *after.get(mark.after)?))
        })
        .collect();
    let every = losses.len().div_ceil(CURVE_POINTS).max(1);
    Curve {
        tokens: if near > 1 { all.chunks(near).flat_map(thin).collect() } else { all },
        losses: losses.into_iter().step_by(every).collect(),
        depth_bytes: depth,
    }
}
