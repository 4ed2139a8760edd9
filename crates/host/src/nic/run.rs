//! A software NIC that runs: it is asked what happens, again and again, until it ends.

use std::{
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    io,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::process::Signal;
use tidegate_core::{Direction, Nanos, Rate};
use tidegate_nic::{
    relay::{End, Event, Relay, RelayError, RelayOptions, THREADS_MAX},
    source::PortName,
    waiter::now,
};
use tidegate_sys::process::SignalQueue;

use super::{
    NicSpec,
    sample::{NicSample, Reading},
    state::{Claim, LimitState, NicStatus, RunDir, StateError},
};
use crate::spec::{Spec, SpecError};

/// Time between two looks at what the threads tell.
const LOOK_EVERY: Nanos = Nanos(100_000_000);
/// Time between two writings of the state for others.
const STATE_EVERY: Nanos = Nanos(1_000_000_000);
const ENDING: [i32; 3] = [Signal::TERM.as_raw(), Signal::INT.as_raw(), Signal::QUIT.as_raw()];

#[derive(Debug, Clone)]
pub struct NicOptions {
    pub spec: NicSpec,
    /// The file that it is from, to be read again on SIGHUP.
    pub file: Option<PathBuf>,
    /// Its threads: queues of each port.
    pub shapers: u32,
    pub relay: RelayOptions,
    /// TAP devices that it makes stay when it ends.
    pub persistent: bool,
    /// Time between two samples; none: no samples.
    pub interval: Option<Duration>,
    /// Where others see that it runs.
    pub run_dir: PathBuf,
}

/// Why a software NIC does not run.
#[derive(Debug, thiserror::Error)]
pub enum NicRunError {
    #[error(
        "{0}: no `[[nic]]` in it; write for example ports = [\"tap:vm0\", \"xdp:eth1\"] under one"
    )]
    NoNic(String),
    #[error("{file}: several nics; say which one with --name: {}", .names.join(", "))]
    WhichNic { file: String, names: Vec<String> },
    #[error("{file}: no nic `{name}` in it; it has {}", .names.join(", "))]
    NoSuchNic { file: String, name: String, names: Vec<String> },
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Relay(#[from] RelayError),
    /// Another one runs, or the state cannot be written.
    #[error(transparent)]
    State(#[from] StateError),
    #[error("cannot wait for signals: {0}")]
    Signals(io::Error),
}

#[derive(Debug, Clone)]
pub enum Happening {
    /// An interval is over.
    Sample(Box<NicSample>),
    /// Something that an operator wants to know.
    Event(NicEvent),
    /// A signal asked it to end.
    Ended,
}

/// Something that an operator wants to know, as one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NicEvent {
    /// A port went away.
    Gone(PortName),
    Back(PortName),
    /// It is there but cannot be opened.
    Refused(PortName, String),
    /// The spec was read again; what changed.
    Reloaded(Vec<String>),
    /// The spec was read again and is not taken.
    NotReloaded(String),
}

impl NicEvent {
    pub fn is_warning(&self) -> bool {
        !matches!(self, NicEvent::Back(_) | NicEvent::Reloaded(_))
    }
}

impl fmt::Display for NicEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NicEvent::Gone(port) => write!(
                f,
                "port {port} is gone; packets for it are dropped, and it is opened again when it is back"
            ),
            NicEvent::Back(port) => write!(f, "port {port} is back"),
            NicEvent::Refused(port, why) => {
                write!(f, "port {port} cannot be opened: {why}; trying again")
            }
            NicEvent::Reloaded(changes) if changes.is_empty() => {
                f.write_str("the spec was read again: nothing changed")
            }
            NicEvent::Reloaded(changes) => {
                write!(f, "the spec was read again: {}", changes.join(", "))
            }
            NicEvent::NotReloaded(why) => write!(f, "{why}; everything stays as it is"),
        }
    }
}

