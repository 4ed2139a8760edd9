//! What a user asked of a limit, kept beside its pins as the target of a symbolic link. It lives as long as
//! the pins do. Another version of Tidegate can read it, even where it cannot read the maps, and so can put
//! the same limit on again.
//!
//! ```text
//! NAME/intent -> {"abi":1,"build":"0.1.0","scheme":"pace","egress":{"rate":"50mbit"}, ...}
//! ```
//!
//! Values are written as on a command line. What was not given is left out. Scope and parent have links of
//! their own (see [`super`]).

use std::{fs, io, path::Path, str::FromStr};

use rustix::fs::{CWD, RenameFlags, rename, renameat_with};
use serde::{Deserialize, Serialize};
use tidegate_core::{
    Class, Direction, Rate, Span,
    police::{MeterText, Policy},
    queue_options::VirtualQueueOptions,
};

use super::{PinnedLimit, StoreError, io_error, symlink};
use crate::{BUILD, intf::ABI, limit::LimitOptions};

const INTENT: &str = "intent";
/// What a change is about to write, then what was before it.
const OTHER: &str = "intent_other";

/// Who made a limit, and what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Intent {
    /// The layout of its maps: [`ABI`] of the version that made it.
    pub abi: u32,
    /// Whose programs it runs: [`BUILD`] of the version that made it.
    pub build: String,
    /// What it does. `None` if this version cannot express it.
    pub options: Option<LimitOptions>,
}

/// The members that every version has.
#[derive(Deserialize)]
struct Header {
    abi: u32,
    build: String,
}

/// All members of this version. One that is not among them is refused: it might be what spares somebody.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    abi: u32,
    build: String,
    scheme: String,
    /// Why the scheme was chosen; left out: it was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chosen: Option<String>,
    /// Nobody follows the schedule that its rates are of. Left out elsewhere, so that an earlier build with
    /// this ABI reads all other limits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    unfollowed: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    egress: Option<Queue>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ingress: Option<Queue>,
    loopback: bool,
    pace_ceiling: bool,
    rto_min: String,
    delack_max: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    class: Option<Place>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    meter: Option<String>,
    /// By colour.
    actions: [String; 3],
    fair: bool,
    hook: String,
    exempt: String,
    #[serde(rename = "match")]
    matched: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Queue {
    rate: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    burst: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mark: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drop: Option<String>,
}

/// Among the children of its parent.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    weight: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guarantee: Option<String>,
}

/// A value that this version cannot read.
struct Unknown;

fn read<T: FromStr>(text: &str) -> Result<T, Unknown> {
    text.parse().map_err(|_| Unknown)
}

impl Queue {
    fn of(queue: &VirtualQueueOptions) -> Queue {
        let span = |span: Option<Span>| span.map(|span| span.to_string());
        Queue {
            rate: queue.rate.to_string(),
            burst: span(queue.burst),
            mark: span(queue.mark),
            drop: span(queue.drop),
        }
    }

    fn options(&self) -> Result<VirtualQueueOptions, Unknown> {
        let span = |span: &Option<String>| span.as_deref().map(read::<Span>).transpose();
        Ok(VirtualQueueOptions {
            burst: span(&self.burst)?,
            mark: span(&self.mark)?,
            drop: span(&self.drop)?,
            ..VirtualQueueOptions::new(read(&self.rate)?)
        })
    }
}

impl Text {
    fn of(options: &LimitOptions, build: &str) -> Text {
        Text {
            abi: ABI,
            build: build.to_owned(),
            scheme: options.scheme.to_string(),
            chosen: options.chosen.map(|why| why.to_string()),
            unfollowed: options.unfollowed,
            egress: options.egress.as_ref().map(Queue::of),
            ingress: options.ingress.as_ref().map(Queue::of),
            loopback: options.loopback,
            pace_ceiling: options.pace_ceiling,
            rto_min: options.rto_min.to_string(),
            delack_max: options.delack_max.to_string(),
            class: options.class.map(|class| Place {
                weight: class.weight,
                guarantee: class.guarantee.map(|rate| rate.to_string()),
            }),
            meter: options.police.meter.map(|meter| meter.to_string()),
            actions: options.police.actions.map(|action| action.to_string()),
            fair: options.police.fair,
            hook: options.police.hook.to_string(),
            exempt: options.exempt.to_string(),
            matched: options.matched.to_string(),
        }
    }

