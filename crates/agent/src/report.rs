//! What the agent says of itself and of each limit of its files: a JSON file in the run directory, written as
//! a whole, from which `tidegate status` reads and the next agent learns what is its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use tidegate_host::world::user_of;
use tidegate_sys::{clock::monotonic_ns, files::lock};

/// The file, in the run directory.
const FILE: &str = "agent.json";
/// The lock of the agent that runs, with the time of its last [beat](Pulse::beat).
const LOCK: &str = "agent.lock";
/// An agent that has not beaten for so long hangs. An emulated machine needs a minute to load the programs of
/// one limit.
const SILENCE_MAX: Duration = Duration::from_secs(5 * 60);
/// Digits of the time in the lock.
const TIME_DIGITS: usize = 20;
/// Holds room for the journal of the next change: without a journal nothing is put on, and `/run` may be
/// full.
const ROOM: &str = "agent.room";
/// Twice what a journal takes.
const ROOM_BYTES: usize = 32 << 10;
/// The largest that is read.
const MAX_BYTES: u64 = 64 << 20;

/// Cgroups that are named of those that a limit is not on.
pub const LEFT_OUT_MAX: usize = 3;

/// What became of a limit of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitState {
    InForce,
    /// What it is to be on does not exist.
    Waiting,
    /// It cannot be, or the kernel has refused it; `reason` says why.
    Refused,
    /// Its schedule has no rate at this time.
    Off,
}

impl LimitState {
    pub fn name(self) -> &'static str {
        match self {
            LimitState::InForce => "in force",
            LimitState::Waiting => "waiting",
            LimitState::Refused => "refused",
            LimitState::Off => "off",
        }
    }
}

/// One limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitReport {
    pub name: String,
    pub file: String,
    /// In words: "unit `web.service`".
    pub scope: String,
    pub state: LimitState,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// It is refused, and an older one of its name is in force.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub stays: bool,
    /// It is refused, and a container or pod asked for it itself, by labels or annotations.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub guest: bool,
    pub required: bool,
    /// The row of its schedule that holds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub schedule: Option<String>,
    /// When its schedule gives it other rates: local time, with its offset.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next_change: Option<String>,
    /// The rates from then on, or `off`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next_rates: Option<String>,
    /// The paths of what it is on.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub cgroups: Vec<String>,
    /// Cgroups of its program that it is not on, as others run there, at most [`LEFT_OUT_MAX`]; those of the
    /// host first.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub left_out: Vec<String>,
}

impl LimitReport {
    /// Its state, and why: `waiting: no unit `web.service` runs`.
    pub fn words(&self) -> String {
        let reason = self.reason.iter().map(|reason| format!(": {reason}"));
        self.state.name().to_owned() + &reason.collect::<String>()
    }

    /// That it is in force, but not on all cgroups of its program, and why.
    pub fn left_out_words(&self) -> Option<String> {
        let is = self.state == LimitState::InForce && !self.left_out.is_empty();
        let reason = self.reason.as_ref().filter(|_| is)?;
        Some(format!("limit `{}` of {} is in force, but {reason}", self.name, self.file))
    }

    /// Whether it is not on a cgroup of the host, where its program runs. Users may run any program.
    pub fn leaves_out_a_host_cgroup(&self) -> bool {
        self.left_out.first().is_some_and(|cgroup| user_of(cgroup).is_none())
    }

    /// Its schedule in words, if it has one.
    pub fn schedule_words(&self) -> Option<String> {
        let now = match (self.state, &self.schedule) {
            (LimitState::Off, _) => "off by its schedule".to_owned(),
            (_, Some(row)) => format!("schedule {row}"),
            (_, None) if self.next_change.is_some() => "no row of its schedule holds".to_owned(),
            (_, None) => return None,
        };
        let then = self.next_change.iter().zip(&self.next_rates);
        let then = then.map(|(when, rates)| format!(" until {when}, then {rates}"));
        Some(now + &then.collect::<String>())
    }
}

/// Whether new cgroups are held until the agent has decided which limits are on them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateState {
    /// The files have no limit on cgroups.
    #[default]
    Unneeded,
    Open,
    /// It cannot be had here; `reason` says why. Cgroups are followed, but not held.
    Unavailable,
}

/// The gate before new cgroups.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateReport {
    pub state: GateState,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// How long a cgroup is held at most.
    pub deadline_ms: u64,
    /// Bytes of cgroups that were undecided when their deadline was over.
    pub late_bytes: u64,
    /// Cgroups that were not held, because too many were undecided.
    pub unheld_cgroups: u64,
    /// Events of cgroups that were lost; each time all cgroups were looked at.
    pub lost_events: u64,
}

/// All that the agent says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Its process. Whether it lives is known by its lock.
    pub pid: u32,
    pub directory: String,
    /// Where its limits are.
    #[serde(default)]
    pub store: String,
    /// What is wrong with the files; the limits that were in force before stay.
    pub errors: Vec<String>,
    pub limits: Vec<LimitReport>,
    /// Names of limits on the host that are the agent's to take off.
    pub managed: BTreeSet<String>,
    /// What is known of each engine of containers, by its socket.
    pub engines: BTreeMap<String, String>,
    #[serde(default)]
    pub gate: GateReport,
}

impl Report {
    /// Whether the agent is missed when it has ended: its files ask for something, or it has limits.
    pub fn is_missed(&self) -> bool {
        let has_limits = !self.limits.is_empty() || !self.managed.is_empty();
        has_limits || self.gate.state != GateState::Unneeded
    }
}

/// The directory in which the agent has its files.
#[derive(Debug, Clone)]
pub struct RunFiles(PathBuf);

impl RunFiles {
    pub fn at(dir: &Path) -> RunFiles {
        RunFiles(dir.to_owned())
    }

