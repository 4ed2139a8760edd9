//! Counters: one list makes the struct, and the table from which status, JSON, metrics and docs speak.

/// Makes a struct of `u64` counters, and the type of the entries of its `TABLE`: name, help, reader.
macro_rules! counter_table {
    ($(#[$doc:meta])* $Counters:ident, $Counter:ident: $($name:ident: $help:literal,)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $Counters {
            $(#[doc = $help] pub $name: u64,)*
        }

        #[doc = concat!("One counter of [`", stringify!($Counters), "`].")]
        #[derive(Debug, Clone, Copy)]
        pub struct $Counter {
            /// Name in snake case, with its unit.
            pub name: &'static str,
            /// One sentence for help, documentation and metrics.
            pub help: &'static str,
            /// Reads it.
            pub value: fn(&$Counters) -> u64,
        }

        impl $Counters {
            /// Every counter.
            pub const TABLE: &[$Counter] = &[
                $($Counter { name: stringify!($name), help: $help, value: |c| c.$name },)*
            ];

            /// All values, in the order of the table.
            #[allow(dead_code, reason = "only counters that threads publish need it")]
            pub(crate) fn values(&self) -> [u64; Self::TABLE.len()] {
                [$(self.$name),*]
            }

            /// The counters of these values.
            #[allow(dead_code, reason = "only counters that threads publish need it")]
            pub(crate) fn from_values([$($name),*]: [u64; Self::TABLE.len()]) -> Self {
                Self { $($name),* }
            }
        }
    };
}

pub(crate) use counter_table;
