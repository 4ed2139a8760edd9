//! What passed and what was lost, of one flow or of several together, in the order in which a bucket or a
//! queue met it.

use crate::{
    delay,
    fit::{Mark, Pass, Series},
    flow::Flow,
    tcp::TcpTrack,
    trace::{Event, LossSource},
};

/// What passed and was lost of several flows together, over the time that all windows reach back.
pub fn merge(flows: &[&Flow], capture_start_ns: u64) -> Series {
    let start = |flow: &Flow| {
        if flow.trace.is_whole() { Some(0) } else { flow.trace.events().next().map(|e| e.time_ns) }
    };
    let from = flows.iter().filter_map(|flow| start(flow)).max().unwrap_or(0);
    let mut events: Vec<(u64, usize, &Event)> = Vec::new();
    let mut noise_ns = 0.0_f64;
    for (at, flow) in flows.iter().enumerate() {
        let undelayed = delay::undelayed(flow);
        noise_ns = undelayed.as_ref().map_or(noise_ns, |(_, noise)| noise_ns.max(*noise));
        let time = |number: usize, event: &Event| {
            undelayed.as_ref().map_or(event.time_ns, |(times, _)| times[number])
        };
        let numbered = flow.trace.events().enumerate();
        let late = numbered.filter(|(_, event)| event.time_ns >= from);
        events.extend(late.map(|(number, event)| (time(number, event), at, event)));
    }
    // Stable: each flow keeps its order.
    events.sort_by_key(|(time, ..)| *time);
    let sources: Vec<LossSource> = flows.iter().map(|flow| flow.source().0).collect();
    let before = sources.contains(&LossSource::TcpRetransmissions);
    let mut series = Series {
        noise_ns,
        began: from == 0 && flows.iter().all(|flow| flow.began(capture_start_ns)),
        ..Series::default()
    };
    let mut last: Vec<Option<usize>> = vec![None; flows.len()];
    for (time_ns, flow, event) in events {
        let at_sender = sources[flow] == LossSource::TcpRetransmissions;
        if at_sender && event.resent {
            if let Some(after) = series.passes.len().checked_sub(1) {
                let before = after + 1;
                series.marks.push(Mark { after, before, time_ns: Some(time_ns), packets: 1 });
            }
            continue;
        }
        let lost = if at_sender { 0 } else { event.losses(sources[flow]) };
        let here = series.passes.len();
        if let (Some(after), 1..) = (last[flow], lost) {
            let packets = lost.try_into().unwrap_or(u32::MAX);
            series.marks.push(Mark { after, before: here, time_ns: None, packets });
        }
        // What is sent again may come between a lost packet and its neighbours.
        if !event.fills {
            last[flow] = Some(here);
        }
        let awaits = |track: &TcpTrack| track.trips.awaits(event.seq);
        let unsure = before && flows[flow].tcp.as_ref().is_none_or(awaits);
        series.passes.push(Pass { time_ns, bytes: event.bytes, unsure });
    }
    series.marks.sort_by_key(|mark| mark.after);
    series
}
