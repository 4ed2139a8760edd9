//! `tidegate explain`: what holds a process, a cgroup or a flow back.

use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use tidegate_core::Rate;
use tidegate_host::{
    explain::{
        self, Applied, AppliedDirection, Asked, ExplainOptions, Explanation, Place, Subject,
    },
    host::Host,
    live::Origin,
    sockets::SocketSample,
    waiting::{FlowQueue, Passing},
};
use tidegate_sys::{intf::OUTCOME_TABLE, net::diag::MAX_SOCKETS};

use crate::{
    args::ExplainArgs,
    output::{self, Align, Column, Paint},
};

/// Sockets that are shown unless all are asked for.
const SHOWN: usize = 10;

const COLUMNS: [Column; 9] = [
    ("LOCAL", Align::Left),
    ("REMOTE", Align::Left),
    ("PROCESS", Align::Left),
    ("CC", Align::Left),
    ("SENT", Align::Right),
    ("RECEIVED", Align::Right),
    ("PACED AT", Align::Right),
    ("RTT", Align::Right),
    ("RETRANS", Align::Right),
];

pub fn run(store: &Path, args: &ExplainArgs) -> Result<ExitCode> {
    let host = super::open(store)?;
    // Several numbers are as many processes, as `pidof` prints them; several words of all else are one flow.
    let pids = args.subject.iter().all(|word| word.parse::<u32>().is_ok());
    let subjects = if pids { args.subject.clone() } else { vec![args.subject.join(" ")] };
    for (i, subject) in subjects.iter().enumerate() {
        if i > 0 && !args.look.json {
            writeln!(output::stdout())?;
        }
        explain_one(&host, &Subject::parse(subject)?, args)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn explain_one(host: &Host, subject: &Subject, args: &ExplainArgs) -> Result<()> {
    let sockets = if args.all { MAX_SOCKETS } else { SHOWN };
    let options = ExplainOptions { sample: args.sample, sockets };
    let explanation = explain::explain(host, subject, &options)?;
    let mut out = output::stdout();
    if args.look.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&explanation)?)?;
    } else {
        let sample = args.sample.as_nanos();
        let sample = output::time(i64::try_from(sample).unwrap_or(i64::MAX));
        show(&mut out, Paint::stdout(), &explanation, &sample)?;
    }
    Ok(())
}

fn show(
    out: &mut impl Write,
    paint: Paint,
    explanation: &Explanation,
    sample: &str,
) -> io::Result<()> {
    for Passing { limit, scope, scheme, direction, queue } in &explanation.passing {
        let FlowQueue { protocol, from, to, packets, bytes } = queue;
        let head = format!("Limit {} on {scope}: {scheme}", paint.bold(&format!("`{limit}`")));
        let waits = output::packets((*packets, *bytes));
        writeln!(out, "{head}, {direction} {protocol} {from} > {to}: waiting now {waits}\n")?;
    }
    for (i, place) in explanation.places.iter().enumerate() {
        let path = if place.cgroup.is_empty() { "/" } else { &place.cgroup };
        let asked = match &explanation.asked {
            Asked::Process { pid, comm } if i == 0 => format!("Process {pid} ({comm}) in cgroup"),
            Asked::Process { pid, comm } => {
                format!("Process {pid} ({comm}), sockets made in cgroup")
            }
            Asked::Cgroup { .. } => "Cgroup".to_owned(),
            Asked::Flow { flow } => format!("Flow {flow} in cgroup"),
        };
        let head = format!("{} {path}, watched for {sample}", output::in_line(&asked));
        writeln!(out, "{}\n", paint.bold(&head))?;
        for limit in &place.limits {
            show_limit(out, paint, limit, sample)?;
        }
        show_sockets(out, paint, place)?;
        writeln!(out, "{} {}", paint.bold("Held back by:"), place.sentence)?;
        if i + 1 < explanation.places.len() {
            writeln!(out)?;
        }
    }
    if explanation.more_places > 0 {
        writeln!(out, "\nand {} more cgroups", explanation.more_places)?;
    }
    Ok(())
}

