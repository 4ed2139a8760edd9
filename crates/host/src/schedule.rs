//! Rates that follow the clock: which row of a limit's schedule holds now, and until when. Pure: the time,
//! with its zone, is an argument.
//!
//! A row names days and two times of the day. Its span begins on each of these days and ends on the next day
//! if it would end before it begins. Times are local: a span from 08:00 to 18:00 is an hour longer or shorter
//! when the clock changes in it. A time that the clock skips is the moment of the change; of one that comes
//! twice the first counts. The first row whose span covers the moment holds.

use std::{fmt, str::FromStr};

use jiff::{Timestamp, ToSpan, Zoned, civil};

use crate::settings::{Patch, RateSetting};

/// Rows of one schedule at most.
pub const MAX_ROWS: usize = 32;
const DAY_NAMES: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
const DAY_MINUTES: u16 = 24 * 60;
/// Boundaries of spans looked at for the next one at which another row holds.
const BOUNDARIES_LOOKED_AT: usize = 64;
/// A span that began on an earlier day may still hold, and the next one begins within a week.
const DAYS_LOOKED_AT: std::ops::RangeInclusive<i64> = -1..=8;

/// The rows of a limit, the first that holds counts. Empty: the limit has the same rates always.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Schedule(pub Vec<Row>);

/// Rates for some time of some days.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The days on which its span begins.
    pub days: Days,
    pub from: TimeOfDay,
    /// The same as `from`: a whole day.
    pub to: TimeOfDay,
    /// `None`: as at other times.
    pub egress: Option<RateSetting>,
    pub ingress: Option<RateSetting>,
}

/// Days of the week: bit 0 is Monday.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Days(u8);

/// Minutes since midnight; 24:00 is the end of the day.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeOfDay(u16);

/// No days, or no time of the day.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    #[error("`{0}` names no days; write for example `mon-fri` or `sat,sun`")]
    Days(String),
    #[error("`{0}` is no time of the day; write for example `08:00`, and `24:00` for the end")]
    Time(String),
    #[error("more than {MAX_ROWS} rows")]
    TooMany,
    #[error("a row has no rate; give it `egress`, `ingress` or both")]
    NoRate,
}

impl Days {
    /// Every day.
    pub const ALL: Days = Days(0x7f);

    fn has(self, day: civil::Weekday) -> bool {
        self.0 & (1 << day.to_monday_zero_offset()) != 0
    }
}

impl FromStr for Days {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Days, ScheduleError> {
        let refuse = || ScheduleError::Days(text.to_owned());
        let number = |name: &str| {
            let name = name.trim().to_lowercase();
            DAY_NAMES.iter().position(|day| *day == name).ok_or_else(refuse)
        };
        let mut days = 0;
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (mut day, last) = (number(first)?, number(last)?);
            days |= 1 << day;
            while day != last {
                day = (day + 1) % DAY_NAMES.len();
                days |= 1 << day;
            }
        }
        Ok(Days(days))
    }
}

impl fmt::Display for Days {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Days::ALL {
            return f.write_str("daily");
        }
        let named = DAY_NAMES.iter().enumerate().filter(|(day, _)| self.0 & (1 << day) != 0);
        f.write_str(&named.map(|(_, name)| *name).collect::<Vec<_>>().join(","))
    }
}

impl TimeOfDay {
    /// The beginning of the day.
    pub const MIDNIGHT: TimeOfDay = TimeOfDay(0);
    /// 24:00.
    pub const END: TimeOfDay = TimeOfDay(DAY_MINUTES);

    /// The moment at which a clock on the wall shows it.
    fn on(self, day: civil::Date, now: &Zoned) -> Option<Timestamp> {
        let day = if self.0 == DAY_MINUTES { day.tomorrow().ok()? } else { day };
        let minutes = i8::try_from(self.0 % 60).ok()?;
        let hours = i8::try_from(self.0 / 60 % 24).ok()?;
        let time = day.at(hours, minutes, 0, 0);
        let ambiguous = now.time_zone().to_ambiguous_timestamp(time);
        match ambiguous.offset() {
            // The clock is put forward over it: the moment of the change.
            jiff::tz::AmbiguousOffset::Gap { before, .. } => {
                let after = before.to_timestamp(time).ok()?;
                let mut changes = now.time_zone().preceding(after.checked_add(1.second()).ok()?);
                changes.next().map(|change| change.timestamp())
            }
            _ => ambiguous.earlier().ok(),
        }
    }
}

impl FromStr for TimeOfDay {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<TimeOfDay, ScheduleError> {
        let refuse = || ScheduleError::Time(text.to_owned());
        let digits = |part: &str| {
            let good = (1..=2).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
            if good { part.parse::<u16>().map_err(|_| refuse()) } else { Err(refuse()) }
        };
        let (hours, minutes) = text.trim().split_once(':').ok_or_else(refuse)?;
        let (hours, minutes) = (digits(hours)?, digits(minutes)?);
        let all = hours * 60 + minutes;
        if minutes < 60 && all <= DAY_MINUTES { Ok(TimeOfDay(all)) } else { Err(refuse()) }
    }
}

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.0 / 60, self.0 % 60)
    }
}

