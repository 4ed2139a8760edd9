//! What the programs that a limit had before have counted.

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use serde::{Deserialize, Serialize};

use super::{Colours, Reading};
use crate::intf::{self, DIRECTIONS, OUTCOMES};

/// By direction, summed over CPUs.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Carried([Counted; DIRECTIONS]);

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Counted {
    packets: [u64; OUTCOMES],
    bytes: [u64; OUTCOMES],
    /// Of a policer.
    colours: [[u64; intf::COLOURS]; 2],
}

impl Counted {
    fn with(self, other: &Counted, combine: fn(u64, u64) -> u64) -> Counted {
        let mut result = self;
        let each = |to: &mut [u64], with: &[u64]| {
            to.iter_mut().zip(with).for_each(|(to, with)| *to = combine(*to, *with));
        };
        each(&mut result.packets, &other.packets);
        each(&mut result.bytes, &other.bytes);
        each(result.colours.as_flattened_mut(), other.colours.as_flattened());
        result
    }
}

impl Carried {
    /// Packets, bytes and colours of a limit's readings by direction.
    pub(crate) fn of_readings(readings: &[Reading; DIRECTIONS]) -> Carried {
        Carried(readings.each_ref().map(|reading| Counted {
            packets: reading.counters.packets,
            bytes: reading.counters.bytes,
            colours: reading.colours.map_or_else(Default::default, |of| [of.packets, of.bytes]),
        }))
    }

    /// Reads a pinned map of any version, in which a limit has a number. All versions have packets and bytes
    /// by outcome first. Colours are read where the map has the size of this version.
    pub(crate) fn of(counters: &MapHandle, at: u32) -> Carried {
        let mut carried = Carried::default();
        for (index, direction) in carried.0.iter_mut().enumerate() {
            let key = at * DIRECTIONS as u32 + index as u32;
            let values = counters.lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY);
            for value in values.ok().flatten().unwrap_or_default() {
                *direction = direction.with(&counted(&value), u64::wrapping_add);
            }
        }
        carried
    }

    pub(crate) fn plus(self, other: &Carried) -> Carried {
        self.with(other, u64::wrapping_add)
    }

    /// Without what was counted here, too.
    pub(crate) fn minus(self, other: &Carried) -> Carried {
        self.with(other, u64::saturating_sub)
    }

    fn with(self, other: &Carried, combine: fn(u64, u64) -> u64) -> Carried {
        let each = |index: usize| self.0[index].with(&other.0[index], combine);
        Carried(std::array::from_fn(each))
    }

    /// Adds it to what a direction has counted since.
    pub(crate) fn add_to(&self, index: usize, reading: &mut Reading) {
        let Counted { packets, bytes, colours } = self.0[index];
        reading.counters.add(&intf::Counters { packets, bytes, ..intf::Counters::default() });
        if let Some(now) = &mut reading.colours {
            let [packets, bytes] = colours;
            let before = intf::PoliceCounters { packets, bytes, ..intf::PoliceCounters::default() };
            Colours::add(now, &before);
        }
    }
}

/// What one CPU has counted.
fn counted(value: &[u8]) -> Counted {
    let mut words = value.chunks_exact(size_of::<u64>());
    let mut next = || {
        let word = words.next().and_then(|word| word.try_into().ok());
        word.map_or(0, u64::from_ne_bytes)
    };
    let packets = std::array::from_fn(|_| next());
    let bytes = std::array::from_fn(|_| next());
    let police = bytemuck::try_pod_read_unaligned::<intf::PoliceCounters>(value);
    let colours = police.map(|police| [police.packets, police.bytes]).unwrap_or_default();
    Counted { packets, bytes, colours }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(first: u64) -> Vec<u8> {
        (first..first + 2 * OUTCOMES as u64).flat_map(u64::to_ne_bytes).collect()
    }

    /// An older map may end after the bytes, or have anything behind them.
    #[test]
    fn packets_and_bytes_of_any_version_are_read() {
        let expected = Counted {
            packets: std::array::from_fn(|i| 5 + i as u64),
            bytes: std::array::from_fn(|i| (5 + OUTCOMES + i) as u64),
            ..Counted::default()
        };
        let longer = [value(5), vec![0xff; 24]].concat();
        assert_eq!(counted(&value(5)), expected);
        assert_eq!(counted(&longer), expected);
    }

    #[test]
    fn what_both_have_counted_counts_once() {
        let of = |first| Carried([counted(&value(first)); DIRECTIONS]);
        let (earlier, now) = (of(1000), of(10));
        assert_eq!(earlier.minus(&now).plus(&now), earlier);
        // Never below what the new programs have counted.
        assert_eq!(now.minus(&earlier), Carried::default());
        let text = serde_json::to_string(&earlier).unwrap();
        assert_eq!(serde_json::from_str::<Carried>(&text).unwrap(), earlier);
        let mut reading = Reading { colours: Some(Colours::default()), ..Reading::default() };
        earlier.add_to(1, &mut reading);
        assert_eq!(reading.counters.packets[0], 1000);
    }
}