/// The NIC of a file that is meant.
///
/// # Errors
/// [`NicRunError`] if there is none, or if it is not clear which one.
pub fn choose(spec: Spec, name: Option<&str>) -> Result<NicSpec, NicRunError> {
    let Spec { file, mut nics, .. } = spec;
    let names = || nics.iter().map(|nic| nic.name.clone()).collect();
    match name {
        _ if nics.is_empty() => Err(NicRunError::NoNic(file)),
        None if nics.len() > 1 => Err(NicRunError::WhichNic { file, names: names() }),
        None => Ok(nics.remove(0)),
        Some(name) => match nics.iter().position(|nic| nic.name == name) {
            Some(at) => Ok(nics.remove(at)),
            None => Err(NicRunError::NoSuchNic { file, name: name.to_owned(), names: names() }),
        },
    }
}

/// A software NIC that runs. Dropping it ends it: its ports are closed, what waits is dropped.
pub struct RunningNic {
    options: NicOptions,
    relay: Relay,
    signals: SignalQueue,
    claim: Claim,
    began: Reading,
    earlier: Reading,
    next_sample: Option<Nanos>,
    next_state: Nanos,
    /// The longest waits since the last sample, and since the start.
    waits: [[Nanos; 2]; 2],
    /// Queues of each port that are gone.
    gone: [usize; 2],
}

impl RunningNic {
    /// Opens the ports and starts. Signals of this thread and those that it starts are kept back from now on.
    ///
    /// # Errors
    /// [`NicRunError`]; nothing is left behind.
    pub fn start(options: NicOptions) -> Result<RunningNic, NicRunError> {
        let signals = [&ENDING[..], &[Signal::HUP.as_raw()]].concat();
        let signals = SignalQueue::block(&signals).map_err(NicRunError::Signals)?;
        let claim = RunDir::at(&options.run_dir).claim(&options.spec.name)?;
        let shapers = options.shapers.clamp(1, THREADS_MAX as u32);
        let [a, b] =
            options.spec.ports.each_ref().map(|port| port.sources(shapers, options.persistent));
        let seed = RandomState::new().build_hasher().finish();
        let mut relay = Relay::start(options.relay, (a, b), seed)?;
        for to in End::BOTH {
            relay.set_limit(to, options.spec.lane_limit(to))?;
        }
        let began = Reading::of(now(), &relay.report()?);
        let earlier = began.clone();
        let mut nic = RunningNic {
            relay,
            signals,
            claim,
            began,
            earlier,
            next_sample: None,
            next_state: Nanos(0),
            waits: [[Nanos(0); 2]; 2],
            gone: [0; 2],
            options,
        };
        nic.next_sample = nic.after_interval(now());
        nic.write_state(now())?;
        Ok(nic)
    }

    /// As it was asked for, with the limits of now.
    pub fn spec(&self) -> &NicSpec {
        &self.options.spec
    }

    /// Waits for the next thing that happens.
    ///
    /// # Errors
    /// If a thread of it has ended; then it is of no more use.
    pub fn wait(&mut self) -> Result<Happening, NicRunError> {
        loop {
            while let Some(event) = self.relay.event() {
                if let Some(event) = self.event_of(event) {
                    self.write_state(now())?;
                    return Ok(Happening::Event(event));
                }
            }
            let time = now();
            self.relay.tick(time);
            if time >= self.next_state {
                self.write_state(time)?;
            }
            if self.next_sample.is_some_and(|at| time >= at) {
                return self.sample(time).map(|sample| Happening::Sample(Box::new(sample)));
            }
            let look = Nanos(time.0.saturating_add(LOOK_EVERY.0));
            let next = [self.next_sample, self.relay.next_deadline(), Some(self.next_state)];
            let next = next.into_iter().flatten().fold(look, Nanos::min);
            let timeout = Duration::from_nanos(next.0.saturating_sub(time.0));
            match self.signals.wait(timeout).map_err(NicRunError::Signals)? {
                Some(received) if received.signal == Signal::HUP.as_raw() => {
                    return self.reload().map(Happening::Event);
                }
                Some(received) if ENDING.contains(&received.signal) => return Ok(Happening::Ended),
                _ => {}
            }
            if !self.relay.is_running() {
                // Says why.
                self.relay.report()?;
            }
        }
    }

