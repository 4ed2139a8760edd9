//! The programs that copy files, and the words that start each, with its own limit or without.

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

use crate::{host::Need, tools::sshd::SshServer};

/// What the user of restic types.
pub(super) const PASSWORD: (&str, &str) = ("RESTIC_PASSWORD", "tidegate");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tool {
    Rsync,
    Rclone,
    Restic,
    Scp,
    Curl,
    Wget,
}

impl Tool {
    pub(super) const ALL: [Tool; 6] =
        [Tool::Rsync, Tool::Rclone, Tool::Restic, Tool::Scp, Tool::Curl, Tool::Wget];

    pub(super) fn name(self) -> &'static str {
        match self {
            Tool::Rsync => "rsync",
            Tool::Rclone => "rclone",
            Tool::Restic => "restic",
            Tool::Scp => "scp",
            Tool::Curl => "curl",
            Tool::Wget => "wget",
        }
    }

    /// Its own limit.
    pub(super) fn flag(self) -> &'static str {
        match self {
            Tool::Rsync | Tool::Rclone => "--bwlimit",
            Tool::Restic => "--limit-upload",
            Tool::Scp => "-l",
            Tool::Curl | Tool::Wget => "--limit-rate",
        }
    }

    /// It receives; the others send.
    pub(super) fn downloads(self) -> bool {
        matches!(self, Tool::Curl | Tool::Wget)
    }

    /// One of its processes copies several files at a time; of the others several processes do.
    fn has_connections(self) -> bool {
        matches!(self, Tool::Rclone | Tool::Restic | Tool::Curl)
    }

    /// Its files go over SSH.
    pub(super) fn uses_ssh(self) -> bool {
        matches!(self, Tool::Rsync | Tool::Scp)
    }

    /// The program, then what it needs besides.
    fn needs(self) -> [Need; 2] {
        let command = |name, version_flag| Need::Command { name, version_flag };
        // scp is of the same version, but does not say so.
        let (nginx, ssh) = (command("nginx", "-v"), command("ssh", "-V"));
        let rclone = command("rclone", "version");
        match self {
            Tool::Rsync => [command("rsync", "--version"), ssh],
            Tool::Rclone => [rclone, rclone],
            Tool::Restic => [command("restic", "version"), rclone],
            Tool::Scp => [ssh, command("scp", "-V")],
            Tool::Curl => [command("curl", "--version"), nginx],
            Tool::Wget => [command("wget", "--version"), nginx],
        }
    }

    /// Why this machine cannot run it; none if it can.
    pub(super) fn missing(self, tidegate: &Path) -> Option<String> {
        let missing = self.needs().iter().find_map(|need| need.missing(tidegate));
        let server = || SshServer::program().err().filter(|_| self.uses_ssh());
        missing.or_else(|| server().map(|skip| skip.to_string()))
    }

    /// Name and version.
    pub(super) fn version(self, tidegate: &Path) -> Option<(String, String)> {
        self.needs().first()?.version(tidegate)
    }
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Tool {
    type Err = String;

    fn from_str(name: &str) -> Result<Tool, String> {
        let known = || Tool::ALL.map(Tool::name).join(", ");
        let found = Tool::ALL.into_iter().find(|tool| tool.name() == name.trim());
        found.ok_or_else(|| format!("no row is named `{name}`: use some of {}", known()))
    }
}

/// What is there to copy, from where and to where.
#[derive(Debug, Clone)]
pub(super) struct Places {
    /// Directories with one file, and with [`SEVERAL`].
    pub(super) one: PathBuf,
    pub(super) several: PathBuf,
    /// A directory of the receiver.
    pub(super) incoming: PathBuf,
    pub(super) ssh: SocketAddr,
    pub(super) ssh_options: Vec<String>,
    pub(super) webdav: SocketAddr,
    pub(super) restic: SocketAddr,
    /// Of the file to be downloaded.
    pub(super) url: String,
}

/// Files, and connections or processes, that copy at a time.
pub(super) const SEVERAL: usize = 4;

/// What is copied by what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) tool: Tool,
    /// [`SEVERAL`] files at a time, instead of one.
    pub(super) several: bool,
}

impl Job {
    /// As cases name it.
    pub(super) fn at_once(self) -> String {
        match (self.several, self.tool.has_connections()) {
            (false, _) => "1".to_owned(),
            (true, true) => format!("{SEVERAL} connections"),
            (true, false) => format!("{SEVERAL} processes"),
        }
    }

    /// One command: a shell where several processes are to run. It ends them when it is asked to end, or when
    /// the first of them has ended: all are to last longer than the measurement.
    pub(super) fn command(self, at: &Places, own_bit_s: Option<u64>) -> Vec<String> {
        let processes = self.processes(at, own_bit_s);
        if let [words] = &processes[..] {
            return words.clone();
        }
        let mut script = "trap 'kill $pids 2>/dev/null' TERM\n".to_owned();
        for words in processes {
            let words: Vec<_> = words.iter().map(|word| quoted(word)).collect();
            script += &format!("{} &\npids=\"$pids $!\"\n", words.join(" "));
        }
        words(&["bash", "-c", &(script + "wait -n\nkill $pids 2>/dev/null\nwait\n")])
    }

