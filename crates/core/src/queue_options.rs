//! The settings of a limit's queue, their defaults, and which are refused.
//!
//! One type serves all schemes: a rate, a burst and two thresholds. The defaults of the thresholds, and the
//! meaning of the burst, depend on the queue of the scheme ([`QueueKind`]).

use crate::{
    burst::policer_burst,
    class::Floors,
    meter::MeterError,
    scheme::{QueueKind, Scheme},
    token_bucket::{BucketConfig, BucketError},
    units::{Bytes, MAX_RATE_BIT_S, MIN_RATE_BIT_S, Nanos, Rate, Span},
    virtual_queue::{MAX_SPAN, VirtualQueueConfig, cost_of_byte},
};

/// A full-sized Ethernet frame without its checksum, the unit of the floors.
const FRAME: Bytes = Bytes(1514);

/// The settings of a virtual queue; `None` takes the default of [`VirtualQueueOptions::config`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualQueueOptions {
    /// The limit.
    pub rate: Rate,
    /// Credit that an idle queue may save up.
    pub burst: Option<Span>,
    /// Backlog above which congestion is signalled.
    pub mark: Option<Span>,
    /// Backlog above which every packet is dropped.
    pub drop: Option<Span>,
    /// The kind of queue, for the defaults.
    pub kind: QueueKind,
}

/// Why a virtual queue cannot be built as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The rate is out of bounds.
    #[error("{0} is out of range; a limit is between 8kbit and 100gbit")]
    Rate(Rate),
    /// A burst or threshold is longer than [`MAX_SPAN`].
    #[error("{name} of {span} is longer than {} at {rate}; make it shorter", MAX_SPAN)]
    Span {
        /// The setting.
        name: &'static str,
        /// Its value.
        span: Span,
        /// The limit's rate.
        rate: Rate,
    },
    /// The scheme does not work on this scope, or in this direction.
    #[error("scheme `{0}` cannot limit this; it works on {scopes}", scopes = .0.info().scopes)]
    Scheme(Scheme),
    /// A policer's bucket.
    #[error(transparent)]
    Bucket(BucketError),
    /// A policer's meter.
    #[error(transparent)]
    Meter(MeterError),
    /// A policer has no queue, and so no thresholds.
    #[error(
        "a policer drops when its bucket is empty and has no mark or drop threshold; leave them out"
    )]
    Thresholds,
    /// The mark threshold is not below the drop threshold.
    #[error("mark threshold {mark} must be below drop threshold {drop}")]
    Order {
        /// Mark threshold.
        mark: Nanos,
        /// Drop threshold.
        drop: Nanos,
    },
}