    /// What it did since the last sample, now.
    ///
    /// # Errors
    /// If a thread of it has ended.
    pub fn sample(&mut self, time: Nanos) -> Result<NicSample, NicRunError> {
        let mut reading = self.read(time)?;
        reading.raise_waits(std::mem::take(&mut self.waits[0]));
        let sample = self.between(&self.earlier, &reading);
        self.earlier = reading;
        self.next_sample = self.after_interval(time);
        Ok(sample)
    }

    /// Ends it.
    ///
    /// # Errors
    /// If a thread of it had ended before.
    pub fn stop(self) -> Result<(), NicRunError> {
        Ok(self.relay.stop()?)
    }

    fn read(&mut self, time: Nanos) -> Result<Reading, NicRunError> {
        let mut reading = Reading::of(time, &self.relay.report()?);
        let waits = reading.raise_waits([Nanos(0); 2]);
        for (known, wait) in self.waits.iter_mut().flat_map(|known| known.iter_mut().zip(waits)) {
            *known = wait.max(*known);
        }
        Ok(reading)
    }

    fn between(&self, earlier: &Reading, now: &Reading) -> NicSample {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let unix_ns = u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX);
        let queues = self.options.shapers as usize;
        NicSample::between(&self.options.spec, queues, (earlier, now), unix_ns)
    }

    fn after_interval(&self, time: Nanos) -> Option<Nanos> {
        let interval = u64::try_from(self.options.interval?.as_nanos()).unwrap_or(u64::MAX);
        // On the grid of the last one, unless that is over already.
        let next = self.next_sample.map(|at| Nanos(at.0.saturating_add(interval)));
        let late = Nanos(time.0.saturating_add(interval));
        Some(next.filter(|at| *at > time).unwrap_or(late))
    }

    fn write_state(&mut self, time: Nanos) -> Result<(), NicRunError> {
        let mut reading = self.read(time)?;
        reading.raise_waits(self.waits[1]);
        let totals = self.between(&self.began, &reading);
        let NicOptions { spec, file, .. } = &self.options;
        let (name, limits) = (spec.name.as_str(), LimitState::of(spec));
        let (pid, spec) = (std::process::id(), file.as_deref());
        self.claim.write(&NicStatus { name, pid, spec, limits, totals: &totals })?;
        self.next_state = Nanos(time.0.saturating_add(STATE_EVERY.0));
        Ok(())
    }

    /// What an operator needs to know of an event: once for a port, however many queues it has.
    fn event_of(&mut self, event: Event) -> Option<NicEvent> {
        let port = |end: End| self.options.spec.ports[end as usize].clone();
        match event {
            Event::Gone(end) => {
                self.gone[end as usize] += 1;
                (self.gone[end as usize] == 1).then(|| NicEvent::Gone(port(end)))
            }
            Event::Back(end) => {
                self.gone[end as usize] = self.gone[end as usize].saturating_sub(1);
                (self.gone[end as usize] == 0).then(|| NicEvent::Back(port(end)))
            }
            Event::Refused(end, why) => Some(NicEvent::Refused(port(end), why)),
        }
    }

    /// Reads the file again; all of it is taken, or nothing.
    fn reload(&mut self) -> Result<NicEvent, NicRunError> {
        let Some(file) = &self.options.file else {
            let why = "SIGHUP: there is no spec file to read again (see --spec)".to_owned();
            return Ok(NicEvent::NotReloaded(why));
        };
        let new = Spec::read_regular(file).map_err(NicRunError::from);
        let new = match new.and_then(|spec| choose(spec, Some(&self.options.spec.name))) {
            Ok(new) => new,
            Err(error) => return Ok(NicEvent::NotReloaded(error.to_string())),
        };
        if new.ports != self.options.spec.ports {
            let why = format!(
                "{}:{}: the ports of a nic that runs cannot change; start it anew",
                file.display(),
                new.line
            );
            return Ok(NicEvent::NotReloaded(why));
        }
        for to in End::BOTH {
            self.relay.set_limit(to, new.lane_limit(to))?;
        }
        let changes = changes(&self.options.spec, &new);
        self.options.spec = new;
        self.write_state(now())?;
        Ok(NicEvent::Reloaded(changes))
    }
}