impl fmt::Display for Row {
    /// `mon,tue 08:00-18:00`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}-{}", self.days, self.from, self.to)
    }
}

impl Row {
    /// The span that begins on a day, if one does.
    fn span(&self, day: civil::Date, now: &Zoned) -> Option<(Timestamp, Timestamp)> {
        if !self.days.has(day.weekday()) {
            return None;
        }
        let ends = if self.to > self.from { day } else { day.tomorrow().ok()? };
        Some((self.from.on(day, now)?, self.to.on(ends, now)?)).filter(|(from, to)| from < to)
    }

    /// What was written for a limit, with the rates of this row.
    pub fn on(&self, patch: &Patch) -> Patch {
        let (egress, ingress) = (self.egress.or(patch.egress), self.ingress.or(patch.ingress));
        Patch { egress, ingress, ..*patch }
    }
}

impl Schedule {
    /// The row that holds, and the next moment at which another may. Looks at ten days of each row.
    pub fn at(&self, now: &Zoned) -> (Option<&Row>, Option<Timestamp>) {
        let (moment, today) = (now.timestamp(), now.date());
        let (mut holds, mut next): (Option<&Row>, Option<Timestamp>) = (None, None);
        for row in &self.0 {
            let days = DAYS_LOOKED_AT.filter_map(|days| today.checked_add(days.days()).ok());
            for (from, to) in days.filter_map(|day| row.span(day, now)) {
                if holds.is_none() && from <= moment && moment < to {
                    holds = Some(row);
                }
                for boundary in [from, to].into_iter().filter(|boundary| *boundary > moment) {
                    next = Some(next.map_or(boundary, |next| next.min(boundary)));
                }
            }
        }
        (holds, next)
    }

