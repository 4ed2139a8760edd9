//! Limits that stay: pinned in the BPF file system, one directory a limit.
//!
//! ```text
//! /sys/fs/bpf/tidegate/NAME/{limit,counters,exempt}      maps
//!                           queues, sockets                   ... and those of its scheme, where it has them
//!                           {egress,ingress,sockops}          links
//!                           {group,samples}                   of scheme police: maps for a group
//!                           sample_{egress,ingress}           ... and the buffers in the second
//!                           parent_{queues,sockets}           of a child: the maps of its parent
//!                           parent                            symbolic link to the parent's name
//!                           cgroup                            symbolic link to the cgroup's directory
//!                           select, members, member_...       of one with several (see store/members.rs)
//!                           dev, port                         ... or to the device's name
//!                           xdp                               link of a policer's ingress in XDP
//!                           program_{egress,ingress}, clsact  a device's without links (see device)
//!                           slots, slot, root, ...            of scheme htb (see store/htb.rs)
//!                           room, place                       of one that shares maps with others
//!                                                             (see store/pools.rs, store/slots.rs)
//!                           intent                            symbolic link to what was asked (see intent)
//! /sys/fs/bpf/tidegate/~NAME                                  of one that waits (see store/waiting.rs)
//! /sys/fs/bpf/tidegate/{_NAME,=NAME}/                         on its way (see store/recover.rs)
//! ```
//!
//! The directory appears under its name only when it is whole (built aside, then renamed), so a process
//! that dies half way leaves no half limit in the listing, and its links vanish with it. What has a life
//! of its own is written to a journal before it is made (see store/journal.rs), and the next who opens
//! the store finishes or undoes it (see store/recover.rs). Writers exclude each other by a lock on the
//! directory; readers take none.

mod around;
mod error;
mod hook;
mod htb;
mod intent;
mod journal;
mod known;
pub(crate) mod members;
mod order;
pub(crate) mod pins;
mod place;
mod pool_names;
mod pools;
mod recover;
mod replace;
mod slots;
mod takeover;
pub(crate) mod unreadable;
mod whereabouts;

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, Mode, OFlags};
use tidegate_core::Scope;

use crate::{
    bpf::name_in,
    cgroup::Hierarchy,
    clock::boottime,
    device::{Target, XDP_PIN},
    fq::FqError,
    intf,
    limit::{Adopt, AttachedLimit, LimitError, LimitMaps, LimitOptions, settings::Settings},
    remains::InTheWay,
    schemes::{self, Pinned, Pinning, Programs, needs_other_programs},
    xdp::{self, XdpMode},
};
use journal::{Deed, Journal};
use known::Known;
use pins::{open_map, pin, remove_pins};

mod inside;
mod rate;
mod waiting;

pub use around::Before;
pub use error::StoreError;
pub use inside::{can_contain, contains, is_above};
pub use intent::Intent;
pub use members::Member;
use pool_names::{POOL_PREFIX, is_slots};
pub use rate::RateSet;
pub use unreadable::{Listing, Unreadable};
pub use waiting::Waiting;
use whereabouts::Whereabouts;

/// Where the BPF file system is mounted by convention.
const BPFFS: &str = "/sys/fs/bpf";
/// Where limits are pinned by default.
pub const DEFAULT_ROOT: &str = "/sys/fs/bpf/tidegate";
/// Prefix of a directory that is being built or is to be taken off; no limit's name starts with it.
const BUILDING: char = '_';
/// Prefix of the directory of a limit that was set aside.
const ASIDE: char = '=';
/// Longest name of a limit, in bytes.
pub const MAX_NAME_BYTES: usize = 63;
/// Limits that a host holds at most.
pub const MAX_LIMITS: usize = 4096;
/// The pin of the trie of those who are exempt.
const EXEMPT: &str = "exempt";
/// The symbolic links that remember where a limit was, for when that is gone.
const CGROUP: &str = "cgroup";
const DEV: &str = "dev";
const PORT: &str = "port";
/// ... and whose child it is.
const PARENT: &str = "parent";
/// The directory of the members of a limit over several cgroups.
const MEMBERS: &str = "members";
/// How long a writer waits for others, unless it says [otherwise](Store::patience).
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
const LOCK_POLL: Duration = Duration::from_millis(20);

