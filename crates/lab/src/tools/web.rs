//! A real web server and a real client: nginx serving one file, and curl fetching it.

use std::{
    fs::{self, File},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::testbed::{self, Child, Finished, Site, wait_for_listener};

/// The name of the file that is served.
const FILE: &str = "file";
/// The path of the file in a request.
pub const PATH: &str = "/file";
/// How long the first byte may take.
const CONNECT_S: u64 = 10;

/// A running nginx, with a directory of its own. Dropping it ends nginx and removes the directory.
#[derive(Debug)]
pub struct WebServer {
    // Before the directory that it uses.
    nginx: Child,
    address: SocketAddr,
    file_bytes: u64,
    _prefix: TempDir,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Fetched {
    /// Size of the body.
    pub bytes: u64,
    /// From start to the last byte, connecting included.
    pub seconds: f64,
    /// Body per second, from start to end.
    pub goodput_bit_s: f64,
}

/// The fields of `curl --write-out %{json}` that count.
#[derive(Debug, Deserialize)]
struct CurlReport {
    http_code: u32,
    size_download: f64,
    time_total: f64,
}

impl WebServer {
    /// Starts nginx at `site`, serving a file of `file_bytes` zeros at [`PATH`].
    pub fn start<'a>(
        site: impl Into<Site<'a>>,
        address: SocketAddr,
        file_bytes: u64,
    ) -> anyhow::Result<Self> {
        let site = site.into();
        let prefix = tempfile::Builder::new().prefix("tidegate-nginx-").tempdir()?;
        fs::create_dir(prefix.path().join("www"))?;
        // Sparse: costs no disk.
        File::create(prefix.path().join("www").join(FILE))?.set_len(file_bytes)?;
        fs::write(prefix.path().join("nginx.conf"), config(address))?;

        let mut command = testbed::command(site, "nginx")?;
        command.arg("-p").arg(prefix.path()).args(["-c", "nginx.conf", "-e", "stderr"]);
        let mut nginx = Child::spawn(command)?;
        wait_for_listener(site.netns, address.port(), &mut nginx)?;
        Ok(Self { nginx, address, file_bytes, _prefix: prefix })
    }

    /// Ends nginx, and returns what it and its runner wrote.
    pub fn stop(self) -> anyhow::Result<Finished> {
        self.nginx.stop()
    }

    /// The process id of nginx, which is a single process, or of its runner.
    pub fn pid(&self) -> u32 {
        self.nginx.pid()
    }

    /// Where the file is.
    pub fn url(&self) -> String {
        format!("http://{}/{FILE}", self.address)
    }

    /// Starts a fetch of the whole file at `site`; [`finish_fetch`](Self::finish_fetch) waits for it.
    pub fn start_fetch<'a>(&self, site: impl Into<Site<'a>>) -> anyhow::Result<Child> {
        let mut command = testbed::command(site, "curl")?;
        // No file of the user's, no proxy of the environment.
        command.args(["--disable", "--silent", "--show-error", "--globoff", "--noproxy", "*"]);
        command.args(["--connect-timeout", &CONNECT_S.to_string()]);
        command.args(["--output", "/dev/null", "--write-out", "%{json}"]).arg(self.url());
        Child::spawn(command)
    }

    /// Waits for a fetch, and checks that all came.
    pub fn finish_fetch(&self, curl: Child, within: Duration) -> anyhow::Result<Fetched> {
        let fetched = parse(&curl.finish(within)?.stdout)?;
        ensure!(
            fetched.bytes == self.file_bytes,
            "curl got {} of {} bytes",
            fetched.bytes,
            self.file_bytes
        );
        Ok(fetched)
    }
}

fn parse(json: &str) -> anyhow::Result<Fetched> {
    let report: CurlReport = serde_json::from_str(json).context("cannot read curl's report")?;
    ensure!(report.http_code == 200, "the server answered {}", report.http_code);
    ensure!(report.time_total > 0.0, "curl took no time");
    Ok(Fetched {
        bytes: report.size_download as u64,
        seconds: report.time_total,
        goodput_bit_s: report.size_download * 8.0 / report.time_total,
    })
}

/// One process in the foreground, everything below the prefix. Files are sent as Debian's configuration has
/// it; a connection that is kept is kept for any number of requests.
fn config(address: SocketAddr) -> String {
    format!(
        "daemon off;\n\
         master_process off;\n\
         pid nginx.pid;\n\
         worker_rlimit_nofile 8192;\n\
         events {{ worker_connections 4096; }}\n\
         http {{\n\
         \x20   access_log off;\n\
         \x20   sendfile on;\n\
         \x20   tcp_nopush on;\n\
         \x20   keepalive_requests 1000000000;\n\
         \x20   client_body_temp_path body;\n\
         \x20   proxy_temp_path proxy;\n\
         \x20   fastcgi_temp_path fastcgi;\n\
         \x20   uwsgi_temp_path uwsgi;\n\
         \x20   scgi_temp_path scgi;\n\
         \x20   server {{ listen {address}; root www; }}\n\
         }}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_curl_is_read() {
        let json = r#"{"http_code":200,"size_download":1000000,"speed_download":8000000,
            "time_total":0.125,"time_starttransfer":0.001,"url":"http://x/"}"#;
        let fetched = parse(json).unwrap();
        assert_eq!((fetched.bytes, fetched.goodput_bit_s), (1_000_000, 64e6));
        assert!(parse(&json.replace("200", "404")).is_err());
        assert!(parse("curl: (7)").is_err());
    }

    #[test]
    fn the_configuration_takes_both_families() {
        assert!(config("10.0.0.1:80".parse().unwrap()).contains("listen 10.0.0.1:80;"));
        assert!(config("[fd77::1]:80".parse().unwrap()).contains("listen [fd77::1]:80;"));
    }
}