    /// What an agent has said last; `None` if none has since the host started.
    pub fn read(&self) -> Option<Report> {
        let path = self.0.join(FILE);
        let size = fs::metadata(&path).ok()?.len();
        let text = (size <= MAX_BYTES).then(|| fs::read_to_string(path).ok())??;
        serde_json::from_str(&text).ok()
    }

    /// Writes a report as a whole.
    ///
    /// # Errors
    /// Those of the operating system; what was there stays.
    pub fn write(&self, report: &Report) -> io::Result<()> {
        let part = self.0.join(format!(".{FILE}.{}", report.pid));
        let text = serde_json::to_vec_pretty(report)?;
        let written = fs::write(&part, text).and_then(|()| fs::rename(&part, self.0.join(FILE)));
        written.inspect_err(|_| drop(fs::remove_file(&part)))
    }

    /// Empties what an agent of a store has said that has ended: nothing of it is left. That one has run
    /// since the host started stays known.
    pub fn forget(&self, store: &Path) {
        let is_of = |report: &Report| Path::new(&report.store) == store;
        if let Some(Report { pid, directory, store, .. }) = self.read().filter(is_of)
            && !self.runs()
        {
            let _ = self.write(&Report { pid, directory, store, ..Report::default() });
        }
    }

    /// Whether no agent has run here since the host started.
    pub fn is_new(&self) -> bool {
        self.read().is_none() && !self.runs()
    }

    /// Keeps room for a change, if there is some.
    pub fn keep_room(&self) {
        let path = self.0.join(ROOM);
        let kept = fs::metadata(&path).is_ok_and(|meta| meta.len() == ROOM_BYTES as u64);
        if !kept && fs::write(&path, [0; ROOM_BYTES]).is_err() {
            let _ = fs::remove_file(&path);
        }
    }

    /// Leaves the room to the change that begins.
    pub fn give_room(&self) {
        let _ = fs::remove_file(self.0.join(ROOM));
    }

    /// Whether an agent runs: somebody holds its lock.
    pub fn runs(&self) -> bool {
        use rustix::fs::{FlockOperation, flock};
        let Ok(file) = fs::File::open(self.0.join(LOCK)) else { return false };
        flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    }

    /// For how long the agent that runs has done nothing, if it hangs.
    pub fn silence(&self) -> Option<Duration> {
        self.silence_at(monotonic_ns())
    }

    fn silence_at(&self, now_ns: u64) -> Option<Duration> {
        let beat_ns = fs::read_to_string(self.0.join(LOCK)).ok()?.trim().parse().ok()?;
        let silence = Duration::from_nanos(now_ns.saturating_sub(beat_ns));
        (silence > SILENCE_MAX).then_some(silence)
    }

    /// Keeps other agents out while the pulse lives; `None` if one runs.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn lock(&self) -> io::Result<Option<Pulse>> {
        let pulse = lock(&self.0.join(LOCK))?.map(Pulse);
        // The time of the agent before it is no longer true.
        pulse.iter().for_each(|pulse| pulse.write(monotonic_ns()));
        Ok(pulse)
    }
}

/// By this systemd's watchdog, and `tidegate status`, see that the agent goes on.
#[derive(Debug)]
pub struct Pulse(fs::File);

impl Pulse {
    /// The agent beats at least so often.
    pub const PERIOD: Duration = Duration::from_secs(20);

    /// The agent goes on. `more` is for systemd.
    pub fn beat(&self, more: &[NotifyState<'_>]) {
        self.write(monotonic_ns());
        let _ = sd_notify::notify(false, &[&[NotifyState::Watchdog], more].concat());
    }

    fn write(&self, now_ns: u64) {
        // Each has the same length, so nothing of an earlier one stays. On a full disk the last one stays.
        let _ = self.0.write_all_at(format!("{now_ns:0TIME_DIGITS$}").as_bytes(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_whose_limits_were_detached_has_run_and_is_not_missed() {
        let dir = tempfile::tempdir().unwrap();
        let (files, store) = (RunFiles::at(dir.path()), "/sys/fs/bpf/tidegate");
        assert!(files.is_new());
        let managed = BTreeSet::from(["web".to_owned()]);
        let report = Report { pid: 7, store: store.to_owned(), managed, ..Report::default() };
        files.write(&report).unwrap();
        files.forget(Path::new("/sys/fs/bpf/other"));
        assert_eq!(files.read(), Some(report.clone()));
        files.forget(Path::new(store));
        let left = files.read().unwrap();
        assert!(report.is_missed() && !left.is_missed() && !files.is_new(), "{left:?}");
    }

    #[test]
    fn an_agent_that_does_not_beat_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let files = RunFiles::at(dir.path());
        let later = |beat_ns: u64, silence: Duration| beat_ns + silence.as_nanos() as u64;
        assert_eq!(files.silence(), None);
        let pulse = files.lock().unwrap().unwrap();
        assert_eq!(files.silence(), None);
        for beat_ns in [u64::MAX / 2, 1_000] {
            pulse.write(beat_ns);
            assert_eq!(files.silence_at(later(beat_ns, SILENCE_MAX)), None);
            let silence = SILENCE_MAX + Duration::from_secs(1);
            assert_eq!(files.silence_at(later(beat_ns, silence)), Some(silence));
        }
        pulse.beat(&[]);
        assert_eq!(files.silence(), None);
        pulse.write(1_000);
        drop(pulse);
        // The next agent begins anew, and one of an earlier version writes no time.
        let pulse = files.lock().unwrap().unwrap();
        assert_eq!(files.silence(), None);
        pulse.0.set_len(0).unwrap();
        assert_eq!(files.silence_at(u64::MAX), None);
    }
}