/// The directory of pinned limits.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
    /// Replace qdiscs of others.
    force: bool,
    /// How long others are waited for.
    patience: Duration,
    /// Limits that will be taken off, beside which others may be put on.
    leaving: BTreeSet<String>,
    /// The cgroups that a limit of this name has when it is put on.
    begin_with: Option<(String, Vec<String>)>,
    /// Where limits are, while this process has the lock.
    known: Arc<Mutex<Option<Known>>>,
}

/// Keeps other writers out while it lives.
#[derive(Debug)]
pub struct StoreLock {
    journal: Journal,
    /// What a writer that was killed has left, and could not be put right.
    problems: Vec<String>,
    _dir: OwnedFd,
}

impl StoreLock {
    /// Reserves room in the journal for all that this writer does, so that what it leaves should it be killed
    /// can be found again: wanted for all but taking limits off.
    ///
    /// # Errors
    /// [`StoreError::NoJournal`].
    pub fn reserve_journal(&self) -> Result<(), StoreError> {
        self.journal.reserve()
    }

    /// What went wrong and kept nobody from going on, a sentence each: what a killed writer has left, and
    /// that limits came off without a journal.
    pub fn problems(&self) -> Vec<String> {
        let refused = self.journal.refused().map(ToString::to_string);
        self.problems.iter().cloned().chain(refused).collect()
    }
}

/// A limit that is pinned.
#[derive(Debug)]
pub struct PinnedLimit {
    pub name: String,
    /// As it is in force.
    pub limit: intf::Entry,
    /// Where it is now; `None` when its cgroup or device has been removed and nothing is limited any more.
    pub scope: Option<Scope>,
    /// Where it was put on.
    pub installed_on: Option<Scope>,
    /// Whether that has been removed, and another one of its name is there.
    pub is_anew: bool,
    /// Hooks at which its program no longer is, though the cgroup or device is there: somebody took it off.
    /// `parent` is among them when the parent that it knows is no more.
    pub unhooked: Vec<&'static str>,
    /// With a selector: its cgroups, by id.
    pub members: Vec<Member>,
    /// The name of its parent.
    pub parent: Option<String>,
    /// With scheme `edt`: why packets are not kept until their departure.
    pub unkept: Option<FqError>,
    /// Of a policer in XDP: where its program runs; `None` if it is not on its device.
    pub xdp_mode: Option<XdpMode>,
    /// The directory in which its programs are pinned.
    hooks: PathBuf,
    /// Whose programs it runs, if they are those of another build.
    pub other_build: Option<String>,
    /// What was asked of it, as its intent says.
    asked: LimitOptions,
    maps: LimitMaps,
}

impl PinnedLimit {
    pub fn maps(&self) -> &LimitMaps {
        &self.maps
    }

    /// Other settings for it, as they lie in its map.
    fn encode(&self, options: &LimitOptions) -> Result<intf::Entry, StoreError> {
        let limit = options.encode(self.limit.cgroup_id).map_err(LimitError::Config);
        let mut limit = limit.map_err(limit_error(&self.name))?;
        limit.ifindex = self.limit.ifindex;
        limit.flags |= self.limit.flags & intf::FLAG_PORT;
        Ok(limit)
    }
}

pub(crate) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.display().to_string();
    move |source| StoreError::Io { path, action, source }
}

pub(crate) fn bpf_error(
    path: &Path,
    action: &'static str,
) -> impl FnOnce(libbpf_rs::Error) -> StoreError {
    let report = io_error(path, action);
    move |source| report(io::Error::other(source.to_string()))
}

pub(crate) fn limit_error(name: &str) -> impl FnOnce(LimitError) -> StoreError {
    let name = name.to_owned();
    move |source| StoreError::Limit { name, source }
}

/// Checks that a name can be a limit's.
///
/// # Errors
/// [`StoreError::BadName`].
pub fn check_name(name: &str) -> Result<(), StoreError> {
    let good = is_name(name, MAX_NAME_BYTES, "-_");
    if good { Ok(()) } else { Err(StoreError::BadName(name.to_owned())) }
}

