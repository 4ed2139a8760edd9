//! `tidegate nic`: a software NIC between two ports, until a signal ends it.

use std::{
    io::{self, IsTerminal, Write, stdout},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::Result;
use tidegate_core::{Rate, Scope};
use tidegate_host::{
    nic::{
        self, NicError, NicLimit, NicSpec,
        run::{Happening, NicOptions, RunningNic, choose},
        sample::NicSample,
    },
    spec::Spec,
};
use tidegate_nic::relay::End;
use tidegate_sys::store;

use crate::{
    args::NicArgs,
    output::{self, Align, Column, Paint},
    refusal::{UsageError, say},
};

/// Between two lines, where nothing else is said.
const INTERVAL: Duration = Duration::from_secs(1);
/// The head is said again after so many lines.
const HEAD_EVERY: usize = 24;

const COLUMNS: [Column; 10] = [
    ("FROM", Align::Left),
    ("TO", Align::Left),
    ("LIMIT", Align::Right),
    ("USED", Align::Right),
    ("USED%", Align::Right),
    ("FLOWS", Align::Right),
    ("WAIT", Align::Right),
    ("WAITMAX", Align::Right),
    ("MARKED", Align::Right),
    ("DROPPED", Align::Right),
];
const WIDTHS: [usize; COLUMNS.len()] = [10, 10, 10, 10, 6, 6, 8, 8, 8, 8];

pub fn run(run_dir: &Path, args: &NicArgs) -> Result<ExitCode> {
    let spec = match &args.spec {
        Some(file) => choose(Spec::read(file)?, args.name.as_deref())?,
        None => of_flags(args)?,
    };
    let shown = args.json || stdout().is_terminal();
    let mut nic = RunningNic::start(NicOptions {
        spec,
        file: args.spec.clone(),
        shapers: args.tuning.shapers,
        relay: args.relay(),
        persistent: args.tuning.persistent,
        interval: args.interval.or(shown.then_some(INTERVAL)),
        run_dir: run_dir.to_owned(),
    })?;
    say(&format!("tidegate: {} runs: {}", nic.spec(), limits(nic.spec())));
    let mut lines = 0;
    loop {
        match nic.wait()? {
            Happening::Sample(sample) => show(&sample, args.json, &mut lines)?,
            Happening::Event(event) => {
                let level = if event.is_warning() { "warning: " } else { "" };
                say(&format!("tidegate: {level}{event}"));
            }
            Happening::Ended => break,
        }
    }
    nic.stop()?;
    Ok(ExitCode::SUCCESS)
}

/// A NIC as the command line says it: the limits are those of the workload behind the first port.
fn of_flags(args: &NicArgs) -> Result<NicSpec> {
    let refuse = |what: String| Err(UsageError(what).into());
    let Ok(ports) = <[_; 2]>::try_from(args.ports.clone()) else {
        return refuse("write two ports, for example `tap:vm0 xdp:eth1`".to_owned());
    };
    if ports[0] == ports[1] {
        return refuse(NicError::Itself(ports[0].clone()).to_string());
    }
    let patch = args.patch();
    if let Err((field, problem)) = nic::check(&patch) {
        return refuse(format!("--{field}: {problem}"));
    }
    let name = match &args.name {
        Some(name) => name.clone(),
        // A device may be called as no NIC may.
        None => ports[0].device.replace(|c: char| !c.is_ascii_alphanumeric(), "-"),
    };
    if store::check_name(&name).is_err() {
        return refuse(format!("--name: {}", NicError::Name(name)));
    }
    let scope = Scope::Port(ports[0].to_string().split_once(':').map_or("", |(_, p)| p).to_owned());
    let limit = NicLimit::new(name.clone(), scope, End::A, &patch, 0);
    Ok(NicSpec { name, ports, limits: vec![limit], line: 0 })
}

/// What holds in each direction, in one line.
fn limits(spec: &NicSpec) -> String {
    let direction = |to: End| {
        let names = [to.other(), to].map(|end| spec.ports[end as usize].device.as_str());
        let rate = spec.lane_limit(to).map(|limit| limit.rate.to_string());
        format!("{} -> {} {}", names[0], names[1], rate.as_deref().unwrap_or("without a limit"))
    };
    let again = if spec.line > 0 { "; SIGHUP reads the spec again" } else { "" };
    format!("{}, {}{again}", direction(End::B), direction(End::A))
}

fn show(sample: &NicSample, json: bool, lines: &mut usize) -> Result<()> {
    let mut out = output::stdout();
    if json {
        writeln!(out, "{}", serde_json::to_string(sample)?)?;
    } else {
        table(&mut out, sample, lines)?;
    }
    Ok(out.flush()?)
}

fn table(out: &mut impl Write, sample: &NicSample, lines: &mut usize) -> io::Result<()> {
    for direction in &sample.directions {
        if lines.is_multiple_of(HEAD_EVERY) {
            let heads = COLUMNS.map(|(head, _)| head.to_owned());
            let heads = output::line(&COLUMNS, &WIDTHS, &heads);
            writeln!(out, "{}", Paint::stdout().bold(&heads))?;
        }
        *lines += 1;
        let time = |ns: u64| output::time(i64::try_from(ns).unwrap_or(i64::MAX));
        let percent =
            |rate: u64| format!("{:.1}", 100.0 * direction.used_bit_s as f64 / rate as f64);
        let rate = direction.rate_bit_s.and_then(Rate::from_bit_s);
        let cells = [
            direction.from.clone(),
            direction.to.clone(),
            rate.map_or_else(|| "none".to_owned(), |rate| rate.to_string()),
            output::rate(direction.used_bit_s),
            direction.rate_bit_s.map(percent).unwrap_or_default(),
            direction.flows.to_string(),
            time(direction.wait_ns_average),
            time(direction.wait_ns_max),
            direction.counters.of("marked_packets").to_string(),
            direction.dropped().to_string(),
        ];
        writeln!(out, "{}", output::line(&COLUMNS, &WIDTHS, &cells))?;
    }
    Ok(())
}