fn show_limit(out: &mut impl Write, paint: Paint, limit: &Applied, sample: &str) -> io::Result<()> {
    let held = match limit.origin {
        Origin::Pinned => String::new(),
        Origin::Run { runner_pid } => format!(", held by `tidegate run` (process {runner_pid})"),
        Origin::Elsewhere => ", held by another store or program".to_owned(),
    };
    let settings = &limit.settings;
    let xdp = settings
        .xdp_mode
        .map_or_else(String::new, |mode| format!(", ingress in XDP ({})", output::xdp_mode(mode)));
    let far_end = if limit.far_end { ", which leads to the other end" } else { "" };
    let loopback = if settings.loopback() { ", loopback too" } else { "" };
    let inside = limit.parent.as_ref().map_or_else(String::new, |parent| {
        let guarantee = limit.guarantee_bit_s.map(output::rate);
        let guarantee = guarantee.map_or_else(String::new, |rate| format!(" guarantee {rate},"));
        format!(", inside `{parent}` with{guarantee} weight {}", limit.weight.unwrap_or_default())
    });
    writeln!(
        out,
        "Limit {} on {}{far_end}: {}{xdp}{inside}{loopback}{held}",
        paint.bold(&format!("`{}`", limit.name)),
        limit.scope,
        output::scheme(settings)
    )?;
    if let Some(members) = &limit.members {
        writeln!(out, "  {}", output::members(members))?;
    }
    if let Some(alarm) = output::alarm(&limit.name, &limit.scope, limit.state) {
        writeln!(out, "  {}", paint.red(&format!("WARNING: {alarm}")))?;
    }
    for (name, direction) in limit.directions() {
        writeln!(out, "  {name} {}", describe(direction))?;
        writeln!(out, "    {}", slowed(direction, sample))?;
        at_risk(out, paint, direction, sample)?;
    }
    writeln!(out)
}

/// What a direction is and what is used of it.
fn describe(direction: &AppliedDirection) -> String {
    let now = &direction.now;
    let time = |ns: u64| output::time(i64::try_from(ns).unwrap_or(i64::MAX));
    let rate = Rate::from_bit_s(now.rate_bit_s).map(|rate| rate.to_string()).unwrap_or_default();
    let percent = 100.0 * direction.used_bit_s as f64 / now.may_use_bit_s().max(1) as f64;
    let rate = match now.now_bit_s {
        Some(part) => format!("{} now, at most {rate}", output::rate(part)),
        None => rate,
    };
    let mut words =
        vec![format!("{rate}: {} used ({percent:.0} %)", output::rate(direction.used_bit_s))];
    if let Some(fair) = now.fair {
        let flows = if fair.flows == 1 { "flow" } else { "flows" };
        words.push(format!(
            "{} {flows}, each may send {}",
            fair.flows,
            output::rate(fair.share_bit_s)
        ));
        words.extend(fair.rtt_ns.map(|rtt| format!("RTT {}", time(rtt))));
        if fair.held > 0 {
            words.push(format!("{} connections held before they began", fair.held));
        }
    }
    if now.colours.is_some() {
        let left = output::time(now.backlog_ns.saturating_neg());
        words.push(format!("a bucket of {}, {left} left", time(now.burst_ns)));
        return words.join("; ");
    }
    let backlog = match now.backlog_ns {
        ..=0 => "no backlog".to_owned(),
        ns => format!("backlog {}", output::time(ns)),
    };
    let at = |what, ns: Option<u64>| ns.map(|ns| format!("{what} above {}", time(ns)));
    let bounds: Vec<_> =
        [at("mark", now.mark_ns), at("drop", now.drop_ns)].into_iter().flatten().collect();
    words.push(format!("{backlog} ({})", bounds.join(", ")));
    words.join("; ")
}

/// When packets were last made slower, and how many in the sample.
fn slowed(direction: &AppliedDirection, sample: &str) -> String {
    let ages = direction.now.last.0;
    let kinds = OUTCOME_TABLE.iter().enumerate().filter(|(_, outcome)| outcome.slows());
    let (mut words, mut never) = (Vec::new(), Vec::new());
    for (i, outcome) in kinds {
        let name = match outcome.name {
            "mark" => "marked",
            "slow" => "slowed",
            "drop_full" => "dropped (full)",
            "drop_reserve" => "dropped (reserve)",
            "drop_early" => "dropped (early)",
            other => other,
        };
        match ages[i] {
            Some(age) => words.push(format!(
                "{name} {} ago, {} in the last {sample}",
                output::time(i64::try_from(age).unwrap_or(i64::MAX)),
                direction.sample.packets[i]
            )),
            // The kernel's queue says how many, and not when.
            None => match direction.now.counters.packets[i] {
                0 => never.push(name),
                all => words.push(format!(
                    "{name} {all} times, {} in the last {sample}",
                    direction.sample.packets[i]
                )),
            },
        }
    }
    if words.is_empty() {
        return "never marked, slowed or dropped a packet".to_owned();
    }
    if !never.is_empty() {
        words.push(format!("never {}", never.join(", ")));
    }
    words.join("; ")
}

