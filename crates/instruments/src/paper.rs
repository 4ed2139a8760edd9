//! NRM as it was published, for the lab to measure beside Tidegate's own; not for use otherwise.
//!
//! One spin lock a direction, thresholds in bytes: `bpf/nrm_paper.h` has the rule and says which errors of
//! the publication are not copied. Nothing is pinned: the limit ends with [`NrmPaper`].
//!
//! # Where it fails as published
//!
//! There is no queue that would lengthen the round trip, and no TCP goes below a window of two packets. Where
//! two packets a round trip are more than the limit, marks cannot hold the flow: the credit falls to the
//! drop threshold, the sender is left with nothing in flight, and waits 200 ms for its probe timer (the
//! paper patched the kernel for 20 ms). On a veth pair with 10 us that begins below 2.4 Gbit/s. One
//! DCTCP flow, egress, kernel 6.18:
//!
//! | limit | goodput | packets marked | dropped |
//! |---|---|---|---|
//! | 1 Gbit/s | 54 Mbit/s | 92 % | 0.6 % |
//! | 2 Gbit/s | 341 Mbit/s | 97 % | 0.5 % |
//! | 3 Gbit/s | 2875 Mbit/s | 77 % | 0 |
//! | 5 Gbit/s | 4836 Mbit/s | 53 % | 0 |
//! | 10 Gbit/s | 9673 Mbit/s | 31 % | 0 |

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, OpenObject, ProgramMut, libbpf_sys};
use tidegate_core::{Bytes, Direction, Nanos, Rate};

use crate::skel;

/// Why the published NRM cannot be attached or read. Nothing stays attached when attaching failed.
#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    #[error("no limit given; set `egress`, `ingress` or both")]
    NoLimit,
    #[error(
        "cannot {what}: {source}; run as root on a kernel 6.1 or newer, \
         with a directory of a cgroup v2 mount"
    )]
    Bpf { what: &'static str, source: libbpf_rs::Error },
    #[error("cannot keep a program's descriptor: {0}; raise the limit on open files (ulimit -n)")]
    Descriptor(#[from] std::io::Error),
    /// The map does not hold what this version of the program writes.
    #[error("the state of the program has {found} bytes instead of {STATE_BYTES}; rebuild")]
    State {
        /// The size found.
        found: usize,
    },
}

/// The limits; a direction without one is not touched.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PaperOptions {
    /// From the cgroup.
    pub egress: Option<Rate>,
    /// To the cgroup.
    pub ingress: Option<Rate>,
}

/// Packets and their bytes (`skb->len`: from the IP header on, a segmented packet's headers once).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PaperCount {
    /// Packets; what the device will cut into segments counts once.
    pub packets: u64,
    pub bytes: Bytes,
}

/// What became of the packets of one direction. Each packet is in exactly one of the counts.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PaperCounters {
    /// Passed untouched.
    pub passed: PaperCount,
    /// Passed with CE set.
    pub marked: PaperCount,
    /// Passed, the local sender told to reduce its window (`cn`); on ingress only passed.
    pub slowed: PaperCount,
    /// Dropped; a local TCP sender was told so.
    pub dropped: PaperCount,
}

/// The outcome of running a program on one packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PaperRun {
    /// The program's return value: 0 drop, 1 pass, 2 drop and `cn`, 3 pass and `cn`.
    pub verdict: u32,
    /// Mean time of a run.
    pub time: Duration,
}

/// The published NRM on a cgroup, detached when dropped.
#[derive(Debug)]
pub struct NrmPaper {
    egress: Gate,
    ingress: Gate,
    _links: Vec<Link>,
}

/// The program of a direction and its state.
#[derive(Debug)]
struct Gate {
    program: OwnedFd,
    state: MapHandle,
}

