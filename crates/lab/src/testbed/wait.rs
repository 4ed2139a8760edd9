//! Waiting: for a condition, with a deadline, and never past an interrupt.

use std::{
    error::Error,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use signal_hook::consts::{SIGINT, SIGTERM};

/// How long a condition may go unnoticed.
const POLL: Duration = Duration::from_millis(2);

/// SIGINT or SIGTERM came. Whoever gets this error returns at once; drops clean up on the way.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl Error for Interrupted {}

/// True once SIGINT or SIGTERM came. From the first call on, these signals no longer end the
/// process by themselves: its waits end instead, so that nothing is left behind.
pub fn interrupted() -> bool {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let flag = FLAG.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // Fails only for signals that cannot be caught; then the default action stays.
            let _ = signal_hook::flag::register(signal, Arc::clone(&flag));
        }
        flag
    });
    flag.load(Ordering::Relaxed)
}

/// Asks `condition` again and again until it gives a value. Errors: its own, an interrupt, or that
/// `what` did not happen within `deadline`.
pub fn wait_until<T>(
    what: &str,
    deadline: Duration,
    mut condition: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let started = Instant::now();
    loop {
        if interrupted() {
            return Err(Interrupted.into());
        }
        if let Some(value) = condition()? {
            return Ok(value);
        }
        if started.elapsed() >= deadline {
            anyhow::bail!("{what} did not happen within {deadline:?}");
        }
        thread::sleep(POLL);
    }
}

/// Lets time pass, as an experiment must; an interrupt ends it early with an error.
pub fn pass_time(duration: Duration) -> anyhow::Result<()> {
    let started = Instant::now();
    wait_until("the end of time", Duration::MAX, || {
        Ok((started.elapsed() >= duration).then_some(()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_says_what_was_awaited() {
        let error = wait_until("the moon", Duration::ZERO, || Ok(None::<()>)).unwrap_err();
        assert_eq!(error.to_string(), "the moon did not happen within 0ns");
    }

    #[test]
    fn a_condition_is_asked_until_it_holds() {
        let mut asked = 0;
        let value = wait_until("three", Duration::from_secs(10), || {
            asked += 1;
            Ok((asked == 3).then_some("three"))
        });
        assert_eq!(value.unwrap(), "three");
    }
}
