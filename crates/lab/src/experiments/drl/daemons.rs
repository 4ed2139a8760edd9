//! A fleet as users run it: a spec file for each router of a testbed of sites, `tidegate apply`, and a
//! `tidegate daemon`.

use std::{fmt::Write as _, fs, os::unix::fs::PermissionsExt, path::PathBuf, time::Duration};

use anyhow::Context as _;
use serde_json::Value;
use tempfile::TempDir;
use tidegate_core::Rate;

use crate::{
    context::Context,
    stop::Skip,
    testbed::{Cgroup, Child, Place, Site, Sites, command, wait::wait_until},
};

/// How long a verb may take, and a fleet to be one.
const VERB: Duration = Duration::from_secs(60);
const TOGETHER: Duration = Duration::from_secs(60);
/// The parts of those that run add up to so much once they divide; hosts that do not run have theirs.
const DIVIDED_PERCENT: u64 = 98;
const KEY: &str = "1 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n";
const LIMIT: &str = "site";
const GROUP: &str = "all";
/// Acceptors of `share`, and no more than there are routers.
const ACCEPTORS: usize = 3;

/// What a limit acts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// What comes from the sender, at its router: a policer with the published bucket.
    Router,
    /// The same by a shaper that gives flows their windows.
    Windows,
    /// The sender's sockets, which `pace` gives their rates.
    Sockets,
    /// What leaves the hub for the receiver, all sites' together: for one plain limit.
    Hub,
}

/// What a fleet is to do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    /// As a spec names it; none: one plain limit of the whole rate at the first site.
    pub(super) algorithm: Option<&'static str>,
    pub(super) at: At,
    pub(super) limit_bit_s: u64,
    pub(super) burst_bytes: u64,
    pub(super) interval: Duration,
    pub(super) hosts: usize,
}

/// Limits and daemons in force. All is put back when it is dropped.
#[derive(Debug)]
pub(super) struct Daemons<'a> {
    sites: &'a Sites,
    plan: Plan,
    tidegate: PathBuf,
    members: Vec<Member>,
    dir: TempDir,
}

#[derive(Debug)]
struct Member {
    /// Where its limit is pinned.
    place: Place,
    cgroup: Option<Cgroup>,
    daemon: Option<Child>,
}

