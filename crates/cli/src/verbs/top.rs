//! `tidegate top`: all limits, live, on a terminal.
//!
//! [`model`] is what is shown and how keys and looks change it, [`draw`] puts it on a screen; both are pure.
//! Here are the terminal, the clock and the signals. The terminal is given back whatever ends us: the last
//! key, an error, a signal, a panic.

mod draw;
mod model;
#[cfg(test)]
pub(super) mod tests;

use std::{
    io::{IsTerminal, stdout},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyEventKind},
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use tidegate_agent::status::AgentStatus;
use tidegate_host::{sockets::Sampler, watch::Watch};

use self::model::{Model, TopSockets};
use tidegate_sys::{clock::monotonic_ns, names};

use crate::{args::TopArgs, refusal::UsageError};

/// The first look comes this soon, so that there is something to see.
const FIRST_LOOK: Duration = Duration::from_millis(250);
/// A signal waits this long at most.
const SIGNAL_POLL: Duration = Duration::from_millis(100);
/// Sockets that the detail pane knows at most.
const MAX_SHOWN: usize = 100;

pub fn run(store: &Path, run_dir: &Path, args: &TopArgs) -> Result<ExitCode> {
    if !stdout().is_terminal() {
        let message = "`top` needs a terminal to draw on; `tidegate monitor` writes lines";
        return Err(UsageError(message.to_owned()).into());
    }
    let watch = Watch::start(super::open(store)?)?;
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        let value = usize::try_from(number).unwrap_or(0);
        signal_hook::flag::register_usize(number, Arc::clone(&signal), value)?;
    }
    let screen = Screen::open()?;
    let (model, run_dir) = (Model::new(args.interval), run_dir.to_owned());
    let mut top = Top { watch, run_dir, model, sampler: None, signal };
    // Given back before anything is said, an error above all.
    let ended = top.attend(screen);
    Ok(ExitCode::from(ended?))
}

/// The terminal in raw mode with its other screen; dropped, it is as it was. A panic gives it back, too.
struct Screen(DefaultTerminal);

impl Screen {
    fn open() -> Result<Screen> {
        ratatui::try_init().map(Screen).map_err(|e| {
            let _ = ratatui::try_restore();
            e.into()
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = ratatui::try_restore();
    }
}

struct Top {
    watch: Watch,
    /// Where the agent says what it does.
    run_dir: PathBuf,
    model: Model,
    sampler: Option<Sampler>,
    /// The number of the last signal; 0 is none.
    signal: Arc<AtomicUsize>,
}

impl Top {
    /// Draws and listens until the user or a signal ends it; returns the exit code.
    fn attend(&mut self, mut screen: Screen) -> Result<u8> {
        let mut looked = Instant::now();
        let mut first = true;
        let mut changed = true;
        loop {
            if std::mem::take(&mut changed) {
                screen.0.draw(|frame| draw::draw(&self.model, frame.area(), frame.buffer_mut()))?;
            }
            let interval = self.model.interval();
            let due = looked + if first { interval.min(FIRST_LOOK) } else { interval };
            let wait = due.saturating_duration_since(Instant::now());
            if event::poll(wait.min(SIGNAL_POLL))? {
                match event::read()? {
                    Event::Key(key) if key.kind != KeyEventKind::Release => {
                        if self.model.key(key) {
                            return Ok(0);
                        }
                        self.follow();
                        changed = true;
                    }
                    Event::Resize(..) => changed = true,
                    _ => {}
                }
            }
            let signal = self.signal.load(Ordering::Relaxed);
            if signal > 0 {
                return Ok(u8::try_from(128 + signal).unwrap_or(u8::MAX));
            }
            if Instant::now() >= due {
                looked = Instant::now();
                if !self.model.is_paused() {
                    first = false;
                    self.look();
                    changed = true;
                }
            }
        }
    }

    fn look(&mut self) {
        match self.watch.look() {
            Ok(look) => {
                self.model.look(look.limits, monotonic_ns());
                let agent = AgentStatus::find(&self.run_dir).filter(|agent| agent.running);
                let waiting = self.watch.host().store().waiting();
                let reports = agent.map(|agent| agent.report.limits);
                self.model.kept(waiting, &names::users(), reports);
                if let Some(e) = look.unread.first() {
                    self.model.fail(e.to_string());
                }
            }
            Err(e) => self.model.fail(e.to_string()),
        }
        self.follow();
        let Some(sampler) = &mut self.sampler else { return };
        match sampler.look() {
            Ok(mut found) => {
                let total = found.list.len();
                found.list.truncate(MAX_SHOWN);
                sampler.name_holders(&mut found.list);
                self.model.sockets(Some(TopSockets { list: found.list, total }));
            }
            Err(e) => self.model.fail(e.to_string()),
        }
    }

    /// Looks at the sockets of the cgroup that is shown closely, and at no others.
    fn follow(&mut self) {
        let wanted = self.model.wanted_cgroup();
        if self.sampler.as_ref().map(|sampler| sampler.cgroup().path()) == wanted {
            return;
        }
        self.sampler = wanted.and_then(|path| {
            let hierarchy = self.watch.host().hierarchy();
            Sampler::start(hierarchy, hierarchy.open(path).ok()?).ok()
        });
        self.model.sockets(None);
    }
}