    /// When another row holds, and which; `None` if the same one holds at all boundaries that are looked at.
    pub fn change(&self, now: &Zoned) -> Option<(Zoned, Option<&Row>)> {
        let (holds, mut next) = self.at(now);
        for _ in 0..BOUNDARIES_LOOKED_AT {
            let then = next?.to_zoned(now.time_zone().clone());
            let (row, after) = self.at(&then);
            if row != holds {
                return Some((then, row));
            }
            next = after;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(days: &str, from: &str, to: &str, egress: &str) -> Row {
        Row {
            days: days.parse().unwrap(),
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            egress: egress.parse().ok(),
            ingress: None,
        }
    }

    /// The rate at a moment in Berlin, and the next boundary there.
    fn at(rows: &[Row], when: &str) -> (String, String) {
        let schedule = Schedule(rows.to_vec());
        let now: Zoned = format!("{when}[Europe/Berlin]").parse().unwrap();
        let (row, next) = schedule.at(&now);
        let rate = row.map_or("-".to_owned(), |row| match row.egress.unwrap() {
            RateSetting::Limit(rate) => rate.to_string(),
            RateSetting::Free => "none".to_owned(),
        });
        let next = next.map(|next| next.to_zoned(now.time_zone().clone()));
        (rate, next.map_or("-".to_owned(), |next| next.strftime("%a %d %H:%M %:z").to_string()))
    }

    #[test]
    fn spans_hold_from_their_beginning_to_before_their_end() {
        let work = [row("mon-fri", "08:00", "18:00", "10mbit")];
        let night = [row("fri-sun", "22:00", "06:00", "none")];
        let first =
            [row("sun", "12:00", "13:00", "1mbit"), row("sat,sun", "0:00", "24:00", "2mbit")];
        let table: [(&[Row], &str, &str, &str); 16] = [
            (&[], "2026-03-02T12:00", "-", "-"),
            (&work, "2026-03-02T07:59", "-", "Mon 02 08:00 +01:00"),
            (&work, "2026-03-02T08:00", "10mbit", "Mon 02 18:00 +01:00"),
            (&work, "2026-03-02T18:00", "-", "Tue 03 08:00 +01:00"),
            (&work, "2026-03-06T19:00", "-", "Mon 09 08:00 +01:00"),
            // Over midnight, and from the last of its days into the next.
            (&night, "2026-03-07T03:00", "none", "Sat 07 06:00 +01:00"),
            (&night, "2026-03-09T05:59", "none", "Mon 09 06:00 +01:00"),
            (&night, "2026-03-09T23:00", "-", "Fri 13 22:00 +01:00"),
            (&first, "2026-03-01T12:30", "1mbit", "Sun 01 13:00 +01:00"),
            (&first, "2026-03-01T13:00", "2mbit", "Mon 02 00:00 +01:00"),
            // The clock goes from 02:00 to 03:00 on 29 March: 02:30 is not there.
            (
                &[row("sun", "02:30", "04:00", "1mbit")],
                "2026-03-29T01:59",
                "-",
                "Sun 29 03:00 +02:00",
            ),
            (
                &[row("sun", "02:30", "04:00", "1mbit")],
                "2026-03-29T03:00",
                "1mbit",
                "Sun 29 04:00 +02:00",
            ),
            (
                &[row("sat", "23:00", "05:00", "1mbit")],
                "2026-03-29T04:59",
                "1mbit",
                "Sun 29 05:00 +02:00",
            ),
            // It goes from 03:00 back to 02:00 on 25 October: 02:30 comes twice, and the first counts.
            (
                &[row("sun", "02:30", "04:00", "1mbit")],
                "2026-10-25T02:29+02:00",
                "-",
                "Sun 25 02:30 +02:00",
            ),
            (
                &[row("sun", "02:30", "04:00", "1mbit")],
                "2026-10-25T02:10+01:00",
                "1mbit",
                "Sun 25 04:00 +01:00",
            ),
            (
                &[row("sun", "01:00", "02:30", "1mbit")],
                "2026-10-25T02:10+01:00",
                "-",
                "Sun 01 01:00 +01:00",
            ),
        ];
        for (rows, when, rate, next) in table {
            let expected = (rate.to_owned(), next.to_owned());
            assert_eq!(at(rows, when), expected, "{rows:?} at {when}");
        }
    }

    #[test]
    fn a_change_is_where_another_row_holds() {
        let change = |rows: &[Row], when: &str| {
            let schedule = Schedule(rows.to_vec());
            let now: Zoned = format!("{when}[Europe/Berlin]").parse().unwrap();
            let change = schedule.change(&now);
            change.map(|(when, row)| {
                format!(
                    "{} {}",
                    when.strftime("%a %H:%M"),
                    row.map_or("-".to_owned(), Row::to_string)
                )
            })
        };
        // Each day is a span of its own, but it is the same row.
        let weekend = [row("sat,sun", "0:00", "24:00", "1mbit")];
        assert_eq!(change(&weekend, "2026-03-07T12:00").unwrap(), "Mon 00:00 -");
        assert_eq!(change(&weekend, "2026-03-09T12:00").unwrap(), "Sat 00:00 sat,sun 00:00-24:00");
        // A later row inside an earlier one does not hold.
        let inside =
            [row("mon-fri", "08:00", "18:00", "1mbit"), row("mon", "09:00", "20:00", "2mbit")];
        let next = change(&inside, "2026-03-02T08:30").unwrap();
        assert_eq!(next, "Mon 18:00 mon 09:00-20:00");
        assert_eq!(change(&[row("mon-sun", "0:00", "24:00", "1mbit")], "2026-03-02T08:30"), None);
        assert_eq!(change(&[], "2026-03-02T08:30"), None);
    }

    #[test]
    fn days_and_times_are_read_as_people_write_them() {
        let days = |text: &str| text.parse::<Days>().map(|days| days.to_string());
        assert_eq!(days("sat-mon").unwrap(), "mon,sat,sun");
        assert_eq!(days("Mon, wed").unwrap(), "mon,wed");
        assert_eq!(days("mon-sun").unwrap(), "daily");
        assert!(days("monday").is_err() && days("").is_err() && days("mon-").is_err());
        let time = |text: &str| text.parse::<TimeOfDay>().map(|time| time.to_string());
        assert_eq!(
            (time("8:05").unwrap(), time("24:00").unwrap()),
            ("08:05".into(), "24:00".into())
        );
        for bad in ["8", "24:01", "08:60", "+8:00", "08:00:00", "8 am", "99999:0"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn nothing_changes_before_the_next_boundary(
            spans in proptest::collection::vec((1u8..128, 0u16..1440, 0u16..1441), 1..4),
            hours in 0i64..9000, part in 0i64..1000,
        ) {
            let rows = spans.iter().enumerate().map(|(n, (days, from, to))| Row {
                days: Days(*days), from: TimeOfDay(*from), to: TimeOfDay(*to),
                egress: format!("{}mbit", n + 1).parse().ok(), ingress: None,
            });
            let schedule = Schedule(rows.collect());
            let start: Zoned = "2026-01-01T00:00[America/New_York]".parse().unwrap();
            let now = start.checked_add(hours.hours()).unwrap();
            let (holds, next) = schedule.at(&now);
            let next = next.unwrap();
            proptest::prop_assert!(next > now.timestamp());
            let gap = next.as_second() - now.timestamp().as_second();
            let before = now.checked_add((gap * part / 1000).seconds()).unwrap();
            proptest::prop_assert_eq!(schedule.at(&before).0, holds);
        }
    }
}