/// In what the limits differ, in the words of the file.
fn changes(from: &NicSpec, to: &NicSpec) -> Vec<String> {
    let all = |spec: &NicSpec| {
        let limits = spec.limits.iter().flat_map(|limit| {
            Direction::BOTH.map(|direction| {
                (format!("{} {}", limit.name, direction.name()), limit.direction(direction))
            })
        });
        limits.collect::<Vec<_>>()
    };
    let (from, to) = (all(from), all(to));
    let show = |rate: Option<Rate>| rate.map_or_else(|| "none".to_owned(), |rate| rate.to_string());
    let mut names: Vec<_> = from.iter().chain(&to).map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    let find = |list: &[(String, Option<_>)], name: &String| {
        list.iter().find(|(known, _)| known == name).and_then(|(_, limit)| *limit)
    };
    let change = |name: &String| {
        let (was, is) = (find(&from, name), find(&to, name));
        let rate = |limit: Option<tidegate_nic::lane::LaneLimit>| limit.map(|limit| limit.rate);
        match (was, is) {
            _ if was == is => None,
            _ if rate(was) != rate(is) => {
                Some(format!("{name} {} -> {}", show(rate(was)), show(rate(is))))
            }
            _ => Some(format!("{name}: burst or mark")),
        }
    };
    names.into_iter().filter_map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(limits: &str) -> Spec {
        let nic = "[[nic]]\nname = \"a\"\nports = [\"tap:x\", \"tap:y\"]\n";
        let limit = "[[limit]]\nname = \"l\"\nscope = { port = \"x\" }\nscheme = \"carousel\"\n";
        Spec::parse("f", &format!("{nic}{limit}{limits}")).unwrap()
    }

    #[test]
    fn the_nic_that_is_meant_is_chosen() {
        let one = || spec("egress = \"1mbit\"");
        assert_eq!(choose(one(), None).unwrap().name, "a");
        assert_eq!(choose(one(), Some("a")).unwrap().name, "a");
        assert_eq!(
            choose(one(), Some("b")).unwrap_err().to_string(),
            "f: no nic `b` in it; it has a"
        );
        let mut two = one();
        two.nics.push(NicSpec { name: "b".into(), ..two.nics[0].clone() });
        let message = choose(two, None).unwrap_err().to_string();
        assert_eq!(message, "f: several nics; say which one with --name: a, b");
        let none = Spec { nics: Vec::new(), ..one() };
        assert!(choose(none, None).unwrap_err().to_string().starts_with("f: no `[[nic]]` in it"));
    }

    #[test]
    fn changes_are_in_the_words_of_the_file() {
        let said = |from: &str, to: &str| {
            let [from, to] = [from, to].map(|text| choose(spec(text), None).unwrap());
            changes(&from, &to)
        };
        assert!(said("egress = \"1mbit\"", "egress = \"1mbit\"").is_empty());
        assert_eq!(said("egress = \"1mbit\"", "egress = \"2mbit\""), ["l egress 1mbit -> 2mbit"]);
        let moved = said("egress = \"1mbit\"", "ingress = \"1mbit\"");
        assert_eq!(moved, ["l egress 1mbit -> none", "l ingress none -> 1mbit"]);
        let burst = said("egress = \"1mbit\"", "egress = \"1mbit\"\nburst = \"5ms\"");
        assert_eq!(burst, ["l egress: burst or mark"]);
    }
}