impl NrmPaper {
    /// Limits the cgroup and those below it.
    ///
    /// # Errors
    /// [`PaperError`]; no program stays attached.
    pub fn attach(cgroup: BorrowedFd<'_>, options: PaperOptions) -> Result<NrmPaper, PaperError> {
        if options == PaperOptions::default() {
            return Err(PaperError::NoLimit);
        }
        let mut storage = MaybeUninit::<OpenObject>::uninit();
        let open = skel::nrm_paper::NrmPaperSkelBuilder::default().open(&mut storage);
        let mut open = open.map_err(|e| bpf_error("open the programs", e))?;
        let byte_s = |rate: Option<Rate>| rate.map_or(0, |r| (r.bit_s() / 8).max(1));
        if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
            rodata.egress_byte_s = byte_s(options.egress);
            rodata.ingress_byte_s = byte_s(options.ingress);
        }
        let loaded = open.load().map_err(|e| bpf_error("load the programs", e))?;
        let (progs, maps) = (&loaded.progs, &loaded.maps);
        let gate = |program: &ProgramMut<'_>, map: &libbpf_rs::MapMut<'_>| {
            let state = MapHandle::try_from(map).map_err(|e| bpf_error("keep a map", e))?;
            Ok::<_, PaperError>(Gate { program: program.as_fd().try_clone_to_owned()?, state })
        };
        let egress = gate(&progs.paper_egress, &maps.egress)?;
        let ingress = gate(&progs.paper_ingress, &maps.ingress)?;
        let mut links = Vec::new();
        let wanted =
            [(options.egress, &progs.paper_egress), (options.ingress, &progs.paper_ingress)];
        for (rate, program) in wanted {
            if rate.is_some() {
                let link = program.attach_cgroup(cgroup.as_raw_fd());
                links.push(link.map_err(|e| bpf_error("attach the programs to the cgroup", e))?);
            }
        }
        Ok(NrmPaper { egress, ingress, _links: links })
    }

    fn gate(&self, direction: Direction) -> &Gate {
        match direction {
            Direction::Egress => &self.egress,
            Direction::Ingress => &self.ingress,
        }
    }

    /// What became of the packets of `direction` so far.
    ///
    /// # Errors
    /// [`PaperError`] when the map cannot be read.
    pub fn counters(&self, direction: Direction) -> Result<PaperCounters, PaperError> {
        Ok(self.gate(direction).read()?.counters)
    }

    /// The program of `direction`, for BPF_PROG_TEST_RUN and bpf_prog_info.
    #[must_use]
    pub fn program(&self, direction: Direction) -> BorrowedFd<'_> {
        self.gate(direction).program.as_fd()
    }

    /// Runs the program of `direction` on an Ethernet frame, `repeat` times (BPF_PROG_TEST_RUN). The limit's
    /// state and counters change as for a packet of the cgroup.
    ///
    /// # Errors
    /// [`PaperError`] when the kernel refuses the frame (shorter than 14 bytes) or the user.
    pub fn test_run(
        &self,
        direction: Direction,
        frame: &[u8],
        repeat: u32,
    ) -> Result<PaperRun, PaperError> {
        self.run(direction, frame, repeat, None)
    }

    /// As [`NrmPaper::test_run`]; `out` has room for the frame and takes what the program made of it.
    fn run(
        &self,
        direction: Direction,
        frame: &[u8],
        repeat: u32,
        out: Option<&mut [u8]>,
    ) -> Result<PaperRun, PaperError> {
        // SAFETY: a C struct of integers and pointers, for which zero is "not given".
        let mut opts: libbpf_sys::bpf_test_run_opts = unsafe { std::mem::zeroed() };
        opts.sz = size_of_val(&opts) as _;
        opts.data_in = frame.as_ptr().cast();
        opts.data_size_in = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        if let Some(out) = out {
            opts.data_out = out.as_mut_ptr().cast();
            opts.data_size_out = u32::try_from(out.len()).unwrap_or(u32::MAX);
        }
        opts.repeat = i32::try_from(repeat).unwrap_or(i32::MAX);
        let program = self.program(direction).as_raw_fd();
        // SAFETY: the descriptor is open, and both buffers live through the call with the sizes given.
        let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program, &mut opts) };
        if ret < 0 {
            return Err(bpf_error("run the program", libbpf_rs::Error::from_raw_os_error(-ret)));
        }
        let time = Duration::from_nanos(u64::from(opts.duration));
        Ok(PaperRun { verdict: opts.retval, time })
    }
}

fn bpf_error(what: &'static str, source: libbpf_rs::Error) -> PaperError {
    PaperError::Bpf { what, source }
}

/// `struct np_state` as 64-bit words: lock, credit, time, four packet counts, four byte counts.
const STATE_WORDS: usize = 11;
const STATE_BYTES: usize = 8 * STATE_WORDS;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct State {
    credit_bytes: i64,
    last: Nanos,
    counters: PaperCounters,
}

impl Gate {
    fn read(&self) -> Result<State, PaperError> {
        // With the lock, so that packets and bytes belong together.
        let value = self.state.lookup(&0u32.to_ne_bytes(), MapFlags::LOCK);
        let value = value.map_err(|e| bpf_error("read the state", e))?.unwrap_or_default();
        let (words, rest) = value.as_chunks::<8>();
        if words.len() != STATE_WORDS || !rest.is_empty() {
            return Err(PaperError::State { found: value.len() });
        }
        let word = |i: usize| u64::from_ne_bytes(words[i]);
        let count = |i: usize| PaperCount { packets: word(3 + i), bytes: Bytes(word(7 + i)) };
        Ok(State {
            credit_bytes: word(1).cast_signed(),
            last: Nanos(word(2)),
            counters: PaperCounters {
                passed: count(0),
                marked: count(1),
                slowed: count(2),
                dropped: count(3),
            },
        })
    }
}

#[cfg(test)]
mod tests;