    fn options(&self) -> Result<LimitOptions, Unknown> {
        let class = self.class.as_ref().map(|class| {
            let guarantee = class.guarantee.as_deref().map(read::<Rate>).transpose()?;
            Ok(Class { guarantee, weight: class.weight })
        });
        let meter = |text| read::<MeterText>(text)?.meter().map_err(|_| Unknown);
        let [green, yellow, red] = &self.actions;
        Ok(LimitOptions {
            egress: self.egress.as_ref().map(Queue::options).transpose()?,
            ingress: self.ingress.as_ref().map(Queue::options).transpose()?,
            loopback: self.loopback,
            scheme: read(&self.scheme)?,
            chosen: self.chosen.as_deref().map(read).transpose()?,
            unfollowed: self.unfollowed,
            pace_ceiling: self.pace_ceiling,
            rto_min: read(&self.rto_min)?,
            delack_max: read(&self.delack_max)?,
            class: class.transpose()?,
            police: Policy {
                meter: self.meter.as_deref().map(meter).transpose()?,
                actions: [read(green)?, read(yellow)?, read(red)?],
                fair: self.fair,
                hook: read(&self.hook)?,
            },
            exempt: read(&self.exempt)?,
            matched: read(&self.matched)?,
        })
    }
}

impl PinnedLimit {
    /// The options that were asked for, at the rates in force: a group may have lent others.
    pub fn options(&self) -> LimitOptions {
        let mut options = self.asked;
        for direction in Direction::BOTH {
            if let (Some(queue), Some(rate)) =
                (options.queue_mut(direction), self.limit.rate(direction))
            {
                queue.rate = rate;
            }
        }
        options
    }
}

impl Intent {
    /// Whether a newer version has made it.
    pub fn is_newer(&self) -> bool {
        self.abi > ABI
    }

    /// As the target of a link.
    fn text(options: &LimitOptions, build: &str) -> String {
        // Strings, numbers and flags always are JSON.
        serde_json::to_string(&Text::of(options, build)).unwrap_or_default()
    }

    fn parse(text: &str) -> Option<Intent> {
        let Header { abi, build } = serde_json::from_str(text).ok()?;
        let options = serde_json::from_str::<Text>(text).ok().and_then(|text| text.options().ok());
        Some(Intent { abi, build, options })
    }

    /// Reads the intent of the limit in a directory; `None` if there is none.
    pub(super) fn read(dir: &Path) -> Option<Intent> {
        let target = fs::read_link(dir.join(INTENT)).ok()?;
        Intent::parse(target.to_str()?)
    }

    /// Writes it into the directory of a limit that is being built.
    pub(super) fn write(dir: &Path, options: &LimitOptions) -> Result<(), StoreError> {
        symlink(Path::new(&Intent::text(options, BUILD)), &dir.join(INTENT))
    }

    /// Writes that a limit runs the programs of this build.
    pub(super) fn sign(dir: &Path, options: &LimitOptions) -> Result<(), StoreError> {
        let (now, other) = (dir.join(INTENT), dir.join(OTHER));
        let _ = fs::remove_file(&other);
        symlink(Path::new(&Intent::text(options, BUILD)), &other)?;
        rename(&other, &now).map_err(|e| io_error(&now, "rename to")(e.into()))
    }

    /// Writes another one, does what it says, and puts the earlier one back if that fails.
    pub(super) fn change(
        dir: &Path,
        options: &LimitOptions,
        change: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let (now, other) = (dir.join(INTENT), dir.join(OTHER));
        let _ = fs::remove_file(&other);
        // It goes on with the programs that it has.
        let missing = || io_error(&now, "read")(io::ErrorKind::NotFound.into());
        let earlier = Intent::read(dir).ok_or_else(missing)?;
        symlink(Path::new(&Intent::text(options, &earlier.build)), &other)?;
        let exchange = || renameat_with(CWD, &other, CWD, &now, RenameFlags::EXCHANGE);
        exchange().map_err(|e| io_error(&now, "rename to")(e.into()))?;
        let done = change();
        if done.is_err() {
            let _ = exchange();
        }
        let _ = fs::remove_file(&other);
        done
    }
}

#[cfg(test)]
mod tests;