/// Whether a text begins with a letter or digit, and has only such and some marks.
pub fn is_name(text: &str, bytes_max: usize, marks: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || marks.contains(c);
    let first = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    first && text.len() <= bytes_max && text.chars().all(good)
}

impl Store {
    /// The store at `root`, which need not exist yet. Nothing is touched. [`DEFAULT_ROOT`] is the host's,
    /// whatever this process has mounted; any other path is taken as it is.
    pub fn at(root: impl Into<PathBuf>) -> Store {
        Store {
            root: place::resolve(root.into()),
            force: false,
            patience: LOCK_PATIENCE,
            leaving: BTreeSet::new(),
            begin_with: None,
            known: Arc::default(),
        }
    }

    /// Its path as the host has it, which tells it from others.
    pub fn path(&self) -> PathBuf {
        journal::absolute(&self.root)
    }

    /// The file that the agent which keeps its limits has locked.
    pub fn agent_lock(&self) -> PathBuf {
        journal::agent_lock(&self.root)
    }

    /// Whether a limit that needs a qdisc replaces one that somebody has put on its device; it is not put
    /// back.
    pub fn force(&mut self, force: bool) {
        self.force = force;
    }

    /// How long other writers are waited for; an interactive command waits 10 s.
    pub fn patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Names limits that will be taken off: another one may be put on what they are on, so that it is always
    /// limited. No more than one HTB, or program in XDP, fits on a device all the same.
    pub fn leaving(&mut self, names: BTreeSet<String>) {
        self.leaving = names;
    }

    /// Makes the directory, and mounts the BPF file system where none is, then keeps other writers out.
    ///
    /// # Errors
    /// [`StoreError::NotBpffs`], [`StoreError::WouldEnd`], [`StoreError::Open`] or [`StoreError::Io`].
    pub fn lock(&self) -> Result<StoreLock, StoreError> {
        let deadline = Instant::now() + self.patience;
        loop {
            self.ensure_bpffs()?;
            match self.create_root() {
                Err(_) if self.has_lost_bpffs() && Instant::now() <= deadline => continue,
                created => created?,
            }
            if let Some(dir) = self.try_lock()? {
                self.forget_known();
                let journal = Journal::open(&self.root)?;
                let problems = self.recover(&journal);
                return Ok(StoreLock { journal, problems, _dir: dir });
            }
            if Instant::now() > deadline {
                return Err(StoreError::Busy(self.root.display().to_string()));
            }
            std::thread::sleep(LOCK_POLL);
        }
    }

    /// The locked directory; `None` if another writer has it, or has just removed it.
    fn try_lock(&self) -> Result<Option<OwnedFd>, StoreError> {
        self.check_root()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let dir = match rustix::fs::open(&self.root, flags, Mode::empty()) {
            Ok(dir) => dir,
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(e) => return Err(io_error(&self.root, "open")(e.into())),
        };
        match rustix::fs::flock(dir.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => return Err(io_error(&self.root, "lock")(e.into())),
        }
        let inode = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
        let locked = rustix::fs::fstat(&dir).ok().map(inode);
        let named = rustix::fs::stat(&self.root).ok().map(inode);
        Ok((named.is_some() && locked == named).then_some(dir))
    }

