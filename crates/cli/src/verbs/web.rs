//! `tidegate web`, its server, and `tidegate history`, which asks that.

use std::{collections::BTreeMap, io::Write, path::Path, process::ExitCode};

use anyhow::{Context, Result, anyhow};
use hyper::Method;
use jiff::{Timestamp, tz::TimeZone};
use tidegate_chart::{Lines, Series};
use tidegate_fleet::http;
use tidegate_web::{
    SOCKET,
    history::{LimitHistory, Point, Series as History},
    reader::{self, ReaderError, ReaderOptions},
    server,
};

use crate::{
    args::{HistoryArgs, WebArgs},
    output::{self, Align, Column, Paint},
    refusal::{REFUSED, UsageError, say},
};

/// The verb that makes this program the server.
pub const SERVER: &str = "web-server";

const COLUMNS: [Column; 6] = [
    ("TIME", Align::Left),
    ("DIRECTION", Align::Left),
    ("USED", Align::Right),
    ("MOST", Align::Right),
    ("MAY USE", Align::Right),
    ("DROPPED/s", Align::Right),
];

pub fn run(
    store: &Path,
    (run_dir, files): (&Path, &Path),
    fleet: &Path,
    args: &WebArgs,
) -> Result<ExitCode> {
    let mut server = vec![SERVER.to_owned()];
    for address in &args.listen {
        server.extend(["--listen".to_owned(), address.to_string()]);
    }
    let socket = run_dir.join(SOCKET);
    let at = args.listen.iter().map(|address| format!(", http://{address}/"));
    let place = format!("{}{}", socket.display(), at.collect::<String>());
    let options = ReaderOptions {
        store: store.to_owned(),
        run_dir: run_dir.to_owned(),
        files: files.to_owned(),
        fleet: fleet.to_owned(),
        socket,
        server,
    };
    match reader::run(&options, || say(&format!("tidegate: the page is at {place}"))) {
        // It has said why.
        Err(ReaderError::Ended) => Ok(ExitCode::from(REFUSED)),
        done => done.map(|()| ExitCode::SUCCESS).map_err(Into::into),
    }
}

pub fn serve(args: &WebArgs) -> Result<ExitCode> {
    server::run(&args.listen)?;
    Ok(ExitCode::SUCCESS)
}

pub fn history(run_dir: &Path, args: &HistoryArgs) -> Result<ExitCode> {
    let socket = run_dir.join(SOCKET);
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if !args.name.bytes().all(known) {
        return Err(UsageError(format!("there is no limit `{}`", args.name)).into());
    }
    let body = http::request(&socket, Method::GET, &format!("/api/history/{}", args.name))?;
    let Some(body) = body else {
        let start = "start it with `systemctl enable --now tidegate-web`, or `tidegate web`";
        let what = "`tidegate web` does not run, which keeps the history";
        return Err(anyhow!("{what}; {start}"));
    };
    let mut out = output::stdout();
    if args.look.json {
        out.write_all(&body)?;
        writeln!(out)?;
        return Ok(ExitCode::SUCCESS);
    }
    let history: LimitHistory = serde_json::from_slice(&body)
        .context("another version of tidegate runs there; restart tidegate-web")?;
    if args.svg {
        writeln!(out, "{}", draw(&args.name, &history)?)?;
    } else {
        let mut rows: Vec<_> = directions(&history).flat_map(|(name, h)| rows(name, h)).collect();
        rows.sort();
        output::table(&mut out, Paint::stdout(), &COLUMNS, &rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn directions(history: &LimitHistory) -> impl Iterator<Item = (&'static str, &History)> {
    let egress = history.egress.iter().map(|series| ("egress", series));
    egress.chain(history.ingress.iter().map(|series| ("ingress", series)))
}

/// The hour by ten seconds, and the seconds since.
fn points(series: &History) -> impl Iterator<Item = &Point> {
    let coarse_to = series.coarse.back().map_or(0, |point| point.unix_s);
    series.coarse.iter().chain(series.fine.iter().filter(move |p| p.unix_s >= coarse_to))
}

/// A row a minute.
fn rows(direction: &str, series: &History) -> Vec<Vec<String>> {
    let mut minutes: BTreeMap<u32, Vec<&Point>> = BTreeMap::new();
    for point in points(series) {
        minutes.entry(point.unix_s.saturating_sub(1) / 60).or_default().push(point);
    }
    let row = |(minute, points): (u32, Vec<&Point>)| {
        let time = Timestamp::from_second(i64::from(minute) * 60).unwrap_or_default();
        let time = time.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M").to_string();
        let mean = |value: fn(&Point) -> f32| {
            points.iter().map(|point| f64::from(value(point))).sum::<f64>() / points.len() as f64
        };
        let most = points.iter().map(|point| point.used_bit_s).fold(0.0, f32::max);
        let rate = |bit_s: f64| output::rate(bit_s as u64);
        vec![
            time,
            direction.to_owned(),
            rate(mean(|p| p.used_bit_s)),
            rate(f64::from(most)),
            rate(mean(|p| p.may_use_bit_s)),
            format!("{:.1}", mean(|p| p.dropped_packets_s)),
        ]
    };
    minutes.into_iter().map(row).collect()
}

fn draw(name: &str, history: &LimitHistory) -> Result<String> {
    let all = || directions(history).flat_map(|(_, series)| points(series));
    let newest = all().map(|point| point.unix_s).max().unwrap_or_default();
    let mut series = Vec::new();
    for (direction, of) in directions(history) {
        let line = |system: String, value: fn(&Point) -> f32| Series {
            system,
            points: points(of)
                .map(|p| (-f64::from(newest.saturating_sub(p.unix_s)), f64::from(value(p))))
                .collect(),
        };
        series.push(line(direction.to_owned(), |p| p.used_bit_s));
        series.push(line(format!("{direction}, may use"), |p| p.may_use_bit_s));
    }
    let lines = Lines {
        title: format!("Limit {name}: the last hour"),
        x: "time_s".to_owned(),
        y: "used_bit_s".to_owned(),
        logarithmic: false,
        limit: None,
        series,
    };
    lines.svg()
}