impl VirtualQueueOptions {
    /// A limit of `rate` with every default of a queue alone.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        VirtualQueueOptions { rate, burst: None, mark: None, drop: None, kind: QueueKind::Alone }
    }

    /// A limit of `rate` with every default of a queue behind paced flows.
    #[must_use]
    pub fn paced(rate: Rate) -> Self {
        VirtualQueueOptions { kind: QueueKind::Paced, ..Self::new(rate) }
    }

    /// The thresholds at the rate. Defaults: burst 1 ms but at least one frame; mark 0.5 ms but at least two
    /// frames, paced 2 ms but at least 16 frames; drop 4 ms but at least four frames, paced 32. The last
    /// eighth below `drop` is reserved for small packets. Behind windows: mark 16 ms but at least 32 frames,
    /// drop 40 ms but at least 96. Of departures: mark 2 ms but at least 8 frames, horizon 10 ms but at least
    /// 32 frames. Of a qdisc: no mark, a queue of 20 ms but at least two segments of 64 KB; of a short one
    /// burst 10 ms.
    ///
    /// # Errors
    /// [`ConfigError`] for a rate, span or order of thresholds that is invalid.
    pub fn config(&self) -> Result<VirtualQueueConfig, ConfigError> {
        let rate = self.rate;
        if !(MIN_RATE_BIT_S..=MAX_RATE_BIT_S).contains(&rate.bit_s()) {
            return Err(ConfigError::Rate(rate));
        }
        let span = |name, given: Option<Span>, default_ns: u64, floor: Bytes| {
            let Some(span) = given else {
                return Ok(Nanos(default_ns).max(rate.time_for(floor)));
            };
            let time = span.at(rate);
            if time > MAX_SPAN { Err(ConfigError::Span { name, span, rate }) } else { Ok(time) }
        };
        if self.kind == QueueKind::Bucket {
            return self.bucket_config();
        }
        let floors = self.kind.floors();
        let (mark_ns, drop_ns) = match self.kind {
            QueueKind::Alone => (500_000, 4_000_000),
            QueueKind::Paced => (2_000_000, 4_000_000),
            QueueKind::Windows => (16_000_000, 40_000_000),
            QueueKind::Departures => (2_000_000, 10_000_000),
            QueueKind::Bucket => (0, 0),
            QueueKind::Qdisc | QueueKind::ShortQdisc => (MAX_SPAN.0, 20_000_000),
        };
        let burst_ns = if self.kind == QueueKind::ShortQdisc { 10_000_000 } else { 1_000_000 };
        let burst = span("burst", self.burst, burst_ns, floors.burst)?;
        let mark = span("mark threshold", self.mark, mark_ns, floors.mark)?;
        let drop = span("drop threshold", self.drop, drop_ns, floors.drop)?;
        // A qdisc reserves nothing for small packets.
        let is_qdisc = matches!(self.kind, QueueKind::Qdisc | QueueKind::ShortQdisc);
        let reserve = if is_qdisc { 0 } else { drop.0 / 8 };
        let large_drop = Nanos(drop.0 - reserve);
        let is_marked = !is_qdisc || self.mark.is_some();
        if is_marked && mark >= large_drop {
            return Err(ConfigError::Order { mark, drop });
        }
        Ok(VirtualQueueConfig { cost: cost_of_byte(rate), burst, mark, large_drop, drop })
    }

    /// The bucket of a policer; its default depth is [`policer_burst`].
    ///
    /// # Errors
    /// [`ConfigError::Bucket`] for a rate or depth that no bucket has.
    pub fn bucket(&self) -> Result<BucketConfig, ConfigError> {
        let config = match self.burst {
            None => BucketConfig::new(self.rate, policer_burst(self.rate)),
            Some(Span::Size(bytes)) => BucketConfig::new(self.rate, bytes),
            Some(Span::Time(time)) => BucketConfig::lasting(self.rate, time),
        };
        config.map_err(ConfigError::Bucket)
    }

    fn bucket_config(&self) -> Result<VirtualQueueConfig, ConfigError> {
        let (name, rate) = ("burst", self.rate);
        let bucket = self.bucket().map_err(|e| match e {
            ConfigError::Bucket(BucketError::Rate(rate)) => ConfigError::Rate(rate),
            e => e,
        })?;
        if self.mark.is_some() || self.drop.is_some() {
            return Err(ConfigError::Thresholds);
        }
        let burst = match self.burst {
            Some(Span::Time(time)) => time,
            _ => Nanos(bucket.fill),
        };
        if burst > MAX_SPAN {
            let span = self.burst.unwrap_or(Span::Time(burst));
            return Err(ConfigError::Span { name, span, rate });
        }
        let none = Nanos(0);
        let cost = cost_of_byte(rate);
        Ok(VirtualQueueConfig { cost, burst, mark: none, large_drop: none, drop: none })
    }

    /// The least lengths of thresholds when the rate is lower than here: a threshold given in bytes keeps its
    /// bytes, one given as a time keeps its time.
    #[must_use]
    pub fn floors(&self) -> Floors {
        let mut floors = self.kind.floors();
        if self.kind == QueueKind::Bucket {
            floors.burst = policer_burst(self.rate);
        }
        let floor = |given: Option<Span>, default| match given {
            None => default,
            Some(Span::Size(bytes)) => bytes,
            Some(Span::Time(_)) => Bytes(0),
        };
        Floors {
            burst: floor(self.burst, floors.burst),
            mark: floor(self.mark, floors.mark),
            drop: floor(self.drop, floors.drop),
        }
    }
}

impl QueueKind {
    /// The least lengths of thresholds that are not given.
    fn floors(self) -> Floors {
        let frames = |count| Bytes(count * FRAME.0);
        let (mark, drop) = match self {
            QueueKind::Alone => (2, 4),
            QueueKind::Paced => (16, 32),
            QueueKind::Windows => (32, 96),
            QueueKind::Departures => (8, 32),
            QueueKind::Bucket => (0, 0),
            QueueKind::Qdisc | QueueKind::ShortQdisc => (0, 88),
        };
        Floors { burst: frames(1), mark: frames(mark), drop: frames(drop) }
    }
}