impl<'a> Daemons<'a> {
    /// Limits at every site, and daemons at the first `running` of them that have found each other.
    ///
    /// # Errors
    ///
    /// [`Skip`] for an algorithm that the gate cannot do.
    pub(super) fn start(
        ctx: &Context,
        sites: &'a Sites,
        plan: Plan,
        running: usize,
    ) -> anyhow::Result<Daemons<'a>> {
        let mut daemons = Daemons {
            sites,
            plan,
            tidegate: ctx.tidegate.clone(),
            members: Vec::new(),
            dir: tempfile::tempdir()?,
        };
        let keys = daemons.dir.path().join("keys");
        fs::write(&keys, KEY)?;
        fs::set_permissions(&keys, fs::Permissions::from_mode(0o600))?;
        let count = if plan.algorithm.is_some() { sites.count() } else { 1 };
        for site in 0..count {
            let place = Place::new()?;
            let cgroup = match plan.at {
                At::Router | At::Windows | At::Hub => None,
                At::Sockets => Some(Cgroup::create()?),
            };
            daemons.members.push(Member { place, cgroup, daemon: None });
            fs::write(daemons.file(site), daemons.spec(site)?)?;
            daemons.verb(site, &["apply", &daemons.file(site).to_string_lossy()])?;
        }
        if plan.algorithm.is_some() {
            (0..running).try_for_each(|site| daemons.launch(site))?;
            (0..running).try_for_each(|site| daemons.wait_to_share(site))?;
            daemons.wait_to_divide(running)?;
        }
        Ok(daemons)
    }

    /// Starts the daemon of a site.
    pub(super) fn launch(&mut self, site: usize) -> anyhow::Result<()> {
        let mut daemon = self.command(site)?;
        daemon.arg("daemon").arg(self.file(site));
        let mut child = Child::spawn(daemon)?;
        wait_until("the start of tidegate daemon", VERB, || {
            child.check_running()?;
            Ok(child.output().stderr.contains("runs, reached at").then_some(()))
        })?;
        self.members[site].daemon = Some(child);
        Ok(())
    }

    /// Ends the daemon of a site at once (SIGKILL). Nobody does what its unit would do then.
    pub(super) fn kill(&mut self, site: usize) -> anyhow::Result<()> {
        self.members[site].daemon.take().map_or(Ok(()), Child::kill)
    }

    fn wait_to_share(&mut self, site: usize) -> anyhow::Result<()> {
        wait_until("a fleet that shares", TOGETHER, || {
            if let Some(daemon) = &mut self.members[site].daemon {
                daemon.check_running()?;
            }
            let group = self.group(site)?;
            match group["state"].as_str() {
                Some("sharing") => Ok(Some(())),
                Some("cannot_drop") => {
                    let algorithm = self.plan.algorithm.unwrap_or_default();
                    Err(Skip(format!("limits here cannot do what {algorithm} needs yet")).into())
                }
                _ => Ok(None),
            }
        })
    }

    /// With `share` a fleet divides nothing until its first epoch has begun.
    fn wait_to_divide(&self, running: usize) -> anyhow::Result<()> {
        if self.plan.algorithm != Some("share") {
            return Ok(());
        }
        wait_until("a fleet that divides the limit", TOGETHER, || {
            let parts = (0..running).map(|site| {
                self.group(site)?["share_bit_s"].as_u64().context("no share in the status")
            });
            let sum = parts.sum::<anyhow::Result<u64>>()?;
            Ok((sum >= self.plan.limit_bit_s * DIVIDED_PERCENT / 100).then_some(()))
        })
    }

    /// What the daemon of a site says of the group.
    pub(super) fn group(&self, site: usize) -> anyhow::Result<Value> {
        let mut status: Value = self.verb(site, &["status", "--json"])?.json()?;
        Ok(status["fleet"]["groups"][0].take())
    }

    /// What the limit of a site is set to, in bit/s, whether its daemon runs or not.
    pub(super) fn rate_bit_s(&self, site: usize) -> anyhow::Result<u64> {
        let shown: Value = self.verb(site, &["limit", "show", LIMIT, "--json"])?.json()?;
        let direction = self.direction();
        shown[direction]["rate_bit_s"]
            .as_u64()
            .with_context(|| format!("no {direction} in {shown}"))
    }

    /// Where to start what is to be limited at a site.
    pub(super) fn site(&self, site: usize) -> Site<'_> {
        let at = Site::from(self.sites.sender(site));
        // One limiter for all has one member.
        match self.members.get(site).and_then(|member| member.cgroup.as_ref()) {
            Some(cgroup) => at.in_cgroup(cgroup),
            None => at,
        }
    }

    /// Whether what limits all is behind the sites.
    pub(super) fn is_at_hub(&self) -> bool {
        self.plan.at == At::Hub
    }

    fn direction(&self) -> &'static str {
        match self.plan.at {
            At::Router | At::Windows => "ingress",
            At::Sockets | At::Hub => "egress",
        }
    }

    fn file(&self, site: usize) -> PathBuf {
        self.dir.path().join(format!("site{site}.toml"))
    }

    fn api(&self, site: usize) -> PathBuf {
        self.dir.path().join(format!("api{site}"))
    }

    /// The binary at the router of a site, with its own store and socket.
    fn command(&self, site: usize) -> anyhow::Result<std::process::Command> {
        let host = if self.is_at_hub() { self.sites.hub() } else { self.sites.router(site) };
        let mut command = command(host, &self.tidegate)?;
        command.env("TIDEGATE_BPFFS", self.members[site].place.store());
        command.env("TIDEGATE_SOCKET", self.api(site));
        Ok(command)
    }

    fn verb(&self, site: usize, words: &[&str]) -> anyhow::Result<crate::testbed::Finished> {
        let mut command = self.command(site)?;
        command.args(words);
        Child::spawn(command)?.finish(VERB)
    }

    /// The file that a router is run by.
    fn spec(&self, site: usize) -> anyhow::Result<String> {
        let Plan { algorithm, at, limit_bit_s, burst_bytes, interval, hosts } = self.plan;
        let rate = Rate::from_bit_s(limit_bit_s).context("a limit of zero")?;
        let direction = self.direction();
        let scope = match &self.members[site].cgroup {
            Some(cgroup) => format!("cgroup = \"{}\"", cgroup.name()),
            None if at == At::Hub => format!("dev = \"{}\"", self.sites.hub_dev_down()),
            None => format!("dev = \"{}\"", self.sites.router_dev()),
        };
        let scheme = match at {
            At::Router | At::Hub => format!("scheme = \"police\"\nburst = \"{burst_bytes}b\""),
            At::Windows => "scheme = \"spring\"".to_owned(),
            At::Sockets => "scheme = \"pace\"".to_owned(),
        };
        let mut text = format!(
            "[[limit]]\nname = \"{LIMIT}\"\nscope = {{ {scope} }}\n{direction} = \"{rate}\"\n{scheme}\n"
        );
        let Some(algorithm) = algorithm else { return Ok(text) };
        let list = |words: Vec<String>| format!("[{}]", words.join(", "));
        let all = 0..self.sites.count();
        let peers =
            list(all.clone().map(|at| format!("\"{}\"", self.sites.router_addr(at))).collect());
        let acceptors = list(all.take(ACCEPTORS).map(|at| format!("\"r{at}\"")).collect());
        let dir = self.dir.path().display();
        write!(
            text,
            "\n[fleet]\nname = \"lab\"\nnode = \"r{site}\"\npeers = {peers}\nacceptors = {acceptors}\n\
             keys = \"{dir}/keys\"\nstate = \"{dir}/state{site}\"\napi = \"{}\"\n\
             \n[[group]]\nname = \"{GROUP}\"\nrate = \"{rate}\"\nalgorithm = \"{algorithm}\"\n\
             members = [\"{LIMIT}\"]\ndirection = \"{direction}\"\ninterval = \"{}ms\"\nhosts = {hosts}\n",
            self.api(site).display(),
            interval.as_millis(),
        )?;
        if algorithm == "share" {
            text += "reserve = \"1%\"\nlease = \"1.5s\"\nsuspect = \"1.5s\"\n";
        }
        Ok(text)
    }
}

impl Drop for Daemons<'_> {
    fn drop(&mut self) {
        // Daemons end before what they act on goes.
        self.members.iter_mut().for_each(|member| drop(member.daemon.take()));
        for site in 0..self.members.len() {
            if let Err(error) = self.verb(site, &["detach"]) {
                eprintln!("warning: the limits of site {site} stay: {error:#}");
            }
        }
    }
}