    /// The words of each process.
    fn processes(self, at: &Places, own_bit_s: Option<u64>) -> Vec<Vec<String>> {
        let count = if self.several { SEVERAL } else { 1 };
        let directory = if self.several { &at.several } else { &at.one };
        let (directory, incoming) = (directory.display().to_string(), at.incoming.display());
        let own = own_bit_s.map(|bit_s| self.limit(bit_s)).unwrap_or_default();
        let (ssh, port) = (at.ssh.ip(), at.ssh.port());
        let each_file = |head: Vec<String>| -> Vec<Vec<String>> {
            let file = |number| format!("{directory}/{}", file_name(number));
            let to = format!("root@{ssh}:{incoming}/");
            (0..count).map(|number| [&head[..], &[file(number), to.clone()]].concat()).collect()
        };
        match self.tool {
            Tool::Rsync => {
                let shell = format!("ssh -p {port} {}", at.ssh_options.join(" "));
                each_file([words(&["rsync", "--whole-file", "-e", &shell]), own].concat())
            }
            Tool::Scp => {
                let head = words(&["scp", "-q", "-P", &port.to_string()]);
                each_file([head, at.ssh_options.clone(), own].concat())
            }
            Tool::Rclone => {
                let url = format!("http://{}", at.webdav);
                let transfers = count.to_string();
                let head = words(&["rclone", "--config", "", "copy", "--transfers", &transfers]);
                let tail = words(&["--webdav-url", &url, &directory, ":webdav:"]);
                vec![[head, own, tail].concat()]
            }
            Tool::Restic => {
                let connections = format!("rest.connections={count}");
                let head = words(&["restic", "--no-cache", "-r", &repository(at)]);
                let tail = words(&["-o", &connections, "backup", "--quiet", &directory]);
                vec![[head, own, tail].concat()]
            }
            Tool::Curl => {
                let head = words(&["curl", "--disable", "--silent", "--noproxy", "*"]);
                let parallel = if self.several { words(&["--parallel"]) } else { Vec::new() };
                let file = words(&["--output", "/dev/null", &at.url]);
                vec![[head, parallel, own, vec![file; count].concat()].concat()]
            }
            Tool::Wget => {
                let head = words(&["wget", "--no-config", "--no-proxy", "--quiet"]);
                let file = words(&["--output-document=/dev/null", &at.url]);
                vec![[head, own, file].concat(); count]
            }
        }
    }

    /// The tool's own limit at a rate, in its unit: bytes, kibibytes or kilobits a second.
    fn limit(self, bit_s: u64) -> Vec<String> {
        let flag = self.tool.flag();
        match self.tool {
            Tool::Rsync | Tool::Restic => words(&[flag, &(bit_s / 8 / 1024).to_string()]),
            Tool::Rclone => words(&[flag, &format!("{}B", bit_s / 8)]),
            Tool::Scp => words(&[flag, &(bit_s / 1000).to_string()]),
            Tool::Curl => words(&[flag, &(bit_s / 8).to_string()]),
            Tool::Wget => vec![format!("{flag}={}", bit_s / 8)],
        }
    }
}

/// The command that makes the repository into which restic copies.
pub(super) fn restic_init(at: &Places) -> Vec<String> {
    words(&["restic", "--no-cache", "--quiet", "-r", &repository(at), "init"])
}

fn repository(at: &Places) -> String {
    format!("rest:http://{}/", at.restic)
}

/// The name of one of the files to be copied.
pub(super) fn file_name(number: usize) -> String {
    format!("file{number}")
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// One word to a shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> Places {
        let at = |port| SocketAddr::from(([10, 77, 0, 2], port));
        Places {
            one: "/t/one".into(),
            several: "/t/several".into(),
            incoming: "/t/incoming".into(),
            ssh: at(22),
            ssh_options: words(&["-i", "key"]),
            webdav: at(81),
            restic: at(82),
            url: "http://10.77.0.1:80/file".to_owned(),
        }
    }

    #[test]
    fn each_tool_has_its_limit_in_its_own_unit() {
        let own = |tool| {
            let words = Job { tool, several: false }.limit(5_000_000);
            words.join(" ")
        };
        let expected = [
            "--bwlimit 610",
            "--bwlimit 625000B",
            "--limit-upload 610",
            "-l 5000",
            "--limit-rate 625000",
            "--limit-rate=625000",
        ];
        assert_eq!(Tool::ALL.map(own), expected);
    }

    #[test]
    fn one_copy_is_one_command() {
        let words = |tool, own| Job { tool, several: false }.command(&places(), own).join(" ");
        assert_eq!(
            words(Tool::Rsync, Some(8_192_000)),
            "rsync --whole-file -e ssh -p 22 -i key --bwlimit 1000 /t/one/file0 \
             root@10.77.0.2:/t/incoming/"
        );
        assert_eq!(
            words(Tool::Scp, None),
            "scp -q -P 22 -i key /t/one/file0 root@10.77.0.2:/t/incoming/"
        );
        assert_eq!(
            words(Tool::Restic, None),
            "restic --no-cache -r rest:http://10.77.0.2:82/ -o rest.connections=1 backup --quiet \
             /t/one"
        );
    }

    #[test]
    fn several_copies_are_connections_or_processes() {
        let several = |tool| Job { tool, several: true };
        let at_once = Tool::ALL.map(|tool| several(tool).at_once());
        let (connections, processes) = ("4 connections", "4 processes");
        let expected = [processes, connections, connections, processes, connections, processes];
        assert_eq!(at_once, expected);

        let curl = several(Tool::Curl).command(&places(), Some(8_000_000));
        assert_eq!(curl.iter().filter(|word| **word == places().url).count(), SEVERAL);
        let wget = several(Tool::Wget).command(&places(), Some(8_000_000));
        assert_eq!(&wget[..2], ["bash", "-c"]);
        assert_eq!(wget[2].matches("'--limit-rate=1000000' ").count(), SEVERAL);
        let scp = several(Tool::Scp).command(&places(), None);
        assert!((0..SEVERAL).all(|n| scp[2].contains(&format!("'/t/several/file{n}'"))), "{scp:?}");
    }

    #[test]
    fn a_word_stays_one_word() {
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