    fn entries(&self) -> Result<Vec<String>, StoreError> {
        self.check_root()?;
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(io_error(&self.root, "list")(e)),
        };
        let directories = entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        let mut names: Vec<_> =
            directories.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// The names of all limits, sorted; none if the store does not exist.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn names(&self) -> Result<Vec<String>, StoreError> {
        let mut names = self.entries()?;
        names.retain(|name| !name.starts_with([BUILDING, ASIDE, POOL_PREFIX]));
        Ok(names)
    }

    /// Opens a limit.
    ///
    /// # Errors
    /// [`StoreError::Missing`], or [`StoreError::Unreadable`] for one of another version.
    pub fn open(&self, hierarchy: &Hierarchy, name: &str) -> Result<PinnedLimit, StoreError> {
        check_name(name)?;
        self.open_at(hierarchy, name).map_err(|e| match e {
            StoreError::Missing(_) => e,
            e => self.unreadable(hierarchy, name, &e).error(),
        })
    }

    /// The same of any directory that holds a limit.
    fn open_at(&self, hierarchy: &Hierarchy, name: &str) -> Result<PinnedLimit, StoreError> {
        let dir = self.root.join(name);
        if !dir.is_dir() {
            return Err(StoreError::Missing(name.to_owned()));
        }
        let no_intent = || limit_error(name)(LimitError::Intent);
        let intent = Intent::read(&dir).ok_or_else(no_intent)?;
        if intent.abi != intf::ABI {
            let (is_newer, build) = (intent.is_newer(), intent.build);
            return Err(limit_error(name)(LimitError::Version { build, is_newer }));
        }
        let asked = intent.options.ok_or_else(no_intent)?;
        let open = |map: &str| open_map(&dir, map);
        let (settings, counters, at) = (open("limit")?, open("counters")?, self.at_of(name));
        unreadable::check_layout(&settings, &counters).map_err(limit_error(name))?;
        let limit = Settings::read(&settings, at).map_err(limit_error(name))?.at(boottime());
        let scheme = schemes::of(limit.scheme());
        let place = self.place_of(name);
        let pool = place.as_ref().map(|(pool, place)| (pool.as_path(), *place));
        let pinned = Pinned { dir: &dir, limit: &limit, asked: &asked, pool };
        let maps = LimitMaps {
            limit: settings,
            counters,
            exempt: dir.join(EXEMPT).exists().then(|| open(EXEMPT)).transpose()?,
            at,
            carried: self.carried_in(name),
            own: scheme.open(&pinned).map_err(limit_error(name))?,
        };
        let parent = name_in(&dir, PARENT);
        let Whereabouts { mut scope, installed_on, is_anew, mut unhooked, members } =
            Whereabouts::of(hierarchy, &dir, &limit);
        if limit.is_matched() {
            let here = scope.is_some();
            let place = maps.own.place();
            unhooked = if here { self.unhooked_matched(name, &limit, place) } else { Vec::new() };
        }
        if scope.is_some() {
            unhooked.extend(maps.own.missing());
            unhooked.sort_unstable();
            unhooked.dedup();
        }
        // Not a renamed device, but another one that has got its index.
        if limit.ifindex != 0 && scope != installed_on && !unhooked.is_empty() {
            (scope, unhooked) = (None, Vec::new());
        }
        if let (Some(theirs), Some(parent)) = (maps.own.parent(), &parent)
            && !self.is_same_map(theirs, parent)
        {
            unhooked.push(PARENT);
        }
        let in_xdp = scope.is_some() && scheme.links(&limit).contains(&XDP_PIN);
        let there = in_xdp && !unhooked.contains(&XDP_PIN);
        let mut pinned = PinnedLimit {
            name: name.to_owned(),
            hooks: match self.place_of(name) {
                Some((pool, _)) if !is_slots(&pool) => pool,
                _ => dir,
            },
            xdp_mode: there.then(|| xdp::on_device(limit.ifindex)?.mode).flatten(),
            limit,
            scope,
            installed_on,
            is_anew,
            unhooked,
            members,
            unkept: None,
            parent,
            other_build: self.other_build(name, &intent.build),
            asked,
            maps,
        };
        pinned.unkept = pinned.find_unkept(hierarchy);
        Ok(pinned)
    }

    /// Opens every limit. One that goes meanwhile is left out; one that cannot be read is listed apart, and
    /// keeps nobody from the others.
    ///
    /// # Errors
    /// [`StoreError`] when the store itself cannot be read.
    pub fn list(&self, hierarchy: &Hierarchy) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        for name in self.names()? {
            match self.open_at(hierarchy, &name) {
                Ok(limit) => listing.limits.push(limit),
                Err(_) if !self.root.join(&name).exists() => {}
                Err(e) => listing.unreadable.push(self.unreadable(hierarchy, &name, &e)),
            }
        }
        Ok(listing)
    }

    /// Puts a limit on a cgroup or device, to stay; one with a class into its parent.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn install(
        &self,
        lock: &StoreLock,
        hierarchy: &Hierarchy,
        name: &str,
        scope: &Scope,
        options: &LimitOptions,
        parent: Option<&str>,
    ) -> Result<(), StoreError> {
        check_name(name)?;
        if self.root.join(name).is_dir() {
            self.open(hierarchy, name)?;
            return Err(StoreError::Exists(name.to_owned()));
        }
        if options.scheme.info().has_qdisc && scope.is_device() {
            // Before anything is begun: what has begun and is undone would take its HTB along.
            let on_device = |other: &Unreadable| {
                let there = other.scope.as_ref().filter(|there| there.is_device());
                there.is_some_and(|there| there.name() == scope.name())
            };
            let unreadable = self.list(hierarchy)?.unreadable;
            if let Some(other) = unreadable.into_iter().find(on_device) {
                return Err(StoreError::ScopeUnreadable { scope: scope.clone(), name: other.name });
            }
        }
        self.install_with(&lock.journal, hierarchy, name, scope, options, parent)?;
        // One that waited has what it waited for.
        let _ = self.wait_no_more(lock, name);
        Ok(())
    }

    fn install_with(
        &self,
        journal: &Journal,
        hierarchy: &Hierarchy,
        name: &str,
        scope: &Scope,
        options: &LimitOptions,
        parent: Option<&str>,
    ) -> Result<(), StoreError> {
        let target = Some(scope).filter(|s| s.is_device()).and_then(|s| Target::find(s).ok());
        let has_qdisc = options.scheme.info().has_qdisc && parent.is_none();
        let in_the_way = target.as_ref().map(|target| self.in_the_way(name, target, has_qdisc));
        let in_the_way = in_the_way.transpose()?.unwrap_or_default();
        journal.begin(self.installation(name, target.as_ref(), has_qdisc))?;
        let done = self.put_on(hierarchy, name, scope, options, parent, &in_the_way);
        journal.end();
        done
    }

    fn put_on(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        scope: &Scope,
        options: &LimitOptions,
        parent: Option<&str>,
        in_the_way: &InTheWay,
    ) -> Result<(), StoreError> {
        if !options.matched.is_empty() {
            in_the_way.remove(None).map_err(limit_error(name))?;
            return self.install_matched(name, scope, options);
        }
        let refused = || limit_error(name);
        let cgroup = match scope {
            Scope::Cgroup(path) => Some(hierarchy.open(path).map_err(|e| refused()(e.into()))?),
            _ => None,
        };
        let is_new = !self.root.join(name).is_dir();
        if is_new && !scope.is_device() && self.is_full(hierarchy)? {
            return Err(StoreError::Full);
        }
        let scheme = options.scheme;
        let parent = parent.map(|parent| self.find_parent(hierarchy, name, parent, scope, scheme));
        let parent = parent.transpose()?;
        let parent = parent.as_ref();
        if let Some(cgroup) = cgroup.as_ref().filter(|_| schemes::share_programs(options)) {
            self.check_free(hierarchy, name, scope, cgroup, parent)?;
            if self.install_in_slot(hierarchy, name, cgroup, options, parent)? {
                return Ok(());
            }
        }
        if let Scope::Select(selector) = scope {
            self.check_selector(hierarchy, name, selector, parent)?;
            return self.install_select(hierarchy, name, selector, options, parent);
        }
        let Listing { limits: present, unreadable } = self.list(hierarchy)?;
        let above = parent.map(|parent| parent.name.as_str());
        let is_kin = |other: &str| !scope.is_device() && self.is_kin(name, above, other);
        let goes = |other: &str| other == name || self.leaving.contains(other) || is_kin(other);
        let is_member = |other: &str| {
            let dir = self.root.join(other);
            cgroup.as_ref().is_some_and(|cgroup| members::has(&dir, cgroup.id()))
        };
        let has_scope =
            |other: &&Unreadable| other.scope.as_ref() == Some(scope) || is_member(&other.name);
        if let Some(other) = unreadable.iter().find(|o| has_scope(o) && !goes(&o.name)) {
            let (scope, name) = (scope.clone(), other.name.clone());
            return Err(StoreError::ScopeUnreadable { scope, name });
        }
        let taken = |other: &&PinnedLimit| match &cgroup {
            Some(cgroup) => {
                let is_own = other.limit.ifindex == 0 && other.limit.cgroup_id == cgroup.id();
                is_own || is_member(&other.name)
            }
            None => other.scope.as_ref() == Some(scope) && !other.limit.is_matched(),
        };
        if let Some(other) = present.iter().find(|l| taken(l) && !goes(&l.name)) {
            return Err(StoreError::ScopeTaken { scope: scope.clone(), name: other.name.clone() });
        }
        if present.len() + unreadable.len() >= MAX_LIMITS {
            return Err(StoreError::Full);
        }
        if scheme.info().has_qdisc && parent.is_none() {
            let others: Vec<_> = present.iter().filter(|other| other.name != name).collect();
            self.check_root_qdisc(&others, name, scope)?;
        }
        if schemes::of(scheme).pinning() == Pinning::Tree {
            let cgroup = cgroup.as_ref();
            let asked = htb::Asked { name, scope, cgroup, options, parent, in_the_way };
            return self.install_htb(hierarchy, &asked);
        }
        let attached = match &cgroup {
            Some(cgroup) => AttachedLimit::load(
                hierarchy,
                cgroup,
                options,
                parent.map(|p| &p.maps),
                Programs::All,
            ),
            None => Target::find(scope)
                .map_err(LimitError::from)
                .and_then(|t| AttachedLimit::attach_device(hierarchy, &t, options, in_the_way)),
        };
        let mut attached = attached.map_err(refused())?;
        let building = self.root.join(format!("{BUILDING}{name}"));
        let done = pin(&mut attached, options, &building).and_then(|()| {
            let (mark, target) = match &cgroup {
                Some(cgroup) => (CGROUP, hierarchy.remembered(cgroup)),
                None if matches!(scope, Scope::Port(_)) => (PORT, scope.name().into()),
                None => (DEV, scope.name().into()),
            };
            symlink(&target, &building.join(mark))?;
            if let Some(parent) = parent {
                symlink(Path::new(&parent.name), &building.join(PARENT))?;
                if let Some(cgroup) = &cgroup {
                    self.put_parents_behind(cgroup, &building, &parent.name)?;
                }
            }
            // Once its maps are pinned: whoever finds them can give the sockets back.
            if let Some(cgroup) = &cgroup {
                attached.maps.adopt(hierarchy, cgroup, Adopt::Take).map_err(refused())?;
            }
            self.publish(&building, name)
        });
        if done.is_err() {
            let _ = remove_pins(&building);
            if let Some(cgroup) = &cgroup {
                let _ = attached.detach(hierarchy, cgroup);
            }
        } else {
            attached.keep();
        }
        done
    }

    /// Checks that no other limit has a qdisc at the root of a device.
    fn check_root_qdisc(
        &self,
        present: &[&PinnedLimit],
        name: &str,
        scope: &Scope,
    ) -> Result<(), StoreError> {
        if !scope.is_device() {
            return Ok(());
        }
        let target = Target::find(scope).map_err(|e| limit_error(name)(e.into()))?;
        // A device may be limited as `dev` and as `port`; it has one qdisc.
        let holds = |other: &&PinnedLimit| {
            let l = &other.limit;
            l.scheme().info().has_qdisc
                && !l.is_child()
                && (l.ifindex, l.cgroup_id) == (target.ifindex, target.namespace)
                && other.scope.is_some()
        };
        if let Some(other) = present.iter().copied().find(holds) {
            let (scope, name) = (scope.clone(), other.name.clone());
            return Err(StoreError::ScopeTaken { scope, name });
        }
        Ok(())
    }

    /// Changes a limit in place: neither a packet nor a connection is lost.
    ///
    /// # Errors
    /// [`StoreError`]; the earlier limit is in force.
    pub fn change(
        &self,
        lock: &StoreLock,
        hierarchy: &Hierarchy,
        name: &str,
        options: &LimitOptions,
    ) -> Result<(), StoreError> {
        let pinned = self.open(hierarchy, name)?;
        let limit = pinned.encode(options)?;
        if needs_other_programs(&pinned.options(), options) {
            return Err(StoreError::OtherPrograms(name.to_owned()));
        }
        if options.class.is_some() != pinned.parent.is_some() {
            return Err(StoreError::OtherParent(name.to_owned()));
        }
        let Some(scope) = &pinned.scope else {
            let scope = pinned.installed_on.unwrap_or_else(|| Scope::Cgroup("?".to_owned()));
            return Err(StoreError::ScopeGone { name: name.to_owned(), scope });
        };
        lock.journal.begin(self.removal(Deed::Change, name))?;
        // First what shall be: a change that is killed is finished by it.
        let change = || self.change_to(hierarchy, &pinned, scope, &limit, options);
        let done = Intent::change(&self.root.join(name), options, change);
        lock.journal.end();
        done
    }

    /// Carries a change out, whatever the scheme.
    fn change_to(
        &self,
        hierarchy: &Hierarchy,
        pinned: &PinnedLimit,
        scope: &Scope,
        limit: &intf::Entry,
        options: &LimitOptions,
    ) -> Result<(), StoreError> {
        let name = &pinned.name;
        let scheme = schemes::of(limit.scheme());
        if scheme.pinning() == Pinning::Tree {
            let earlier = pinned.maps.settings().map_err(limit_error(name))?;
            let change = || self.change_htb(hierarchy, pinned, limit, options, earlier);
            return self.keep_drops(pinned, change);
        }
        if scheme.links(limit).contains(&XDP_PIN) != scheme.links(&pinned.limit).contains(&XDP_PIN)
        {
            return self.change_hook(hierarchy, pinned, scope, limit, options);
        }
        self.check_change(name, scope, &options.matched)?;
        let cgroups = pinned.cgroups(hierarchy);
        pinned.maps.set(hierarchy, &cgroups, limit, options).map_err(limit_error(name))
    }

    /// Takes a limit off and gives its sockets back. Works for one whose cgroup is gone, too.
    ///
    /// # Errors
    /// [`StoreError::Missing`], or [`StoreError::Io`] with the limit partly removed; who opens the store next
    /// removes the rest.
    pub fn remove(&self, lock: &StoreLock, name: &str) -> Result<(), StoreError> {
        check_name(name)?;
        let dir = self.root.join(name);
        if !dir.is_dir() {
            return Err(StoreError::Missing(name.to_owned()));
        }
        let children = self.children_of(name)?;
        if !children.is_empty() {
            return Err(StoreError::HasChildren { name: name.to_owned(), children });
        }
        let done = self.take_away(lock, name);
        // One that waited before it was put on does not wait again.
        let _ = self.wait_no_more(lock, name);
        done
    }

    /// The same of one that others may be inside of.
    fn take_away(&self, lock: &StoreLock, name: &str) -> Result<(), StoreError> {
        let dir = self.root.join(name);
        lock.journal.begin(self.removal(Deed::Remove, name))?;
        let gone = format!("{BUILDING}{name}");
        fs::rename(&dir, self.root.join(&gone)).map_err(io_error(&dir, "rename"))?;
        let done = self.take_off(&gone);
        lock.journal.end();
        done
    }

    /// A limit that was named as [leaving](Store::leaving) has been replaced, and stays.
    pub fn stays(&mut self, name: &str) {
        self.leaving.remove(name);
    }
}

pub(crate) fn symlink(target: &Path, link: &Path) -> Result<(), StoreError> {
    rustix::fs::symlink(target, link).map_err(|e| io_error(link, "create")(e.into()))
}

/// The path of the cgroup that a directory remembers.
fn cgroup_in(hierarchy: &Hierarchy, dir: &Path) -> Option<String> {
    fs::read_link(dir.join(CGROUP)).ok().map(|at| hierarchy.relative(&at))
}

#[cfg(test)]
mod tests;
