//! An agent that has not run since the host started: as after a reboot its run directory is empty.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    process::{Command, Stdio},
};

use super::{Bed, Slice, limit};
use crate::{
    common::{Guard, Place, refused, signal, wait_for},
    need_root,
};

const RATE: &str = "egress = \"20mbit\"";

impl Bed<'_> {
    /// Where the directory of the agent is the one of the host's file.
    fn on_host(&self, args: &[&str]) -> Command {
        let mut command = self.tidegate();
        command.env("TIDEGATE_HOST_FILE", self.dir.join("limits.toml")).args(args);
        command
    }

    /// Exit code of `status --check`, and what is warned of.
    fn checked(&self) -> (i32, String) {
        refused(&mut self.on_host(&["status", "--check", "--json"]))
    }
}

#[test]
fn root_agent_that_has_never_run_is_missed_if_its_files_ask_for_it() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let never = limit("never", "unit = \"never.service\"", RATE);
    let commented: String = never.lines().map(|line| format!("#{line}\n")).collect();
    for text in ["", "limit = []", &commented] {
        bed.write("a.toml", text);
        assert_eq!(bed.checked(), (0, String::new()), "{text}");
    }
    let dir = bed.dir.display().to_string();
    for (text, why) in [
        (&*never, format!("limit `never` of {dir} is not on this host")),
        ("labels = true", format!("{dir} asks for limits by labels of containers")),
        ("[[limit]]\nname = ", format!("{dir}/a.toml:2: ")),
    ] {
        bed.write("a.toml", text);
        let (code, said) = bed.checked();
        assert_eq!(code, 3, "{text}");
        let alarm = format!("no agent has run since the host started, and {why}");
        assert!(said.contains(&alarm) && said.contains("enable --now tidegate-agent"), "{said}");
    }
    let doctor = bed.on_host(&["doctor"]).output().unwrap();
    let said = String::from_utf8(doctor.stdout).unwrap();
    let finding = said.lines().find(|line| line.contains("no agent has run"));
    assert!(finding.is_some_and(|line| line.starts_with("problem")), "{said}");

    // One that has run says for itself whether it is missed.
    bed.write("a.toml", &never);
    let mut agent = bed.start();
    wait_for("the agent's report", || (bed.checked() == (0, String::new())).then_some(()));
    signal(agent.0.id(), rustix::process::Signal::TERM);
    assert_eq!(agent.exit_code(), 0);
    let (code, said) = bed.checked();
    assert!(code == 3 && said.contains("does not run") && !said.contains("no agent"), "{said}");
    assert!(bed.on_host(&["detach"]).status().unwrap().success());
    assert_eq!(bed.checked(), (0, String::new()), "nobody wants a limit any more");
}

#[test]
fn root_who_applies_the_files_by_hand_misses_no_agent() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    slice.make("w-1");
    let day = jiff::Zoned::now().checked_add(jiff::Span::new().days(3)).unwrap();
    let day = day.strftime("%a").to_string().to_lowercase();
    let off = format!("schedule = [{{ days = \"{day}\", egress = \"3mbit\" }}]");
    let each = format!("cgroup = \"{}/w-*\"", slice.group.path());
    let text = limit("each", &each, &format!("{RATE}\neach = true"))
        + &limit("off", "dev = \"lo\"", &off)
        + &limit("never", "unit = \"never.service\"", RATE);
    // A file elsewhere is nobody's but the user's.
    let elsewhere = place.file("elsewhere.toml", &text);
    let apply = |file: &str| {
        let done = bed.on_host(&["apply", file]).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    assert_eq!(bed.checked(), (0, String::new()));
    apply(elsewhere.to_str().unwrap());
    assert_eq!(bed.checked(), (0, String::new()));
    place.ok(&["detach"]);

    bed.write("a.toml", &text);
    assert_eq!(bed.checked().0, 3);
    apply(bed.dir.join("a.toml").to_str().unwrap());
    assert_eq!(bed.checked(), (0, String::new()));
    bed.write("b.toml", &limit("later", "unit = \"never.service\"", RATE));
    let (code, said) = bed.checked();
    assert!(code == 3 && said.contains("and limit `later` of"), "{said}");
    place.ok(&["detach"]);
}

#[test]
fn root_web_says_that_an_agent_has_never_run() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let mut command = bed.on_host(&["web"]);
    command.env("TIDEGATE_SOCKET", bed.run.join("node.sock")).stderr(Stdio::null());
    let _web = Guard(command.spawn().unwrap());
    let metric = |name: &str| {
        let mut stream = UnixStream::connect(bed.run.join("web.sock")).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map(str::to_owned)
    };
    wait_for("a reading", || metric("tidegate_warnings"));
    assert_eq!(metric("tidegate_agent_up"), None);
    bed.write("a.toml", &limit("never", "unit = \"never.service\"", RATE));
    let down = || Some((metric("tidegate_agent_up")?, metric("tidegate_warnings")?));
    assert_eq!(wait_for("the agent to be missed", down), ("0".to_owned(), "1".to_owned()));
}