/// Requests that wait for a timer of TCP: how many, why, and what to do.
fn at_risk(
    out: &mut impl Write,
    paint: Paint,
    direction: &AppliedDirection,
    sample: &str,
) -> io::Result<()> {
    let Some(all) = direction.now.at_risk else { return Ok(()) };
    let Some(words) = all.words() else {
        // What a sender elsewhere has in flight is not known, so no drop on ingress is said to be none.
        return if all.is_whole() { writeln!(out, "    requests at risk: none") } else { Ok(()) };
    };
    let lately = direction.sample_at_risk.map_or(0, |lately| lately.packets());
    let line = format!(
        "requests at risk: {words}, {lately} in the last {sample}; they wait for TCP's timer"
    );
    writeln!(out, "    {}", if lately > 0 { paint.red(&line) } else { line })?;
    for (risk, packets) in all.causes() {
        writeln!(out, "      {packets} {}: {}; {}", risk.name, risk.help, risk.remedy)?;
    }
    Ok(())
}

fn show_sockets(out: &mut impl Write, paint: Paint, place: &Place) -> io::Result<()> {
    if place.sockets.is_empty() {
        return writeln!(out, "No TCP sockets.\n");
    }
    let several = place.sockets.iter().any(|s| s.asked) && !place.sockets.iter().all(|s| s.asked);
    // Where nothing is limited the others compete for nothing.
    let asked_alone = several && place.limits.is_empty();
    let shown = |socket: &&SocketSample| socket.asked || !asked_alone;
    let rows: Vec<_> = place.sockets.iter().filter(shown).map(|s| row(s, several)).collect();
    output::table(out, paint, &COLUMNS, &rows)?;
    let more = place.sockets_total - rows.len();
    if more > 0 && !asked_alone {
        writeln!(out, "and {more} more (--all)")?;
    }
    if !place.sockets_whole {
        writeln!(out, "There are more sockets than one look takes; some are missing.")?;
    }
    writeln!(out)
}

fn row(socket: &SocketSample, several: bool) -> Vec<String> {
    let process = match (socket.pid, &socket.comm) {
        (Some(pid), Some(comm)) => format!("{} ({pid})", output::in_line(comm)),
        _ => "-".to_owned(),
    };
    let mark = if several && socket.asked { "> " } else { "" };
    vec![
        format!("{mark}{}", socket.local),
        socket.remote.to_string(),
        process,
        socket.congestion_control.clone(),
        output::rate(socket.sent_bit_s),
        output::rate(socket.received_bit_s),
        socket.pacing_bit_s.map_or_else(|| "-".to_owned(), output::rate),
        output::time(i64::try_from(socket.rtt_ns).unwrap_or(i64::MAX)),
        format!("{} ({})", socket.retransmitted_segments, socket.retransmitted_segments_ever),
    ]
}

#[cfg(test)]
mod tests {
    use tidegate_host::{risk::AtRisk, status::DirectionStatus};

    use super::*;
    use crate::verbs::top::tests::limit;

    fn at_risk_text(all: Option<AtRisk>, lately: u64) -> String {
        let watched = limit("system.slice/web.service", Some((200, 100)), None);
        let sample = watched.sample.egress.unwrap();
        let direction = AppliedDirection {
            used_bit_s: sample.used_bit_s,
            now: DirectionStatus { at_risk: all, ..watched.status.egress.unwrap() },
            sample: sample.counters,
            sample_at_risk: all.map(|_| AtRisk([Some(lately), Some(0), Some(0)])),
        };
        let mut out = Vec::new();
        at_risk(&mut out, Paint::plain(), &direction, "1s").unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_request_at_risk_has_a_cause_and_a_remedy() {
        insta::assert_snapshot!(at_risk_text(Some(AtRisk([Some(1), Some(11), Some(2)])), 1), @r"
        requests at risk: 14 packets dropped with nothing else in flight (1 connecting, 11 credit_used, 2 not_paced), 1 in the last 1s; they wait for TCP's timer
          1 connecting: the first packet of a connection (SYN or SYN-ACK), which TCP sends again when its timer ends; raise the rate, or open fewer connections at once
          11 credit_used: the limit was behind by more than the credit for a packet with nothing else in flight; raise the rate, or let fewer connections send at once
          2 not_paced: the limit does not pace its connection, and has no credit for it; use scheme pace, and do not set SO_MAX_PACING_RATE above the share
        ");
    }

    #[test]
    fn none_is_said_only_where_all_causes_are_known() {
        assert_eq!(at_risk_text(Some(AtRisk([Some(0); 3])), 0).trim(), "requests at risk: none");
        assert_eq!(at_risk_text(Some(AtRisk([Some(0), None, None])), 0), "");
        assert_eq!(at_risk_text(None, 0), "", "a scheme that does not count them");
        insta::assert_snapshot!(at_risk_text(Some(AtRisk([Some(3), None, None])), 0), @r"
        requests at risk: 3 packets dropped with nothing else in flight (3 connecting), 0 in the last 1s; they wait for TCP's timer
          3 connecting: the first packet of a connection (SYN or SYN-ACK), which TCP sends again when its timer ends; raise the rate, or open fewer connections at once
        ");
    }
}
